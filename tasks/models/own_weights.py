"""Loads a run's tensors into the user's network, and hashes tensors that are never trained."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.common.task_settings import Lora
from fedhet.tasks.models.attributes import FROZEN
from fedhet.tasks.models.frozen import Frozen
from fedhet.tasks.models.lora import add_adapters, merge_adapters
from fedhet.tasks.models.wrapped import WrappedModel, last_layer, own_name

_BATCHES = "num_batches"  # in a model's metadata: the steps of all clients in its round


def frozen_sha256(model: nn.Module) -> str:
    """Return the hash, 16 digits, of tensors that a model neither trains nor sends; or ""."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        held = {name: getattr(module, name) for name in getattr(module, FROZEN, ())}
        if isinstance(module, Frozen):
            held = module.network.state_dict()
        found |= {".".join(filter(None, (path, name))): value for name, value in held.items()}
    if isinstance(model, WrappedModel):
        found = model.own_names(found)
    return _sha256(found)


def counted(metadata: Mapping[str, str], num_batches: float | None) -> dict[str, str]:
    """Return a file's metadata with the batches that the running statistics are means over."""
    return {**metadata, **({} if num_batches is None else {_BATCHES: str(round(num_batches))})}


def model_metadata(model: nn.Module, lora: Lora | None) -> dict[str, str]:
    """Return the metadata of a model's file that :func:`load_own_weights` needs."""
    frozen = frozen_sha256(model)
    found = {"frozen_sha256": frozen} if frozen else {}
    if isinstance(model, WrappedModel):
        found["classifier"] = model.classifier
        found |= {"head_bias": "false"} if getattr(model.head, "bias", None) is None else {}
        found |= {"lora": lora.model_dump_json()} if lora else {}
    return found


def load_own_weights(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    path: Path,
    *,
    partial: bool = False,
) -> None:
    """Load a run's tensors into the user's network, by the network's own names.

    LoRA's adapters are added to their weights. If the run's classifier had no bias, it becomes 0.
    The counters of BatchNorm, which do not travel, are set to the batches of the model's round:
    with momentum=None the next batch would otherwise replace the statistics.

    Args:
        network: as the model function returns it; changed in place.
        tensors: the run's tensors, by name.
        metadata: their file's metadata, :func:`model_metadata`.
        path: their file's path, for errors.
        partial: leave tensors that the file lacks unchanged.

    Raises:
        ConfigError: if tensors do not fit or are missing, or frozen tensors differ from the run's.
    """
    classifier = metadata.get("classifier", last_layer(network))
    named = {own_name(name, classifier): value for name, value in tensors.items()}
    lora = Lora.model_validate_json(metadata["lora"]) if "lora" in metadata else None
    target = network
    if lora:
        target = copy.deepcopy(network)
        add_adapters(target, lora, classifier)
    if unknown := sorted(named.keys() - target.state_dict().keys()):
        raise ConfigError(f"{path} has tensors that the model lacks: {', '.join(unknown)}")
    _check_frozen(target, metadata, path)
    without_bias = metadata.get("head_bias") == "false"
    bias_name = {f"{classifier}.bias"} if without_bias else set()
    if not partial and (missing := sorted(_travelling(target) - named.keys() - bias_name)):
        raise ConfigError(
            f"{path} lacks tensors of the model: {', '.join(missing)}. With personalised methods "
            "clients keep their own; partial=True loads the shared ones and leaves these unchanged"
        )
    if batches := int(metadata.get(_BATCHES, 0)):
        layers = [n.removesuffix("running_mean") for n in named if n.endswith("running_mean")]
        counters = target.state_dict().keys() & {f"{n}num_batches_tracked" for n in layers}
        named |= dict.fromkeys(counters, torch.tensor(batches))
    try:
        target.load_state_dict(named, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from None
    bias = getattr(target.get_submodule(classifier), "bias", None)
    if without_bias and bias is not None:
        nn.init.zeros_(bias)
    if lora:
        merge_adapters(target)
        network.load_state_dict(target.state_dict())


def _travelling(network: nn.Module) -> set[str]:
    """Return the names of the tensors that a run trains, and of floating-point buffers."""
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    stored = network.state_dict()
    buffers = {name for name, _ in network.named_buffers() if name in stored}
    return trained | {name for name in buffers if stored[name].is_floating_point()}


def _check_frozen(network: nn.Module, metadata: Mapping[str, str], path: Path) -> None:
    """Reject a network whose frozen weights differ from the run's."""
    expected = metadata.get("frozen_sha256")
    if expected is None:
        return
    parameters = network.named_parameters(remove_duplicate=False)
    found = _sha256({name: value for name, value in parameters if not value.requires_grad})
    if found != expected:
        raise ConfigError(
            f"{path} was trained with other frozen weights (hash {expected}, the model's hash is "
            f"{found or 'none'}): build the model from the same pretrained files, frozen as in the "
            "run, or without any with torch.manual_seed(the run's seed)"
        )


def _sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # as bytes: NumPy has no bfloat16, which pretrained weights may be
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if tensors else ""
