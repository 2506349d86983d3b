"""Tasks on a user's own data and model: what their functions may give, and what is refused."""

import copy
import random
from collections import OrderedDict, deque
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from pandas import DataFrame
from PIL import Image
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedhet.tasks import Functions, build_task
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.examples import IGNORED, Examples
from fedhet.tasks.losses import loss_of
from fedhet.tasks.models import build_model
from fedhet.tasks.models.attributes import PlainAttributes
from fedhet.tasks.models.wrapped import WrappedModel
from fedhet.tasks.own_data import refuse_unread_partition
from fedhet.tasks.references import load_reference, name_of
from tests.refused import refused

OWN = {"name": "own", "inputs": "own", "data": "a:b", "model": "a:b"}
IID = {"name": "iid"}
DIRICHLET = {"name": "dirichlet", "alpha": 0.3, "min_size": 2}


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def everything():
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=90)
    inputs = rng.normal(size=(90, 4)).astype("float32")
    return (inputs[:60], labels[:60]), (inputs[60:], labels[60:])


def task_of(data, model=network, partition=IID, clients=3, test_data=None, loss=None, **changes):
    config = OWN | changes
    loss = loss or loss_of(config.get("kind", "classification"), None)
    functions = Functions(data, model, test_data, loss)
    return build_task(config, partition, seed=0, num_clients=clients, functions=functions)


# ---- the model -----------------------------------------------------------------------------------


