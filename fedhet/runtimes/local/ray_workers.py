"""Workers as Ray actors, on one machine or on all nodes of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

import ray
from flwr.app import ArrayRecord
from flwr.common.logger import log
from ray.exceptions import RayActorError

from fedhet.conf.project import find_modules_in
from fedhet.runtimes.local.protocol import Answer, Lost, Place, WorkerTask
from fedhet.runtimes.local.worker import ClientWorker
from fedhet.runtimes.resources import even_share
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold

_START_SECONDS = 300.0  # for the first actor: a busy node may import torch from a cold disk
_STRAGGLER_SECONDS = 20.0  # for the others: a busy cluster may have no room for them


class RayWorkers:
    """Warm actors, as many as fit into the cluster and a cohort can use.

    A placed record is in Ray's object store, once on every node that reads it.

    Args:
        most: the largest number of actors.
        client_cpus: CPUs that Ray reserves for each.
        client_gpus: share of a GPU for each; None: the share that keeps all CPUs busy, if any GPUs.
        shared_folder: folder with the clients' state, which every actor must see; or None.
        address: the cluster's; None starts our own Ray, which ends with this process.
        num_cpus: CPUs of our own Ray; None: all of this machine.
    """

    def __init__(
        self,
        most: int,
        client_cpus: int,
        client_gpus: float | None,
        shared_folder: Path | None = None,
        address: str | None = None,
        num_cpus: int | None = None,
    ) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        own = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
        ray.init(**({"address": address} if address else own), **quiet)
        self._folder = shared_folder
        fit, gpus = _capacity(client_cpus, client_gpus)
        self._make = ray.remote(RayWorker).options(
            num_cpus=client_cpus, num_gpus=gpus, scheduling_strategy="SPREAD"
        )
        self._pending: dict[Any, int] = {}
        self._actors, self.nodes = self._start(min(most, fit))
        log(INFO, "Ray: %s workers on %s nodes", len(self), len(set(self.nodes)))

    def __len__(self) -> int:
        """Return the number of actors."""
        return len(self._actors)

    def place(self, record: ArrayRecord | FoldSettings) -> Place:
        """Put a record or the settings of a fold into Ray's object store."""
        return ray.put(record)

    def forget(self) -> None:
        """Do nothing: Ray counts the references to an object."""

    def send(self, worker: int, tasks: Sequence[WorkerTask]) -> None:
        """Give an actor tasks."""
        self._pending[self._actors[worker].handle.remote(tasks)] = worker

    def collect(self, workers: Sequence[int]) -> tuple[Sequence[ReplyFold], Mapping[int, Lost]]:
        """Return the sum of idle actors' folds, made in a tree, and the lost actors.

        If an actor is lost meanwhile, return the others' folds one by one.
        """
        folds = {worker: self._actors[worker].collect.remote() for worker in workers}
        level = list(folds.items())
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            merged = [
                (worker, self._actors[worker].merge.remote(fold, other))
                for (worker, fold), (_, other) in pairs
            ]
            level = merged + level[2 * len(merged) :]
        try:
            return [ray.get(fold) for _, fold in level], {}
        except RayActorError:
            return self._collect_each(folds)

    def _collect_each(
        self, folds: Mapping[int, Any]
    ) -> tuple[Sequence[ReplyFold], Mapping[int, Lost]]:
        found, lost = [], {}
        for worker, fold in folds.items():
            try:
                found.append(ray.get(fold))
            except RayActorError as error:
                lost[worker] = self._lost(worker, error)
        return found, lost

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Sequence[Answer] | Lost]]:
        """Return the answers to at most one ``send`` per actor."""
        first: dict[int, Any] = {}
        for reference, worker in self._pending.items():
            first.setdefault(worker, reference)
        pending = list(first.values())
        ready, _ = ray.wait(pending, num_returns=1, timeout=timeout)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return [self._read(reference) for reference in ready]

    def replace(self, worker: int, reason: str) -> bool:
        """End an actor at once and start another on any node with room."""
        log(WARNING, "worker %s is replaced: %s", worker, reason)
        ray.kill(self._actors[worker])
        self._pending = {ref: other for ref, other in self._pending.items() if other != worker}
        try:
            [self._actors[worker]], _ = self._start(1)
        except RuntimeError as error:
            log(WARNING, "the run continues without worker %s: %s", worker, error)
            return False
        return True

    def close(self) -> None:
        """End the actors, and our own Ray."""
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()

    def _start(self, count: int) -> tuple[list[Any], list[str]]:
        """Start actors; return those that have started, and their nodes."""
        started: list[Any] = [self._make.remote(os.getcwd()) for _ in range(count)]
        answers = {actor.register.remote(self._folder): actor for actor in started}
        ready, _ = ray.wait(list(answers), num_returns=1, timeout=_START_SECONDS)
        if not ready:
            raise RuntimeError(f"Ray has started no actor within {_START_SECONDS:.0f} s")
        ready, late = ray.wait(list(answers), num_returns=count, timeout=_STRAGGLER_SECONDS)
        for answer in late:
            ray.kill(answers[answer])
        nodes = []
        for node, sees_folder in ray.get(ready):
            if not sees_folder:
                raise RuntimeError(
                    f"the Ray node {node} does not see results_dir={self._folder}, which has the "
                    "clients' state: put it on a disk that all nodes share, or set "
                    "runtime.simulation=false, which sends the state with the messages"
                )
            nodes.append(str(node))
        return [answers[answer] for answer in ready], nodes

    def _read(self, reference: Any) -> tuple[int, Sequence[Answer] | Lost]:
        worker = self._pending.pop(reference)
        try:
            answer = ray.get(reference)
        except RayActorError as error:
            return worker, self._lost(worker, error)
        assert isinstance(answer, list)
        return worker, answer

    def _lost(self, worker: int, error: RayActorError) -> Lost:
        reason = f"its Ray actor died: {str(error).splitlines()[0]}"
        return Lost(reason, self.replace(worker, reason))


class RayWorker(ClientWorker):
    """The actor; it finds the user's modules in the launcher's current folder."""

    def __init__(self, folder: str) -> None:
        find_modules_in(folder)
        super().__init__(lambda place: ray.get(cast("ray.ObjectRef[ArrayRecord]", place)))

    def merge(self, fold: ReplyFold, other: ReplyFold) -> ReplyFold:
        """Return the sum of both as a new object, because Ray's objects are read-only."""
        total = ReplyFold(fold.settings)
        total.merge(fold)
        total.merge(other)
        return total

    def register(self, folder: Path | None) -> tuple[str, bool]:
        """Return this actor's node, and whether it sees the folder."""
        node = ray.get_runtime_context().get_node_id()
        return node, folder is None or folder.is_dir()


def _capacity(cpus: int, gpus: float | None) -> tuple[int, float]:
    """Return the number of actors that fit into the cluster, and each one's share of a GPU."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = [node["Resources"] for node in alive]
    fit = [int(node.get("CPU", 0) // cpus) for node in nodes]
    there = [node.get("GPU", 0.0) for node in nodes]
    share = even_share(sum(there), sum(fit)) if gpus is None else gpus
    if share > 0:
        fit = [min(one, int(gpu / share)) for one, gpu in zip(fit, there, strict=True)]
    if sum(fit) == 0:
        raise RuntimeError(
            f"no client fits the Ray cluster: each needs {cpus} CPUs and {share} of a GPU "
            f"(runtime.client_cpus, runtime.client_gpus), and the nodes have {nodes}"
        )
    return sum(fit), share
