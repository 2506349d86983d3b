"""How a machine is divided among jobs that run at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from conf import compose
from fedhet.sweep import resource_slots
from fedhet.sweep.job import keep_to
from fedhet.sweep.resource_slots import Machine, Slot, free_slot, jobs_at_once, machine_for, parts

JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
RAY = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
on_linux = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)


@pytest.mark.parametrize(
    ("launcher", "together", "expected"),
    [
        ({"_target_": BASIC}, 12, 1),
        ({"_target_": JOBLIB, "n_jobs": 3}, 12, 3),
        ({"_target_": JOBLIB, "n_jobs": 3}, 2, 2),  # the last batch has no more
        ({"_target_": JOBLIB, "n_jobs": -1}, 12, 8),
        ({"_target_": JOBLIB, "n_jobs": -2}, 12, 7),
        ({"_target_": JOBLIB, "n_jobs": 4}, 1, 1),  # a search that proposes one trial at a time
        ({"_target_": f"{SUBMITIT}.LocalLauncher"}, 12, 12),
        ({"_target_": f"{SUBMITIT}.SlurmLauncher"}, 12, 1),  # each has a control group of its own
        ({"_target_": RAY, "ray": {"remote": {"num_cpus": 4}}}, 12, 2),
        ({"_target_": RAY, "ray": {"remote": {}}}, 12, 8),
    ],
)
def test_jobs_at_once(launcher: dict[str, Any], together: int, expected: int) -> None:
    assert jobs_at_once(launcher, together, cpus=8) == expected


def test_parts_cover_the_cpus_once_and_differ_by_one_at_most() -> None:
    found = parts(Machine(cpus=[0, 4, 1, 5, 2, 6, 3], quota=7, gpus=[]), 3)
    assert [list(slot.cpus) for slot in found] == [[0, 4, 1], [5, 2], [6, 3]]
    assert [slot.num_cpus for slot in found] == [3, 2, 2]
    assert all(not slot.gpus for slot in found)


def test_with_fewer_cpus_than_jobs_there_are_fewer_slots() -> None:
    found = parts(Machine(cpus=[0, 1], quota=2, gpus=[]), 5)
    assert [list(slot.cpus) for slot in found] == [[0], [1]]


def test_a_quota_below_the_cpus_is_what_is_divided() -> None:
    found = parts(Machine(cpus=range(8), quota=3, gpus=[]), 2)
    assert [slot.num_cpus for slot in found] == [2, 1]
    assert [list(slot.cpus) for slot in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_gpus_are_divided_or_shared() -> None:
    four = parts(Machine(cpus=range(8), quota=8, gpus=["0", "1", "2", "3"]), 2)
    assert [list(slot.gpus) for slot in four] == [["0", "1"], ["2", "3"]]
    assert {slot.jobs_per_gpu for slot in four} == {1}
    two = parts(Machine(cpus=range(8), quota=8, gpus=["a", "b"]), 3)
    assert [list(slot.gpus) for slot in two] == [["a"], ["b"], ["a"]]
    assert {slot.jobs_per_gpu for slot in two} == {2}


def test_the_gpus_of_this_machine_are_divided_unless_ray_has_done_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert machine_for({"_target_": JOBLIB}).gpus == ["3", "5"]
    assert machine_for({"_target_": RAY}).gpus == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine_for({"_target_": JOBLIB}).gpus == []


@on_linux
def test_a_container_may_have_fewer_cpus_than_it_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(resource_slots, "_CPU_QUOTA", quota)
    seen = len(os.sched_getaffinity(0))
    for text, expected in (("100000 100000", 1), ("max 100000", seen), ("9900000 100000", seen)):
        quota.write_text(text)
        assert machine_for({}).quota == expected


def test_the_threads_of_a_core_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_slots, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(resource_slots, "_affinity", lambda: set(range(4)))
    for cpu, core in enumerate((0, 1, 0, 1)):  # 0 and 2 are one core, 1 and 3 the other
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    halves = parts(machine_for({}), 2)
    assert [set(slot.cpus) for slot in halves] == [{0, 2}, {1, 3}]


@on_linux
def test_a_job_is_kept_to_a_slot_that_no_other_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = machine_for({})
    before = os.sched_getaffinity(0)
    slots = [Slot([min(before)], 1, ["7"], 1), Slot([max(before)], 1, ["8"], 1)]
    with free_slot(tmp_path, slots) as first:
        assert first is slots[0]
        assert os.sched_getaffinity(0) == {min(before)}
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
        seen = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert seen.stdout.strip() == f"{{{min(before)}}}"
        with free_slot(tmp_path, slots) as second:
            assert second is slots[1]
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "8"
    assert os.sched_getaffinity(0) == before
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert machine_for({}) == machine


@pytest.mark.flower
@on_linux
def test_a_job_waits_until_a_slot_is_free(tmp_path: Path) -> None:
    slot = Slot(sorted(os.sched_getaffinity(0)), 1, [], 1)
    holder = "\n".join(
        [
            "import os, sys, time",
            "from pathlib import Path",
            "from fedhet.sweep.resource_slots import Slot, free_slot",
            "slot = Slot(sorted(os.sched_getaffinity(0)), 1, [], 1)",
            "with free_slot(Path(sys.argv[1]), [slot]):",
            "    print('has it', flush=True)",
            "    time.sleep(0.5)",
        ]
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        began = time.monotonic()
        with free_slot(tmp_path, [slot]):
            assert time.monotonic() - began > 0.3


@on_linux
def test_a_slot_is_free_again_when_its_job_was_killed(tmp_path: Path) -> None:
    slot = Slot(sorted(os.sched_getaffinity(0)), 1, [], 1)
    with free_slot(tmp_path, [slot]):
        [lock] = tmp_path.rglob("*.lock")
    holder = f"from filelock import FileLock; lock = FileLock({str(lock)!r}); lock.acquire()"
    command = [sys.executable, "-c", f"{holder}; print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        taken = not _can_acquire(lock)
        other.kill()
    assert taken
    with free_slot(tmp_path, [slot]) as again:
        assert again is slot


def _can_acquire(path: Path) -> bool:
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except TimeoutError:
        return False
    lock.release()
    return True


def test_the_recipe_says_what_the_job_has() -> None:
    recipe = compose({})
    keep_to(Slot([0, 1], 2, [], 1), recipe)
    assert recipe.runtime.num_cpus == 2
    assert recipe.runtime.client_gpus is None
    fewer = compose({"overrides": "runtime.num_cpus=1"})
    keep_to(Slot([0, 1], 2, [], 1), fewer)
    assert fewer.runtime.num_cpus == 1
    keep_to(None, fewer)


def test_jobs_that_share_a_gpu_have_eight_clients_on_it_together() -> None:
    recipe = compose({})
    keep_to(Slot(range(16), 16, ["0"], 2), recipe)
    assert recipe.runtime.client_gpus == 0.25  # four of each job
    few = compose({})
    keep_to(Slot(range(2), 2, ["0"], 2), few)
    assert few.runtime.client_gpus == 0.5  # its CPUs have no work for more than two
    own = compose({"overrides": "runtime.client_gpus=0.1"})
    keep_to(Slot(range(2), 2, ["0"], 2), own)
    assert own.runtime.client_gpus == 0.1


def test_a_client_that_needs_more_than_a_job_has_is_refused() -> None:
    recipe = compose({"overrides": "runtime.client_cpus=4"})
    with pytest.raises(ValueError, match=r"runtime\.client_cpus=4.* leave each 2 .*n_jobs"):
        keep_to(Slot([0, 1], 2, [], 1), recipe)
