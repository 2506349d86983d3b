"""Batches: normalised as torchvision does, augmented, in a seeded order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhet.tasks import TensorData, Transform
from fedhet.tasks.transform import Augmentation
from tests.tasks.generated import random_images

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
PLAIN = Transform(MEAN, STD)
AUGMENTED = Transform(MEAN, STD, flip=True, crop_padding=4)


def images(count=10):
    return np.ascontiguousarray(random_images(count, 8, 3).transpose(0, 3, 1, 2))


def data(count=10, transform=PLAIN, **options):
    labels = np.arange(count) % 3
    return TensorData(images(count), labels, num_classes=4, transform=transform, **options)


def one_pass(examples, batch_size=4, *, seed=0, train=True, **options):
    generator = torch.Generator().manual_seed(seed)
    return list(examples.batches(batch_size, generator=generator, train=train, **options))


@pytest.mark.slow
def test_inputs_are_normalised_as_torchvision_and_our_layer_do_and_come_in_order():
    from torchvision.transforms import v2  # two seconds

    [(inputs, labels)] = data().batches(10, generator=None, train=False)
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    torch.testing.assert_close(inputs, reference(torch.from_numpy(images())))
    assert inputs.dtype == torch.float32
    assert labels.dtype == torch.int64
    layer = AUGMENTED.module()
    torch.testing.assert_close(layer(torch.from_numpy(images())), inputs)
    assert {name for name, _ in layer.named_buffers()} == {"scale", "shift"}  # go to a GPU with it
    in_order = [y.tolist() for _, y in data().batches(4, generator=None, train=True)]
    assert in_order == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    assert data().class_counts() == [4, 3, 3, 0]


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
def test_the_generator_decides_the_order_and_every_example_comes_once_with_its_label(transform):
    before = torch.get_rng_state()
    shade = np.repeat(np.arange(60, dtype=np.uint8), 3 * 64).reshape(60, 3, 8, 8) * 4
    examples = TensorData(shade, np.arange(60), num_classes=60, transform=transform)
    first, again, other = (one_pass(examples, 7, seed=seed) for seed in (0, 0, 1))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0][1], other[0][1])
    assert sorted(label for _, labels in first for label in labels.tolist()) == list(range(60))
    for inputs, labels in first:
        brightest = (inputs[:, 0].amax(dim=(1, 2)) * STD[0] + MEAN[0]) * 255 / 4
        assert torch.equal(brightest.round().long(), labels)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
def test_a_last_smaller_batch_is_left_out_unless_it_is_the_only_one(transform):
    for count, drop_last, sizes in (
        *((10, False, [4, 4, 2]), (10, True, [4, 4]), (8, True, [4, 4])),
        *((3, True, [3]), (0, False, []), (0, True, [])),
    ):
        batches = one_pass(data(count, transform), drop_last=drop_last)
        assert [len(labels) for _, labels in batches] == sizes


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("train", [True, False])
def test_channels_last_changes_the_layout_and_no_value(transform, train):
    plain = one_pass(data(transform=transform), train=train)
    moved = one_pass(data(transform=transform, channels_last=True), train=train)
    torch.testing.assert_close(plain, moved)
    assert all(inputs.is_contiguous() for inputs, _ in plain)
    assert all(inputs.is_contiguous(memory_format=torch.channels_last) for inputs, _ in moved)


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_augmentation_is_a_crop_of_the_padded_image_and_a_flip(mode):
    transform = replace(AUGMENTED, crop_padding_mode=mode)
    placed = transform.place(images(6), torch.device("cpu"), channels_last=False)
    chosen = torch.tensor([4, 1, 5])
    flipped = torch.tensor([True, False, True])
    top, left = torch.tensor([0, 8, 3]), torch.tensor([8, 1, 4])
    pixels = Augmentation(flipped, top, left).apply(placed.padded(), chosen, 8, 8)
    padded = np.pad(images(6), ((0, 0), (0, 0), (4, 4), (4, 4)), mode=mode)
    for row in range(3):
        y, x = int(top[row]), int(left[row])
        expected = padded[chosen[row], :, y : y + 8, x : x + 8]
        expected = expected[:, :, ::-1] if flipped[row] else expected
        assert np.array_equal(pixels[row].permute(2, 0, 1).numpy(), expected)


def test_flips_and_crops_are_drawn_evenly_and_image_by_image():
    drawn = Augmentation.draw(AUGMENTED, 20_000, torch.Generator().manual_seed(0))
    assert drawn.flipped.float().mean().item() == pytest.approx(0.5, abs=0.02)
    for corner in (drawn.top, drawn.left):
        shares = torch.bincount(corner, minlength=9) / 20_000
        torch.testing.assert_close(shares, torch.full((9,), 1 / 9), atol=0.01, rtol=0)
    together = torch.corrcoef(torch.stack([drawn.flipped.float(), drawn.top.float(), drawn.left]))
    assert (together - torch.eye(3)).abs().max() < 0.03
    half = Transform(MEAN, STD, crop_padding=4, crop_probability=0.5)
    drawn = Augmentation.draw(half, 20_000, torch.Generator().manual_seed(0))
    centred = ((drawn.top == 4) & (drawn.left == 4)).float().mean().item()
    assert centred == pytest.approx(0.5 + 0.5 / 81, abs=0.02)
    assert not drawn.flipped.any()


def test_no_augmentation_in_tests_or_without_a_generator():
    examples = data(transform=AUGMENTED)
    [(expected, _)] = data().batches(10, generator=None, train=False)
    [(found, _)] = examples.batches(10, generator=None, train=True)
    assert torch.equal(found, expected)
    [(expected, _)] = one_pass(data(), 10, train=False)
    [(found, _)] = one_pass(examples, 10, train=False)
    assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_batches():
    expected = one_pass(data(transform=AUGMENTED))
    found = one_pass(data(transform=AUGMENTED, device="cuda"))
    assert all(inputs.is_cuda and labels.is_cuda for inputs, labels in found)
    torch.testing.assert_close(found, expected, check_device=False)
