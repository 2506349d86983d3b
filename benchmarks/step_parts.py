"""Where the time of a method's local step goes, by part: ``benchmarks/epoch.py --profile METHOD``.

The product's code runs as it is. Around what it calls (the draw of a batch, the model, the loss,
``backward``, penalties, corrections, the optimizer and its move) lie ranges of torch.profiler, one
in another, and a part is the time of its ranges less that of the ranges within. A GPU is waited for
at both ends of a range, so that its work counts where it was asked for, without what queueing
hides, as the profiler itself adds to every operator. So the shares are what to read here;
"seconds_unprofiled" says how long an epoch takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function

from strategies.base import Batch, ClientSide, LocalContext, LocalOptimizer, Tensors

# in the order of a step of SAM; "perturbation" is what a optimizer does beside what it calls
ORDER = (
    "data",
    "forward, pass 1",
    "backward, pass 1",
    "frozen model",
    "penalty",
    "perturbation",
    "forward, pass 2",
    "backward, pass 2",
    "corrections and clipping",
    "move",
    "rest",
)
_PREFIX = "part: "


class Parts:
    """Puts ranges around the parts of a client's local training.

    Args:
        device: where it trains.
    """

    def __init__(self, device: str) -> None:
        self._wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self.passes = 0  # of the step that is being taken

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Count what is done inside the block as this part."""
        self._wait()
        with record_function(_PREFIX + name):
            yield
            self._wait()

    def around(self, name: str, call: Callable[..., Any], *, by_pass: bool = False) -> Any:
        """Return ``call`` in a range; ``by_pass`` says of which pass over the batch it is."""

        def within(*args: Any, **how: Any) -> Any:
            with self.range(f"{name}, pass {self.passes}" if by_pass else name):
                return call(*args, **how)

        return within

    def mark(self, context: LocalContext, sides: Sequence[ClientSide]) -> None:
        """Put ranges around the model, the loss, and what the sides add; after their ``begin``."""
        # first the frozen model: it is copied from the other, ranges and all
        frozen, model = context.global_model, context.model
        frozen.forward = self.around("frozen model", frozen.forward)
        model.forward = self.around("forward", model.forward, by_pass=True)
        context.loss = self.around("forward", context.loss, by_pass=True)
        for side in sides:
            side.penalty = self.around("penalty", side.penalty)

    def optimizer(self, optimizer: LocalOptimizer) -> LocalOptimizer:
        """Return the optimizer, with ranges around it and what it calls."""
        mover: Any = getattr(optimizer, "outer", optimizer)
        mover.move = self.around("move", mover.move)
        return _OptimizerInParts(optimizer, self)

    def profile(self, train: Callable[[], object]) -> dict[str, dict[str, float]]:
        """Train under the profiler; return "seconds", "share" and "operators" of every part.

        "operators" are those that call no other: on a GPU, about as many kernels.
        """
        backward = self.around("backward", Tensor.backward, by_pass=True)
        with (
            patch.object(Tensor, "backward", backward),
            torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler,
        ):
            self.around("rest", train)()
        return _by_part(profiler.events())


class _OptimizerInParts:
    def __init__(self, optimizer: LocalOptimizer, parts: Parts) -> None:
        self._optimizer, self._parts = optimizer, parts

    def start(self, params: Tensors, lr: float) -> None:
        self._optimizer.start(params, lr)

    def step(
        self,
        next_batch: Callable[[], Batch],
        backward: Callable[[Batch], Tensor],
        correct: Callable[[], None],
    ) -> Tensor:
        parts = self._parts
        parts.passes = 0

        def another_pass(batch: Batch) -> Tensor:
            parts.passes += 1
            with parts.range("rest"):  # of training.py: it joins loss and penalties
                return backward(batch)

        next_batch = parts.around("data", next_batch)
        correct = parts.around("corrections and clipping", correct)
        with parts.range("perturbation"):
            return self._optimizer.step(next_batch, another_pass, correct)

    def stateful(self, names: Sequence[str]) -> list[str]:
        return self._optimizer.stateful(names)


def _by_part(events: Iterable[FunctionEvent]) -> dict[str, dict[str, float]]:
    """Return the parts' figures; an event belongs to the innermost range that it began in."""
    found: dict[str, dict[str, float]] = {}
    open_ranges: list[tuple[float, dict[str, float]]] = []  # end, figures
    for event in sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end)):
        while open_ranges and open_ranges[-1][0] <= event.time_range.start:
            open_ranges.pop()
        if event.name.startswith(_PREFIX):
            seconds = event.time_range.elapsed_us() / 1e6
            part = event.name.removeprefix(_PREFIX)
            if open_ranges:
                open_ranges[-1][1]["seconds"] -= seconds
            figures = found.setdefault(part, {"seconds": 0.0, "operators": 0})
            figures["seconds"] += seconds
            open_ranges.append((event.time_range.end, figures))
        elif open_ranges and not event.cpu_children and event.name.startswith("aten::"):
            open_ranges[-1][1]["operators"] += 1
    whole = sum(figures["seconds"] for figures in found.values())
    for figures in found.values():
        figures["share"] = figures["seconds"] / whole
    known = {name: found[name] for name in ORDER if name in found}
    return known | {name: found[name] for name in sorted(found.keys() - known.keys())}


def table_of(parts: dict[str, dict[str, float]], steps: int) -> str:
    """Return a Markdown table of the parts, by step."""
    lines = ["| part | ms a step | share | operators a step |", "|---|---|---|---|"]
    for name, figures in parts.items():
        lines.append(
            f"| {name} | {1e3 * figures['seconds'] / steps:.3f} | {100 * figures['share']:.1f} % "
            f"| {figures['operators'] / steps:.1f} |"
        )
    return "\n".join(lines) + "\n"
