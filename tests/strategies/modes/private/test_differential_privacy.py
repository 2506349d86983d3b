"""Differential privacy of clients: clipping by hand, noise by its formula, epsilon, refusals."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.quantization import dequantize, quantize

from fedhet.client_app.messages import upload_seed
from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.base import RefusedReplyError, Reply, ServerSide
from fedhet.strategies.components.aggregators import NormMean, UniformMean
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.feddyn import DRIFT_SUM, FedDyn, FedDynServer
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.modes.private.clipping import NORM_BIT, clip
from fedhet.strategies.modes.private.differential_privacy import (
    UNCLIPPED,
    CentralAdaptive,
    CentralFixed,
)
from fedhet.strategies.modes.private.gaussian_mechanism import epsilon_of, seeded_numpy
from fedhet.strategies.modes.private.local_privacy import Local
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.scaffold import CONTROL_VARIATE, SCAFFOLD
from fedhet.strategies.statistics.soft_labels import SoftLabels
from fedhet.strategies.wire.records import CONFIG
from tests.federation import Regression, TensorBatches, federate
from tests.refused import refused
from tests.strategies.labelled import train
from tests.strategies.modes.private.test_gaussian_mechanism import exact_epsilon
from tests.strategies.round.test_round import Forgetful
from tests.strategies.sides import built, client_side, released, server_side, total_of

SEED = np.random.SeedSequence(0)
REPEATABLE = {"reproducible_noise": True, "seed": 1}
NOISY = {"noise_multiplier": 2.0, "clipping_norm": 0.5}


def halves(kind=CentralFixed, sampler=None, /, **given) -> tuple:
    """Return the halves of a mechanism, at a client and at the server of four."""
    given = given if kind is Local else {"clients": 4, **given}
    return kind(**given).halves(sampler)


def server(*kinds, **given):
    return halves(*kinds, **given)[1]


def reply(client: int, *values: float, delta: float = 0.0, counts: float = 7.0) -> Reply:
    payloads = {"delta": {"w": torch.tensor([delta])}, "counts": {"c": torch.tensor([counts])}}
    metrics = {"partition-id": client, "num-examples": 10, "train-loss": 1.0}
    update, sums = {"w": torch.tensor(values)}, frozenset({"counts"})
    return Reply(client, 10, 5, 0.5, update, payloads, metrics=metrics, per_example=sums)


def test_update_and_payload_are_clipped_as_one_vector():
    """||(3, 4, 12)|| = 13; counts are not in it."""
    found, was_longer = clip(reply(0, 3.0, 4.0, delta=12.0), 6.5)
    assert was_longer
    assert found.update["w"].tolist() == [1.5, 2.0]
    assert found.payloads["delta"]["w"].tolist() == [6.0]
    assert found.payloads["counts"]["c"].tolist() == [7.0]
    assert found.update["w"].dtype == torch.float32
    for values in ((3.0, 4.0), (0.0, 0.0)):
        short = reply(0, *values)
        assert clip(short, 5.0) == (short, False)


@pytest.mark.parametrize("clipping", ["client", "server"])
def test_the_mean_of_clipped_parts_stands_for_every_client_and_moves_the_norm(clipping):
    """(3, 4) is halved at C = 2.5, three (0, 2) stay, and C moves by their share: 3 / 4."""
    moving = {"initial_clipping_norm": 2.5, "target_quantile": 0.9, "clip_norm_lr": 0.5}
    client, side = halves(CentralAdaptive, noise_multiplier=0.0, clipping=clipping, **moving)
    received = side.broadcast(4)
    replies = [reply(4, 3.0, 4.0), *(reply(i, 0.0, 2.0, counts=1.0) for i in (9, 10, 11))]
    sent = [client.upload(r, received, SEED) for r in replies]
    bits = [r.payloads[NORM_BIT][UNCLIPPED].item() for r in sent if NORM_BIT in r.payloads]
    assert bits == ([0.0, 1.0, 1.0, 1.0] if clipping == "client" else [])
    assert (sent[0] is replies[0]) == (clipping == "server")
    found = released(side, sent)
    assert len(found.replies) == 4
    assert list(found.weights) == [0.25] * 4
    for r in found.replies:
        assert r.norm == pytest.approx(math.hypot(0.375, 2.0))
    assert found.payloads["counts"]["c"].item() == 4 * 2.5
    assert UniformMean()({}, found)["w"].tolist() == [0.375, 2.0]
    assert side.norm.value == pytest.approx(2.5 * math.exp(-0.5 * (0.75 - 0.9)))


def test_the_sum_of_few_replies_is_divided_by_the_number_that_was_expected():
    """Two of four: else one client would move the model twice as far as the noise is for."""
    found = released(server(noise_multiplier=0.0), [reply(0, 1.0), reply(1, 2.0)])
    assert UniformMean()({}, found)["w"].tolist() == [3.0 / 4]


@pytest.mark.parametrize("bit", [-1e9, 1e9, 1.01, -0.01])
def test_a_bit_that_is_none_costs_its_client_the_round(bit):
    """It would move C by exp(bit)."""
    client, side = halves(CentralAdaptive, count_stddev=3.0)
    good = client.upload(reply(1, 1.0), side.broadcast(1), SEED)
    side.check(good)
    bits = {NORM_BIT: {UNCLIPPED: torch.tensor(bit)}}
    with refused("norm_bit=", kind=RefusedReplyError):
        side.check(replace(good, payloads={**good.payloads, **bits}))


def many(client: int) -> Reply:
    update, delta = ({"w": torch.ones(size)} for size in (30_000, 10_000))
    return Reply(client, 1, 1, 0.1, update, {"delta": delta})


def noise_of(update: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the noise on the ones of :func:`many`."""
    return torch.cat([update - 1.0, delta - 1.0])


