"""fedhet-export: a finished run's model as a file that a process without fedhet reads."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedhet.common.results import read_summary, write_summary
from fedhet.common.text_files import Dialect
from fedhet.load_run import label_metadata_of, model_of, recipe_of, task_of
from fedhet.tasks import tabular
from fedhet.tasks.table_columns import described_inputs
from fedhet.tasks.tables import read_table
from fedhet.tools.export import export, main
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow  # nearly every test needs a run

READER = """
import json, sys
import numpy, torch
about = {"about.json": ""}
program = torch.export.load("model.pt2", extra_files=about).module()
raw = torch.from_numpy(numpy.load("raw.npy"))
numpy.save("probabilities.npy", program(raw).detach().numpy())
assert not {"tasks", "strategies", "conf"} & set(sys.modules), "fedhet was imported"
print(about["about.json"])
"""

BRANCHING = """
from torch import nn
class Branching(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return -y if y.sum() > 0 else y
def network(num_classes):
    return Branching(nn.Flatten(), nn.Linear(64, num_classes))
"""


def test_another_process_gets_the_models_probabilities_from_raw_images(fedavg_run, tmp_path):
    export(fedavg_run, tmp_path / "model.pt2")
    task = task_of(recipe_of(fedavg_run))
    raw = task.test_data()._placed._pixels.numpy()  # uint8
    np.save(tmp_path / "raw.npy", raw)
    command = [sys.executable, "-I", "-c", READER]
    printed = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    [(inputs, _)] = task.test_data().batches(len(raw), generator=None, train=False)
    expected = model_of(fedavg_run, task)(inputs)[1].softmax(dim=1)
    found = np.load(tmp_path / "probabilities.npy")
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-6)
    summary = json.loads((fedavg_run / "summary.json").read_text())
    figures = {key: summary[key] for key in ("accuracy", "parameters_sha256")}
    assert json.loads(printed.stdout) == {
        "classes": [str(label) for label in range(10)],
        "input": {"shape": ["batch", 1, 8, 8], "dtype": "torch.uint8"},
        "output": {"shape": ["batch", 10], "values": "probabilities"},
        "run": {"method": "fedavg", "seed": 0, **figures},
    }


def test_a_clients_own_model_is_exported(fedper_run, tmp_path):
    [state] = fedper_run.glob("client_state/*/client-00002/round-000001.safetensors")
    export(fedper_run, tmp_path / "model.pt2", state)
    task = task_of(recipe_of(fedper_run))
    raw = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    inputs = task.config.transform.module()(raw)
    expected = model_of(fedper_run, task, state)(inputs)[1].softmax(dim=1)
    found = torch.export.load(str(tmp_path / "model.pt2")).module()(raw)
    torch.testing.assert_close(found, expected)


def test_the_model_of_sites_tables_is_exported_without_an_example(tmp_path):
    for site in range(2):
        rows = [f"{20 + n},{'ABC'[(n + site) % 3]},{'no' if n % 2 else 'yes'}" for n in range(20)]
        (tmp_path / f"{site}").mkdir()
        (tmp_path / f"{site}" / "train.csv").write_text("\n".join(["age,town,y", *rows]) + "\n")
    folder, options = tmp_path / "run", "task.data_options"
    run_recipe(
        folder,
        *("task=tabular", "partition=site", "task.classes=[no,yes]", "clients=2", "rounds=1"),
        *(f"{options}.fit=federated", "task.target=y", f"{options}.numeric=[age]"),
        f"{options}.categorical=[town]",
        clients=2,
        node_config=lambda client: {"data-folder": str(tmp_path / f"{client}")},
    )
    about = export(folder, tmp_path / "model.pt2")
    assert about["input"]["shape"] == ["batch", 4]
    names = [(one["column"], one.get("category", "")) for one in about["input"]["columns"]]
    assert names == [("age", ""), ("town", "A"), ("town", "B"), ("town", "C")]
    task = task_of(recipe_of(folder), label_metadata_of(folder))
    inputs = torch.randn(5, 4)
    expected = model_of(folder, task)(inputs)[1].softmax(dim=1)
    found = torch.export.load(str(tmp_path / "model.pt2")).module()(inputs)
    torch.testing.assert_close(found, expected)


def test_the_vocabulary_is_exported_with_a_text_model(text_run, tmp_path):
    folder, _ = text_run
    export(folder, tmp_path / "model.pt2")
    file = {"about.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=file).module()
    tokens = torch.tensor([[1, 4, 5, 0, 0, 0], [1, 3, 3, 2, 0, 0], [1, 2, 0, 0, 0, 0]])
    model = model_of(folder, task_of(recipe_of(folder)))
    torch.testing.assert_close(program(tokens), model(tokens)[1].softmax(dim=1))
    about = json.loads(file["about.json"])
    assert about["vocabulary"] == ["bad", "good", "film"]
    assert about["input"] == {"shape": ["batch", 6], "dtype": "torch.int64"}


def test_a_tables_inputs_are_made_by_what_is_exported_with_its_model(table_run, tmp_path):
    folder, table = table_run
    columns = export(folder, tmp_path / "model.pt2")["input"]["columns"]
    names = [(one["column"], one.get("category", "")) for one in columns]
    towns = [("town", town) for town in ("A", "B", "C", None)]
    assert names == [("age", ""), ("constant", ""), *towns]
    found = described_inputs(read_table(table, Dialect()), columns)
    options = {"path": str(table), "target": "y", "classes": ["no", "yes"], "test_fraction": 0.0}
    options["public"] = 100  # as in the run
    (expected, _), _ = tabular.load(**options)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_regression_is_exported_in_the_unit_of_its_targets(regression_run, tmp_path):
    folder, _ = regression_run
    about = export(folder, tmp_path / "model.pt2")
    assert about["output"] == {"shape": ["batch", 1], "values": "predictions"}
    [column] = about["input"]["columns"]
    assert (column["column"], column["mean"]) == ("x", pytest.approx(29.5))
    program = torch.export.load(tmp_path / "model.pt2").module()
    scaled = (torch.tensor([[0.0], [30.0], [59.0]]) - column["mean"]) / column["scale"]
    values = program(scaled)
    task = task_of(recipe_of(folder), label_metadata_of(folder))
    torch.testing.assert_close(values, model_of(folder, task)(scaled)[1])
    assert (values - torch.tensor([[300.0], [360.0], [418.0]])).abs().max() < 100


def test_a_model_that_torch_cannot_follow_is_refused(tmp_path, monkeypatch, refused):
    (tmp_path / "branching.py").write_text(BRANCHING)
    monkeypatch.syspath_prepend(tmp_path)
    run_recipe(tmp_path / "run", *TINY, "rounds=1", "task.model=branching:network")
    assert "torch.export cannot follow" in refused(main, tmp_path / "run", "--out", tmp_path / "m")


def test_what_cannot_be_exported_is_refused(fedavg_run, fedper_run, tmp_path, refused):
    unfinished, out = tmp_path / "unfinished", tmp_path / "model.pt2"
    shutil.copytree(fedavg_run, unfinished)
    (unfinished / "model.safetensors").unlink()
    assert "not the task's whole model" in refused(main, fedper_run, "--out", out)
    assert "though its run has completed: the file" in refused(main, unfinished, "--out", out)
    write_summary(unfinished, read_summary(unfinished) | {"status": "stopped"})
    assert "the run has not completed" in refused(main, unfinished, "--out", out)
    write_summary(unfinished, read_summary(unfinished) | {"server_folder": "/srv/x"})
    assert "it is in /srv/x at the server" in refused(main, unfinished, "--out", out)
    assert "is not the results directory of a run" in refused(main, tmp_path, "--out", out)
    for folder in (".", tmp_path):  # before the run is looked at
        reason = refused(main, tmp_path / "no_run", "--out", folder)
        assert reason == f"fedhet-export: --out {folder} is a folder: name a file"
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, whose place a new file would take
    reason = refused(main, tmp_path / "no_run", "--out", tmp_path / "pipe")
    assert reason.endswith("is a device or a pipe: name a file")
    (tmp_path / "nowhere").touch()
    assert "nowhere" in refused(main, fedavg_run, "--out", tmp_path / "nowhere" / "model.pt2")
    assert not out.exists()
