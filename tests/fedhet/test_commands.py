"""How `fedhet` and the other commands report errors and print tables."""

import argparse
import errno
import json
import os
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from fedhet.commands import at_least, number_between, reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.flower.line import line_of
from fedhet.conf import compose, compose_overrides, with_open_keys
from fedhet.help import check_flags
from fedhet.launch import _prepare_results_dir, check_run
from fedhet.runtimes import flower_install
from fedhet.sweep.method_keys import with_single_sweeps
from tests.fedhet.sweep.sweeps import fork
from tests.finished_runs import write_run
from tests.recipes import TINY, run_recipe
from tests.refused import refused

__all__ = ["write_run"]

REFUSED = {
    "results_dir=full/file": "is a file; ",
    "results_dir=full/file/x": "cannot be made .* that you can write to$",
    "resume=true": "results_dir=",
    "resume=auto": "results_dir=",
    "resume=true results_dir=new": "results_dir=.*new holds no run",
    "device=cuda:77": "device=cuda:77: this machine has .* set device=auto or cpu",
    "strategy/aggregator=maecho": r"strategy/aggregator=maecho",
    "=3": "=3: a group takes the name of an option",
    "--multirum": r"unknown option --multirum: did you mean --multirun",
}
REFUSED_BY_THE_COMMAND = {  # each on a way of its own
    "roundz=3": r"unknown key roundz: did you mean rounds\?",
    "results_dir=full": "full is not empty: name another folder$",
    "-m seed=0,1 rounds=-1": "rounds=-1 is not allowed",
    "-m local.lr=0.1,-1": "local.lr=-1 is not allowed",
    "-m strategy=fedavg,fedprx": "strategy=fedprx is unknown: did you mean fedprox",
    "-m strategy=fedavg,fedsam strategy.sam.rho=1": "strategy=fedavg of this sweep has no such",
    "-m strategy=fedsam,fedmrur local.lrr=1": r"unknown key local\.lrr: did you mean local\.lr",
    "task.path=~/x": """: "task.path='~/x'"$""",
    "-m objective=acuracy seed=0,1": "objective=acuracy is unknown: did you mean accuracy",
}


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


@pytest.mark.slow
def test_help_and_what_cannot_start_leave_no_trace(cwd):
    done = fork(cwd, "strategy=fedprox", "--help")
    assert done.returncode == 0
    assert re.search(r"^ +fedprox +adds \(mu", done.stdout, re.MULTILINE)
    assert re.search(r"local\.lr +0\.1 +a number above 0 +eta_l, times", done.stdout)
    assert re.search(r"strategy\.fedprox\.mu +0\.1 ", done.stdout)
    for word, message in REFUSED_BY_THE_COMMAND.items():
        done = fork(cwd, *word.split())
        assert done.returncode == 1
        assert re.search(rf"^fedhet: .*{message}.*$", done.stderr.rstrip()), done.stderr  # one line


@pytest.mark.slow
@pytest.mark.flower
def test_resume_auto_begins_a_run_ends_at_once_where_it_is_done_and_else_goes_on(tmp_path):
    words, folder = [*TINY, "strategy=scaffold", "runtime=local"], tmp_path / "run"

    def asked(rounds: int) -> tuple[bytes, int]:
        done = fork(tmp_path, *words, "resume=auto", f"results_dir={folder}", f"rounds={rounds}")
        assert done.returncode == 0, done.stderr
        assert f"results  {folder}\n" in done.stdout
        summary = folder / "summary.json"
        assert json.loads(summary.read_text())["rounds"] == rounds
        return (folder / "metrics.jsonl").read_bytes(), summary.stat().st_mtime_ns

    first = asked(1)
    assert asked(1) == first
    rows, _ = asked(2)
    assert rows.startswith(first[0])
    again = fork(tmp_path, *words, f"results_dir={folder}")
    assert re.search(r"is not empty: .* resume=true$", again.stderr.rstrip()), again.stderr
    whole = run_recipe(tmp_path / "whole", *words, "rounds=2", clients=3)
    found = json.loads((folder / "summary.json").read_text())
    assert found["parameters_sha256"] == whole["parameters_sha256"]


