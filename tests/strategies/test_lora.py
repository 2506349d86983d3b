"""LoRA's methods, in float64: the mean of products by hand and from the clients' own models."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedhet.common.task_settings import Lora
from fedhet.strategies.base import Reply
from fedhet.strategies.components.adapter_products import SHARED_BASE
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fedex_lora import FedExLoRA
from fedhet.strategies.fedsa_lora import FedSALoRA
from fedhet.strategies.ffa_lora import FFALoRA
from fedhet.strategies.flora import FLoRA
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.wire.records import UPDATE
from fedhet.tasks.models import AnyModel, build_own_model
from fedhet.tasks.models.own_weights import load_own_weights, model_metadata
from tests.adapted import network
from tests.federation import TensorBatches, federate
from tests.refused import refused
from tests.strategies.sides import built

pytestmark = pytest.mark.slow  # peft takes seconds to import

RANK, SCALE = 2, 3.0
LAYERS = ("body.first", "body.second")
A, B, W = (f"{{}}.{part}.weight" for part in ("lora_A.default", "lora_B.default", "base_layer"))


def lora(share: bool) -> Lora:
    targets = ["first", "second"]
    return Lora(r=RANK, alpha=SCALE * RANK, target_modules=targets, share_base=share)


def model(share: bool = False) -> AnyModel:
    known = {"num_classes": 2, "size": 4, "width": 3}
    return build_own_model(network, known, {}, lora=lora(share), seed=1).double()


def data(sizes: tuple[int, ...] = (6, 10, 16)) -> list[TensorBatches]:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in sizes]
    return [TensorBatches(x + i, (x[:, i] > 0).long()) for i, x in enumerate(inputs)]


def phases(settings: Any) -> LocalTrainingConfig:
    given = [Phase(TensorSelector(one["layers"])) for one in settings.get("strategy.phases", [])]
    return LocalTrainingConfig(batch_size=8, epochs=2, phases=tuple(given))


def run(
    kind: type[Any] = FederatedStrategy, rounds: int = 1, datasets: Any = None, **given: Any
) -> tuple[dict[str, Tensor], FederatedStrategy]:
    """Run a method with its own settings; return the tensors and the strategy."""
    settings = getattr(kind, "settings", {})
    build = partial(model, settings.get("task.lora.share_base", False))
    options, start = phases(settings), build()
    setup = {"server_model": ServerModel(start, (4,), 2), "local_training": options}
    strategy = built(kind, local_lr=0.5, **setup, **given.pop("fields", {}))
    how = {"model": build, "loss": cross_entropy, "options": options, "rounds": rounds, **given}
    how.setdefault("personal", settings.get("strategy.personal", "none"))
    params, reports = federate(strategy, datasets or data(), **how)
    assert all(not report.failures for report in reports)
    return params, strategy


def product(tensors: Any, layer: str) -> Tensor:
    """Return (alpha / r) B A."""
    return SCALE * tensors[B.format(layer)] @ tensors[A.format(layer)]


def own_models(**given: Any) -> list[dict[str, Tensor]]:
    """Return what each client trains in round 1 from the same start."""
    found: dict[int, dict[str, Tensor]] = {}
    start = model().state_dict()

    def keep(reply: Any) -> Any:
        if UPDATE in reply.content:
            row = reply.content["metrics"]
            update = reply.content[UPDATE].to_torch_state_dict()
            found[int(row["partition-id"])] = {n: start[n] + u for n, u in update.items()}
        return reply

    run(tamper=keep, **given)
    return [found[client] for client in sorted(found)]


def weighted(values: list[Tensor]) -> Tensor:
    return sum(
        (n / 32 * value for n, value in zip((6, 10, 16), values, strict=True)), 0 * values[0]
    )


# ------------------------------------------------------------------------------- the mean by hand
def by_hand(kind: type[Any]) -> dict[str, Tensor]:
    """Return Delta of two clients; x is 0, B_1 A_1 has a one at (0, 0), and B_2 A_2 at (1, 1)."""
    start = model(share=True)
    strategy = built(kind, server_model=ServerModel(start, (4,), 2))
    params = {name: torch.zeros_like(value) for name, value in start.named_parameters()}
    replies = []
    for client in (0, 1):
        update = {name: torch.zeros_like(value) for name, value in params.items()}
        update[A.format(LAYERS[0])][0, client] = update[B.format(LAYERS[0])][client, 0] = 1.0
        replies.append(Reply(client, 5, 1, 0.1, update))
    with torch.no_grad():
        found: dict[str, Tensor] = strategy.server_step.aggregator(params, replies)  # type: ignore
    return found


def test_the_product_of_means_is_not_the_mean_of_products():
    """Its entries are all 1/4; the mean of products has 1/2 on the diagonal: 1/2 lies between."""
    found = by_hand(FLoRA)
    exact, layer = found[W.format(LAYERS[0])], LAYERS[0]
    expected = torch.zeros(3, 4).double()
    expected[0, 0] = expected[1, 1] = SCALE / 2
    assert torch.equal(exact, expected)
    assert not found[A.format(layer)].any()
    assert not found[B.format(layer)].any()
    apart = by_hand(FedExLoRA)
    assert apart[A.format(layer)].tolist() == [[0.5, 0.5, 0, 0], [0] * 4]
    means = product(apart, layer)
    assert means[:2, :2].tolist() == [[SCALE / 4] * 2] * 2
    assert float((means - exact).norm()) == SCALE / 2
    assert torch.equal(apart[W.format(layer)] + means, exact)  # FedEx-LoRA: the rest is in W


# -------------------------------------------------------------- a round, from the clients' models
@pytest.mark.parametrize("kind", [FedExLoRA, None])
def test_a_round_of_fedex_lora_is_the_mean_of_the_clients_models(kind):
    """And FedAvg's is not: on these clients it is off by more than a tenth of the change."""
    trained = own_models()
    params, _ = run(kind) if kind else run()
    before = model(share=True).state_dict()
    for layer in LAYERS:
        mean = weighted([product(one, layer) for one in trained])
        base = before[W.format(layer)]
        moved = params.get(W.format(layer), base) - base + product(params, layer)
        if kind:
            torch.testing.assert_close(moved, mean, rtol=0, atol=1e-14)
        else:
            assert float((moved - mean).norm()) > 0.1 * float(mean.norm())
    head = weighted([one["head.weight"] for one in trained])
    torch.testing.assert_close(params["head.weight"], head, rtol=0, atol=1e-14)


