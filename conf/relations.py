"""Checks of values of a recipe that must fit together, as far as the recipe alone tells."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.common.configured import shown
from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.conf.catalogue import method_of
from fedhet.conf.metrics import check_metrics
from fedhet.conf.mistakes import option_of_target

# Training examples of the data sets that the shipped tasks name on the hub; the test part that a
# task splits off is not taken off: these only refuse what cannot be.
HUB_EXAMPLES = {
    "ylecun/mnist": 60_000,
    "uoft-cs/cifar10": 50_000,
    "uoft-cs/cifar100": 50_000,
    "flwrlabs/femnist": 814_277,
    "stanfordnlp/imdb": 25_000,
    "zh-plus/tiny-imagenet": 100_000,
}
_DIGITS = 1_797
# Keys that only act beside others: what these are when they do not.
_IDLE: Mapping[str, Mapping[str, Any]] = {
    "calibration.bins": {"calibration.alphas": []},
    "calibration.temperature_share": {"calibration.alphas": []},
    "diagnostics.cka_clients": {"diagnostics.cka": "none"},
    "diagnostics.cka_every": {"diagnostics.cka": "none"},
    "diagnostics.cka_examples": {"diagnostics.cka": "none"},
    "early_stopping.metric": {"early_stopping.patience": None, "checkpoint.best": False},
    "early_stopping.min_delta": {"early_stopping.patience": None},
    "early_stopping.mode": {"early_stopping.patience": None, "checkpoint.best": False},
    "initial_model.layers": {"initial_model.path": None},
    "local.momentum_layers": {"local.momentum": 0},
}


def check_relations(values: Mapping[str, Any], recipe: DictConfig) -> None:
    """Refuse values that contradict each other; ``values`` are the checked, resolved ones."""
    check_slots(values["strategy"])
    _check_methods(values["strategy"])
    check_requirements(recipe)
    _check_length(values["local"])
    _check_optimizer(values["local"])
    _check_precision(values)
    _check_unseen(values)
    _check_natural(values)
    _check_clients(values)
    _check_evaluation(values)
    check_metrics(values)
    _check_calibration(values)
    _check_runtime(values["runtime"])
    _check_policy(values)
    _check_attack(values)
    _check_system(values)
    _check_ranks(values)


def without_effect(words: Iterable[str], recipe: DictConfig) -> list[str]:
    """Return a line for each override that changes nothing in this recipe's run."""
    lines = []
    for key in (word.lstrip("+").partition("=")[0] for word in words):
        idle = _IDLE.get(key, {})
        if key.startswith("local.optimizers."):
            chosen = str(recipe.local.optimizer)
            idle = {"local.optimizer": chosen} if key.split(".")[2] != chosen else {}
        if idle and all(OmegaConf.select(recipe, name) == value for name, value in idle.items()):
            others = " and ".join(f"{name}={shown(value)}" for name, value in idle.items())
            lines.append(f"{key} has no effect with {others}")
    return lines


def _check_system(values: Mapping[str, Any]) -> None:
    """Refuse simulated clients beside real ones, and asynchronous ones without a clock."""
    runtime, asynchronous = values["runtime"], values["strategy"]["asynchronous"]
    if values["system"] is not None and not runtime["simulation"]:
        raise ConfigError(
            "system simulates slow and absent clients, but the clients of "
            f"runtime={runtime['name']} are real: set system=none"
            + (" (beside strategy=fedbuff or fedasync, too)" if asynchronous is not None else "")
        )
    on_real_clock = not runtime["simulation"] or runtime["name"] == "flower"
    if asynchronous is not None and values["system"] is None and not on_real_clock:
        raise ConfigError(
            "strategy.asynchronous needs a simulated system, which says who finishes first: set "
            "system=lognormal (or constant, day_night, trace). Only runtime=deployment and "
            "runtime=flower can count replies as they arrive"
        )


def joined_methods(methods: Iterable[Any]) -> str:
    """Return the name of the method, or of the composition in alphabetical order."""
    return "+".join(sorted(str(name) for name in methods)) or "fedavg"


def _check_methods(strategy: Mapping[str, Any]) -> None:
    if not strategy["methods"]:
        raise ConfigError(
            "strategy=[] names no method: write strategy=fedavg, or another one of "
            "`fedhet --help`; strategy=[a,b] combines two"
        )


def check_slots(strategy: Mapping[str, Any]) -> None:
    """Refuse two methods that replace the same slot: the order of their names would decide."""
    owners: dict[str, str] = {}
    for method, path in sorted(strategy["methods"].items()):
        for slot in method_of(path)["replaces"]:
            if slot in owners:
                raise ConfigError(
                    f"strategy=[{owners[slot]},{method}]: both replace the {slot}, and there is "
                    "one; drop one of them"
                )
            owners[slot] = str(method)


