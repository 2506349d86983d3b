"""Prediction sets that clients calibrate: figures, invalid answers, lost clients, refusals."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors.torch import load_file

from fedhet.common.decisions import CONFUSION, shapes_of
from fedhet.conf import compose, plain_part
from fedhet.server_app.listeners.calibration import CalibrationError, calibrate
from fedhet.server_app.listeners.confusion import read_counts
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.wire.records import to_record
from fedhet.tasks import build_task
from fedhet.tasks.conformal import CALIBRATE, LOG_LOSSES
from fedhet.tasks.conformal.calibration import Calibration
from fedhet.tasks.conformal.scores import APS, of_labels, probabilities_of, raps
from fedhet.tasks.conformal.sketch import TEMPERATURES
from fedhet.tasks.evaluation import logits_of
from tests.federation import lost
from tests.recipes import TINY, grid_of, overrides, run_recipe
from tests.refused import refused

pytestmark = pytest.mark.slow

HELD = [*TINY, "partition=iid", "partition.holdout=0.5", "calibration.alphas=[0.1,0.3]"]
SHORT = [*HELD, "local.epochs=1", "rounds=1"]


def task_of(*words):
    recipe = compose(overrides(*words))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    return build_task(*parts, seed=recipe.seed, num_clients=recipe.clients)


def test_thresholds_are_quantiles_of_the_pooled_scores_and_coverage_is_counted(tmp_path):
    """Brute force: the clients' scores in one place, drawn as they draw them."""
    summary = run_recipe(tmp_path / "run", *HELD)
    plain = run_recipe(tmp_path / "plain", *HELD, "calibration.alphas=[]")
    assert "prediction_sets" not in plain
    assert plain["parameters_sha256"] == summary["parameters_sha256"]
    found, task = summary["prediction_sets"], task_of(*HELD)
    model = task.build_model(0)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    pooled = {"APS": [], "RAPS": []}
    for client in range(3):
        logits, labels = logits_of(model, task.client_data(client)[1])
        random = np.random.default_rng([0, client, 0xCA])
        order, uniform = random.permutation(len(labels)), random.random(len(labels))
        kept = order >= round(0.2 * len(labels))
        probabilities = probabilities_of(logits, found["temperature"])
        for score in (APS, raps(10)):
            pooled[score.name] += of_labels(score(probabilities, uniform), labels)[kept].tolist()
    assert (found["examples"], found["clients"]) == (len(pooled["APS"]), [0, 1, 2])
    wanted = [(name, alpha) for name in pooled for alpha in (0.1, 0.3)]
    for one, (name, alpha) in zip(found["sets"], wanted, strict=True):
        assert (one["score"], one["alpha"]) == (name, alpha)
        rank = int(np.ceil((found["examples"] + 1) * (1 - alpha) - 1e-9))
        score, width = sorted(pooled[name])[rank - 1], {"APS": 1.0, "RAPS": 1.09}[name] / 1000
        assert score <= one["threshold"] <= score + width
    logits, labels = logits_of(model, task.test_data("cpu"))
    probabilities = probabilities_of(logits, found["temperature"])
    scores = APS(probabilities, np.random.default_rng(0).random(len(labels)))
    first = found["sets"][0]
    inside = scores <= first["threshold"]
    assert first["coverage"] == pytest.approx(inside[np.arange(len(labels)), labels].mean())
    assert first["mean_size"] == pytest.approx(inside.sum(1).mean())
    assert 0.8 < first["coverage"] <= 1.0  # 120 images: 6 deviations below .9 is .74


def test_with_personal_tensors_each_client_calibrates_its_own_model(tmp_path):
    found = run_recipe(tmp_path, *SHORT, "strategy=fedper")["prediction_sets"]
    assert found["clients"] == [0, 1, 2]
    assert all("coverage" not in one for one in found["sets"])  # no model for the test set


def nonsense(reply):
    if LOG_LOSSES in reply.content.array_records[CALIBRATE]:
        losses = torch.full((121,), float("nan"), dtype=torch.float64)
        reply.content[CALIBRATE] = to_record({LOG_LOSSES: losses})
    return reply


@pytest.mark.parametrize(
    ("change", "nodes", "why", "clients"),
    [
        (nonsense, [101], "client 1: refused: calibrate 'log-losses' holds NaN", [0, 1, 2]),
        (lost, [101], "client 1: error 5: Node Unavailable", [0, 2]),
        (lambda reply: None, [100, 101, 102], "client 1: no reply within 3600 s", None),
    ],
)
def test_clients_without_a_valid_answer_are_logged_and_left_out_and_the_run_completes(
    change, nodes, why, clients, tmp_path, caplog
):
    def tampered(reply):
        answer = reply.has_content() and CALIBRATE in reply.content.array_records
        return change(reply) if answer and reply.metadata.src_node_id in nodes else reply

    summary = run_recipe(tmp_path, *SHORT, tamper=tampered)
    found = summary["prediction_sets"]
    assert summary["status"] == "completed"
    assert found.get("clients") == clients
    assert np.isfinite(found["temperature"]) if clients else "no client has sent" in found["error"]
    assert why in caplog.text