def sent_by(kind: type[Any], **given: Any) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the clients' last updates as they were sent, and the tensors after the last round."""
    found: dict[int, dict[str, Tensor]] = {}

    def keep(reply: Any) -> Any:
        if UPDATE in reply.content:
            row = reply.content["metrics"]
            found[int(row["partition-id"])] = reply.content[UPDATE].to_torch_state_dict()
        return reply

    params, _ = run(kind, tamper=keep, **given)
    return [found[client] for client in sorted(found)], params


@pytest.mark.parametrize("ranks", [None, [2, 1, 1]])
def test_flora_adds_the_mean_of_the_products_and_begins_anew(ranks):
    sent, params = sent_by(FLoRA, fields={"ranks": ranks})
    before = model(share=True).state_dict()
    for layer in LAYERS:
        local = [{n: before[n] + u for n, u in one.items()} for one in sent]
        mean = weighted([product(one, layer) for one in local])
        assert float(mean.norm()) > 0.01
        change = params[W.format(layer)] - before[W.format(layer)]
        torch.testing.assert_close(change, mean, rtol=0, atol=1e-14)
        assert torch.equal(params[A.format(layer)], before[A.format(layer)])
        assert not params[B.format(layer)].any()
        found = [int(torch.linalg.matrix_rank(product(one, layer))) for one in local]
        assert found == (ranks or [2, 2, 2])
        assert not torch.equal(local[0][A.format(layer)], local[1][A.format(layer)])


@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_clients_do_not_send_the_weights_that_they_do_not_train(kind):
    sent, params = sent_by(kind, rounds=2)
    names = {name for name in params if "base_layer" not in name}
    assert len(names) < len(params)
    assert all(one.keys() == names for one in sent)


def test_the_stored_tensors_give_a_plain_network_flora_s_weights(tmp_path):
    params, _ = run(FLoRA, rounds=2)
    plain = network(num_classes=2, size=4, width=3).double()
    told = {
        n: v for n, v in model_metadata(model(True), lora(True)).items() if n != "frozen_sha256"
    }
    load_own_weights(plain, params, told, tmp_path)
    torch.testing.assert_close(plain.get_parameter("first.weight"), params[W.format(LAYERS[0])])


# ------------------------------------------------------------------------------ one of A and B
def test_ffa_lora_trains_and_sends_b_alone_so_the_mean_is_exact():
    sent, params = sent_by(FFALoRA)
    assert not any(".lora_A." in name for name in (*params, *sent[0]))
    start = model().state_dict()
    for layer in LAYERS:
        a, b = start[A.format(layer)], B.format(layer)
        mean = weighted([SCALE * (start[b] + one[b]) @ a for one in sent])
        torch.testing.assert_close(SCALE * params[b] @ a, mean, rtol=0, atol=1e-14)


def test_fedsa_lora_sends_a_alone():
    """In round 1 all begin with the same B, so the mean A is that of FedAvg's clients."""
    sent, params = sent_by(FedSALoRA)
    assert set(params) == set(sent[0]) == {A.format(layer) for layer in LAYERS}
    trained = own_models()
    for name, value in params.items():
        mean = weighted([one[name] for one in trained])
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-14)


# -------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_a_model_whose_adapted_weights_do_not_travel_is_refused(kind):
    with refused("share_base"):
        built(kind, server_model=ServerModel(model(), (4,), 2))


def test_what_no_phase_trains():
    names = ["body.w", "body.base_layer.weight", "head.w"]
    assert phases(SHARED_BASE).untrained(names) == {"body.base_layer.weight"}
    assert LocalTrainingConfig().untrained(names) == set()
