"""Divides a machine among concurrent jobs: each gets its own part of the CPUs and GPUs.

A Hydra launcher starts each of n jobs as if it had the machine to itself. Here a job takes a free
slot k of n, a lock file, and with it the k-th part of the machine, by CPU affinity and by
CUDA_VISIBLE_DEVICES. With fewer CPUs than jobs, the remaining jobs wait for a free slot.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from omegaconf import DictConfig

from fedhet.common.cpus import affinity, usable_cpus
from fedhet.common.errors import ConfigError
from fedhet.runtimes.resources import MOST_CLIENTS_A_GPU, gpu_names

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Slot:
    """One job's part of the machine."""

    cpus: Sequence[int]  # to run on
    num_cpus: int  # how many of them to keep busy
    gpus: Sequence[str]  # to use; empty without a GPU
    jobs_per_gpu: int  # how many jobs share each of them


def jobs_at_once(launcher: Mapping[str, Any], batch_size: int | None, cpus: int) -> int:
    """Return how many jobs of a batch a Hydra launcher runs at once on this machine (Slurm: 1)."""
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    at_once = 1
    if kind == "ForkLauncher":
        at_once = int(launcher.get("n_jobs") or 1)
    elif kind == "JoblibLauncher":
        wanted = int(launcher.get("n_jobs") or 1)
        at_once = wanted if wanted > 0 else max(1, cpus + 1 + wanted)
    elif kind == "LocalLauncher":  # submitit's starts all of them
        at_once = batch_size or cpus
    return min(at_once, batch_size) if batch_size else at_once


def divide(cpus: Sequence[int], num_cpus: int, gpus: Sequence[str], jobs: int) -> list[Slot]:
    """Divide CPUs and GPUs among so many jobs, or fewer: each slot has at least one CPU.

    ``num_cpus`` of the CPUs may be busy at once. A slot has every n-th CPU, and so both threads of
    a core, whose numbers are mostly half of all CPUs apart.
    """
    count = max(1, min(jobs, num_cpus))
    shared = 0 < len(gpus) < count
    return [
        Slot(
            cpus=cpus[k::count],
            num_cpus=len(range(k, num_cpus, count)),
            gpus=[gpus[k % len(gpus)]] if shared else gpus[k::count],
            jobs_per_gpu=math.ceil(count / len(gpus)) if shared else 1,
        )
        for k in range(count)
    ]


def slots_of_machine(jobs: int) -> list[Slot]:
    """Divide what this process may use among so many jobs."""
    return divide(sorted(affinity()), usable_cpus(), gpu_names(), jobs)


@lru_cache(maxsize=1)  # looking stops the processes for a moment
def memory_has_room(pids: tuple[int, ...]) -> bool:
    """Return whether the memory has room for twice what each of these jobs has of its own."""
    return psutil.virtual_memory().available > 2 * max(map(_own_memory, pids))


def _own_memory(pid: int) -> int:
    """Return the bytes that a job's processes share with no other process."""
    with suppress(psutil.Error):  # it is ending
        job = psutil.Process(pid)
        processes = [job, *job.children(recursive=True)]
        return sum(int(process.memory_full_info().uss) for process in processes)
    return 0


@contextmanager
def free_slot(folder: Path, slots: Sequence[Slot]) -> Iterator[Slot]:
    """Wait for a slot that no other job has, and keep this process to it; its lock is a file."""
    own = folder / socket.gethostname()  # machines may share the folder
    own.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(own / f"{k}.lock") for k in range(len(slots))]
    k = _acquire_one(locks)
    try:
        with _confined(slots[k]):
            yield slots[k]
    finally:
        locks[k].release()


def limit_recipe(recipe: DictConfig, slot: Slot) -> None:
    """Set the CPUs and the GPU shares of a recipe's runtime to those of its slot."""
    runtime = recipe.runtime
    if slot.num_cpus < int(runtime.client_cpus):
        raise ConfigError(
            f"runtime.client_cpus={runtime.client_cpus}, but so many jobs at once leave each "
            f"{slot.num_cpus} of this machine's CPUs: run fewer (hydra.launcher.n_jobs), or set "
            f"runtime.client_cpus={slot.num_cpus}"
        )
    runtime.num_cpus = min(int(runtime.num_cpus or slot.num_cpus), slot.num_cpus)
    if runtime.client_gpus is None and slot.jobs_per_gpu > 1:
        clients_at_once = max(1, runtime.num_cpus // int(runtime.client_cpus))
        share = max(1 / clients_at_once, slot.jobs_per_gpu / MOST_CLIENTS_A_GPU)
        runtime.client_gpus = int(min(1.0, share) * 10_000) / 10_000


def _acquire_one(locks: Sequence[FileLock]) -> int:
    while True:
        for k, lock in enumerate(locks):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue
            return k
        time.sleep(_POLL_SECONDS)


@contextmanager
def _confined(slot: Slot) -> Iterator[None]:
    """Keep this process to a slot for a while; a launcher's worker has other jobs later."""
    before = affinity()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, slot.cpus)
        if slot.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        yield
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, before)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