class Sandwich(nn.Module):
    """The classifier is in the middle of the list of modules, and frozen layers around it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.embed.requires_grad_(False)
        self.fc = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs):
        return self.fc(self.norm(torch.tanh(self.embed(inputs))))


def test_a_wrapped_model_computes_the_same_and_gives_the_classifiers_input():
    torch.manual_seed(0)
    inputs, plain = torch.randn(5, 4), Sandwich().eval()
    expected = plain(inputs)
    hidden = plain.norm(torch.tanh(plain.embed(inputs)))
    names = {name: value for name, value in plain.state_dict().items() if "embed" not in name}
    model = WrappedModel(copy.deepcopy(plain)).eval()
    features, logits = model(inputs)
    assert torch.equal(logits, expected)
    assert torch.equal(features, hidden)
    assert torch.equal(model.head(features), expected)
    assert {name.partition(".")[0] for name in model.state_dict()} == {"body", "head"}
    assert [name for name, _ in model.named_parameters()][-2:] == ["head.weight", "head.bias"]
    assert model.own_names(model.state_dict()).keys() == names.keys()  # no frozen tensor
    twin = copy.deepcopy(model)
    twin.head.weight.data.zero_()
    assert torch.equal(model(inputs)[1], expected)  # the copy calls its own head
    assert torch.equal(twin(inputs)[1], twin.head.bias.expand(5, 3))
    doubled = model.double()
    assert doubled(inputs.double())[1].dtype == torch.float64  # frozen tensors moved, too


def two_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, inputs):
            return self.fc(inputs), inputs

    return Two()


def shared_classifier():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    return model


def tied_classifier():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    return model


def lazy():
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 3))


def lazy_once_called(input_shape):
    model = lazy().eval()
    model(torch.zeros(1, *input_shape))
    return model


def frozen():
    return network().requires_grad_(False)


class ClassifierFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier, self.features = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, inputs):
        return self.classifier(self.features(inputs))


def test_a_last_layer_that_does_not_make_the_logits_is_not_taken_for_the_classifier():
    """Methods with personal heads would share the head and keep the body."""
    task = task_of(everything, ClassifierFirst, num_classes=3)
    with refused("8", "3"):
        _ = task.classifier_tensors
    named = task_of(everything, ClassifierFirst, num_classes=3, classifier="classifier")
    assert named.classifier_tensors == 2
    assert named.build_model(0).head.out_features == 3


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (nn.ReLU, {}, "ReLU task.classifier"),
        (network, {"classifier": "fc"}, "task.classifier=fc 0"),
        (network, {"classifier": "1"}, None),
        (shared_classifier, {"classifier": "2"}, "0 2"),
        (tied_classifier, {}, "2 0.weight"),
        (lazy, {}, "0 LazyLinear 1 LazyBatchNorm1d) input_shape"),
        (lazy_once_called, {}, None),
        (frozen, {}, "trainable"),
        (lambda: 3, {}, "nn.Module"),
        (network(), {}, "task.model Sequential function"),
        (lambda width: network(), {}, "task.model_options"),
        (network, {"model_options": {"width": 3}}, "width"),
        (nn.ReLU, {"head_init": "orthogonal"}, "linear"),
        (two_outputs, {}, "tuple"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(build, options, message):
    def made():
        task = task_of(everything, build, **options)
        return task.build_model(0)(torch.ones(2, 4))

    if message is None:
        assert made()[1].shape == (2, 3)
        return
    with refused(*message.split()):
        made()


def test_the_same_seed_gives_the_same_model_and_torchs_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    task = task_of(everything, head_bias=False)
    first, again, other = (task.build_model(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert "head.bias" not in first
    assert torch.equal(torch.get_rng_state(), before)


class Chain(nn.Module):
    """A classifier with a name in a Sequential, whose weights are read, too."""

    def __init__(self):
        super().__init__()
        layers = {"first": nn.Linear(4, 6), "fc": nn.Linear(6, 3)}
        self.layers = nn.Sequential(OrderedDict(layers))
        self.seen = torch.zeros(6)
        self.calls = 0
        self.scale = float(np.random.rand()) + random.random()  # noqa: NPY002

    def forward(self, inputs):
        features = self.layers.first(inputs).to(self.layers.fc.weight.dtype)
        self.seen += features.detach().mean(0)
        self.calls += 1
        return self.layers.fc(features) * self.scale


def test_what_forward_writes_into_attributes_is_known():
    """A recurrent network's hidden state, a dict of means, a counter, and what forward adds."""

    class Recurrent(Chain):
        def __init__(self):
            super().__init__()
            self.rnn = torch.nn.LSTM(4, 4)
            self.hidden = (torch.zeros(1, 4), torch.zeros(1, 4))
            self.means, self.lengths = {"x": [torch.zeros(4)]}, deque([0], maxlen=2)

        def forward(self, inputs):
            outputs, self.hidden = self.rnn(inputs, self.hidden)
            self.means["x"][0] += outputs.detach().mean(0)
            self.means["last"] = torch.ones(1)
            self.lengths.append(len(inputs))
            self.added, self.shape = [outputs.detach()], inputs.shape
            return super().forward(outputs)

    model = WrappedModel(Recurrent())
    kept, body = PlainAttributes(model.modules()), model.body
    weights = body.rnn._flat_weights
    for _ in range(2):
        model(torch.randn(5, 4))
        assert body.calls == 1
        kept.put_back()
        assert body.calls == 0
        assert not any(map(torch.any, (*body.hidden, body.means["x"][0], body.seen)))
        assert (body.means.keys(), list(body.lengths)) == ({"x"}, [0])
        assert not {"added", "shape"} & vars(body).keys()
    assert body.rnn._flat_weights is weights
    assert all(map(torch.equal, weights, body.rnn.parameters()))


def test_a_model_may_draw_from_numpy_and_python_and_leaves_them_alone():
    task = task_of(lambda: None, Chain)
    first, second, other = (task.build_model(seed).body.scale for seed in (3, 3, 4))
    assert first == second != other
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    task.build_model(3)
    found = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    assert found == (random.random(), np.random.rand())  # noqa: NPY002


def test_an_own_model_is_told_what_its_parameters_name():
    model = build_model(
        "tests.tasks.test_own_task:sized", input_shape=(2, 3), num_classes=5, seed=0
    )
    assert model.head.out_features == 5
    assert model.body[1].in_features == 6


def sized(num_classes, input_shape, width=7):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(input_shape[0] * input_shape[1], width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
    )


