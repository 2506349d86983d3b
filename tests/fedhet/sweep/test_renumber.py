"""What becomes of the folders of a sweep's jobs when it is resumed with other values."""

import pytest

from fedhet.common.errors import ConfigError
from fedhet.common.run_events import RECORD_FILE
from fedhet.sweep.renumber import renumber
from fedhet.sweep.sweep_folder import SweepFolder


def jobs_of(*seeds):
    return [["strategy=fedavg", f"seed={seed}"] for seed in seeds]


def made(path, *seeds, name="{}_seed{}"):
    """Make the folders of a sweep over seeds, each with its seed in a file; return the entries."""
    entries = {}
    for number, words in enumerate(jobs_of(*seeds)):
        folder = path / name.format(number, seeds[number])
        folder.mkdir()
        (folder / "seed").write_text(str(seeds[number]))
        entries[number] = {"number": number, "folder": folder.name, "overrides": words}
    return entries


def on_disk(path):
    return {str(one.parent.relative_to(path)): one.read_text() for one in path.rglob("seed")}


def again(path, entries, *seeds):
    return renumber(SweepFolder(path), entries, jobs_of(*seeds), ["seed"])


def test_folders_that_swap_numbers_are_renamed_and_the_same_values_change_nothing(tmp_path):
    entries = made(tmp_path, 1, 2)
    assert again(tmp_path, entries, 1, 2) == entries
    found = again(tmp_path, entries, 2, 1)
    assert on_disk(tmp_path) == {"0_seed2": "2", "1_seed1": "1"}
    assert [entry["overrides"] for entry in found.values()] == jobs_of(2, 1)
    assert [entry["folder"] for entry in found.values()] == ["0_seed2", "1_seed1"]
    assert [entry["number"] for entry in found.values()] == [0, 1]
    assert not (tmp_path / "replaced").exists()


def test_a_job_that_is_no_more_leaves_its_number_and_where_needed_its_name(tmp_path):
    found = again(tmp_path, made(tmp_path, 1, 2, 3, name="{}"), 3, 2)
    assert on_disk(tmp_path) == {"0": "3", "1": "2", "replaced/0_1": "1"}
    assert [found[number]["overrides"] for number in (0, 1)] == jobs_of(3, 2)
    assert set(found) == {0, 1}


def test_a_deployment_keeps_its_folder_which_its_server_may_write_to(tmp_path):
    entries = made(tmp_path, 1, 2)
    (tmp_path / "0_seed1" / RECORD_FILE).touch()
    found = again(tmp_path, entries, 0, 2, 1)
    assert found == entries
    assert on_disk(tmp_path) == {"0_seed1": "1", "1_seed2": "2"}


@pytest.mark.parametrize(
    "job",
    [
        *({}, {"folder": "x"}, {"folder": "x", "overrides": [1]}),
        *({"folder": "../x", "overrides": []}, {"folder": "", "overrides": []}),
    ],
)
def test_an_index_with_a_job_that_is_none_is_refused(job, tmp_path):
    with pytest.raises(ConfigError, match=r"sweep\.json is not the index of a sweep: each of its"):
        again(tmp_path, {0: job}, 1, 2)
