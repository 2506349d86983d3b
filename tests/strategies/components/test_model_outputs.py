"""Model outputs: which model a round evaluates and returns, and that training ignores it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import nn

from strategies.components.model_outputs import LastTwo, Latest, Participants
from strategies.components.samplers import FixedSizeSampler
from strategies.components.server_optimizers import SGD
from strategies.fedavg import FedAvg
from strategies.round.federated import FederatedStrategy
from strategies.round.records import to_tensors
from tests.federation import Regression, federate
from tests.strategies.round.test_round import OPTIONS, clients

WEIGHT = "head.weight"
OUTPUTS = [Latest(), LastTwo(), Participants()]


def name_of(output) -> str:
    return type(output).__name__


@dataclass
class Watched:
    """A run: x after every round, the output then, and what was sent to clients for evaluation."""

    x: list[ArrayRecord] = field(default_factory=list)
    output_model: list[ArrayRecord] = field(default_factory=list)
    sent: list[ArrayRecord] = field(default_factory=list)
    last: ArrayRecord = field(default_factory=ArrayRecord)


def watch(strategy: FederatedStrategy, rounds: int = 3, model=None, **how) -> Watched:
    """Run a strategy and return what could be seen of it."""
    watched, start = Watched(), strategy.start

    def watched_start(grid, arrays, num_rounds, on_round):
        def evaluate(round: int, output_model: ArrayRecord) -> MetricRecord:
            watched.output_model.append(output_model)
            return MetricRecord({"accuracy": 0.0})

        def observe(report, x: ArrayRecord) -> bool:
            watched.x.append(x)
            if report.round > 0:
                watched.sent.append(grid.sent[0].content.array_records["params"])
            return on_round(report, x)

        result = start(grid, arrays, num_rounds=num_rounds, evaluate_fn=evaluate, on_round=observe)
        watched.last = result.arrays
        return result

    strategy.start = watched_start
    make = model or (lambda: Regression(2))
    federate(strategy, clients(), model=make, rounds=rounds, options=OPTIONS, **how)
    return watched


def quadrupled(output, **slots) -> FedAvg:
    """FedAvg whose server step is four times Delta: the three outputs are three models."""
    slots = {"server_optimizer": SGD(lr=4.0), "local_lr": 0.05, **slots}
    return FedAvg(output=output, evaluate_on_clients=True, **slots)


def expected(output, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return what the output must be between two x's that are 4 Delta apart."""
    share = {"Latest": 1.0, "LastTwo": 0.5, "Participants": 0.25}[name_of(output)]
    return before + share * (after - before)


def weights(records: list[ArrayRecord], name: str = WEIGHT) -> list[torch.Tensor]:
    return [to_tensors(record)[name] for record in records]


def test_outputs_by_hand():
    """x 1, Delta 2, new x 7: 7, (1 + 7) / 2, 1 + 2."""
    x, update, stepped = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 7.0))
    assert [output(x, update, stepped, [])["w"].item() for output in OUTPUTS] == [7.0, 4.0, 3.0]


def lose(rounds: set[int], strategy: FederatedStrategy):
    """Return a tamper that loses every train reply of these rounds."""

    def tamper(reply: Message) -> Message | None:
        is_train = reply.has_content() and "update" in reply.content.array_records
        return None if is_train and strategy.state.round + 1 in rounds else reply

    return tamper


@pytest.mark.slow
@pytest.mark.parametrize("lost", [set(), {1}, {2}, {2, 3}], ids=str)
@pytest.mark.parametrize("output", OUTPUTS, ids=name_of)
def test_the_output_is_evaluated_everywhere_and_returned(output, lost):
    """At the server, at the clients, in the end. It starts as the initial model.

    After a round without replies x stays, and so does the output. Training is that of Latest.
    """
    strategy, plain = quadrupled(output), quadrupled(Latest())
    run = watch(strategy, tamper=lose(lost, strategy))
    x, output_model = weights(run.x), weights(run.output_model)
    assert torch.equal(output_model[0], x[0])
    for round in (1, 2, 3):
        assert torch.equal(x[round - 1], x[round]) == (round in lost)
        wanted = expected(output, x[round - 1], x[round])
        wanted = output_model[round - 1] if round in lost else wanted
        torch.testing.assert_close(output_model[round], wanted, atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(weights(run.sent), output_model[1:], strict=True))
    assert torch.equal(to_tensors(run.last)[WEIGHT], output_model[-1])
    theirs = watch(plain, tamper=lose(lost, plain))
    assert all(torch.equal(a, b) for a, b in zip(x, weights(theirs.x), strict=True))


def test_latest_is_x_itself():
    """The same records, and nothing beside them in the state."""
    strategy = quadrupled(Latest())
    run = watch(strategy)
    assert all(x is output_model for x, output_model in zip(run.x, run.output_model, strict=True))
    assert run.last is run.x[-1]
    assert strategy.snapshot().tensors.keys() == {"server_optimizer/velocity"}


class Normed(nn.Module):
    """A linear head on normalised inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        self.head = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs):
        """Return (features, logits)."""
        features = self.norm(inputs)
        return features, self.head(features)


@pytest.mark.parametrize("output", OUTPUTS, ids=name_of)
def test_buffers_are_those_of_the_new_model(output):
    names = ["norm.running_mean", "norm.running_var"]
    run = watch(quadrupled(output, buffers=names), model=Normed)
    for name in names:
        x, output_model = weights(run.x, name), weights(run.output_model, name)
        assert not torch.equal(x[1], x[2])
        assert all(torch.equal(a, b) for a, b in zip(x, output_model, strict=True))


@pytest.mark.parametrize("lost", [{3}, {3, 4}, set()], ids=["one", "all", "none"])
@pytest.mark.parametrize("output", OUTPUTS, ids=name_of)
@pytest.mark.slow
def test_a_resumed_run_has_the_output_of_the_uninterrupted_one(output, lost):
    """Cut after round 2 of 4, where the rounds after it fail or do not."""

    def strategy() -> FedAvg:
        return quadrupled(output, sampler=FixedSizeSampler(0.5, seed=3))

    whole = strategy()
    uninterrupted = watch(whole, rounds=4, tamper=lose(lost, whole))
    first, second = strategy(), strategy()
    cut = watch(first, rounds=2)
    second.restore(first.snapshot())
    x = to_tensors(cut.x[-1])
    resumed = watch(second, rounds=4, initial=x, tamper=lose(lost, second))
    pairs = zip(resumed.output_model, uninterrupted.output_model[3:], strict=True)
    assert all(torch.equal(*weights([mine, theirs])) for mine, theirs in pairs)
    assert torch.equal(*weights([resumed.last, uninterrupted.last]))
    assert torch.equal(*weights([resumed.x[-1], uninterrupted.x[-1]]))
    third = quadrupled(output)
    third.restore(first.snapshot())
    done = watch(third, rounds=2, initial=x)  # without a round left
    assert torch.equal(*weights([done.last, cut.last]))
