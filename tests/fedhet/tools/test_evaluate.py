"""fedhet-evaluate: a finished run's model on its own test set, and on another."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedhet.load_run import classifier_of, recipe_of, task_of
from fedhet.tools.evaluate import evaluate, main
from tasks.evaluation import evaluate_model
from tests.recipes import TINY, run_recipe
from tests.tasks.generated import write_texts

pytestmark = pytest.mark.slow  # nearly every test trains a run

COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


def image_folder(folder, count, colours=COLOURS, seed=0):
    """Write train/ and test/ with images of nearly one colour a class."""
    random = np.random.default_rng(seed)
    for split in ("train", "test"):
        for name, colour in colours.items():
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = colour + random.integers(-25, 26, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


def image_run(tmp_path, *words):
    data = image_folder(tmp_path / "data", 12)
    run_recipe(
        tmp_path / "run",
        *("task=image_folder", f"task.path={data}", "task.model=mlp", "task.image_size=8"),
        *("clients=2", "rounds=1", "partition=iid", "local=adam", "local.epochs=20", *words),
    )
    return tmp_path / "run"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a_run")
    run_recipe(folder, *TINY, "rounds=1")
    return folder


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [[], ["strategy=fedbabu", "seed=3"]], ids=["whole", "fedbabu"])
def test_its_own_test_set_gives_the_runs_figures(words, tmp_path):
    """FedBABU's head does not travel: it is what the seed made it, here as at the server."""
    summary = run_recipe(tmp_path / "run", *TINY, *words)
    found = evaluate(tmp_path / "run")
    assert found.examples == 120
    assert found.accuracy == pytest.approx(summary["accuracy"], abs=1e-6)
    assert found.loss == pytest.approx(summary["loss"], rel=1e-5)
    task = task_of(recipe_of(tmp_path / "run"))
    model = classifier_of(tmp_path / "run", task)
    [(inputs, labels)] = task.test_data().batches(120, generator=None, train=False)
    right = model(inputs)[1].argmax(dim=1) == labels
    by_hand = {str(label): float(right[labels == label].float().mean()) for label in range(10)}
    assert found.by_class == pytest.approx(by_hand)
    assert found.augmented == []


def test_other_examples_count_by_the_names_of_the_classes(tmp_path):
    """In the new folder a class is missing, so its own alphabet would shift the labels."""
    folder = image_run(tmp_path)
    assert evaluate(folder).accuracy == 1.0
    kept = {name: colour for name, colour in COLOURS.items() if name != "blue"}
    new = image_folder(tmp_path / "new", 5, kept, seed=1)
    found = evaluate(folder, [f"path={new}"])
    assert found.examples == 10
    assert found.by_class == {"blue": None, "green": 1.0, "red": 1.0}


def test_a_class_that_the_model_does_not_know_is_refused(tmp_path, capsys):
    folder = image_run(tmp_path)
    new = image_folder(tmp_path / "new", 2, {**COLOURS, "yellow": (200, 200, 40)})
    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--task", f"path={new}"])
    assert ended.value.code == 2
    assert "subfolder 'yellow' and the classes are: blue, green, red" in said(capsys)


def test_the_models_classes_are_known_without_its_examples(tmp_path):
    folder = image_run(tmp_path)
    new = image_folder(tmp_path / "new", 4, seed=1)
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert evaluate(folder, [f"path={new}"]).accuracy == 1.0


def test_classes_in_another_order_are_refused(tmp_path, capsys):
    folder = image_run(tmp_path)
    with pytest.raises(SystemExit):
        main([str(folder), "--task", "classes=[red,green,blue]"])
    assert "trained with other classes than" in said(capsys)


