"""Early stopping by hand on rows, and the file of the best round when a run is cut short."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fedhet.common.metrics import metric_totals
from fedhet.common.results import totals
from fedhet.conf import compose_overrides
from fedhet.server_app.listeners import Finished, Start
from fedhet.server_app.listeners.best_model import BEST, BestModel, check_measured
from fedhet.server_app.listeners.checkpoints import Checkpoints
from fedhet.server_app.listeners.stopping import EarlyStopping, why_ended
from fedhet.strategies.round.round_report import RoundReport
from fedhet.tasks.metrics import Predictions
from tests.refused import refused


def rows(*values, metric="accuracy"):
    return [{"round": t, metric: value} for t, value in enumerate(values)]


def stopped_after(rule, every_row):
    """The round after which the rule ends the run; None if it does not."""
    ends = [n for n in range(1, len(every_row) + 1) if rule.stop_reason(every_row[:n])]
    return every_row[ends[0] - 1]["round"] if ends else None


def test_a_round_without_a_reply_is_no_evaluation_without_improvement():
    found = rows(0.1, 0.1, 0.1, 0.1)
    for row, clients in zip(found[1:], ([], [], [0]), strict=True):
        row["clients"] = clients
    assert stopped_after(EarlyStopping(patience=1), found) == 3


@pytest.mark.parametrize(
    ("how", "values", "end"),
    [
        ({"patience": 2}, [0.1, 0.5, 0.5, 0.5, 0.9], 3),  # the same is no improvement
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.6, 0.5, 0.55], 5),
        ({"patience": 3}, [0.1, 0.5, 0.4, 0.6, 0.5, 0.55], None),
        ({"patience": 1}, [0.9, 0.1], 1),  # the initial model counts
        ({}, [0.9, 0.1, 0.1, 0.1], None),  # patience null
        # 0.56 is not more than 0.5 + 0.1, and 0.62 is
        ({"patience": 2, "min_delta": 0.1}, [0.5, 0.56, 0.62, 0.63, 0.64], 4),
        ({"patience": 2, "min_delta": 0.1}, [0.5, 0.56, 0.58, 0.63], 2),
        ({"patience": 2}, [0.5, math.nan, None, 0.9], 2),  # what is no number improves nothing
        ({"patience": 2, "mode": "min"}, [0.5, 0.6, 0.7], 2),
    ],
)
def test_the_round_that_ends_the_run(how, values, end):
    assert stopped_after(EarlyStopping(**how), rows(*values)) == end


def test_a_loss_is_minimised_and_rounds_without_an_evaluation_do_not_count():
    rule = EarlyStopping("loss", patience=2)
    every = rows(3.0, 2.0, 2.5, 2.6, metric="loss")
    assert stopped_after(rule, every) == 3
    between = [row for old in every for row in (old, {"round": old["round"]})]
    assert stopped_after(rule, between) == 3
    assert (rule.best(every).round, rule.best(every).value) == (1, 2.0)


def test_the_first_of_equal_rounds_is_the_best():
    assert EarlyStopping().best(rows(0.1, 0.7, 0.7)).round == 1
    assert EarlyStopping().best([{"round": 0}]) is None


def test_the_target_ends_a_run_when_the_last_accuracy_is_as_high():
    for last, ends in ((0.7, False), (0.8, True), (0.9, True), (None, False)):
        every = [*rows(0.9), {"round": 1, "accuracy": last}]
        assert (why_ended(every, 0.8, EarlyStopping()) is not None) == ends
    assert why_ended([], 0.8, EarlyStopping()) is None


def test_the_last_and_the_best_value_of_each_metric():
    every = [
        {"round": 0, "f1": 0.2, "mae": 3.0, "f1/cat": 0.9, "accuracy": 0.5, "loss": 1.0},
        {"round": 1, "f1": 0.6, "mae": 1.0, "client_f1": 0.4},
        {"round": 2, "f1": 0.5, "mae": 2.0, "client_f1": 0.3, "received_f1": 0.1},
    ]
    assert metric_totals(every) == {
        **{"f1": 0.5, "best_f1": 0.6, "mae": 2.0, "best_mae": 1.0, "f1/cat": 0.9},
        **{"client_f1": 0.3, "best_client_f1": 0.4},
    }


def test_a_metric_that_the_last_evaluation_lacks_has_a_best_value_alone():
    every = [
        {"round": 0, "loss": 1.0, "r2": 0.2, "client_loss": 1.0, "client_r2": 0.3},
        {"round": 1, "loss": 1.0},  # as the R2 of a constant; the clients have not evaluated
        {"round": 2},  # nobody has
    ]
    assert metric_totals(every) == {"best_r2": 0.2, "best_client_r2": 0.3}


def best_model(folder, rule=None, done=None, rows=()):
    """Begin a run, or resume one after ``done``."""
    results = SimpleNamespace(folder=folder)
    found = BestModel(rule or EarlyStopping(), Checkpoints(results, None, None, 1), {})
    found.on_start(Start(folder, {}, {}, rows, done))
    return found


def offer(best, every, number):
    output = {"w": torch.full((2,), float(number))}
    best.on_round(Finished(RoundReport(number), every, None, output, 9))


def test_the_best_model_is_that_of_the_rounds_that_are_done(tmp_path):
    every, path = rows(0.1, 0.8, 0.3, 0.9), tmp_path / BEST
    best = best_model(tmp_path)
    for number in (0, 1):
        offer(best, every[: number + 1], number)
        best.keep()
    offer(best, every[:3], 2)  # worse: nothing is written
    best.keep()
    assert best.summary()["round"] == 1
    offer(best, every, 3)  # killed before the checkpoint of round 3
    assert load_file(path)["w"].tolist() == [1.0, 1.0]
    resumed = best_model(tmp_path, done=2)
    resumed.keep()
    assert load_file(path)["w"].tolist() == [1.0, 1.0]
    offer(resumed, every, 3)  # killed after the checkpoint, before the file was moved
    again = best_model(tmp_path, done=3)
    assert load_file(path)["w"].tolist() == [3.0, 3.0]
    assert (again.summary()["round"], again.summary()["value"]) == (3, 0.9)
    assert best_model(tmp_path).summary() == {}  # begun afresh


def test_the_best_model_stays_where_its_row_is_lost_and_goes_where_its_round_is(tmp_path, caplog):
    before = best_model(tmp_path)
    offer(before, rows(0.1, 0.5, 0.9), 2)
    before.keep()
    without_rows = best_model(tmp_path, done=2)
    for number, value in ((3, 0.2), (4, 0.95)):
        offer(without_rows, [{"round": number, "accuracy": value}], number)
        without_rows.keep()
        assert without_rows.summary()["value"] == max(0.9, value)
    earlier = best_model(tmp_path, done=3, rows=rows(0.1, 0.5, 0.9, 0.2))
    assert f"removed {BEST}" in caplog.text
    assert earlier.summary() == {}


AT_CLIENTS = ("evaluation.clients=true", "partition.holdout=0.1")
CLIENT, LOSS = "early_stopping.metric=client_accuracy", "early_stopping.metric=loss"


def test_a_resumed_run_of_another_rule_does_not_keep_the_model_of_the_old_one(tmp_path, caplog):
    before = best_model(tmp_path)
    offer(before, [{"round": 1, "accuracy": 0.5}], 1)
    before.keep()
    assert best_model(tmp_path, done=1).summary()["round"] == 1
    assert best_model(tmp_path, EarlyStopping("loss"), done=1).summary() == {}
    assert f"removed {BEST}" in caplog.text


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["early_stopping.patience=1"], "early_stopping.metric"),
        (["checkpoint.best=true"], "checkpoint.best"),
        (["checkpoint.best=f1", "evaluation.metrics=[f1]"], "checkpoint.best"),
        (["target_accuracy=0.5"], "target_accuracy"),
        (["early_stopping.patience=1", CLIENT, "evaluation.clients=true"], ""),
        (["early_stopping.patience=1", "early_stopping.metric=received_loss"], ""),
        ([], ""),
    ],
)
def test_without_test_examples_at_the_server_a_run_cannot_go_by_what_it_measures(words, key):
    recipe, classes = compose_overrides(tuple(words)), Predictions("classification", ("a", "b"))
    check_measured(recipe, classes, at_server=True)
    if not key:
        return check_measured(recipe, classes, at_server=False)
    with refused(key):
        check_measured(recipe, classes, at_server=False)


@pytest.mark.parametrize("best", ["received_loss", "true"])
def test_the_model_before_a_round_is_not_taken_for_the_one_after_it(best):
    words = (f"checkpoint.best={best}", "early_stopping.metric=received_loss")
    with refused("checkpoint.best=", "received_loss", "client_loss"):
        compose_overrides(words)


def test_the_clients_loss_is_in_the_summary_where_there_is_no_accuracy():
    row = {"seconds": 1.0, "bytes_up": 1, "bytes_down": 1, "failures": []}
    rows = [{"round": n, "client_loss": 1.0 / n, **row} for n in (1, 2)] + [{"round": 3, **row}]
    assert totals(rows)["client_loss"] == 0.5
    assert "client_accuracy" not in totals(rows)
    rows[2] |= {"accuracy": 0.5}  # of a model that no client has evaluated
    assert "client_loss" not in totals(rows)


def test_the_summary_has_the_best_accuracy_and_the_last_and_a_usual_rounds_seconds():
    """Workers start in round 1; of the others' 3, 1 and 8 seconds the middle one is 3."""
    row = {"bytes_up": 1, "bytes_down": 2, "failures": []}
    measured = [(0.1, 0.0), (0.5, 100.0), (0.9, 3.0), (0.7, 1.0), (None, 8.0)]
    rows = [
        {"round": n, "accuracy": accuracy, "seconds": seconds, **row}
        for n, (accuracy, seconds) in enumerate(measured)
    ]
    found = totals(rows)
    assert (found["accuracy"], found["best_accuracy"]) == (0.7, 0.9)
    assert (found["rounds"], found["seconds"], found["seconds_per_round"]) == (4, 112.0, 3.0)
    assert totals(rows[:2])["seconds_per_round"] == 100.0