# ---- the data ------------------------------------------------------------------------------------


def test_everybodys_data_is_divided_by_the_partition_and_each_row_once():
    task = task_of(everything, partition=DIRICHLET | {"holdout": 0.2})
    parts = [task.client_data(client) for client in range(3)]
    sizes = [len(train) + len(held_out) for train, held_out in parts]
    assert sum(sizes) == 60
    assert len(set(sizes)) > 1  # Dirichlet 0.3
    labels = np.concatenate([both.targets() for pair in parts for both in pair])
    assert sorted(labels) == sorted(everything()[0][1])
    assert len(task.test_data()) == 30
    assert task.class_counts().sum(axis=0).tolist() == np.bincount(everything()[0][1]).tolist()
    assert (task.num_classes, task.class_names) == (3, ("0", "1", "2"))


def test_the_counts_of_a_clients_own_data_have_what_it_holds_out():
    task = task_of(lambda client_id: (everything()[0], None), partition=IID | {"holdout": 0.5})
    assert len(task.client_data(0)[0]) == 30
    assert task.class_counts().tolist() == [np.bincount(everything()[0][1]).tolist()] * 3


IN_ORDER = {"generator": None, "train": False}


class Wrapping(torch.utils.data.Dataset):
    """As a user's transforms are put around another Dataset."""

    def __init__(self, dataset):
        self.dataset, self.batch_size, self.collate_fn = dataset, 1, list

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, row):
        inputs, label = self.dataset[row]
        return -inputs, label


def test_a_subset_and_a_dataset_around_another_are_divided_as_they_are():
    rows = torch.arange(20.0)[:, None]
    whole = torch.utils.data.TensorDataset(rows.double(), torch.arange(20) % 2)
    subset = torch.utils.data.Subset(whole, range(5, 20))
    for given, sign, first in ((subset, 1, 5), (Wrapping(whole), -1, 0)):
        task = task_of(lambda given=given: (given, None), clients=2, partition=IID)
        parts = [task.client_data(client)[0] for client in range(2)]
        batches = [next(part.batches(20, **IN_ORDER))[0] for part in parts]
        assert all(inputs.dtype == torch.float32 for inputs in batches)
        found = sorted(abs(value) for inputs in batches for value in inputs.flatten().tolist())
        assert found == list(range(first, 20))
        assert all((sign * inputs >= 0).all() for inputs in batches)


def test_nobody_trains_on_a_row_that_another_client_holds_out():
    """Some partitions give a row to several clients."""
    task = task_of(everything, partition=IID | {"holdout": 0.3})
    both = np.arange(10)
    task.__dict__["client_rows"] = [both, both, np.arange(10, 60)]
    numbered = np.arange(60.0, dtype="float32")[:, None].repeat(4, axis=1)
    task.__dict__["_all"] = (numbered, everything()[0][1]), None
    parts = [task.client_data(client) for client in range(2)]
    trained, held = (
        {float(x) for pair in parts for x in next(pair[n].batches(99, **IN_ORDER))[0][:, 0]}
        for n in (0, 1)
    )
    assert not trained & held
    assert len(held) > 3


def test_a_function_of_one_client_is_told_who_asks_and_the_server_has_no_test_data():
    asked = []

    def data(client_id, num_clients, seed, data_folder=None, size=6):
        asked.append((client_id, num_clients, seed, data_folder))
        train, test = everything()
        return (train[0][:size], train[1][:size]), test if client_id else None

    task = task_of(data, data_options={"size": 9})
    assert task.test_data() is None
    train, held_out = task.client_data(0, site_folder="/data/mine")
    assert (len(train), held_out) == (9, None)
    assert len(task.client_data(1)[1]) == 30
    assert [str(folder) for *_, folder in asked] == ["/data/mine", "None"]
    assert [one[:3] for one in asked] == [(0, 3, 0), (1, 3, 0)]
    given = task_of(data, test_data=lambda: everything()[1]).test_data()
    assert len(given) == 30


