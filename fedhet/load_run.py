"""Loads the task and the model of a finished run from its results directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from yaml import YAMLError

from fedhet.client_app.client import PERSONAL
from fedhet.client_app.state import ClientState, grouped
from fedhet.common.checksums import CLIENT_STATE, MODEL, require_label
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.files import expanded
from fedhet.common.results import COMPLETED, CONFIG, SUMMARY, read_config, summary_of
from fedhet.conf import method_name, plain_part
from fedhet.conf.build import strategy_parts
from fedhet.conf.trust import require_trust
from fedhet.server_app.initial_model import fixed_tensors
from fedhet.server_app.listeners.best_model import BEST
from fedhet.strategies.base import ClientSide, LocalContext
from fedhet.strategies.components.tensor_selection import tensors_of
from fedhet.strategies.round.checks import sides_with
from fedhet.strategies.wire.tensor_files import load_tensors, parameters_sha256
from fedhet.tasks import AnyTask, Task, build_task, pick_device
from fedhet.tasks.models.own_weights import frozen_sha256
from fedhet.tasks.table_task import PUBLIC_COLUMNS

MODEL_FILE = "model.safetensors"
_TRUST = "add --trust (in Python fedhet.conf.trust.trust(FOLDER))"


def recipe_of(folder: Path) -> DictConfig:
    """Return the recipe that a run has written, with the keys of today.

    Where it has clients=0, they are as many as have registered.

    Raises:
        ConfigError: if the folder holds no run, or its recipe names code that nobody vouches for
            (``trust`` of conf/trust.py does).
    """
    folder = expanded(str(folder), "folder")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is not the results directory of a run: it has no {CONFIG}")
    summary = summary_of(folder)
    text = read_config(folder, summary)
    try:
        plain = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise DamagedFileError(f"{folder / CONFIG} is damaged: {error}") from None
    if not isinstance(plain, dict) or not plain:
        raise DamagedFileError(f"{folder / CONFIG} is damaged: it holds no recipe")
    recipe = {str(key): value for key, value in plain.items()}
    if not recipe.get("clients"):
        recipe["clients"] = int(summary.get("clients", 0))
    found = OmegaConf.create(recipe)
    require_trust(folder, found, summary, f"{_TRUST} if you trust whoever made the folder")
    return found


def task_of(recipe: DictConfig, metadata: Mapping[str, str] | None = None) -> AnyTask:
    """Return the task of a run's recipe; ``metadata`` names its classes if the recipe does not."""
    try:
        plain = {key: plain_part(recipe, key) for key in ("task", "partition")}
    except OmegaConfBaseException as error:  # a variable of the environment that is not set here
        raise ConfigError(str(error).partition("\n")[0]) from None
    plain["task"].pop("classifier_tensors", None)  # the run has added it
    if metadata and "classes" in metadata and plain["task"].get("classes") is None:
        plain["task"]["classes"] = json.loads(metadata["classes"])
    return build_task(
        plain["task"],
        plain["partition"],
        seed=recipe.seed,
        num_clients=recipe.clients,
        columns=(metadata or {}).get("columns"),
    )


def data_set_task_of(recipe: DictConfig, advice: str = "") -> Task:
    """Return the task of a run on a data set that fedhet reads; ``advice`` ends the error.

    Raises:
        ConfigError: if a function of the user's gave the examples.
    """
    task = task_of(recipe)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task={task.name}: this works on data sets that fedhet reads, but the run's examples "
            f"come from {task.config.data}{advice}"
        )
    return task


def label_metadata_of(folder: Path, *, best: bool = False) -> dict[str, str]:
    """Return what a run's model is stored with about labels and inputs (``label_metadata``)."""
    folder = expanded(str(folder), "folder")
    _, metadata, _ = load_tensors(_model_path(folder, best), kind=MODEL)
    names = ("classes", "vocabulary", "columns", PUBLIC_COLUMNS)
    return {key: metadata[key] for key in names if key in metadata}


def model_of(
    folder: Path, task: AnyTask, state: Path | None = None, *, best: bool = False
) -> nn.Module:
    """Return a run's output model in eval mode, on the GPU if there is one.

    ``best``: that of the best round (``checkpoint.best``), not that of the last one. ``state``: a
    client's state file; the model is the client's own then, as the run's evaluations make it
    (``own_model``), with the output model for what its clients share. Otherwise the tensors that
    no client trains (FedBABU) have their initial values.
    """
    folder = expanded(str(folder), "folder")
    if task.predictions is None:
        raise ConfigError(
            f"{folder}: its model task.model={task.config.model} generates features and predicts "
            "nothing"
        )
    path = _model_path(folder, best)
    tensors, frozen = _output_model(folder, best)
    model = task.build_model(task.seed)
    if frozen not in (None, frozen_sha256(model)):
        raise ConfigError(
            f"{path} was trained beside other frozen weights than task.model={task.config.model} "
            "has here: use the same pretrained files as the run"
        )
    initial = {n: value for n, value in tensors_of(model).items() if value.is_floating_point()}
    recipe, kept = recipe_of(folder), ClientState()
    sides = {} if state is None else _sides_with_own_model(recipe, task)
    if state is not None:
        kept = _client_state(state, summary_of(folder).get("run"))
        _require_own_model(state, kept, sides, method_name(recipe))
        tensors |= kept.get(PERSONAL, {})
    else:
        tensors |= fixed_tensors(recipe, model)
    whole, found = (
        {(name, value.shape) for name, value in part.items()} for part in (initial, tensors)
    )
    if found != whole:
        differ = sorted({name for name, _ in found ^ whole})
        raise ConfigError(
            f"{path} is not the task's whole model (it differs in {differ[:3]}). Either clients "
            "keep some tensors (then name a client's file with --state of fedhet-evaluate or "
            "fedhet-export), or the run's output is another network, or the task is another"
        )
    model.load_state_dict(tensors, strict=False)  # integer buffers are not stored
    for side in sides.values():
        _put_own_model(model, side, kept)
    return model.to(pick_device("auto")).eval()