def check_requirements(recipe: DictConfig) -> None:
    """Refuse settings that a method of the recipe cannot have."""
    for method, path in recipe.strategy.methods.items():
        for key, needed in method_of(str(path))["requires"].items():
            found = OmegaConf.select(recipe, key)
            if found != needed:
                name, found, needed = _as_written(key, found, needed)
                raise ConfigError(f"{name}={found}, but strategy={method} needs {name}={needed}")


def _as_written(key: str, found: Any, needed: Any) -> tuple[str, Any, Any]:
    """Return a key and its values as one writes them: a slot's class is an option of its group."""
    group = key.replace(".", "/")
    if OmegaConf.is_config(found) and "_target_" in found:
        return group, option_of_target(group, str(found["_target_"])), needed or "method"
    if OmegaConf.is_dict(found):
        return key, "{...}", needed or "null"
    return key, found, needed


def _check_length(local: Mapping[str, Any]) -> None:
    epochs, steps = local["epochs"], local["steps"]
    if (epochs is None) == (steps is None):
        raise ConfigError(
            f"local.epochs={epochs} and local.steps={steps}: give exactly one, and set the other "
            "to null"
        )


def _check_optimizer(local: Mapping[str, Any]) -> None:
    """Refuse an unknown local optimizer, and settings that it does not have."""
    name, known = local["optimizer"], sorted(local["optimizers"])
    if name not in known:
        near = did_you_mean(str(name).lower(), known)
        raise ConfigError(f"local.optimizer={name} is unknown{near}; allowed: {', '.join(known)}")
    own = local["optimizers"][name]
    for setting in ("momentum", "weight_decay"):
        if local[setting] and setting not in own:
            raise ConfigError(
                f"local.{setting}={local[setting]}, but local.optimizer={name} has none: set "
                f"local.{setting}=0, or one of local.optimizers.{name} "
                f"({', '.join(sorted(str(key) for key in own if key != '_target_'))})"
            )


def _check_precision(values: Mapping[str, Any]) -> None:
    """Refuse to take a difference of gradients in bfloat16."""
    order = values["strategy"].get("per_fedavg", {}).get("order")
    if values["local"]["autocast"] and order == "hessian_free":
        raise ConfigError(
            "local.autocast=true: bfloat16 has too few digits for the difference of two gradients "
            "that strategy.per_fedavg.order=hessian_free takes: set local.autocast=false, or "
            "strategy.per_fedavg.order=first"
        )


def _check_natural(values: Mapping[str, Any]) -> None:
    """Refuse natural clients where no column says whose an example is."""
    task = values["task"]
    if values["partition"]["name"] != "natural" or task.get("client_column") is not None:
        return
    # whose function may tell, or whose folder has a file or a folder for each site
    tells = task.get("inputs") == "own" or task.get("source") == "image_folder"
    if not tells or Path(str(task.get("path"))).expanduser().is_file():
        raise ConfigError(
            "partition=natural: its clients are the values of a column, and "
            "task.client_column=null: name the column, or choose another partition"
        )


def _check_clients(values: Mapping[str, Any]) -> None:
    """Refuse more clients than there are examples, and more replies than clients."""
    clients = values["clients"]
    if clients == 0:
        return
    most = _most_examples(values["task"])
    if values["partition"]["name"] != "site" and most is not None and clients > most[0]:
        raise ConfigError(
            f"clients={clients} is more than the {most[0]} training examples of {most[1]}: lower "
            f"clients to {most[0]} or less"
        )
    trainers = clients - len(_unseen(values))
    cohort = trainers
    if str(values["strategy"]["sampler"].get("_target_")).endswith(".FixedSizeSampler"):
        cohort = max(1, int(float(values["participation"]) * trainers + 0.5))
    if values["min_replies"] > cohort:
        raise ConfigError(
            f"min_replies={values['min_replies']}, but of the {trainers} clients that train at "
            f"most {cohort} take part in a round (participation): set min_replies to {cohort} or "
            "less"
        )
    enough = values["runtime"]["min_clients"]
    if enough is not None and enough > clients:
        raise ConfigError(
            f"runtime.min_clients={enough} is more than clients={clients}: set it to {clients} or "
            "less, or null"
        )


