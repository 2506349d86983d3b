import datasets
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from common.errors import ConfigError
from tests.tasks.generated import (
    make_task,
    random_images,
    write_hub_set,
    write_image_folder,
    write_parquet,
)

HUB_TASKS = ["mnist", "cifar10", "cifar100", "tiny_imagenet", "femnist"]


def as_images(array):
    return array[:, None] if array.ndim == 3 else array.transpose(0, 3, 1, 2)


def test_digits_are_split_by_class_and_always_in_the_same_way():
    task, other = make_task("digits"), make_task("digits", seed=5)
    assert (len(task.train_split), len(task.test_data())) == (1437, 360)
    test, again = task.test_data(), other.test_data()
    assert np.array_equal(test.labels, again.labels)
    assert min(test.class_counts()) >= 34
    assert max(test.class_counts()) <= 37
    train, test = task._splits  # scikit-learn's own images
    pixels = np.concatenate([train.read(), test.read()])[:, 0] / (255 / 16)
    found = sorted(map(tuple, np.rint(pixels).reshape(1797, 64)))
    assert found == sorted(map(tuple, load_digits().images.reshape(1797, 64)))
    larger = make_task("digits", image_size=28).test_data()
    assert next(larger.batches(360, generator=None, train=False))[0].shape == (360, 1, 28, 28)


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB_TASKS)
@pytest.mark.usefixtures("empty_cache")
def test_files_in_the_hubs_schema(name, tmp_path):
    images = write_hub_set(tmp_path, name)
    task = make_task(name, path=str(tmp_path))
    train, test = task._splits
    if name == "femnist":
        assert (len(train), len(test)) == (36, 4)
        assert np.array_equal(np.unique(test.groups, return_counts=True), [[0, 1, 2, 3], [1] * 4])
        own = make_task(name, "natural", clients=4, path=str(tmp_path))
        writers = [np.unique(own.train_split.groups[rows]).tolist() for rows in own.client_rows]
        assert sorted(writers) == [[0], [1], [2], [3]]
        train = train.select(np.argsort(train.rows))
        images = images[np.sort(train.rows)]
    else:
        assert (len(train), len(test)) == (40, 8)
        assert np.array_equal(test.read(), as_images(images)[:8])
    assert np.array_equal(train.read(), as_images(images))
    if name != "femnist":
        assert np.array_equal(train.labels, np.arange(40) % task.num_classes)


