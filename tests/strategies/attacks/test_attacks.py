"""Attacks by hand, their choice of clients, and whole runs of hostile clients."""

import json
from statistics import NormalDist

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from torch import nn

from fedhet.conf import compose, compose_overrides, plain_part
from fedhet.server_app.assembly import check_parts
from fedhet.strategies.attacks.attack import hostile_clients
from fedhet.strategies.attacks.labels import Backdoor, LabelFlip
from fedhet.strategies.attacks.updates import (
    ALIE,
    Gaussian,
    InnerProduct,
    PayloadLie,
    ScaledUpdate,
    z_max,
)
from fedhet.strategies.base import Reply
from fedhet.strategies.wire.records import to_record
from fedhet.tasks import build_task
from tests.federation import TensorBatches
from tests.recipes import grid_of, overrides, run_recipe
from tests.refused import refused

SEED = np.random.SeedSequence(3)
WHO = {"clients": [0, 2], "num_clients": 4, "allow": True}


def reply(client: int, *values: float, payloads=None) -> Reply:
    return Reply(client, 5, 1, 0.1, {"w": torch.tensor(values)}, payloads=payloads or {})


def sent(attack, own: Reply, *others: Reply) -> list[float]:
    attack.benign = lambda: list(others)
    return attack.upload(own, {}, SEED).update["w"].tolist()


def test_updates_by_hand():
    assert sent(ScaledUpdate(factor=-10.0, **WHO), reply(0, 1.0, -2.0)) == [-10.0, 20.0]
    own, other = reply(2, 1.0, 5.0), reply(0, 3.0, 5.0)
    assert sent(InnerProduct(factor=0.5, **WHO), own, other) == [-1.0, -2.5]
    assert sent(ALIE(z=1.5, **WHO), own, other) == [2.0 - 1.5, 5.0]
    noise = sent(Gaussian(stddev=3.0, **WHO), reply(0, *[0.0] * 10_000))
    assert np.std(noise) == pytest.approx(3.0, rel=0.03)
    assert noise == sent(Gaussian(stddev=3.0, **WHO), reply(0, *[1.0] * 10_000))


def test_alies_z_is_the_papers():
    """50 clients of which 12 are hostile: s = 26 - 12, Phi(z) = (38 - 14) / 38 (section 3.2)."""
    assert z_max(50, 12) == pytest.approx(NormalDist().inv_cdf(24 / 38))
    assert z_max(10, 2) == 0.0
    assert ALIE(**WHO).z == z_max(4, 2)


def test_a_payload_is_scaled_and_rolled():
    payloads = {"sums": {"m": torch.tensor([[1.0, 2.0, 3.0]]), "n": torch.tensor([4.0, 5.0])}}
    lie = PayloadLie(payload="sums", factor=2.0, roll=1, **WHO)
    found = lie.upload(reply(0, 1.0, payloads=payloads), {}, SEED)
    assert found.payloads["sums"]["m"].tolist() == [[6.0, 2.0, 4.0]]
    assert found.payloads["sums"]["n"].tolist() == [8.0, 10.0]
    assert found.update["w"].tolist() == [1.0]


def test_examples_are_changed():
    data = TensorBatches(torch.zeros(5, 1, 4, 4), torch.tensor([0, 0, 1, 2, 2]), num_classes=3)
    flipped = LabelFlip(**WHO).data(data)
    ((_, labels),) = flipped.batches(5, generator=None, train=True)
    assert labels.tolist() == [2, 2, 1, 0, 0]
    assert (flipped.class_counts(), len(flipped)) == ([2, 1, 2], 5)
    attack = Backdoor(target=1, share=0.4, size=2, **WHO)
    with refused("attack=backdoor"):
        attack.check_method((), num_classes=10)
    attack.white = torch.tensor([7.0])
    attack.check_method((), num_classes=2)
    with refused("attack.target=1"):
        attack.check_method((), num_classes=1)
    ((inputs, labels),) = attack.data(data).batches(5, generator=None, train=True)
    assert labels.tolist() == [1, 1, 1, 2, 2]
    assert inputs.sum((1, 2, 3)).tolist() == [28.0, 28.0, 0.0, 0.0, 0.0]
    assert inputs[0, 0, 2:, 2:].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert data.inputs.sum() == 0
    # a method such as FedRoD takes a class without examples for impossible
    assert attack.class_counts([3, 0, 2]) == [2, 1, 2]
    assert attack.class_counts([1, 2, 2]) == [1, 2, 2]
    assert attack.boost == 2.0  # of four clients two replace the model
    assert Backdoor(participation=0.5, **WHO).boost == 2.0  # of two clients one
    assert Backdoor(participation=0.25, **WHO).boost == 1.0  # the only one of a round
    assert Backdoor(participation=1e-9, **WHO).boost == 1.0  # a round has one client at least