def asking(histograms):
    def ask(action, config):
        assert action == "calibrate"
        sent = {name: torch.tensor(values) for name, values in histograms.items()}
        if "temperature" not in config:
            sent = {LOG_LOSSES: torch.arange(len(TEMPERATURES), dtype=torch.float64)}
        else:
            assert config["temperature"] == TEMPERATURES[0]
        return {0: RecordDict({CALIBRATE: to_record(sent)})}

    return ask


@pytest.mark.parametrize(
    ("histograms", "why"),
    [
        ({"APS": [1, 2, -1], "RAPS": [1, 1, 0]}, "below 0"),
        ({"APS": [2**62, 0, 0], "RAPS": [2**62, 0, 0]}, "above its 3 examples"),
        ({"APS": [3, 1, 0], "RAPS": [2, 2, 0]}, "more than its 3 held-out examples"),
        ({"APS": [1, 2, 0], "RAPS": [1, 1, 0]}, "different numbers"),
        ({"APS": [1.0, 2.0, 0.0], "RAPS": [1.0, 1.0, 1.0]}, "not int32, int64"),
        ({"APS": [1, 2, 0]}, "lacks"),
    ],
)
def test_histograms_that_cannot_be_are_refused(histograms, why, caplog):
    with pytest.raises(CalibrationError):
        calibrate(Calibration([0.1], bins=2), asking(histograms), 10, {0: 3})
    assert why in caplog.text


@pytest.mark.parametrize(
    ("answers", "scores", "why"),
    [
        ([[1, 0], [1, -1]], {}, "below 0"),
        ([[2**62, 0], [0, 0]], {}, "above its 3 examples"),
        ([[2, 0], [0, 2]], {(0, 0): 2, (1, 9): 2}, "more than its 3 examples"),
        ([[1, 0], [0, 1]], {(0, 0): 2}, "a class"),
        ([[1, 0, 0], [0, 1, 0]], {}, "shape"),
        ([[1.0, 0.0], [0.0, 1.0]], {}, "not int32, int64"),
    ],
)
def test_counts_of_answers_that_cannot_be_are_refused(answers, scores, why):
    table = torch.zeros(2, 1000, dtype=torch.int64)
    for place, count in scores.items():
        table[place] = count
    sent = to_record({"answers": torch.tensor(answers), "scores": table})
    with refused(why, kind=RefusedReplyError):
        read_counts(sent, 3, shapes_of(2))


def test_a_client_with_impossible_counts_is_left_out_of_the_confusion_matrix(tmp_path, caplog):
    def tampered(reply):
        if reply.has_content() and CONFUSION in reply.content.array_records:
            found = {n: a.numpy() for n, a in reply.content[CONFUSION].items()}
            wrong = {
                n: torch.from_numpy(a * factor[reply.metadata.src_node_id])
                for n, a in found.items()
            }
            reply.content[CONFUSION] = to_record(wrong)
        return reply

    words = [*TINY, "partition.holdout=0.5", "rounds=1", "evaluation.confusion=true"]
    factor = {100: 1, 101: -1, 102: 1000}
    found = run_recipe(tmp_path / "one", *words, tamper=tampered)["confusion"]
    right = run_recipe(tmp_path / "all", *words)["confusion"]
    assert np.less_equal(found["counts"], right["counts"]).all()
    assert 0 < np.sum(found["counts"]) < np.sum(right["counts"])
    assert "confusion of client 1: refused" in caplog.text
    factor[100] = -1
    summary = run_recipe(tmp_path / "none", *words, tamper=tampered)
    assert (summary["status"], list(summary["confusion"])) == ("completed", ["error"])


def test_too_few_examples_have_no_threshold():
    ask = asking({"APS": [2, 1, 0], "RAPS": [3, 0, 0]})
    found = calibrate(Calibration([0.1, 0.5], bins=2), ask, 10, {0: 3})
    assert [one["threshold"] for one in found["sets"]] == [None, 0.5, None, 0.545]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["partition.holdout=0"], "partition.holdout"),
        (["strategy/secure_aggregation=secagg_plus"], "strategy/secure_aggregation=none"),
        (["strategy=ensemble"], "strategy=ensemble calibration.alphas=[]"),
        (["strategy=ditto"], "strategy=ditto evaluation.model=global"),
        (["strategy=fedala"], "strategy=fedala"),
    ],
)
def test_a_recipe_that_cannot_calibrate_is_refused_before_round_1(words, why, tmp_path):
    with refused(*why.split()):
        run_recipe(tmp_path, *SHORT, *words)


def test_a_client_without_held_out_examples_says_so():
    params = ArrayRecord(task_of(*TINY).build_model(0).state_dict())
    content = RecordDict({"params": params, "config": ConfigRecord({"temperature-share": 0.2})})
    [reply] = grid_of(TINY, 3).send_and_receive([Message(content, 100, "query.calibrate")])
    assert reply.has_error()
    assert "partition.holdout" in reply.error.reason
