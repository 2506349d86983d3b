"""Concurrent jobs on one machine: each has its own part of the CPUs and GPUs.

A launcher that runs n jobs at once starts each as if it had the machine to itself, and so does Ray
in every one of them. Here a job takes a free slot k of n, a lock file, and with it the k-th part:
by CPU affinity, which torch, the processes that it starts and our own engine look at, and by
CUDA_VISIBLE_DEVICES. Where there are fewer CPUs than jobs, the jobs beyond wait for a free slot:
sharing a CPU would make all of them slower and none ready sooner.
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

from fedhet.runtimes.resources import gpu_names

_Value = TypeVar("_Value")

_POLL_SECONDS = 0.1
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Machine:
    """What there is to divide.

    Attributes:
        cpus: their numbers, those that share a core side by side.
        quota: how many of them may be busy at once (a container may have fewer than it sees).
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


def jobs_at_once(launcher: Mapping[str, Any], together: int | None, cpus: int) -> int:
    """Return how many jobs a Hydra launcher runs at once on this machine; 1: nothing is divided.

    Slurm gives each job CPUs and GPUs of its own, so there nothing is left to divide.

    Args:
        launcher: the node hydra.launcher.
        together: how many jobs the launcher is handed at once; None if nobody knows.
        cpus: of this machine.
    """
    kind = _kind_of(launcher)
    if kind == "JoblibLauncher":
        wanted = int(launcher.get("n_jobs") or 1)
        at_once = wanted if wanted > 0 else max(1, cpus + 1 + wanted)
    elif kind == "LocalLauncher":  # submitit's: all of them
        at_once = together or cpus
    elif kind == "RayLauncher":
        at_once = max(1, int(cpus / float(launcher["ray"]["remote"].get("num_cpus") or 1)))
    else:
        at_once = 1
    return min(at_once, together) if together else at_once


def machine_for(launcher: Mapping[str, Any]) -> Machine:
    """Return what this process may use, and what of it is to be divided.

    Ray has divided the GPUs already (hydra.launcher.ray.remote.num_gpus).
    """
    cpus = _by_core(sorted(_affinity()))
    gpus = [] if _kind_of(launcher) == "RayLauncher" else list(gpu_names())
    return Machine(cpus, min(len(cpus), _quota()), gpus)


def parts(machine: Machine, jobs: int) -> list[Slot]:
    """Divide a machine among so many jobs, or fewer: each has a CPU at least."""
    count = max(1, min(jobs, machine.quota))
    cpus = [_part(machine.cpus, k, count) for k in range(count)]
    quotas = [len(_part(range(machine.quota), k, count)) for k in range(count)]
    gpus = [_part(machine.gpus, k, count) for k in range(count)]
    jobs_per_gpu = 1
    if 0 < len(machine.gpus) < count:
        gpus = [[machine.gpus[k % len(machine.gpus)]] for k in range(count)]
        jobs_per_gpu = math.ceil(count / len(machine.gpus))
    return [Slot(cpus[k], quotas[k], gpus[k], jobs_per_gpu) for k in range(count)]


@contextmanager
def free_slot(folder: Path, slots: Sequence[Slot]) -> Iterator[Slot]:
    """Wait for a slot that no other job has, and keep this process to it.

    Args:
        folder: of the lock files; the same for all jobs that share a machine's slots.
        slots: the parts of this machine, the same for all of them.
    """
    own = folder / socket.gethostname()  # the folder may be shared by machines
    own.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(own / f"{k}.lock") for k in range(len(slots))]
    k = _acquire_one(locks)
    try:
        with _confined(slots[k]):
            yield slots[k]
    finally:
        locks[k].release()


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
    affinity = _affinity()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, slot.cpus)
        if slot.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
        yield
    finally:  # the launcher's process goes on to other jobs
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, affinity)
        if slot.gpus and visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif slot.gpus and visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _kind_of(launcher: Mapping[str, Any]) -> str:
    return str(launcher.get("_target_")).rpartition(".")[2]


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
    """Sort CPUs so that a part of them has whole cores: the second threads have high numbers."""

    def place(cpu: int) -> tuple[int, int, int]:
        topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
        try:
            package = int((topology / "physical_package_id").read_text(encoding="ascii"))
            core = int((topology / "core_id").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return (0, 0, cpu)
        return (package, core, cpu)

    return sorted(cpus, key=place)


def _part(values: Sequence[_Value], k: int, count: int) -> Sequence[_Value]:
    """Return the k-th of ``count`` parts that differ by one in length at most."""
    length, longer = divmod(len(values), count)
    start = k * length + min(k, longer)
    return values[start : start + length + (k < longer)]