def prepare(words: list[str]) -> None:
    """Call what the command does before it starts a process, in this one."""
    check_flags(words)
    recipe = compose_overrides(tuple(with_single_sweeps(with_open_keys(words))))
    check_run(recipe, words)
    _prepare_results_dir(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(("word", "message"), REFUSED.items(), ids=REFUSED)
def test_words_that_cannot_start_are_refused_in_a_line(word, message, cwd):
    with pytest.raises(ConfigError) as refusal:
        prepare(word.split())
    assert re.search(rf"^.*{message}.*$", str(refusal.value))


@pytest.mark.slow
def test_an_older_flower_is_refused_by_the_runtimes_that_start_its_programs(monkeypatch):
    for release in ("1.42.0", "1.99.0"):
        monkeypatch.setattr(flower_install, "installed_line", partial(line_of, release))
        for runtime in ("flower", "deployment"):
            check_run(compose({"runtime": runtime}), [])
    monkeypatch.setattr(flower_install, "installed_line", partial(line_of, "1.38.0"))
    for runtime in ("flower", "deployment"):
        with refused("1.38.0", kind=flower_install.LaunchError):
            check_run(compose({"runtime": runtime}), [])
    for runtime in ("local", "ray"):
        check_run(compose({"runtime": runtime}), [])


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("clients=x"), 1), (OSError("disk full"), 1), (KeyboardInterrupt("left"), 130)],
)
def test_errors_of_the_user_end_a_command_with_a_line_and_a_code(error, code, capsys):
    with pytest.raises(SystemExit) as ended, reported_errors("fedhet-export"):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == f"fedhet-export: {error}"


READ_ONLY = {  # the words of a command in a read-only folder, and the beginning of what it says
    "fedhet-conformal ../sweep": "--out ../sweep/conformal cannot be made",
    "fedhet-evaluate ../sweep --out f.json": "--out f.json cannot be written, because {} is not",
    "fedhet-export ../sweep/0_fedavg_seed0": "--out model.pt2 cannot be written, because {} is not",
    "fedhet-export ../sweep --out a/b": "--out a/b cannot be written, because {}/a cannot be made",
    "fedhet-new project": "{}/project cannot be made",
    "fedhet-partition task=digits clients=2": "{}/results/partitions cannot be made",
    "fedhet-report ../sweep --no-partitions": "--out ../sweep/report cannot be made",
    "fedhet-tune task=digits partition.holdout=0.1 --out a": "--out {}/a cannot be made",
}
MODULES = {
    "fedhet-conformal": "fedhet.tools.conformal.command",
    "fedhet-report": "fedhet.report.command",
}


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """Return the current folder, where nothing can be made; root ignores the permission bits."""

    make, may = Path.mkdir, os.access

    def is_below(path):
        return Path(path).absolute().is_relative_to(tmp_path)

    def mkdir(path, *words, **options):
        if is_below(path) and not path.is_dir():
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        make(path, *words, **options)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.mkdir", mkdir)
        patched.setattr("os.access", lambda path, mode: not is_below(path) and may(path, mode))
        yield tmp_path / "here"


@pytest.mark.slow
@pytest.mark.parametrize(("line", "said"), READ_ONLY.items())
def test_what_cannot_be_written_is_named_with_the_option_to_change(
    line, said, write_run, request, monkeypatch, capsys
):
    write_run()
    here = request.getfixturevalue("read_only")
    command, *words = line.split()
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit) as ended:
        import_module(MODULES.get(command, f"fedhet.tools.{command[7:]}")).main()
    assert ended.value.code == 1
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith(f"{command}: {said.format(here)}")
    assert reason.endswith(" a folder that you can write to")


def test_a_number_of_an_option_lies_between_its_bounds():
    assert number_between(0, 1)("0.5") == 0.5
    assert number_between(0, 1, with_low=True)("0") == 0.0
    for text in ("0", "1"):
        with refused("(0, 1)", kind=argparse.ArgumentTypeError):
            number_between(0, 1)(text)
    with refused("abc", kind=argparse.ArgumentTypeError):
        number_between(0, 1)("abc")
    with refused("1.5", kind=argparse.ArgumentTypeError):
        at_least(1)("1.5")
