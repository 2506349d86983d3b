import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.errors import ConfigError
from tasks import MODELS, build_model
from tasks.models.mobile import ShuffleUnit
from tests.tasks.counting import mobilenetv2_body, shufflenet_body

MNIST, CIFAR, DIGITS, TEXT = (1, 28, 28), (3, 32, 32), (1, 8, 8), (20,)
MAPPED = ["feddw_resnet18", "feddw_shufflenet", "feddw_mobilenetv2"]


def build(name, shape=None, classes=10, **options):
    shape = shape or (TEXT if name == "bilstm" else CIFAR)
    if name == "bilstm":
        options = {"vocabulary_size": 50, **options}
    return build_model(name, input_shape=shape, num_classes=classes, **{"seed": 0, **options})


def some_inputs(name, count=2):
    if name == "bilstm":
        return torch.randint(50, (count, *TEXT))
    return torch.randn(count, *CIFAR)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


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
    ],
)
def test_parameter_counts_are_the_published_ones(name, shape, classes, published):
    assert count(build(name, shape, classes)) == published


@pytest.mark.parametrize("name", MODELS)
def test_model_returns_features_and_the_logits_that_its_head_makes_of_them(name):
    model = build(name, classes=7).eval()
    features, logits = model(some_inputs(name))
    assert features.shape == (2, model.head.in_features)
    assert logits.shape == (2, 7)
    assert torch.equal(model.head(features), logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head_bias", [True, False, None])
def test_named_parameters_end_with_the_head(name, head_bias):
    model = build(name, head_bias=head_bias)
    biased = name not in ("mlp", "maecho_cnn") if head_bias is None else head_bias
    names = [key for key, _ in model.named_parameters()]
    head = ["head.weight", "head.bias"] if biased else ["head.weight"]
    assert isinstance(model.head, nn.Linear)
    assert names[-len(head) :] == head
    assert not any(key.startswith("head") for key in names[: -len(head)])
    assert model.classifier_tensors == len(head) + (4 if name == "vgg11" else 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head_bias", [True, False])
def test_an_orthogonal_head_leaves_the_body_as_it_is(name, head_bias):
    model = build(name, head_bias=head_bias, head_init="orthogonal")
    weight = model.head.weight
    assert torch.allclose(weight @ weight.T, torch.eye(len(weight)), atol=1e-5)
    assert model.head.bias is None or not model.head.bias.any()
    usual = build(name, head_bias=head_bias)
    for (key, ours), theirs in zip(model.named_parameters(), usual.parameters(), strict=True):
        assert torch.equal(ours, theirs) == (not key.startswith("head")), key


def test_a_head_that_cannot_be_orthogonal_is_refused():
    with pytest.raises(ConfigError, match=r"task\.head_init='sphere' is unknown; .* orthogonal"):
        build("mlp", head_init="sphere")
    with pytest.raises(ConfigError, match=r"101 rows .* 100 dimensions of task\.model=mlp's"):
        build("mlp", classes=101, head_init="orthogonal")
    with pytest.raises(ConfigError, match=r"task\.model=cvae is none: set task\.head_init=null"):
        build("cvae", head_init="orthogonal")


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


def test_maecho_cnn_has_the_widths_and_the_start_of_the_released_code():
    """Facts 1.8: what the projections are of, and Xavier normal on the linear layers alone."""
    model = build("maecho_cnn")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [layer.weight[0].numel() for layer in layers] == [27, 576, 1152, 4096, 1000, 500]
    assert all(layer.bias is None for layer in layers)
    assert [type(m).__name__ for m in model.body][:4] == ["Conv2d", "ReLU", "Dropout", "MaxPool2d"]
    for layer in layers[3:]:
        assert layer.weight.std().item() == pytest.approx((2 / sum(layer.weight.shape)) ** 0.5, 0.1)
    assert layers[2].weight.abs().max() <= 1152**-0.5  # uniform, as PyTorch's
    small = build("maecho_cnn", (1, 28, 28)).eval()
    assert small(torch.zeros(2, 1, 28, 28))[0].shape == (2, 500)


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
    model = build(name, (3, 64, 64), stem=stem)
    assert model.body.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.body.maxpool, torch.nn.Identity) == (kernel == 3)
    has_buffers = any("running_mean" in key for key in model.state_dict())
    assert has_buffers == (name == "resnet18_bn")


@pytest.mark.parametrize("name", ["mlp", "resnet8", "resnet18_gn"])
def test_models_that_work_on_digits(name):
    _, logits = build(name, DIGITS)(torch.randn(2, *DIGITS))
    assert logits.shape == (2, 10)


@pytest.mark.parametrize("name", ["fedavg_cnn", "feddw_cnn", "vgg11", *MAPPED])
def test_too_small_images_are_refused_by_key(name):
    with pytest.raises(ConfigError, match=rf"task\.model={name} needs images .* 8x8"):
        build(name, DIGITS)


def test_unknown_model_lists_the_options():
    with pytest.raises(ConfigError, match=r"task\.model='lenet' is unknown; allowed: .*vgg11"):
        build("lenet")


@pytest.mark.parametrize(("stem", "least"), [("cifar", 9), ("imagenet", 33)])
def test_batch_norm_wants_two_values_of_one_image(stem, least):
    """At the last layer one position is left of smaller ones; a last batch may be of one image."""
    model = build("resnet18_bn", (3, least, least), stem=stem)
    assert model(torch.randn(1, 3, least, least))[1].shape == (1, 10)
    with pytest.raises(ConfigError, match=f"resnet18_bn needs images of at least {least}x"):
        build("resnet18_bn", (3, least - 1, least - 1), stem=stem)


def test_unknown_or_misplaced_stem_is_refused():
    with pytest.raises(
        ConfigError, match=r"task\.stem='tiny' is unknown; allowed: cifar, imagenet"
    ):
        build("resnet18_gn", stem="tiny")
    with pytest.raises(ConfigError, match=r"task\.model=mlp has none"):
        build("mlp", stem="cifar")


def test_stem_is_refused_for_texts():
    with pytest.raises(ConfigError, match=r"task\.stem=cifar .* task\.model=bilstm has none"):
        build("bilstm", stem="cifar")


# ---- FedDW's networks ----------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dropout"), [(MNIST, 0.5), (CIFAR, 0.0)])
def test_feddw_cnn_is_the_network_of_its_code(shape, dropout):
    """Facts 3.3, layer by layer; where each layer draws its dropout from the same numbers."""
    model = build("feddw_cnn", shape)
    inputs = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    tensors = iter(model.parameters())
    torch.manual_seed(1)
    found = model(inputs)
    torch.manual_seed(1)
    maps = F.relu(F.max_pool2d(F.conv2d(inputs, next(tensors), next(tensors)), 2))
    maps = F.dropout(F.conv2d(maps, next(tensors), next(tensors)), dropout)
    maps = F.relu(F.max_pool2d(maps, 2)).flatten(1)
    features = F.linear(
        F.relu(F.linear(maps, next(tensors), next(tensors))), next(tensors), next(tensors)
    )
    torch.testing.assert_close(found[0], features)
    torch.testing.assert_close(found[1], F.linear(features, next(tensors), next(tensors)))


MAPPING = 256 + 256 * 128 + 128  # without the weights of its first layer, which depend on the body
HEAD = 128 * 100 + 100


def test_feddw_resnet18_has_torchvisions_parameters_another_stem_and_biases():
    """torchvision's 11,689,512 has a linear layer for 1,000 classes and a 7x7 stem."""
    body = 11_689_512 - (512 * 1000 + 1000) - 3 * 64 * 49 + 3 * 64 * 9
    biases = 64 + 4 * 64 + 5 * 128 + 5 * 256 + 5 * 512  # of every convolution
    model = build("feddw_resnet18", classes=100)
    assert count(model) == body + biases + 512 * 256 + MAPPING + HEAD
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 20
    assert all(layer.bias is not None for layer in convolutions)


def test_feddw_shufflenet_has_the_parameters_of_its_table():
    found = count(build("feddw_shufflenet", classes=100))
    assert found == shufflenet_body() + 800 * 256 + MAPPING + HEAD


def test_feddw_mobilenetv2_has_the_parameters_of_half_the_widths():
    """The same arithmetic gives MobileNetV2's published count at full width."""
    assert mobilenetv2_body(shrink=1) + 1280 * 1000 + 1000 == 3_504_872
    found = count(build("feddw_mobilenetv2", classes=100))
    assert found == mobilenetv2_body(shrink=2) + 640 * 256 + MAPPING + HEAD


@pytest.mark.parametrize(
    ("name", "extracted"),
    [("feddw_resnet18", 512), ("feddw_shufflenet", 800), ("feddw_mobilenetv2", 640)],
)
def test_feddw_networks_leave_4x4_pixels_and_map_them(name, extracted):
    body = build(name).eval().body
    *extractor, pool, _, _, _, _ = body
    assert isinstance(pool, nn.AdaptiveAvgPool2d)
    with torch.no_grad():
        assert nn.Sequential(*extractor)(torch.randn(1, *CIFAR)).shape == (1, extracted, 4, 4)
    first, activation, last = body[-3:]
    assert (first.in_features, first.out_features) == (extracted, 256)
    assert isinstance(activation, nn.ReLU)
    assert (last.in_features, last.out_features) == (256, 128)


def test_shuffling_brings_the_groups_together():
    unit = ShuffleUnit(16, 16, halve=False, groups=2).eval()
    for parameter in unit.parameters():
        nn.init.ones_(parameter)  # so that no activation is 0
    images = torch.rand(1, 16, 4, 4, requires_grad=True)
    unit(images)[:, :8].sum().backward()
    assert images.grad[:, 8:].abs().amax() > 0


def test_a_unit_that_halves_keeps_its_pooled_inputs_beside_what_is_new():
    images = torch.rand(1, 8, 4, 4)
    outputs = ShuffleUnit(8, 24, halve=True, groups=2).eval()(images)
    assert outputs.shape == (1, 24, 2, 2)
    assert torch.equal(outputs[:, 16:], F.avg_pool2d(images, 3, 2, 1))


@pytest.mark.parametrize("name", MAPPED)
def test_the_smallest_image_trains_alone(name):
    """BatchNorm refuses to train on one value a channel."""
    model = build(name, (3, 9, 9)).train()
    _, logits = model(torch.randn(1, 3, 9, 9))
    assert logits.isfinite().all()
    with pytest.raises(ConfigError, match="at least 9x9 pixels and these are 8x9"):
        build(name, (3, 8, 9))


# ---- the recurrent network -----------------------------------------------------------------------


def test_bilstm_parameters():
    one_direction = 4 * 128 * (128 + 128) + 2 * 4 * 128
    expected = 10_000 * 128 + 2 * one_direction + (256 * 128 + 128) + (128 * 128 + 128)
    found = build("bilstm", (200,), classes=2, vocabulary_size=10_000)
    assert count(found) == expected + (128 * 2 + 2)


def one_way(lstm, words, suffix):
    """The equations of a cell, step by step: words (T, 128) to outputs (T, 128)."""
    keys = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    inputs, hidden, bias, more = (getattr(lstm, key + suffix) for key in keys)
    state, cell, outputs = torch.zeros(128), torch.zeros(128), []
    for word in words:
        let_in, forget, new, let_out = (inputs @ word + hidden @ state + bias + more).chunk(4)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(let_in) * torch.tanh(new)
        state = torch.sigmoid(let_out) * torch.tanh(cell)
        outputs.append(state)
    return torch.stack(outputs)


@torch.no_grad()
def test_bilstm_reads_both_ways_and_averages_over_time_padding_included():
    model = build("bilstm", classes=2).eval()
    body = model.body
    tokens = torch.tensor([[1, 7, 30, 7, 2, 0, 0, 0], [1, 4, 3, 9, 12, 40, 41, 49]])
    features, _ = model(tokens)
    for text, found in zip(tokens, features, strict=True):
        words = body.embedding.weight[text]
        there = one_way(body.lstm, words, "")
        back = one_way(body.lstm, words.flip(0), "_reverse").flip(0)
        steps = torch.cat([there, back], dim=1) @ body.fc1.weight.T + body.fc1.bias
        expected = body.fc2.weight @ steps.clamp(min=0).mean(dim=0) + body.fc2.bias
        torch.testing.assert_close(found, expected)


def test_bilstm_gives_what_it_would_on_all_texts_at_once():
    """On a CPU it takes 64 at a time; 150 make two parts and a rest."""
    model = build("bilstm", classes=2)
    model.body.dropout.p = 0.0
    tokens = torch.randint(50, (150, 20), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(150, 128, generator=torch.Generator().manual_seed(1))
    found, grads = [], []
    for features in (model.body(tokens), model.body._features(tokens)):
        found.append(features)
        grads.append(torch.autograd.grad((features * weights).sum(), list(model.body.parameters())))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_bilstm_trains_under_autocast_as_without():
    tokens, labels = some_inputs("bilstm", 8), torch.arange(8) % 2
    model = build("bilstm", classes=2).eval()  # eval: without dropout the two can be compared
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(tokens)[1], labels)
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    difference = (grads[0] - grads[1]).norm() / grads[0].norm()
    assert 0 < difference < 0.05


def test_channels_last_does_not_touch_bilstm():
    tokens = some_inputs("bilstm")
    expected = build("bilstm").eval()(tokens)[1]
    model = build("bilstm").to(memory_format=torch.channels_last).eval()
    assert torch.equal(model(tokens)[1], expected)


def test_models_and_inputs_of_different_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"bilstm is for texts .* \(3, 32, 32\): .*resnet8"):
        build("bilstm", CIFAR)
    with pytest.raises(ConfigError, match=r"resnet8 is for images .* \(20,\): .* bilstm"):
        build("resnet8", TEXT)
    with pytest.raises(ConfigError, match=r"bilstm needs task\.vocabulary_size"):
        build("bilstm", vocabulary_size=None)
