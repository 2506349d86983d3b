"""The U-Net, the toy shapes, and folders of images and masks."""

from inspect import signature
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from PIL import Image

import fedhet.conf
from fedhet.common.errors import DamagedFileError
from fedhet.tasks import hugging_face, tabular
from fedhet.tasks.config import NAMED
from fedhet.tasks.segmentation import MaskedImages, UNet, load, shapes
from tests.refused import refused
from tests.tasks.plain import SITE, task_of


def test_the_u_net_has_the_parameters_of_its_convolutions():
    # Width 4, depth 1: down 2->4->4 and 4->8->8, up (8+4)->4->4, then 4->3; 3x3 without bias.
    convolutions = 9 * (2 * 4 + 4 * 4 + 4 * 8 + 8 * 8 + 12 * 4 + 4 * 4)
    norms = 2 * (4 + 4 + 8 + 8 + 4 + 4)
    model = UNet(3, (2, 8, 8), width=4, depth=1)
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + (4 * 3 + 3)


def test_shapes_are_drawn_from_the_seed_and_the_test_is_not():
    (train, masks), (test, _) = shapes(1, examples=20, test_examples=5, size=16)
    assert train.shape == (20, 1, 16, 16)
    assert set(np.unique(masks)) == {0, 1, 2}
    again, other = shapes(1, examples=20, test_examples=5, size=16), shapes(2, 20, 5, 16)
    np.testing.assert_array_equal(train, again[0][0])
    assert not np.array_equal(train, other[0][0])
    np.testing.assert_array_equal(test, other[1][0])


