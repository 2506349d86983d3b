"""Checks before round 1 of methods under secure aggregation or differential privacy."""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, ServerSide, Tensors
from fedhet.strategies.modes.secure.aggregation import KEY, SecAggPlus
from fedhet.strategies.modes.secure.reply_vector import (
    Layout,
    require_private,
    require_sums,
)
from fedhet.strategies.round.reply_fold import known_shapes, per_example, shapes_of
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import SumAggregator
from fedhet.strategies.wire.compression import KEY as COMPRESSION
from fedhet.strategies.wire.compression import Codec


def check_privacy(
    client_sides: Mapping[str, ClientSide],
    step: ServerStep,
    secure_aggregation: SecAggPlus | None,
    codec: Codec | None,
    *,
    evaluate_on_clients: bool,
    per_client: bool = False,
) -> None:
    """Refuse parts that read single replies where the server only has their sum, or noise.

    There, ``step.summed`` is set. ``codec`` is of what clients send.
    """
    require_private(client_sides)
    averaged = any(side.averages for side in step.sides.values())
    summed = secure_aggregation is not None
    if codec is not None:
        _check_compression(codec, step, summed=summed)
    if not averaged and any(side.clips for side in client_sides.values()):
        _require_unchecked(step)
    if not averaged and not summed:
        return
    weighting = require_sums(
        KEY if summed else "strategy/differential_privacy",
        client_sides,
        step.sides,
        step.aggregator,
        step.transforms,
        step.output,
        step.observers,
        summed=summed,
    )
    if averaged and weighting != "clients":
        raise ConfigError(
            f"strategy/differential_privacy needs every client to weigh the same, and "
            f"{type(step.aggregator).__name__} weighs them by their {weighting}: set "
            "strategy/aggregator=uniform_mean"
        )
    if any(side.averages and side.keeps_replies for side in step.sides.values()):
        _require_uncoupled(step)
    step.summed = True
    if evaluate_on_clients and summed:
        raise ConfigError(
            f"evaluation.clients=true asks each client for its loss and accuracy, and {KEY} hides "
            f"values of single clients from the server: set evaluation.clients=false or {KEY}=none"
        )
    if per_client and summed:
        raise ConfigError(
            f"evaluation.per_client=true writes each client's own values, and {KEY} hides them "
            f"from the server: set evaluation.per_client=false or {KEY}=none"
        )


def _require_unchecked(step: ServerStep) -> None:
    """Refuse, under local privacy, server sides whose check no payload with noise passes."""
    for name, side in step.sides.items():
        if side.needs and type(side).check is not ServerSide.check:
            raise ConfigError(
                f"strategy/differential_privacy=local adds noise to {sorted(side.needs)}, and "
                f"{name} ({type(side).__name__}) checks their values, which noise makes invalid: "
                "set strategy/differential_privacy=none, or choose another method"
            )


def _require_uncoupled(step: ServerStep) -> None:
    """Refuse to clip at the server what clients have added to their own state as they sent it."""
    for part in (*step.sides.values(), step.optimizer):
        if getattr(part, "coupled_state", ()):
            raise ConfigError(
                "strategy.differential_privacy.clipping=server changes what clients have sent, and "
                f"{type(part).__name__} must add up what they have kept: set "
                "strategy.differential_privacy.clipping=client"
            )


def _check_compression(codec: Codec, step: ServerStep, *, summed: bool) -> None:
    """Refuse to compress what clients send where that would break what privacy promises."""
    name = type(codec).__name__
    if summed:
        raise ConfigError(
            f"{COMPRESSION} sends updates as {name}, and {KEY} can only add up masked whole "
            f"numbers of its own (quantization_range): set {COMPRESSION}=none or {KEY}=none"
        )
    if any(side.averages and not side.keeps_replies for side in step.sides.values()):
        raise ConfigError(
            "strategy.differential_privacy.clipping=client bounds the norm of what a client sends, "
            f"and {COMPRESSION} would change it after that ({name}): set "
            f"strategy.differential_privacy.clipping=server or {COMPRESSION}=none"
        )


def reply_layout(
    client_sides: Mapping[str, ClientSide],
    step: ServerStep,
    secure_aggregation: SecAggPlus,
    tensors: Tensors,
) -> Layout:
    """Return the layout of the replies to these tensors; refuse payloads of unknown shape."""
    names = {name for side in client_sides.values() for name in side.sends}
    shapes, expected = shapes_of(tensors), known_shapes(step.expected())
    if unknown := sorted(names - expected.keys()):
        raise ConfigError(
            f"the payloads {unknown} have no shape that the server knows before round 1, and a "
            f"secure sum needs it: set {KEY}=none, or choose another method"
        )
    assert isinstance(step.aggregator, SumAggregator)
    return Layout(
        update={name: shape for name, shape in shapes.items() if name not in step.buffers},
        buffers={name: shape for name, shape in shapes.items() if name in step.buffers},
        payloads={name: expected[name] for name in names},
        per_example=per_example(client_sides),
        weighting=step.aggregator.weighting,
        max_examples=secure_aggregation.max_examples,
    )
