"""How a run ends, and what it leaves: completed, diverged, stopped or failed, in valid JSON."""

import contextlib
import json
import math
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from fedhet import launch, signals
from fedhet.common import files
from fedhet.common.errors import DivergedError
from fedhet.common.results import ResultsFolder, read_rows, read_summary, write_end
from fedhet.conf import compose_overrides
from fedhet.server_app import app, evaluation
from tests.recipes import TINY, run_recipe
from tests.refused import refused


def strictly(text):
    """Parse JSON as every other program does: NaN and Infinity are no words of it."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def left_by(folder):
    """Return summary and rows of a run that has ended."""
    rows = [strictly(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return strictly((folder / "summary.json").read_text()), rows


DIVERGING = {  # further words, what it says, rounds that it has measured
    "loss": (["server.lr=1e20"], "1", 1),
    "model": (["server.lr=1e45"], "1 body.1.weight NaN", 0),
    "training": (["local.lr=1e30"], "2 rounds NaN local.lr", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DIVERGING)
def test_a_run_that_diverges_says_where_and_keeps_what_it_measured(case, tmp_path):
    words, message, rounds = DIVERGING[case]
    with refused(*message.split(), kind=DivergedError):
        run_recipe(tmp_path, *TINY, *words, "max_failed_rounds=2")
    summary, rows = left_by(tmp_path)
    assert summary["status"] == "diverged"
    assert [row["round"] for row in rows] == list(range(rounds + 1))
    assert not (tmp_path / "model.safetensors").exists()
    if case == "loss":
        assert (rows[1]["loss"], summary["loss"]) == (None, None)
    if case == "model":
        assert "the largest update, of norm " in summary["error"]


@pytest.mark.slow
def test_a_diverged_run_has_the_checkpoints_of_the_rounds_before(tmp_path, monkeypatch):
    losses = iter([2.0, 1.0, 0.5, math.inf])
    scores = lambda *args, **metrics: (next(losses), 0.25)  # noqa: E731
    monkeypatch.setattr(evaluation, "evaluate_model", scores)
    with refused("3", kind=DivergedError):
        run_recipe(tmp_path, *TINY, "rounds=9", "logger=none")
    found = sorted(path.stem for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["round-000001", "round-000002"]
    summary, rows = left_by(tmp_path)
    assert [row["loss"] for row in rows] == [2.0, 1.0, 0.5, None]
    assert (summary["accuracy"], summary["loss"], summary["rounds"]) == (0.25, None, 3)


# ---- what the launcher writes, where the run itself could not ------------------------------------

ROW = {"seconds": 0.5, "bytes_up": 1, "bytes_down": 2, "failures": []}
ABOUT = {"strategy": "fedavg", "seed": 7}


@pytest.fixture
def killed(tmp_path):
    """Write what a run leaves that is killed after its first round."""
    results = ResultsFolder(tmp_path)
    results.write_config("a: 1\n")
    results.append({"round": 0, "accuracy": 0.1, "loss": math.nan})
    results.append({"round": 1, "accuracy": 0.5, "loss": math.inf, "drift": [-math.inf], **ROW})
    return tmp_path


def test_a_run_that_was_killed_gets_a_summary_of_its_rows(killed):
    write_end(killed, ABOUT, "stopped", "by Ctrl-C")
    summary, rows = left_by(killed)
    assert summary.items() >= {**ABOUT, "status": "stopped", "error": "by Ctrl-C"}.items()
    assert (summary["rounds"], summary["best_accuracy"], summary["loss"]) == (1, 0.5, None)
    assert rows[1]["drift"] == [None]
    read_summary(killed)  # with its checksum
    assert read_rows(killed / "metrics.jsonl") == rows


def test_a_summary_stays_until_another_round_has_ended(killed):
    for status, kept in (("completed", "completed"), ("failed", "completed")):
        write_end(killed, ABOUT, status, "why")
        assert read_summary(killed)["status"] == kept
    ResultsFolder(killed, last_round=1).append({"round": 2, "accuracy": 0.6, **ROW})
    write_end(killed, ABOUT, "stopped", "why")
    assert (read_summary(killed)["status"], read_summary(killed)["rounds"]) == ("stopped", 2)


class Runtime:
    """A runtime whose run is killed from outside, or whose user presses Ctrl-C."""

    def __init__(self, folder, how, going_on=False):
        self.folder, self.how, self.going_on = folder, how, going_on

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, recipe, words):
        results = ResultsFolder(self.folder)
        for round in (0, 1):
            results.append({"round": round, "accuracy": 0.5, **ROW})

    def running(self):
        if self.how is not None:
            raise self.how
        return False

    def failure(self):
        return "no memory"

    def continues(self):
        return self.going_on

    def interrupted(self):
        return "its last words"


def launched(folder, monkeypatch, runtime):
    """Continue a run by the launcher on this runtime; there is a plot of it then."""
    (folder / "config.yaml").touch()
    words = OmegaConf.create(["rounds=9", "resume=true"])
    config = SimpleNamespace(mode=launch.RunMode.RUN, overrides=SimpleNamespace(task=words))
    monkeypatch.setattr(launch.HydraConfig, "get", lambda: config)
    monkeypatch.setattr(launch, "runtime_for", lambda *args: runtime)
    monkeypatch.setattr(launch, "check_run", lambda *args: None)
    monkeypatch.setattr(launch, "plot_run", lambda rows, title, path: path.touch())
    typed = ["fedhet", "paper={a: 1}", "rounds=9", f"results_dir={folder}", "resume=true"]
    monkeypatch.setattr(launch.sys, "argv", typed)
    launch.run(compose_overrides(("rounds=9", f"results_dir={folder}", "resume=true")))


def test_a_resumed_run_begins_if_its_launcher_knows_that_an_empty_folder_is_its_own(tmp_path):
    words = ("runtime=deployment", "resume=true")
    own = compose_overrides((*words, f"runtime.server_results={tmp_path}"))
    assert app.last_checkpoint(own, tmp_path) is None
    with refused("resume"):
        app.last_checkpoint(compose_overrides(words), tmp_path)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("{traceback}fedhet.common.errors.ConfigError: a\nb\n", "a\nb"),
        ("{traceback}ValueError: a\n\nDuring it\n{traceback}OSError: b\n", "OSError: b"),
        ("INFO: round 1\n", "INFO: round 1"),
    ],
)
def test_of_an_error_in_a_log_the_message_is_shown_and_not_its_traceback(log, message, tmp_path):
    stack = "Traceback (most recent call last):\n  File x, line 1, in f\n    raise ConfigError(\n"
    (tmp_path / "log.txt").write_text("before\n" * ("{" in log) + log.format(traceback=stack))
    assert files.last_error(tmp_path / "log.txt") == message


HOLDING = """
import sys
from pathlib import Path
from fedhet.common.files import only_writer
with only_writer(Path(sys.argv[1]), 0.0, *sys.argv[2:]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_that_another_process_is_in_is_not_resumed_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_PATIENCE", 0.1)
    words = [*TINY, "rounds=2", "resume=true"]
    run_recipe(tmp_path, *TINY, "rounds=1")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with refused("results_dir="):
            run_recipe(tmp_path, *words)
        with launch._only_launcher(tmp_path, resuming=True):
            pass  # it may follow the run, whose server has the other lock
        assert {path: path.read_bytes() for path in before} == before
        other.kill()  # its lock goes with it, and the file that is left hinders nobody
    assert (tmp_path / files.LOCK).exists()
    assert run_recipe(tmp_path, *words)["rounds"] == 2


@pytest.mark.slow
def test_a_folder_has_one_launcher_at_a_time_and_a_new_run_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_LAST_MOMENTS", 0.1)
    command = [sys.executable, "-c", HOLDING, str(tmp_path), launch._LOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        for resuming in (False, True):
            with refused("results_dir="), launch._only_launcher(tmp_path, resuming=resuming):
                pass
        other.kill()
    with launch._only_launcher(tmp_path, resuming=False):
        (tmp_path / "config.yaml").touch()  # of a run that began between the two looks
    with refused(), launch._only_launcher(tmp_path, resuming=False):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", [KeyboardInterrupt(), SystemExit(143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_is_drawn_and_says_how_to_continue_it(how, tmp_path, monkeypatch, capsys):
    with pytest.raises(type(how)) as ended:
        launched(tmp_path, monkeypatch, Runtime(tmp_path, how))
    assert str(ended.value) in ("its last words", "143")
    said = capsys.readouterr().out
    assert "fedavg on digits: stopped" in said
    assert f"continue fedhet 'paper={{a: 1}}' rounds=9 results_dir={tmp_path} resume=true" in said
    assert f"plot     {tmp_path / 'plot.png'}" in said
    assert (tmp_path / "plot.png").exists()
    assert left_by(tmp_path)[0]["status"] == "stopped"


class Warns(Runtime):
    """A runtime whose run warns before round 0, in round 0 and 1, and of round 1."""

    def submit(self, recipe, words):
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write("INFO :      a round: none\n\x1b[93mWARNING \x1b[0m:   class 9: nobody's\n")
            log.write("WARNING :   round 1: client 3: NaN\nWARNING :   class 9: nobody's\n")
            log.write("WARNING :   Since flwr 1.32, default simulated SuperNodes changed\n")
        super().submit(recipe, words)


def test_what_a_run_warns_of_at_its_start_is_shown_and_at_its_end_how_many_there_were(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "log.txt").write_text("WARNING :   of the run that is resumed\n")
    monkeypatch.setattr(Warns, "running", lambda self: True)
    write = lambda *_: write_end(tmp_path, ABOUT, "completed", "")  # noqa: E731
    monkeypatch.setattr(launch, "warm_up", write)
    launched(tmp_path, monkeypatch, Warns(tmp_path, None))
    said = capsys.readouterr().out
    assert "fedavg on digits: class 9: nobody's\nround   0/9" in said
    assert said.count("class 9") == 1
    assert not any(words in said for words in ("NaN", "resumed", "none", "flwr 1.32"))
    assert f"log      {tmp_path}/log.txt, with 3 warnings" in said


class Swallowing(Runtime):
    """A runtime in which a library swallows what the signal ``how`` raises; its run goes on."""

    def submit(self, recipe, words):
        super().submit(recipe, words)
        with contextlib.suppress(BaseException):
            signals.end_launcher(self.how, None)

    def running(self):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_has_swallowed_ends_the_run(how, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_came", None)
    ends = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}[how]
    with pytest.raises(ends, match=r"its last words|143"):
        launched(tmp_path, monkeypatch, Swallowing(tmp_path, how))
    assert left_by(tmp_path)[0]["status"] == "stopped"
    with pytest.raises(ends), signals.signals_first():
        raise ValueError("what a library makes of it")


@pytest.mark.slow
def test_a_run_that_goes_on_without_its_launcher_is_not_stopped(tmp_path, monkeypatch, capsys):
    runtime = Runtime(tmp_path, KeyboardInterrupt(), going_on=True)
    with pytest.raises(KeyboardInterrupt, match="its last words"):
        launched(tmp_path, monkeypatch, runtime)
    assert not (tmp_path / "summary.json").exists()
    assert "continue" not in capsys.readouterr().out


def test_a_run_whose_process_died_has_failed(tmp_path, monkeypatch):
    with refused(kind=launch.LaunchError):
        launched(tmp_path, monkeypatch, Runtime(tmp_path, None))
    summary, _ = left_by(tmp_path)
    assert (summary["status"], summary["error"], summary["rounds"]) == ("failed", "no memory", 1)