def draw(folder, count, labels=3):
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        mask = rng.integers(0, labels, (6, 6), dtype=np.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
        Image.fromarray(mask * 100).convert("RGB").save(folder / "images" / f"{number}.png")


def test_an_image_and_the_mask_of_its_name_are_a_pair(tmp_path):
    draw(tmp_path / "train", 5)
    train, test = load(path=str(tmp_path), image_size=6, test_fraction=0.2)
    assert (len(train), len(test)) == (4, 1)
    image, mask = test[0]
    assert image.shape == (3, 6, 6)
    torch.testing.assert_close(image, (mask * 100 / 255).expand(3, 6, 6).float())
    enlarged, labels = load(path=str(tmp_path), image_size=12)[1][0]
    assert enlarged.shape[1:] == labels.shape == (12, 12)
    assert set(labels.unique().tolist()) <= {0, 1, 2}  # no label between two


def turned(path, pixels):
    """Save pixels (H, W) as they are, and say that they have to be turned by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: row 0 is the right side
    Image.fromarray(pixels).save(path, exif=exif)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    draw(tmp_path / "train", 1)
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    upright = np.rot90(pixels, -1)
    turned(tmp_path / "train" / "images" / "0.png", pixels)
    Image.fromarray(upright).save(tmp_path / "train" / "masks" / "0.png")
    image, mask = MaskedImages(tmp_path / "train", 12, channels=1)[0]
    same = Image.fromarray(upright).resize((12, 12), Image.Resampling.BILINEAR)
    torch.testing.assert_close(image[0] * 255, torch.tensor(np.asarray(same, dtype=np.float32)))
    assert mask[::11, 0].tolist() == upright[::5, 0].tolist()  # the corners on the left


def test_a_site_has_its_own_images(tmp_path):
    draw(tmp_path / "train", 4)
    task = task_of("segmentation", {"image_size": 8}, SITE, num_classes=3)
    train, held_out = task.client_data(0, site_folder=tmp_path)
    assert (len(train), len(held_out)) == (3, 1)
    model = task.build_model(0)
    inputs, masks = next(train.batches(3, generator=None, train=False))
    assert model(inputs)[1].shape == (3, 3, 8, 8)
    assert (masks.shape, masks.dtype) == ((3, 8, 8), torch.int64)


def test_pixels_of_the_ignored_label_count_nowhere(tmp_path):
    draw(tmp_path / "train", 3)
    for mask in (tmp_path / "train" / "masks").iterdir():
        pixels = np.array(Image.open(mask))
        pixels[pixels == 2] = 255
        Image.fromarray(pixels).save(mask)
    options = {"path": str(tmp_path), "image_size": 6, "test_fraction": 0.0}
    task = task_of("segmentation", options | {"ignore_index": 255}, num_classes=2)
    inputs, masks = next(task.client_data(0)[0].batches(3, generator=None, train=False))
    assert set(masks.unique().tolist()) == {-100, 0, 1}
    logits = task.build_model(0)(inputs)[1]
    of_labels = torch.nn.functional.cross_entropy(
        logits.movedim(1, -1)[masks >= 0], masks[masks >= 0]
    )
    torch.testing.assert_close(task.loss(logits, masks), of_labels)
    without = task_of("segmentation", options, num_classes=2).client_data(0)[0]
    with refused("255"):
        next(without.batches(3, generator=None, train=False))
    with refused("ignore_index=-1"):
        load(path=str(tmp_path), ignore_index=-1)


def test_images_of_all_endings_are_read_and_other_files_are_named(tmp_path, caplog):
    draw(tmp_path / "train", 3)
    images = tmp_path / "train" / "images"
    Image.open(images / "1.png").save(images / "1.webp", lossless=True)
    Image.open(images / "2.png").save(images / "2.GIF")
    (images / "1.png").unlink()
    (images / "2.png").rename(images / "2.dcm")
    assert len(load(path=str(tmp_path), test_fraction=0.0)[0]) == 3
    assert "images: 1 files are left out, because their endings are not images', such as 2.dcm" in (
        caplog.text
    )
    (tmp_path / "train" / "masks" / "3.png").write_bytes(
        (tmp_path / "train" / "masks" / "0.png").read_bytes()
    )
    with refused("3"):
        load(path=str(tmp_path))


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    with refused("task.path"):
        load(path=str(tmp_path))
    draw(tmp_path / "train", 2)
    (tmp_path / "train" / "masks" / "1.png").unlink()
    with refused("1"):
        load(path=str(tmp_path))
    (tmp_path / "train" / "images" / "0.png").rename(tmp_path / "train" / "images" / "2.png")
    with refused("1", "2"):
        load(path=str(tmp_path))
    (tmp_path / "train" / "images" / "1.png").rename(tmp_path / "train" / "images" / "0.png")
    (tmp_path / "train" / "images" / "2.png").rename(tmp_path / "train" / "images" / "1.png")
    with refused("channels=2", "1"):
        load(path=str(tmp_path), channels=2)
    Image.fromarray(np.full((6, 6), 0.5, "float32")).save(tmp_path / "train" / "masks" / "1.tif")
    with refused("1.tif"):
        load(path=str(tmp_path), test_fraction=0.0)[0][1]
    (tmp_path / "train" / "masks" / "1.tif").unlink()
    Image.new("RGB", (6, 6)).save(tmp_path / "train" / "masks" / "1.png")
    with refused("1.png"):
        load(path=str(tmp_path), test_fraction=0.0)[0][1]
    Image.new("L", (6, 5)).save(tmp_path / "train" / "masks" / "1.png")
    with refused("1.png", "6x5", "6x6"):
        load(path=str(tmp_path), test_fraction=0.0)[0][1]
    whole = (tmp_path / "train" / "masks" / "0.png").read_bytes()
    (tmp_path / "train" / "masks" / "1.png").write_bytes(whole[:45])
    with refused("masks/1.png", kind=DamagedFileError):
        load(path=str(tmp_path), test_fraction=0.0)[0][1]
    Image.fromarray(np.zeros((6, 6), "uint16")).save(tmp_path / "train" / "images" / "0.png")
    with refused("0.png", "8"):
        load(path=str(tmp_path), test_fraction=0.0)[0][0]
    (tmp_path / "train" / "masks" / "0.png").rename(tmp_path / "train" / "masks" / "0.jpg")
    with refused("0.jpg"):
        load(path=str(tmp_path))
    (tmp_path / "train" / "masks" / "0.jpg").rename(tmp_path / "train" / "masks" / "0.png")
    Image.new("L", (6, 6)).save(tmp_path / "train" / "images" / "1.tif")
    with refused("1.png", "1.tif"):
        load(path=str(tmp_path))
    task = task_of("segmentation", {}, num_classes=2)
    with refused("path"):
        task.client_data(0)


def test_what_a_shipped_data_function_takes_is_in_a_task_s_file():
    """Another key would be refused as unknown."""
    given = {"client_id", "num_clients", "seed", "kind", "classes", "data_folder", "fitted", *NAMED}
    files = [OmegaConf.load(path) for path in Path(fedhet.conf.__file__).parent.glob("task/*.yaml")]
    for function in (tabular.load, hugging_face.load, load, shapes):
        name = f"{function.__module__}:{function.__name__}"
        keys = [set(file.data_options) for file in files if file.get("data") == name]
        assert set(signature(function).parameters) - given == set().union(*keys), name
