"""docs/own.md: its files are written, its apps run with Flower's messages, its commands run."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from fedhet.conf import compose_overrides, plain_part
from fedhet.flower_apps import TEMPLATE_KEYS
from fedhet.server_app.assembly import check_words
from fedhet.strategies.wire.tensor_files import load_tensors
from fedhet.tasks import build_task
from fedhet.tools import partition
from tests.processes import summary_of
from tests.recipes import run_recipe
from tests.refused import refused
from tests.test_flower_apps import serve

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
BLOCKS = [found.groups() for found in BLOCK.finditer(PAGE)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for _, title, content in BLOCKS:
        if title:
            (tmp_path / title).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / title).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_app", "load")]:
        del sys.modules[name]


def test_every_block_is_a_file_a_command_or_of_the_template():
    pyproject = (ROOT / "fedhet" / "template" / "pyproject.toml").read_text()
    for language, title, content in BLOCKS:
        if language == "toml":
            assert all(line in pyproject for line in content.splitlines())
        else:
            assert title or language == "bash"


@pytest.mark.slow
def test_the_apps_train_and_the_weights_go_back_into_the_model(folder):
    apps = [importlib.import_module(f"my_app.{name}_app").app for name in ("client", "server")]
    config = {"num-server-rounds": 2, "local-epochs": 1, "results_dir": str(folder / "results")}
    serve(apps, config=config)
    summary = summary_of(folder / "results")
    assert (summary["status"], summary["strategy"], summary["rounds"]) == ("completed", "fedpvr", 2)
    model = importlib.import_module("load").model
    stored, _, _ = load_tensors(folder / "results" / "model.safetensors")
    own = {name.replace("head.", "out.").removeprefix("body."): one for name, one in stored.items()}
    assert own.keys() == model.state_dict().keys()
    assert all(torch.equal(own[name], one) for name, one in model.state_dict().items())


@pytest.mark.slow
def test_the_commands_train(folder):
    commands = [content for language, title, content in BLOCKS if language == "bash" and not title]
    commands = [command for command in commands if "my_app" in command]
    assert len(commands) == 4
    for number, command in enumerate(commands):
        program, *words = shlex.split(command.replace("\\\n", ""))
        assert program == "fedhet"
        words.remove("runtime=local")
        summary = run_recipe(folder / f"run{number}", *words)
        assert summary["client_loss"] < 2.31  # log 10 is that of no knowledge
        if "metrics:" in command:  # of the best class or the second
            assert summary["client_top2_accuracy"] > summary["client_accuracy"]


@pytest.mark.slow
def test_a_partition_of_ones_own_divides_all_and_its_plot_has_its_name(folder, monkeypatch, capsys):
    load_part = importlib.import_module("my_app.parts").load_part
    parts = [load_part(client, num_clients=3, seed=0, skew=0.8)[0] for client in range(3)]
    assert sum(len(labels) for _, labels in parts) == 1797
    at_home = [(labels % 3 == client).mean() for client, (_, labels) in enumerate(parts)]
    assert min(at_home) > 0.8  # 0.8 + 0.2 / 3 are expected
    words = ["task=own", "task.data=my_app.parts:load_part", "task.data_options.skew=0.8"]
    words += ["task.num_classes=10", "task.model=my_app.task:Net", "clients=3"]
    monkeypatch.setattr(sys, "argv", ["fedhet-partition", *words])
    partition.main()
    (plot,) = (folder / "results" / "partitions").glob("*.png")
    assert f"plot: {plot}" in capsys.readouterr().out
    assert f"`{plot.name}`" in PAGE
    with refused("partition"):
        check_words(compose_overrides((*words, "partition=iid")), [*words, "partition=iid"])


@pytest.mark.slow
def test_a_slot_of_ones_own_is_a_methods(own_project):
    for _, title, content in BLOCKS:
        if title and title.startswith("my_project/"):
            (own_project / title).parent.mkdir(exist_ok=True, parents=True)
            (own_project / title).write_text(content)
    command = next(content for _, _, content in BLOCKS if ":SignFed" in content)
    words = [word for word in shlex.split(command)[1:] if word != "runtime=local"]
    summary = run_recipe(own_project / "run", *words, "rounds=1", "local.epochs=1")
    assert (summary["strategy"], summary["strategy_class"]) == ("signfed", "SignFed")
    recipe = compose_overrides(tuple(words))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    before = build_task(*parts, seed=0, num_clients=3).build_model(0).state_dict()
    after, _, _ = load_tensors(own_project / "run" / "model.safetensors")
    steps = torch.cat([(after[name] - before[name]).abs().flatten() for name in after])
    moved = steps[steps > 0]
    assert len(moved) > len(steps) / 2
    assert torch.allclose(moved, torch.tensor(0.005), atol=1e-6)
    with refused("strategy=[fedadam,signfed]", "server_optimizer"):
        compose_overrides(("task=my_project", "strategy=[my_project.server:SignFed,fedadam]"))


def test_the_table_of_run_config_keys_is_that_of_the_code():
    rows = re.findall(r"^\| (`[\w`, -]+) \| `([\w.]+)` \|$", PAGE, re.MULTILINE)
    found = {key: ours for keys, ours in rows for key in re.findall(r"[\w-]+", keys)}
    assert {key: found.get(key) for key in TEMPLATE_KEYS} == TEMPLATE_KEYS