@pytest.mark.parametrize("reproducible", [False, True])
def test_central_noise_has_the_standard_deviation_of_the_formula(reproducible):
    """z C / m = 2 * .5 / 4; of 40,000 numbers the estimate is off by .35 %."""
    how = {} if not reproducible else {"reproducible_noise": True}
    side = server(**NOISY, **how)
    replies = [many(client) for client in range(4)]
    found = released(side, replies)
    drawn = noise_of(found.update["w"], found.payloads["delta"]["w"] / 4)
    assert drawn.std().item() == pytest.approx(0.25, rel=0.025)
    assert abs(drawn.mean().item()) < 7 * 0.25 / 200
    for part in drawn.split(10_000):  # the payload gets as much
        assert part.std().item() == pytest.approx(0.25, rel=0.05)
    assert len({one.norm for one in found.replies}) == 1
    again, following = (
        released(one, replies).update["w"] for one in (server(**NOISY, **how), side)
    )
    assert torch.equal(again, found.update["w"]) == reproducible
    assert not torch.equal(following, found.update["w"])


def test_what_clients_round_after_clipping_has_its_noise():
    """z (C + h sqrt(d)) / m with C = h sqrt(d) = .5."""
    side, size = server(**NOISY), 40_000
    total = replace(total_of([many(client) for client in range(4)]), rounding=0.5 / size**0.5)
    found = side.release(total)
    drawn = noise_of(found.update["w"], found.payloads["delta"]["w"] / 4)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.025)
    assert side.metrics()["dp-sensitivity"] == pytest.approx(1.0)