def test_a_regressions_targets_are_partitioned_by_tenths_and_have_no_classes():
    def data():
        x = np.random.default_rng(1).normal(size=(100, 4))
        return (x, 2 * x[:, 0]), None

    task = task_of(data, partition=DIRICHLET, kind="regression")
    train, _ = task.client_data(0)
    inputs, targets = next(train.batches(4, generator=None, train=True))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(targets, 2 * inputs[:, 0])
    counts = task.class_counts()
    assert counts.sum(axis=0).tolist() == [10] * 10
    with refused():
        train.class_counts()


@pytest.mark.parametrize(
    ("kind", "name", "outputs", "targets", "expected"),
    [
        ("regression", None, [[1.0], [3.0]], [0.0, 0.0], 5.0),
        ("regression", "l1", [1.0, 3.0], [0.0, 0.0], 2.0),
        ("regression", "huber", [1.0, 3.0], [0.0, 0.0], (0.5 + 2.5) / 2),
        ("classification", None, [[0.0, 0.0]], [1], float(np.log(2))),
        ("segmentation", None, [[[[0.0]], [[0.0]]]], [[[1]]], float(np.log(2))),
        ("classification", "tests.tasks.test_own_task:zero", [[1.0]], [0], 0.0),
        ("classification", "torch.nn:CrossEntropyLoss", [[0.0, 0.0]], [1], float(np.log(2))),
    ],
)
def test_losses_by_closed_form(kind, name, outputs, targets, expected):
    loss = loss_of(kind, name)(torch.tensor(outputs), torch.tensor(targets))
    assert float(loss) == pytest.approx(expected)


def zero(outputs, targets):
    return outputs.sum() * 0


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


INPUTS, LABELS = np.ones((3, 4)), np.array([0, 1, 2])


def arrays(inputs=INPUTS, labels=LABELS):
    return lambda: ((inputs, labels), None)


def rows(*examples):
    return lambda: (list(examples), None)


PAIRS = TensorDataset(torch.ones(4, 4), torch.zeros(4).long())
WEIGHTED = DataLoader(PAIRS, sampler=WeightedRandomSampler([1, 1, 1, 1], 4))


class Unsized(Dataset):
    def __getitem__(self, row):
        return PAIRS[row]


class OwnBatches(BatchSampler):
    pass


