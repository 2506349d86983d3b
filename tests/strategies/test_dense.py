"""DENSE: its losses by hand, its images and views, and its epochs."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedhet.strategies import dense
from fedhet.strategies.base import Reply
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.dense import (
    DENSE,
    Generator,
    Views,
    disagreement,
    distil,
    divergence,
    generate,
    statistics_gaps,
)
from fedhet.strategies.ensemble import AllClients, Ensemble, MeanLogits, mean_logits
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import CLASS_COUNTS, COUNTS
from tests.refused import refused
from tests.strategies.sides import parts_of

SHAPE = (1, 8, 8)
SMALL = {"steps": 3, "images": 12, "latent": 5, "width": 4, "generator_lr": 0.01}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_divergence_by_hand():
    """Teacher (3/4, 1/4), student (1/2, 1/2); at tau 2 the teacher has sqrt 3 / (sqrt 3 + 1).

    KL(T || S) is infinite where S excludes a class of T, and finite the other way round.
    """
    teacher, even = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert divergence(even, teacher).tolist() == pytest.approx([expected], rel=1e-5)
    p = math.sqrt(3) / (math.sqrt(3) + 1)
    warm = 4 * (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))
    assert divergence(even, teacher, 2.0).tolist() == pytest.approx([warm], rel=1e-5)
    sure = torch.tensor([[200.0, 0.0]])
    assert float(divergence(sure, even)) == pytest.approx(100 - math.log(2))
    assert float(divergence(even, sure)) == pytest.approx(math.log(2))


def test_the_adversarial_loss_counts_rows_whose_classes_differ():
    """Two of three rows agree, however far apart; the mean is over all three, without NaN."""
    teacher = torch.tensor([[5.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    student = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.5, 0.0]], requires_grad=True)
    found = disagreement(student, teacher)
    each = divergence(student, teacher).detach()
    assert found.item() == pytest.approx(-each[1].item() / 3)
    found.backward()
    assert student.grad[[0, 2]].abs().max() == 0
    assert student.grad[1].abs().min() > 0
    sure = torch.tensor([[500.0, 0.0]], requires_grad=True)  # a probability that rounds to 0
    other = torch.tensor([[0.0, 1.0]], requires_grad=True)
    disagreement(other, sure).backward()
    assert sure.grad.tolist() == [[0.0, 0.0]]
    assert other.grad.isfinite().all()


class Normed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(1, affine=False)
        self.hidden = nn.Linear(64, 6, bias=False)
        self.second = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs):
        features = self.second(self.hidden(self.first(inputs).flatten(1)))
        features = self.dropout(features.relu())
        return features, self.head(features)


def test_statistics_gaps_by_hand():
    """(2, 0) with variances (4, 1) against running (5, 4) and (4, 1), then (2, 4) and (4, 6)."""
    layer = nn.Sequential(nn.BatchNorm1d(2)).eval()
    inputs = torch.tensor([[0.0, 1.0], [4.0, -1.0]], requires_grad=True)
    layer[0].running_mean.copy_(torch.tensor([5.0, 4.0]))
    layer[0].running_var.copy_(torch.tensor([4.0, 1.0]))
    other = {"0.running_mean": torch.tensor([2.0, 4.0]), "0.running_var": torch.tensor([4.0, 6.0])}
    with statistics_gaps(layer) as gaps:
        layer(inputs)
        torch.func.functional_call(layer, other, (inputs,))
    assert [float(gap.detach()) for gap in gaps] == pytest.approx([5.0 + 0.0, 4.0 + 5.0])
    gaps[0].backward()
    assert inputs.grad.abs().max() > 0
    layer(inputs)
    assert len(gaps) == 2  # the hooks are gone


def test_the_generator_has_the_paper_s_layers_and_a_reset_draws_them_anew():
    """For 28 x 28: 256 numbers to 128 x 7 x 7, then 128, 64 and 1 channels."""
    for shape in [(1, 8, 8), (2, 9, 14)]:
        images = Generator(7, 3, shape)(torch.randn(4, 7, generator=seeded(1)))
        assert images.shape == (4, *shape)
        assert 0 < images.min() < images.max() < 1
    maker, drawn = Generator(256, 64, (1, 28, 28)), []
    linear = 256 * 128 * 49 + 128 * 49
    convolutions = 9 * (128 * 128 + 128 * 64 + 64 * 1) + 1
    normalisations = 2 * (128 + 128 + 64)
    assert sum(p.numel() for p in maker.parameters()) == linear + convolutions + normalisations
    for seed in (3, 3, 4):
        maker.reset(seeded(seed))
        drawn.append(torch.nn.utils.parameters_to_vector(maker.parameters()))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert maker.linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert maker.blocks[0].weight.mean().item() == pytest.approx(1.0, abs=0.02)
    assert not maker.linear.bias.any()


@pytest.mark.parametrize(
    ("padding", "flip", "kinds"), [(1, True, 18), (1, False, 9), (0, True, 2), (0, False, 1)]
)
def test_a_view_is_a_cut_or_a_mirrored_cut(padding, flip, kinds):
    """Of the image with a black border, drawn for each image; a pixel p becomes -2 + 5 p."""
    images = torch.rand(60, 2, 3, 4, generator=seeded(0)) + 0.1
    views = Views(torch.tensor(-2.0), torch.tensor(3.0), padding, flip, seeded(1))
    bordered, chosen = -2 + 5 * F.pad(images, (padding,) * 4), set()
    seen = views(images.requires_grad_())
    assert seen.requires_grad
    for image, view in zip(bordered, seen, strict=True):
        cuts = {
            (top, left, flipped): cut.flip(2) if flipped else cut
            for top, left in itertools.product(range(2 * padding + 1), repeat=2)
            for cut in [image[:, top : top + 3, left : left + 4]]
            for flipped in {False, flip}
        }
        (found,) = [key for key, cut in cuts.items() if torch.equal(cut, view)]
        chosen.add(found)
    assert 2 / 3 * kinds < len(chosen) <= kinds


def replies_of(network: ServerModel) -> list[Reply]:
    x, generator = network.model.state_dict(), seeded(11)
    own = {name for name, _ in network.model.named_buffers()}
    replies = []
    for client in range(3):
        update, buffers = {}, {}
        for name, value in x.items():
            if value.is_floating_point():
                change = torch.rand(value.shape, generator=generator)
                (buffers if name in own else update)[name] = change
        payloads = {CLASS_COUNTS: {COUNTS: torch.tensor([5.0, 0.0, float(client)])}}
        replies.append(Reply(client, 5 + client, 1, 0.1, update, payloads, buffers=buffers))
    return replies


def normed(dropout: float = 0.0) -> ServerModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Normed(dropout)
    return ServerModel(model, SHAPE, 3, torch.tensor([-1.0]), torch.tensor([2.0]))


def teacher_of(network: ServerModel) -> MeanLogits:
    return mean_logits(network, replies_of(network), masked=False)


def views_of(network: ServerModel) -> Views:
    low, high = network.black[:, None, None], network.white[:, None, None]
    return Views(low, high, 0, False, seeded(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.7, 0.2, 3.0)]
)
def test_the_images_are_those_of_the_lowest_loss(weights):
    """Each step's loss is computed again from what the teacher was shown, with no crop."""
    names = ("one_hot", "bn", "adversarial")
    given = {**SMALL, "steps": 10, "generator_lr": 0.1, **dict(zip(names, weights, strict=True))}
    how = DENSE.unbound(given)
    network = normed()
    teacher = teacher_of(network)
    shown = []
    hook = teacher.register_forward_pre_hook(lambda _, inputs: shown.append(inputs[0].detach()))
    student = normed().model.eval()
    images, losses = generate(Generator(5, 4, SHAPE), teacher, student, views_of(network), how)
    hook.remove()
    labels_from = seeded(0)  # draws as generate() does: the generator's numbers, noise, labels
    Generator(5, 4, SHAPE).reset(labels_from)
    torch.randn(12, 5, generator=labels_from)
    labels = torch.randint(3, (12,), generator=labels_from)
    totals = []
    for inputs in shown:
        with statistics_gaps(teacher) as gaps:
            wanted = teacher(inputs)[1]
        assert len(gaps) == 2 * 3  # layers, clients
        against = disagreement(student(inputs)[1], wanted)
        parts = F.cross_entropy(wanted, labels), sum(gaps), against
        totals.append(sum(w * part.item() for w, part in zip(weights, parts, strict=True)))
    best = min(range(10), key=totals.__getitem__)
    torch.testing.assert_close(-1 + 3 * images, shown[best])
    total = sum(w * losses[name] for w, name in zip(weights, names, strict=True))
    assert total == pytest.approx(totals[best], rel=1e-4, abs=1e-6)
    assert totals[best] < totals[0]  # training helps
    if weights[1]:
        assert totals[best] < totals[-1]  # but not in every step


