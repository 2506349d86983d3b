"""The models: published parameter counts, layers by their equations, seeds, and refusals."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedhet.tasks import MODELS, build_model
from fedhet.tasks.models import Head
from fedhet.tasks.models.mobile import ShuffleUnit
from fedhet.tasks.models.resnet import Conv3x3, ResNet18
from tests.refused import refused

MNIST, CIFAR, DIGITS, TEXT = (1, 28, 28), (3, 32, 32), (1, 8, 8), (20,)
FEDDWS = {"feddw_resnet18": 512, "feddw_shufflenet": 800, "feddw_mobilenetv2": 640}


def build(name, shape=None, classes=10, **options):
    shape = shape or (TEXT if name == "bilstm" else CIFAR)
    if name == "bilstm":
        options = {"vocabulary_size": 50, **options}
    return build_model(name, input_shape=shape, num_classes=classes, **{"seed": 0, **options})


def count(tensors):
    return sum(tensor.numel() for tensor in tensors)


def shuffle_unit(channels, new, groups):
    """A grouped 1x1 to a quarter, a depthwise 3x3, a 1x1 in two groups; each with BatchNorm."""
    narrow = new // 4
    return channels * narrow // groups + 9 * narrow + narrow * new // 2 + 2 * (2 * narrow + new)


def shufflenet_body():
    """A 1x1 stem to 24, then stages of 4, 8, 4 units whose first adds what is missing."""
    first = shuffle_unit(24, 200 - 24, 1) + 3 * shuffle_unit(200, 200, 2)
    second = shuffle_unit(200, 400 - 200, 2) + 7 * shuffle_unit(400, 400, 2)
    third = shuffle_unit(400, 800 - 400, 2) + 3 * shuffle_unit(800, 800, 2)
    return (3 + 2) * 24 + first + second + third


def mobilenetv2_body(shrink):
    """Sandler et al., CVPR 2018, Table 2, with all widths but the stem's divided."""
    total, channels = (3 * 9 + 2) * 32, 32
    for expansion, width, blocks in (
        *((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4)),
        *((6, 96, 3), (6, 160, 3), (6, 320, 1)),
    ):
        for _ in range(blocks):
            hidden, wide = channels * expansion, width // shrink
            expand = (channels + 2) * hidden if expansion > 1 else 0
            total += expand + (9 + 2) * hidden + (hidden + 2) * wide
            channels = wide
    return total + (channels + 2) * (1280 // shrink)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_without_the_weights_that_meet_padding_alone_equals_pytorchs(
    size, stride, layout
):
    generator = torch.Generator().manual_seed(0)
    plain = nn.Conv2d(4, 5, 3, stride, padding=1, dtype=torch.float64)
    ours = Conv3x3(4, 5, 3, stride, padding=1, dtype=torch.float64)
    ours.load_state_dict(plain.state_dict())
    ours = ours.to(memory_format=layout)
    images = torch.randn(6, 4, size, size, generator=generator, dtype=torch.float64)
    results = []
    for layer in (plain, ours):
        inputs = images.clone(memory_format=layout).requires_grad_()
        outputs = layer(inputs)
        weights = torch.arange(outputs.numel(), dtype=torch.float64).view_as(outputs).cos()
        gradients = torch.autograd.grad((outputs * weights).sum(), [inputs, *layer.parameters()])
        results.append([outputs, *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert results[1][2].is_contiguous(memory_format=layout)  # the weight's gradient


MAPPING = 256 + 256 * 128 + 128  # without the weights of its first layer, which depend on the body
HEAD = 128 * 100 + 100
# torchvision's ResNet-18 with another stem and no head, and a bias in every convolution
RESNET18 = 11_689_512 - (512 * 1000 + 1000) - 3 * 64 * 49 + 3 * 64 * 9
BIASES = 64 + 4 * 64 + 5 * 128 + 5 * 256 + 5 * 512
ONE_DIRECTION = 4 * 128 * (128 + 128) + 2 * 4 * 128
BILSTM = 50 * 128 + 2 * ONE_DIRECTION + (256 * 128 + 128) + (128 * 128 + 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "classes", "published"),
    [
        ("mlp", MNIST, 10, 414_600),
        ("fedavg_cnn", MNIST, 10, 582_026),
        ("feddw_cnn", MNIST, 10, 121_642),
        ("feddw_cnn", CIFAR, 10, 139_714),
        ("maecho_cnn", CIFAR, 10, 4_971_368),
        ("vgg11", CIFAR, 10, 9_750_922),
        ("vgg11", CIFAR, 100, 9_797_092),
        ("resnet8", CIFAR, 10, 78_042),
        ("resnet8", CIFAR, 100, 83_892),
        ("resnet18_gn", (3, 224, 224), 1000, 11_689_512),  # torchvision's resnet18
        ("feddw_resnet18", CIFAR, 100, RESNET18 + BIASES + 512 * 256 + MAPPING + HEAD),
        ("feddw_shufflenet", CIFAR, 100, shufflenet_body() + 800 * 256 + MAPPING + HEAD),
        ("feddw_mobilenetv2", CIFAR, 100, mobilenetv2_body(2) + 640 * 256 + MAPPING + HEAD),
        ("bilstm", TEXT, 2, BILSTM + 128 * 2 + 2),
    ],
)
def test_parameter_counts_are_the_published_ones(name, shape, classes, published):
    assert mobilenetv2_body(1) + 1280 * 1000 + 1000 == 3_504_872  # at full width
    assert count(build(name, shape, classes).parameters()) == published


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_features_a_head_a_seed_and_an_orthogonal_start(name):
    before = torch.get_rng_state()
    model, again, other = (build(name, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not torch.equal(model.head.weight, other.head.weight)
    # the named parameters end with the head
    biased = name not in ("mlp", "maecho_cnn")
    for head_bias in (True, False):
        model = build(name, head=Head(bias=None if head_bias == biased else head_bias))
        head = ["head.weight", "head.bias"] if head_bias else ["head.weight"]
        keys = [key for key, _ in model.named_parameters()]
        assert keys[-len(head) :] == [key for key in keys if key.startswith("head")] == head
        assert model.classifier_tensors == len(head) + (4 if name == "vgg11" else 0)
    # an orthogonal head leaves the body as it is
    orthogonal = build(name, head=Head(init="orthogonal"))
    weight = orthogonal.head.weight
    assert torch.allclose(weight @ weight.T, torch.eye(len(weight)), atol=1e-5)
    assert orthogonal.head.bias is None or not orthogonal.head.bias.any()
    torch.testing.assert_close(orthogonal.body.state_dict(), again.body.state_dict())
    # features, and the logits that the head makes of them
    inputs = torch.randint(50, (2, *TEXT)) if name == "bilstm" else torch.randn(2, *CIFAR)
    features, logits = model.eval()(inputs)
    assert features.shape == (2, model.head.in_features)
    assert torch.equal(model.head(features), logits)


def test_classifiers_are_fedpvrs():
    for name, published, first in (("vgg11", 576_612, 16), ("resnet8", 6500, 27)):
        model = build(name, classes=100)
        tensors = list(model.parameters())
        assert len(tensors) - model.classifier_tensors == first
        assert count(tensors[first:]) == published


@pytest.mark.slow
def test_vgg11_and_maecho_cnn_start_as_in_the_released_codes():
    last = [layer for layer in build("vgg11").body if isinstance(layer, nn.Conv2d)][-1]
    assert last.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    model = build("maecho_cnn")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [layer.weight[0].numel() for layer in layers] == [27, 576, 1152, 4096, 1000, 500]
    assert all(layer.bias is None for layer in layers)
    assert [type(m).__name__ for m in model.body][:4] == ["Conv2d", "ReLU", "Dropout", "MaxPool2d"]
    for layer in layers[3:]:  # Xavier normal
        assert layer.weight.std().item() == pytest.approx((2 / sum(layer.weight.shape)) ** 0.5, 0.1)
    assert layers[2].weight.abs().max() <= 1152**-0.5  # uniform, as in PyTorch


@pytest.mark.slow
def test_a_resnet18_is_torchvisions_from_the_same_seed():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    ours = ResNet18(nn.BatchNorm2d)
    torch.manual_seed(0)
    theirs = models.resnet18()
    theirs.fc = nn.Identity()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.slow
def test_normalisations_and_stems_of_the_resnets():
    norms = [layer for layer in build("resnet8").modules() if isinstance(layer, nn.GroupNorm)]
    assert [layer.num_groups for layer in norms] == [2] * 9
    for name, stem, kernel in (("gn", None, 7), ("gn", "cifar", 3), ("bn", None, 3)):
        body = build(f"resnet18_{name}", stem=stem).body
        assert body.conv1.kernel_size == (kernel, kernel)
        assert isinstance(body.maxpool, nn.Identity) == (kernel == 3)
        assert isinstance(body.bn1, nn.BatchNorm2d) == (name == "bn")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEDDWS, "resnet18_bn"])
def test_the_smallest_image_trains_alone(name):
    """BatchNorm refuses to train on one value per channel."""
    for least, stem in ((9, None), (33, "imagenet"))[: 2 if name == "resnet18_bn" else 1]:
        model = build(name, (3, least, least), stem=stem).train()
        assert model(torch.randn(1, 3, least, least))[1].isfinite().all()
        with refused(name, f"{least}x{least}"):
            build(name, (3, least - 1, least), stem=stem)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mlp", CIFAR, {"head": Head(init="sphere")}, "head_init='sphere"),
        ("mlp", CIFAR, {"head": Head(init="orthogonal"), "classes": 101}, "101 100"),
        ("cvae", CIFAR, {"head": Head(init="orthogonal")}, "task.head_init=null"),
        ("lenet", CIFAR, {}, "task.model='lenet vgg11"),
        ("feddw_cnn", DIGITS, {}, "task.model=feddw_cnn 8x8"),
        ("vgg11", DIGITS, {}, "task.model=vgg11 8x8"),
        ("resnet18_gn", CIFAR, {"stem": "tiny"}, "stem='tiny'"),
        ("bilstm", TEXT, {"stem": "cifar"}, "task.stem=cifar task.model=bilstm"),
        ("cvae", TEXT, {}, "task.model=cvae"),
        ("bilstm", CIFAR, {}, "3 32 resnet8"),
        ("resnet8", TEXT, {}, "resnet8 20"),
        ("bilstm", TEXT, {"vocabulary_size": None}, "task.vocabulary_size"),
        ("frozen_resnet18", MNIST, {}, "task.model=frozen_resnet18"),
    ],
)
def test_models_that_cannot_be_built_are_refused_by_key(name, shape, options, message):
    with refused(*message.split()):
        build(name, shape, **options)


