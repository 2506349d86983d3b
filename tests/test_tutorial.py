"""docs/tutorial.md as a reader does it: every command and file, and the output that it shows."""

import shutil
from pathlib import Path

import pytest

from fedhet.common.results import read_rows
from fedhet.tools.new import TEMPLATE
from tests import walked_page
from tests.walked_page import Walk

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 420  # of the whole script; it takes about a minute on 2 idle cores
PORTS = ("FLEET_PORT", "CONTROL_PORT", "NORTH_PORT", "SOUTH_PORT")
PROGRAMS = ("openssl", "ssh-keygen")  # that its reader needs

pytestmark = [
    pytest.mark.timeout(SECONDS + 80),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)), reason=f"not all of {PROGRAMS} are installed"
    ),
]
BLOCKS = walked_page.blocks_of(ROOT / "docs" / "tutorial.md")


def test_the_files_that_fedhet_new_has_written_are_shown_as_they_are():
    shown = [block for block in BLOCKS if block.title and (TEMPLATE / block.title).exists()]
    assert len(shown) == 3
    for block in shown:
        assert block.content == (TEMPLATE / block.title).read_text(encoding="utf-8"), block.title


def test_every_block_is_run_written_or_compared():
    walked_page.check_every_block_is_run_written_or_compared(BLOCKS)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    home = tmp_path_factory.mktemp("home")
    return walked_page.walk_of(BLOCKS, home, "my_project", SECONDS, PORTS)


@pytest.mark.flower
def test_every_command_succeeds_and_nothing_is_left_running(walk):
    logs = [f"{name}/log.txt" for name in ("server", "north", "south")]
    walked_page.check_all_succeeded(walk, BLOCKS, logs)


@pytest.mark.flower
def test_it_prints_what_the_text_says(walk):
    walked_page.check_printed(walk, BLOCKS)


@pytest.mark.flower
def test_the_run_learns_and_weight_zero_of_the_sweep_is_fedavg(walk):
    first = walk.summary("first")
    zero, one = (
        walk.summary(next(walk.work.glob(f"sweep/*_weight{weight}_*")).relative_to(walk.work))
        for weight in ("0", "0.1")
    )
    assert first["accuracy"] > 0.4
    names = [found["strategy"] for found in (first, zero, one)]
    assert names == ["fedavg", "keepfeatures", "keepfeatures"]
    assert first["parameters_sha256"] == zero["parameters_sha256"] != one["parameters_sha256"]
    assert first["fingerprint"]["code"] == zero["fingerprint"]["code"]  # of fedhet and my_project
    assert (walk.work / "first" / "plot.png").stat().st_size > 10_000


@pytest.mark.flower
def test_two_sites_that_share_no_class_learn_of_each_other(walk):
    summary = walk.summary("server/results")
    assert (summary["status"], summary["strategy"]) == ("completed", "keepfeatures+scaffold")
    assert summary["failures"] == 0
    assert summary["accuracy"] > 0.65  # the larger site's classes are 0.6 of the test images
    rows = read_rows(walk.work / "server" / "results" / "metrics.jsonl")
    assert [row["clients"] for row in rows[1:]] == [[0, 1]]
    for number, site in enumerate(("north", "south")):
        assert list((walk.work / site / "state").glob(f"*/client-{number:05}/*.safetensors"))
    assert not (walk.work / "server" / "results" / "client_state").exists()
