"""Simulated systems: who answers when, by hand and by brute force."""

import json
import math

import numpy as np
import pytest
import torch

from fedhet.server_app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.modes.systems import Constant, DayNight, LogNormal, SystemClients, Trace
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import Regression, federate
from tests.refused import refused
from tests.strategies.round.test_round import clients, folders
from tests.strategies.sides import built

OPTIONS = LocalTrainingConfig(batch_size=4, epochs=3)


def test_seconds_by_hand_and_the_first_in_time_count():
    system = Constant(seconds_per_example=0.5, megabytes_per_second=2.0)
    assert system.seconds(0, 8, 6_000_000) == 8 * 0.5 + 3.0
    seconds = {4: 5.0, 7: 2.0, 9: 2.0, 1: 9.0, 3: 4.0}
    found = system.play(1, seconds, 3)
    assert (found.clients, found.late, found.dropped, found.seconds) == ([3, 7, 9], [1, 4], [], 4.0)
    hurried = Constant(deadline_seconds=3.0).play(1, seconds, 3)
    assert (hurried.clients, hurried.late, hurried.seconds) == ([7, 9], [1, 3, 4], 3.0)
    waiting = Constant(dropout=1.0).play(1, seconds, 3)
    assert (waiting.clients, waiting.dropped, waiting.seconds) == ([], [1, 3, 4, 7, 9], 0.0)
    assert Constant(dropout=1.0, deadline_seconds=7.0).play(1, seconds, 3).seconds == 7.0


def test_over_selection_asks_others_of_those_present():
    system, present = Constant(over_selection=1.5, seed=3), list(range(0, 40, 2))
    for round in range(1, 6):
        asked = system.asked([2, 8, 30], present, round)
        assert len(asked) == 5
        assert {2, 8, 30} < set(asked) <= set(present)
    assert system.asked([0, 2], [0, 2], 1) == [0, 2]  # nobody else is there
    tenth_more = Constant(over_selection=1.1).asked(range(50), range(100), 1)
    assert len(tenth_more) == 55  # 50 * 1.1 is 55.00000000000001
    drawn = [tuple(system.asked([2, 8, 30], present, round)) for round in range(50)]
    assert len(set(drawn)) > 30
    assert drawn == [tuple(system.asked([2, 8, 30], present, round)) for round in range(50)]


def test_slowness_is_log_normal_and_a_clients_own():
    system = LogNormal(sigma=1.8, seed=1)
    slowness = [system.slowness(client) for client in range(4000)]
    assert slowness[:5] == [LogNormal(sigma=1.8, seed=1).slowness(client) for client in range(5)]
    logs = np.log(slowness)
    assert abs(logs.mean()) < 0.1
    assert logs.std() == pytest.approx(1.8, rel=0.05)
    assert np.quantile(slowness, 0.9) == pytest.approx(math.exp(1.8 * 1.2816), rel=0.15)  # 10.04


@pytest.mark.slow
def test_dropouts_have_their_share_and_follow_round_and_client():
    system, seconds = Constant(dropout=0.2, seed=2), dict.fromkeys(range(500), 1.0)
    counts = [len(system.play(round, seconds, 500).dropped) for round in range(1, 21)]
    assert np.mean(counts) == pytest.approx(100, abs=6)  # 3 standard deviations of the mean
    assert system.play(7, seconds, 500) == Constant(dropout=0.2, seed=2).play(7, seconds, 500)
    few = system.play(7, {3: 1.0, 4: 1.0}, 2).dropped
    assert few == [one for one in system.play(7, seconds, 500).dropped if one in (3, 4)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda system: system.asked([0], range(30), 1),
        lambda system: system.slowness(3),
        lambda system: [client for client in range(30) if system.drops_out(1, client)],
        lambda system: system.available(range(30), 30_000.0),
    ],
    ids=["over-selection", "slowness", "dropout", "days"],
)
def test_another_seed_draws_another_system(draw):
    one, same, other = (DayNight(dropout=0.5, over_selection=9.0, seed=s) for s in (1, 1, 2))
    assert draw(one) == draw(same) != draw(other)


def test_a_day_has_its_hours_for_every_client():
    system, hours = DayNight(share=0.25, spread=1.0), np.arange(0, 86_400, 360)
    there = [set(system.available(range(50), clock)) for clock in hours]
    for client in range(50):
        share = np.mean([client in present for present in there])
        assert share == pytest.approx(0.25, abs=0.005)
    assert max(map(len, there)) < 30  # they live around the world
    alone = DayNight(share=0.25, spread=0.0)
    assert alone.available(range(3), 80_000.0) == []
    assert alone.until_available(range(3), 80_000.0, 2) == 80_000.0 + 60 * 107  # past midnight
    with refused("9 clients", "min_replies", kind=TimeoutError):
        alone.until_available(range(3), 0.0, 9)


