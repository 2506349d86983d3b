"""The words that the launcher hands to `flwr run`, read back the way their readers read them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from flwr.cli.run.run import _parse_federation_config_overrides
from flwr.cli.typing import SuperLinkConnection
from flwr.common.config import parse_config_args
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from conf import compose, quoted
from fedhet.runtimes import resources
from fedhet.runtimes.run_config import app_overrides, federation_config, run_config_toml

AWKWARD = [
    "plain",
    "with space",
    "it's",
    'say "x"',
    "back\\slash",
    "a,b=[1]{2}",
    "$(x) # é 日 🙂",
    "\\",
]


def recipe(**changes: object) -> DictConfig:
    base = {
        "clients": 10,
        "participation": 1.0,
        "device": "cpu",
        "task": {"path": None},
        "runtime": {"name": "flower", "client_cpus": 1, "client_gpus": None, "num_cpus": 2},
    }
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.create(changes))  # type: ignore[return-value]


def as_flower_reads(config: str) -> dict[str, object]:
    connection = SuperLinkConnection(name="x", address="127.0.0.1:1", insecure=True)
    parsed = _parse_federation_config_overrides([config], connection)
    assert parsed is not None
    return {field.name: value for field, value in parsed.ListFields()}


@pytest.mark.parametrize("text", AWKWARD)
def test_hydra_reads_a_quoted_value_as_it_was(text: str) -> None:
    [override] = OverridesParser.create().parse_overrides([f"results_dir={quoted(text)}"])
    assert override.value() == text


@pytest.mark.parametrize("text", AWKWARD)
def test_flower_reads_the_overrides_as_they_were(text: str, tmp_path: Path) -> None:
    overrides = [f"task.path={quoted(text)}", "strategy=[fedprox,fedavgm]"]
    path = tmp_path / "run.toml"
    path.write_text(run_config_toml(overrides), encoding="utf-8")
    assert json.loads(str(parse_config_args([str(path)])["overrides"])) == overrides
    assert tomllib.loads(path.read_text(encoding="utf-8")).keys() == {"overrides"}


def test_the_apps_compose_what_was_typed(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    words = app_overrides(["seed=3", "results_dir=x", "strategy=scaffold"], recipe(), folder)
    composed = compose(tomllib.loads(run_config_toml(words)))
    assert (composed.seed, composed.results_dir) == (3, str(folder))
    assert not [word for word in words if word == "results_dir=x"]


def test_relative_paths_are_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = recipe(task={"path": "my data"}, local={"reuse_training": "a run"})
    words = app_overrides([], relative, tmp_path / "results")
    assert f"task.path='{tmp_path}/my data'" in words
    assert f"local.reuse_training='{tmp_path}/a run'" in words


def test_the_simulation_has_the_size_of_the_recipe() -> None:
    assert as_flower_reads(federation_config(recipe())) == {
        "num_supernodes": 10,
        "client_resources_num_cpus": 1,
        "client_resources_num_gpus": 0.0,
        "init_args_num_cpus": 2,
        "init_args_logging_level": "error",
    }


@pytest.mark.parametrize(
    ("clients", "participation", "client_cpus", "num_cpus", "expected"),
    [(2, 1.0, 1, 16, 2), (100, 0.1, 1, 64, 10), (100, 0.001, 4, 16, 4), (8, 1.0, 2, 6, 6)],
)
def test_no_more_cpus_than_a_cohort_can_use(
    clients: int, participation: float, client_cpus: int, num_cpus: int, expected: int
) -> None:
    runtime = {"client_cpus": client_cpus, "num_cpus": num_cpus}
    config = federation_config(
        recipe(clients=clients, participation=participation, runtime=runtime)
    )
    assert as_flower_reads(config)["init_args_num_cpus"] == expected


@pytest.mark.parametrize(
    ("gpus", "device", "asked", "expected"),
    [
        (1, "auto", None, 0.5),  # two clients at once share it
        (2, "auto", None, 1.0),
        (1, "cpu", None, 0.0),
        (0, "auto", None, 0.0),
        (1, "auto", 0.25, 0.25),
    ],
)
def test_clients_share_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, asked: float | None, expected: float
) -> None:
    monkeypatch.setattr(resources, "visible_gpus", lambda: gpus)
    config = federation_config(recipe(device=device, runtime={"client_gpus": asked}))
    assert as_flower_reads(config)["client_resources_num_gpus"] == pytest.approx(expected)


def test_a_gpu_is_not_cut_into_more_than_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "visible_gpus", lambda: 1)
    config = federation_config(recipe(clients=64, device="auto", runtime={"num_cpus": 64}))
    assert as_flower_reads(config)["client_resources_num_gpus"] == 0.125


@pytest.mark.parametrize(("listed", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2", 2)])
def test_gpus_that_cuda_hides_do_not_count(
    monkeypatch: pytest.MonkeyPatch, listed: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert resources.visible_gpus() == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clients": 0}, "clients=0 .* at least 1"),
        ({"runtime": {"client_cpus": 0}}, r"runtime\.client_cpus=0 .* at least 1"),
        ({"runtime": {"client_cpus": 4, "num_cpus": 2}}, r"runtime\.num_cpus=2 .* at least 4"),
    ],
)
def test_an_impossible_size_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        federation_config(recipe(**changes))
