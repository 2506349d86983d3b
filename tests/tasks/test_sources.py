"""Examples from scikit-learn, the hub, parquet files, image folders and sites."""

from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedhet.common.errors import DamagedFileError
from fedhet.tasks import hugging_face, segmentation
from fedhet.tasks.sources.encodings import ImageEncoding, read_image
from tests.refused import refused
from tests.tasks.generated import (
    make_task,
    random_images,
    write_hub_set,
    write_image_folder,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("empty_cache", "no_data_folder")


def refuses(message, name, partition="iid", *, site_folder=None, **changes):
    with refused(*message.split()):
        make_task(name, partition, **changes).client_data(0, site_folder=site_folder)


def as_images(array):
    return array[:, None] if array.ndim == 3 else array.transpose(0, 3, 1, 2)


@pytest.mark.slow
def test_digits_are_split_by_class_and_always_in_the_same_way():
    train, test = make_task("digits")._splits
    assert (len(train), len(test)) == (1437, 360)
    assert np.array_equal(test.labels, make_task("digits", seed=5)._splits[1].labels)
    assert set(np.bincount(test.labels)) <= {34, 35, 36, 37}
    pixels = np.concatenate([train.read(), test.read()])[:, 0] / (255 / 16)
    found = sorted(map(tuple, np.rint(pixels).reshape(1797, 64)))
    assert found == sorted(map(tuple, load_digits().images.reshape(1797, 64)))
    assert make_task("digits", image_size=28)._splits[1].read().shape == (360, 1, 28, 28)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "tiny_imagenet"])
def test_files_in_the_hubs_schema(name, tmp_path):
    images = as_images(write_hub_set(tmp_path, name))
    task = make_task(name, path=str(tmp_path))
    train, test = task._splits
    assert np.array_equal(train.read(), images)
    assert np.array_equal(test.read(), images[:8])
    assert np.array_equal(train.labels, np.arange(40) % task.num_classes)


def test_femnists_writers_are_in_both_splits_and_are_the_natural_clients(tmp_path):
    images = as_images(write_hub_set(tmp_path, "femnist"))
    task = make_task("femnist", "natural", clients=4, path=str(tmp_path))
    train, test = task._splits
    assert (len(train), sorted(test.clients)) == (36, [f"f000{n}_00" for n in range(4)])
    assert np.array_equal(train.read(), images[train.rows])
    writers = [np.unique(train.clients[rows]).tolist() for rows in task.client_rows]
    assert writers == [["f0000_00"], ["f0001_00"], ["f0002_00"], ["f0003_00"]]
    assert task.client_names == ("f0000_00", "f0001_00", "f0002_00", "f0003_00")
    held_out = [task.client_data(client)[1] for client in range(4)]
    assert [len(one) for one in held_out] == [1] * 4  # of the test set, which has their writers