def _check_unseen(values: Mapping[str, Any]) -> None:
    """Refuse to leave out clients that do not exist, all clients, or clients that noise counts."""
    unseen, clients = _unseen(values), values["clients"]
    numbers = {one for one in unseen if isinstance(one, int)}
    if clients and unseen and not (numbers <= set(range(clients)) and len(unseen) < clients):
        raise ConfigError(
            f"partition.unseen={list(unseen)}: name some of the clients 0 to {clients - 1}, and "
            "leave at least one to train"
        )
    if unseen and "clients" in (values["strategy"].get("differential_privacy") or {}):
        raise ConfigError(
            f"partition.unseen={list(unseen)}: strategy/differential_privacy divides by the "
            "clients expected in a round, as if all could train; set partition.unseen=[], or "
            "strategy/differential_privacy=none"
        )
    if unseen and (values["strategy"].get("secure_aggregation") or {}).get("find_spoilers"):
        raise ConfigError(
            f"partition.unseen={list(unseen)}: strategy.secure_aggregation.find_spoilers=true "
            "searches among all clients; set it to false, or partition.unseen=[]"
        )


def _unseen(values: Mapping[str, Any]) -> set[int | str]:
    """Return the clients that never train, by id or name."""
    return set(values["partition"].get("unseen", ()))


def _most_examples(task: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return how many training examples a task has at most, and which; None: only its data tell."""
    if task.get("train_size"):
        return int(task["train_size"]), "task.train_size"
    if "source" not in task:  # a function gives the examples
        return None
    if task["source"] == "embedded":
        test = math.ceil(_DIGITS * float(task["test_fraction"]) - 1e-9)
        return _DIGITS - test, f"task={task['name']}"
    from_hub = task["source"] == "hub" and not task.get("path") and "FEDHET_DATA" not in os.environ
    found = HUB_EXAMPLES.get(str(task.get("hub"))) if from_hub else None
    return (found, f"task={task['name']}") if found else None


def _check_evaluation(values: Mapping[str, Any]) -> None:
    target = values["target_accuracy"]
    if target is not None and values["evaluation"]["every"] == 0:
        raise ConfigError(
            f"target_accuracy={target} is checked at evaluations, but evaluation.every=0 has none "
            "before the end; set evaluation.every to 1 or more"
        )


def _check_calibration(values: Mapping[str, Any]) -> None:
    alphas = values["calibration"]["alphas"]
    holdout = values["partition"].get("holdout", 0.0)
    if alphas and not holdout:
        raise ConfigError(
            f"calibration.alphas={list(alphas)}: clients calibrate on held-out examples, but "
            f"partition.holdout={holdout}: set it to 0.1, or calibration.alphas=[]"
        )
    asked = {f"calibration.alphas={list(alphas)}": "calibration.alphas=[]"} if alphas else {}
    if values["evaluation"]["confusion"]:
        asked["evaluation.confusion=true"] = "evaluation.confusion=false"
    for word, off in asked.items():
        for group in ("secure_aggregation", "differential_privacy"):
            if values["strategy"].get(group):
                raise ConfigError(
                    f"{word}: every client sends an unprotected histogram, which strategy/{group} "
                    f"forbids; set {off}, or strategy/{group}=none"
                )


def _check_runtime(runtime: Mapping[str, Any]) -> None:
    cpus, each = runtime["num_cpus"], runtime["client_cpus"]
    if cpus is not None and cpus < each:
        raise ConfigError(
            f"runtime.num_cpus={cpus} is less than runtime.client_cpus={each}: set it to at least "
            f"{each}, or null"
        )


def _check_policy(values: Mapping[str, Any]) -> None:
    """Refuse the policy of simulated sites where there are real ones, which have their own."""
    if values["site"]["policy"] is not None and not values["runtime"]["simulation"]:
        raise ConfigError(
            f"site.policy={shown(values['site']['policy'])} is for simulations, and the sites of "
            f"runtime={values['runtime']['name']} have their own: set site.policy=null, and "
            "--node-config 'policy=\"/path\"' at a site"
        )


def _check_attack(values: Mapping[str, Any]) -> None:
    """Refuse an attack that nobody has allowed, or on a federation that is no simulation."""
    if not (attack := values.get("attack")):
        return
    name = str(attack["_target_"]).rpartition(".")[2]
    if not values["runtime"]["simulation"]:
        raise ConfigError(
            f"attack {name} is for simulations, and runtime={values['runtime']['name']} with "
            "runtime.simulation=false has real clients: set attack=none"
        )
    if not attack.get("allow"):
        raise ConfigError(
            f"attack {name} makes clients of this run hostile on purpose, and attack.allow=false: "
            "set attack.allow=true if you mean it, or attack=none"
        )


def _check_ranks(values: Mapping[str, Any]) -> None:
    """Refuse clients' adapters of a higher rank than the model's."""
    ranks = values["strategy"].get("flora", {}).get("ranks") or [0]
    lora = values["task"].get("lora")
    if lora and max(ranks) > lora["r"]:
        raise ConfigError(
            f"strategy.flora.ranks={ranks}: a client's rank is at most task.lora.r={lora['r']}; "
            "set that higher, or the ranks lower"
        )
