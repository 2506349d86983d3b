import pytest
import torch

from tasks import MODELS, ConfigError, build_model

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)


def build(name, shape=CIFAR, classes=10, **options):
    return build_model(name, input_shape=shape, num_classes=classes, **{"seed": 0, **options})


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "published"),
    [
        ("mlp", MNIST, 10, 414_600),
        ("fedavg_cnn", MNIST, 10, 582_026),
        ("feddw_cnn", MNIST, 10, 121_642),
        ("feddw_cnn", CIFAR, 10, 139_714),
        ("vgg11", CIFAR, 10, 9_750_922),
        ("vgg11", CIFAR, 100, 9_797_092),
        ("resnet8", CIFAR, 10, 78_042),
        ("resnet8", CIFAR, 100, 83_892),
        ("resnet18_gn", (3, 224, 224), 1000, 11_689_512),  # torchvision's resnet18
    ],
)
def test_parameter_counts_are_the_published_ones(name, shape, classes, published):
    assert count(build(name, shape, classes)) == published


@pytest.mark.parametrize("name", MODELS)
def test_model_returns_features_and_the_logits_that_its_head_makes_of_them(name):
    model = build(name, classes=7).eval()
    features, logits = model(torch.randn(2, *CIFAR))
    assert features.shape == (2, model.head.in_features)
    assert logits.shape == (2, 7)
    assert torch.equal(model.head(features), logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head_bias", [True, False, None])
def test_named_parameters_end_with_the_head(name, head_bias):
    model = build(name, head_bias=head_bias)
    biased = name != "mlp" if head_bias is None else head_bias
    names = [key for key, _ in model.named_parameters()]
    head = ["head.weight", "head.bias"] if biased else ["head.weight"]
    assert names[-len(head) :] == head
    assert not any(key.startswith("head") for key in names[: -len(head)])
    assert model.classifier_tensors == len(head) + (4 if name == "vgg11" else 0)


@pytest.mark.parametrize(
    ("name", "classes", "published"),
    [("vgg11", 10, 530_442), ("vgg11", 100, 576_612), ("resnet8", 10, 650), ("resnet8", 100, 6500)],
)
def test_classifier_sizes_are_fedpvrs(name, classes, published):
    model = build(name, classes=classes)
    last = list(model.parameters())[-model.classifier_tensors :]
    assert sum(parameter.numel() for parameter in last) == published


def test_resnet8_classifier_starts_at_tensor_27():
    model = build("resnet8")
    assert len(list(model.parameters())) - model.classifier_tensors == 27


@pytest.mark.parametrize("name", MODELS)
def test_seed_decides_the_parameters_and_leaves_the_global_state_alone(name):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(torch.rand(3), expected)
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_vgg11_convolutions_start_with_the_released_spread():
    last = [layer for layer in build("vgg11").body if isinstance(layer, torch.nn.Conv2d)][-1]
    assert last.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)


def test_resnet8_normalises_over_two_groups():
    norms = [layer for layer in build("resnet8").modules() if isinstance(layer, torch.nn.GroupNorm)]
    assert len(norms) == 9
    assert {layer.num_groups for layer in norms} == {2}


@pytest.mark.parametrize(
    ("name", "stem", "kernel"),
    [
        ("resnet18_gn", None, 7),
        ("resnet18_gn", "cifar", 3),
        ("resnet18_bn", None, 3),
        ("resnet18_bn", "imagenet", 7),
    ],
)
def test_resnet18_stems(name, stem, kernel):
    model = build(name, stem=stem)
    assert model.body.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.body.maxpool, torch.nn.Identity) == (kernel == 3)
    has_buffers = any("running_mean" in key for key in model.state_dict())
    assert has_buffers == (name == "resnet18_bn")


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet18_gn"])
def test_models_that_work_on_digits(name):
    _, logits = build(name, DIGITS)(torch.randn(2, *DIGITS))
    assert logits.shape == (2, 10)


@pytest.mark.parametrize("name", ["fedavg_cnn", "feddw_cnn", "vgg11"])
def test_too_small_images_are_refused_by_key(name):
    with pytest.raises(ConfigError, match=rf"task\.model={name} needs images .* 8x8"):
        build(name, DIGITS)


def test_unknown_model_lists_the_options():
    with pytest.raises(ConfigError, match=r"task\.model='lenet' is unknown; allowed: .*vgg11"):
        build("lenet")


def test_unknown_or_misplaced_stem_is_refused():
    with pytest.raises(
        ConfigError, match=r"task\.stem='tiny' is unknown; allowed: cifar, imagenet"
    ):
        build("resnet18_gn", stem="tiny")
    with pytest.raises(ConfigError, match=r"task\.model=mlp has none"):
        build("mlp", stem="cifar")