@pytest.mark.parametrize("kind", ["regression", "segmentation"])
def test_a_run_cannot_go_by_an_accuracy_that_its_task_has_not(kind):
    predictions = Predictions(kind, ("a", "b") if kind == "segmentation" else ())
    for words, key, advice in (
        (["early_stopping.patience=1"], "early_stopping.metric", LOSS),
        (["checkpoint.best=true"], "checkpoint.best", LOSS),
        (["target_accuracy=0.5"], "target_accuracy", "target_accuracy=null"),
        (["early_stopping.patience=1", CLIENT, *AT_CLIENTS], "client_accuracy", LOSS),
    ):
        with refused(key, advice) as error:
            check_measured(compose_overrides(tuple(words)), predictions, at_server=True)
        assert "target" not in key or (kind == "segmentation") == (
            "evaluation.metrics" in str(error.value)
        )
    words = ("early_stopping.patience=1", "early_stopping.metric=loss", "checkpoint.best=loss")
    check_measured(compose_overrides(words), predictions, at_server=True)
    if kind == "segmentation":  # of pixels, if it is asked for
        for metric in ("accuracy", "client_accuracy"):
            words = (f"checkpoint.best={metric}", "evaluation.metrics=[accuracy]", *AT_CLIENTS)
            check_measured(compose_overrides(words), predictions, at_server=True)
