"""Projections against their definitions, and what the server refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedhet.strategies.base import LocalContext, LocalSummary, RefusedReplyError, Reply
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.fusion import input_statistics as statistics
from fedhet.strategies.fusion.maecho_iterates import Inputs
from fedhet.strategies.fusion.projections import ProjectionClient, Projections
from tests.federation import TensorBatches
from tests.refused import refused
from tests.strategies.sides import check_side, client_side, server_side

SUMMARY = LocalSummary(num_examples=1, num_steps=1, lr_sum=0.1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Small(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=bias)
        self.body = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(27, 4, bias=False))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        features = self.body(inputs)
        return features, self.head(features)


def sent_by(side: ProjectionClient, model: nn.Module, inputs: torch.Tensor):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    labels = torch.arange(len(inputs)) % 3
    data = TensorBatches(inputs, labels, num_classes=3)
    context = LocalContext(model, state, state, {}, {}, data, F.cross_entropy, 1, 4, 0.1)
    context.generator.manual_seed(0)
    return side.end(context, SUMMARY)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda bias: nn.Conv2d(2, 3, 3, bias=bias), (4, 2, 8, 8)),
        (lambda bias: nn.Conv2d(2, 3, 3, 2, padding=1, dilation=2, bias=bias), (4, 2, 9, 9)),
        (
            lambda bias: nn.Conv2d(2, 3, (2, 3), (1, 2), (3, 1), (2, 1), bias=bias).to(
                memory_format=torch.channels_last
            ),
            (4, 2, 9, 7),
        ),
        (lambda bias: nn.Linear(5, 3, bias=bias), (2, 7, 5)),
    ],
)
def test_rows_times_weight_is_the_layer(make, shape, bias):
    layer, inputs = make(bias), draw(*shape)
    weight, expected = layer.weight.flatten(1), layer(inputs)
    if bias:
        weight = torch.cat([weight, layer.bias[:, None]], dim=1)
    if expected.dim() == 4:
        expected = expected.flatten(2).transpose(1, 2)
    rows = statistics.rows_of(layer, inputs)
    torch.testing.assert_close(rows @ weight.T, expected.flatten(0, 1))
    if isinstance(layer, nn.Conv2d):
        last = inputs.contiguous(memory_format=torch.channels_last)
        assert torch.equal(statistics.rows_of(layer, last), rows)


def test_mean_rows_are_patches_of_the_mean_image_at_stride_2_without_padding():
    layer, inputs = nn.Conv2d(2, 3, 3, padding=1, bias=False), draw(4, 2, 6, 6)
    mean, starts = inputs.mean(0), (0, 2)
    expected = [mean[:, i : i + 3, j : j + 3].flatten() for i in starts for j in starts]
    torch.testing.assert_close(statistics.mean_rows(layer, inputs), torch.stack(expected))
    small = draw(4, 2, 2, 2)  # one patch, of all that there is in a border of zeros
    expected = nn.functional.pad(small.mean(0), [1, 0, 1, 0]).flatten()[None]
    torch.testing.assert_close(statistics.mean_rows(layer, small), expected)


@pytest.mark.parametrize(("bias", "z"), [(True, 0.1), (False, 1.0), (True, 10.0)])
def test_the_ridge_form_is_its_formula_in_every_layer(bias, z):
    """P = X^T (X X^T + n z m I)^-1 X, m the mean eigenvalue of X^T X / n."""
    model, inputs = Small(bias).eval(), draw(9, 2, 5, 5)
    found = sent_by(client_side(Projections, z=z), model, inputs)
    expected = {
        "body.0.weight": statistics.rows_of(model.body[0], inputs),
        "body.3.weight": model.body[:3](inputs),
        "head.weight": statistics.rows_of(model.head, model.body(inputs)),
    }
    assert found["projections"].keys() == expected.keys()
    for name, rows in expected.items():
        rows = rows.detach().double()
        scale = z * rows.square().sum() / len(rows) / rows.shape[1]
        inverse = torch.linalg.inv(rows @ rows.T + len(rows) * scale * torch.eye(len(rows)))
        factors = found["projections"][name].double()
        torch.testing.assert_close(factors @ factors.T, rows.T @ inverse @ rows, atol=1e-5, rtol=0)
        sent = found["projection_scales"][name].double()
        torch.testing.assert_close(sent, scale, rtol=1e-5, atol=0)
    assert found["class_counts"]["counts"].tolist() == [3.0, 3.0, 3.0]


def test_the_damped_projector_without_damping_and_by_hand():
    """so = 1: N = I - X^T (X X^T + zeta I)^-1 X, the ridge form over its rows.

    x = (1, 0), zeta 1, so .5: k = x, N = I - x x^T / 4; then k = .75 x: less .5 .5625 / 1.75.
    """
    rows = draw(6, 10).double()
    projector = statistics.DampedProjector(10, 1.0, 0.3, torch.device("cpu"))
    projector.null = projector.null.double()
    projector.add(rows)
    expected = rows.T @ torch.linalg.inv(rows @ rows.T + 0.3 * torch.eye(6)) @ rows
    torch.testing.assert_close(torch.eye(10).double() - projector.null, expected)
    projector = statistics.DampedProjector(2, 0.5, 1.0, torch.device("cpu"))
    for first in (0.75, 0.75 - 0.5 * 0.5625 / 1.75):
        projector.add(torch.tensor([[1.0, 0.0]]))
        assert projector.null.diagonal().tolist() == pytest.approx([first, 1.0])


def test_the_damped_form_at_a_client():
    """One batch of all examples: a step for its mean, for the convolution one for each patch."""
    model, inputs = Small(bias=False).eval(), draw(9, 2, 5, 5)
    found = sent_by(client_side(Projections, form="damped"), model, inputs)["projections"]
    mean = model.body[:3](inputs).mean(0)
    expected = 0.5 * torch.outer(mean, mean) / (0.01**0.8 + mean @ mean)
    factors = found["body.3.weight"]
    torch.testing.assert_close(factors @ factors.T, expected, atol=1e-6, rtol=1e-4)
    assert factors.shape[1] == 1
    assert found["body.0.weight"].shape[1] <= 4  # patches of a 5 x 5 image at stride 2


def test_rank_by_energy_by_hand():
    """Eigenvalues .9, .3, .1: squares .81, .09, .01 of .91; .989 of it are two."""
    vectors = torch.linalg.qr(draw(5, 3).double()).Q
    found = statistics.Spectrum(vectors, torch.tensor([0.9, 0.3, 0.1]).double())
    ranks = [found.factor(None, energy).shape[1] for energy in (0.5, 0.89, 0.98, 0.99, 1.0)]
    assert ranks == [1, 1, 2, 3, 3]
    assert found.factor(2, 1.0).norm(dim=0).square().tolist() == pytest.approx([0.9, 0.3])
    assert found.factor(9, 1.0).shape == (5, 3)


def test_a_second_moment_of_several_blocks_is_its_spectrum():
    """600 inputs are three blocks of columns; U diag(values) U^T is X^T X / n."""
    rows = draw(40, 600)
    moment = statistics.SecondMoment(600, torch.device("cpu"))
    for part in rows.split(17):
        moment.add(part)
    found, expected = moment.spectrum(), rows.T.double() @ rows.double() / 40
    again = (found.vectors * found.values) @ found.vectors.T
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
    assert float(moment.mean_eigenvalue()) == pytest.approx(float(expected.trace()) / 600, 1e-6)


def test_a_sketch_of_low_rank_rows_is_exact():
    """Rank 4 in 50 inputs, a sketch of 10: A and its trace come out."""
    rows = draw(200, 4) @ draw(4, 50, seed=1)
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    sketched = statistics.SketchedMoment(50, 10, generator, cpu)
    exact = statistics.SecondMoment(50, cpu)
    for part in rows.split(33):
        sketched.add(part)
        exact.add(part)
    found, expected = sketched.spectrum(), exact.spectrum()
    torch.testing.assert_close(found.values[:4], expected.values[:4], rtol=1e-4, atol=0)
    assert found.values[4:].max() < 1e-4 * found.values[0]
    again = (found.vectors * found.values) @ found.vectors.T
    torch.testing.assert_close(again, exact.sum / 200, rtol=0, atol=1e-3 * float(found.values[0]))
    assert float(sketched.mean_eigenvalue()) == pytest.approx(float(exact.mean_eigenvalue()), 1e-5)


def test_wide_layers_are_sketched_and_each_layer_may_have_a_rank():
    model, inputs = Small(), draw(40, 2, 5, 5)
    sides = client_side(Projections, rank=8, sketch_above=20), client_side(Projections, rank=8)
    wide, exact = (sent_by(side, model, inputs)["projections"] for side in sides)
    assert wide["body.3.weight"].shape == (27, 8)
    sketched, whole = (f["body.3.weight"] @ f["body.3.weight"].T for f in (wide, exact))
    assert 0 < (sketched - whole).norm() < 0.5 * whole.norm()
    assert torch.equal(wide["body.0.weight"], exact["body.0.weight"])  # 19 wide: as it is
    ranked = sent_by(client_side(Projections, rank=[2, None, 3]), model, inputs)["projections"]
    widths = {name: values.shape[1] for name, values in ranked.items()}
    assert widths.pop("body.3.weight") > 3  # null: by energy
    assert widths == {"body.0.weight": 2, "head.weight": 3}


@pytest.mark.parametrize(
    ("side", "why"),
    [
        (
            client_side(Projections, rank=[8, None, 8], sketch_above=20),
            "body.3.weight",
        ),
        (
            client_side(Projections, rank=[2, 2]),
            "rank=[2, 2]",
        ),
        (client_side(Projections, sketch_above=20), "strategy.projections.rank"),
        (client_side(Projections, form="damped", rank=2, sketch_above=20), "form=ridge"),
    ],
)
def test_what_cannot_be_projected_is_refused_before_round_1(side, why):
    check_side(client_side(Projections, rank=[None, 8, None], sketch_above=20), Small(), SGD())
    check_side(client_side(Projections, rank=2, sketch_above=20), Small(), SGD())
    with refused(why):
        check_side(side, Small(), SGD())
    with refused("0.weight", "2 groups"):
        check_side(client_side(Projections), nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), SGD())
    reflecting = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    with refused("padding_mode='reflect'"):
        check_side(client_side(Projections), nn.Sequential(reflecting), SGD())
    half = nn.Sequential(nn.Linear(4, 4))
    half[0].bias.requires_grad_(False)
    with refused("0.bias"):
        client_side(Projections).check(half, SGD(), ["0.weight"])


def replied(projection: torch.Tensor, scale: float = 1.0) -> Reply:
    scales = {"body.weight": torch.ones(()), "head.weight": torch.tensor(scale)}
    payloads = {
        "projections": {"body.weight": projection, "head.weight": torch.eye(3)[:, :1]},
        "projection_scales": scales,
        "class_counts": {"counts": torch.tensor([1.0, 2.0])},
    }
    return Reply(0, 3, 1, 0.1, {}, payloads)


@pytest.mark.parametrize(
    ("projection", "why"),
    [
        (torch.zeros(4, 5), "(4, 5)"),
        (torch.zeros(4, 0), "(4, 0)"),
        (2 * torch.eye(4)[:, :2], "eigenvalue of 4"),
        (torch.ones(4, 2), "eigenvalue of 8"),
    ],
)
def test_projections_with_too_many_columns_or_wrong_eigenvalues_and_class_counts_are_refused(
    projection, why
):
    server, good = server_side(Projections), torch.eye(4)[:, :2]
    server.init({"body.weight": torch.zeros(3, 4), "head.weight": torch.zeros(2, 3)})
    server.check(replied(good))
    with refused(why, kind=RefusedReplyError):
        server.check(replied(projection))
    wrong = replied(good)
    wrong.payloads["class_counts"]["counts"] += 1
    with refused("sum to 5", "has 3", kind=RefusedReplyError):
        server.check(wrong)


@pytest.mark.parametrize(
    ("form", "scale", "valid"),
    [
        ("ridge", 1e-38, True),
        ("ridge", 0.0, False),  # no second moment comes back: RegMean's step would end the run
        ("ridge", -1.0, False),  # a negative one would
        ("damped", 1.0, False),
    ],
)
def test_scales_that_no_client_of_the_form_has_are_refused(form, scale, valid):
    server = server_side(Projections, form=form)
    server.init({"body.weight": torch.zeros(3, 4), "head.weight": torch.zeros(2, 3)})
    reply = replied(torch.eye(4)[:, :2], scale)
    reply.payloads["projection_scales"]["body.weight"] *= form == "ridge"
    if valid:
        return server.check(reply)
    with refused(f"{scale:g}", f"form={form}", kind=RefusedReplyError):
        server.check(reply)


@pytest.mark.parametrize("z", [1e-9, 1.0])
@pytest.mark.parametrize("inputs", [torch.zeros(2, 3), torch.zeros(0, 3)])
def test_a_layer_without_inputs_or_calls_has_a_scale_above_zero_and_no_projection(inputs, z):
    sketch = statistics.SketchedMoment(3, 2, torch.Generator(), torch.device("cpu"))
    for statistic in (statistics.SecondMoment(3, torch.device("cpu")), sketch):
        statistic.add(inputs)
        factor, scale = client_side(Projections, z=z)._projection(statistic, 2)
        assert scale > 0.0
        assert not factor.any()


def test_equal_inputs_are_merged_by_hand_and_others_are_not():
    """Columns 0 and 2 are equal, 1 is not: (3, 4) becomes sqrt(2) of it, and comes back halved."""
    rows = torch.tensor([[3.0, 1.0, 3.0], [4.0, 1.0, 4.0]])
    inputs = Inputs.of(rows)
    folded = inputs.fold(rows)
    torch.testing.assert_close(folded @ folded.T, rows @ rows.T)
    assert sorted(folded.norm(dim=0).tolist()) == pytest.approx([2**0.5, 50**0.5])
    back = inputs.unfold(inputs.fold(torch.tensor([[5.0, 2.0, 1.0]])))
    torch.testing.assert_close(back, torch.tensor([[3.0, 2.0, 3.0]]))
    rows = draw(5, 8)
    rows[:, 3] = rows[:, 6] + 1e-4  # nearly equal
    rows[:, 1], rows[:, 2] = rows[:, 4].flip(0), 0.0  # the same numbers in another order
    inputs = Inputs.of(rows)
    assert inputs.group is None
    assert inputs.fold(rows) is inputs.unfold(rows) is rows
