"""The arguments of `flwr run`, parsed by their readers; the share of CPUs and GPUs of a run."""

import json
import tomllib
from pathlib import Path

import pytest
from flwr.cli.run.run import _parse_federation_config_overrides
from flwr.cli.typing import SuperLinkConnection
from flwr.common.config import parse_config_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fedhet.conf import compose, quoted
from fedhet.runtimes import resources
from fedhet.runtimes.run_config import app_overrides, federation_config, run_config_toml
from tests.refused import refused

AWKWARD = ["with space", "it's", 'say "x"', "back\\slash", "a,b=[1]{2}", "$(x) # é 日 🙂", "\\"]


def recipe(**changes: object) -> DictConfig:
    base = {
        "clients": 10,
        "participation": 1.0,
        "device": "cpu",
        "task": {"path": None},
        "site": {"policy": None},
        "runtime": {"name": "flower", "client_cpus": 1, "client_gpus": None, "num_cpus": 2},
    }
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(changes))  # type: ignore[return-value]


@pytest.mark.parametrize("text", AWKWARD)
def test_hydra_and_flower_read_awkward_text_unchanged(text, tmp_path):
    words = [f"results_dir={quoted(text)}", "strategy=[fedprox,fedavgm]"]
    [override] = OverridesParser.create().parse_overrides(words[:1])
    assert override.value() == text
    path = tmp_path / "run.toml"
    path.write_text(run_config_toml(words), encoding="utf-8")
    assert json.loads(str(parse_config_args([str(path)])["overrides"])) == words


@pytest.mark.slow
def test_the_apps_compose_the_users_recipe_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "it's here"
    typed = ["seed=3", "results_dir=x", "strategy=scaffold"]
    words = app_overrides(typed, recipe(), folder)
    composed = compose(tomllib.loads(run_config_toml(words)))
    assert (composed.seed, composed.results_dir) == (3, str(folder))
    assert "results_dir=x" not in words
    relative = recipe(task={"path": "my data"}, local={"reuse_training": "a run"})
    words = app_overrides([], relative, folder)
    assert f"task.path='{tmp_path}/my data'" in words
    assert f"local.reuse_training='{tmp_path}/a run'" in words
    (tmp_path / "rows.csv").touch()
    for path, expected in (("rows.csv", f"{tmp_path}/rows.csv"), ("me/a-hub-set", None)):
        own = recipe(task={"inputs": "own", "path": path, "data_options": {"public": 100}})
        found = [word for word in app_overrides([], own, folder) if "task." in word]
        assert found == ([f"task.path='{expected}'"] if expected else [])


@pytest.mark.parametrize(
    ("clients", "participation", "client_cpus", "num_cpus", "expected"),
    [
        *((10, 1.0, 1, 2, 2), (2, 1.0, 1, 16, 2), (100, 0.1, 1, 64, 10)),
        *((100, 0.001, 4, 16, 4), (8, 1.0, 2, 6, 6)),
    ],
)
def test_the_simulation_has_the_recipes_size_and_no_more_cpus_than_a_cohort_can_use(
    clients, participation, client_cpus, num_cpus, expected
):
    runtime = {"client_cpus": client_cpus, "num_cpus": num_cpus, "client_gpus": 0.25}
    sizes = {"clients": clients, "participation": participation, "runtime": runtime}
    connection = SuperLinkConnection(name="x", address="127.0.0.1:1", insecure=True)
    words = [federation_config(recipe(**sizes))]
    parsed = _parse_federation_config_overrides(words, connection)
    assert {field.name: value for field, value in parsed.ListFields()} == {
        "num_supernodes": clients,
        "client_resources_num_cpus": client_cpus,
        "client_resources_num_gpus": 0.25,
        "init_args_num_cpus": expected,
        "init_args_logging_level": "error",
    }


@pytest.mark.parametrize(
    ("gpus", "device", "runtime", "share", "workers"),
    [
        ("0", "auto", {}, 0.5, 2),  # two clients at once share it
        ("0,1", "auto", {}, 1.0, 2),
        ("0,1", "cpu", {}, 0.0, 2),
        ("", "auto", {}, 0.0, 2),
        ("-1", "auto", {}, 0.0, 2),
        ("0", "auto", {"client_gpus": 0.25}, 0.25, 2),
        ("0", "auto", {"num_cpus": 64}, 0.125, 8),  # at most eight clients share a GPU
        ("2,5", "auto", {"num_cpus": 8, "client_gpus": 0.5}, 0.5, 4),  # they have no room for more
    ],
)
def test_clients_share_the_gpus_that_cuda_sees(monkeypatch, gpus, device, runtime, share, workers):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    launched = recipe(clients=64, device=device, runtime=runtime)
    assert resources.gpu_share(launched) == pytest.approx(share)
    names = tuple(gpus.split(",")) if share else ()
    assert resources.share_of_machine(launched) == resources.Share(workers, 1, names)


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        ("", {"clients": 0}, "clients=0 clients 1"),
        ("", {"partition": {"name": "site"}}, "partition=site runtime=deployment"),
        ("", {"device": "cuda"}, "device=cuda device"),
        ("0", {"device": "cuda:1"}, "device=cuda:1 1 device"),
        ("0,1", {"device": "cuda:2"}, "device=cuda:2 2"),
    ],
)
def test_what_this_machine_cannot_carry_out_is_refused(monkeypatch, gpus, changes, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(resources, "_WSL", Path("/nothing"))
    with refused(*message.split()):
        resources.check_machine(recipe(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cuda:1"},
        {"device": "auto"},
        {"clients": 0, "runtime": {"name": "deployment", "address": "a:1"}},
        {"device": "cuda:9", "runtime": {"name": "ray", "address": "head:1"}},
    ],
)
def test_another_machine_may_have_what_this_one_lacks(monkeypatch, changes):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    resources.check_machine(recipe(**changes))
