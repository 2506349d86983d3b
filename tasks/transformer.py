"""Hugging Face's transformers that classify tokens (B, T), as a recipe's model function."""

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
    if not isinstance(tokenizer, str):
        raise ConfigError(refusal(f"{_KEY}.tokenizer", tokenizer, str))
    if not (pretrained is None or isinstance(pretrained, str)):
        raise ConfigError(refusal(f"{_KEY}.pretrained", pretrained, str | None))
    tokens = load_tokenizer(tokenizer)
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if (pretrained is None) == (config is None):
        raise ConfigError(
            f"{_KEY}.pretrained={pretrained} and {_KEY}.config={config}: give exactly one"
        )
    known = {"num_labels": outputs, "pad_token_id": tokens.pad_token_id}
    try:
        if pretrained is not None:
            network = AutoModelForSequenceClassification.from_pretrained(pretrained, **known)
        else:
            options = {"vocab_size": len(tokens), **known, **dict(config or {})}
            found = AutoConfig.for_model(options.pop("model_type", None), **options)
            network = AutoModelForSequenceClassification.from_config(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: transformers cannot build the model: {error}") from None
    size = network.get_input_embeddings().num_embeddings
    if len(tokens) > size:
        raise ConfigError(
            f"{_KEY}.tokenizer={tokenizer} has {len(tokens)} tokens, but the model has {size}"
        )
    return TokenClassifier(network, tokens.pad_token_id)


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
