"""What people type first, by the words of other tools and papers, and how it is written here."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DATA = "task=NAME, such as task=mnist; for your own data task=image_folder, tabular, hf or own"
_SHARE = "participation={value}"
_FOLDER = "results_dir={value}"
_CPUS = "runtime.num_cpus={value}"
_GPUS = "device=cuda; runtime.client_gpus is a client's share of a GPU"
_PRIVACY = "strategy/differential_privacy=central_fixed (or central_adaptive, local)"
_SECURE = "strategy/secure_aggregation=secagg_plus"
_LR = "local.lr={value} (the clients' step size) or server.lr={value}"
_DECAY = "schedule=exponential schedule.decay={value}"
_HOSTILE = "attack=sign_flip attack.allow=true (or another attack; docs/robust.md)"

# By a key's last name, without underscores; {value} is the value that was typed.
KEYS: Mapping[str, str] = {
    "data": _DATA,
    "dataset": _DATA,
    "datadir": "task.path={value}",
    "dataroot": "task.path={value}",
    "datapath": "task.path={value}",
    "folder": "task.path={value}",
    "root": "task.path={value}",
    "method": "strategy={value}",
    "algorithm": "strategy={value}",
    "algo": "strategy={value}",
    "proximalmu": "strategy=fedprox strategy.fedprox.mu={value}",
    "learningrate": _LR,
    "serverlr": "server.lr={value}",
    "strategyserverlr": "server.lr={value}",
    "clientlr": "local.lr={value}",
    "lrdecay": _DECAY,
    "gamma": _DECAY,
    "lrschedule": "schedule={value}",
    "scheduler": "schedule={value}",
    "warmup": "schedule=cosine, exponential or multi_step: none has a warm-up",
    "localepochs": "local.epochs={value}",
    "numepochs": "local.epochs={value}",
    "localsteps": "local.epochs=null local.steps={value}",
    "clientfraction": _SHARE,
    "fraction": _SHARE,
    "fractionfit": _SHARE,
    "fractiontrain": _SHARE,
    "samplerate": _SHARE,
    "joinratio": _SHARE,
    "clientsperround": "participation=SHARE, {value} of the clients",
    "numserverrounds": "rounds={value}",
    "commround": "rounds={value}",
    "dirichlet": "partition=dirichlet partition.alpha={value}",
    "beta": "partition.alpha={value}",
    "randomseed": "seed={value}",
    "outputdir": _FOLDER,
    "output": _FOLDER,
    "outdir": _FOLDER,
    "out": _FOLDER,
    "savedir": _FOLDER,
    "logdir": _FOLDER,
    "continue": "resume=true results_dir=FOLDER",
    "gpu": _GPUS,
    "gpus": _GPUS,
    "numgpus": _GPUS,
    "workers": _CPUS,
    "numworkers": _CPUS,
    "cpus": _CPUS,
    "numcpus": _CPUS,
    "backend": "runtime=local, flower, ray or deployment",
    "wandb": "logger=[csv,wandb]",
    "tensorboard": "logger=[csv,tensorboard]",
    "mlflow": "logger=[csv,mlflow]",
    "metric": "evaluation.metrics=[{value}]",
    "metrics": "evaluation.metrics=[{value}]",
    "dp": _PRIVACY,
    "privacy": _PRIVACY,
    "differentialprivacy": _PRIVACY,
    "epsilon": "strategy/differential_privacy=local strategy.differential_privacy.epsilon={value}",
    "noise": f"{_PRIVACY} strategy.differential_privacy.noise_multiplier={{value}}",
    "secagg": _SECURE,
    "secure": _SECURE,
    "secureaggregation": _SECURE,
    "aggregation": "strategy/aggregator={value}",
    "byzantine": _HOSTILE,
    "malicious": _HOSTILE,
    "quantization": "strategy/compression=int8 (or int4, float16, bfloat16)",
    "stragglers": "system=lognormal: slow and absent clients (docs/running.md)",
    "dropout": "system=lognormal: slow and absent clients; a model's own: task.model_options",
    "pretrained": "initial_model.path=FILE; a model's own: task.model_options",
    "init": "initial_model.path={value}",
    "verbose": "logger=NAME; the run's log.txt is in its folder",
}

_TABLE, _IMAGES = "task=tabular", "task=image_folder"
_SKEW = "partition=dirichlet partition.alpha=0.1"
_SITES = "runtime=deployment (docs/deployment.md)"
_HERE = "runtime=local, ray or flower"

# By the group and the option, in the same form; options that exist in another group are found.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "task": {
        "csv": _TABLE,
        "table": _TABLE,
        "parquet": _TABLE,
        "regression": f"{_TABLE} task.kind=regression",
        "image": _IMAGES,
        "images": _IMAGES,
        "folder": _IMAGES,
        "text": "task=hf_text (or imdb)",
        "llm": "task=hf_causal",
        "flowertune": "task=hf_causal",
        "huggingface": "task=hf",
        "custom": "task=own task.data=package.module:function task.model=package.module:function",
    },
    "strategy": {
        "fedopt": "strategy=fedadam, fedyogi or fedadagrad",
        "fedsgd": "strategy=fedavg local.epochs=null local.steps=1",
        "dp": f"strategy=fedavg {_PRIVACY}",
        "dpfedavg": f"strategy=fedavg {_PRIVACY}",
        "secagg": f"strategy=fedavg {_SECURE}",
        "async": "strategy=fedasync or fedbuff",
    },
    "partition": {
        "noniid": _SKEW,
        "labelskew": _SKEW,
        "lda": _SKEW,
        "byuser": "partition=natural",
        "quantityskew": "partition=dirichlet",
    },
    "runtime": {
        "simulation": _HERE,
        "docker": _SITES,
        "tls": _SITES,
        "superlink": _SITES,
        "distributed": _SITES,
    },
    "system": {
        "slow": "system=lognormal",
        "stragglers": "system=lognormal",
        "dropout": "system=lognormal",
    },
    "schedule": {"step": "schedule=multi_step", "exp": "schedule=exponential"},
    "logger": {"tb": "logger=tensorboard"},
    "local": {"sgd": "local=default"},
    "strategy/differential_privacy": {"dp": _PRIVACY, "gaussian": _PRIVACY},
    "strategy/compression": {
        "8bit": "strategy/compression=int8",
        "4bit": "strategy/compression=int4",
        "fp16": "strategy/compression=float16",
    },
}


def key_here(key: str, value: object) -> str:
    """Return how a key of another tool is written here; empty if it is not known."""
    if whole := KEYS.get(_plain(key), ""):
        return whole.format(value=value)
    group, name = key.partition(".")[0], key.rpartition(".")[2]
    found = KEYS.get(_plain(name), "")
    is_same = group == key or f"{group}." in found or f"{group}=" in found
    return found.format(value=value) if is_same else ""


def option_here(group: str, option: str) -> str:
    """Return how an option that another tool has is written here; empty if it is not known."""
    return OPTIONS.get(group, {}).get(_plain(option), "")


def _plain(word: str) -> str:
    return re.sub(r"[\W_]", "", word).lower()