def test_a_split_in_several_files_is_read_from_fedhet_data_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_DATA", str(tmp_path))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    images = random_images(6, 28, 1)
    for name, first, end in (("train-0-of-2", 0, 3), ("train-1-of-2", 3, 6), ("test", 0, 6)):
        path = tmp_path / "mnist" / f"{name}.parquet"
        write_parquet(path, images[first:end], {"label": np.arange(first, end)})
    train = make_task("mnist").train_split
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(train.read()[:, 0], images)
    changes = {"channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3, "image_size": 40}
    scaled = make_task("mnist", path=str(tmp_path), **changes).train_split.read()
    assert scaled.shape == (6, 3, 40, 40)  # grey images of another size become RGB of the task's
    assert np.array_equal(scaled[:, 0], scaled[:, 2])


def test_wrong_files_are_refused_by_key(tmp_path):
    refuses("FEDHET_DATA", "mnist", source="files")
    refuses("task.path", "mnist", path=str(tmp_path))
    images = random_images(3, 28, 1)
    write_parquet(tmp_path / "mnist" / "train.parquet", images, {"digit": [1, 2, 3]})
    refuses("test.parquet task.test_split", "mnist", path=str(tmp_path))
    alone = {"name": "mnist", "path": str(tmp_path), "test_split": None}
    refuses("task.label_column", **alone)
    message = "3 task.num_classes=3 0..2"
    refuses(message, **alone, label_column="digit", num_classes=3)


@pytest.mark.slow
def test_the_hub_is_asked_once_and_without_connection_the_ways_out_are_named(
    tmp_path, monkeypatch, empty_cache
):
    images = write_hub_set(tmp_path / "remote", "cifar10")
    asked = []

    def load(repository, split):
        asked.append((repository, split))
        path = tmp_path / "remote" / "cifar10" / f"{split}.parquet"
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "hub"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert np.array_equal(make_task("cifar10").train_split.read(), as_images(images))
    assert set(asked) == {("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "test")}
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("unreachable")))
    make_task("cifar10").client_data(0)
    refuses("ylecun/mnist task.path FEDHET_DATA", "mnist")
    assert not list((empty_cache / "images").glob("mnist*"))


def test_another_data_set_of_the_hub_is_not_read_from_the_tasks_own_folder(tmp_path, monkeypatch):
    """task.hub= beside FEDHET_DATA, and beside task.path, which both have the task's own data."""
    own = write_hub_set(tmp_path, "mnist")
    monkeypatch.setenv("FEDHET_DATA", str(tmp_path))
    asked = Mock(side_effect=ConnectionError("unreachable"))
    monkeypatch.setattr(datasets, "load_dataset", asked)
    assert np.array_equal(make_task("mnist").train_split.read()[:, 0], own)
    assert not asked.called
    refuses("mine/digits", "mnist", hub="mine/digits")
    asked.assert_called_with("mine/digits", split="train")
    refuses("ylecun/mnist@v2", "mnist", hub="ylecun/mnist@v2")
    asked.assert_called_with("ylecun/mnist", split="train", revision="v2")
    refuses("mine/digits", "mnist", hub="mine/digits", path=str(tmp_path))
    refuses("task.hub=mine/digits", "mnist", hub="mine/digits", source="files")
    refuses("hub", "digits", hub="mine/digits")
    other = write_hub_set(tmp_path / "new", "mnist", count=20)
    (tmp_path / "mine").mkdir()
    (tmp_path / "new" / "mnist").rename(tmp_path / "mine" / "digits")  # a copy of what is asked for
    task = make_task("mnist", hub="mine/digits")
    assert np.array_equal(task.train_split.read()[:, 0], other)
    assert task.data_used()["train"]["files"] == [str(tmp_path / "mine/digits/train.parquet")]


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


def test_an_image_is_turned_as_its_exif_orientation_says(tmp_path):
    pixels = np.arange(9, dtype=np.uint8).reshape(3, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # row 0 is the right side
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    for source in (tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
        found = ImageEncoding((1, 3, 3)).decode(source)
        np.testing.assert_array_equal(found[0], np.rot90(pixels, -1))


def test_broken_image_folders_are_refused_by_key(tmp_path):
    refuses("task.path", "image_folder")
    refuses("task.path", "image_folder", path=str(tmp_path / "no"))
    here = {"name": "image_folder", "path": str(tmp_path)}
    refuses("train/", **here)
    (tmp_path / "train").mkdir()
    refuses("subfolder", **here)
    write_image_folder(tmp_path / "train", {"cat": 3})
    refuses("cat", **here)
    write_image_folder(tmp_path / "train", {"dog": 3})
    write_image_folder(tmp_path / "test", {"cow": 1})
    refuses("'cow'", **here)
    (tmp_path / "train" / "cat" / "gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "test" / "cow").rename(tmp_path / "test" / "cat")
    refuses("gone.png", **here)
    (tmp_path / "train" / "cat" / "gone.png").unlink()
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"no image")
    refuses("broken.png", **here)


@pytest.mark.parametrize(
    ("kind", "suffix", "mode"),
    [("uint16", "png", "I;16"), ("int32", "tif", "I"), ("float32", "tif", "F")],
)
def test_images_of_more_than_8_bits_are_refused_and_not_cut_off(tmp_path, kind, suffix, mode):
    write_image_folder(tmp_path / "train", {"cat": 2, "dog": 2})
    deep = tmp_path / "train" / "cat" / f"deep.{suffix}"
    Image.fromarray(np.full((8, 8), 300).astype(kind)).save(deep)
    message = f"deep.{suffix} 8 {mode}"
    refuses(message, "image_folder", path=str(tmp_path))


def test_labels_with_fractions_are_refused_in_tables(tmp_path):
    given = {"label": np.array([0.0, 1.5, 2.0])}
    write_parquet(tmp_path / "mnist" / "train.parquet", random_images(3, 28, 1), given)
    alone = {"path": str(tmp_path), "test_split": None}
    refuses("1.5 task.num_classes=10 0..9", "mnist", **alone)


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
    refuses("train/", "image_folder", **values)


def test_a_folder_of_sites_has_their_names(tmp_path):
    sites = tmp_path / "sites"
    write_image_folder(sites / "wien" / "train", {"dog": 4})
    write_image_folder(sites / "graz" / "train", {"cat": 3, "dog": 2}, seed=1)
    write_image_folder(sites / "graz" / "test", {"cat": 2}, seed=2)
    values = {"path": str(sites), "image_size": 12}
    task = make_task("image_folder", "natural", clients=2, **values)
    assert (task.client_names, task.num_natural_clients) == (("graz", "wien"), 2)
    assert task.class_names == ("cat", "dog")
    parts = [task.client_data(client) for client in range(2)]
    assert [train.class_counts() for train, _ in parts] == [[3, 2], [0, 4]]
    assert (len(parts[0][1]), parts[1][1], len(task.test_data())) == (2, None, 2)
    here = {"name": "image_folder", "partition": "natural", **values}
    (sites / "linz").mkdir()
    refuses("linz train/", **here)
    (sites / "linz" / "train" / "cat").mkdir(parents=True)
    refuses("linz image", **here)
    refuses("task.client_column metadata.csv graz", **here, client_column="clinic")


def test_metadata_names_each_images_client(tmp_path):
    write_image_folder(tmp_path / "train", {"cat": 10, "dog": 10})
    lines = [f"{name}/{n:03}.png,{'ba'[n % 2]}" for n in range(10) for name in ("cat", "dog")]
    table = tmp_path / "train" / "metadata.csv"
    here = {"name": "image_folder", "path": str(tmp_path), "client_column": "clinic"}
    task = make_task(partition="natural", clients=2, image_size=12, **here)
    table.write_text("\n".join(["file_name,clinic", *lines[::-1]]))
    assert (task.client_names, task.num_natural_clients) == (("a", "b"), 2)
    assert [[len(part) for part in task.client_data(client)] for client in range(2)] == [[8, 2]] * 2
    refuses("task.client_column=ward clinic", **{**here, "client_column": "ward"})
    table.write_text("\n".join(["file_name,clinic", *lines[1:]]))
    refuses("cat/000.png task.client_column", **here)


def test_a_site_with_parquet_holds_out_a_fraction_and_one_with_nothing_is_refused(tmp_path):
    for folder, message in (
        (None, "data-folder"),
        (tmp_path / "no", "data-folder"),
        (tmp_path, "train.parquet"),
    ):
        refuses(message, "digits", "site", site_folder=folder)
    refuses("task.classes", "image_folder", "site")
    images = random_images(10, 28, 1)
    write_parquet(tmp_path / "train.parquet", images, {"character": np.arange(10)})
    task = make_task("femnist", "site", options={"holdout": 0.3})
    data, held_out = task.client_data(2, site_folder=tmp_path)
    assert (len(data), len(held_out)) == (7, 3)
    assert sorted([*data.labels.tolist(), *held_out.labels.tolist()]) == list(range(10))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"


def test_what_pillow_would_hand_to_ghostscript_is_no_image(tmp_path, monkeypatch):
    """Wherever one is opened: in folders, in Parquet files, as a mask, in a Hugging Face set."""
    for name in ("Popen", "run", "check_call", "check_output", "call"):
        monkeypatch.setattr(f"subprocess.{name}", lambda *a, **k: pytest.fail("started a program"))
    (tmp_path / "a.png").write_bytes(EPS)
    for source in (tmp_path / "a.png", EPS):
        with refused("a place", "PNG", kind=DamagedFileError):
            read_image(source, "a place")
    write_image_folder(tmp_path / "folder" / "train", {"cat": 3, "dog": 3})
    (tmp_path / "folder" / "train" / "cat" / "x.png").write_bytes(EPS)
    refuses("x.png PNG", "image_folder", path=str(tmp_path / "folder"))
    column = pyarrow.array([{"bytes": EPS, "path": None}] * 3)
    table = pyarrow.table({"image": column, "label": [0, 1, 2]})
    (tmp_path / "hub" / "mnist").mkdir(parents=True)
    pyarrow.parquet.write_table(table, tmp_path / "hub" / "mnist" / "train.parquet")
    refuses("train.parquet 0 PNG", "mnist", path=str(tmp_path / "hub"), test_split=None)
    for name in ("images", "masks"):
        write_image_folder(tmp_path / "both" / "train", {name: 1})
    (tmp_path / "both" / "train" / "masks" / "000.png").write_bytes(EPS)
    with refused("masks/000.png", "PNG"):
        segmentation.load(path=str(tmp_path / "both"), test_fraction=0.0)[0][0]
    set_ = datasets.Dataset.from_dict({"image": [{"bytes": EPS}] * 3, "label": [0, 1, 0]})
    set_ = set_.cast_column("image", datasets.Image(decode=False))
    set_.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "set")
    with refused("input_column=image", "PNG"):
        hugging_face.load(path=str(tmp_path / "set"), test_split=None)


@pytest.mark.parametrize("target", ["..", "../dog", "../../train"])
def test_a_link_makes_no_class_of_another(tmp_path, target):
    """train/cat/link -> train would make every dog a cat."""
    write_image_folder(tmp_path / "train", {"cat": 3, "dog": 3})
    (tmp_path / "train" / "cat" / "link").symlink_to(target)
    if target == "../dog":
        refuses("cat dog links", "image_folder", path=str(tmp_path))
        return
    task = make_task("image_folder", path=str(tmp_path), image_size=12)
    labels = [one.labels.tolist() for one in task._splits]
    assert sorted(labels[0] + labels[1]) == [0] * 3 + [1] * 3
