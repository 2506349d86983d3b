"""AFL against least squares on everybody's examples, and against the paper's pairwise merging."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.strategies.afl import AFL, CORRELATIONS, LABELS, PRODUCTS, LeastSquares
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.round.server_model import ServerModel
from tests.federation import TensorBatches
from tests.strategies.labelled import Classifier, context_of, train
from tests.strategies.sides import built, client_side
from tests.strategies.test_phases import phases_of

GAMMA = 1.0


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, self.head(inputs)


def split(inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """By class, and one client with fewer examples than features."""
    order = labels.argsort()
    return [(inputs[part], labels[part]) for part in (order[:4], order[4:30], order[30:])]


def fitted(clients: list[tuple[Tensor, Tensor]], ridge: float = 0.0) -> Tensor:
    side, model = client_side(AFL), Features().double()
    sums = [
        side.end(context_of(model, TensorBatches(*one, num_classes=3)), None)[CORRELATIONS]
        for one in clients
    ]
    head = nn.Linear(6, 3).double()
    LeastSquares(ridge)({n: sum(one[n] for one in sums) for n in (PRODUCTS, LABELS)}, head)
    assert not head.bias.any()
    return head.weight.detach()


def merged_pairwise(clients: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The absolute aggregation law (eq. 9 to 11), and the RI process (eq. 16), as printed."""
    one = torch.eye(6).double()
    found = None
    for inputs, labels in clients:
        c = inputs.T @ inputs + GAMMA * one
        w = c.inverse() @ inputs.T @ F.one_hot(labels, 3).double()
        if found is None:
            found, total = w, c
            continue
        r, old = c.inverse(), total.inverse()
        both = (total + c).inverse()
        found = (one - old @ c + old @ c @ both @ c) @ found + (
            one - r @ total + r @ total @ both @ total
        ) @ w
        total = total + c
    rest = (total - len(clients) * GAMMA * one).inverse()
    return (found + len(clients) * GAMMA * rest @ found).T


def test_the_classifier_is_least_squares_however_the_examples_are_divided():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 6, generator=generator).double()
    labels = torch.randint(0, 3, (60,), generator=generator)
    clients = split(inputs, labels)
    targets = F.one_hot(labels, 3).double()
    expected = torch.linalg.lstsq(inputs, targets).solution.T
    torch.testing.assert_close(fitted(clients), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(merged_pairwise(clients), expected, rtol=1e-9, atol=1e-11)
    rows = torch.cat([inputs, 2 * torch.eye(6).double()])  # ridge 4
    targets = torch.cat([targets, torch.zeros(6, 3).double()])
    ridge = torch.linalg.lstsq(rows, targets).solution.T
    torch.testing.assert_close(fitted(clients, 4.0), ridge, rtol=1e-10, atol=1e-12)


def test_a_feature_that_repeats_another_is_no_fault():
    """The pseudoinverse gives both the same weight."""
    inputs = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).double()
    found = fitted([(torch.cat([inputs, inputs[:, :1]], 1), torch.arange(40) % 3)])
    torch.testing.assert_close(found[:, 0], found[:, 5], rtol=1e-8, atol=1e-10)


def test_training_never_moves_the_body():
    network = ServerModel(Classifier(), (4,), 3)
    options = LocalTrainingConfig(batch_size=8, phases=phases_of(AFL))
    found, _ = train(built(AFL, server_model=network), rounds=2, model=Classifier, options=options)
    assert torch.equal(
        found["body.0.weight"], dict(Classifier().named_parameters())["body.0.weight"]
    )
