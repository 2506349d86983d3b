"""Which modes go together, and which methods go with them: one table, and one check of a run.

Each mode says what the server may still read of the replies (``LEAVES``), and each part of a method
says what it reads: a part that reads more is refused. ``PAIRS`` has the modes that exclude each
other. docs/modes.md shows both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, Reads, ServerSide
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.parts import Parts, Setup
from fedhet.strategies.round.reply_fold import summed_payloads
from fedhet.strategies.round.server_model import BuildsOutputModel
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import Reorders, SumAggregator, reads_of
from fedhet.strategies.wire.compressed_records import per_example
from fedhet.strategies.wire.compression import Compression

_SUM = Reads.SUM | Reads.STEPS
WORDS = {
    Reads.SUM: "the sum of the replies",
    Reads.STEPS: "the sum as what clients moved by",
    Reads.NORMS: "the norm of every update",
    Reads.REPLIES: "single replies",
    Reads.MODELS: "the clients' models",
}


@dataclass(frozen=True)
class Mode:
    """One way in which a round differs."""

    key: str  # of the recipe
    off: str  # what turns it off
    hides: str = "nothing"  # what it hides, from whom
    hooks: str = "select"  # where it hooks into the round
    leaves: Reads = Reads.ALL  # what parts may read of the replies
    to_aggregator: Reads = Reads.ALL  # what the aggregator may read, if that is less


_PRIVACY = "strategy/differential_privacy"
_CLIPPING = "strategy.differential_privacy.clipping"
MODES = {
    "asynchronous": Mode(
        "strategy.asynchronous",
        "choose rounds that wait",
        hooks="select, send",
        leaves=Reads.ALL & ~Reads.MODELS,
        to_aggregator=_SUM,
    ),
    "towards the model": Mode(
        "strategy.asynchronous.towards_model",
        "set strategy.asynchronous.towards_model=false",
        leaves=Reads.ALL & ~(Reads.MODELS | Reads.STEPS),
        to_aggregator=Reads.SUM,
    ),
    "real clients": Mode("strategy.asynchronous", "choose rounds that wait"),
    "secure": Mode(
        "strategy/secure_aggregation",
        "set strategy/secure_aggregation=none",
        "single replies, from the server",
        "send",
        _SUM,
    ),
    "central privacy": Mode(
        _PRIVACY,
        f"set {_PRIVACY}=none",
        "a client's part in the sum, from those who see the model",
        "fold",
        _SUM,
    ),
    "clipping at clients": Mode(f"{_CLIPPING}=client", f"set {_CLIPPING}=server"),
    "local privacy": Mode(
        _PRIVACY, f"set {_PRIVACY}=none", "a client's update, from everybody", "encode"
    ),
    "compression up": Mode(
        "strategy/compression", "set strategy/compression=none", hooks="encode, decode"
    ),
    "compression down": Mode(
        "strategy.compression.down",
        "set strategy.compression.down=none",
        hooks="encode, decode",
        leaves=Reads.ALL & ~Reads.MODELS,
    ),
    "robust": Mode("strategy/aggregator", "choose a mean", hooks="step"),
    "system": Mode("system", "set system=none"),
    "system that waits": Mode(
        "system.over_selection and system.deadline_seconds",
        "set system.over_selection=1 and system.deadline_seconds=null",
    ),
    "evaluation at clients": Mode(
        "evaluation.clients=true", "set evaluation.clients=false", hooks="evaluate"
    ),
    "values per client": Mode(
        "evaluation.per_client=true", "set evaluation.per_client=false", hooks="evaluate"
    ),
    "another network": Mode(
        "strategy/output", "set strategy/output=latest", hooks="step"
    ),
}  # fmt: skip

# Modes that exclude each other, and why.
PAIRS = {
    ("asynchronous", "secure"): "a secure sum needs the replies of one round together",
    ("asynchronous", "central privacy"): "the noise is for the replies of one round together",
    ("asynchronous", "system that waits"): (
        "no round waits (to refuse old replies, set strategy.asynchronous.max_staleness)"
    ),
    ("real clients", "evaluation at clients"): "an evaluation waits for all clients that train",
    ("system", "secure"): (
        "the server does not know a client's number of examples, and so not how long it takes"
    ),
    ("system", "central privacy"): (
        "the noise is for a fixed number of clients, and late and absent clients change that"
    ),
    ("compression up", "secure"): "a secure sum has its own format, masked whole numbers",
    ("compression up", "clipping at clients"): (
        "compression changes a client's reply after it was clipped"
    ),
    ("evaluation at clients", "secure"): "it asks each client for its loss and accuracy",
    ("values per client", "secure"): "it writes the values of single clients",
    ("compression down", "towards the model"): (
        "the server lacks the rounded model from which the clients start"
    ),
    ("evaluation at clients", "another network"): (
        "clients can only evaluate the task's network (give the server test examples in "
        "task.test_data)"
    ),
}


@dataclass(frozen=True)
class Composition:
    """The parts and modes of a run that must fit together."""

    parts: Parts
    setup: Setup
    step: ServerStep

    @property
    def client_sides(self) -> Mapping[str, ClientSide]:
        """The methods' client halves, by name."""
        return self.parts.client_sides

    @property
    def modes(self) -> list[str]:
        """The names of the modes that are on."""
        system, asynchronous = self.setup.system, self.parts.asynchronous
        metrics, compression = self.setup.client_metrics, self.parts.compression or Compression()
        noisy = [side for side in self.step.sides.values() if side.leaves != Reads.ALL]
        clips = any(side.clips for side in self.client_sides.values())
        waits = system is not None and (
            system.over_selection > 1 or system.deadline_seconds is not None
        )
        on = {
            "asynchronous": asynchronous is not None,
            "towards the model": asynchronous is not None and asynchronous.towards_model,
            "real clients": asynchronous is not None and system is None,
            "secure": self.parts.secure_aggregation is not None,
            "central privacy": bool(noisy),
            "clipping at clients": any(not side.reads & Reads.REPLIES for side in noisy),
            "local privacy": clips and not noisy,
            "compression up": compression.up is not None,
            "compression down": compression.codec_down is not None,
            "robust": self.step.combining is not None,
            "system": system is not None,
            "system that waits": waits,
            "evaluation at clients": metrics.asked,
            "values per client": metrics.per_client,
            "another network": isinstance(self.step.output, BuildsOutputModel),
        }
        return [name for name in MODES if on[name]]

    def readers(self, mode: str = "") -> Iterator[tuple[str, str, Reads]]:
        """Yield the parts (that a mode applies to): the key, the part and what it reads."""
        step = self.step
        yield "strategy.aggregator", type(step.aggregator).__name__, reads_of(step.aggregator)
        yield "strategy.output", type(step.output).__name__, reads_of(step.output)
        for transform in step.transforms:
            yield "strategy.transforms", type(transform).__name__, reads_of(transform)
        for name, side in step.sides.items():
            if mode != "central privacy" or side.leaves == Reads.ALL:  # else it is the mode itself
                yield f"strategy.server_sides.{name}", type(side).__name__, side.reads
        for observer in step.observers:
            yield observer.key, type(observer).__name__, reads_of(observer)
        summed = summed_payloads(step.sides)
        for name, client_side in self.client_sides.items():
            for payload in sorted(client_side.sends - summed):
                yield f"strategy.client_sides.{name}", payload, Reads.REPLIES


