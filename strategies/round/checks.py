"""Checks before round 1 that a method's client and server sides fit each other."""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, ServerSide

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
    moving = sorted(name for name, side in client_sides.items() if side.moves_start)
    if len(moving) > 1:
        raise ConfigError(
            f"client sides {moving} all choose where a client starts, and the last one would "
            "decide; drop one from strategy=[...]"
        )
    correcting = sides_with("correct", client_sides)
    if len(correcting) > 1 and not allow_stacked:
        raise ConfigError(
            f"client sides {correcting} all correct the gradient, so their order matters; allowed "
            "is one. Drop one from strategy=[...], or set strategy.allow_stacked_corrections=true"
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