@pytest.mark.parametrize(("shape", "dropout"), [(MNIST, 0.5), (CIFAR, 0.0)])
def test_feddw_cnn_is_the_network_of_its_code(shape, dropout):
    """Layer by layer; each layer draws its dropout from the same numbers."""
    model = build("feddw_cnn", shape)
    inputs = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    tensors = iter(model.parameters())
    torch.manual_seed(1)
    found = model(inputs)
    torch.manual_seed(1)
    maps = F.relu(F.max_pool2d(F.conv2d(inputs, next(tensors), next(tensors)), 2))
    maps = F.dropout(F.conv2d(maps, next(tensors), next(tensors)), dropout)
    maps = F.relu(F.max_pool2d(maps, 2)).flatten(1)
    mapped = F.relu(F.linear(maps, next(tensors), next(tensors)))
    features = F.linear(mapped, next(tensors), next(tensors))
    torch.testing.assert_close(found[0], features)
    torch.testing.assert_close(found[1], F.linear(features, next(tensors), next(tensors)))


@pytest.mark.slow
@torch.no_grad()
def test_feddws_networks_leave_4x4_pixels():
    for name, channels in FEDDWS.items():
        *extractor, _, _, _, _, _ = build(name).eval().body
        assert nn.Sequential(*extractor)(torch.randn(1, *CIFAR)).shape == (1, channels, 4, 4)


