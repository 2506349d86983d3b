"""fedhet-evaluate: a finished run's model on its own test set, and on another."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import f1_score

from fedhet.common.results import read_summary
from fedhet.load_run import label_metadata_of, model_of, recipe_of, task_of
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.transform import Augmentation
from fedhet.tools.evaluate import evaluate, main
from fedhet.tools.export import export
from tests.fedhet.tools.conftest import COLOURS, write_images
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow  # nearly every test needs a run


@pytest.mark.parametrize("words", [[], ["strategy=fedbabu", "seed=3"]], ids=["whole", "fedbabu"])
def test_the_own_test_set_gives_the_figures_of_the_run(words, tmp_path):
    """FedBABU's head does not travel: the tool initialises it from the seed as the server does."""
    summary = run_recipe(tmp_path / "run", *TINY, "rounds=1", *words)
    found = evaluate(tmp_path / "run")
    assert (found.examples, found.augmented) == (120, [])
    assert found.accuracy == pytest.approx(summary["accuracy"], abs=1e-6)
    assert found.loss == pytest.approx(summary["loss"], rel=1e-5)
    task = task_of(recipe_of(tmp_path / "run"))
    model = model_of(tmp_path / "run", task)
    [(inputs, labels)] = task.test_data().batches(120, generator=None, train=False)
    right = model(inputs)[1].argmax(dim=1) == labels
    by_hand = {str(label): float(right[labels == label].float().mean()) for label in range(10)}
    assert found.by_class == pytest.approx(by_hand)


def test_the_model_of_the_best_round_is_evaluated_and_exported(tmp_path, refused):
    """Minimised, the best accuracy is not the last round's."""
    words = ["rounds=2", "checkpoint.best=true", "early_stopping.mode=min"]
    summary = run_recipe(tmp_path / "run", *TINY, *words)
    best = summary["best_model"]
    assert best["value"] < summary["accuracy"]
    found = evaluate(tmp_path / "run", best=True)
    assert found.accuracy == pytest.approx(best["value"], abs=1e-6)
    about = export(tmp_path / "run", tmp_path / "model.pt2", best=True)["run"]
    expected = {"method": "fedavg", "seed": 0, **best}
    assert about == {key: value for key, value in expected.items() if key != "file"}
    shutil.copy(tmp_path / "run" / "model.safetensors", tmp_path / "run" / "best.safetensors")
    assert "is damaged or of another run" in refused(main, tmp_path / "run", "--best")
    (tmp_path / "run" / "best.safetensors").unlink()
    assert "runs keep one with checkpoint.best=true" in refused(main, tmp_path / "run", "--best")


def test_classes_are_matched_by_name_and_known_without_the_training_data(
    image_run, tmp_path, refused
):
    """A missing class would shift the labels if they followed the new folder's own alphabet."""
    folder, data = image_run
    assert evaluate(folder, [f"path={data}"]).accuracy == 1.0
    kept = {name: colour for name, colour in COLOURS.items() if name != "blue"}
    found = evaluate(folder, [f"path={write_images(tmp_path / 'new', 5, kept, seed=1)}"])
    assert found.examples == 10
    assert found.by_class == {"blue": None, "green": 1.0, "red": 1.0}
    more = write_images(tmp_path / "more", 2, {**COLOURS, "yellow": (200, 200, 40)})
    reason = refused(main, folder, "--task", f"path={more}")
    assert "blue, green, red" in reason
    words = ["--task", f"path={data}", "--task", "classes=[red,green,blue]"]
    assert "trained with other classes than" in refused(main, folder, *words)


def test_augmented_images_are_those_of_training(tmp_path, monkeypatch):
    """With known draws: all images are flipped, and cropped at the top left corner."""
    folder = tmp_path / "run"
    training = ["rounds=4", "local=adam", "local.lr=0.003", "local.epochs=10"]
    run_recipe(folder, *TINY, *training, "partition=iid")  # trained without augmentation
    words = ["flip=true", "crop_padding=2"]
    first, again, other = (evaluate(folder, words, 2, seed).augmented for seed in (3, 3, 4))
    assert first == again != other
    assert first[0] != first[1]

    def draw(transform, size, generator):
        corner = torch.zeros(size).long()
        return Augmentation(torch.ones(size, dtype=torch.bool), corner, corner)

    monkeypatch.setattr(Augmentation, "draw", draw)
    found = evaluate(folder, words, passes=2)
    task = task_of(recipe_of(folder))
    model = model_of(folder, task)
    raw = task.test_data()._placed._pixels  # uint8
    [(_, labels)] = task.test_data().batches(len(raw), generator=None, train=False)
    moved = torch.zeros_like(raw)
    moved[:, :, 2:, 2:] = raw[:, :, :-2, :-2]
    expected, *wrong = (  # wrong: neither moved nor mirrored, or not both
        float((model(task.config.transform.module()(images))[1].argmax(1) == labels).float().mean())
        for images in (moved.flip(3), raw, raw.flip(3), moved)
    )
    assert found.accuracy > 0.8
    assert found.augmented == pytest.approx([expected] * 2)
    assert min(abs(expected - accuracy) for accuracy in wrong) > 0.02