def check(run: Composition) -> None:
    """Refuse modes that exclude each other, and methods that read more than the modes allow.

    Raises:
        ConfigError: names the keys, and what to set.
    """
    modes = run.modes
    for (one, other), why in PAIRS.items():
        if one in modes and other in modes:
            keys = f"{MODES[one].key} and {MODES[other].key}"
            options = f"{MODES[one].off}, or {MODES[other].off}"
            raise ConfigError(f"{keys} do not go together: {why}; {options}")
    for name in modes:
        _check_readers(name, run)
    _check_starts(run)
    _check_order(run)
    _check_robust(run)
    _check_privacy(run, modes)
    if run.parts.asynchronous is not None:
        _check_discount(run.parts.asynchronous, run.step)


def _check_readers(name: str, run: Composition) -> None:
    mode, too_much, left = MODES[name], list[str](), Reads.ALL
    for key, part, reads in run.readers(name):
        leaves = mode.leaves
        if key == "strategy.aggregator":
            leaves &= mode.to_aggregator
        if more := reads & ~leaves:
            too_much.append(f"{key} {part} reads {in_words(more)}")
            left &= leaves
    if too_much:
        raise ConfigError(
            f"with {mode.key} the server can only read {in_words(left)}, but "
            f"{'; '.join(too_much)}: {mode.off}, or choose parts that read no more"
        )


def in_words(reads: Reads) -> str:
    """Return what is read, in words."""
    if reads == Reads.ALL:
        return "everything"
    return ", ".join(text for one, text in WORDS.items() if one & reads)


