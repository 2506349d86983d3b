"""A page of commands as a reader does it: every command and file, and the output that it shows.

A fenced block is a file, which has a title="path"; commands, which are bash without a title; or
text, which the commands above it print, shortened. All of it is one script, since a reader has one
terminal, too.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.compose import DOCKER
from tests.processes import kill_all, marked
from tests.tunnel import stand_in_for_nginx

MARK = "FEDHET_WALKED_PAGE"  # in the environment of all that the script starts
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MARKER = "@@@ block at line "


class Block(NamedTuple):
    """A fenced block: its line in the file, language, title and content."""

    line: int
    language: str
    title: str | None
    content: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [
        Block(text.count("\n", 0, one.start()) + 1, *one.groups()) for one in FENCE.finditer(text)
    ]
    assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(found), (
        "a fence is something else"
    )
    return found


def commands_of(blocks: Sequence[Block]) -> list[Block]:
    return [block for block in blocks if block.language == "bash" and not block.title]


def script_of(blocks: Sequence[Block]) -> str:
    """Return the reader's doing as one script that stops at the first command that fails."""
    parts = ["set -eo pipefail\n"]
    for block in blocks:
        if block.title:
            end = f"END_OF_{block.line}"
            parts.append(f"cat > \"{block.title}\" <<'{end}'\n{block.content}{end}\n")
        elif block.language == "bash":
            parts.append(f"echo; echo '{MARKER}{block.line}'\n{block.content}")
    return "".join(parts)


def printed_by_block(printed: str, home: Path) -> dict[int, str]:
    """Return what the script printed by the line of the block; 0: before the first."""
    text = printed.replace(str(home), "~")
    first, *rest = text.split(f"\n{MARKER}")
    parts = [part.partition("\n") for part in rest]
    return {0: first} | {int(line): printed for line, _, printed in parts}


def gist(line: str) -> str:
    """Return a line without what differs from run to run: numbers, hashes, colours, widths."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"\b[0-9a-f]{32,}\b|_[0-9a-f]{8}\b|\d[\d.,:]*", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"[─━│╭╮╰╯┃]+", " ", line)).strip()


@dataclass(frozen=True)
class Walk:
    """Exit code, the project's folder, what each block printed, processes left."""

    code: int | None
    work: Path
    printed: dict[int, str]
    left: list[str]

    def summary(self, folder: str | Path) -> dict[str, Any]:
        return json.loads((self.work / folder / "summary.json").read_text(encoding="utf-8"))


def walk_of(
    blocks: Sequence[Block],
    home: Path,
    project: str,
    seconds: float,
    ports: Sequence[str],
    **more: str,
) -> Walk:
    """Do what a page says.

    Args:
        blocks: of the page.
        home: an empty folder; ~/fedhet becomes the reader's clone.
        project: the folder below it that the page works in.
        seconds: the whole script may take.
        ports: variables that name a free port each.
        more: the reader's other variables.
    """
    (home / "fedhet").mkdir()
    (home / "fedhet" / ".venv").symlink_to(sys.prefix)
    (home / "fedhet" / "docker").symlink_to(DOCKER)
    mark, log = uuid.uuid4().hex, home / "printed.txt"
    try:
        variables = environment(home, mark, ports) | more
        code = run_to_the_end(script_of(blocks), home, variables, log, seconds)
        left = marked(MARK, mark)
        _, left = psutil.wait_procs(left, timeout=20)  # what is about to end may do so
    finally:
        kill_all(partial(marked, MARK, mark))
    printed = printed_by_block(log.read_text(encoding="utf-8", errors="replace"), home)
    return Walk(code, home / project, printed, [str(p) for p in left])


def environment(home: Path, mark: str, ports: Sequence[str]) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("FEDHET_")}
    ours |= {
        "HOME": str(home),
        "PATH": f"{os.environ['PATH']}:{stand_in_for_nginx(home / 'bin')}",
        MARK: mark,
        "COLUMNS": "100",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    ours |= free_ports(ports, mark)
    for name in ("CLONE", "PYTHONPATH"):
        ours.pop(name, None)
    return ours


def free_ports(names: Sequence[str], seed: str) -> dict[str, str]:
    """Return free ports below those that the system gives to outgoing connections.

    The page uses them after a minute, in which another test's connection could take one of those.
    """
    draws, found = random.Random(seed), dict[str, str]()
    with contextlib.ExitStack() as stack:  # all open at once, so that no two are the same
        while len(found) < len(names):
            probe, port = stack.enter_context(socket.socket()), draws.randrange(10_000, 32_000)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found[names[len(found)]] = str(port)
    return found


def run_to_the_end(
    text: str, home: Path, variables: dict[str, str], log: Path, seconds: float
) -> int | None:
    """Run a script; return its exit code, None if it did not end in time."""
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-c", text],
            cwd=home,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return shell.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            return None


def check_every_block_is_run_written_or_compared(blocks: Sequence[Block]) -> None:
    assert [b.line for b in blocks if not (b.title or b.language in ("bash", "text"))] == []
    for before, block in pairwise(blocks):
        if block.language == "text":
            assert before in commands_of(blocks), f"line {block.line}: no commands print this"


def check_all_succeeded(walk: Walk, blocks: Sequence[Block], logs: Sequence[str]) -> None:
    """Check that every command has succeeded, and that nothing is left running."""
    paths = [walk.work / name for name in logs]
    tails = [path.read_text(errors="replace")[-1500:] for path in paths if path.exists()]
    last = max(walk.printed)
    said = f"in the block at line {last}:\n{walk.printed[last]}\n" + "\n---\n".join(tails)
    assert walk.code == 0, f"exit code {walk.code} {said}"
    assert list(walk.printed) == [0, *(block.line for block in commands_of(blocks))]
    assert walk.left == []


def check_printed(walk: Walk, blocks: Sequence[Block]) -> None:
    """Compare line by line, in this order, whatever the numbers; lines may be left out."""
    for before, block in pairwise(blocks):
        if block.language != "text":
            continue
        printed = iter([gist(line) for line in walk.printed[before.line].splitlines()])
        for line in block.content.splitlines():
            if line.strip() not in ("", "..."):
                found = any(gist(line) in other for other in printed)  # goes on after the last one
                assert found, f"{line!r} is not in, or not there in\n{walk.printed[before.line]}"
