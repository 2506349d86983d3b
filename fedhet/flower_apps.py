"""fedhet's methods in a Flower app of your own: a ClientApp and a ServerApp of your functions.

    from fedhet import FedPVR, make_client_app                  # client_app.py
    app = make_client_app(Net, load_data, FedPVR())

    from fedhet import FedPVR, make_server_app                  # server_app.py
    app = make_server_app(Net, load_data, FedPVR())

Both take the same arguments; the server refuses clients whose recipe differs. Underneath is a
recipe (``task=own``, ``strategy=fedpvr``), so every key of docs/keys.md can be set, in ``settings``
or in the app's run config (``flwr run . --run-config 'rounds=20 local.lr=0.05'``).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedhet.client_app.app import Handlers
from fedhet.common.checksums import MODEL
from fedhet.common.configured import Configured, fields
from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded
from fedhet.conf import RunConfig, compose_overrides, overrides_of, quote
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import fields_of
from fedhet.load_run import MODEL_FILE
from fedhet.server_app.app import run_recipe
from fedhet.server_app.listeners.best_model import BEST
from fedhet.strategies.method import Method
from fedhet.strategies.wire.tensor_files import load_tensors
from fedhet.tasks import Functions
from fedhet.tasks.losses import Loss, loss_of
from fedhet.tasks.models.own_weights import load_own_weights
from fedhet.tasks.own_data import refuse_unread_partition
from fedhet.tasks.references import Function, name_of

AnyMethod = str | Method | type[Method]

# Keys of Flower's own templates, which an app may have already.
TEMPLATE_KEYS = {
    "num-server-rounds": "rounds",
    "fraction-train": "participation",
    "fraction-fit": "participation",
    "local-epochs": "local.epochs",
    "learning-rate": "local.lr",
    "lr": "local.lr",
    "batch-size": "local.batch_size",
}


def make_client_app(
    model: Function,
    data: Function,
    method: AnyMethod | Sequence[AnyMethod] = "fedavg",
    *,
    kind: str = "classification",
    loss: str | Loss | None = None,
    test_data: Function | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ClientApp:
    """Return the ClientApp of a federation on your own model and data.

    Args:
        model: returns a new ``nn.Module``: inputs (B, ...) to outputs, for classification logits
            (B, C). It is called with ``num_classes`` and ``input_shape`` if it has such parameters
            and the settings have ``task.num_classes`` and ``task.input_shape``. Its last linear
            layer is the classifier, and features are that layer's inputs; another module is named
            by the setting ``task.classifier``.
        data: returns (train, test). With a parameter ``client_id`` or ``partition_id`` it gives one
            client's (and is told ``num_clients`` or ``num_partitions``, ``seed``, and
            ``data_folder``, the node config's data-folder as a Path); without one it gives
            everybody's, which the setting ``partition`` divides. Each is a pair of arrays (inputs,
            targets), a torch Dataset, or a DataLoader, whose Dataset is used; test may be None.
        method: one of fedhet's or of your own (``FedPVR(layers="last:2")``), its class, a
            method's name ("fedpvr"), or several of them.
        kind: classification, regression (targets (B,) or (B, k)) or segmentation (logits
            (B, C, H, W), labels (B, H, W)).
        loss: (outputs, targets) -> mean loss, or the name of one of the kind's; by default
            cross_entropy, of a regression mse.
        test_data: returns the server's test examples; by default those of ``data`` if that gives
            everybody's, or else none, and the clients evaluate on theirs.
        settings: keys of the recipe, such as ``{"local.epochs": 1, "participation": 0.5}``.

    Raises:
        ConfigError: for a method or setting that there is not.
    """
    app = _App.of(model, data, method, kind, loss, test_data, settings)
    return Handlers(app.words, app.functions).client_app()


def make_server_app(
    model: Function,
    data: Function,
    method: AnyMethod | Sequence[AnyMethod] = "fedavg",
    *,
    kind: str = "classification",
    loss: str | Loss | None = None,
    test_data: Function | None = None,
    settings: Mapping[str, Any] | None = None,
) -> ServerApp:
    """Return the ServerApp of a federation; the arguments are those of :func:`make_client_app`.

    It writes what it measures into the folder that the setting or run-config key ``results_dir``
    names, by default a new one below ~/fedhet-results (docs/running.md says what is in it);
    :func:`load_weights` loads the trained tensors from there.
    """
    parts = _App.of(model, data, method, kind, loss, test_data, settings)
    app = ServerApp()
    app.main()(partial(_serve, parts))
    return app


def load_weights(
    model: nn.Module, folder: str | Path, *, best: bool = False, partial: bool = False
) -> None:
    """Load a finished run's tensors into your own model, by the model's own names.

    Adapters of LoRA (``task.lora``) are added to the model's weights, so it stays a plain model. A
    classifier's bias that the run did without (``task.head_bias=false``, FedDW) becomes 0.

    Args:
        model: as the model function returns it.
        folder: the run's results directory.
        best: the model of the best round (``checkpoint.best=true``) in place of the last one.
        partial: leave what the run does not have as it is: of FedPer and the like, the clients keep
            the rest of the model.

    Raises:
        ConfigError: if the folder has no such tensors, they do not fit the model or are only a part
            of it, or the model's frozen weights are not those of the run.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r} is not an nn.Module: build one first")
    path = expanded(str(folder), "folder") / (BEST if best else MODEL_FILE)
    if best and path.parent.is_dir() and not path.exists():
        raise ConfigError(f"{path} does not exist: the run had no checkpoint.best=true")
    tensors, metadata, _ = load_tensors(path, kind=MODEL)
    load_own_weights(model, tensors, metadata, path, partial=partial)


