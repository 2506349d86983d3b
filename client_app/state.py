"""Stores of the client state: what a method keeps at the client between rounds, by version.

Each version is the state after a round; the server says which one a round starts from
(strategies/wire/client_versions.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Protocol

from flwr.app import RecordDict
from flwr.common.logger import log
from torch import Tensor

from fedhet.common.checksums import CLIENT_STATE
from fedhet.common.errors import ConfigError, DamagedFileError, UnreadableFileError
from fedhet.strategies.wire.records import to_record, to_tensors
from fedhet.strategies.wire.tensor_files import below, load_tensors, save_tensors

ClientState = dict[str, Mapping[str, Tensor]]


def require_state(state: Mapping[str, Mapping[str, Tensor]]) -> ClientState:
    """Return what the sides keep (``context.state``), if it can be stored and read again.

    Raises:
        ConfigError: if it is no mapping of tensors by name, or a name has a / or a comma, which
            separate names in files and messages.
    """
    for name, kept in state.items():
        if not isinstance(name, str) or not name or set(name) & set("/,"):
            raise ConfigError(
                f"context.state[{name!r}]: the name of what a client side keeps is a text without "
                "/ and comma"
            )
        plain = isinstance(kept, Mapping) and all(isinstance(key, str) for key in kept)
        if not plain or not all(isinstance(value, Tensor) for value in kept.values()):
            raise ConfigError(
                f"context.state[{name!r}] is a {type(kept).__name__}"
                f"{' with other values than tensors' if plain else ''}: what a client side keeps "
                'is tensors by name, such as {"count": torch.zeros(1)}'
            )
    return {name: kept for name, kept in state.items() if kept}  # a file has no empty ones


def grouped(tensors: Mapping[str, Tensor]) -> ClientState:
    """Return the state whose tensors a file has as ``name/tensor``."""
    names = dict.fromkeys(key.partition("/")[0] for key in tensors)
    return {name: below(f"{name}/", tensors) for name in names}


class ClientStateStore(Protocol):
    """Stores the versions of one client's state, by experiment."""

    def load(self, experiment: str, round: int) -> ClientState:
        """Return the state after ``round``; empty if there is none, as for round 0."""

    def save(self, experiment: str, round: int, state: ClientState, keep: Collection[int]) -> None:
        """Store the state after ``round``; delete all versions but it and those in ``keep``."""


class ContextStateStore:
    """Stores in Flower's ``Context.state``, as long as the run and the process live."""

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, experiment: str, round: int) -> ClientState:
        """Return the state after ``round``."""
        prefix = f"state/{experiment}/{round}/"
        return {
            name.removeprefix(prefix): to_tensors(record)
            for name, record in self.records.array_records.items()
            if name.startswith(prefix)
        }

    def save(self, experiment: str, round: int, state: ClientState, keep: Collection[int]) -> None:
        """Store the state after ``round`` and delete the versions not in ``keep``."""
        kept = tuple(f"state/{experiment}/{version}/" for version in {*keep, round})
        for name in [n for n in self.records.array_records if n.startswith("state/")]:
            if not name.startswith(kept):
                del self.records[name]
        for name, tensors in state.items():
            self.records[f"state/{experiment}/{round}/{name}"] = to_record(tensors)


class FolderStateStore:
    """Stores in a folder that outlives the process and the run.

    Files: ``<folder>/<experiment>/client-<id>/round-<t>.safetensors``, written atomically. A file
    that is damaged, or belongs to another client, round or run, is lost: it is renamed to
    ``round-<t>.damaged``. A file that cannot be read now stays, and the client misses the round.
    """

    def __init__(self, folder: Path, client_id: int) -> None:
        self.folder, self.client_id = folder, client_id

    def load(self, experiment: str, round: int) -> ClientState:
        """Return the state after ``round``."""
        path = self._path(experiment, round)
        try:
            os.stat(path)  # pathlib takes longer, and many methods keep no state
            tensors, _, _ = load_tensors(path, **self._label(experiment, round))
        except FileNotFoundError:
            return {}
        except UnreadableFileError:
            raise
        except DamagedFileError as error:
            damaged = path.replace(path.with_suffix(".damaged"))
            log(WARNING, "%s; it is now %s, and the state is lost", error, damaged.name)
            return {}
        return grouped(tensors)

    def save(self, experiment: str, round: int, state: ClientState, keep: Collection[int]) -> None:
        """Store the state after ``round`` and delete the versions not in ``keep``."""
        path = self._path(experiment, round)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # a client's own
        plain = {f"{name}/{key}": v for name, part in state.items() for key, v in part.items()}
        save_tensors(path, plain, self._label(experiment, round))
        kept = {*keep, round}
        for other in path.parent.glob("round-*.safetensors"):
            number = other.stem.removeprefix("round-")
            if number.isdecimal() and int(number) not in kept:
                other.unlink(missing_ok=True)

    def _label(self, experiment: str, round: int) -> dict[str, object]:
        return {
            "kind": CLIENT_STATE,
            "run": experiment,
            "client": self.client_id,
            "round": round,
        }

    def _path(self, experiment: str, round: int) -> Path:
        folder = _folder_of(self.folder, experiment)
        return Path(f"{folder}/client-{self.client_id:05d}/round-{round:06d}.safetensors")


@lru_cache(maxsize=64)  # asked for every message to a client
def _folder_of(folder: Path, experiment: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", experiment) or experiment.startswith("."):
        raise ConfigError(f"experiment={experiment!r} is no folder name")
    return folder / experiment
