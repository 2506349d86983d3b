"""`--resume`: ours, not Hydra's, and so taken out of the command line before Hydra looks.

fedhet -m --resume results/2026-11-21_10-00-00_sweep     # the words are in its sweep.json
fedhet -m --resume strategy=fedavg,scaffold seed=0,1     # the newest sweep of the same words
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conf import quoted
from fedhet.sweep.sweep_folder import SweepFolder, SweepRefused

_FLAG = "--resume"
_SWEEP_DIR = "hydra.sweep.dir"
# How the jobs are started is not what the sweep is.
_HOW = ("hydra/launcher", "hydra.launcher", "runtime", "device", _SWEEP_DIR)

_resuming = False


def resuming() -> bool:
    """Return whether this process was told to go on with a sweep."""
    return _resuming


def take_resume(words: Sequence[str]) -> list[str]:
    """Return the command line as Hydra is to see it, and remember whether ``--resume`` was in it.

    Args:
        words: the command line without the program's name.

    Raises:
        SweepRefused: if there is no such sweep to go on with.
    """
    global _resuming
    rest, folder = _split(words)
    _resuming = len(rest) != len(words)
    if not _resuming:
        return rest
    if not any(word in ("-m", "--multirun") for word in rest):
        raise SweepRefused(
            "--resume goes on with a sweep: fedhet -m --resume FOLDER; one run goes on with: "
            "fedhet ... results_dir=FOLDER resume=true"
        )
    typed = [word for word in rest if _is_override(word)]
    path = folder or _given_folder(typed) or _newest_of(typed)
    saved = SweepFolder(path).read().overrides
    return [*_merged(saved, rest), f"{_SWEEP_DIR}={quoted(str(path.absolute()))}"]


def key_of(word: str) -> str:
    """Return the key of an override."""
    return word.partition("=")[0].lstrip("+~")


def _split(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the words without --resume, and the folder that was given with it."""
    rest, folder = [], None
    waiting = False
    for word in words:
        if waiting and not word.startswith("-") and "=" not in word:
            folder = Path(word)
        elif word.startswith(f"{_FLAG}="):
            folder = Path(word.removeprefix(f"{_FLAG}="))
        elif word != _FLAG:
            rest.append(word)
        waiting = word == _FLAG
    return rest, folder


def _given_folder(typed: Sequence[str]) -> Path | None:
    given = [word.partition("=")[2] for word in typed if key_of(word) == _SWEEP_DIR]
    return Path(given[-1].strip("'\"")) if given else None


def _newest_of(typed: Sequence[str]) -> Path:
    """Return the newest sweep below results/ that was started with the same words."""
    wanted = _what(typed)
    found = []
    for index in Path.cwd().glob("results/*/sweep.json"):
        try:
            sweep = SweepFolder(index.parent).read()
        except SweepRefused:  # of another version
            continue
        if _what(sweep.overrides) == wanted:
            found.append((sweep.began, index.parent))
    if not found:
        raise SweepRefused(
            f"no sweep below {Path.cwd() / 'results'} was started with these words: "
            f"{' '.join(typed) or '(none)'}; name its folder: fedhet -m --resume FOLDER"
        )
    return max(found)[1]


def _what(words: Sequence[str]) -> set[str]:
    return {word for word in words if not key_of(word).startswith(_HOW)}


def _merged(saved: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return all words; one that is typed now goes before the saved one of the same key."""
    typed = [word for word in rest if _is_override(word)]
    flags = [word for word in rest if not _is_override(word)]  # and what belongs to them
    now = {key_of(word) for word in typed} | {_SWEEP_DIR}
    kept = [word for word in saved if key_of(word) not in now]
    return [*flags, *kept, *(word for word in typed if key_of(word) != _SWEEP_DIR)]


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))
