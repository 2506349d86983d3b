"""Model outputs: which model a round evaluates and returns, and that training ignores it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from strategies.components.model_outputs import LastTwo, Latest, Participants
from strategies.components.samplers import FixedSizeSampler
from strategies.components.server_optimizers import SGD
from strategies.fedavg import FedAvg
from strategies.round.federated import FederatedStrategy
from strategies.round.records import to_tensors
from tests.federation import federate
from tests.strategies.round.test_round import OPTIONS, clients

WEIGHT = "head.weight"
BUFFERS = ["norm.running_mean", "norm.running_var"]
# of the way from x to the new x, which is four times Delta
SHARES = {Latest: 1.0, LastTwo: 0.5, Participants: 0.25}


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


def watch(strategy: FederatedStrategy, rounds: int = 3, lost=frozenset(), **how):
    """Run a strategy that loses every train reply of some rounds.

    Return x and the output after every round, what clients were sent for evaluation, and the
    returned model.
    """
    seen, start = SimpleNamespace(x=[], output=[], sent=[], last=None), strategy.start

    def watched_start(grid, arrays, num_rounds, on_round):
        def evaluate(round: int, output: ArrayRecord) -> MetricRecord:
            seen.output.append(output)
            return MetricRecord({"accuracy": 0.0})

        def observe(report, x: ArrayRecord) -> bool:
            seen.x.append(x)
            if report.round > 0:
                seen.sent.append(grid.sent[0].content.array_records["params"])
            return on_round(report, x)

        result = start(grid, arrays, num_rounds=num_rounds, evaluate_fn=evaluate, on_round=observe)
        seen.last = result.arrays
        return result

    def tamper(reply):
        is_train = reply.has_content() and "update" in reply.content.array_records
        return None if is_train and strategy.state.round + 1 in lost else reply

    strategy.start = watched_start
    federate(
        strategy, clients(), model=Normed, rounds=rounds, options=OPTIONS, tamper=tamper, **how
    )
    return seen


def quadrupled(output, **slots) -> FedAvg:
    """FedAvg whose server step is four times Delta: the three outputs are three models."""
    slots = {"server_optimizer": SGD(lr=4.0), "local_lr": 0.05, "buffers": BUFFERS, **slots}
    return FedAvg(output=output(), evaluate_on_clients=True, **slots)


def values(records: list[ArrayRecord], name: str = WEIGHT) -> list[torch.Tensor]:
    return [to_tensors(record)[name] for record in records]


def test_outputs_by_hand():
    """x 1, Delta 2, new x 7: 7, (1 + 7) / 2, 1 + 2."""
    x, update, stepped = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 7.0))
    assert [output()(x, update, stepped, [])["w"].item() for output in SHARES] == [7.0, 4.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [set(), {1}, {2, 3}], ids=str)
@pytest.mark.parametrize("output", SHARES)
def test_the_output_is_evaluated_everywhere_and_returned(output, lost):
    """At the server, at the clients, in the end. It starts as the initial model.

    After a round without replies x stays, and so does the output. Training is that of Latest, and
    buffers are those of the new model.
    """
    run = watch(quadrupled(output), lost=lost)
    x, found = values(run.x), values(run.output)
    assert torch.equal(found[0], x[0])
    for round in (1, 2, 3):
        assert torch.equal(x[round - 1], x[round]) == (round in lost)
        wanted = x[round - 1] + SHARES[output] * (x[round] - x[round - 1])
        wanted = found[round - 1] if round in lost else wanted
        torch.testing.assert_close(found[round], wanted, atol=1e-12, rtol=0)
    assert torch.equal(torch.stack(values(run.sent)), torch.stack(found[1:]))
    assert torch.equal(to_tensors(run.last)[WEIGHT], found[-1])
    assert torch.equal(torch.stack(x), torch.stack(values(watch(quadrupled(Latest), lost=lost).x)))
    for name in BUFFERS:
        after = torch.stack(values(run.x, name))
        assert torch.equal(after[1], after[2]) == (2 in lost)
        assert torch.equal(after, torch.stack(values(run.output, name)))


def test_latest_is_x_itself():
    """The same records, and nothing beside them in the state."""
    strategy = quadrupled(Latest)
    run = watch(strategy)
    assert all(x is output for x, output in zip(run.x, run.output, strict=True))
    assert run.last is run.x[-1]
    assert strategy.snapshot().tensors.keys() == {"server_optimizer/velocity"}


@pytest.mark.parametrize("lost", [{3}, {3, 4}, set()], ids=["one", "all", "none"])
@pytest.mark.parametrize("output", SHARES)
@pytest.mark.slow
def test_a_resumed_run_has_the_output_of_the_uninterrupted_one(output, lost):
    """Cut after round 2 of 4, where the rounds after it fail or do not."""
    whole, first, second, third = (
        quadrupled(output, sampler=FixedSizeSampler(0.5, seed=3)) for _ in range(4)
    )
    uninterrupted = watch(whole, rounds=4, lost=lost)
    cut = watch(first, rounds=2)
    second.restore(first.snapshot())
    x = to_tensors(cut.x[-1])
    resumed = watch(second, rounds=4, initial=x, lost=lost)
    pairs = list(zip(resumed.output, uninterrupted.output[3:], strict=True))
    pairs += [(resumed.last, uninterrupted.last), (resumed.x[-1], uninterrupted.x[-1])]
    third.restore(first.snapshot())
    pairs.append((watch(third, rounds=2, initial=x).last, cut.last))  # without a round left
    assert all(torch.equal(*values(pair)) for pair in pairs)
