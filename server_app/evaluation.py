"""What the server measures of the output model after a round, on its test set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from flwr.app import ArrayRecord, MetricRecord
from omegaconf import DictConfig
from torch import nn

from fedhet.conf import plain_part
from fedhet.server_app.assembly import backdoor_of
from fedhet.server_app.machine import evaluation_threads
from fedhet.strategies.base import Tensors
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.wire.records import to_metrics, to_tensors
from fedhet.tasks import AnyTask
from fedhet.tasks.evaluation import Batched, evaluate_model


class ServerEvaluation:
    """Evaluates the output model in the rounds of ``evaluation.every``, and in the last one.

    Args:
        recipe: of the run.
        task: gives the loss and the metrics.
        names: of the tensors that the clients share; an output model of another kind has others.
        server_model: the network of the task.
        test_data: None without any.
        strategy: builds the output model, and has the scores of the clients' own models.
    """

    def __init__(
        self,
        recipe: DictConfig,
        task: AnyTask,
        names: Sequence[str],
        server_model: ServerModel,
        test_data: Batched | None,
        strategy: FederatedStrategy,
    ) -> None:
        config = plain_part(recipe, "evaluation")
        self._every, self._of_clients = int(config["every"]), config["model"] == "clients"
        self._names, self._server_model, self._strategy = set(names), server_model, strategy
        self._loss, self.test_data = task.loss, test_data
        self._metrics = task.metric_set(
            list(config["metrics"]),
            per_class=bool(config["per_class"]),
            device=next(server_model.model.parameters()).device,
        )
        self._backdoor = backdoor_of(recipe, server_model)
        self.output: Tensors = {}  # of the last round, evaluated or not

    def evaluate(self, round: int, arrays: ArrayRecord, last: int) -> MetricRecord | None:
        """Return the scores of ``arrays``, of a round of ``last``; None if it is not evaluated."""
        self.output = to_tensors(arrays)
        if round != last and (self._every == 0 or round % self._every != 0):
            return None
        if round > 0 and self._of_clients:
            return self._client_scores()
        return None if self.test_data is None else self._test(self.test_data)

    def model_of(self, tensors: Tensors) -> nn.Module:
        """Return the output model with these tensors."""
        if tensors.keys() != self._names:
            return self._strategy.server_step.build_output_model(tensors)
        self._server_model.load(tensors)
        return self._server_model.model

    def _test(self, test_data: Batched) -> MetricRecord:
        model = self.model_of(self.output)
        torch.set_num_threads(evaluation_threads(model, len(test_data)))
        loss, accuracy = evaluate_model(model, test_data, self._loss, metrics=self._metrics)
        torch.set_num_threads(1)
        scores = {} if accuracy is None else {"accuracy": accuracy}  # the task may not classify
        found = self._metrics.compute() if self._metrics else {}
        if self._backdoor is not None:
            batches = test_data.batches(500, generator=None, train=False)
            scores["attack_success"] = self._backdoor.success(model, batches)
        return to_metrics({**found, **scores, "loss": loss})

    def _client_scores(self) -> MetricRecord | None:
        """Return the clients' models' mean scores: on the global test set, or else their own."""
        scores = self._strategy.personal_scores()
        kind = "personal-test-" if "personal-test-loss" in scores else "personal-"
        names = ("accuracy", "loss", *self._strategy.client_metrics.names)
        found = {n: scores[kind + n] for n in names if kind + n in scores}
        return to_metrics(found) if found else None
