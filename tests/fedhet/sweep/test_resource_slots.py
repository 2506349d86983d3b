"""How a machine is divided among jobs that run at once."""

import os
import threading
from types import SimpleNamespace

import psutil
import pytest
from filelock import FileLock

from fedhet.conf import compose
from fedhet.sweep import resource_slots
from fedhet.sweep.resource_slots import Slot, divide, free_slot, jobs_at_once, limit_recipe
from tests.refused import refused

JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
FORK = "hydra._internal.core_plugins.basic_launcher.ForkLauncher"
on_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity")


@pytest.mark.parametrize(
    ("launcher", "n_jobs", "together", "expected"),
    [
        (BASIC, None, 12, 1),
        (FORK, 0, 12, 1),
        (FORK, 3, 12, 3),
        (JOBLIB, 3, 12, 3),
        (JOBLIB, 3, 2, 2),  # the last batch has no more
        (JOBLIB, -1, 12, 8),
        (JOBLIB, -2, 12, 7),
        (f"{SUBMITIT}.LocalLauncher", None, 12, 12),
        (f"{SUBMITIT}.SlurmLauncher", None, 12, 1),  # each has a control group of its own
    ],
)
def test_jobs_at_once(launcher, n_jobs, together, expected):
    assert jobs_at_once({"_target_": launcher, "n_jobs": n_jobs}, together, cpus=8) == expected


def test_slots_cover_the_cpus_once_and_differ_by_one_at_most():
    def divided(cpus, num_cpus, jobs):
        slots = divide(range(cpus), num_cpus, [], jobs)
        assert not any(slot.gpus for slot in slots)
        return [(list(slot.cpus), slot.num_cpus) for slot in slots]

    assert divided(7, 7, jobs=3) == [([0, 3, 6], 3), ([1, 4], 2), ([2, 5], 2)]
    assert divided(2, 2, jobs=5) == [([0], 1), ([1], 1)]
    assert divided(8, 3, jobs=2) == [([0, 2, 4, 6], 2), ([1, 3, 5, 7], 1)]  # a quota of 3


def test_gpus_are_divided_or_shared(monkeypatch):
    def divided(gpus, jobs):
        return [("".join(one.gpus), one.jobs_per_gpu) for one in divide(range(8), 8, gpus, jobs)]

    assert divided("0123", jobs=2) == [("02", 1), ("13", 1)]
    assert divided("ab", jobs=3) == [("a", 2), ("b", 2), ("a", 2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert [list(slot.gpus) for slot in resource_slots.slots_of_machine(1)] == [["3", "5"]]


def test_memory_that_has_no_room_for_twice_a_job_has_none_for_another(monkeypatch):
    me = os.getpid()
    resource_slots.memory_has_room.cache_clear()
    assert resource_slots.memory_has_room((me,))
    resource_slots.memory_has_room.cache_clear()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    assert not resource_slots.memory_has_room((me,))
    resource_slots.memory_has_room.cache_clear()


@on_linux
def test_a_job_is_kept_to_a_slot_that_no_other_has(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = os.sched_getaffinity(0)
    slots = [Slot([min(before)], 1, ["7"], 1), Slot([max(before)], 1, ["8"], 1)]
    with free_slot(tmp_path, slots) as first:
        assert first is slots[0]
        assert (os.sched_getaffinity(0), os.environ["CUDA_VISIBLE_DEVICES"]) == ({min(before)}, "7")
        with free_slot(tmp_path, slots) as second:
            assert second is slots[1]
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "8"
    assert os.sched_getaffinity(0) == before
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.slow
def test_a_job_waits_until_another_has_released_its_slot(tmp_path):
    slot = Slot(sorted(resource_slots.affinity()), 1, [], 1)
    with free_slot(tmp_path, [slot]):
        [path] = tmp_path.rglob("*.lock")
    other = FileLock(path, thread_local=False)
    other.acquire()
    threading.Timer(0.3, other.release).start()
    with free_slot(tmp_path, [slot]) as again:
        assert again is slot
        assert not other.is_locked


@pytest.mark.parametrize(
    ("overrides", "slot", "cpus", "gpus"),
    [
        ("runtime.num_cpus=1", Slot([0, 1], 2, [], 1), 1, None),
        ("", Slot(range(16), 16, ["0"], 2), 16, 0.25),  # four clients of each job share the GPU
        ("", Slot(range(2), 2, ["0"], 2), 2, 0.5),  # its CPUs have no work for more than two
        ("runtime.client_gpus=0.1", Slot(range(2), 2, ["0"], 2), 2, 0.1),
    ],
)
def test_a_recipe_is_limited_to_its_slot(overrides, slot, cpus, gpus):
    recipe = compose({"overrides": overrides})
    limit_recipe(recipe, slot)
    assert (recipe.runtime.num_cpus, recipe.runtime.client_gpus) == (cpus, gpus)


def test_a_client_that_needs_more_than_a_job_has_is_refused():
    recipe = compose({"overrides": "runtime.client_cpus=4"})
    with refused("runtime.client_cpus=4", "n_jobs", kind=ValueError):
        limit_recipe(recipe, Slot([0, 1], 2, [], 1))
