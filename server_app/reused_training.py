"""Checks that another run's client models are those that this run would have trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.common.checksums import CLIENT_MODELS, read_label, require_label
from fedhet.common.errors import ConfigError
from fedhet.common.nested import flat
from fedhet.common.results import CONFIG, read_config, summary_of
from fedhet.conf import build_part, config_yaml
from fedhet.conf.build import strategy_parts
from fedhet.conf.trust import require_trust
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import ClientSide
from fedhet.strategies.round.checks import sides_with
from fedhet.strategies.round.client_snapshots import FILE
from fedhet.strategies.wire.compression import DOWN, UP

KEY = "local.reuse_training"
_TRAINING = ("seed", "clients", "task", "partition", "local", "strategy.phases", DOWN)
_HOOKS = ("begin", "penalty", "correct")  # those that act in training
# the folder of the examples, and values that a composed recipe lacks
_ASIDE = ("task.path", "task.classifier_tensors", KEY)


def check_reused_training(recipe: DictConfig, folder: Path, classifier_tensors: int) -> None:
    """Refuse to reuse the run in ``folder`` if it trained differently or for several rounds."""
    if not (folder / CONFIG).is_file() or not (folder / FILE).is_file():
        raise ConfigError(
            f"{KEY}={folder} does not hold config.yaml and {FILE}: name the folder of a finished "
            "run with checkpoint.client_models=true"
        )
    summary = summary_of(folder)
    theirs = OmegaConf.create(read_config(folder, summary))
    assert isinstance(theirs, DictConfig)
    require_trust(folder, theirs, summary, f"set {KEY} to a run of your own")
    require_label(folder / FILE, read_label(folder / FILE), kind=CLIENT_MODELS)
    for run, rounds in (("that run", theirs.rounds), ("this run", recipe.rounds)):
        if int(rounds) != 1:
            raise ConfigError(
                f"{KEY}={folder} reuses the models of a single round, and {run} has "
                f"rounds={rounds}; set rounds=1"
            )
    resolved = OmegaConf.create(config_yaml(recipe, classifier_tensors))
    assert isinstance(resolved, DictConfig)
    if own := sides_with("own_model", _client_sides(resolved)):
        raise ConfigError(
            f"{KEY}={folder} has the shared models alone, and client sides {own} train a model of "
            f"the client's own beside them; set {KEY}=null, or drop them from strategy=[...]"
        )
    if changed := _changed_on_their_way(theirs):
        raise ConfigError(
            f"{KEY}={folder} holds the models as they arrived, and {', '.join(changed)} changed "
            "them after training: name the folder of a run without it; this run may have it"
        )
    here, there = _training(resolved), _training(theirs)
    differing = [
        f"{key}={there.get(key)} there and {here.get(key)} here"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]
    if differing:
        raise ConfigError(f"{KEY}={folder} trained in another way: {', '.join(differing)}")


def _training(recipe: DictConfig) -> dict[str, Any]:
    """Return the values of a resolved recipe that training depends on, by key."""
    sides, attack = _client_sides(recipe), _attack(recipe)
    acting = sorted({name for hook in _HOOKS for name in sides_with(hook, sides)})
    keys = [*_TRAINING, *(f"strategy.{name}" for name in acting)]
    keys += ["attack"] if attack is not None and type(attack).data is not Attack.data else []
    found: dict[str, Any] = {"strategy": acting}
    for key in keys:
        value = OmegaConf.select(recipe, key)
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        found |= flat({key: plain})
    return {key: value for key, value in found.items() if key not in _ASIDE}


def _changed_on_their_way(recipe: DictConfig) -> list[str]:
    """Return the keys of parts that change a trained model before it arrives at the server."""
    sides = {f"strategy.{name}": side for name, side in _client_sides(recipe).items()}
    if (attack := _attack(recipe)) is not None:
        sides["attack"] = attack
    changing = sides_with("upload", sides)
    return [*changing, UP] if OmegaConf.select(recipe, UP) else changing


def _client_sides(recipe: DictConfig) -> Mapping[str, ClientSide]:
    return strategy_parts(recipe, classifier_tensors=0).client_sides


def _attack(recipe: DictConfig) -> Attack | None:
    attack: Attack | None = build_part(recipe, "attack", classifier_tensors=0)
    return attack
