"""A metric of the user's own: runs by hand, its code on the way, and what is refused."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedhet.common.metrics import is_taken, metric_totals, shown_metrics
from fedhet.common.results import read_rows, read_summary, totals
from fedhet.conf import compose_overrides, fingerprint, project
from fedhet.load_run import task_of
from fedhet.runtimes.flower_install import stage_app
from fedhet.server_app.assembly import check_parts
from fedhet.server_app.loggers import scalars
from fedhet.strategies.fedprox import FedProxClient
from fedhet.tasks.evaluation import logits_of
from fedhet.tasks.metrics import MetricSet, Predictions
from tests.recipes import TINY, run_recipe
from tests.refused import refused

pytestmark = pytest.mark.xdist_group("torchmetrics")  # takes seconds to import
ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import torch

def sure(outputs, targets):
    """The share of examples whose own class has a probability above 0.3."""
    return (outputs.softmax(1).gather(1, targets[:, None]) > 0.3).float().mean()

def within_ten_percent(outputs, targets):
    return ((outputs - targets).abs() <= 0.1 * targets.abs()).double().mean()

def spoils(outputs, targets):
    return float(outputs.zero_().sum() + targets.zero_().sum())

def undefined(outputs, targets): return float("nan")
def one_class(outputs, targets):
    if len(targets.unique()) < 2:
        raise ValueError("only one class")
    return 0.75
def nothing(outputs, targets): return None
def several(outputs, targets): return outputs
def text(outputs, targets): return "0.5"
def huge(outputs, targets): return 10**400
def ends(outputs, targets): raise SystemExit(3)
def misses(outputs, targets): return {}["no"]
def lonely(outputs): return 1.0
def f1(outputs, targets): return 1.0
def loss(outputs, targets): return 1.0
def client_sure(outputs, targets): return 1.0
class Sure: pass
'''
SURE = "evaluation.metrics=[f1,mine.metrics:sure]"
WORDS = [*TINY, "rounds=3", "partition.holdout=0.2", SURE, "evaluation.clients=true"]
# Minimised, a rising share stops improving at once.
STOPPING = ["early_stopping.metric=sure", "early_stopping.mode=min", "early_stopping.patience=2"]


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine").mkdir()
    (folder / "mine" / "metrics.py").write_text(MODULE)
    (folder / "mine" / "other.py").write_text("from mine.metrics import sure\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder / "mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


# ---- in runs -------------------------------------------------------------------------------------


def by_hand(path, data):
    """Return the share of ``sure`` with NumPy, of a model file on these examples."""
    model = task_of(compose_overrides(tuple(WORDS))).build_model(5)
    model.load_state_dict(load_file(path))
    logits, labels = logits_of(model, data)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.mean(shares[np.arange(len(labels)), labels] > 0.3)


@pytest.mark.slow
def test_server_and_clients_measure_it_and_an_ended_run_goes_on(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = [*WORDS, "evaluation.per_client=true"]
    summary = run_recipe(whole, *words)
    *_, last = rows = read_rows(whole / "metrics.jsonl")
    path, task = whole / "model.safetensors", task_of(compose_overrides(tuple(WORDS)))
    assert last["sure"] == pytest.approx(by_hand(path, task.test_data()), abs=1e-6)
    held = [task.client_data(client)[1] for client in range(3)]
    own = [by_hand(path, data) for data in held]
    assert list(last["per_client"]["client_sure"].values()) == pytest.approx(own, abs=1e-6)
    mean = np.average(own, weights=[len(data) for data in held])
    assert last["client_sure"] == pytest.approx(mean, abs=1e-6)
    assert {"received_sure", "f1", "client_f1"} <= last.keys()
    shown = ("sure", "client_sure", "own_metrics")
    assert [summary[name] for name in shown] == [last["sure"], last["client_sure"], ["sure"]]
    assert not any(name.startswith("best_") and name.endswith("sure") for name in summary)

    run_recipe(parts, *words, "rounds=1")
    again = run_recipe(parts, *words, "resume=true")
    assert again["parameters_sha256"] == summary["parameters_sha256"]
    twice = read_rows(parts / "metrics.jsonl")
    assert [row["sure"] for row in twice] == [row["sure"] for row in rows]


@pytest.mark.slow
def test_it_ends_a_run_and_chooses_the_best_model(tmp_path):
    summary = run_recipe(tmp_path, *WORDS, *STOPPING, "checkpoint.best=true")
    rows = read_rows(tmp_path / "metrics.jsonl")
    lowest = min(row["sure"] for row in rows)
    assert summary["stop_reason"].startswith("early stopping: sure has not improved")
    assert summary["best_round"] == {"metric": "sure", "round": 0, "value": lowest}
    test = task_of(compose_overrides(tuple(WORDS)))
    path, value = tmp_path / summary["best_model"]["file"], summary["best_model"]["value"]
    assert value == lowest == pytest.approx(by_hand(path, test.test_data()), abs=1e-6)


@pytest.mark.slow
def test_the_code_travels_and_is_part_of_the_fingerprint(package, tmp_path):
    recipe = compose_overrides(("task=digits", SURE))
    assert project.own_code(recipe) == (package,)
    bundle = stage_app(tmp_path, project.travelling_code(recipe))
    assert (bundle / "mine" / "metrics.py").read_text() == MODULE
    other = compose_overrides(("task=digits",))
    assert fingerprint(recipe)["code"] != fingerprint(other)["code"]


# ---- the number ----------------------------------------------------------------------------------


def measured(word, predictions, *batches):
    collected = MetricSet([word], predictions)
    for batch in batches:
        collected.update(*batch)
    return collected.compute()


def test_it_gets_all_examples_of_all_batches_and_a_regressions_as_equal_shapes():
    regression, word = Predictions("regression"), "mine.metrics:within_ten_percent"
    first = torch.tensor([[1.05], [2.5]]), torch.tensor([1.0, 2.0])
    second = torch.tensor([[3.0]]), torch.tensor([3.0])
    found = measured(word, regression, first, second)
    assert found == {"within_ten_percent": pytest.approx(2 / 3)}


@pytest.mark.slow
def test_what_it_does_to_its_tensors_changes_nothing_for_others():
    collected = MetricSet(
        ["mine.metrics:spoils", "mine.metrics:sure", "accuracy"],
        Predictions("classification", ("a", "b")),
    )
    outputs, labels = torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.tensor([1, 0])
    collected.update(outputs, labels)
    assert collected.compute() == {"spoils": 0.0, "sure": 1.0, "accuracy": 1.0}
    assert outputs.any()
    assert labels.any()


def test_a_value_that_is_not_finite_is_left_out_and_warned_of_once(caplog):
    collected = MetricSet(["mine.metrics:undefined"], Predictions("classification", ("a", "b")))
    for _ in range(2):
        collected.reset()
        collected.update(torch.zeros(4, 2), torch.zeros(4).long())
        assert collected.compute() == {}
    (line,) = [one for one in caplog.messages if "undefined is nan on 4 examples" in one]
    assert "rows leave it out" in line


@pytest.mark.slow
def test_a_site_whose_examples_have_no_such_number_trains_like_the_others(tmp_path, caplog):
    """One class a client: the server alone has the number, and the log says why they have none."""
    words = [*WORDS, "clients=10", "partition=pathological", "partition.classes=1"]
    run_recipe(tmp_path, *words, "evaluation.metrics=[mine.metrics:one_class]", clients=10)
    *_, last = read_rows(tmp_path / "metrics.jsonl")
    assert (last["one_class"], len(last["clients"]), last["failures"]) == (0.75, 10, [])
    assert not {"received_one_class", "client_one_class"} & last.keys()
    assert "one_class is nan on" in caplog.text
    assert "by a ValueError: only one class: rows leave it out" in caplog.text


@pytest.mark.parametrize(
    ("name", "what"),
    [("nothing", "NoneType"), ("several", "(4, 2)"), ("text", "str")],
)
def test_what_is_no_number_is_refused(name, what):
    with refused(f"metrics:{name}", what):
        measured(
            f"mine.metrics:{name}",
            Predictions("classification", ("a", "b")),
            (torch.zeros(4, 2), torch.zeros(4).long()),
        )


@pytest.mark.parametrize(("name", "what"), [("ends", "SystemExit"), ("misses", "KeyError")])
def test_a_function_that_fails_ends_the_run_as_failed_with_its_key(name, what, tmp_path):
    with refused(f"evaluation.metrics=mine.metrics:{name}", what, "metrics.py"):
        run_recipe(tmp_path, *TINY, "rounds=1", f"evaluation.metrics=[mine.metrics:{name}]")
    assert read_summary(tmp_path)["status"] == "failed"


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["[mine.metrics:f1]"], ["summary.json", "f1"]),
        (["[mine.metrics:loss]"], ["loss"]),
        (["[mine.metrics:client_sure]"], ["client_sure"]),
        (["[mine.metrics:]"], ["mine.metrics:", "package.module:function"]),
        (["[mine-too.metrics:sure]"], ["mine-too.metrics:sure"]),
        (["[mine.metrics:sure,mine.other:sure]"], ["mine.metrics:sure", "mine.other:sure"]),
        (["[mine.metrics.sure]"], ["evaluation.metrics=mine.metrics.sure"]),
        (
            ["[mine.metrics:sure]", "early_stopping.metric=sure", "early_stopping.patience=1"],
            ["early_stopping.metric=sure", "early_stopping.mode=max"],
        ),
        (
            ["[mine.metrics:sure]", "checkpoint.best=sure"],
            ["checkpoint.best=sure", "early_stopping.metric=sure"],
        ),
        (
            ["[mine.metrics:sure]", "early_stopping.metric=client_sure"],
            ["early_stopping.metric=client_sure", "evaluation.clients=true"],
        ),
        (["[mine.metrics:sure]", "objective=best_sure"], ["objective=best_sure"]),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(words, named):
    metrics, *others = words
    with refused(*named):
        compose_overrides(("task=digits", f"evaluation.metrics={metrics}", *others))


@pytest.mark.parametrize(
    ("word", "named"),
    [
        (
            "mine.metrics:shure",
            ["metrics=mine.metrics:shure"],
        ),
        ("mine.nowhere:sure", ["mine.nowhere"]),
        ("mine.metrics:torch", ["mine.metrics:torch"]),
        ("mine.metrics:Sure", ["Sure", "(outputs, targets)"]),
        ("mine.metrics:lonely", ["mine.metrics:lonely", "(outputs, targets)"]),
    ],
)
def test_a_function_that_cannot_be_is_refused_before_the_run(word, named):
    recipe = compose_overrides(("task=digits", f"evaluation.metrics=[{word}]"))
    with refused(*named):
        check_parts(recipe)


@pytest.mark.slow
def test_the_name_of_what_a_method_measures_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(FedProxClient, "measures", frozenset({"sure"}))
    with refused("strategy=fedprox", "sure"):
        run_recipe(tmp_path, *TINY, SURE, "strategy=fedprox")


# ---- in rows and reports -------------------------------------------------------------------------


def test_every_column_and_key_that_running_md_lists_is_taken():
    page = (ROOT / "docs" / "running.md").read_text()
    tables = page.partition("### class_counts.json")[0].partition("# Results")[2]
    cells = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {"lr", "status", "lorentz_distance", "own_metrics"} <= names
    statuses = {"completed", "diverged", "stopped", "failed"}
    assert [name for name in sorted(names - statuses) if not is_taken(name)] == []


def test_rows_say_which_columns_are_the_users_own():
    row = {"round": 0, "loss": 1.0, "sure": 0.5, "norm_ratio": 0.1, "own_metrics": ["sure"]}
    assert shown_metrics(row) == {"sure": 0.5}
    assert metric_totals([row, row | {"round": 1, "sure": 0.25}]) == {"sure": 0.25}
    assert "own_metrics" not in totals([{**row, "own_metrics": []}])
    assert scalars(row) == {"loss": 1.0, "sure": 0.5, "norm_ratio": 0.1}
