"""Robust aggregators in whole rounds: hostile clients, payloads, state, refusals, alarms."""

import json

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedhet.conf import compose, compose_overrides
from fedhet.load_run import task_of
from fedhet.server_app.assembly import check_parts
from fedhet.server_app.root_set import root_set_of
from fedhet.strategies.base import Norms, Reply
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fednova import FedNovaClient, FedNovaServer
from fedhet.strategies.modes.robust.clipping import CenteredClipping
from fedhet.strategies.modes.robust.coordinates import Median
from fedhet.strategies.modes.robust.fltrust import FLTrust
from fedhet.strategies.modes.robust.selection import Krum
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.round.update_diagnostics import standing_out
from fedhet.strategies.scaffold import SCAFFOLD
from fedhet.strategies.wire.records import METRICS
from tests.federation import Regression, TensorBatches, federate
from tests.recipes import overrides, run_recipe
from tests.refused import refused
from tests.strategies.sides import built


def clients(count=6, size=3) -> list[TensorBatches]:
    """Return clients whose optimum is w = (1, ..., 1), each from inputs of its own."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        inputs = torch.randn(20, size, generator=draw, dtype=torch.float64)
        found.append(TensorBatches(inputs, inputs.sum(1)))
    return found


def lying(record: str, factor: float):
    """Return a tamper that multiplies a record of client 1's replies."""

    def tamper(reply):
        metrics = reply.content.metric_records.get("metrics")
        if metrics and metrics["partition-id"] == 1 and record in reply.content.array_records:
            array = reply.content.array_records[record]
            state = {n: torch.from_numpy(factor * a.numpy()) for n, a in array.items()}
            reply.content[record] = type(array)(state)
        return reply

    return tamper


def run(strategy, tamper=lambda reply: reply, **how):
    return federate(
        strategy, clients(), model=lambda: Regression(3), rounds=6, tamper=tamper, **how
    )


def error_of(params) -> float:
    return float((params["head.weight"] - 1).abs().max())


@pytest.mark.slow
def test_a_scaled_update_ruins_the_mean_and_not_the_median():
    tamper = lying("update", -100.0)
    slots = {"local_lr": 0.3}
    ruined, reports = run(built(FedAvg, aggregator=UniformMean(), **slots), tamper)
    assert error_of(ruined) > 100
    assert [list(report.alarms) for report in reports[1:]] == [[1]] * 6  # replies only summed
    kept, reports = run(built(FedAvg, aggregator=Krum(attackers=1), **slots), tamper)
    assert error_of(kept) < 0.3
    assert all(report.trust[1] == 0.0 for report in reports[1:])
    row = reports[1].row()
    assert row["alarms"] == 1
    assert row["standing_out"].keys() == {"1"}
    assert len(row["left_out"]) == 5


@pytest.mark.slow
def test_scaffolds_c_is_protected_from_a_lie_in_it_alone_and_the_alarm_sees_it():
    tamper, shown = lying("control_variate_delta", -1000.0), {}
    for name, aggregator in (
        ("mean", UniformMean()),
        ("median", Median()),
        ("krum", Krum(attackers=1)),
    ):
        params, reports = run(built(SCAFFOLD, aggregator=aggregator, local_lr=0.1), tamper)
        shown[name] = error_of(params)
        assert 1 in reports[1].alarms, name  # of the mean's replies there are only norms
        assert 1 not in reports[0].alarms
    assert shown["mean"] > 100 > 0.7 > max(shown["median"], shown["krum"]), shown


@pytest.mark.slow
def test_the_centre_survives_a_restart():
    whole, _ = run(built(FedAvg, aggregator=CenteredClipping(), local_lr=0.1))
    first = built(FedAvg, aggregator=CenteredClipping(), local_lr=0.1)
    half, _ = federate(first, clients(), model=lambda: Regression(3), rounds=3)
    again = built(FedAvg, aggregator=CenteredClipping(), local_lr=0.1)
    again.restore(first.snapshot())
    resumed, _ = run(again, initial=half)
    assert torch.equal(whole["head.weight"], resumed["head.weight"])


def test_too_few_replies_leave_the_model_and_end_the_run():
    def lost(reply):
        metrics = reply.content.metric_records.get("metrics")
        return None if metrics and metrics["partition-id"] > 2 else reply

    with refused("the 5 ", "strategy.aggregator", kind=RuntimeError):
        run(built(FedAvg, aggregator=Krum(attackers=1), local_lr=0.1), lost)


MODEL = ServerModel(Regression(3), (3,), 1)


