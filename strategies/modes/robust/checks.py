"""Checks before round 1 that a robust aggregator can protect a method."""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide
from fedhet.strategies.modes.robust.aggregator import KEY
from fedhet.strategies.round.reply_fold import summed_payloads
from fedhet.strategies.round.server_step import ServerStep


def check_robust(client_sides: Mapping[str, ClientSide], step: ServerStep) -> None:
    """Refuse methods of which a robust aggregator would replace or miss the essential part."""
    if step.robust is None:
        return
    summed = summed_payloads(step.sides)
    step.robust.check_method(sorted(summed), step.output)
    sent = {name for side in client_sides.values() for name in side.sends}
    if not step.transforms and (unread := sorted(sent - summed)):
        raise ConfigError(
            f"{KEY} {type(step.robust).__name__} takes the place of the method's own aggregator, "
            f"which alone reads the payloads {unread}: choose another method, or leave "
            "strategy/aggregator as the method has it"
        )