def distilled(student: nn.Module, network: ServerModel, pool: torch.Tensor, **given):
    how = DENSE.unbound(given)
    optimizer = SGD(momentum=how.momentum)
    optimizer.start(dict(student.named_parameters()), how.lr)
    return distil(student, teacher_of(network), pool, views_of(network), optimizer, how)


def test_distillation_by_hand():
    """One batch of plain SGD: student - lr * gradient of the mean divergence at tau."""
    network = normed()
    pool = torch.randint(256, (6, *SHAPE), generator=seeded(2), dtype=torch.uint8)
    student, by_hand = (Normed() for _ in range(2))
    by_hand.load_state_dict(student.state_dict())
    how = {"batch_size": 8, "lr": 0.1, "momentum": 0.0, "temperature": 3.0}
    figures = distilled(student, network, pool, **how)
    inputs = -1 + 3 * pool.float() / 255
    with torch.no_grad():
        wanted = teacher_of(network)(inputs)[1]
    found = F.log_softmax(by_hand.train()(inputs)[1] / 3, 1)
    each = 9 * (F.softmax(wanted / 3, 1) * (F.log_softmax(wanted / 3, 1) - found)).sum(1)
    each.mean().backward()
    for name, value in by_hand.named_parameters():
        moved = value.detach() - 0.1 * value.grad
        torch.testing.assert_close(student.get_parameter(name).detach(), moved)
    assert figures["divergence"] == pytest.approx(float(each.detach().mean()), rel=1e-5)
    torch.testing.assert_close(student.second.running_var, by_hand.second.running_var)
    student, pool = Normed(), torch.zeros(5, *SHAPE, dtype=torch.uint8)
    distilled(student, network, pool, batch_size=2, lr=0.1)
    assert int(student.second.num_batches_tracked) == 2  # a last batch of one is left out


