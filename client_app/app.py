"""The ClientApp: answers the server's messages with a FederatedClient of the recipe."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedhet.client_app.calibration import calibrate_reply, confusion_reply
from fedhet.client_app.columns import columns_reply, sent_columns
from fedhet.client_app.errors import kept_at_site
from fedhet.client_app.messages import evaluate_reply, train_reply, trained, upload_seed
from fedhet.client_app.runtime import (
    ClientRuntime,
    client_id_of,
    client_runtime,
    num_partitions_of,
    site_folder,
    task_of,
)
from fedhet.client_app.site_policy import SitePolicy
from fedhet.common.decisions import CONFUSION
from fedhet.conf import RunConfig, compose_overrides, fingerprint, overrides_of, versions
from fedhet.strategies.round.registration import CANNOT_TRAIN, MOST_LETTERS, NAME
from fedhet.strategies.wire.packed_records import with_plain_records
from fedhet.strategies.wire.records import CLIENT, COLUMNS, config_of
from fedhet.tasks import Functions
from fedhet.tasks.conformal import CALIBRATE


@dataclass(frozen=True)
class Handlers:
    """The answers to the server's messages.

    Args:
        words: the recipe's overrides for a run config.
        functions: of a task on own data, in place of those that the recipe names.
    """

    words: Callable[[RunConfig], Sequence[str]] = overrides_of
    functions: Functions | None = None

    def client_app(self) -> ClientApp:
        """Return the ClientApp that answers so."""
        app = ClientApp(mods=[with_plain_records])
        app.query()(self.register)
        app.query(COLUMNS)(self.columns)
        app.query(CALIBRATE)(self.calibrate)
        app.query(CONFUSION)(self.confusion)
        app.train()(self.train)
        app.evaluate()(self.evaluate)
        return app

    def register(self, message: Message, context: Context) -> Message:
        """Answer the registration: partition id, example count, hashes, versions."""
        with self._at_site(message, context):
            runtime = self._runtime(message, context)
            client_id = client_id_of(context, runtime.num_clients)
            data, held_out = runtime.client_data(client_id, site_folder(context))
            why_not = runtime.why_not_train(client_id, site_folder(context))
        node_info: dict[str, int | str] = {
            **runtime.node_info,
            "partition-id": client_id,
            "num-partitions": runtime.num_clients,
            "num-examples": len(data),
            "num-held-out": 0 if held_out is None else len(held_out),
        }
        if why_not:
            node_info[CANNOT_TRAIN] = why_not
        given = context.node_config.get("site-name")
        if name := given or runtime.task.name_of(client_id, site_folder(context)):
            node_info[NAME] = str(name)[:MOST_LETTERS]
        if runtime.secure_aggregation is not None:
            runtime.secure_aggregation.check_client(len(data))
            node_info |= {"num-examples": 0, "num-held-out": 0}  # the server learns only sums
        return Message(RecordDict({CLIENT: ConfigRecord({**node_info})}), reply_to=message)

    def columns(self, message: Message, context: Context) -> Message:
        """Register for a common fit of a table's columns, or send the site's statistics of them."""
        with self._at_site(message, context) as policy:
            recipe = compose_overrides(tuple(self.words(context.run_config)))
            task = task_of(recipe, num_partitions_of(context), self.functions)
            client_id = client_id_of(context, task.num_clients)
            info = {"versions": str(versions()), **fingerprint(recipe)}
            reply = columns_reply(task, client_id, site_folder(context), info, message)
            return reply if policy is None else policy.with_columns(reply)

    def train(self, message: Message, context: Context) -> Message:
        """Train: "params", payloads and "config" in, "update", payloads and "metrics" out."""
        with self._at_site(message, context) as policy:
            runtime = self._runtime(message, context)
            every, own = runtime.evaluate_every, runtime.evaluates_own
            client_for = partial(runtime.client_for, context, policy=policy)
            if runtime.secure_aggregation is None:
                return train_reply(client_for(message), message, every, own)
            client_id = client_id_of(context, runtime.num_clients)
            return runtime.secure_aggregation.reply(
                message,
                context,
                train=lambda asked: trained(client_for(asked), asked, every, own),
                layout=runtime.layout,
                seed=lambda asked: upload_seed(runtime.seed, client_id, asked),
            )

    def evaluate(self, message: Message, context: Context) -> Message:
        """Evaluate "params" on the client's own data: "loss" and "accuracy" out."""
        with self._at_site(message, context) as policy:
            runtime = self._runtime(message, context)
            client = runtime.client_for(context, message)
            reply = evaluate_reply(client, message, int(runtime.evaluation.finetune_epochs))
            return reply if policy is None else policy.evaluated(reply, client, runtime.task)

    def calibrate(self, message: Message, context: Context) -> Message:
        """Send sums and counts of the scores that "params" give the held-out examples."""
        with self._at_site(message, context) as policy:
            runtime = self._runtime(message, context)
            client = runtime.client_for(context, message)
            if policy is not None and client.held_out is not None:
                policy.require_examples(CALIBRATE, len(client.held_out))
            return calibrate_reply(client, message)

    def confusion(self, message: Message, context: Context) -> Message:
        """Send counts of the answers that "params" give to the examples of an evaluation."""
        with self._at_site(message, context) as policy:
            runtime = self._runtime(message, context)
            client = runtime.client_for(context, message)
            return confusion_reply(client, message, policy)

    def _runtime(self, message: Message, context: Context) -> ClientRuntime:
        words, columns = tuple(self.words(context.run_config)), sent_columns(message)
        return client_runtime(context, words, self.functions, columns)

    @contextlib.contextmanager
    def _at_site(self, message: Message, context: Context) -> Iterator[SitePolicy | None]:
        """Refuse what the site's policy forbids, and yield that policy.

        Keep errors' texts here, and end when the server no longer waits; in no simulation.

        A SuperNode waits for its executor without end, so a client that hangs would never take
        part again. So the process ends with a traceback; a simulation's plays other clients, too.
        """
        words = tuple(self.words(context.run_config))
        if _is_simulation(words):
            yield SitePolicy.admitting(message, context, words)
            return
        seconds = float(config_of(message).get("timeout-seconds", message.metadata.ttl))
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            node = context.node_config
            site = node.get("site-name") or f"client {node.get('partition-id', '?')}"
            with kept_at_site(str(site)):
                yield SitePolicy.admitting(message, context, words)
        finally:
            faulthandler.cancel_dump_traceback_later()


@lru_cache(maxsize=64)  # reading a recipe takes as long as a small client's step
def _is_simulation(words: tuple[str, ...]) -> bool:
    return bool(compose_overrides(words).runtime.simulation)


app = Handlers().client_app()