# ---- relations between the parts of a method -----------------------------------------------------


def _check_starts(run: Composition) -> None:
    """Refuse clients that do not start at x if a part reads updates as what they moved by."""
    moving = sorted(name for name, side in run.client_sides.items() if side.moves_start)
    for key, part, reads in run.readers() if moving else ():
        if reads & Reads.STEPS:
            raise ConfigError(
                f"{key} {part} reads updates as what clients moved by, and with "
                f"{', '.join(moving)} they do not start at one model: drop one from strategy=[...]"
            )


def _check_order(run: Composition) -> None:
    """Refuse to reorder neurons if something else has the clients' order."""
    reordering = [type(one).__name__ for one in run.step.transforms if isinstance(one, Reorders)]
    sides = run.client_sides.values()
    sent = sorted(name for side in sides for name in side.sends & side.compressible)
    why = f"clients send {', '.join(sent)} for each parameter" if sent else ""
    why = why or "".join(
        f"{part} adds up what clients have kept in their own order"
        for part in sorted(_coupled(run.step))[:1]
    )
    if reordering and why:
        raise ConfigError(
            f"strategy.transforms {reordering[0]} cannot reorder neurons where {why}: drop it or "
            "the method that needs it from strategy=[...]"
        )


def _check_robust(run: Composition) -> None:
    """Refuse a robust aggregator that would replace or miss the method's essential part."""
    combining = run.step.combining
    if combining is None:
        return
    summed = summed_payloads(run.step.sides)
    combining.check_method(sorted(summed), run.step.output)
    sent = {name for side in run.client_sides.values() for name in side.sends}
    if not run.step.transforms and (unread := sorted(sent - summed)):
        raise ConfigError(
            f"strategy.aggregator {type(combining).__name__} takes the place of the method's own "
            f"aggregator, which alone reads the payloads {unread}: choose another method, or leave "
            "strategy/aggregator as the method has it"
        )


def _check_privacy(run: Composition, modes: list[str]) -> None:
    """Refuse parts that clipping or noise would break."""
    step, clipping = run.step, any(side.clips for side in run.client_sides.values())
    private = {name for side in run.client_sides.values() for name in side.private}
    if clipping and (bare := sorted(per_example(run.client_sides) - private)):
        raise ConfigError(
            f"{_PRIVACY} does not clip the payloads {bare}, which are sums over a client's "
            "examples and have no noise of their own: set strategy.soft_labels.noise_multiplier "
            "(for soft labels), or choose another method"
        )
    checking = [
        f"strategy.server_sides.{name} {type(side).__name__}"
        for name, side in step.sides.items()
        if side.needs and type(side).check is not ServerSide.check
    ]
    if "local privacy" in modes and checking:
        raise ConfigError(
            f"{_PRIVACY}=local adds noise to payloads, and {checking[0]} checks their values, "
            f"which noise makes invalid: set {_PRIVACY}=none, or choose another method"
        )
    if "central privacy" not in modes:
        return
    assert isinstance(step.aggregator, SumAggregator)  # it reads the sum
    if step.aggregator.weighting != "clients":
        raise ConfigError(
            f"{_PRIVACY} needs every client to weigh the same, and strategy.aggregator "
            f"{type(step.aggregator).__name__} weighs them by their {step.aggregator.weighting}: "
            "set strategy/aggregator=uniform_mean"
        )
    if "clipping at clients" not in modes and (coupled := _coupled(step)):
        raise ConfigError(
            f"{_CLIPPING}=server changes what clients have sent, and {coupled[0]} must add up what "
            f"they have kept: set {_CLIPPING}=client"
        )


def _check_discount(asynchronous: Asynchronous, step: ServerStep) -> None:
    """Refuse to discount updates that the optimizer adds up as the clients do."""
    whole = asynchronous.discount == "constant" and not asynchronous.towards_model
    if step.optimizer.coupled_state and not whole:
        raise ConfigError(
            f"strategy.asynchronous.discount={asynchronous.discount}: strategy.server_optimizer "
            f"{type(step.optimizer).__name__} adds up the same updates as the clients, and not "
            "discounted ones: set it to constant and .towards_model=false, or choose rounds that "
            "wait"
        )


def _coupled(step: ServerStep) -> list[str]:
    """Return the parts whose state is computed from the client states."""
    parts = {**step.sides, type(step.optimizer).__name__: step.optimizer}
    return [name for name, one in parts.items() if one.coupled_state]
