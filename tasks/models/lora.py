"""LoRA (Hu et al. 2022): a network's weights stay as they are, small adapters beside them train.

Edward Hu, Yelong Shen, Phillip Wallis, Zeyuan Allen-Zhu, Yuanzhi Li, Shean Wang, Lu Wang, Weizhu
Chen: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022,
https://arxiv.org/abs/2106.09685. A layer W x becomes

    W x + (alpha / r) B A x,    A (r, d) random, B (k, r) zero at first

The layers are peft's. Only adapters and the classifier are trained, sent and stored, so every
method works on them as on any other tensors. The clients' A and B are averaged separately, as in
FedIT; strategies/flora.py and fedex_lora.py have the mean of the products B A.
"""

from __future__ import annotations

from torch import nn

from fedhet.common.errors import ConfigError, SetupError
from fedhet.common.task_settings import Lora


def add_adapters(network: nn.Module, lora: Lora, classifier: str) -> None:
    """Put adapters into a network, and freeze the rest except what is trained in full.

    Args:
        network: changed in place.
        lora: the recipe's ``task.lora``; its targets may be linear layers, embeddings and
            convolutions.
        classifier: path of the module that makes the outputs, which is trained in full, unless the
            network says that it is pretrained, too (``adapts_classifier``).

    Raises:
        ConfigError: if no module has such a name or kind, or peft is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise SetupError('task.lora needs peft: pip install -e ".[lora]"') from None
    output = [] if getattr(network, "adapts_classifier", False) else [classifier]
    whole = [*output, *lora.modules_to_save]
    modules = dict(network.named_modules())
    for path in whole:
        if path not in modules:
            raise ConfigError(
                f"task.lora.modules_to_save: {path} is not a module of the model; it has: "
                f"{', '.join(filter(None, modules))}"
            )
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=whole,
    )
    try:
        inject_adapter_in_model(config, network)
    except ValueError as error:
        reason = str(error).split(". ")[0]
        raise ConfigError(f"task.lora.target_modules={lora.target_modules}: {reason}") from None
    for name, parameter in network.named_parameters():
        in_full = any(f"{name}.".startswith(f"{path}.") for path in whole)
        shared = lora.share_base and name.endswith(".base_layer.weight")
        parameter.requires_grad_(in_full or "lora_" in name or shared)


def merge_adapters(network: nn.Module) -> None:
    """Add each adapter to its weights and remove it; changes the network."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, module in list(network.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, name = path.rpartition(".")
            network.get_submodule(parent).set_submodule(name, module.get_base_layer())
