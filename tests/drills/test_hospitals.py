"""docs/hospitals.md as a reader does it, with the real table or one of the same columns."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedhet.common.results import read_rows
from tests import walked_page
from tests.walked_page import Walk

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1200  # of the whole script; it takes 3.5 minutes of CPU time
SITES = ("budapest", "cleveland", "long_beach", "zurich_basel")
PORTS = ("FLEET_PORT", "CONTROL_PORT", *(f"{site.upper()}_PORT" for site in SITES))
PROGRAMS = ("openssl", "ssh-keygen")  # that its reader needs

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(SECONDS + 80),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)), reason=f"not all of {PROGRAMS} are installed"
    ),
]
BLOCKS = walked_page.blocks_of(ROOT / "docs" / "hospitals.md")


def test_every_block_is_run_written_or_compared():
    walked_page.check_every_block_is_run_written_or_compared(BLOCKS)


def made_up_data(folder: Path) -> None:
    """Write a table with the columns and sizes of heart_disease.csv."""
    random, sizes = np.random.default_rng(0), (294, 303, 200, 123)
    table = pd.DataFrame({"hospital": np.repeat(SITES, sizes)})
    ill = random.random(len(table)) < np.repeat((0.35, 0.45, 0.75, 0.93), sizes)
    columns = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal".split()
    for name in columns:
        values = random.normal(ill * 1.0, 1.0)
        kinds = {"cp": 4, "restecg": 3, "sex": 2, "fbs": 2, "exang": 2}
        table[name] = (
            values if name not in kinds else np.clip(values.round(), 0, kinds[name] - 1) + 0.0
        )
    table["target"] = ill * random.integers(1, 5, len(table))
    folder.mkdir()
    table.sample(frac=1, random_state=0).to_csv(folder / "heart_disease.csv", index=False)


def data_folder(home: Path) -> Path:
    """Return FEDHET_DATA, if it has the hospitals' table; else make one up."""
    data = Path(os.environ.get("FEDHET_DATA", home))
    if not (data / "heart_disease").is_dir():
        data = home
        made_up_data(home / "heart_disease")
    return data


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    home = tmp_path_factory.mktemp("home")
    more = {"FEDHET_DATA": str(data_folder(home))}
    return walked_page.walk_of(BLOCKS, home, "hospitals", SECONDS, PORTS, **more)


def test_every_command_succeeds_and_nothing_is_left_running(walk):
    logs = [f"{name}/log.txt" for name in ("server", *SITES)]
    walked_page.check_all_succeeded(walk, BLOCKS, logs)


def test_it_prints_what_the_text_says(walk):
    walked_page.check_printed(walk, BLOCKS)


def test_four_hospitals_learn_and_their_sets_hold_the_right_answer(walk):
    summary = walk.summary("server/results")
    assert (summary["status"], summary["failures"]) == ("completed", 0)
    assert summary["client_accuracy"] > 0.7
    [*_, row] = read_rows(walk.work / "server" / "results" / "metrics.jsonl")
    assert tuple(row["client_names"]) == SITES
    found = pd.read_csv(walk.work / "predictions.csv")
    assert len(found) == 92
    answers = zip(found["disease"], found["set_0.9"], strict=True)
    inside = [disease in one.split(" or ") for disease, one in answers]
    assert np.mean(inside) > 0.8
