"""fedhet-export: a finished run's model as a file that a process without fedhet reads."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedhet.load_run import classifier_of, recipe_of, task_of
from fedhet.tools.export import export, main
from tests.recipes import TINY, run_recipe
from tests.tasks.generated import write_texts

pytestmark = pytest.mark.slow  # nearly every test trains a run

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


def read_without_fedhet(folder, raw):
    """Return what a plain process makes of the raw examples, and the file's about.json."""
    np.save(folder / "raw.npy", raw)
    (folder / "reader.py").write_text(READER, encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, "-I", "reader.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return np.load(folder / "probabilities.npy"), json.loads(printed.stdout)


@pytest.mark.flower
def test_another_process_gets_the_models_probabilities_from_raw_images(tmp_path):
    summary = run_recipe(tmp_path / "run", *TINY, "rounds=1", "strategy=feddw")
    export(tmp_path / "run", tmp_path / "model.pt2")
    task = task_of(recipe_of(tmp_path / "run"))
    raw = task.test_data()._placed._pixels.numpy()  # uint8, as they came
    found, about = read_without_fedhet(tmp_path, raw)
    [(inputs, _)] = task.test_data().batches(len(raw), generator=None, train=False)
    with torch.no_grad():
        expected = classifier_of(tmp_path / "run", task)(inputs)[1].softmax(dim=1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert about == {
        "classes": [str(label) for label in range(10)],
        "input": {"shape": ["batch", 1, 8, 8], "dtype": "torch.uint8"},
        "run": {
            "method": "feddw",
            "accuracy": summary["accuracy"],
            "parameters_sha256": summary["parameters_sha256"],
            "seed": 0,
        },
    }


def test_a_clients_own_model_is_exported(tmp_path):
    run_recipe(tmp_path / "run", *TINY, "rounds=1", "strategy=local")
    [state] = (tmp_path / "run").glob("client_state/*/client-00002/round-000001.safetensors")
    export(tmp_path / "run", tmp_path / "model.pt2", state)
    task = task_of(recipe_of(tmp_path / "run"))
    model = task.build_model(7).eval()
    own = load_file(state)
    model.load_state_dict({name: own[f"personal/{name}"] for name in model.state_dict()})
    raw = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        expected = model(task.config.transform.module()(raw))[1].softmax(dim=1)
    found = torch.export.load(str(tmp_path / "model.pt2")).module()(raw)
    torch.testing.assert_close(found, expected)


def test_of_texts_the_words_go_with_the_model(tmp_path):
    texts = ["good film good", "bad film bad", "good good", "bad bad"] * 5
    for split in ("train", "test"):
        write_texts(tmp_path / "imdb" / f"{split}.parquet", texts, [1, 0] * 10)
    run_recipe(
        tmp_path / "run",
        *("task=imdb", f"task.path={tmp_path}", "clients=2", "rounds=1"),
        *("task.length=6", "task.vocabulary_size=6", "partition=iid", "local.batch_size=4"),
    )
    export(tmp_path / "run", tmp_path / "model.pt2")
    tokens = np.array([[1, 4, 5, 0, 0, 0], [1, 3, 3, 2, 0, 0], [1, 2, 0, 0, 0, 0]])
    found, about = read_without_fedhet(tmp_path, tokens)
    with torch.no_grad():
        model = classifier_of(tmp_path / "run", task_of(recipe_of(tmp_path / "run")))
        expected = model(torch.from_numpy(tokens))[1].softmax(dim=1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert about["vocabulary"] == ["bad", "good", "film"]
    assert about["input"] == {"shape": ["batch", 6], "dtype": "torch.int64"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=fedper"], "not the task's whole model"),
        (["strategy=fedper", "evaluation.model=both"], "not the task's whole model"),
        ([], "the run has not completed"),
    ],
)
def test_a_run_without_a_whole_model_is_refused(words, message, tmp_path, capsys):
    run_recipe(tmp_path / "run", *TINY, "rounds=1", *words)
    if not words:
        (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run"), "--out", str(tmp_path / "model.pt2")])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "model.pt2").exists()


def test_a_program_that_does_not_do_the_same_is_not_written(tmp_path, monkeypatch, capsys):
    run_recipe(tmp_path / "run", *TINY, "rounds=1")
    old = tmp_path / "model.pt2"
    old.write_bytes(b"an older model")
    other = torch.nn.Linear(3, 4)
    program = torch.export.export(other, (torch.ones(2, 3),))
    monkeypatch.setattr("fedhet.tools.export._examples", lambda task, count: torch.ones(2, 3))
    monkeypatch.setattr("torch.export.export", lambda *_, **__: program)
    monkeypatch.setattr(
        "fedhet.tools.export.InferenceModel.forward", lambda self, raw: other(raw) + 1
    )
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run"), "--out", str(old)])
    assert ended.value.code == 2
    assert "gives other probabilities" in " ".join(capsys.readouterr().err.split())
    assert old.read_bytes() == b"an older model"


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--out", str(tmp_path / "model.pt2")])
    assert ended.value.code == 2
    assert "is no run" in " ".join(capsys.readouterr().err.split())


def test_where_it_cannot_be_written_that_is_said(tmp_path, capsys):
    run_recipe(tmp_path / "run", *TINY, "rounds=1")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run"), "--out", str(tmp_path / "nowhere" / "model.pt2")])
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err
