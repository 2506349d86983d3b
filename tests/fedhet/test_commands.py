"""How fedhet's commands report errors and print tables."""

from __future__ import annotations

import argparse

import pytest

from common.errors import ConfigError
from fedhet.commands import number_between, reported_errors, table_console
from fedhet.report.blocks import Entry, Table
from fedhet.report.command import rich_table

NAMES = [f"c10_practical_fedavg_seed_{number}" for number in range(12)]
WIDE = Table(NAMES, [[Entry(name) for name in NAMES]], "", words=12)


@pytest.mark.parametrize(("columns", "folded"), [(None, False), ("80", True)])
def test_a_table_is_folded_to_the_columns_that_are_asked_for_and_else_whole(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str | None,
    folded: bool,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table_console().print(rich_table(WIDE))
    lines = capsys.readouterr().out.splitlines()
    assert any(all(name in line for name in NAMES) for line in lines) != folded


def test_brackets_in_a_table_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    texts = "a[/b]", "0_strategy=[fedprox,fedavgm]", "[red]"
    table_console().print(rich_table(Table(texts[:1], [[Entry(*texts[1:])]], "", words=1)))
    printed = capsys.readouterr().out
    assert all(text in printed for text in texts)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("clients=x is not allowed"), 1, "fedhet-export: clients=x is not allowed"),
        (OSError("disk full"), 1, "fedhet-export: disk full"),
        (KeyboardInterrupt("nothing left"), 130, "fedhet-export: nothing left"),
    ],
)
def test_errors_of_the_user_end_a_command_with_a_line_and_a_code(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, reported_errors("fedhet-export"):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err.strip() == message
    with pytest.raises(KeyError), reported_errors("fedhet-export"):
        raise KeyError  # a bug keeps its traceback


def test_a_number_of_an_option_lies_between_its_bounds() -> None:
    assert number_between(0, 1)("0.5") == 0.5
    assert number_between(0, 1, with_low=True)("0") == 0.0
    for text in ("0", "1"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"must lie in \(0, 1\)"):
            number_between(0, 1)(text)