def _output_model(folder: Path, best: bool) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors of a run's model, if they are those of its summary.json.

    With them comes the hash of what the model keeps frozen; None without any.
    """
    path, summary = _model_path(folder, best), summary_of(folder)
    expected = {"run": summary["run"]} if "run" in summary else {}
    tensors, metadata, _ = load_tensors(path, kind=MODEL, **expected)
    about = summary.get("best_model", {}) if best else summary
    if "parameters_sha256" not in about:
        raise ConfigError(f"{folder} has no completed run: its {SUMMARY} does not name its model")
    if (found := parameters_sha256(tensors)) != about["parameters_sha256"]:
        raise DamagedFileError(
            f"{path} is damaged or of another run: its parameters_sha256 is {found}, and {SUMMARY} "
            f"says {about['parameters_sha256']}"
        )
    return tensors, metadata.get("frozen_sha256")


def _sides_with_own_model(recipe: DictConfig, task: AnyTask) -> dict[str, ClientSide]:
    """Return the client sides whose model of the client's own can be made after the run."""
    sides = strategy_parts(recipe, task.classifier_tensors).client_sides
    found = {name: sides[name] for name in sides_with("own_model", sides)}
    for name, side in found.items():
        if not side.own_state:
            raise ConfigError(
                f"--state: strategy={name} has the clients' own models only right after their "
                f"training: with strategy={method_name(recipe)} no file has them"
            )
    return found


def _client_state(path: Path, run: str | None) -> ClientState:
    """Return what a client keeps, from a file of client_app/state.py."""
    try:
        stored, _, label = load_tensors(path)
        kind = label.get("kind")
        if kind == CLIENT_STATE and run is not None:
            require_label(path, label, run=run)
    except DamagedFileError as error:
        raise DamagedFileError(f"--state {error}") from None
    if kind != CLIENT_STATE:
        raise ConfigError(
            f"--state {path} is a {kind}: name a client's state, client-*/round-*.safetensors"
        )
    return grouped(stored)


def _require_own_model(
    path: Path, kept: ClientState, sides: Mapping[str, ClientSide], method: str
) -> None:
    """Refuse a client's state that makes no model of the client's own."""
    for name, side in sides.items():
        if lacking := sorted(side.own_state - kept.keys()):
            raise ConfigError(
                f"--state {path} lacks {', '.join(lacking)}, from which strategy={name} makes "
                "the client's own model"
            )
    if not sides and PERSONAL not in kept:
        raise ConfigError(
            f"--state {path} does not give a model (it has {', '.join(kept)}): with "
            f"strategy={method} a client has its own model only right after training, in no file"
        )


@torch.no_grad()
def _put_own_model(model: nn.Module, side: ClientSide, kept: ClientState) -> None:
    """Put the tensors of a client's own model, which a side makes, into the shared one."""
    tensors = tensors_of(model)
    unread: Any = None  # own_state: it reads the state and the model alone
    context = LocalContext(
        model=model,
        loaded=tensors,
        shared=tensors,
        received={},
        state=kept,
        data=unread,
        loss=unread,
        round=0,
        batch_size=0,
        lr=0.0,
    )
    model.load_state_dict(dict(side.own_model(context)), strict=False)


def _model_path(folder: Path, best: bool) -> Path:
    path = folder / (BEST if best else MODEL_FILE)
    if best and not path.is_file():
        raise ConfigError(f"{folder} has no {BEST}: runs keep one with checkpoint.best=true")
    if not path.is_file():
        summary = summary_of(folder)
        if there := summary.get("server_folder"):
            raise ConfigError(
                f"{folder} has no {MODEL_FILE}: it is in {there} at the server; the run's command "
                "with resume=true and runtime.fetch=... brings it"
            )
        if summary.get("status") == COMPLETED:
            raise ConfigError(
                f"{folder} has no {MODEL_FILE}, though its run has completed: the file was removed "
                "or not copied; bring it back from where the run was, or run it again"
            )
        raise ConfigError(f"{folder} has no {MODEL_FILE}: the run has not completed")
    return path
