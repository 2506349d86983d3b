"""How `fedhet` and the other commands report errors and print tables."""

import argparse
import re

import pytest

from common.errors import ConfigError
from fedhet.commands import number_between, reported_errors, table_console
from fedhet.report.blocks import Entry, Table
from fedhet.report.command import rich_table
from fedhet.runtimes import flower_install
from tests.fedhet.sweep.sweeps import fork


@pytest.mark.slow
def test_help_and_what_cannot_start_leave_no_trace(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = fork(tmp_path, "--help")
    assert done.returncode == 0
    assert "strategy: " in done.stdout
    for word, message in {
        "strategy=fedavgg": "fedavgg(.|\n)*scaffold",  # Hydra lists the options
        "roundz=3": "roundz",
        "results_dir=full": "^.*full is not empty: .* resume=true$",  # in one line
        "results_dir=full/file": "^.*is a file; .*$",
        "resume=true": "^.*results_dir=.*$",
        "runtime.name=moon": "^.*runtime=moon.*$",
    }.items():
        assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
        done = fork(tmp_path, word)
        assert done.returncode == 1
        assert re.search(message, done.stderr.rstrip()), done.stderr


def test_another_flower_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(flower_install.importlib.metadata, "version", lambda _: "1.41.0")
    with pytest.raises(flower_install.LaunchError, match=r"flwr 1\.41\.0 is installed.*1\.39"):
        flower_install.check_flower()


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


def test_a_bug_keeps_its_traceback():
    with pytest.raises(KeyError), reported_errors("fedhet-export"):
        raise KeyError


def test_a_number_of_an_option_lies_between_its_bounds():
    assert number_between(0, 1)("0.5") == 0.5
    assert number_between(0, 1, with_low=True)("0") == 0.0
    for text in ("0", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must lie in \(0, 1\)"):
            number_between(0, 1)(text)