def test_the_command_names_the_runs_that_it_cannot_evaluate_and_continues(
    fedavg_run, fedper_run, tmp_path, refused
):
    assert "has no run" in refused(main, tmp_path)
    for number, run in enumerate((fedper_run, fedavg_run, fedavg_run)):
        shutil.copytree(run, tmp_path / "sweep" / f"{number}_run")
    broken = tmp_path / "sweep" / "1_run" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    out = tmp_path / "figures" / "evaluation.json"
    words = ["--task", "flip=true", "--augmented", "1", "--out", out]
    errors = refused(main, tmp_path / "sweep", *words)
    assert "not the task's whole model" in errors
    assert f"{broken} cannot be read" in errors
    [figures] = json.loads(out.read_text())
    assert figures["name"].endswith("2_run")
    assert (figures["method"], figures["examples"], len(figures["augmented"])) == ("fedavg", 120, 1)
    assert sorted(figures["by_class"]) == [str(label) for label in range(10)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "foo=1"], "unknown key task.foo; it has: name"),
        (["--task", "test_size=x"], "task.test_size=x is not allowed: it must be a whole number"),
        (["--task", "image_size=16"], "or the task is another"),
        (["--task", "classes=[a"], "--task classes=[a cannot be read"),
        (["--task", "path"], "write --task path=VALUE"),
        (["--task", "path=/data/new"], "task.path=/data/new: task.source=embedded"),
        (["--augmented", "2"], "set --task flip=true or --task crop_padding=4"),
        (["--out", "."], "--out . is a folder: name a file"),
        (["--out", "pyproject.toml/figures.json"], "pyproject.toml"),
    ],
)
def test_bad_words_are_refused(words, message, fedavg_run, refused):
    assert message in refused(main, fedavg_run, *words)


def test_a_regressions_metrics_are_those_of_its_run_and_of_its_outputs(regression_run, tmp_path):
    folder, table = regression_run
    summary, found = read_summary(folder), evaluate(folder)
    assert (found.accuracy, found.by_class, found.examples) == (None, {}, 12)
    assert found.loss == pytest.approx(summary["loss"], rel=1e-5)
    assert found.metrics == pytest.approx({name: summary[name] for name in ("mae", "r2")})
    task = task_of(recipe_of(folder), label_metadata_of(folder))
    whole = ["test_data=fedhet.tasks.tabular:load_test", f"data_options.public={head(table, 50)}"]
    found = evaluate(folder, whole, metrics=["rmse", "pearson"])
    x = (torch.arange(60.0) - 24.5) / np.std(np.arange(50))
    values = model_of(folder, task)(x[:, None].float())[1].detach()[:, 0]
    y = 2 * torch.arange(60.0) + 300
    pearson = float(torch.corrcoef(torch.stack([values, y]))[0, 1])
    rmse = float((values - y).square().mean().sqrt())
    assert found.metrics == pytest.approx({"rmse": rmse, "pearson": pearson}, rel=1e-4)
    assert found.loss == pytest.approx(rmse**2, rel=1e-4)


def test_the_metrics_of_masks_are_by_pixel_and_by_class(masks_run):
    found = evaluate(masks_run, metrics=["iou"])
    assert (found.accuracy, found.by_class, found.examples) == (None, {}, 6)
    task = task_of(recipe_of(masks_run))
    [(images, masks)] = task.test_data().batches(6, generator=None, train=False)
    guesses = model_of(masks_run, task)(images)[1].argmax(dim=1)
    iou = {}
    for number, name in enumerate(task.class_names):
        ours, theirs = guesses == number, masks == number
        iou[f"iou/{name}"] = float((ours & theirs).sum() / (ours | theirs).sum())
    assert found.metrics == pytest.approx({"iou": np.mean(list(iou.values())), **iou})