@pytest.mark.usefixtures("empty_cache")
def test_a_split_in_several_files_is_read_from_fedhet_data_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_DATA", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    images = random_images(6, 28, 1)
    for part in range(2):
        rows = slice(3 * part, 3 * part + 3)
        labels = {"label": np.arange(6)[rows]}
        path = tmp_path / "mnist" / f"train-0000{part}-of-00002.parquet"
        write_parquet(path, images[rows], labels)
    write_parquet(tmp_path / "mnist" / "test.parquet", images, {"label": np.arange(6)})
    train = make_task("mnist").train_split
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(train.read()[:, 0], images)
    changes = {"channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 40}
    scaled = make_task("mnist", path=str(tmp_path), **changes).train_split.read()
    assert scaled.shape == (6, 3, 40, 40)  # grey images of another size become RGB of the task's
    assert np.array_equal(scaled[:, 0], scaled[:, 2])


@pytest.mark.usefixtures("empty_cache", "no_data_folder")
def test_wrong_files_are_refused_by_key(tmp_path):
    with pytest.raises(ConfigError, match="FEDHET_DATA"):
        make_task("mnist", source="files").client_data(0)
    with pytest.raises(ConfigError, match=r"mnist is not a folder: task\.path"):
        make_task("mnist", path=str(tmp_path)).client_data(0)
    images = random_images(3, 28, 1)
    write_parquet(tmp_path / "mnist" / "train.parquet", images, {"digit": [1, 2, 3]})
    with pytest.raises(ConfigError, match=r"no test\.parquet; .* task\.test_split"):
        make_task("mnist", path=str(tmp_path)).client_data(0)
    alone = {"path": str(tmp_path), "test_split": None}
    with pytest.raises(ConfigError, match=r"'label' \(task\.label_column\); it has: image"):
        make_task("mnist", **alone).client_data(0)
    with pytest.raises(ConfigError, match=r"label 3 and task\.num_classes=3 allows 0\.\.2"):
        make_task("mnist", **alone, label_column="digit", num_classes=3).client_data(0)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache", "no_data_folder")
def test_hub(tmp_path, monkeypatch):
    images = write_hub_set(tmp_path / "remote", "cifar10")
    asked = []

    def load(repository, split):
        asked.append((repository, split))
        path = tmp_path / "remote" / "cifar10" / f"{split}.parquet"
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert np.array_equal(make_task("cifar10").train_split.read(), as_images(images))
    assert set(asked) == {("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "test")}
    asked.clear()
    make_task("cifar10").client_data(0)
    assert not asked  # decoded before: no connection needed


@pytest.mark.usefixtures("empty_cache", "no_data_folder")
def test_hub_without_connection_names_the_ways_out(monkeypatch, empty_cache):
    def load(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match=r"ylecun/mnist .* task\.path .* FEDHET_DATA"):
        make_task("mnist").client_data(0)
    left = [path.name for path in (empty_cache / "images").iterdir()]
    assert all(name.endswith(".lock") for name in left)


@pytest.mark.usefixtures("empty_cache")
def test_image_folder_with_test_and_without_which_is_split_by_class(tmp_path):
    write_image_folder(tmp_path / "train", {"cat": 5, "dog": 4})
    write_image_folder(tmp_path / "test", {"cat": 2, "dog": 2}, seed=1)
    task = make_task("image_folder", path=str(tmp_path), image_size=12)
    assert task.class_names == ("cat", "dog")
    assert task.train_split.labels.tolist() == [0] * 5 + [1] * 4
    assert len(task.test_data()) == 4
    pixels = np.asarray(Image.open(tmp_path / "train" / "dog" / "000.png"))
    assert np.array_equal(task.train_split.read()[5], pixels.transpose(2, 0, 1))
    write_image_folder(tmp_path / "alone" / "train", {"cat": 10, "dog": 20, "emu": 1})
    task = make_task("image_folder", path=str(tmp_path / "alone"), image_size=16)
    assert task.test_data().class_counts() == [2, 4, 0]
    assert np.bincount(task.train_split.labels).tolist() == [8, 16, 1]
    assert task.train_split.read().shape == (25, 3, 16, 16)


@pytest.mark.usefixtures("empty_cache", "no_data_folder")
def test_broken_image_folders_are_refused_by_key(tmp_path):
    def refused(message, path=tmp_path):
        with pytest.raises(ConfigError, match=message):
            make_task("image_folder", path=path and str(path)).client_data(0)

    refused(r"task\.path is not set", None)
    refused(r"is not a folder: change task\.path", tmp_path / "no")
    refused("no subfolder train/")
    (tmp_path / "train").mkdir()
    refused("has no subfolder")
    write_image_folder(tmp_path / "train", {"cat": 3, "dog": 3})
    write_image_folder(tmp_path / "test", {"cow": 1})
    refused(r"subfolder 'cow' .* cat, dog")
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"no image")
    refused(r"broken\.png cannot be read as an image")


@pytest.mark.usefixtures("empty_cache")
def test_site_reads_its_own_image_folder(tmp_path):
    write_image_folder(tmp_path / "a" / "train", {"cat": 3})
    write_image_folder(tmp_path / "b" / "train", {"cat": 1, "dog": 4}, seed=1)
    write_image_folder(tmp_path / "b" / "test", {"dog": 2}, seed=2)
    task = make_task("image_folder", "site", classes=["bee", "cat", "dog"], image_size=12)
    first, nothing = task.client_data(0, site_folder=tmp_path / "a")
    second, held_out = task.client_data(1, site_folder=str(tmp_path / "b"))
    assert nothing is None
    assert first.class_counts() == [0, 3, 0]
    assert second.class_counts() == [0, 1, 4]
    assert held_out.class_counts() == [0, 0, 2]
    # the server needs no training examples
    write_image_folder(tmp_path / "server" / "test", {"cat": 2, "dog": 1})
    values = {"classes": ["cat", "dog"], "image_size": 12, "path": str(tmp_path / "server")}
    assert make_task("image_folder", "site", **values).test_data().class_counts() == [2, 1]
    with pytest.raises(ConfigError, match="no subfolder train/"):
        make_task("image_folder", **values).client_data(0)


@pytest.mark.usefixtures("empty_cache", "no_data_folder")
def test_site_with_parquet_holds_out_a_fraction(tmp_path):
    images, path = random_images(10, 28, 1), tmp_path / "train.parquet"
    write_parquet(path, images, {"character": np.arange(10)})
    task = make_task("femnist", "site", options={"holdout": 0.3})
    data, held_out = task.client_data(2, site_folder=tmp_path)
    assert (len(data), len(held_out)) == (7, 3)
    assert sum(map(sum, (data.class_counts(), held_out.class_counts()))) == 10


@pytest.mark.usefixtures("empty_cache")
def test_site_errors(tmp_path):
    for folder, message in (
        (None, "data-folder"),
        (tmp_path / "no", r"is not a folder: change the node config's data-folder"),
        (tmp_path, r"neither train\.parquet nor a folder train/"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task("digits", "site").client_data(0, site_folder=folder)
    with pytest.raises(ConfigError, match=r"list them in task\.classes"):
        make_task("image_folder", "site")
