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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from omegaconf import DictConfig

from common.errors import ConfigError
from fedhet.runtimes.resources import MOST_CLIENTS_A_GPU, gpu_names

_Value = TypeVar("_Value")

_POLL_SECONDS = 0.1
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Machine:
    """What this process may use.

    Attributes:
        cpus: their numbers, those of a core side by side.
        quota: how many of them may be busy at once, as in a container.
        gpus: as CUDA_VISIBLE_DEVICES names them.
    """

    cpus: Sequence[int]
    quota: int
    gpus: Sequence[str]


@dataclass(frozen=True)
class Slot:
    """One job's part of the machine.

    Attributes:
        cpus: to run on.
        num_cpus: how many of them to keep busy.
        gpus: to use; empty without a GPU.
        jobs_per_gpu: how many jobs share each of them.
    """

    cpus: Sequence[int]
    num_cpus: int
    gpus: Sequence[str]
    jobs_per_gpu: int


def jobs_at_once(launcher: Mapping[str, Any], batch_size: int | None, cpus: int) -> int:
    """Return how many jobs a Hydra launcher runs at once on this machine.

    It is 1 for Slurm, which gives each job CPUs and GPUs of its own.

    Args:
        launcher: the node hydra.launcher.
        batch_size: how many jobs the launcher is handed at once; None if unknown.
        cpus: of this machine.
    """
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    at_once = 1
    if kind == "JoblibLauncher":
        wanted = int(launcher.get("n_jobs") or 1)
        at_once = wanted if wanted > 0 else max(1, cpus + 1 + wanted)
    elif kind == "LocalLauncher":  # submitit's starts all of them
        at_once = batch_size or cpus
    return min(at_once, batch_size) if batch_size else at_once


def this_machine() -> Machine:
    """Return what this process may use."""
    cpus = _by_core(sorted(_affinity()))
    return Machine(cpus, min(len(cpus), _quota()), gpu_names())


def divide(machine: Machine, jobs: int) -> list[Slot]:
    """Divide a machine among so many jobs, or fewer: each slot has at least one CPU."""
    count = max(1, min(jobs, machine.quota))
    shared = 0 < len(machine.gpus) < count
    jobs_per_gpu = math.ceil(count / len(machine.gpus)) if shared else 1
    slots = []
    for k in range(count):
        gpus = _part(machine.gpus, k, count)
        if shared:
            gpus = [machine.gpus[k % len(machine.gpus)]]
        num_cpus = len(_part(range(machine.quota), k, count))
        slots.append(Slot(_part(machine.cpus, k, count), num_cpus, gpus, jobs_per_gpu))
    return slots


@contextmanager
def free_slot(folder: Path, slots: Sequence[Slot]) -> Iterator[Slot]:
    """Wait for a slot that no other job has, and keep this process to it.

    Args:
        folder: of the lock files, the same for all jobs of a sweep.
        slots: the parts of this machine, the same for all of them.
    """
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
    """Set the CPUs and the GPU shares of a recipe's runtime to those of its slot.

    Raises:
        ConfigError: if a client needs more CPUs than the slot has.
    """
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
    affinity = _affinity()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, slot.cpus)
        if slot.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        yield
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, affinity)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _quota() -> int:
    """Return how many CPUs the control group may keep busy, at least 1."""
    try:
        allowed, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return max(1, math.ceil(int(allowed) / int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return os.cpu_count() or 1


def _by_core(cpus: Sequence[int]) -> list[int]:
    """Sort CPUs so that the two threads of a core are side by side: a part has whole cores."""

    def place(cpu: int) -> list[int]:
        folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
        try:
            return [int((folder / name).read_text()) for name in ("physical_package_id", "core_id")]
        except (OSError, ValueError):
            return [0, 0]

    return sorted(cpus, key=lambda cpu: (*place(cpu), cpu))


def _part(values: Sequence[_Value], k: int, count: int) -> Sequence[_Value]:
    """Return the k-th of ``count`` parts, whose lengths differ by at most one."""
    length, longer = divmod(len(values), count)
    start = k * length + min(k, longer)
    return values[start : start + length + (k < longer)]
