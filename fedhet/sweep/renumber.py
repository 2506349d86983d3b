"""A resumed sweep with other values: its jobs keep their folders under their new numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.run_events import RECORD_FILE
from fedhet.sweep.resume import Plan, key_of, make_ready
from fedhet.sweep.sweep_folder import SweepFolder

Entries = dict[int, dict[str, Any]]  # of sweep.json, by number


def renumber(
    folder: SweepFolder, entries: Entries, jobs: Sequence[Sequence[str]], varied: Collection[str]
) -> Entries:
    """Return the entries of an earlier call under the numbers that their jobs have now.

    ``jobs`` holds the words of each job in order, ``varied`` the keys that tell them apart. The
    folders, whose names begin with the number, are renamed, but not that of a deployment: its
    server may still write to it. A job without a match keeps its number, unless another needs it.
    """
    if not all(_is_entry(entry) for entry in entries.values()):
        raise ConfigError(
            f"{folder.index_path} is not the index of a sweep: each of its jobs must have "
            "overrides that are words, and a folder that is a name"
        )
    told_by = {key.lstrip("+") for key in varied} | _varied_keys(entries)
    earlier = {_those_of(entry["overrides"], told_by): n for n, entry in entries.items()}
    now = {_those_of(words, told_by): number for number, words in enumerate(jobs)}
    moves = {
        earlier[words]: number
        for words, number in now.items()
        if words in earlier and earlier[words] != number
    }
    deployed = {n for n in moves if (folder.path / entries[n]["folder"] / RECORD_FILE).exists()}
    moves = {old: new for old, new in moves.items() if old not in deployed}
    if not moves:
        return entries
    names = {old: _renamed(entries[old]["folder"], old, new) for old, new in moves.items()}
    _rename(folder, {entries[old]["folder"]: name for old, name in names.items()})
    taken = {*moves, *moves.values()}
    kept = {number: entry for number, entry in entries.items() if number not in taken}
    moved = {
        new: {**entries[old], "number": new, "folder": names[old]} for old, new in moves.items()
    }
    return dict(sorted((kept | moved).items()))


def _is_entry(job: Mapping[str, Any]) -> bool:
    words, folder = job.get("overrides"), job.get("folder")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return False
    return isinstance(folder, str) and folder not in ("", ".", "..") and "/" not in folder


def _varied_keys(entries: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """Return the keys of which the jobs have more than one word."""
    words = {word for entry in entries.values() for word in entry["overrides"]}
    keys = [key_of(word) for word in words]
    return {key for key in keys if keys.count(key) > 1}


def _those_of(words: Sequence[str], keys: Collection[str]) -> frozenset[str]:
    return frozenset(word for word in words if key_of(word) in keys)


def _renamed(name: str, old: int, new: int) -> str:
    number, line, rest = name.partition("_")
    return f"{new}{line}{rest}" if number == str(old) else name


def _rename(folder: SweepFolder, names: Mapping[str, str]) -> None:
    """Rename folders, of which some may have the name that another gets."""
    there = {old: new for old, new in names.items() if old != new and (folder.path / old).is_dir()}
    aside = folder.path / "replaced"  # where they are found if this is cut short
    aside.mkdir(exist_ok=True)
    for old, new in there.items():
        (folder.path / old).rename(aside / f"renamed_{new}")
    for new in there.values():
        if (folder.path / new).exists():  # of a job that is no more
            make_ready(folder.path / new, Plan.REPLACE)
        (aside / f"renamed_{new}").rename(folder.path / new)
    if not any(aside.iterdir()):
        aside.rmdir()
