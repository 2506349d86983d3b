"""What a run says in its log: a line for each round, and warnings."""

from __future__ import annotations

from logging import INFO, WARNING

from flwr.common.logger import log

from fedhet.common.metrics import SHOWN_METRICS, shown_metrics
from fedhet.server_app.listeners import Finished, Listener
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.update_diagnostics import LIMIT

_FEW, _SHOWN_CLIENTS = 1 / 32, 10  # of a batch, in a warning
_FIGURES = ("accuracy", "loss", "client_accuracy", "client_loss", "train_loss")


class RoundLine(Listener):
    """Logs a line with the main figures of each round, and why the run ends early."""

    def on_round(self, finished: Finished) -> None:
        """Log the round."""
        row, report = finished.rows[-1], finished.report
        shown = [*_FIGURES, *list(shown_metrics(row))[:SHOWN_METRICS]]
        figures = "  ".join(f"{name} {row[name]:.4f}" for name in shown if name in row)
        text = "[round %s/%s] %s  %.2f s"
        log(INFO, text, report.round, finished.last, figures, report.seconds)
        if finished.stop_reason:
            log(INFO, "%s", finished.stop_reason)


class SmallLastBatches(Listener):
    """Warns of clients that take a step on few examples (docs/results/niid_bench.md).

    Args:
        options: of the local training.
        strategy: with which the clients register.
    """

    def __init__(self, options: LocalTrainingConfig, strategy: FederatedStrategy) -> None:
        self._options, self._strategy = options, strategy

    def on_round(self, finished: Finished) -> None:
        """Name the clients, before round 1."""
        if finished.report.round > 0:
            return
        size, sizes = self._options.batch_size, self._strategy.availability.registry.num_examples
        last = {c: self._options.smallest_batch(n) for c, n in sizes.items() if n > size}
        few = [f"{n} of client {client}" for client, n in last.items() if n <= size * _FEW]
        if few:
            log(
                WARNING,
                "the last batch of an epoch has few examples (local.batch_size=%s): %s. Its step "
                "is as long as any other, so it can undo what the others have learned: "
                "local.drop_last=true leaves it out",
                size,
                ", ".join(few[:_SHOWN_CLIENTS]) + (", ..." if few[_SHOWN_CLIENTS:] else ""),
            )


class Alarm(Listener):
    """Logs each round's alarms, for a run in which a client may be hostile.

    On non-IID data an honest client's update is sometimes large, too. So a simulation of honest
    clients does not have this listener; the figures are in its rows all the same.
    """

    def __init__(self) -> None:
        self._has_explained = False

    def on_round(self, finished: Finished) -> None:
        """Name the clients; the first warning says what it means."""
        for client, scores in finished.report.alarms.items():
            what = ", ".join(f"{name} (z = {z:.1f})" for name, z in scores.items())
            text = "round %s: client %s sent an unusually large %s"
            if not self._has_explained:
                text += (
                    f". z says how far its length is above the clients' median; {LIMIT:g} is the "
                    "limit. Unusual data, an error or an attack can be the reason: look at this "
                    "client. docs/robust.md has aggregators that limit what a client can do"
                )
            self._has_explained = True
            log(WARNING, text, finished.report.round, client, what)