def test_metrics_take_the_place_of_the_runs_and_unknown_ones_are_refused(
    fedavg_run, regression_run, tmp_path, refused, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")
    folder, out = tmp_path / "both", tmp_path / "figures.json"
    for number, run in enumerate((fedavg_run, regression_run[0])):
        shutil.copytree(run, folder / f"{number}_run")
    main([str(folder), "--out", str(out)])
    heads = capsys.readouterr().out.splitlines()[1]
    names = ["run", "examples", "accuracy %", "loss", "mae", "r2", "lowest class"]
    assert re.split(r"\s{2,}", heads.strip()) == names
    digits, table = json.loads(out.read_text())
    assert digits["metrics"] == {}
    assert sorted(table["metrics"]) == ["mae", "r2"]
    main([str(fedavg_run), "--metric", "f1", "--metric", "top5_accuracy", "--out", str(out)])
    assert "top5_accuracy" in capsys.readouterr().out
    task = task_of(recipe_of(fedavg_run))
    [(inputs, labels)] = task.test_data().batches(120, generator=None, train=False)
    guesses = model_of(fedavg_run, task)(inputs)[1].argmax(dim=1)
    [found] = json.loads(out.read_text())
    expected = f1_score(labels, guesses, average=None, labels=range(10), zero_division=0)
    by_class = {name: value for name, value in found["metrics"].items() if "/" in name}
    assert by_class == pytest.approx({f"f1/{n}": value for n, value in enumerate(expected)})
    assert "evaluation.metrics=f2 is unknown" in refused(main, fedavg_run, "--metric", "f2")
    for run, metric in ((fedavg_run, "mae"), (regression_run[0], "f1")):
        assert f"evaluation.metrics: {metric} " in refused(main, run, "--metric", metric)


def test_another_table_is_read_by_the_columns_of_the_runs_own(tmp_path, refused, monkeypatch):
    """By itself it would be scaled by its own first rows, and its towns be counted anew."""
    rows = [(n, "ABC"[n % 3], "no" if n % 3 else "yes") for n in range(60)]
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    for path, towns, shift in ((old, "ABC", 0), (new, "CAB", 1000)):
        lines = [f"{n + shift},{towns['ABC'.index(town)]},{y}" for n, town, y in rows]
        path.write_text("\n".join(["age,town,y", *lines]) + "\n")
    table = ["task=tabular", f"task.path={old}", "task.target=y"]
    words = [*table, "task.classes=[no,yes]", "partition=iid", "clients=2", "rounds=1"]
    run_recipe(tmp_path / "run", *words, "task.data_options.public=50", clients=2)
    other = f"path={new}"
    by_hand = evaluate(tmp_path / "run", [other, f"data_options.public={head(old, 50)}"])
    found = evaluate(tmp_path / "run", [other])
    assert found.examples == by_hand.examples == 12  # a fifth of its rows
    assert found.loss == pytest.approx(by_hand.loss, rel=1e-6)
    assert found.accuracy == by_hand.accuracy
    anew = evaluate(tmp_path / "run", [other, f"data_options.public={new}"])
    assert abs(anew.loss - found.loss) > 0.1
    whole = evaluate(tmp_path / "run", [other, "test_data=fedhet.tasks.tabular:load_test"])
    assert whole.examples == 60
    no_columns = lambda folder, best: {"classes": '["no", "yes"]'}  # noqa: E731  # an older run
    monkeypatch.setattr("fedhet.changed_task.label_metadata_of", no_columns)
    assert f"rows of {old}" in refused(main, tmp_path / "run", "--task", other)


def head(path: Path, rows: int) -> Path:
    """Return a file of a table's first rows."""
    shown = path.with_name("first.csv")
    shown.write_text("".join(path.read_text().splitlines(keepends=True)[: rows + 1]))
    return shown


def test_a_clients_own_tensors_complete_the_model(fedper_run, tmp_path, refused):
    """The shared body and the client's head, each from its file, give the same by hand."""
    [state] = fedper_run.glob("client_state/*/client-00001/round-000001.safetensors")
    task = task_of(recipe_of(fedper_run))
    model = task.build_model(7)
    model.load_state_dict(load_file(fedper_run / "model.safetensors"), strict=False)
    model.head.weight.data = load_file(state)["personal/head.weight"]
    loss, accuracy = evaluate_model(model, task.test_data(), task.loss)
    found = evaluate(fedper_run, state=state)
    assert (found.loss, found.accuracy) == pytest.approx((loss, accuracy))
    for path, message in (
        (tmp_path / "nowhere.safetensors", "cannot be read"),
        (fedper_run / "model.safetensors", "is a model: name a client's state"),
    ):
        assert message in refused(main, fedper_run, "--state", path)


FIXED_BODY = "strategy.phases=[{layers:'head.*',epochs:null}]"


@pytest.mark.parametrize(
    ("words", "clients"),
    [
        (["ditto"], 3),
        (["local"], 3),
        (["ifca"], 3),
        (["fedas"], 3),
        (["apfl", "strategy.apfl.alpha=1", "strategy.apfl.alpha_lr=0"], 3),
        (["fedper", FIXED_BODY], 3),  # the body that a client has trained is the shared one
        (["apfl"], 1),  # here too: of one client, the server's model is the one that it has trained
        (["fedrod"], 1),
        (["lg_fedavg"], 1),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else str(given),
)
def test_the_clients_own_models_have_the_mean_that_the_run_reports(words, clients, tmp_path):
    skewed = ["partition.alpha=0.1", "rounds=2", f"clients={clients}"]
    summary = run_recipe(tmp_path, *TINY, *skewed, f"strategy={words[0]}", *words[1:])
    states = sorted(tmp_path.glob("client_state/*/client-*/round-000002.safetensors"))
    assert len(states) == clients
    found = [evaluate(tmp_path, state=state) for state in states]
    assert np.mean([one.accuracy for one in found]) == pytest.approx(summary["accuracy"], abs=1e-6)
    assert np.mean([one.loss for one in found]) == pytest.approx(summary["loss"], rel=1e-4)
    assert len({one.loss for one in found}) == clients
