"""Runs that a script starts or loads, in the home folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import fedhet
from fedhet.load_run import label_metadata_of, recipe_of
from tests.refused import refused


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.slow
def test_a_tilde_in_the_results_dir_of_a_run_is_the_home_folder(home, monkeypatch):
    commands = []

    def ended(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "not run")

    monkeypatch.setattr(subprocess, "run", ended)
    with refused("not run", kind=fedhet.LaunchError):
        fedhet.run("task=digits", results_dir="~/x y")
    words = ["task=digits", f"results_dir='{home}/x y'"]
    assert commands == [[sys.executable, "-m", "fedhet", *words]]


@pytest.mark.parametrize("start", [fedhet.run, fedhet.partition])
def test_a_list_of_words_is_refused(start):
    with refused("task=digits"):
        start(["task=digits"])


def test_a_natural_partition_has_as_many_clients_as_its_column(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("x,y,site\n" + "".join(f"{n},{n % 2},{n % 3}\n" for n in range(60)))
    words = ["task=tabular", f"task.path={table}", "task.target=y", "task.client_column=site"]
    counts = fedhet.partition(*words, "partition=natural")
    assert len(counts) == 3


def test_a_run_is_loaded_from_a_folder_in_the_home_folder(home):
    with refused(f"{home}/run/model.safetensors"):
        fedhet.load_weights(nn.Linear(2, 2), "~/run")
    for load in (recipe_of, label_metadata_of):
        with refused(f"{home}/run"):
            load(Path("~/run"))