BATCHED = DataLoader(PAIRS, batch_sampler=OwnBatches(range(4), 2, drop_last=False))
MINE = DataLoader(PAIRS, batch_sampler=BatchSampler(SubsetRandomSampler([0, 2]), 2, False))
FIRST = DataLoader(PAIRS, sampler=SequentialSampler(range(2)))
DRAWN = DataLoader(PAIRS, sampler=RandomSampler(PAIRS, replacement=True))
LISTS = [[0.0, 1.0, 2.0, 3.0]] * 3
IMAGE = {"img": torch.ones(4), "label": 1}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (lambda: 3, {}, "int"),
        (lambda: (3, None), {}, "int"),
        (lambda: (np.ones((3, 4)), LABELS), {}, "ndarray"),
        (lambda: ("/data/x.csv", None), {}, "str"),
        (lambda: (Endless(), None), {}, "Endless"),
        (lambda: (WEIGHTED, None), {}, "WeightedRandomSampler"),
        (lambda: (BATCHED, None), {}, "OwnBatches"),
        (lambda: (MINE, None), {}, "SubsetRandomSampler"),
        (lambda: (FIRST, None), {}, "SequentialSampler"),
        (lambda: (DataLoader(Unsized()), None), {}, "DataLoader"),
        (lambda: (DRAWN, None), {}, "RandomSampler"),
        (lambda: ((np.ones((3, 4)), np.ones(2)), None), {}, "3 2"),
        (lambda: ((np.ones((3, 4)), np.array([0, 1, 3])), None), {}, "0 3"),
        (arrays(labels=LABELS[:, None]), {}, "3 1"),
        (arrays(labels=np.eye(3)), {}, "3"),
        (arrays(labels=np.array(["a", "b", "a"])), {}, "<U1"),
        (arrays(labels=["a", "b", "a"]), {}, "<U1"),
        (arrays(labels=2), {}, "targets"),
        (arrays(DataFrame({"a": [1, 2, 3], "b": list("xyz")})), {}, "DataFrame"),
        (lambda: (DataFrame({"a": [1, 2, 3]}), None), {}, "DataFrame"),
        (arrays(labels=torch.ones(3, dtype=torch.complex64)), {}, "torch.complex64"),
        (arrays(np.ma.masked_equal(np.eye(3), 1)), {}, "inputs masked"),
        (arrays(torch.eye(3).to_sparse()), {}, "inputs.to_dense"),
        (lambda: ([LISTS, [0, 1, 2]], None), {}, "lists"),
        (arrays([[1.0], [2.0, 3.0], []]), {}, "inputs"),
        (rows((np.ones(4), 1), (np.ones(3), 2)), {}, "batch"),
        (rows((Image.new("L", (2, 2)), 1)), {}, "ToTensor"),
        (rows({"a": torch.ones(4), "b": 1}), {}, "a, b"),
        (rows(IMAGE), {"columns": ["img", "lbl"]}, "lbl img"),
        (rows((torch.ones(4), 1, 2)), {}, "list"),
        (rows(("text", 1)), {}, "tensors"),
        (lambda count: everything(), {}, "data_options client_id"),
        (everything, {"data_options": {"n": 1}}, "data_options"),
        (everything, {"classes": ["a", "b"]}, "0 2"),
        (lambda client_id: ((np.ones((0, 4)), np.ones(0)), None), {}, "training"),
    ],
)
def test_what_is_no_data_is_refused_in_one_line(data, options, message):
    with refused(*message.split()):
        task_of(data, clients=1, **options).client_data(0)[0].class_counts()


def test_a_partition_by_labels_says_their_shape_where_that_is_another():
    task = task_of(arrays(labels=np.eye(3)), clients=1, partition=DIRICHLET)
    with refused("3"):
        task.client_data(0)


def test_a_data_frame_of_numbers_of_several_types_is_an_array():
    frame = DataFrame({"a": [1.5, 2.5], "b": [True, False], "c": [3, None]}).astype({"c": "Int64"})
    exact = np.array([[1.5, 1, 3], [2.5, 0, np.nan]])
    for inputs in (frame, exact.astype(np.longdouble)):
        labels = frame["b"].astype("boolean")
        task = task_of(lambda given=(inputs, labels): (given, None), clients=1)
        found, targets = next(task.client_data(0)[0].batches(2, generator=None, train=False))
        np.testing.assert_array_equal(found, exact)
        assert targets.tolist() == [1, 0]


def test_complex_inputs_stay_complex():
    inputs, labels = np.array([[1 + 2j, -3j], [0.5, 4]]), np.array([0, 1])
    tensors = torch.as_tensor(inputs), torch.as_tensor(labels)
    for given in ((inputs, labels), tensors, TensorDataset(*tensors), (inputs + 0j, labels)):
        task = task_of(lambda given=given: (given, None), clients=1)
        examples = task.client_data(0)[0]
        found, _ = next(examples.batches(2, **IN_ORDER))
        assert found.dtype == torch.complex64
        assert found.tolist() == inputs.tolist()
        assert examples.sha256() is None or len(examples.sha256()) == 64


def test_arrays_that_torch_cannot_share_are_copied():
    inputs, labels = np.arange(8.0).reshape(2, 4), np.array([0, 1])
    flipped, foreign = inputs[:, ::-1], inputs.astype(">f4")
    for given, expected in ((flipped, [3.0, 2.0, 1.0, 0.0]), (foreign, [0.0, 1.0, 2.0, 3.0])):
        task = task_of(lambda given=given: ((given, labels), None), clients=1)
        found, _ = next(task.client_data(0)[0].batches(2, **IN_ORDER))
        assert found[0].tolist() == expected