def test_a_backdoors_success_is_of_the_other_classes():
    class Corner(nn.Module):
        def forward(self, inputs):
            fooled = inputs[:, 0, 3, 3] * inputs[:, 0, 0, 0]  # where the image's first pixel is set
            return inputs, torch.stack([torch.full_like(fooled, 0.5), fooled], dim=1)

    images = torch.zeros(4, 1, 4, 4)
    images[:2, 0, 0, 0] = 1.0
    attack = Backdoor(target=1, **WHO)
    attack.white = torch.tensor([1.0])
    test = [(images, torch.tensor([1, 0, 0, 0]))]
    assert attack.success(Corner(), test) == pytest.approx(1 / 3)


def test_hostile_clients_are_named_or_drawn():
    assert hostile_clients([3, 0], 5, 0) == {0, 3}
    drawn = [hostile_clients(0.2, 100, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[2]) == 20
    assert len(hostile_clients(0.01, 5, 0)) == 1
    for wrong in ([5], [], [1, 1], [-1]):
        with refused("attack.clients"):
            hostile_clients(wrong, 5, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["attack=sign_flip"], "attack.allow=false attack.allow=true"),
        (
            ["attack=sign_flip", "attack.allow=true", "runtime=deployment"],
            "runtime=deployment",
        ),
        (["attack=alie", "attack.allow=true", "attack.clients=[1]"], "attack.clients"),
        (["attack=alie", "attack.allow=true", "attack.clients=0.6"], "attack.clients attack.z"),
        (["attack=backdoor", "attack.allow=true", "attack.share=1.5"], "attack.share=1.5"),
        (["attack=gaussian", "attack.allow=true", "attack.clients=[10]"], "attack.clients 9"),
    ],
)
def test_a_wrong_attack_is_refused_before_anything_starts(words, named):
    with refused(*named.split()):
        check_parts(compose(overrides(*words)))


@pytest.mark.slow
def test_colluding_clients_send_the_same_and_what_they_would_honestly_send_counts():
    """Two runtimes, as two processes: ALIE of z = 0 is the mean of the two honest updates."""
    common = ["device=cpu", "clients=3", "strategy=scaffold"]
    hostile = [*common, "attack=alie", "attack.allow=true", "attack.clients=[0,2]", "attack.z=0.0"]
    updates = {}
    for name, words in (("honest", common), ("hostile", hostile)):
        found = []

        def keep(message, found=found):
            if "update" in message.content.array_records:
                found.append(message.content.array_records["update"])
            return message

        grid = grid_of(words, 3, keep)
        run_first_round(grid, words)
        updates[name] = [{k: a.numpy() for k, a in one.items()} for one in found]
    honest, attacking = updates["honest"], updates["hostile"]
    for key in honest[0]:
        mean = (honest[0][key] + honest[2][key]) / 2
        np.testing.assert_allclose(attacking[0][key], mean, atol=1e-7)
        np.testing.assert_array_equal(attacking[0][key], attacking[2][key])
        np.testing.assert_array_equal(attacking[1][key], honest[1][key])


def run_first_round(grid, words):
    """Ask the clients in order for a first round, with c = 0."""
    recipe = compose_overrides(tuple(words))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=3)
    state = task.build_model(0).state_dict()
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    for node in grid.get_node_ids():
        content = RecordDict(
            {
                "params": to_record(state),
                "control_variate": to_record(zeros),
                "config": ConfigRecord({"round": 1, "lr": 0.1, "num-rounds": 1}),
            }
        )
        asked = Message(content, dst_node_id=node, message_type=MessageType.TRAIN)
        answer = grid.handlers[node](asked)
        grid.tamper(answer)


@pytest.mark.slow
def test_a_backdoor_runs_and_is_measured(tmp_path):
    words = ["rounds=5", "device=cpu", "clients=4", "partition=iid", "evaluation.received=false"]
    hostile = ["attack=backdoor", "attack.allow=true", "attack.clients=[1]", "local.lr=0.3"]
    summary = run_recipe(tmp_path / "run", *words, *hostile, clients=4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert summary["status"] == "completed"
    assert rows[-1]["attack_success"] > 0.9 > rows[0]["attack_success"]
    assert any(1 in map(int, row.get("standing_out", {})) for row in rows)
