"""make_client_app and make_server_app: the methods in a Flower app of one's own."""

import json
import re

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedhet
from fedhet.common.results import read_rows, read_summary
from fedhet.conf import compose_overrides, plain_part
from fedhet.strategies.wire.tensor_files import load_tensors
from fedhet.tasks import build_task
from fedhet.tasks.models.mlp import mlp
from fedhet.tools.export import export
from tests.federation import InProcessGrid
from tests.recipes import TINY, run_recipe
from tests.refused import refused
from tests.test_every_strategy import METHODS, param

CLIENTS = 3


def logits_only():
    """The task's mlp as one network, as torchvision or a user writes it."""
    model = mlp((1, 8, 8), num_classes=10, head_bias=None)
    return nn.Sequential(*model.body, model.head)


def arrays_of(examples):
    return next(examples.batches(len(examples), generator=None, train=False))


def serve(apps, words=(), config=None, clients=CLIENTS):
    """Run both apps in this process with Flower's messages."""
    client_app, server_app = apps
    run_config = {"overrides": json.dumps(list(words)), **(config or {})}

    def context(client):
        node_config = {"partition-id": client, "num-partitions": clients} if client >= 0 else {}
        return Context(client + 2, client + 2, node_config, RecordDict(), run_config)

    def node(client):
        own = context(client)
        return lambda message: client_app(message, own)

    grid = InProcessGrid({100 + client: node(client) for client in range(clients)})
    server_app(grid, context(-1))


def apps_of(*arguments, **named):
    made = [make(*arguments, **named) for make in (fedhet.make_client_app, fedhet.make_server_app)]
    return tuple(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        param(words)
        for words in METHODS
        # this model has no normalisation layer, no bias of the classifier and no adapters
        if words[0] not in ("strategy=fedbn", "strategy=dbe") and "lora" not in words[0]
    ],
)
def test_a_method_on_a_logits_only_model_has_the_bits_of_its_recipe(words, tmp_path):
    recipe_words = [*TINY, "rounds=1", *words]
    expected = run_recipe(tmp_path / "recipe", *recipe_words)
    recipe = compose_overrides((*recipe_words, f"results_dir={tmp_path / 'recipe'}"))
    clients = min(int(recipe.clients), CLIENTS)
    task = build_task(
        plain_part(recipe, "task"), plain_part(recipe, "partition"), seed=0, num_clients=clients
    )

    def data(client_id):
        train, held_out = task.client_data(client_id)
        return arrays_of(train), None if held_out is None else arrays_of(held_out)

    def test_data():
        return arrays_of(task.test_data())

    scale, black = task.config.transform.constants(torch.device("cpu"))
    shown = [float(black), float(255 * scale + black)]
    own = {"task.input_shape": [1, 8, 8], "task.input_range": shown}
    if recipe.clients == 1:
        own["clients"] = 1
    if recipe.strategy.asynchronous is not None:  # on a simulated clock
        own["runtime.simulation"] = True
    ours = ("task", "partition", "clients")
    others = [word for word in (*TINY, *words[1:]) if not word.startswith(ours)]
    method = words[0].removeprefix("strategy=")
    apps = apps_of(logits_only, data, method, test_data=test_data, settings=own)
    serve(apps, [*others, "rounds=1", f"results_dir={tmp_path / 'own'}"], clients=clients)
    summary = json.loads((tmp_path / "own" / "summary.json").read_text())
    assert summary["strategy"] == expected["strategy"]
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    if recipe.evaluation.model == "global":
        assert (summary["loss"], summary["accuracy"]) == (expected["loss"], expected["accuracy"])


# ---- an app as its user writes it ----------------------------------------------------------------