@dataclass(frozen=True)
class _App:
    """What both apps are made of."""

    overrides: tuple[str, ...]
    functions: Functions

    @classmethod
    def of(
        cls,
        model: Function,
        data: Function,
        method: AnyMethod | Sequence[AnyMethod],
        kind: str,
        loss: str | Loss | None,
        test_data: Function | None,
        settings: Mapping[str, Any] | None,
    ) -> _App:
        for name, one in (("model", model), ("data", data), ("test_data", test_data)):
            if isinstance(one, nn.Module) or not (one is None or callable(one)):
                raise ConfigError(
                    f"{name} is a {type(one).__name__}: give the function or the class that "
                    "returns it, and do not call it"
                )
        own = {
            "task": "own",
            "task.kind": kind,
            "task.model": name_of(model),
            "task.data": name_of(data),
            "task.test_data": None if test_data is None else name_of(test_data),
            "task.loss": loss if loss is None or isinstance(loss, str) else name_of(loss),
            **_batch_size_of(data),
            "runtime": "deployment",  # the same everywhere: a client's state is in Flower's Context
            "clients": 0,
        }
        several = isinstance(method, (list, tuple))
        methods: Sequence[Any] = method if several else [method]  # type: ignore[assignment]
        found: Any = loss_of(kind, loss) if loss is None or isinstance(loss, str) else loss
        words = [f"strategy=[{','.join(map(_word_of, methods))}]", *_words(own)]
        for one in methods:
            if isinstance(one, Configured):
                words += _words(_parameters(one))
        words += _words(settings or {})
        refuse_unread_partition(data, words)
        compose_overrides(tuple(words))  # refuses what is wrong when the app is imported
        return cls(tuple(words), Functions(data, model, test_data, found))

    def words(self, run_config: RunConfig) -> list[str]:
        """Return the recipe's overrides, those of the run config last; its other keys are yours."""
        return [*self.overrides, *overrides_of(_of_recipe(run_config))]


def _batch_size_of(data: Function) -> dict[str, str]:
    """Give a data function of Flower's templates, which makes DataLoaders, the batch size."""
    asks = "batch_size" in inspect.signature(data).parameters
    return {"task.data_options.batch_size": "${local.batch_size}"} if asks else {}


def _serve(parts: _App, grid: Grid, context: Context) -> None:
    words = parts.words(context.run_config)
    run_recipe(compose_overrides(tuple(words)).copy(), grid, words, parts.functions)


def _of_recipe(run_config: RunConfig) -> RunConfig:
    """Return the entries that set a key of the recipe, by that key."""
    given: dict[str, str] = {}
    for name in run_config:
        key = TEMPLATE_KEYS.get(name, name)
        if key != "overrides" and key.partition(".")[0] not in fields_of(Recipe):
            continue
        if key in given:
            raise ConfigError(f"the run config has {given[key]!r} and {name!r}: both set {key}")
        given[key] = name
    return {key: run_config[name] for key, name in given.items()}


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as overrides."""
    return [f"{key}={_value(value)}" for key, value in settings.items()]


def _value(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return quote(str(value)) if str(value) else "''"
    return json.dumps(value.item() if isinstance(value, np.generic) else value)


def _word_of(method: AnyMethod) -> str:
    """Return the method as ``strategy=`` takes it: its name, or its class if it is the user's."""
    if isinstance(method, str):
        return method.strip("[]")
    kind = method if isinstance(method, type) else type(method)
    if kind.__module__.startswith("fedhet.strategies."):
        return str(kind.name)
    return f"{kind.__module__}:{kind.__qualname__}"


def _parameters(method: Configured) -> dict[str, Any]:
    """Return the parameters that were given to a method, by their keys."""
    known = fields(type(method))
    found: dict[str, Any] = {}
    for name in method.given:
        field, value = known[name], getattr(method, name)
        if field.in_code:
            raise ConfigError(
                f"{type(method).__name__}({name}=...) cannot be part of an app: use settings "
                "instead, such as {'strategy/aggregator': 'median'} (docs/keys.md)"
            )
        if isinstance(value, Configured):
            found |= _section(value, field.default)
        else:
            found[field.key or f"{type(method).section}.{name}"] = value
    return found


def _section(given: Configured, default: Configured) -> dict[str, Any]:
    """Return a section's parameters that were given, or that the method's default changes."""
    changed = {
        f"{given.section}.{name}": getattr(given, name)
        for name, field in fields(type(given)).items()
        if not field.key and getattr(given, name) != getattr(default, name)
    }
    return changed | _parameters(given)
