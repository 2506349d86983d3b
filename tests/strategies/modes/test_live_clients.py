"""Asynchronous rounds of real clients over a Grid whose replies arrive as a test says."""

import math
from collections.abc import Callable

import pytest
import torch
from flwr.app import Error, Message, MessageType, RecordDict

from fedhet.client_app.state import ContextStateStore
from fedhet.server_app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedbuff import FedAsync, FedBuff
from fedhet.strategies.modes import live_clients
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.systems import LogNormal
from fedhet.strategies.scaffold import CONTROL_VARIATE, SCAFFOLD
from fedhet.strategies.wire.records import UNASKED, to_tensors
from tests.federation import InProcessGrid, lost
from tests.refused import refused
from tests.strategies.round.test_round import folders
from tests.strategies.sides import built
from tests.strategies.test_fedbuff import LR, SIZE, STEPS, run

FIRST = 1000  # node of client 0


class ArrivingGrid(InProcessGrid):
    """Answers one message of training a pull, when its time has come.

    Args:
        seconds: that a client takes; a time that never comes is infinite.
    """

    def __init__(self, handlers, tamper, *, seconds: Callable[[int], float]) -> None:
        super().__init__(handlers, tamper)
        self.seconds, self.clock = seconds, 0.0
        self.due: dict[str, float] = {}
        self.extra: list[Message] = []  # replies that nobody has asked for

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        for one in ids:
            client = self.asked[one].metadata.dst_node_id - FIRST
            self.due[one] = self.clock + self.seconds(client)
        return ids

    def pull_messages(self, message_ids):
        waiting = [one for one in message_ids if self.due[one] < math.inf]
        found, self.extra = self.extra, []
        if waiting and not found:
            asked = lambda one: self.asked[one].metadata.dst_node_id  # noqa: E731
            first = min(waiting, key=lambda one: (self.due[one], asked(one)))
            self.clock = max(self.clock, self.due.pop(first))
            found = list(super().pull_messages([first]))
        return found


def arriving(seconds: Callable[[int], float] = lambda client: 1.0, made: list | None = None):
    """Return what makes the grid, and keeps it in ``made``."""

    def make(handlers, tamper):
        grid = ArrivingGrid(handlers, tamper, seconds=seconds)
        if made is not None:
            made.append(grid)
        return grid

    return make


def slots(**more):
    return {"local_lr": LR, "local_training": STEPS, **more}


def scaffold(**how):
    return built(SCAFFOLD, asynchronous=Asynchronous(buffer=2), aggregator=UniformMean(), **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda **how: built(FedBuff, asynchronous={"buffer": 2}, **how),
        lambda **how: built(FedAsync, **how),
        scaffold,
    ],
)
def test_replies_that_arrive_in_the_order_of_a_simulated_system_give_its_bits(make):
    system = LogNormal(sigma=1.5)
    expected, simulated = run(
        make(system=system, sampler=FixedSizeSampler(participation=0.67), **slots()), 12
    )

    def seconds(client: int) -> float:
        return system.seconds(client, 24, 0)

    how = slots(sampler=FixedSizeSampler(participation=0.67))
    found, reports = run(make(**how), 12, grid=arriving(seconds))
    assert torch.equal(found, expected)
    assert [report.clients for report in reports] == [report.clients for report in simulated]
    pairs = zip(reports[1:], simulated[1:], strict=True)
    assert all(sorted(one.staleness) == sorted(other.staleness) for one, other in pairs)
    assert max(max(report.staleness) for report in reports[1:]) > 2
    assert reports[-1].simulated_seconds == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
def test_real_clients_that_all_finish_a_step_are_a_round_to_the_bit(method):
    expected, waited = run(built(method, aggregator=UniformMean(), **slots()), 4)
    together = Asynchronous(buffer=SIZE)
    alike = built(method, aggregator=UniformMean(), asynchronous=together, **slots())
    found, reports = run(alike, 4, grid=arriving())
    assert torch.equal(found, expected)
    assert [one.bytes_up for one in reports] == [one.bytes_up for one in waited]
    assert [one.bytes_down for one in reports] == [one.bytes_down for one in waited]


