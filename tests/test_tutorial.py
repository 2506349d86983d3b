"""docs/tutorial.md as a reader does it: every command and file, and the output that it shows.

A fenced block is a file, which has a title="path"; commands, which are bash without a title; or
text, which the commands above it print, shortened. All of it is one script, since a reader has one
terminal, too.
"""

import contextlib
import json
import os
import re
import shutil
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
import pytest

from fedhet.common.results import read_rows
from fedhet.tools.new import TEMPLATE
from tests.processes import kill_all, marked

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 420  # of the whole script; it takes about a minute on 2 idle cores
MARK = "FEDHET_TUTORIAL_TEST"  # in the environment of all that the script starts

PROGRAMS = ("openssl", "ssh-keygen")  # that its reader needs

pytestmark = [
    pytest.mark.timeout(SECONDS + 80),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)), reason=f"not all of {PROGRAMS} are installed"
    ),
]
TUTORIAL = ROOT / "docs" / "tutorial.md"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MARKER = "@@@ block at line "


class Block(NamedTuple):
    """A fenced block: its line in the file, language, title and content."""

    line: int
    language: str
    title: str | None
    content: str


def blocks() -> list[Block]:
    text = TUTORIAL.read_text(encoding="utf-8")
    found = [
        Block(text.count("\n", 0, one.start()) + 1, *one.groups()) for one in FENCE.finditer(text)
    ]
    assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(found), (
        "a fence is something else"
    )
    return found


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


BLOCKS = blocks()
COMMANDS = [block for block in BLOCKS if block.language == "bash" and not block.title]


def test_the_files_that_fedhet_new_has_written_are_shown_as_they_are():
    shown = [block for block in BLOCKS if block.title and (TEMPLATE / block.title).exists()]
    assert len(shown) == 3
    for block in shown:
        assert block.content == (TEMPLATE / block.title).read_text(encoding="utf-8"), block.title


def test_every_block_is_run_written_or_compared():
    assert [b.line for b in BLOCKS if not (b.title or b.language in ("bash", "text"))] == []
    for before, block in pairwise(BLOCKS):
        if block.language == "text":
            assert before in COMMANDS, f"line {block.line}: no commands print this"


@dataclass(frozen=True)
class Walk:
    """Exit code, the project's folder, what each block printed, processes left."""

    code: int | None
    work: Path
    printed: dict[int, str]
    left: list[str]

    def summary(self, folder: str | Path) -> dict[str, Any]:
        return json.loads((self.work / folder / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    home = tmp_path_factory.mktemp("home")
    (home / "fedhet").mkdir()
    (home / "fedhet" / ".venv").symlink_to(sys.prefix)
    mark, log = uuid.uuid4().hex, home / "printed.txt"
    try:
        code = run_to_the_end(script_of(BLOCKS), home, environment(home, mark), log)
        left = marked(MARK, mark)
        _, left = psutil.wait_procs(left, timeout=20)  # what is about to end may do so
    finally:
        kill_all(partial(marked, MARK, mark))
    printed = printed_by_block(log.read_text(encoding="utf-8", errors="replace"), home)
    return Walk(code, home / "my_project", printed, [str(p) for p in left])


def environment(home: Path, mark: str) -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("FEDHET_")}
    ours |= {
        "HOME": str(home),
        MARK: mark,
        "COLUMNS": "100",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    with contextlib.ExitStack() as stack:  # all open at once, so that no two are the same
        for name in ("FLEET_PORT", "CONTROL_PORT", "NORTH_PORT", "SOUTH_PORT"):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ours[name] = str(probe.getsockname()[1])
    for name in ("CLONE", "PYTHONPATH"):
        ours.pop(name, None)
    return ours


def run_to_the_end(text: str, home: Path, variables: dict[str, str], log: Path) -> int | None:
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
            return shell.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            return None


@pytest.mark.flower
def test_every_command_succeeds_and_nothing_is_left_running(walk):
    logs = [walk.work / name / "log.txt" for name in ("server", "north", "south")]
    tails = [path.read_text(errors="replace")[-1500:] for path in logs if path.exists()]
    last = max(walk.printed)
    said = f"in the block at line {last}:\n{walk.printed[last]}\n" + "\n---\n".join(tails)
    assert walk.code == 0, f"exit code {walk.code} {said}"
    assert list(walk.printed) == [0, *(block.line for block in COMMANDS)]
    assert walk.left == []


@pytest.mark.flower
def test_it_prints_what_the_text_says(walk):
    """Line by line and in this order, whatever the numbers; lines may be left out."""
    for before, block in pairwise(BLOCKS):
        if block.language != "text":
            continue
        printed = iter([gist(line) for line in walk.printed[before.line].splitlines()])
        for line in block.content.splitlines():
            if line.strip() not in ("", "..."):
                found = any(gist(line) in other for other in printed)  # goes on after the last one
                assert found, f"{line!r} is not in, or not there in\n{walk.printed[before.line]}"


@pytest.mark.flower
def test_the_run_learns_and_weight_zero_of_the_sweep_is_fedavg(walk):
    first = walk.summary("first")
    zero, one = (
        walk.summary(next(walk.work.glob(f"sweep/*_weight{weight}_*")).relative_to(walk.work))
        for weight in ("0", "0.1")
    )
    assert first["accuracy"] > 0.4
    names = [found["strategy"] for found in (first, zero, one)]
    assert names == ["fedavg", "keepfeatures", "keepfeatures"]
    assert first["parameters_sha256"] == zero["parameters_sha256"] != one["parameters_sha256"]
    assert first["fingerprint"]["code"] == zero["fingerprint"]["code"]  # of fedhet and my_project
    assert (walk.work / "first" / "plot.png").stat().st_size > 10_000


@pytest.mark.flower
def test_two_sites_that_share_no_class_learn_of_each_other(walk):
    summary = walk.summary("server/results")
    assert (summary["status"], summary["strategy"]) == ("completed", "keepfeatures+scaffold")
    assert summary["failures"] == 0
    assert summary["accuracy"] > 0.65  # the larger site's classes are 0.6 of the test images
    rows = read_rows(walk.work / "server" / "results" / "metrics.jsonl")
    assert [row["clients"] for row in rows[1:]] == [[0, 1]]
    for number, site in enumerate(("north", "south")):
        assert list((walk.work / site / "state").glob(f"*/client-{number:05}/*.safetensors"))
    assert not (walk.work / "server" / "results" / "client_state").exists()