def of_outputs_alone(outputs):
    return outputs.mean()


def test_a_loss_that_takes_no_targets_is_refused():
    word = f"{__name__}:of_outputs_alone"
    with refused(f"task.loss={word}", "(outputs, targets)"):
        loss_of("classification", word)


def test_the_loss_of_thousands_of_examples_is_finite_in_float16():
    """65,504 is the largest such number, and 100,000 losses of log 2 have the sum 69,315."""
    labels = torch.zeros(100_000).long()
    examples = Examples((torch.zeros(100_000, 1), labels), kind="classification", num_classes=2)
    model = WrappedModel(nn.Sequential(nn.Linear(1, 2, dtype=torch.float16)))
    nn.init.zeros_(model.head.bias)
    loss, _ = evaluate_model(model, examples, loss_of("classification", None))
    assert loss == pytest.approx(np.log(2), rel=1e-2)


def test_a_partial_is_named_by_its_function_and_what_it_is_given():
    names = [name_of(partial(sized, width=width)) for width in (7, 7, 8)]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith(f"{sized.__module__}:sized.partial_")
    assert name_of(partial(partial(sized, 3), (1, 2))) != name_of(partial(sized, 3))


def images(dtype):
    return torch.ones(2, 1, 8, 8).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_images_of_whole_numbers_are_refused_where_the_model_cannot_compute_with_them(dtype):
    def plain():
        return nn.Sequential(nn.Conv2d(1, 2, 8), nn.Flatten(), nn.Linear(2, 3))

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = plain()

        def forward(self, inputs):
            return self.layers(inputs.float())

    for model in (
        WrappedModel(plain()),
        build_model("mlp", input_shape=(1, 8, 8), num_classes=3, seed=0),
    ):
        with refused("255"):
            model(images(dtype))
    assert WrappedModel(Casting())(images(dtype))[1].shape == (2, 3)
    with pytest.raises(RuntimeError, match="expected input"):  # an error of the model's own
        WrappedModel(plain())(torch.ones(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ((2, 3), (2, 1)),
        ((2, 3), (2, 3)),
        ((2, 3, 4, 4), (2, 1, 4, 4)),
        ((2, 3, 4, 4), (2, 2, 2)),
        ((2,), (2,)),
    ],
)
def test_logits_and_labels_of_other_shapes_are_refused(logits, labels):
    with refused():
        loss_of("segmentation", None)(torch.zeros(logits), torch.zeros(labels).long())


SEVEN_OF_TEN = np.array([0] * 7 + [1] * 3)


def of_foreground(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(1), targets.float())


def by_client(inputs, labels, model=network, **changes):
    return task_of(lambda client_id: ((inputs, labels), None), model, clients=1, **changes)


def evaluated(task, *metrics):
    model, (data, _) = task.build_model(0), task.client_data(0)
    found = task.metric_set(metrics, per_class=False, device="cpu")
    return *evaluate_model(model, data, task.loss, metrics=found), found and found.compute()


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda outputs, targets: (outputs - targets).square().mean(), "4 1"),
        (lambda y, t: (y.squeeze(1) - t).square().mean(), None),
        (lambda y, t: (y[:, 0] - t).abs().mean(), None),
        (lambda outputs, targets: (outputs.view(-1) - targets).square(), "4"),
        (lambda y, t: 0.5, "0.5"),
    ],
)
def test_a_loss_of_the_users_is_of_rows_and_not_of_all_pairs(loss, named):
    """Outputs (B, 1) less targets (B,) are (B, B), whose mean square is least at the mean."""
    rows = np.arange(8.0).reshape(4, 2), np.arange(4.0)
    task = by_client(*rows, lambda: nn.Linear(2, 1), kind="regression", loss=loss)
    if named is None:
        assert evaluated(task)[0] > 0
        return
    with refused(*named.split()):
        evaluated(task)