@pytest.mark.slow
def test_sites_that_fail_vanish_or_stay_silent_do_not_end_the_run():
    """Client 0 fails, 1 never answers, 2 is lost to the SuperLink, 3 leaves after step 3."""
    made = []

    def tamper(reply: Message) -> Message:
        if reply.metadata.message_type == MessageType.TRAIN:
            if reply.metadata.src_node_id == FIRST:
                return lost(reply, Error(code=2, reason="no memory"))
            if reply.metadata.src_node_id == FIRST + 2:
                return lost(reply)
        return reply

    def leave(report, arrays):
        if report.round == 3:
            made[0].handlers.pop(FIRST + 3)
        return False

    how = {"grid": arriving(lambda client: math.inf if client == 1 else 1.0, made)}
    _, reports = run(
        built(FedBuff, asynchronous={"buffer": 3}, **slots()),
        8,
        tamper=tamper,
        on_round=leave,
        timeout=0.5,
        **how,
    )
    assert [report.round for report in reports] == list(range(9))
    failures = " ".join(text for report in reports for text in report.failures)
    assert "client 0: error 2: no memory" in failures
    assert "client 1: no reply within 0.5 s" in failures
    assert "client 2: error 5: Node Unavailable" in failures
    assert reports[1].clients == [3, 4, 5]
    assert (reports[-1].clients, reports[-1].absent) == ([4, 5], [3])


@pytest.mark.slow
def test_late_and_foreign_replies_are_refused_and_named():
    """A reply to no message that is waited for, two of another node, and one that is too stale."""
    made = []

    def inject(report, arrays):
        if report.round == 0:
            return False
        grid = made[0]
        waiting = next(one for one, when in grid.due.items() if when > 100)
        reply = grid._answer(grid.asked[waiting])
        if report.round == 1:
            reply.metadata.__dict__["_reply_to_message_id"] = "a message of another process"
            grid.extra.append(reply)
        if report.round == 2:
            reply.metadata.__dict__["_src_node_id"] = FIRST
            grid.extra.append(reply)
        if report.round == 3:
            forged = lost(reply, Error(code=2, reason="no memory"))
            forged.metadata.__dict__["_src_node_id"] = FIRST
            grid.extra.append(forged)
        return False

    def seconds(client: int) -> float:
        return {4: 1000.0, 5: 4.5}.get(client, 1.0)

    def method():
        settings = Asynchronous(buffer=2, max_staleness=1)
        return built(FedAvg, asynchronous=settings, aggregator=UniformMean(), **slots())

    expected, _ = run(method(), 10, grid=arriving(seconds))
    found, reports = run(method(), 10, grid=arriving(seconds, made), on_round=inject)
    assert torch.equal(found, expected)
    refused = [text for report in reports for text in report.failures]
    assert len(refused) == 3
    assert all(UNASKED in text for text in refused)
    assert [report.late for report in reports if report.late] == [[5]]
    assert max(max(report.staleness) for report in reports[1:]) <= 1


@pytest.mark.slow
def test_a_resumed_run_asks_everybody_anew_and_late_replies_leave_no_trace(tmp_path):
    def seconds(client: int) -> float:
        return 1.0 + client

    def strategy():
        return scaffold(**slots(sampler=FixedSizeSampler(participation=0.67)))

    def resumed(name: str, *, late: bool):
        first, saved, made = strategy(), {}, []
        store = folders(tmp_path / name, SIZE)

        def stop(report, arrays):
            if report.round == 6:
                saved.update(state=first.snapshot(), x=to_tensors(arrays))
                first.state.mark_durable()
            return report.round == 8  # two steps are lost

        run(first, 14, stores=store, on_round=stop, grid=arriving(seconds, made))
        assert made[0].due  # clients are in flight
        checkpoint = Checkpoint(saved["x"], saved["state"], "recipe")
        loaded = load_checkpoint(save_checkpoint(tmp_path / name, checkpoint), ["head.weight"])
        second = strategy()
        second.restore(loaded.state)

        def again(handlers, tamper):
            grid = ArrivingGrid(handlers, tamper, seconds=seconds)
            if late:  # the sites finish what they were asked before the stop
                grid.extra = [made[0]._answer(made[0].asked[one]) for one in made[0].due]
                for number, reply in enumerate(grid.extra):
                    reply.metadata.__dict__["_reply_to_message_id"] = f"before {number}"
            return grid

        return run(second, 14, stores=store, initial=loaded.params, grid=again)

    lost_ones, _ = resumed("lost", late=False)
    found, reports = resumed("late", late=True)
    assert torch.equal(found, lost_ones)
    assert reports[0].round == 7
    assert any("before the run was resumed" in text for text in reports[0].failures)


