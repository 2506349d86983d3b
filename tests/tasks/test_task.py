import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.errors import ConfigError
from tasks import build_task
from tests.tasks.generated import TASKS, make_task, values, write_hub_set


def labels(data):
    return torch.cat([y for _, y in data.batches(100, generator=None, train=False)])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_builds_its_model(name):
    changes = {"classes": ["a", "b", "c"]} if name == "image_folder" else {}
    task = make_task(name, **changes)
    model = task.build_model(seed=0)
    dtype = torch.int64 if task.config.inputs == "text" else torch.float32
    _, logits = model.eval()(torch.zeros(2, *task.input_shape, dtype=dtype))
    assert logits.shape == (2, task.num_classes)
    assert task.classifier_tensors == model.classifier_tensors
    assert task.name == name


def test_model_keys_reach_the_model():
    task = make_task("cifar10", model="resnet18_gn", stem="cifar", head_bias=False)
    model = task.build_model(0)
    assert model.head.bias is None
    assert model.body.conv1.kernel_size == (3, 3)
    assert task.classifier_tensors == 1


def test_loss_is_the_mean_cross_entropy():
    logits, targets = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    expected = sum(F.cross_entropy(logits[i : i + 1], targets[i : i + 1]) for i in range(4)) / 4
    torch.testing.assert_close(make_task("digits").loss(logits, targets), expected)


def test_clients_hold_the_training_examples():
    task = make_task("digits", "dirichlet", clients=5)
    parts = [task.client_data(client)[0] for client in range(5)]
    assert sum(map(len, parts)) == 1437
    counted = np.array([part.class_counts() for part in parts])
    assert np.array_equal(task.class_counts(), counted)
    assert np.array_equal(counted.sum(axis=0), np.bincount(task.train_split.labels))


def test_pixels_belong_to_the_labels():
    task = make_task("digits", "pathological")
    part, _ = task.client_data(1)
    [(inputs, targets)] = part.batches(2000, generator=None, train=False)
    rows = task.client_rows[1]
    pixels = task.train_split.read()[rows] / np.float32(255)
    found = (inputs * 0.3763 + 0.3053).numpy()
    assert np.allclose(found, pixels, atol=1e-5)
    assert np.array_equal(targets, task.train_split.labels[rows])


def test_held_out_examples_are_the_clients_own():
    task = make_task("digits", options={"holdout": 0.25}, clients=3)
    data, held_out = task.client_data(0)
    assert (len(data), len(held_out)) == (359, 120)
    together = torch.cat([labels(data), labels(held_out)])
    own = task.train_split.labels[task.client_rows[0]]
    assert sorted(together.tolist()) == sorted(own.tolist())
    assert make_task("digits").client_data(0)[1] is None


def test_train_size_is_a_random_subset_of_the_seed():
    first, again, other = (make_task("digits", train_size=100, seed=s) for s in (0, 0, 1))
    assert len(first.train_split) == 100
    assert np.array_equal(first.train_split.rows, again.train_split.rows)
    assert not np.array_equal(first.train_split.rows, other.train_split.rows)
    assert sum(len(first.client_data(client)[0]) for client in range(3)) == 100
    assert len(make_task("digits", train_size=10**6).train_split) == 1437


def test_test_size_is_the_same_subset_for_every_seed():
    first, other = (make_task("digits", test_size=50, seed=s).test_data() for s in (0, 1))
    assert len(first) == 50
    assert torch.equal(labels(first), labels(other))
    assert len(set(labels(first).tolist())) == 10


@pytest.mark.usefixtures("empty_cache")
def test_training_images_are_augmented_as_the_task_says(tmp_path):
    write_hub_set(tmp_path, "cifar10")
    write_hub_set(tmp_path, "mnist")
    for name, augmented in (("cifar10", True), ("mnist", False)):
        data, _ = make_task(name, path=str(tmp_path)).client_data(0)
        [(plain, _)] = data.batches(100, generator=torch.Generator(), train=False)
        [(trained, _)] = data.batches(100, generator=torch.Generator(), train=True)
        assert torch.equal(plain, trained) != augmented


