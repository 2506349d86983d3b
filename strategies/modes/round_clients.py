"""Who trains: cohorts that are waited for, or asynchronous clients, simulated or real."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.common.errors import ConfigError
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.live_clients import LiveClients
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.simulated_clients import SimulatedClients
from fedhet.strategies.modes.systems import ClientSystem
from fedhet.strategies.round.cohort import Cohorts
from fedhet.strategies.round.registration import FederationConfig
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import ClientSampler, SumAggregator

RoundClients = Cohorts | SimulatedClients | LiveClients


def round_clients(
    sampler: ClientSampler,
    system: ClientSystem | None,
    asynchronous: Asynchronous | None,
    *,
    options: LocalTrainingConfig | None,
    step: ServerStep,
    secure: SecAggPlus | None,
    federation: FederationConfig,
    evaluate_on_clients: bool,
    reading: Sequence[str] = (),
) -> RoundClients:
    """Return the cohorts of rounds that wait, or the clients of steps that do not.

    The latter are on the system's clock, or without a system on the real one. ``reading`` are the
    parts that read the clients' models.
    """
    if asynchronous is None:
        if system is not None and secure is not None:
            raise ConfigError(
                "system: under strategy/secure_aggregation the server does not know how many "
                "examples a client has, and so not how long it takes: set one of them to none"
            )
        averages = any(side.averages for side in step.sides.values())
        least = max(federation.min_replies, step.least_replies)
        return Cohorts(sampler, system, averages, options, least)
    _check(asynchronous, step, system, secure, evaluate_on_clients=evaluate_on_clients)
    if reading:
        raise ConfigError(
            f"strategy.asynchronous: {', '.join(reading)} reads the clients' models, and the "
            "update of a stale one does not lead to it from the server's model: leave it out, or "
            "choose rounds that wait"
        )
    if system is None:
        return LiveClients(asynchronous, sampler, step.buffers)
    return SimulatedClients(asynchronous, sampler, system, options)


def check_buffer(clients: RoundClients, num_clients: int, least: int) -> None:
    """Refuse a step of more replies than there are clients, or of fewer than are needed."""
    if isinstance(clients, Cohorts):
        return
    if not least <= (buffer := clients.settings.buffer) <= num_clients:
        raise ConfigError(
            f"strategy.asynchronous.buffer={buffer} different clients make a step: it "
            f"must be from {least} (min_replies) to {num_clients} (clients)"
        )


def _check(
    asynchronous: Asynchronous,
    step: ServerStep,
    system: ClientSystem | None,
    secure: SecAggPlus | None,
    *,
    evaluate_on_clients: bool,
) -> None:
    """Refuse what steps that do not wait cannot have."""
    start = "strategy.asynchronous: "
    if system is not None and (system.over_selection > 1 or system.deadline_seconds is not None):
        raise ConfigError(
            f"{start}nobody is waited for, so that system.over_selection={system.over_selection} "
            f"and system.deadline_seconds={system.deadline_seconds} have nothing to act on: set "
            "them to 1 and null (strategy.asynchronous.max_staleness refuses old replies)"
        )
    if system is None and evaluate_on_clients:
        raise ConfigError(
            f"{start}an evaluation at real clients waits for all that train: set "
            "evaluation.clients=false, and give the server test examples"
        )
    if step.robust is not None or not isinstance(step.aggregator, SumAggregator):
        raise ConfigError(
            f"{start}{type(step.aggregator).__name__} reads single replies and cannot weigh stale "
            "ones: choose another strategy/aggregator, or rounds that wait"
        )
    if hasattr(step.aggregator, "individual"):  # it reads norms, of updates that start at one x
        raise ConfigError(
            f"{start}{type(step.aggregator).__name__} makes its step as long as the updates' norms "
            "say, which takes back the discount of stale ones: set "
            "strategy/aggregator=uniform_mean, or choose rounds that wait"
        )
    whole = asynchronous.discount == "constant" and not asynchronous.towards_model
    if getattr(step.optimizer, "coupled_state", ()) and not whole:
        raise ConfigError(
            f"{start}{type(step.optimizer).__name__} adds up the same updates as the clients, and "
            "not discounted ones: set strategy.asynchronous.discount=constant and "
            ".towards_model=false, or choose rounds that wait"
        )
    read = sorted(name for name, side in step.sides.items() if side.reads_updates)
    if asynchronous.towards_model and read:
        raise ConfigError(
            f"{start}{', '.join(read)} reads the updates as what clients moved by, which those of "
            "towards_model are not: set strategy.asynchronous.towards_model=false, choose fedbuff, "
            "or rounds that wait"
        )
    if secure is not None or any(side.averages for side in step.sides.values()):
        raise ConfigError(
            f"{start}secure aggregation and central privacy need the replies of one round "
            "together: set strategy/secure_aggregation=none and strategy/differential_privacy=none"
        )