class Net(nn.Module):
    """A network of a user's: its classifier is neither called head nor without bias."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs):
        return self.out(torch.relu(self.hidden(inputs)))


def load_data(partition_id, num_partitions, batch_size=16):
    rng = np.random.default_rng(partition_id)
    labels = rng.integers(3, size=60)
    inputs = rng.normal(size=(60, 4)) + 3 * np.eye(3, 4)[labels]
    rows = [(x, y) for x, y in zip(torch.tensor(inputs).float(), torch.tensor(labels), strict=True)]
    loaders = [DataLoader(rows[:50], batch_size, shuffle=True), DataLoader(rows[50:], batch_size)]
    return tuple(loaders)


CONFIG = {"num-server-rounds": 3, "learning-rate": 0.1, "local-epochs": 2, "my-own-key": "x"}


@pytest.mark.slow
def test_an_app_of_loaders_learns_and_its_weights_load_into_the_users_model(tmp_path):
    apps = apps_of(Net, load_data, fedhet.FedPVR(option="II"))
    serve(apps, [f"results_dir={tmp_path}"], CONFIG)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 1, 2, 3]  # num-server-rounds
    assert {row["lr"] for row in rows[1:]} == {0.1}
    assert rows[1]["num_steps"] == CLIENTS * 2 * 2  # two batches of 32 of 50, local-epochs=2
    assert rows[-1]["client_loss"] < rows[1]["client_loss"]
    assert "accuracy" not in rows[-1]  # the server has no test examples
    tensors, _, _ = load_tensors(tmp_path / "model.safetensors")
    model = Net()
    fedhet.load_weights(model, tmp_path)
    assert torch.equal(model.out.weight, tensors["head.weight"])
    assert torch.equal(model.hidden.bias, tensors["body.hidden.bias"])
    with refused("hidden"):
        fedhet.load_weights(nn.Sequential(nn.Linear(4, 2)), tmp_path)
    assert read_summary(tmp_path)["clients"] == CLIENTS  # its config says 0: whoever is there
    about = export(tmp_path, tmp_path / "model.pt2")
    assert about["input"]["shape"] == ["batch", 4]


@pytest.mark.slow
def test_two_entries_of_a_run_config_for_one_key_are_refused():
    server_app = fedhet.make_server_app(Net, load_data)
    message = "local.lr"
    with refused(*message.split()):
        serve((fedhet.make_client_app(Net, load_data), server_app), [], {**CONFIG, "local.lr": 0.2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        (fedhet.FedPVR(layers="last:1"), "strategy.fedpvr.layers", "last:1"),
        (fedhet.FedMRUR(client_momentum={"alpha": 0.2}), "strategy.client_momentum.alpha", 0.2),
        (fedhet.FedMRUR(gamma=0.1), "strategy.fedmrur.gamma", 0.1),
        (fedhet.FedAdam(server_lr=0.02), "server.lr", 0.02),
        (fedhet.FedProx(mu=0.5), "strategy.fedprox.mu", 0.5),
        (fedhet.PerFedAvg, "local.optimizer", "per_fedavg"),
        ([fedhet.MOON, fedhet.FedDW(mu=2.0)], "strategy.feddw.mu", 2.0),
        ("[feddw,moon]", "task.head_bias", False),
    ],
)
def test_a_methods_arguments_become_keys_of_its_recipe(method, key, value):
    from fedhet.flower_apps import _App

    app = _App.of(Net, load_data, method, "classification", None, None, None)
    node = compose_overrides(app.overrides)
    for part in key.split("."):
        node = node[part]
    assert node == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "named", "message"),
    [
        ("fedpvrr", {}, "strategy=fedpvrr"),
        (fedhet.FedPVR(options=fedhet.Parts()), {}, "FedPVR(options="),
        ("fedavg", {"kind": "sound"}, "task.kind='sound"),
        ("fedavg", {"loss": "mse"}, "mse"),
        ("fedavg", {"settings": {"local.lrr": 1}}, "local.lrr local.lr"),
        ("fedavg", {"settings": {"local.lr": -1}}, "local.lr=-1"),
        (FlowerFedAdam(eta=0.5), {}, "strategy=flwr FedAdam"),
        ("fedavg", {"test_data": (1, 2)}, "test_data"),
        ("fedavg", {"settings": {"partition.alpha": 0.1}}, "partition.alpha=0.1"),
    ],
)
def test_what_cannot_be_is_refused_when_the_app_is_made(method, named, message):
    with refused(*message.split()):
        fedhet.make_server_app(Net, load_data, method, **named)


def test_a_model_itself_is_refused_in_the_place_of_its_function(tmp_path):
    for model, data in ((Net(), load_data), (Net, (1, 2))):
        with refused():
            fedhet.make_server_app(model, data)
    with refused("nn.Module"):
        fedhet.load_weights(Net, tmp_path)
    with refused("checkpoint.best=true"):
        fedhet.load_weights(Net(), tmp_path, best=True)


@pytest.mark.slow
def test_both_apps_must_be_made_of_the_same(tmp_path):
    client_app = fedhet.make_client_app(Net, load_data, "fedavg")
    server_app = fedhet.make_server_app(Net, load_data, "scaffold")
    said = "0 SuperNodes partition"
    with refused(*said.split(), kind=TimeoutError):
        serve(
            (client_app, server_app),
            [f"results_dir={tmp_path}", "runtime.connect_timeout_seconds=0.2"],
        )


def test_every_public_name_is_there_and_documented():
    for name in fedhet.__all__:
        assert re.search(r"\w{10}|\w+ \w+", getattr(fedhet, name).__doc__), name
    with pytest.raises(AttributeError, match="FedPvr"):
        fedhet.FedPvr  # noqa: B018


def test_datasets_and_arrays_give_the_same_batches():
    inputs, labels = torch.randn(7, 4), torch.arange(7) % 3
    found = []
    for given in ((inputs.numpy(), labels), TensorDataset(inputs, labels)):
        from fedhet.tasks.examples import Examples

        examples = Examples(given, kind="classification", num_classes=3)
        generator = torch.Generator().manual_seed(1)
        found.append(list(examples.batches(3, generator=generator, train=True)))
        assert examples.class_counts() == [3, 2, 2]
    for (x, y), (other_x, other_y) in zip(*found, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