def test_traces_repeat_and_say_how_slow(tmp_path):
    (tmp_path / "a.csv").write_text("client,start,end,slowness\nx,0,10,2\nx,30,40,2\ny,5,40,0.5\n")
    trace = Trace(path=str(tmp_path / "a.csv"))
    there = {0: [0, 2], 7: [0, 1, 2], 20: [1], 35: [0, 1, 2], 42: [0, 2], 60: [1]}
    for clock, present in there.items():
        assert trace.available(range(3), clock) == present
    assert [trace.seconds(client, 1000, 0) for client in range(3)] == [2.0, 0.5, 2.0]
    scale = {"0": {"active": [5, 20], "inactive": [10], "finish_time": 30, "duration": 15}}
    (tmp_path / "b.json").write_text(json.dumps(scale))
    found = Trace(path=str(tmp_path / "b.json"))
    assert [bool(found.available([0], clock)) for clock in (0, 6, 12, 25, 36)] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_a_trace_is_waited_for_to_the_second_however_short_or_rare_its_times(tmp_path):
    """Each of its minutes may begin with nobody there, and a gap may be longer than a week."""
    (tmp_path / "a.csv").write_text("client,start,end\nx,30,60\ny,45,60\n")
    half_minutes = Trace(path=str(tmp_path / "a.csv"))
    assert half_minutes.until_available([0, 1], 0.0, 1) == 30.0
    assert half_minutes.until_available([0, 1], 0.0, 2) == 45.0
    assert half_minutes.until_available([0, 1], 50.0, 2) == 50.0
    assert half_minutes.until_available([1], 60_000.5, 1) == 60_045.0
    (tmp_path / "b.csv").write_text("client,start,end\nx,0.1,0.2\ny,2000000,2000000.7\n")
    rare = Trace(path=str(tmp_path / "b.csv"))
    assert rare.until_available([1], 0.0, 1) == 2_000_000.0
    for clock in np.random.default_rng(0).uniform(0.0, 1e8, 200):
        found = rare.until_available([0], clock, 1)  # its last bits may be lost
        assert 0.0999 <= found % 2_000_000.7 <= 0.2
        assert 0.0 <= found - clock <= 2_000_000.7
    with refused("2 clients", "min_replies", kind=TimeoutError):
        rare.until_available([0, 1], 0.0, 2)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "client,start,end\n", "a.csv"),
        ("a.csv", "client,start\nx,1\n", "line 2"),
        ("a.csv", "client,start,end\nx,5,5\n", "line 2"),
        ("a.csv", "client,start,end\nx,0,nan\n", "line 2"),
        ("a.csv", "client,start,end,slowness\nx,0,1,0\n", "line 2"),
        ("a.json", "[1]", "FedScale"),
        ("a.json", "{", "line 1"),
        ("a.json", '{"0": {"active": [], "inactive": [], "finish_time": 3}}', "a.json"),
    ],
)
def test_a_broken_trace_is_refused_by_name(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with refused("system.path", said):
        Trace(path=str(tmp_path / name))
    with refused(str(tmp_path / "none")):
        Trace(path=str(tmp_path / "none"))


def strategy(**how) -> SCAFFOLD:
    system = LogNormal(sigma=1.5, over_selection=1.5, dropout=0.2, deadline_seconds=0.1, seed=4)
    sampler = FixedSizeSampler(participation=0.5, seed=1)
    return built(
        SCAFFOLD, local_lr=0.1, sampler=sampler, system=system, local_training=OPTIONS, **how
    )


def run(strategy, path, rounds=10, **how):
    return federate(
        strategy,
        clients(8),
        model=lambda: Regression(2),
        rounds=rounds,
        options=OPTIONS,
        stores=folders(path, 8),
        **how,
    )


@pytest.mark.slow
def test_a_run_keeps_the_clock_and_a_resumed_one_ends_alike(tmp_path):
    whole, reports = run(strategy(), tmp_path / "whole")
    times = [report.simulated_seconds for report in reports[1:]]
    assert times == sorted(times)
    for report, before in zip(reports[1:], [0.0, *times], strict=False):
        asked = {*report.clients, *report.dropped, *report.late}
        assert len(asked) == len(report.clients) + len(report.dropped) + len(report.late) == 6
        took = [LogNormal(sigma=1.5, seed=4).slowness(i) * 0.024 for i in report.clients]
        assert len(report.clients) <= 4
        assert all(seconds <= 0.1 for seconds in took)
        ended = max(took) if len(report.clients) == 4 else 0.1
        assert report.simulated_seconds == pytest.approx(before + ended)
    first, saved = strategy(), {}

    def stop(report, arrays):
        if report.round == 5:
            saved["state"] = first.snapshot()
            first.state.mark_durable()
        return report.round == 5

    params, _ = run(first, tmp_path / "cut", on_round=stop)
    path = save_checkpoint(tmp_path, Checkpoint(params, saved["state"], "recipe"))
    loaded = load_checkpoint(path, list(params))
    second = strategy()
    second.restore(loaded.state)
    resumed, later = run(second, tmp_path / "cut", initial=loaded.params)
    assert torch.equal(resumed["head.weight"], whole["head.weight"])
    assert later[-1].simulated_seconds == times[-1]


def test_a_round_waits_until_a_share_of_those_that_are_there_is_enough():
    """Half of 8 is 4, and of 9 it is 5, rounded: a round of at least 5 waits for 9 of 10."""
    system, half = DayNight(spread=1.0), FixedSizeSampler(participation=0.5)
    cohorts = SystemClients(half, system, None, least=5)
    assert cohorts._needed(10) == 9
    assert cohorts._needed(7) == 7  # never more than there are
    assert SystemClients(half, system, None)._needed(10) == 1
    drawn_one_by_one = BernoulliSampler(participation=0.5)  # a draw may be of all
    assert SystemClients(drawn_one_by_one, system, None, least=5)._needed(10) == 5
