"""The examples: each runs in this process, with little data and few rounds."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedhet.common.results import read_rows
from fedhet.tools.evaluate import evaluate
from tests.federation import InProcessGrid
from tests.recipes import run_recipe

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["rounds=1", "clients=2", "local.epochs=1", "runtime=flower", "device=cpu"]

pytestmark = pytest.mark.slow


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return a function that imports a module of an example, in an empty folder."""
    known = set(sys.modules)
    monkeypatch.chdir(tmp_path)

    def load(name, module="run"):
        monkeypatch.syspath_prepend(EXAMPLES / name)
        return importlib.import_module(module)

    yield load
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and str(EXAMPLES) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


def last_row(folder):
    return read_rows(folder / "metrics.jsonl")[-1]


def words_of(run, *others):
    """Return the example's words with others in place of those of the same key."""
    chosen = {word.partition("=")[0]: word for word in (*run.WORDS, *TINY, *others)}
    return chosen.values()


def test_a_table(example, tmp_path):
    run, table = example("tabular_regression"), tmp_path / "data" / "diabetes.csv"
    run.write_table(table)
    summary = run_recipe(tmp_path / "out", *words_of(run, "local.epochs=12"), clients=2)
    assert summary["status"] == "completed"
    run.EPOCHS = 12
    errors = run.compare(table, tmp_path / "out")
    federated, central, linear, mean = errors.values()
    assert federated == pytest.approx(summary["mae"], rel=1e-5)
    found = evaluate(tmp_path / "out", [])
    assert found.metrics["mae"] == pytest.approx(summary["mae"], rel=1e-5)
    assert federated < mean  # it has learned
    assert abs(federated - central) < 15
    assert 40 < linear < 48  # of 442 rows, 88 to test on


def test_segmentation(example, tmp_path):
    run = example("segmentation")
    words = words_of(run, "task.data_options.test_examples=20", "local.epochs=3")
    summary = run_recipe(tmp_path / "out", *words, clients=2)
    scores = run.score(tmp_path / "out", test_examples=20)
    assert scores[0] > 0.7  # of the background
    assert sum(scores) / 3 == pytest.approx(summary["iou"], rel=1e-5)


def test_timm(example, tmp_path):
    run = example("timm_images")
    run.draw_images(tmp_path / "data" / "stripes", train=12, test=4)
    words = words_of(run, "+task.model_options={depth:1}")
    summary = run_recipe(tmp_path / "out", *words, clients=2)
    assert summary["status"] == "completed"
    assert last_row(tmp_path / "out")["bytes_up"] > 0


@pytest.mark.parametrize("method", ["scaffold", "feddw"])
def test_adapters_are_all_that_travels_with_every_method(example, tmp_path, method):
    run = example("text_lora")
    run.write_texts(tmp_path / "data" / "reviews", train=40, test=8)
    run.write_tokenizer(tmp_path / "data" / "tokenizer")
    small = "task.model_options.config={model_type:distilbert,n_layers:2,dim:8,n_heads:2}"
    words = words_of(run, small, f"strategy={method}", "rounds=2", "local=default")
    summary = run_recipe(tmp_path / "out", *words, clients=2)
    assert summary["status"] == "completed"
    assert evaluate(tmp_path / "out", []).accuracy == summary["accuracy"]
    # Rank 4 at 2 x 2 layers of 8x8; two layers that are trained in full, 8x8 + 8 and 2x8 + 2.
    adapters, whole = 2 * 2 * 4 * (8 + 8), (64 + 8) + (16 + 2)
    size = 4 * (adapters + whole) + 12 * 128  # 12 tensors, each with NumPy's header
    sent = {"scaffold": 2, "feddw": None}[method]
    row = last_row(tmp_path / "out")
    if sent is not None:
        assert row["bytes_up"] == row["bytes_down"] == 2 * sent * size  # two clients
    else:  # FedPVR sends control variates of the last layers, FedDW soft labels of both classes
        assert 2 * size < row["bytes_up"] < 4 * size
    assert np.isfinite(row["loss"])


def test_an_app_of_ones_own(example, tmp_path):
    client_app = example("own_flower_app", "digits_app.client_app").app
    server_app = example("own_flower_app", "digits_app.server_app").app
    config = {"num-server-rounds": 2, "local-epochs": 1, "results_dir": str(tmp_path / "out")}

    def node(client):
        node_config = {"partition-id": client, "num-partitions": 3}
        context = Context(1, client + 1, node_config, RecordDict(), config)
        return lambda message: client_app(message, context)

    grid = InProcessGrid({10 + client: node(client) for client in range(3)})
    torch.manual_seed(0)
    server_app(grid, Context(1, 1, {}, RecordDict(), config))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["rounds"] == 2
