"""Model outputs: which model a round evaluates and returns, and that training ignores it."""

from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord

from fedhet.strategies.components.model_outputs import LastTwo, Latest, Participants
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.components.server_optimizers import SGD
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.wire.records import to_tensors
from tests.federation import federate
from tests.strategies.round.test_round import BUFFERS, OPTIONS, Normed, clients
from tests.strategies.sides import built

WEIGHT = "head.weight"
# of the way from x to the new x, which is four times Delta
SHARES = {Latest: 1.0, LastTwo: 0.5, Participants: 0.25}


def watch(strategy: FederatedStrategy, rounds: int = 3, lost=frozenset(), **how):
    seen, start = SimpleNamespace(x=[], output=[], sent=[], last=None), strategy.start

    def watched_start(grid, arrays, on_round, **how):
        def evaluate(round: int, output: ArrayRecord) -> MetricRecord:
            seen.output.append(output)
            return MetricRecord({"accuracy": 0.0})

        def observe(report, x: ArrayRecord) -> bool:
            seen.x.append(x)
            if report.round > 0:
                seen.sent.append(grid.sent[0].content.array_records["params"])
            return on_round(report, x)

        result = start(grid, arrays, evaluate_fn=evaluate, on_round=observe, **how)
        seen.last = result.arrays
        return result

    def tamper(reply):
        is_train = reply.has_content() and "update" in reply.content.array_records
        return None if is_train and strategy.state.round + 1 in lost else reply

    strategy.start = watched_start
    how |= {"model": Normed, "options": OPTIONS, "tamper": tamper}
    federate(strategy, clients(), rounds=rounds, **how)
    return seen


def quadrupled(output, **slots) -> FedAvg:
    slots = {"server_optimizer": SGD(lr=4.0), "local_lr": 0.05, "buffers": BUFFERS, **slots}
    return built(FedAvg, output=output(), client_metrics=ClientMetrics(asked=True), **slots)


def values(records: list[ArrayRecord], name: str = WEIGHT) -> list[torch.Tensor]:
    return [to_tensors(record)[name] for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{1}, {2, 3}], ids=str)
@pytest.mark.parametrize("output", SHARES)
def test_the_output_is_evaluated_everywhere_and_returned(output, lost):
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


@pytest.mark.slow
@pytest.mark.parametrize("lost", [{3}, {3, 4}], ids=["one", "all"])
@pytest.mark.parametrize("output", SHARES)
def test_a_resumed_run_whose_rounds_fail_has_the_output_of_the_uninterrupted_one(output, lost):
    whole, first, second, third = (
        quadrupled(output, sampler=FixedSizeSampler(participation=0.5, seed=3)) for _ in range(4)
    )
    uninterrupted, cut = watch(whole, rounds=4, lost=lost), watch(first, rounds=2)
    x = to_tensors(cut.x[-1])
    second.restore(first.snapshot())
    resumed = watch(second, rounds=4, initial=x, lost=lost)
    pairs = list(zip(resumed.output, uninterrupted.output[3:], strict=True))
    pairs += [(resumed.last, uninterrupted.last), (resumed.x[-1], uninterrupted.x[-1])]
    third.restore(first.snapshot())
    pairs.append((watch(third, rounds=2, initial=x).last, cut.last))  # without a round left
    assert all(torch.equal(*values(pair)) for pair in pairs)