class Losing(ContextStateStore):
    """Has lost the state of round 3, or of a later one, as often as it is asked for ``times``."""

    def __init__(self, times: float = 0) -> None:
        super().__init__(RecordDict())
        self.times = times

    def load(self, experiment, round):
        if round >= 3 and self.times > 0:
            self.times -= 1
            return {}
        return super().load(experiment, round)


def mean_variate(strategy, stores) -> torch.Tensor:
    """Return the mean of the c_i that the clients have, over N."""
    total = torch.zeros(1, 2, dtype=torch.float64)
    for client, store in stores.items():
        told = strategy.state.config_of(client)
        state = ContextStateStore.load(store, told["experiment"], told["state-round"])
        if CONTROL_VARIATE in state and CONTROL_VARIATE not in told["state-dropped"]:
            total += state[CONTROL_VARIATE]["head.weight"]
    return total / SIZE


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, math.inf])
@pytest.mark.parametrize("clock", ["waits", "simulated", "real"])
def test_c_stays_the_mean_of_the_clients_after_a_loss_and_one_site_restarts_them_once(clock, times):
    """A c_i+ - c_i of a client in flight, whose c_i starts again at zero, would stay in c."""
    system, settings = LogNormal(sigma=1.5), None if clock == "waits" else Asynchronous(buffer=2)
    how = slots(
        sampler=FixedSizeSampler(participation=0.67),
        system=system if clock == "simulated" else None,
    )
    strategy = built(SCAFFOLD, asynchronous=settings, **how)
    stores = {i: Losing(times if i == 1 else 0) for i in range(SIZE)}
    grid = arriving(system.slowness) if clock == "real" else InProcessGrid
    _, reports = run(strategy, 16, stores=stores, grid=grid)
    lost = [report.round for report in reports if report.metrics.get("state-lost")]
    assert set(strategy.state.restarted.values()) == {*lost}
    assert len(lost) == 1
    refused = [text for report in reports for text in report.failures]
    assert all("client 1: it says that it has lost its state, again" in text for text in refused)
    assert bool(refused) == (times > 1)
    found = strategy.server_step.sides["scaffold"].control_variate["head.weight"]
    assert found.any()
    torch.testing.assert_close(found, mean_variate(strategy, stores), atol=1e-12, rtol=0)


def test_what_real_clients_cannot_have_is_refused():
    with refused("buffer=9"):
        run(built(FedBuff, asynchronous={"buffer": 9}, **slots()), 1, grid=arriving())

    class Looks(FedBuff):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    with refused("aggregate_train"):
        run(built(Looks, **slots()), 1, grid=arriving())


def test_a_step_in_which_all_sites_vanish_fails_and_the_next_goes_on(monkeypatch):
    monkeypatch.setattr(live_clients, "_LOOK_SECONDS", 0.0)

    class Vanishing(ArrivingGrid):
        """Shows no node when it is asked a second time in step 2."""

        away = 0

        def get_node_ids(self):
            self.away = max(0, self.away - 1)
            return super().get_node_ids() if self.away != 1 else []

        def pull_messages(self, message_ids):
            return [] if self.away else super().pull_messages(message_ids)

    made = []

    def make(handlers, tamper):
        made.append(Vanishing(handlers, tamper, seconds=lambda client: 1.0))
        return made[0]

    def leave(report, arrays):
        made[0].away = 3 if report.round == 1 else 0
        return False

    _, reports = run(
        built(FedBuff, asynchronous={"buffer": 2}, **slots()), 3, grid=make, on_round=leave
    )
    assert [len(report.clients) for report in reports[1:]] == [2, 0, 2]