def test_texts_need_the_words_that_the_model_knows(tmp_path, capsys):
    texts = ["good film good", "bad film bad", "good good", "bad bad"] * 5
    for place, words in (("data", texts), ("new", [f"new {text}" for text in texts])):
        for split in ("train", "test"):
            write_texts(tmp_path / place / "imdb" / f"{split}.parquet", words, [1, 0] * 10)
    run_recipe(
        tmp_path / "run",
        *("task=imdb", f"task.path={tmp_path / 'data'}", "clients=2", "rounds=1"),
        *("task.length=6", "task.vocabulary_size=6", "partition=iid", "local.batch_size=4"),
    )
    words = ["--task", f"path={tmp_path / 'new'}"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run"), *words])
    assert "other vocabulary than" in said(capsys)
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("bad\ngood\nfilm\n", encoding="utf-8")
    main([str(tmp_path / "run"), *words, "--task", f"vocabulary_file={vocabulary}"])
    assert "20" in capsys.readouterr().out


def accuracy_of(model, task, raw, labels):
    inputs = task.config.transform.module()(raw)
    return float((model(inputs)[1].argmax(1) == labels).float().mean())


def test_augmented_images_are_those_of_training(tmp_path, monkeypatch):
    """With what is drawn known: a flip of all, and the corner of the border at the top left."""
    from tasks.transform import Augmentation

    folder = tmp_path / "run"
    training = ["rounds=4", "local=adam", "local.lr=0.003", "local.epochs=10"]
    run_recipe(folder, *TINY, *training, "partition=iid")  # it knows digits as they are alone
    task = task_of(recipe_of(folder))
    model = classifier_of(folder, task)

    def draw(transform, size, generator):
        ones = torch.ones(size, dtype=torch.bool)
        return Augmentation(ones, torch.zeros(size).long(), torch.zeros(size).long())

    monkeypatch.setattr(Augmentation, "draw", draw)
    raw = task.test_data()._placed._pixels  # uint8, as they came
    [(_, labels)] = task.test_data().batches(len(raw), generator=None, train=False)
    moved = torch.zeros_like(raw)
    moved[:, :, 2:, 2:] = raw[:, :, :-2, :-2]
    found = evaluate(folder, ["flip=true", "crop_padding=2"], passes=2)
    assert found.accuracy > 0.8
    assert found.augmented == pytest.approx([accuracy_of(model, task, moved.flip(3), labels)] * 2)
    others = (raw, raw.flip(3), moved)  # neither moved nor mirrored, or not both
    for wrong in (accuracy_of(model, task, images, labels) for images in others):
        assert abs(found.augmented[0] - wrong) > 0.02


def test_the_same_seed_gives_the_same_augmented_figures(tmp_path):
    words = ["+task.flip=true", "+task.crop_padding=2", "rounds=1", "task.test_size=null"]
    run_recipe(tmp_path / "run", *TINY, *words)
    first, again, other = (evaluate(tmp_path / "run", passes=2, seed=s) for s in (3, 3, 4))
    assert first.augmented == again.augmented != other.augmented
    assert first.augmented[0] != first.augmented[1]
    assert first.accuracy == other.accuracy


def test_the_command_says_what_it_could_not_evaluate_and_goes_on(tmp_path, capsys):
    words = [*TINY, "rounds=1", "+task.flip=true"]
    run_recipe(tmp_path / "sweep" / "0_fedper", *words, "strategy=fedper")
    run_recipe(tmp_path / "sweep" / "1_fedavg", *words)
    out = tmp_path / "figures" / "evaluation.json"
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "sweep"), "--augmented", "1", "--out", str(out)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "its clients keep tensors of their own" in " ".join(printed.err.split())
    assert "1_fedavg" in printed.out
    [figures] = json.loads(out.read_text())
    assert (figures["method"], figures["examples"], len(figures["augmented"])) == ("fedavg", 120, 1)
    assert sorted(figures["by_class"]) == [str(label) for label in range(10)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "foo=1"], "unknown key task.foo; task has: channels"),
        (["--task", "test_size=x"], "task.test_size='x' must be a whole number"),
        (["--task", "image_size=16"], "or the task is another"),
        (["--task", "classes=[a"], "--task classes=[a cannot be read"),
        (["--task", "path"], "write --task path=VALUE"),
        (["--task", "path=/data/new"], "task.path=/data/new: the images of task.source=embedded"),
        (["--augmented", "2"], "say --task flip=true or --task crop_padding=4"),
    ],
)
def test_bad_changes_are_refused_by_key(words, message, a_run, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(a_run), *words])
    assert ended.value.code == 2
    assert message in said(capsys)


def test_a_broken_model_is_named_and_the_next_run_evaluated(tmp_path, capsys):
    for name in ("0_broken", "1_whole"):
        run_recipe(tmp_path / "sweep" / name, *TINY, "rounds=1")
    broken = tmp_path / "sweep" / "0_broken" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "sweep")])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert f"{broken} cannot be read" in " ".join(printed.err.split())
    assert "1_whole" in printed.out


@pytest.mark.parametrize("out", [".", "file/figures.json"])
def test_where_figures_cannot_be_written_nothing_is_evaluated(out, a_run, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main([str(a_run), "--out", str(tmp_path / out)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert str(tmp_path) in " ".join(printed.err.split())
    assert printed.out == ""


def test_a_disk_that_has_become_full_is_named(a_run, tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(f"{path} could not be written: No space left on device")

    monkeypatch.setattr("fedhet.tools.evaluate.save_text", full)
    out = tmp_path / "figures.json"
    with pytest.raises(SystemExit) as ended:
        main([str(a_run), "--out", str(out)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert f"{out} could not be written" in " ".join(printed.err.split())
    assert a_run.name in printed.out
    assert "results" not in printed.out


def test_a_folder_without_a_completed_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert "holds no run" in said(capsys)


def test_a_clients_own_tensors_make_the_model_whole(tmp_path):
    """The shared body and the client's head, each from its file, give the same by hand."""
    words = [*TINY, "rounds=1", "strategy=fedper"]
    run_recipe(tmp_path / "run", *words)
    [state] = (tmp_path / "run").glob("client_state/*/client-00001/round-000001.safetensors")
    task = task_of(recipe_of(tmp_path / "run"))
    model = task.build_model(7)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=False)
    model.head.weight.data = load_file(state)["personal/head.weight"]
    loss, accuracy = evaluate_model(model, task.test_data(), task.loss)
    found = evaluate(tmp_path / "run", state=state)
    assert (found.loss, found.accuracy) == pytest.approx((loss, accuracy))


@pytest.mark.parametrize(
    ("state", "message"),
    [("nowhere.safetensors", "cannot be read"), ("run/model.safetensors", "only its client has")],
)
def test_what_is_no_clients_state_is_refused(state, message, tmp_path, capsys):
    run_recipe(tmp_path / "run", *TINY, "rounds=1", "strategy=fedper")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run"), "--state", str(tmp_path / state)])
    assert ended.value.code == 2
    assert message in said(capsys)