def test_targets_that_are_no_numbers_are_refused_with_their_row():
    given = (np.ones((3, 2)), np.array([1.0, np.nan, 2.0]))
    for data in (given, TensorDataset(*map(torch.as_tensor, given))):
        task = task_of(lambda client_id, d=data: (d, None), clients=1, kind="regression")
        with refused("1"):
            list(task.client_data(0)[0].batches(3, generator=None, train=False))
    with refused():
        task_of(lambda client_id: ({"x": [1], "y": [0]}, None), clients=1).client_data(0)


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
    [
        (1, {"num_classes": 2, "loss": of_foreground}, "10 1 2"),
        (5, {"num_classes": 3}, "10 5 3 task.num_classes"),
        (1, {"loss": of_foreground}, "0 1"),
    ],
)
def test_a_classifier_without_one_output_a_class_has_no_accuracy(outputs, options, message):
    """The largest of a single logit is class 0: of these, 7 of 10."""
    task = by_client(np.ones((10, 4)), SEVEN_OF_TEN, lambda: nn.Linear(4, outputs), **options)
    with refused(*message.split()):
        evaluated(task)


def first_is_largest(classes):
    model = nn.Conv2d(1, classes, 1)
    nn.init.zeros_(model.weight)
    model.bias.data = -torch.arange(float(classes))
    return model


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_an_ignored_pixel_counts_in_no_loss_and_no_metric():
    masks = np.array([[[0, IGNORED], [0, 1]]])
    task = by_client(np.ones((1, 1, 2, 2)), masks, lambda: first_is_largest(2), kind="segmentation")
    loss, accuracy, found = evaluated(task, "accuracy", "iou")
    right, wrong = np.log1p(np.exp(-1)), np.log1p(np.exp(1))  # logits 0 and -1
    assert loss == pytest.approx((2 * right + wrong) / 3)
    assert accuracy is None
    assert found == pytest.approx({"accuracy": 2 / 3, "iou": (2 / 3 + 0) / 2})
    unseen = np.full_like(masks, IGNORED)  # beside an image that nobody has labelled
    by_image = [np.ones((2, 1, 2, 2)), np.concatenate([masks, unseen])]
    task = by_client(*by_image, lambda: first_is_largest(2), kind="segmentation")
    model, data = task.build_model(0), task.client_data(0)[0]
    for batch_size in (1, 2):
        assert evaluate_model(model, data, task.loss, batch_size)[0] == pytest.approx(loss)
    logits = torch.zeros(1, 2, 2, 2, requires_grad=True)
    task.loss(logits, torch.from_numpy(unseen)).backward()
    assert torch.equal(logits.grad, torch.zeros(1, 2, 2, 2))