def aggregate(network: ServerModel, replies: list[Reply], **options) -> dict[str, torch.Tensor]:
    given = {**SMALL, "epochs": 3, "crop_padding": 1, **options}
    aggregator = parts_of(DENSE, **given).aggregator
    aggregator.bind(network)
    sent = {name: value.clone() for name, value in network.model.state_dict().items()}
    params = {name: sent[name] for name in replies[0].update}
    found = aggregator(params, replies)
    after = network.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in sent.items())
    assert found.keys() == replies[0].update.keys() | replies[0].buffers.keys()
    return {name: sent[name] + change for name, change in found.items()}


@pytest.mark.parametrize("initial", ["average", "server"])
def test_without_an_epoch_the_student_stays_at_its_start(initial):
    """The plain mean of the clients, statistics too, or x."""
    network = normed()
    replies = replies_of(network)
    for name, value in aggregate(network, replies, epochs=0, initial=initial).items():
        changes = [{**reply.update, **reply.buffers}[name] for reply in replies]
        mean = torch.stack(changes).mean(0) if initial == "average" else 0.0
        torch.testing.assert_close(value, network.model.state_dict()[name] + mean)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
def test_each_epoch_adds_its_images_to_the_pool_and_the_last_student_is_the_result(masked):
    """The pool holds 8 bits. Class 1 has no holder: a masked teacher's logit of it is 0."""
    made, pools, targets, students = [], [], [], []

    def keep_images(*given):
        found = generate(*given)
        made.append(found[0])
        return found

    def keep_the_rest(student, teacher, pool, *others):
        figures = distil(student, teacher, pool, *others)
        pools.append(pool.clone())
        targets.append(teacher(torch.randn(4, *SHAPE, generator=seeded(0)))[1])
        students.append({name: value.clone() for name, value in student.state_dict().items()})
        return figures

    network = normed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "distil", keep_the_rest)
        patch.setattr(dense, "generate", keep_images)
        found = aggregate(network, replies_of(network), masked_teacher=masked)
    assert [len(pool) for pool in pools] == [12, 24, 36]
    assert pools[-1].dtype == torch.uint8
    assert (pools[-1].float() / 255 - torch.cat(made)).abs().max() <= 0.5 / 255 + 1e-6
    assert bool((targets[0][:, 1] == 0).all()) == masked
    for name, value in found.items():
        torch.testing.assert_close(value, students[-1][name])
        assert not torch.allclose(value, students[0][name])


@pytest.mark.slow
def test_all_random_numbers_follow_from_the_seed():
    """Dropout too; torch's own generator stays as it was."""
    network = normed(dropout=0.5)
    replies = replies_of(network)
    before = torch.get_rng_state()
    first = aggregate(network, replies, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    second, third = aggregate(network, replies, seed=1), aggregate(network, replies, seed=2)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not any(torch.equal(value, third[name]) for name, value in first.items())


def test_inputs_that_are_no_images_and_networks_without_logits_are_refused():
    with refused("(200,)"):
        parts_of(DENSE).aggregator.bind(ServerModel(Normed(), (200,), 2))
    network = normed()
    network.model.classifies = False
    for part, key in ((parts_of(DENSE).aggregator, "dense"), (AllClients(True), "ensemble")):
        with refused(f"strategy={key}", "Normed"):
            part.bind(network)


def test_clients_send_class_counts_only_if_masked():
    for masked in (True, False):
        student, clients = parts_of(DENSE, masked_teacher=masked), parts_of(Ensemble, masked=masked)
        assert (CLASS_COUNTS in student.client_sides) == masked
        assert (CLASS_COUNTS in clients.client_sides) == masked
        assert student.aggregator.how.masked_teacher == clients.output.masked == masked