def test_local_noise_has_the_standard_deviation_of_the_formula():
    """2 C sqrt(2 ln(1.25 / delta)) / epsilon, on what is clipped to C before."""
    client, side = halves(Local, clipping_norm=0.5, epsilon=0.5, delta=1e-4)
    expected = 2 * 0.5 * math.sqrt(2 * math.log(1.25e4)) / 0.5
    sent = many(0)
    found = client.upload(sent, {}, SEED)
    clipped_to = 0.5 / 200  # of every one of 40,000 ones
    drawn = noise_of(found.update["w"], found.payloads["delta"]["w"]) + 1.0 - clipped_to
    assert drawn.std().item() == pytest.approx(expected, rel=0.025)
    assert abs(drawn.mean().item()) < 7 * expected / 200
    assert side.privacy.noise_multiplier == pytest.approx(expected / (2 * 0.5))
    quiet = client.upload(reply(3, 1.0), {}, SEED)  # it keeps its losses
    assert set(quiet.metrics) == {"partition-id", "num-examples"}


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 10.0, 20.0])
def test_local_noise_is_enough_also_where_the_formula_is_not(epsilon):
    """By the exact delta of a Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    sigma = server(Local, epsilon=epsilon).privacy.noise_multiplier
    ahead, behind = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    below = [0.5 * math.erfc(-x / math.sqrt(2)) for x in (ahead, behind)]  # of N(0, 1)
    delta = below[0] - math.exp(epsilon) * below[1]
    assert delta <= 1e-5 * (1 + 1e-6)
    if epsilon > 8:
        assert delta == pytest.approx(1e-5, rel=1e-4)
    else:
        assert sigma == math.sqrt(2 * math.log(1.25e5)) / epsilon


@pytest.mark.parametrize("epsilon", [1e6, 1e300])
def test_a_huge_epsilon_has_little_noise_and_no_overflow(epsilon):
    """Theorem 8 tends to sigma^2 = 1 / (2 epsilon)."""
    sigma = server(Local, epsilon=epsilon).privacy.noise_multiplier
    assert sigma == pytest.approx(1 / math.sqrt(2 * epsilon), rel=0.01)


def test_mean_and_count_share_the_noise_multiplier():
    """z^-2 = z_v^-2 + (2 s)^-2: 3-4-5 in reciprocals, 1 / 2.4^2 = 1 / 4^2 + 1 / 3^2."""
    norm = CentralAdaptive(count_stddev=1.5).norm()
    assert norm.noise_multiplier(2.4, 10) == pytest.approx(4.0)
    assert CentralAdaptive().norm().noise_multiplier(2.4, 30) == pytest.approx(4.0)  # s = 30 / 20
    # s = 11 / 20 is just enough for z = 1; that of 10 clients would not be
    expected = (1.0 - 1.1**-2) ** -0.5
    assert server(CentralAdaptive, clients=11).multiplier == pytest.approx(expected)
    with refused("count_stddev=0.5"):
        server(CentralAdaptive, clients=10)
    with refused("count_stddev=0.5", "0.6"):
        server(CentralAdaptive, clients=20, noise_multiplier=1.2, participation=0.5)


@pytest.mark.slow
def test_the_count_has_its_noise():
    moves, how = [], {"clipping": "server", "reproducible_noise": True, "count_stddev": 2.0}
    how |= {"initial_clipping_norm": 1.0, "target_quantile": 0.0, "clip_norm_lr": 1.0}
    for seed in range(150):
        side = server(CentralAdaptive, seed=seed, **how)
        released(side, [reply(0, 0.1)] * 4)
        moves.append(-4 * math.log(side.norm.value))  # the noised count of 4
    assert np.mean(moves) == pytest.approx(4.0, abs=0.6)
    assert np.std(moves) == pytest.approx(2.0, rel=0.2)


@pytest.mark.slow
def test_epsilon_is_of_the_client_that_was_asked_most_often():
    z = math.sqrt(2 * math.log(1.25e5)) / 1.2
    for side, multiplier, name in (
        (server(clients=1, noise_multiplier=4.0), 4.0, "dp-epsilon"),
        (server(Local, epsilon=1.2), z, "dp-epsilon"),
        (server_side(SoftLabels, noise_multiplier=4.0), 4.0, "soft-label-epsilon"),
    ):
        side.init({"head.weight": torch.zeros(3, 2)})
        for client in (0, 1, 1, 2, 1):
            side.asked(client)
        exact = exact_epsilon(multiplier, 3)
        assert exact <= side.metrics()[name] <= exact + 0.05
    assert "dp-epsilon" not in server(clients=1, noise_multiplier=0.0).metrics()


@pytest.mark.slow
def test_epsilon_under_poisson_sampling_is_that_of_the_literature():
    """q = .01, z = 4, 10,000 steps, delta 1e-5.

    Abadi et al. 2016, Section 5.1, bound it by 1.26. The limit of many steps is a Gaussian
    mechanism of mu = q sqrt(T (e^(1 / z^2) - 1)) (Bu et al., https://arxiv.org/abs/1911.11607).
    """
    found = epsilon_of(4.0, 10_000, 1e-5, "", rate=0.01)
    mu = 0.01 * math.sqrt(10_000 * math.expm1(1 / 16))
    assert found == pytest.approx(exact_epsilon(1 / mu, 1), rel=0.05)
    assert found < 1.26


@pytest.mark.slow
def test_amplification_is_claimed_where_clients_are_drawn_one_by_one_and_in_secret():
    for sampler, seed, clients, participation, claimed in (
        (BernoulliSampler, None, 400, 0.1, True),
        (BernoulliSampler, 5, 400, 0.1, False),  # who knows the seed knows who takes part
        (BernoulliSampler, None, 40, 0.1, False),  # nobody drawn happens, and it takes one
        (BernoulliSampler, None, 400, 1.0, False),
        (FixedSizeSampler, 5, 400, 0.1, False),
    ):
        sampler = sampler(participation=participation, seed=seed)
        side = server(CentralFixed, sampler, clients=clients, participation=participation)
        side.asked(0)
        released(side, [reply(0, 1.0)])
        found = side.metrics()
        assert ("dp-epsilon-sampled" in found) == claimed
        assert not claimed or found["dp-epsilon-sampled"] < 0.5 * found["dp-epsilon"]


@pytest.mark.slow
def test_a_restart_changes_nothing():
    whole, cut, resumed = (
        server(CentralAdaptive, count_stddev=3.0, clipping="server", **REPEATABLE) for _ in range(3)
    )
    replies = [reply(i, float(i)) for i in range(4)]
    for side in (whole, cut, whole, cut):
        side.asked(1)
        released(side, replies)
    resumed.init({})
    resumed.load_state_dict(cut.state_dict())
    found = [released(side, replies).update["w"].item() for side in (whole, resumed)]
    assert found[0] == found[1]
    assert resumed.metrics() == whole.metrics()
    assert resumed.uploads == {1: 2}


@pytest.mark.slow
def test_a_restart_forgets_no_upload_with_local_noise():
    before, after = server(Local), server(Local)
    for side in (before, after):
        side.init({})
    for client in (1, 1, 2):
        before.asked(client)
    after.load_state_dict(before.state_dict())
    assert after.metrics() == before.metrics()
    assert after.metrics()["dp-epsilon"] > after._epsilon(1)


def test_reproducible_noise_is_another_for_every_run_client_and_round():
    def drawn(seed: int, client: int, round: int) -> int:
        content = RecordDict({CONFIG: ConfigRecord({"round": round})})
        asked = Message(content, dst_node_id=1, message_type="train")
        return int(upload_seed(seed, client, asked).generate_state(1, np.uint64)[0])

    assert drawn(3, 1, 2) == drawn(3, 1, 2)
    assert len({drawn(3, 1, 2), drawn(4, 1, 2), drawn(3, 5, 2), drawn(3, 1, 6)}) == 4


def central(z=1.0, norm=0.3, clipping="client", kind=CentralFixed, **slots) -> FederatedStrategy:
    given = {"clipping_norm": norm} if kind is CentralFixed else norm
    client, side = halves(kind, noise_multiplier=z, clipping=clipping, **given, **REPEATABLE)
    return built(
        client_sides={"differential_privacy": client, **slots.pop("clients", {})},
        server_sides={"differential_privacy": side, **slots.pop("servers", {})},
        **{"aggregator": UniformMean(), "local_lr": 0.1, **slots},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, {"kind": CentralAdaptive, "norm": {"initial_clipping_norm": 0.3, "count_stddev": 3.0}}],
)
def test_with_secure_aggregation_it_is_the_same_round(how):
    params, metrics = [], []
    for secure in (None, SecAggPlus(max_examples=50)):
        found, [*_, report] = train(central(0.5, secure_aggregation=secure, **how), rounds=1)
        params.append(found)
        metrics.append([report.metrics[n] for n in ("clipping-norm", "dp-epsilon", "step_norm")])
        assert "update_norm" not in report.metrics
    torch.testing.assert_close(*params, rtol=0, atol=1e-6)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.slow
def test_a_rounded_upload_is_longer_than_the_norm_and_no_longer_than_the_noise_is_for():
    """Flower's rounding, to 2^12 steps of 2 * 8 / 2^12."""
    secure = SecAggPlus(max_examples=50, quantization_range=1 << 12)
    params, [*_, report] = train(central(0.5, 0.01, secure_aggregation=secure), rounds=1)
    size, step = sum(value.numel() for value in params.values()), 2.0**-8
    sensitivity = report.metrics["dp-sensitivity"]
    assert sensitivity == pytest.approx(0.01 + step * size**0.5)
    with seeded_numpy(np.random.SeedSequence(1)):
        clipped = np.full(size, 0.01 / size**0.5)
        drawn = [dequantize(quantize([clipped], 8.0, 1 << 12), 8.0, 1 << 12) for _ in range(100)]
    norms = [float(np.linalg.norm(one)) for [one] in drawn]
    assert 0.01 < max(norms) <= sensitivity


def test_a_norm_that_clips_nobody_and_no_noise_is_the_plain_round():
    found, _ = train(central(0.0, 1e6), rounds=1)
    expected, _ = train(built(FedAvg, aggregator=UniformMean(), local_lr=0.1), rounds=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("clipping", ["client", "server"])
def test_no_norm_of_a_single_upload_raises_an_alarm(clipping):
    """The guarantee is of the noisy sum: a z-score in metrics.jsonl would tell of one client."""
    labels = [1.0, 1.1, 1.2, 100.0]
    ones = torch.ones(4, 1, dtype=torch.float64)
    data = [TensorBatches(ones, b * ones[:, 0]) for b in labels]
    plain = built(FedAvg, aggregator=UniformMean(), local_lr=0.1)
    alarms = []
    for strategy in (plain, central(0.0, 1e6, clipping)):
        _, reports = federate(strategy, data, model=lambda: Regression(1), rounds=1)
        alarms.append(list(reports[-1].alarms))
    assert alarms == [[3], []]


COUPLED = {
    "scaffold": (CONTROL_VARIATE, client_side(SCAFFOLD), server_side(SCAFFOLD), None),
    "feddyn": (DRIFT_SUM, client_side(FedDyn, alpha=0.1), ServerSide(), FedDynServer(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", COUPLED)
@pytest.mark.parametrize("where", ["central", "local"])
def test_what_the_server_adds_up_is_what_the_clients_keep(where, method):
    """Every upload is clipped, and client 1 loses its state once: both sums start again."""
    key, client, server, optimizer = COUPLED[method]
    parts = {
        "central": halves(noise_multiplier=0.0, clipping_norm=0.05, **REPEATABLE),
        "local": halves(Local, clipping_norm=0.05, epsilon=500.0, reproducible_noise=True),
    }
    strategy = built(
        client_sides={method: client, "differential_privacy": parts[where][0]},
        server_sides={method: server, "differential_privacy": parts[where][1]},
        aggregator=UniformMean(),
        server_optimizer=optimizer,
        local_lr=0.1,
    )
    rows = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    data = [TensorBatches(part[:, :3], part[:, 3]) for part in rows]
    stores = {i: ContextStateStore(RecordDict()) for i in range(4)} | {1: Forgetful()}
    federate(strategy, data, model=lambda: Regression(3), rounds=6, stores=stores)
    run = strategy.state
    assert run.restarted[key] == 4
    kept = [stores[i].load(run.experiment, run.committed[i])[key]["head.weight"] for i in range(4)]
    summed = {CONTROL_VARIATE: server, DRIFT_SUM: optimizer}[key].state_dict()[key]["head.weight"]
    assert min(float(value.norm()) for value in kept) > 0.01
    torch.testing.assert_close(summed, torch.stack(kept).mean(0), rtol=0, atol=1e-12)


def soft_labels(z: float) -> dict:
    parts = SoftLabels(noise_multiplier=z).parts()
    return {"clients": parts.client_sides, "servers": parts.server_sides}


def test_what_it_cannot_cover_is_refused():
    single = ["secure_aggregation", "CentralPrivacy"]
    for how, named in (
        ({"aggregator": None}, ["uniform_mean"]),
        ({"aggregator": NormMean()}, ["aggregator NormMean"]),
        ({"clipping": "server", "secure_aggregation": SecAggPlus()}, single),
        (soft_labels(0.0), ["soft_label_sums", "soft_labels.noise_multiplier"]),
    ):
        with refused(*named):
            central(**how)
    central(clipping="server")
    *_, optimizer = COUPLED["feddyn"]
    with refused("clipping=server", "FedDynServer"):
        central(clipping="server", server_optimizer=optimizer)
    central(**soft_labels(2.0))
    with_buffers = replace(reply(0, 1.0), buffers={"running_mean": torch.ones(1)})
    with refused("running_mean"):
        halves(Local)[0].upload(with_buffers, {}, SEED)


def test_the_number_of_clients_must_be_known():
    with refused("clients=0"):
        server(clients=0)


# ---- the default hides ---------------------------------------------------------------------------


def central_noise(**how) -> torch.Tensor:
    return released(server(clients=1, **NOISY, **how), [many(0)]).update["w"]


def local_noise(**how) -> torch.Tensor:
    return halves(Local, clipping_norm=0.5, **how)[0].upload(many(0), {}, SEED).update["w"]


def label_noise(**how) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mechanism = server_side(SoftLabels, noise_multiplier=1.0, **how).how
    return mechanism.noised(torch.zeros(1_000), generator)


@pytest.mark.parametrize("draw", [central_noise, local_noise, label_noise])
def test_nobody_can_draw_the_noise_again_unless_the_recipe_asks_for_it(draw):
    """Same seed, and every generator in the process in the same state."""
    drawn = []
    for how in ({}, {}, {"reproducible_noise": True}, {"reproducible_noise": True}):
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        torch.manual_seed(0)
        drawn.append(draw(**how))
    first, second, third, fourth = drawn
    assert not (first == second).any()
    assert torch.equal(third, fourth)
