"""Hugging Face's transformers on tokens (B, T), as a recipe's model functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedhet.common.configured import refusal
from fedhet.common.errors import ConfigError
from fedhet.tasks.hugging_face import load_tokenizer

_KEY = "task.model_options"


def classifier(
    outputs: int,
    tokenizer: str,
    pretrained: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a transformer with a classifier (``AutoModelForSequenceClassification``).

    Args:
        outputs: C, or 1 for a regression.
        tokenizer: folder or name of the tokenizer that made the tokens: its padding is masked.
        pretrained: folder or name of a model with its weights.
        config: instead of ``pretrained``: the configuration of a model whose weights are drawn from
            the run's seed, with ``model_type`` and keys of that type, such as {model_type:
            distilbert, n_layers: 6}; its vocabulary is the tokenizer's.

    Raises:
        ConfigError: for neither or both of ``pretrained`` and ``config``, an unknown type, or a
            tokenizer with more tokens than the model.
    """
    from transformers import AutoModelForSequenceClassification

    tokens = _tokens(tokenizer, pads=True)
    known = {"num_labels": outputs, "pad_token_id": tokens.pad_token_id}
    network = _network(
        AutoModelForSequenceClassification, tokenizer, len(tokens), pretrained, config, known
    )
    return TokenClassifier(network, tokens.pad_token_id)


def causal(
    tokenizer: str, pretrained: str | None = None, config: Mapping[str, Any] | None = None
) -> nn.Module:
    """Return a causal language model (``AutoModelForCausalLM``); see :func:`classifier`."""
    from transformers import AutoModelForCausalLM

    size = len(_tokens(tokenizer, pads=False))
    network = _network(AutoModelForCausalLM, tokenizer, size, pretrained, config, {})
    return NextToken(network)


def _tokens(tokenizer: str, *, pads: bool) -> Any:
    if not isinstance(tokenizer, str):
        raise ConfigError(refusal(f"{_KEY}.tokenizer", tokenizer, str))
    return load_tokenizer(tokenizer, pads=pads)


def _network(
    kind: Any,
    tokenizer: str,
    size: int,
    pretrained: str | None,
    config: Mapping[str, Any] | None,
    known: Mapping[str, Any],
) -> Any:
    """Return a transformer of a kind of ``transformers``, for a tokenizer of so many tokens."""
    from transformers import AutoConfig

    if not (pretrained is None or isinstance(pretrained, str)):
        raise ConfigError(refusal(f"{_KEY}.pretrained", pretrained, str | None))
    if (pretrained is None) == (config is None):
        raise ConfigError(
            f"{_KEY}.pretrained={pretrained} and {_KEY}.config={config}: give exactly one"
        )
    try:
        if pretrained is not None:
            network = kind.from_pretrained(pretrained, **known)
        else:
            options = {"vocab_size": size, **known, **dict(config or {})}
            network = kind.from_config(
                AutoConfig.for_model(options.pop("model_type", None), **options)
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: transformers cannot build the model: {error}") from None
    known_tokens = network.get_input_embeddings().num_embeddings
    if size > known_tokens:
        raise ConfigError(
            f"{_KEY}.tokenizer={tokenizer} has {size} tokens, but the model has {known_tokens}"
        )
    return network


class TokenClassifier(nn.Module):
    """A transformer whose attention mask leaves out padding.

    Args:
        network: takes ``input_ids`` and ``attention_mask``, returns an object with ``logits``.
        padding: the token that is masked.
    """

    def __init__(self, network: nn.Module, padding: int) -> None:
        super().__init__()
        self.network = network
        self._padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, C) of tokens (B, T)."""
        mask = (tokens != self._padding).long()
        logits: Tensor = self.network(input_ids=tokens, attention_mask=mask).logits
        return logits


class NextToken(nn.Module):
    """A causal language model: logits of the token after each one.

    A token sees none that follow it, so padding at the end needs no mask.

    Args:
        network: takes ``input_ids``, returns an object with ``logits``.
    """

    adapts_classifier = True  # LoRA leaves the output layer as it is: it is no new one

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, V, T) of tokens (B, T)."""
        logits: Tensor = self.network(input_ids=tokens, use_cache=False).logits
        return logits.transpose(1, 2)