class OfTokens(nn.Module):
    """Token t's largest logit is t's."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 3, bias=False)
        nn.init.eye_(self.out.weight)

    def forward(self, tokens):
        return self.out(nn.functional.one_hot(tokens, 3).float()).transpose(1, 2)


def test_the_accuracy_of_several_labels_an_example_is_the_share_that_is_right():
    tokens = np.array([[0, 1, 2, 2], [1, 1, 1, 1]])
    following = np.array([[0, 1, 0, 0], [1, 1, 1, 0]])
    assert evaluated(by_client(tokens, following, OfTokens))[1] == (2 + 3) / 8
    everybodys = task_of(lambda: ((tokens, following), None), OfTokens, clients=1)
    assert len(everybodys.client_data(0)[0]) == 2
    column = by_client(np.ones((3, 4)), np.zeros((3, 1)), loss=zero)
    with refused("3", "1"):
        evaluated(column)  # not 3 x 3 comparisons


def test_a_regression_with_a_model_of_fedhets_has_no_accuracy():
    given = (np.ones((3, 1, 8, 8)), np.zeros(3))
    functions = Functions(lambda client_id: (given, None), None, None, loss_of("regression", None))
    config = OWN | {"model": "mlp", "kind": "regression", "input_shape": [1, 8, 8]}
    task = build_task(config, IID, seed=0, num_clients=1, functions=functions)
    assert evaluated(task)[1] is None


def pairs(inputs, labels):
    return [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(inputs, labels, strict=True)]


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([0.0, 1.7], "classification", "1.7"),
        ([0.0, float("nan")], "classification", "nan"),
        ([0, 3], "classification", "0 3"),
        ([-1, 2], "classification", "-1 2"),
        ([[0.0, 0.9]] * 2, "classification", "0.9"),  # soft labels
        ([[[0.5]], [[1.0]]], "segmentation", "0.5"),
        ([[[IGNORED]], [[255]]], "segmentation", "255 3"),
    ],
)
def test_labels_are_whole_numbers_of_classes_for_clients_and_tests(
    labels, kind, message, as_dataset
):
    inputs, labels = np.ones((2, 3, 1, 1), "float32"), np.array(labels)
    given = pairs(inputs, labels) if as_dataset else (inputs, labels)
    good = (inputs, np.zeros((2, 1, 1) if kind == "segmentation" else 2))
    task = task_of(
        lambda client_id: (good, given),
        clients=1,
        kind=kind,
        num_classes=3,
        test_data=lambda: given,
    )
    for read in (lambda: task.client_data(0)[1], task.test_data):
        with refused(*message.split()):
            next(read().batches(2, generator=None, train=False))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.at:all", "nowhere"),
        ("tests.nowhere:all", "tests.nowhere"),
        ("tests.tasks.test_own_task:netwrk", "network"),
        ("tests.tasks.test_own_task:OWN", "dict"),
    ],
)
def test_a_reference_to_nothing_is_refused_in_one_line(text, message):
    with refused(f"task.model={text}", message):
        load_reference("task.model", text)


def test_a_function_of_test_data_is_refused_by_its_own_key():
    def asks(fold):
        return everything()

    named = task_of(lambda client_id: everything(), clients=1, test_data=asks)
    with refused("task.test_data=", "task.data_options"):
        named.test_data()
    pairs = task_of(lambda client_id: everything(), clients=1, test_data=lambda: PAIR_OF_PAIRS)
    with refused("task.test_data="):
        pairs.test_data()


PAIR_OF_PAIRS = ((np.ones((3, 4)), LABELS), (np.ones((3, 4)), LABELS))


def of_one_client(client_id):
    return everything()


@pytest.mark.parametrize(
    ("data", "words", "named"),
    [
        (of_one_client, ["partition.alpha=0.1"], "partition.alpha=0.1 of_one_client"),
        (of_one_client, ["partition=pathological"], "partition=pathological"),
        (of_one_client, ["+partition.alpha=0.1"], "+partition.alpha=0.1"),
        (of_one_client, ["partition=site", "partition.holdout=0.1", "seed=1"], None),
        (everything, ["partition=pathological", "partition.alpha=0.1"], None),
    ],
)
def test_a_partition_of_what_is_given_of_one_client_is_refused(data, words, named):
    with refused(*named.split()) if named else nullcontext():
        refuse_unread_partition(data, words)


def by_hospital(path=None, target=None):
    return (np.arange(12.0)[:, None], np.arange(12) % 2, list("ccaabbccaabb")), None


def test_examples_with_a_client_make_natural_clients():
    task = task_of(by_hospital, partition={"name": "natural"}, clients=3, num_classes=2)
    assert task.client_names == ("a", "b", "c")
    found = [sorted(task.client_data(client)[0].targets().tolist()) for client in range(3)]
    assert found == [[0, 0, 1, 1]] * 3
    assert task.client_rows[2].tolist() == [0, 1, 6, 7]


def test_a_path_that_no_parameter_takes_is_refused():
    with refused("task.path=x", "no parameter path"):
        task_of(lambda: None, path="x").client_data(0)
    with refused("task.data_options.path", "task.path"):
        task_of(by_hospital, data_options={"path": "x"})