@pytest.mark.usefixtures("empty_cache")
def test_femnist_clients_are_writers(tmp_path):
    write_hub_set(tmp_path, "femnist", count=80)
    task = make_task("femnist", "natural", clients=4, path=str(tmp_path))
    writers = [np.unique(task.train_split.groups[rows]) for rows in task.client_rows]
    assert sorted(int(own) for [own] in writers) == [0, 1, 2, 3]
    assert [len(task.client_data(client)[0]) for client in range(4)] == [18] * 4
    assert len(task.test_data()) == 8


def test_channels_last_reaches_the_batches():
    data, _ = make_task("digits").client_data(0, torch.device("cpu"), channels_last=True)
    [(inputs, _), *_] = data.batches(8, generator=None, train=False)
    assert inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("client", [-1, 3])
def test_client_out_of_range_is_refused(client):
    with pytest.raises(ConfigError, match=rf"client {client} is not one of 0\.\.2"):
        make_task("digits").client_data(client)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, r"task\.source='web' is unknown; allowed: embedded, files, hub"),
        ({"modell": "mlp"}, r"unknown key task\.modell; task has: .*model"),
        ({"channels": 2}, r"task\.channels=2: 1 \(grey\) and 3 \(RGB\)"),
        ({"mean": [0.1, 0.2]}, r"task\.mean has 2 values and task\.channels=1"),
        ({"std": [0.0]}, r"task\.std=\(0\.0,\) must be > 0"),
        ({"image_size": 0}, r"task\.image_size=0 must be >= 1"),
        ({"test_fraction": 1.0}, r"task\.test_fraction=1\.0 must be in \(0, 1\)"),
        ({"crop_probability": 2}, r"task\.crop_probability=2 must be in \[0, 1\]"),
        ({"train_size": 0}, r"task\.train_size=0 must be >= 1, or null for all"),
        ({"train_size": 1.5}, r"task\.train_size=1\.5 must be a whole number or null"),
        ({"image_size": True}, r"task\.image_size=True must be a whole number"),
        ({"mean": 0.1}, r"task\.mean=0\.1 must be a list, each of it a number"),
        ({"std": ["wide"]}, r"task\.std=\['wide'\] must be a list, each of it a number"),
        ({"flip": "maybe"}, r"task\.flip='maybe' must be true or false"),
        ({"path": 2024}, r"task\.path=2024 must be text .* or null"),
        ({"classes": ["a", "b"]}, r"task\.classes names 2 classes and task\.num_classes=10"),
    ],
)
def test_bad_values_are_refused_by_key(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_task("digits", **changes)


def test_missing_keys_are_named():
    task = values("task", "digits")
    del task["mean"], task["model"]
    with pytest.raises(ConfigError, match=r"lacks task\.mean, task\.model"):
        build_task(task, {"name": "iid"}, seed=0, num_clients=2)


def test_unknown_model_is_refused_when_built():
    with pytest.raises(ConfigError, match=r"task\.model='lenet' is unknown"):
        make_task("digits", model="lenet").build_model(0)


class Rows:
    """A split that says which of its rows were selected."""

    def select(self, rows):
        return rows


@pytest.mark.parametrize(
    ("partition", "options"),
    [("class_prior_dirichlet", {"alpha": 0.1}), ("pathological", {"classes": 3})],
)
def test_nobody_trains_on_what_another_client_holds_out(partition, options):
    """These partitions give a row to several clients, where a class has run out."""
    task = make_task("digits", partition, clients=40, options={**options, "holdout": 0.2})
    rows = task.client_rows
    assert sum(map(len, rows)) > len(np.unique(np.concatenate(rows)))
    parts = [task._hold_out(Rows(), own, client) for client, own in enumerate(rows)]
    trained, held_out = (set(np.concatenate(side).tolist()) for side in zip(*parts, strict=True))
    assert held_out
    assert not trained & held_out


def test_a_client_of_which_others_hold_out_all_is_refused():
    task = make_task("digits", options={"holdout": 0.5})
    task.__dict__["_held_out_twice"] = np.array([1, 2])
    with pytest.raises(ConfigError, match=r"partition\.holdout=0\.5 leaves client 0 nothing"):
        task._hold_out(Rows(), np.array([1, 2]), 0)
