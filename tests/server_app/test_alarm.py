"""Where a run warns of unusually large updates."""

import logging

import pytest

from fedhet.conf import compose
from fedhet.server_app.listeners import Finished
from fedhet.server_app.listeners.messages import Alarm
from fedhet.server_app.run import Run
from fedhet.strategies.round.round_report import RoundReport
from tests.recipes import TINY, overrides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ([], False),
        (["attack=scaled_update", "attack.allow=true"], True),
        (["strategy/aggregator=median"], True),
        (["runtime=deployment"], True),
    ],
    ids=str,
)
def test_only_a_run_in_which_a_client_may_be_hostile_warns(words, warns, tmp_path):
    run = Run(compose(overrides(*TINY, *words)), tmp_path, None)
    assert any(isinstance(one, Alarm) for one in run.listeners) == warns


def test_a_warning_names_client_payload_and_z_and_explains_itself_once(caplog):
    alarm, report = Alarm(), RoundReport(3)
    report.alarms = {7: {"update": 19.26, "control-variate": 8.0}}
    with caplog.at_level(logging.WARNING, "flwr"):
        for _ in range(2):
            alarm.on_round(Finished(report, [], None, {}, 9))
    first, second = caplog.messages
    assert second in first
    for word in ("round 3", "client 7", "update (z = 19.3), control-variate (z = 8.0)"):
        assert word in second
    assert "docs/robust.md" in first