def test_shuffle_units_mix_the_groups_and_keep_pooled_inputs_when_they_halve():
    unit = ShuffleUnit(16, 16, halve=False, groups=2).eval()
    for parameter in unit.parameters():
        nn.init.ones_(parameter)  # so that no activation is 0
    images = torch.rand(1, 16, 4, 4, requires_grad=True)
    unit(images)[:, :8].sum().backward()
    assert images.grad[:, 8:].abs().amax() > 0
    images = torch.rand(1, 8, 4, 4)
    outputs = ShuffleUnit(8, 24, halve=True, groups=2).eval()(images)
    assert outputs.shape == (1, 24, 2, 2)
    assert torch.equal(outputs[:, 16:], F.avg_pool2d(images, 3, 2, 1))


@torch.no_grad()
def test_bilstm_averages_over_time_padding_included_and_in_parts_gives_the_same():
    """On a CPU it takes 64 texts at a time."""
    model = build("bilstm", classes=2).eval()
    body = model.body
    tokens = torch.tensor([[1, 7, 30, 7, 2, 0, 0, 0], [1, 4, 3, 9, 12, 40, 41, 49]])
    features, _ = model(tokens.repeat(40, 1))
    expected = []
    for text in tokens:
        outputs, _ = body.lstm(body.embedding(text))  # (T, 256), of one text
        steps = outputs @ body.fc1.weight.T + body.fc1.bias
        expected.append(body.fc2.weight @ steps.clamp(min=0).mean(dim=0) + body.fc2.bias)
    torch.testing.assert_close(features, torch.stack(expected).repeat(40, 1))
