"""Task arithmetic, TIES and Fisher merging, against numbers worked out by hand."""

import pytest
import torch

from fedhet.strategies.base import RefusedReplyError, Reply
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fisher_merging import FISHER, FisherMerging
from fedhet.strategies.task_arithmetic import TaskArithmetic
from fedhet.strategies.ties import TIES
from tests.federation import TensorBatches
from tests.strategies.labelled import assert_same, blobs, context_of, train
from tests.strategies.sides import built, client_side, parts_of, server_side


def replies(updates: list[list[float]], examples: list[int] | None = None, fisher=None):
    sizes = examples or [1] * len(updates)
    return [
        Reply(
            i,
            sizes[i],
            1,
            0.1,
            {"w": torch.tensor(one).double()},
            {FISHER: {"w": torch.tensor(fisher[i]).double()}} if fisher else {},
        )
        for i, one in enumerate(updates)
    ]


def merged(kind, updates, *, examples=None, fisher=None, **how) -> list[float]:
    params = {"w": torch.zeros(len(updates[0])).double()}
    return (
        parts_of(kind, **how).aggregator(params, replies(updates, examples, fisher))["w"].tolist()
    )


def test_task_arithmetic_adds_the_updates():
    """A scale of 1 / 4 is the mean of four clients; of twice that, a server's rate of 2."""
    data = blobs(4)
    mean = {"data": data, "rounds": 2}
    plain, _ = train(
        built(FedAvg, aggregator=parts_of(TaskArithmetic, scale=0.25).aggregator), **mean
    )
    found, _ = train(built(TaskArithmetic, scale=0.25), **mean)
    assert_same(found, plain)


def test_ties_trims_elects_signs_and_takes_the_mean_of_those_that_agree():
    """Keeping 2 of 4: (4, -3, 0, 0), (0, 5, 6, 0), (2, 0, -1, 0); sums 6, 2, 5."""
    updates = [[4.0, -3.0, 1.0, 0.5], [0.1, 5.0, 6.0, 0.2], [2.0, 0.3, -1.0, 0.4]]
    assert merged(TIES, updates, keep=0.5) == [3.0, 5.0, 6.0, 0.0]
    assert merged(TIES, updates, keep=0.5, scale=0.5) == [1.5, 2.5, 3.0, 0.0]
    assert merged(TIES, [[1.0, 2.0], [3.0, 4.0]], keep=1.0) == [2.0, 3.0]  # the plain mean
    assert merged(TIES, [[1.0, 9.0], [-1.0, 9.0]], keep=1.0) == [0.0, 9.0]  # they cancel
    params = {"a": torch.zeros(2, 1), "b": torch.zeros(1).double()}  # each keeps its shape and type
    update = {"a": torch.tensor([[3.0], [1.0]]), "b": torch.tensor([2.0]).double()}
    found = parts_of(TIES, keep=2 / 3).aggregator(params, [Reply(0, 1, 1, 0.1, update)])
    assert_same(found, {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([2.0]).double()})
    assert [one.dtype for one in found.values()] == [torch.float32, torch.float64]


def test_the_fisher_information_of_a_softmax_is_p_times_one_minus_p_times_the_squared_input():
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 3).double()

        def forward(self, inputs):
            return inputs, self.head(inputs)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 2, generator=generator).double()
    model = Linear()
    data = TensorBatches(inputs, torch.zeros(20, dtype=torch.long), num_classes=3)
    side = client_side(FisherMerging)
    found = side.end(context_of(model, data), None)[FISHER]
    p = model(inputs)[1].softmax(1).detach()
    spread = p * (1 - p)
    torch.testing.assert_close(found["head.bias"], spread.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found["head.weight"], spread.T @ inputs**2 / 20, rtol=1e-12, atol=0)


def test_fisher_merging_weighs_each_number_by_examples_and_information():
    """n (10, 30), F (3, 1), (0, 0): weights 30 to 30, and 10 to 30 where there is none."""
    updates = [[4.0, 4.0], [8.0, 8.0]]
    found = merged(FisherMerging, updates, examples=[10, 30], fisher=[[3.0, 0.0], [1.0, 0.0]])
    assert found == pytest.approx([6.0, 7.0], rel=1e-12)


def test_fisher_information_is_not_negative():
    side = server_side(FisherMerging)
    side.init({"w": torch.zeros(1)})
    with pytest.raises(RefusedReplyError):
        side.check(replies([[1.0]], fisher=[[-1.0]])[0])