class _Own:
    """An output that reads the clients' models."""

    def __call__(self, params, update, stepped, replies):
        return stepped


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: built(SCAFFOLD, aggregator=FLTrust(), server_model=MODEL),
            ["FLTrust", "control"],
        ),
        (
            lambda: built(FedAvg, aggregator=Median(), output=_Own()),
            ["Median", "_Own"],
        ),
        (
            lambda: built(
                client_sides={"fednova": FedNovaClient()},
                server_sides={"fednova": FedNovaServer()},
                aggregator=Median(),
            ),
            ["Median", "fednova_reach"],
        ),
    ],
)
def test_methods_that_cannot_be_protected_are_refused(make, named):
    with refused(*named):
        make()


@pytest.mark.slow
def test_a_recipe_with_too_few_clients_is_refused_before_anything_starts():
    words = ("strategy/aggregator=bulyan", "strategy.aggregator.attackers=2", "clients=20")
    check_parts(compose(overrides(*words)))
    with refused("attackers=2", "11", "10"):
        check_parts(compose(overrides(*words, "participation=0.5")))


def test_the_alarm_by_hand():
    def of(*norms):
        found = [Reply(i, 1, 1, 0.1, {}, norms=Norms({"w": norm})) for i, norm in enumerate(norms)]
        return {client: scores["update"] for client, scores in standing_out(found).items()}

    assert of(1.0, 1.0, 1.0, 1.0, 3.9) == {}
    assert of(1.0, 1.0, 1.0, 1.0, 5.0) == {4: pytest.approx((5 - 1) / 0.5)}
    # median 3, MAD 2: the scale is 1.4826 * 2
    assert of(1.0, 2.0, 3.0, 5.0, 30.0) == {4: pytest.approx(27 / (1.4826 * 2))}
    assert of(1.0, 1.0, 100.0) == {}
    assert of(0.0, 0.0, 0.0, 0.0, 0.0) == {}


def test_the_alarm_reads_payloads_by_name_and_sums_over_examples_for_each_example():
    def of(norms, examples, per_example=()):
        return standing_out(
            [
                Reply(
                    i,
                    n,
                    1,
                    0.1,
                    {},
                    norms=Norms({}, {"c": norm}),
                    per_example=frozenset(per_example),
                )
                for i, (norm, n) in enumerate(zip(norms, examples, strict=True))
            ]
        )

    examples = [10, 20, 30, 40, 500]
    assert of(examples, examples) == {4: {"c": pytest.approx((500 - 30) / 15)}}
    assert of(examples, examples, {"c"}) == {}
    assert of([10, 20, 30, 40, 5000], examples, {"c"}) == {4: {"c": pytest.approx((10 - 1) / 0.5)}}


@pytest.mark.slow
def test_fltrust_trains_at_the_server_on_examples_that_are_not_tested_on(tmp_path):
    """The client that turns its update has no trust in any round."""
    words = ["clients=3", "rounds=2", "device=cpu", "strategy/aggregator=fltrust", "partition=iid"]
    words += ["strategy.aggregator.root=0.5", "evaluation.received=false", "attack=sign_flip"]
    words += ["attack.allow=true", "attack.clients=[2]", "runtime=local"]
    summary = run_recipe(tmp_path / "run", *words)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row.get("left_out") for row in rows[1:]] == [[2], [2]]
    assert summary["accuracy"] > rows[0]["accuracy"]
    tested = [row["accuracy"] * 180 for row in rows]  # of 360 test examples
    np.testing.assert_allclose(tested, np.round(tested), atol=1e-6)


@pytest.mark.slow
def test_a_site_that_claims_too_many_examples_silences_nobody_but_itself():
    """A claim of 2^48 once left every client's numbers 2^46 / 2^48, so that it alone counted."""

    def claim(reply: Message) -> Message:
        if (info := reply.content.config_records.get("client")) and info["partition-id"] == 0:
            info["num-examples"] = 1 << 48
        elif METRICS in reply.content and reply.content[METRICS]["partition-id"] == 0:
            reply.content[METRICS]["num-examples"] = 1 << 48
        return reply

    for aggregator in (Median(), UniformMean()):
        params, reports = run(built(FedAvg, aggregator=aggregator, local_lr=0.5), tamper=claim)
        for report in reports[1:]:
            assert set(report.clients) >= {1, 2, 3, 4, 5}
            assert all(said.startswith("client 0: ") for said in report.failures)
        assert error_of(params) < 0.1


@pytest.mark.slow
def test_the_root_set_and_what_is_left_to_test_on_are_the_test_set():
    recipe = compose_overrides(("strategy/aggregator=fltrust", "strategy.aggregator.root=100"))
    task = task_of(recipe)
    whole = task.test_data()
    root, rest = root_set_of(recipe, task, task.build_model(0), whole)

    def rows(data) -> list[bytes]:
        batches = data.batches(50, generator=None, train=False)
        return [row.numpy().tobytes() for inputs, _ in batches for row in inputs]

    assert (len(rows(root.examples)), len(rows(rest))) == (100, len(whole) - 100)
    assert sorted(rows(root.examples) + rows(rest)) == sorted(rows(whole))
