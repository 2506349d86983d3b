"""How fedhet's commands report errors and print tables."""

from __future__ import annotations

import argparse

import pytest

from common.errors import ConfigError
from fedhet.commands import number_between, reported_errors, table_console
from fedhet.report.blocks import Entry, Table
from fedhet.report.command import rich_table


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


def test_errors_of_the_user_end_a_command_with_a_line_and_a_code(capsys):
    for error, code in (
        (ConfigError("clients=x is not allowed"), 1),
        (OSError("disk full"), 1),
        (KeyboardInterrupt("nothing left"), 130),
    ):
        with pytest.raises(SystemExit) as ended, reported_errors("fedhet-export"):
            raise error
        assert ended.value.code == code
        assert capsys.readouterr().err.strip() == f"fedhet-export: {error}"
    with pytest.raises(KeyError), reported_errors("fedhet-export"):
        raise KeyError  # a bug keeps its traceback


def test_a_number_of_an_option_lies_between_its_bounds():
    assert number_between(0, 1)("0.5") == 0.5
    assert number_between(0, 1, with_low=True)("0") == 0.0
    for text in ("0", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must lie in \(0, 1\)"):
            number_between(0, 1)(text)
