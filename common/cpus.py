"""The CPUs that this process may use, and how many of them it may keep busy."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def affinity() -> set[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """Return how many CPUs this process may keep busy at once; at least 1.

    A container or a systemd service may see all CPUs of a machine, but have a quota of only a few.
    Then more threads or workers than the quota wait for each other.
    """
    return min([len(affinity()), *map(_quota, _groups())])


def _groups() -> list[Path]:
    """Return the folders of this process's control groups for CPUs, and of their parent groups."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        if not controllers:  # version 2
            found += [_GROUPS / one for one in (own, *own.parents)]
        elif "cpu" in controllers.split(","):
            found += [_GROUPS / "cpu" / one for one in (own, *own.parents)]
    return found


def _quota(group: Path) -> int:
    """Return how many CPUs a control group may keep busy, rounded up; very many without a limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            text = " ".join((group / name).read_text(encoding="ascii") for name in names)
            allowed, period = map(int, text.split())
            if allowed > 0:
                return math.ceil(allowed / period)
    return sys.maxsize
