"""FedAMP against its algorithm in float64: the mixtures by hand, and three rounds of training."""

from math import exp

import pytest
import torch
from torch.nn import functional as F

from fedhet.strategies.base import Reply
from fedhet.strategies.fedamp import CLOUD, OWN, FedAMP, FedAMPServer
from fedhet.strategies.round.server_model import ServerModel
from tests.strategies.sides import built
from tests.strategies.test_personal import exact, exact_blobs, run

LR = 0.1


def reply(client: int, *values: float) -> Reply:
    return Reply(client, 1, 1, 0.1, {}, {OWN: {"w": torch.tensor(values).double()}})


def test_the_mixtures_by_hand():
    """Squared distances 1 (0 and 1) and 9 (0 and 3); client 7 is new."""
    server = FedAMPServer(alpha=0.5, sigma=2.0)
    server.init({})
    server.receive({}, [reply(0, 0.0), reply(1, 1.0), reply(2, 3.0)])
    near, far = 0.25 * exp(-1 / 2), 0.25 * exp(-9 / 2)
    assert server.broadcast(0)[CLOUD]["w"].item() == pytest.approx(near + 3 * far, rel=1e-12)
    assert server.broadcast(7)[CLOUD] == {}
    again = FedAMPServer(alpha=0.5, sigma=2.0)
    again.init({})
    again.load_state_dict(server.state_dict())
    assert again.broadcast(0)[CLOUD]["w"].item() == server.broadcast(0)[CLOUD]["w"].item()


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_three_rounds_by_hand(coefficient):
    """Two steps a round; with lambda = 0 each client trains alone."""
    alpha, sigma = 0.4, 1.5
    data = exact_blobs(3)
    models = [exact() for _ in data]
    for _ in range(3):
        flat = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models]
        clouds = []
        for own in flat:
            weights = [alpha / sigma * exp(-float((own - w) @ (own - w)) / sigma) for w in flat]
            mixed = sum(a * w for a, w in zip(weights, flat, strict=True))
            clouds.append(mixed + (1 - sum(weights)) * own)
        for model, cloud, one in zip(models, clouds, data, strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(2):
                optimizer.zero_grad()
                at = torch.cat([p.flatten() for p in model.parameters()])
                loss = F.cross_entropy(model(one.inputs)[1], one.labels)
                (loss + coefficient / (2 * alpha) * (at - cloud).square().sum()).backward()
                optimizer.step()
    given = {"alpha": alpha, "sigma": sigma, "coefficient": coefficient, "local_lr": LR}
    strategy = built(FedAMP, **given, server_model=ServerModel(exact(), (4,), 3))
    strategy.client_sides["fedamp"].dtypes = {OWN: torch.float64}  # nothing is shared: float32
    _, own, _ = run(strategy, rounds=3, clients=3, personal="all", epochs=2)
    for mine, model in zip(own, models, strict=True):
        for name, expected in model.named_parameters():
            torch.testing.assert_close(mine[name], expected.detach(), rtol=1e-10, atol=1e-12)
