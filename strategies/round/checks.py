"""Checks before round 1 that a method's client and server sides fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, ServerSide
from fedhet.strategies.round.server_model import BuildsOutputModel
from fedhet.strategies.slots import Output
from fedhet.strategies.wire.compression import DOWN

RESERVED_RECORDS = frozenset({"params", "kept", "config", "update", "metrics", "client"})


def check_sides(
    client_sides: Mapping[str, ClientSide],
    server_sides: Mapping[str, ServerSide],
    *,
    allow_stacked: bool = False,
) -> None:
    """Refuse sides whose payloads do not match, or whose order would matter."""
    broadcast = _all_payloads("server", server_sides)
    sent = _all_payloads("client", client_sides)
    for name, client_side in client_sides.items():
        _require_payloads(f"strategy.client_sides.{name}", client_side.needs, broadcast, "server")
    for name, server_side in server_sides.items():
        _require_payloads(f"strategy.server_sides.{name}", server_side.needs, sent, "client")
    own = sides_with("own_model", client_sides)
    if len(own) > 1:
        raise ConfigError(
            f"client sides {own} all have a model of the client's own to score, and there is one; "
            "drop one from strategy=[...]"
        )
    correcting = sides_with("correct", client_sides)
    if len(correcting) > 1 and not allow_stacked:
        raise ConfigError(
            f"client sides {correcting} all correct the gradient, so their order matters; allowed "
            "is one. Drop one from strategy=[...], or set strategy.allow_stacked_corrections=true"
        )


def check_aggregation(
    client_sides: Mapping[str, ClientSide],
    server_sides: Mapping[str, ServerSide],
    aggregator: object,
    optimizer: object,
    transforms: Iterable[object],
) -> None:
    """Refuse an aggregation of updates that do not mean there what they mean at the clients."""
    moving = sorted(name for name, side in client_sides.items() if side.moves_start)
    if moving and getattr(aggregator, "one_start", False):
        raise ConfigError(
            f"{type(aggregator).__name__} divides updates by their steps, and with "
            f"{', '.join(moving)} clients do not start at one model: drop one from strategy=[...]"
        )
    reordering = [type(one).__name__ for one in transforms if getattr(one, "reorders", False)]
    parts = {**server_sides, type(optimizer).__name__: optimizer}
    kept = [name for name, part in parts.items() if getattr(part, "coupled_state", ())]
    sent = sorted(name for side in client_sides.values() for name in side.sends & side.compressible)
    if reordering and (kept or sent):
        why = f"clients send {', '.join(sent)} for each parameter" if sent else ""
        why = why or f"{', '.join(kept)} adds up what clients have kept in their own order"
        raise ConfigError(
            f"{why}, which {reordering[0]} cannot reorder: drop it or the method that needs it "
            "from strategy=[...]"
        )


def check_output(output: Output) -> None:
    """Refuse an output that the clients cannot evaluate."""
    if isinstance(output, BuildsOutputModel):
        raise ConfigError(
            "the clients are to evaluate the model (evaluation.clients=true, or no test examples "
            f"at the server), but the output {type(output).__name__} builds another than theirs: "
            "set evaluation.clients=false and give the server test examples (task.test_data)"
        )


def reading_models(parts: Iterable[object]) -> list[str]:
    """Return the parts that read the models y_i, and say so in an attribute ``reads_models``."""
    reading = (part for part in parts if getattr(part, "reads_models", False))
    return sorted({str(getattr(part, "key", type(part).__name__)) for part in reading})


def check_downlink(down: str, reading: Sequence[str], *, towards_model: bool) -> None:
    """Refuse parts that read the models y_i where clients start from a rounded x.

    They send y_i less that, which is no way from the server's x to y_i.
    """
    read = [*reading, *(["strategy.asynchronous.towards_model"] if towards_model else [])]
    if down != "none" and read:
        raise ConfigError(
            f"{DOWN}={down} rounds what the clients start from, and {', '.join(read)} reads their "
            f"models, which the server then does not have: set {DOWN}=none"
        )


def sides_with(hook: str, sides: Mapping[str, ClientSide]) -> list[str]:
    """Return the names of the sides that have a hook of their own."""
    default = getattr(ClientSide, hook)
    return sorted(name for name, side in sides.items() if getattr(type(side), hook) is not default)


def _all_payloads(
    half: str, sides: Mapping[str, ClientSide] | Mapping[str, ServerSide]
) -> frozenset[str]:
    senders: dict[str, list[str]] = {}
    for name, side in sides.items():
        for payload in side.sends:
            senders.setdefault(payload, []).append(name)
    for payload, names in sorted(senders.items()):
        if payload in RESERVED_RECORDS:
            raise ConfigError(
                f"the {half} side of {names[0]} sends a payload {payload!r}: call it otherwise "
                f"than {', '.join(sorted(RESERVED_RECORDS))}"
            )
        if len(names) > 1:
            raise ConfigError(
                f"strategy: {' and '.join(sorted(names))} both send {payload} from the {half}: "
                "drop one from strategy=[...]"
            )
    return frozenset(senders)


def _require_payloads(key: str, needs: frozenset[str], offered: frozenset[str], other: str) -> None:
    missing = sorted(needs - offered)
    if missing:
        raise ConfigError(
            f"{key} needs the payloads {missing}, but no {other} side sends them (sent are: "
            f"{sorted(offered)}); add the {other} half to strategy.{other}_sides"
        )
