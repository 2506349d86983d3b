import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from tasks import TensorData, Transform
from tasks.transform import Augmentation
from tests.tasks.generated import random_images

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
PLAIN = Transform(MEAN, STD)
AUGMENTED = Transform(MEAN, STD, flip=True, crop_padding=4)


def images(count=10, size=8):
    return np.ascontiguousarray(random_images(count, size, 3).transpose(0, 3, 1, 2))


def data(count=10, transform=PLAIN, size=8, **options):
    labels = np.arange(count) % 3
    return TensorData(images(count, size), labels, num_classes=3, transform=transform, **options)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def one_pass(examples, batch_size=4, *, seed=0, train=True, **options):
    return list(examples.batches(batch_size, generator=generator(seed), train=train, **options))


def test_inputs_are_normalised_as_torchvision_and_our_layer_do_and_come_in_order():
    [(inputs, labels)] = data().batches(10, generator=None, train=False)
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    torch.testing.assert_close(inputs, reference(torch.from_numpy(images())))
    assert inputs.dtype == torch.float32
    assert labels.dtype == torch.int64
    layer = AUGMENTED.module()
    torch.testing.assert_close(layer(torch.from_numpy(images())), inputs)
    assert list(layer.parameters()) == []
    assert {name for name, _ in layer.named_buffers()} == {"scale", "shift"}  # go to a GPU with it
    in_order = [y.tolist() for _, y in data().batches(4, generator=None, train=True)]
    assert in_order == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]
    counted = TensorData(images(3), np.array([0, 2, 2]), num_classes=4, transform=PLAIN)
    assert counted.class_counts() == [1, 0, 2, 0]


def test_generator_decides_the_order_and_every_example_comes_once():
    torch.manual_seed(3)
    untouched = torch.rand(2)
    torch.manual_seed(3)
    examples = data(60)
    first, again, other = (one_pass(examples, 7, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), untouched)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    [(ordered, _)] = examples.batches(60, generator=None, train=False)
    rows = {tuple(image.flatten().tolist()) for image in ordered}
    assert {tuple(image.flatten().tolist()) for x, _ in first for image in x} == rows


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
def test_labels_stay_with_their_images(transform):
    shade = np.repeat(np.arange(60, dtype=np.uint8), 3 * 64).reshape(60, 3, 8, 8) * 4
    examples = TensorData(shade, np.arange(60), num_classes=60, transform=transform)
    for inputs, labels in one_pass(examples, 7):
        brightest = (inputs[:, 0].amax(dim=(1, 2)) * STD[0] + MEAN[0]) * 255 / 4
        assert torch.equal(brightest.round().long(), labels)


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
def test_batch_sizes(transform):
    for count, drop_last, sizes in (
        *((10, False, [4, 4, 2]), (10, True, [4, 4]), (8, True, [4, 4])),
        *((3, True, [3]), (0, False, []), (0, True, [])),  # the only batch is not left out
    ):
        batches = one_pass(data(count, transform), drop_last=drop_last)
        assert [len(labels) for _, labels in batches] == sizes


@pytest.mark.parametrize("transform", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("train", [True, False])
def test_channels_last_changes_the_layout_and_no_value(transform, train):
    plain = one_pass(data(transform=transform), train=train)
    moved = one_pass(data(transform=transform, channels_last=True), train=train)
    for (a, _), (b, _) in zip(plain, moved, strict=True):
        assert a.is_contiguous()
        assert b.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(a, b)


def test_augmentation_is_a_crop_of_the_black_padded_image_and_a_flip():
    placed = AUGMENTED.place(images(6), torch.device("cpu"), channels_last=False)
    chosen = torch.tensor([4, 1, 5])
    flipped = torch.tensor([True, False, True])
    top, left = torch.tensor([0, 8, 3]), torch.tensor([8, 1, 4])
    pixels = Augmentation(flipped, top, left).apply(placed.padded(), chosen, 8, 8)
    padded = np.pad(images(6), ((0, 0), (0, 0), (4, 4), (4, 4)))
    for row in range(3):
        t, l = int(top[row]), int(left[row])  # noqa: E741
        expected = padded[chosen[row], :, t : t + 8, l : l + 8]
        expected = expected[:, :, ::-1] if flipped[row] else expected
        assert np.array_equal(pixels[row].permute(2, 0, 1).numpy(), expected)


def test_flips_and_crops_are_drawn_evenly_and_image_by_image():
    drawn = Augmentation.draw(AUGMENTED, 20_000, generator())
    assert drawn.flipped.float().mean().item() == pytest.approx(0.5, abs=0.02)
    for corner in (drawn.top, drawn.left):
        shares = torch.bincount(corner, minlength=9) / 20_000
        torch.testing.assert_close(shares, torch.full((9,), 1 / 9), atol=0.01, rtol=0)
    together = torch.corrcoef(torch.stack([drawn.flipped.float(), drawn.top.float(), drawn.left]))
    assert (together - torch.eye(3)).abs().max() < 0.03
    half = Transform(MEAN, STD, crop_padding=4, crop_probability=0.5)
    drawn = Augmentation.draw(half, 20_000, generator())
    centred = ((drawn.top == 4) & (drawn.left == 4)).float().mean().item()
    assert centred == pytest.approx(0.5 + 0.5 / 81, abs=0.02)
    assert not drawn.flipped.any()


def test_no_augmentation_in_tests_or_without_a_generator():
    examples = data(transform=AUGMENTED)
    [(expected, _)] = data().batches(10, generator=None, train=False)
    for train in (False, True):
        [(found, _)] = examples.batches(10, generator=None, train=train)
        assert torch.equal(found, expected)
    [(expected, _)] = one_pass(data(), 10, train=False)
    [(shuffled, _)] = one_pass(examples, 10, train=False)
    assert torch.equal(shuffled, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_batches():
    expected = one_pass(data(transform=AUGMENTED))
    found = one_pass(data(transform=AUGMENTED, device="cuda"))
    for (a, y), (b, z) in zip(expected, found, strict=True):
        assert b.is_cuda
        torch.testing.assert_close(a, b.cpu())
        assert torch.equal(y, z.cpu())
