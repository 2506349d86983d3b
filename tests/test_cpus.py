"""The CPUs that a process may keep busy: control groups as Linux shows them, in a folder."""

import pytest

from fedhet.common import cpus

LIMITS = {  # of files below /sys/fs/cgroup, what /proc/self/cgroup says, and the CPUs of eight
    "a container": ({"cpu.max": "200000 100000"}, "0::/", 2),
    "part of a CPU": ({"cpu.max": "250000 100000"}, "0::/", 3),
    "no limit": ({"cpu.max": "max 100000"}, "0::/", 8),
    "more than there are": ({"cpu.max": "9900000 100000"}, "0::/", 8),
    "a service": (
        {"system.slice/one.service/cpu.max": "50000 100000"},
        "0::/system.slice/one.service",
        1,
    ),
    "what holds a service": (
        {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"},
        "0::/a/b",
        3,
    ),
    "another's": ({"a/cpu.max": "300000 100000"}, "0::/b", 8),
    "version 1": (
        {"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"},
        "4:memory:/x\n1:cpu,cpuacct:/job\n0::/",
        4,
    ),
    "version 1 without a limit": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        "1:cpu:/",
        8,
    ),
    "another system": ({}, None, 8),
}


@pytest.mark.parametrize(("files", "own", "expected"), LIMITS.values(), ids=LIMITS)
def test_a_process_may_keep_fewer_cpus_busy_than_it_sees(
    files, own, expected, tmp_path, monkeypatch
):
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    if own is not None:
        (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(cpus, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cpus, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cpus, "affinity", lambda: set(range(8)))
    assert cpus.usable_cpus() == expected
