"""Tasks: their models, losses, examples by client, subsets, and refusals by key."""

import numpy as np
import pytest
import torch

from fedhet.tasks import build_task
from tests.refused import refused
from tests.tasks.generated import TASKS, make_task, values, write_hub_set


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_task_builds_its_model(name):
    changes = {"classes": ["a", "b", "c"]} if name == "image_folder" else {}
    task = make_task(name, head_bias=False, **changes)
    model = task.build_model(seed=0)
    dtype = torch.int64 if task.config.inputs == "text" else torch.float32
    _, logits = model.eval()(torch.zeros(2, *task.input_shape, dtype=dtype))
    assert logits.shape == (2, task.num_classes)
    assert model.head.bias is None


def test_clients_hold_the_training_examples_with_their_labels():
    task = make_task("digits", "dirichlet", clients=5)
    parts = [task.client_data(client)[0] for client in range(5)]
    counted = np.array([part.class_counts() for part in parts])
    assert np.array_equal(task.class_counts(), counted)
    assert np.array_equal(counted.sum(axis=0), np.bincount(task.train_split.labels))
    assert counted.sum() == 1437
    [(inputs, targets)] = parts[1].batches(2000, generator=None, train=False)
    rows = task.client_rows[1]
    pixels = task.train_split.read()[rows] / np.float32(255)
    assert np.allclose((inputs * 0.3763 + 0.3053).numpy(), pixels, atol=1e-5)
    assert np.array_equal(targets, task.train_split.labels[rows])
    # held-out examples are the client's own
    assert task.client_data(1)[1] is None
    task = make_task("digits", options={"holdout": 0.25})
    data, held_out = task.client_data(0)
    assert (len(data), len(held_out)) == (359, 120)
    counted = np.add(data.class_counts(), held_out.class_counts())
    assert np.array_equal(counted, task.class_counts()[0])


def test_train_size_depends_on_the_seed_and_test_size_does_not():
    sizes = {"train_size": 100, "test_size": 50}
    first, again, other = (make_task("digits", seed=seed, **sizes) for seed in (0, 0, 1))
    assert len(first.train_split) == 100
    assert np.array_equal(first.train_split.rows, again.train_split.rows)
    assert not np.array_equal(first.train_split.rows, other.train_split.rows)
    assert sum(len(first.client_data(client)[0]) for client in range(3)) == 100
    assert len(make_task("digits", train_size=10**6).train_split) == 1437
    labels = first.test_data().labels
    assert torch.equal(labels, other.test_data().labels)
    assert (len(labels), len(labels.unique())) == (50, 10)


@pytest.mark.usefixtures("empty_cache")
def test_training_images_are_augmented_as_the_task_says(tmp_path):
    write_hub_set(tmp_path, "cifar10")
    write_hub_set(tmp_path, "mnist")
    for name, augmented in (("cifar10", True), ("mnist", False)):
        data, _ = make_task(name, path=str(tmp_path)).client_data(0, channels_last=augmented)
        [(plain, _)] = data.batches(100, generator=torch.Generator(), train=False)
        [(trained, _)] = data.batches(100, generator=torch.Generator(), train=True)
        assert torch.equal(plain, trained) != augmented
        assert plain.is_contiguous(memory_format=torch.channels_last) or not augmented


def test_nobody_trains_on_what_another_client_holds_out():
    """This partition gives a row to several clients when a class has run out."""
    options = {"alpha": 0.1, "holdout": 0.2}
    task = make_task("digits", "class_prior_dirichlet", clients=40, options=options)
    rows, split = task.client_rows, task.train_split
    assert sum(map(len, rows)) > len(np.unique(np.concatenate(rows)))
    parts = [task._hold_out(split, own, client) for client, own in enumerate(rows)]
    trained, held_out = ({i for pair in parts for i in pair[side].rows} for side in (0, 1))
    assert held_out
    assert not trained & held_out
    task.__dict__["_held_out_twice"] = np.array([1, 2])
    with refused("partition.holdout=0.2", "0"):
        task._hold_out(split, np.array([1, 2]), 0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("digits", {"source": "web"}, "task.source=web"),
        ("digits", {"modell": "mlp"}, "task.modell"),
        ("digits", {"channels": 2}, "task.channels=2 1 3"),
        ("digits", {"mean": [0.1, 0.2]}, "task.mean 2 task.channels=1"),
        (
            "digits",
            {"crop_padding": 8, "crop_padding_mode": "reflect"},
            "task.crop_padding=8 task.image_size=8",
        ),
        ("digits", {"test_fraction": 1.0}, "task.test_fraction=1.0 (0 1)"),
        ("digits", {"image_size": True}, "task.image_size=true"),
        ("digits", {"flip": "maybe"}, "task.flip=maybe"),
        ("digits", {"path": "x"}, "task.path=x task.source=embedded task.path=null"),
        ("digits", {"classes": ["a"]}, "task.classes 1 task.num_classes=10"),
        ("image_folder", {"num_classes": None, "classes": ["a", "b", "a"]}, "task.classes"),
        ("image_folder", {"classes": ["a"]}, "task.classes=[a]"),
        ("tabular", {"classes": []}, "task.classes=[]"),
        ("digits", {"model": "cvae"}, "model=cvae [0 1] task.mean"),
        ("imdb", {"inputs": "sound"}, "task.inputs='sound"),
        ("imdb", {"flip": True}, "task.flip vocabulary_size"),
        ("imdb", {"source": "image_folder"}, "image_folder"),
    ],
)
def test_bad_values_are_refused_by_key(name, changes, message):
    with refused(*message.split()):
        make_task(name, **changes)


def test_missing_keys_and_wrong_clients_are_named():
    task = values("task", "digits")
    del task["mean"], task["model"]
    with refused("task.mean", "task.model"):
        build_task(task, {"name": "iid"}, seed=0, num_clients=2)
    for client in (-1, 3):
        with refused(f"client {client}", "0..2"):
            make_task("digits").client_data(client)
