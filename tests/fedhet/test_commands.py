"""What fedhet's commands share."""

from __future__ import annotations

import pytest

from fedhet.commands import table_console
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
    name = "0_strategy=[fedprox,fedavgm]"
    table_console().print(rich_table(Table(["a[/b]"], [[Entry(name, "[red]")]], "", words=1)))
    printed = capsys.readouterr().out
    assert all(text in printed for text in (name, "a[/b]", "[red]"))
