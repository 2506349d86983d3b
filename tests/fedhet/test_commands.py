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

from fedhet.commands import at_least, number_between, reported_errors, table_console
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text
from fedhet.common.flower.line import line_of
from fedhet.conf import compose, compose_overrides, with_open_keys
from fedhet.help import check_flags, print_help
from fedhet.launch import _count_warnings, _prepare_results_dir, check_run
from fedhet.report.blocks import Entry, Table
from fedhet.report.command import rich_table
from fedhet.runtimes import flower_install
from fedhet.sweep import session
from fedhet.sweep.method_keys import with_single_sweeps
from fedhet.sweep.sweep_folder import SweepFolder
from tests.fedhet.sweep.sweeps import fork
from tests.finished_runs import write_run
from tests.recipes import TINY, run_recipe

__all__ = ["write_run"]

REFUSED = {
    "strategy=fedavgg": "strategy=fedavgg is unknown: did you mean fedavg",
    "+roundz=3": r"unknown key roundz: did you mean rounds\?",
    "results_dir=full/file": "is a file; ",
    "results_dir=full/file/x": "cannot be made .* that you can write to$",
    "resume=true": "results_dir=",
    "resume=auto": "results_dir=",
    "resume=true results_dir=new": "results_dir=.*new holds no run",
    "runtime.name=moon": "runtime.name=moon is unknown; allowed: deployment, flower, local",
    "clients=100000000": r"clients=100000000 is not allowed: .*\[0, 1000000\]",
    "clients=2000": "clients=2000 is more than the 1437 training examples of task=digits",
    "device=cuda:77": "device=cuda:77: this machine has .* set device=auto or cpu",
    "strategy.aggregator.foo=1": r"unknown key strategy\.aggregator\.foo",
    "+strategy.aggregator.foo=1": r"strategy\.aggregator",
    "strategy/aggregator=maecho": r"strategy/aggregator=maecho",
    "=3": "=3: a group takes the name of an option",
    "--multirum": r"unknown option --multirum: did you mean --multirun",
}
REFUSED_BY_THE_COMMAND = {  # each on a way of its own
    "roundz=3": r"unknown key roundz: did you mean rounds\?",
    "results_dir=full": "full is not empty: .* resume=true$",
    "-m seed=0,1 rounds=-1": "rounds=-1 is not allowed",
    "-m local.lr=0.1,-1": "local.lr=-1 is not allowed",
    "-m strategy=fedavg,fedprx": "strategy=fedprx is unknown: did you mean fedprox",
    "-m strategy=fedavg,fedsam strategy.sam.rho=1": "strategy=fedavg of this sweep has no such",
    "-m strategy=fedsam,fedmrur local.lrr=1": r"unknown key local\.lrr: did you mean local\.lr",
    "task.data_options.path=~/x": """: "task.data_options.path='~/x'"$""",
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
    whole = run_recipe(tmp_path / "whole", *words, "rounds=2", clients=3)
    found = json.loads((folder / "summary.json").read_text())
    assert found["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.slow
def test_a_file_of_a_project_that_is_no_yaml_is_named_with_the_line(own_project):
    path = own_project / "my_project" / "conf" / "task" / "broken.yaml"
    path.write_text("defaults: [own]\nname: broken\n  model: my_project.model:Net\n")
    done = fork(own_project, "task=broken")
    assert done.returncode == 1
    said = f"fedhet: {path} cannot be read as YAML: line 3, column 8: mapping values are not"
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


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
        with pytest.raises(flower_install.LaunchError, match=r"1\.38\.0"):
            check_run(compose({"runtime": runtime}), [])
    for runtime in ("local", "ray"):
        check_run(compose({"runtime": runtime}), [])


def test_a_table_in_a_pipe_is_whole_and_brackets_in_it_are_no_markup(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    names = [f"c10_practical_strategy=[fedprox,fedavgm]_seed_{number}" for number in range(12)]
    table = rich_table(Table(names, [[Entry(f"{n}[/b]", "[red]") for n in names]], "", words=12))
    table_console().print(table)
    printed = capsys.readouterr().out
    assert sum(all(name in line for name in names) for line in printed.splitlines()) == 2
    assert "[/b]" in printed
    assert "[red]" in printed
    monkeypatch.setenv("COLUMNS", "80")
    table_console().print(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


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


def test_a_sweep_that_cannot_be_written_names_its_key(read_only):
    message = r"^hydra\.sweep\.dir=.*/here/sweep cannot be made .* that you can write to$"
    with pytest.raises(ConfigError, match=message):
        session._lock(SweepFolder(read_only / "sweep"), resuming=False)


def test_a_file_that_cannot_be_made_is_named_and_not_the_temporary_one(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", path.name)

    for name in ("touch", "unlink"):
        monkeypatch.setattr(f"pathlib.Path.{name}", refuse)
    message = rf"^{tmp_path}/kept\.json could not be written: \[Errno 30\] Read-only file system$"
    with pytest.raises(OSError, match=message):
        save_text(tmp_path / "kept.json", "")


@pytest.mark.slow
def test_the_help_in_a_pipe_is_not_padded(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_help(["strategy=fedprox"])
    printed = capsys.readouterr().out
    assert re.search(r"^local\.lr +0\.1 +a number above 0 +eta_l, times", printed, re.MULTILINE)
    assert not re.search(r" $", printed, re.MULTILINE)


def test_a_current_folder_that_was_removed_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit), reported_errors("fedhet"):
        raise AssertionError("the body has begun")
    assert capsys.readouterr().err.startswith("fedhet: the current folder is no more")


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError), reported_errors("fedhet-export"):
        raise KeyError


def test_a_number_of_an_option_lies_between_its_bounds():
    assert number_between(0, 1)("0.5") == 0.5
    assert number_between(0, 1, with_low=True)("0") == 0.0
    for text in ("0", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must lie in \(0, 1\)"):
            number_between(0, 1)(text)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^abc is not a number$"):
        number_between(0, 1)("abc")
    with pytest.raises(argparse.ArgumentTypeError, match=r"^1\.5 is not a whole number$"):
        at_least(1)("1.5")


def test_the_warnings_of_a_log_are_counted(tmp_path):
    log = tmp_path / "log.txt"
    assert _count_warnings(log) == 0
    log.write_text("\x1b[93mWARNING \x1b[0m: a\nWARNING : b\n\x1b[92mINFO \x1b[0m: no WARNING\n")
    assert _count_warnings(log) == 2
