"""`fedhet -m` from start to end in a process of its own, with runs that only pretend."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.fedhet.sweep.sweeps import read_json, run_in, statuses, sweep_folder, wait_for_rows

pytestmark = pytest.mark.flower

# `run` in the launcher process, as hydra/launcher=basic has it: a figure, an error, or a long wait.
PRETENDING = """
import json, sys, time
from pathlib import Path
from conf import fingerprint
from fedhet import launch
from fedhet.runtimes.flower_install import LaunchError

def run(recipe):
    folder = Path(recipe.results_dir)
    print("the run says", recipe.seed)
    rows = [{"round": 0, "accuracy": 0.1}, {"round": 1, "accuracy": recipe.local.lr}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    if recipe.seed == 13:
        raise LaunchError("the run failed: an unlucky seed\\nits log: there")
    if recipe.seed == 99:
        time.sleep(60)
    figures = {"accuracy": recipe.local.lr, "rounds": 1, "fingerprint": fingerprint(recipe)}
    (folder / "summary.json").write_text(json.dumps({"status": "completed", **figures}))

launch.run = run
launch.main()
"""

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the extra `sweep` is not installed"
)


def command(*words):
    return [sys.executable, "-c", PRETENDING, *words]


def fedhet(cwd, *words):
    return run_in(cwd, *command(*words))


def index_of(cwd):
    return read_json(sweep_folder(cwd) / "sweep.json")


def test_a_failed_job_is_named_the_others_are_kept_and_resuming_runs_what_is_left(tmp_path):
    words = ["-m", "seed=1,13", "strategy=fedavg,scaffold"]
    done = fedhet(tmp_path, *words)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines[:4]] == [f"[{number}/4]" for number in range(1, 5)]
    names = "#2 seed=13 fedavg, #3 seed=13 scaffold"
    assert f"failed   {names}: the run failed: an unlucky seed" in lines
    assert "the run says" not in done.stdout
    index, ended = index_of(tmp_path), ["completed"] * 2 + ["failed"] * 2
    assert statuses(tmp_path) == ended
    assert (index["status"], index["total"]) == ("failed", 4)
    assert index["overrides"] == words[1:]
    folder = sweep_folder(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("0_fedavg_digits_seed1", "1_scaffold_digits_seed1"),
        *("2_fedavg_digits_seed13", "3_scaffold_digits_seed13"),
        *("log.txt", "multirun.yaml", "sweep.json"),
    ]
    assert "the run says 13" in (folder / "2_fedavg_digits_seed13" / "log.txt").read_text()
    again = fedhet(tmp_path, "-m", "--resume", *words[1:])
    assert again.returncode == 1
    assert "[1/4] #0 seed=1 fedavg: 10.00 %, 1 rounds, earlier" in again.stdout
    assert "the run failed: an unlucky seed" in again.stdout
    resumed = index_of(tmp_path)
    assert len(resumed["resumed"]) == 1
    assert resumed["jobs"][0]["began"] == index["jobs"][0]["began"]
    assert statuses(tmp_path) == ended


@needs_optuna
def test_a_search_proposes_again_what_it_proposed_and_goes_past_failed_trials(tmp_path):
    words = ["hydra/sweeper=optuna", "local.lr=interval(0.01,1)", "hydra.sweeper.n_trials=3"]
    first = fedhet(tmp_path, "-m", *words)
    assert first.returncode == 0, first.stderr
    rates = [job["figures"]["accuracy"] for job in index_of(tmp_path)["jobs"]]
    assert len(set(rates)) == 3
    best = f"best     #{rates.index(max(rates))} accuracy {max(rates):.6g}: local.lr={max(rates)}"
    assert best in first.stdout
    folder = sweep_folder(tmp_path)
    more = fedhet(tmp_path, "-m", f"--resume={folder}", "hydra.sweeper.n_trials=4")
    assert more.returncode == 0, more.stderr
    assert more.stdout.count("earlier") == 6  # three lines, and three in the table
    assert [job["figures"]["accuracy"] for job in index_of(tmp_path)["jobs"]][:3] == rates
    (tmp_path / "unlucky").mkdir()
    failed = fedhet(tmp_path / "unlucky", "-m", *words, "seed=13")
    assert (failed.returncode, failed.stderr) == (1, "")
    assert statuses(tmp_path / "unlucky") == ["failed"] * 3
    assert "best" not in failed.stdout.splitlines()[-1]


def test_a_full_folder_and_an_unknown_option_are_refused_before_the_first_job(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    full = fedhet(tmp_path, "-m", "seed=1,2", "hydra.sweep.dir=full")
    assert (full.returncode, full.stdout, len(full.stderr.splitlines())) == (1, "", 1)
    assert re.search("full is not empty: .*--resume .*/full", full.stderr), full.stderr
    unknown = fedhet(tmp_path, "-m", "strategy=fedavg,fedavgg")
    assert unknown.returncode == 1
    assert "scaffold" in unknown.stderr  # Hydra lists the options
    assert statuses(tmp_path) == []


def test_a_stopped_sweep_keeps_what_was_measured(tmp_path):
    with subprocess.Popen(
        command("-m", "seed=1,99,2"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as sweep:
        _wait_for_the_second_job(tmp_path)
        sweep.send_signal(signal.SIGINT)
        output, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130
    assert "[1/3] #0 seed=1: 10.00 %, 1 rounds" in output
    assert "continue fedhet -m --resume " in output
    assert index_of(tmp_path)["status"] == "stopped"
    assert statuses(tmp_path) == ["completed", "stopped"]
    assert not (sweep_folder(tmp_path) / ".sweep").exists()


def test_a_sweep_that_was_killed_can_be_resumed_and_a_running_one_cannot(tmp_path):
    with subprocess.Popen(
        command("-m", "seed=1,99"), cwd=tmp_path, stdout=subprocess.DEVNULL
    ) as sweep:
        _wait_for_the_second_job(tmp_path)
        second = fedhet(tmp_path, "-m", "--resume", "seed=1,99")
        assert second.returncode == 1
        assert "another process runs the sweep" in second.stderr
        sweep.kill()
    assert statuses(tmp_path)[0] == "completed"
    third = fedhet(tmp_path, "-m", "--resume", "seed=1,99", "local.lr=0.5", "seed=1")
    assert "no sweep" in third.stderr  # other words
    last = fedhet(tmp_path, "-m", f"--resume={sweep_folder(tmp_path)}", "seed=1")
    assert last.returncode == 0, last.stderr
    assert "earlier" in last.stdout


def _wait_for_the_second_job(cwd):
    wait_for_rows(cwd, "1_fedavg_digits_seed99")
    time.sleep(0.5)  # the display has seen it, too
