"""The cache of decoded splits, and splits by stratum."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedhet.tasks.sources import store, tables
from fedhet.tasks.sources.arrays import stratified_split
from tests.refused import refused
from tests.tasks.generated import make_task, write_hub_set


def test_images_are_decoded_once_and_again_when_the_file_changes(
    tmp_path, monkeypatch, empty_cache
):
    write_hub_set(tmp_path, "mnist")
    make_task("mnist", path=str(tmp_path)).client_data(0)
    assert not list(empty_cache.rglob(".unfinished*"))
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_rows", lambda *a: pytest.fail("decoded again"))
        again = make_task("mnist", path=str(tmp_path)).train_split
    assert isinstance(again.values, np.memmap)
    write_hub_set(tmp_path, "mnist", count=50)
    assert len(make_task("mnist", path=str(tmp_path)).train_split) == 50


def test_a_decoding_that_fails_leaves_nothing_to_be_taken_for_complete(empty_cache):
    def fail(unfinished):
        (unfinished / "images.npy").write_bytes(b"half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        store.build_once(empty_cache / "x", fail)
    assert [path.name for path in empty_cache.iterdir()] == [".x.lock"]


def test_of_those_that_race_one_builds(empty_cache):
    """Threads stand for processes: the lock is between open files, not between processes."""
    built = []

    def build(unfinished):
        built.append(unfinished)
        time.sleep(0.1)
        (unfinished / "content").write_text("whole")

    with ThreadPoolExecutor(4) as racers:
        for folder in racers.map(store.build_once, 4 * [empty_cache / "x"], 4 * [build]):
            assert (folder / "content").read_text() == "whole"
    assert len(built) == 1


@pytest.mark.slow
def test_of_those_that_find_it_damaged_one_builds_it_again(empty_cache):
    """The others see it vanish, and wait for the lock."""

    def build(unfinished):
        for number in range(50):
            (unfinished / f"{number}").write_text("whole")

    def read(number):
        folder = store.build_once(empty_cache / "x", build)
        return {path.read_text() for path in folder.iterdir() if path.name != store.MANIFEST}

    for _ in range(20):
        store.build_once(empty_cache / "x", build)
        (empty_cache / "x" / store.MANIFEST).unlink()
        with ThreadPoolExecutor(4) as racers:
            assert list(racers.map(read, range(4))) == 4 * [{"whole"}]


def test_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "file" / "cache"))
    with refused("FEDHET_CACHE"):
        make_task("digits").client_data(0)


def test_stratified_split_takes_the_same_fraction_of_each_stratum():
    strata = np.repeat([3, 7, 8], [100, 10, 1])
    kept, taken = stratified_split(strata, 0.2, seed=1)
    assert np.bincount(strata[taken]).tolist() == [0, 0, 0, 21 - 1, 0, 0, 0, 2]
    assert sorted([*kept, *taken]) == list(range(111))
    for seed in (1, 2):
        assert np.array_equal(stratified_split(strata, 0.2, seed)[1], taken) == (seed == 1)
