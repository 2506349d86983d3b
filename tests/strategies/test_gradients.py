"""Every penalty's gradient against finite differences, in float64."""

from types import SimpleNamespace

import pytest
import torch

from fedhet.strategies.base import Step
from fedhet.strategies.feddecorr import FedDecorr
from fedhet.strategies.feddistill import FedDistill
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.feddyn import DRIFT_SUM, FedDyn
from fedhet.strategies.fedmrur import FedMRUR
from fedhet.strategies.fedproto import FedProto
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.feduv import FedUV
from fedhet.strategies.moon import contrastive_loss
from tests.strategies.sides import client_side


class Contrastive:
    """MOON's term, against two previous models."""

    def penalty(self, step):
        first = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
        return contrastive_loss(step.features, [first, first**2], tau=0.5)


def manifold(**how):
    return client_side(FedMRUR, gamma=0.7, sigma=3.0, **how)


PENALTIES = {
    "fedprox": client_side(FedProx, mu=0.7),
    "feduv": client_side(FedUV),
    "feddecorr": client_side(FedDecorr, beta=0.7),
    "feddistill": client_side(FedDistill, coefficient=0.7),
    "fedproto": client_side(FedProto, coefficient=0.7),
    "feddyn": client_side(FedDyn, alpha=0.7),
    "feddw": client_side(FedDW, mu=0.7),
    "feddw linearised": client_side(FedDW, mu=0.7, linearised_every=10),
    "moon": Contrastive(),
    "fedmrur": manifold(),
    "fedmrur euclidean": manifold(space="euclidean"),
    "fedmrur data": manifold(lifts="data"),
}


@pytest.mark.parametrize("side", PENALTIES.values(), ids=PENALTIES)
def test_penalty_gradients(side, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    soft_labels = torch.tensor([[1.0, 0.0], [0.3, 0.7]], dtype=torch.float64)
    received_features = draw(4, 3)
    context = SimpleNamespace(
        anchor={"body.weight": draw(3, 2), "head.weight": draw(2, 3)},
        received={"soft_labels": {"means": soft_labels}, "prototypes": {"means": draw(2, 3)}},
        state={DRIFT_SUM: {"body.weight": draw(3, 2), "head.weight": draw(2, 3)}},
        received_features=lambda inputs: received_features,
        measure=lambda name, value: None,
        round=1,
        num_steps=0,
        first_pass=True,
    )
    inputs, labels = draw(4, 2), torch.tensor([0, 1, 1, 0])

    def penalty(body, head):
        params = {"body.weight": body, "head.weight": head}
        features = inputs @ body.T
        return side.penalty(Step(params, inputs, labels, features, features @ head.T, context))

    params = [draw(3, 2).requires_grad_(), draw(2, 3).requires_grad_()]
    penalty(*params)  # FedDW takes its reference here
    context.first_pass = False
    assert torch.autograd.gradcheck(penalty, params)
