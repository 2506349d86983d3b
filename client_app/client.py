"""FederatedClient: a NumPyClient that runs any method's client half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor

from fedhet.client_app.shared_model import SharedModel
from fedhet.client_app.state import ClientState, ClientStateStore, require_state
from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    STATE_LOST,
    ClientData,
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Tensors,
)
from fedhet.strategies.components.local_training import (
    seeded,
    steps_by_tensor,
    summary_of,
    train_locally,
)
from fedhet.strategies.components.tensor_selection import tensors_of
from fedhet.strategies.round.client_snapshots import FILE, load_trained
from fedhet.tasks.evaluation import class_accuracies, classifies, evaluate_model, logits_of

PERSONAL = "personal"  # entry of the client state: the tensors that are never sent


@dataclass
class FederatedClient(NumPyClient):
    """One client.

    ``fit`` and ``evaluate`` keep NumPyClient's contract for the tensors in ``shared_names``.
    Payloads are passed beside it: set ``received`` before ``fit``, read ``sent`` after it.
    """

    shared: SharedModel
    client_id: int  # the partition id
    data: ClientData  # the training examples
    optimizer: LocalOptimizer
    store: ClientStateStore
    sides: Mapping[str, ClientSide] = field(default_factory=dict)
    held_out: ClientData | None = None  # examples that are not trained on, for ``evaluate``
    # of (logits, labels), to train on; None: that of ``shared``
    training_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    # what the tensors that stay begin as while there is no state, in place of the seed's
    kept: Tensors = field(default_factory=dict, init=False)
    received: Payloads = field(default_factory=dict, init=False)
    sent: Payloads = field(default_factory=dict, init=False)
    state: ClientState = field(default_factory=dict, init=False)  # to be saved, after training

    def __post_init__(self) -> None:
        """Take the model over from the client before."""
        self.shared.check(self.optimizer, self.sides)
        self.shared.reset()

    def begin_as(self, kept: Tensors) -> None:
        """Let the tensors that stay here begin as ``kept`` while they have no state."""
        for name, value in kept.items():
            here = self.shared.initial.get(name)
            if here is None or value.shape != here.shape:
                raise ConfigError(
                    f"the server's initial model has {name} {tuple(value.shape)} for what stays "
                    f"at this client, whose model has "
                    f"{'none there' if here is None else tuple(here.shape)}: use the same code, "
                    "task and strategy.personal everywhere"
                )
        self.kept = kept

    # ---- NumPyClient -------------------------------------------------------------------------

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return the shared tensors, in the order of ``shared_names``."""
        shared = self.shared
        return [shared.tensors[name].detach().cpu().numpy().copy() for name in shared.shared_names]

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train on the client's data, starting from ``parameters``, and store the client state.

        Args:
            parameters: x, in the order of ``shared_names``.
            config: "round" (t, from 1), "lr"; optionally "experiment", "state-round" (the version
                of the client state to start from), "state-keep" (comma-separated versions to
                keep), "state-dropped" (comma-separated keys to drop), "evaluate-received",
                "evaluate-trained".

        Returns:
            y_i in the same order, n_i, and metrics: "num-steps", "lr-sum", "train-loss",
            "penalty" and "penalty-share" of the objective (means, if there are penalties), the
            sides' measurements, and if asked for the scores of x and of y_i.
        """
        num_examples, metrics = self.train(parameters, config)
        self.save_state(config)
        return self.get_parameters(config), num_examples, metrics

    def train(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[int, dict[str, Scalar]]:
        """Do what ``fit`` does, but leave y_i in the model and the client state in ``state``."""
        round = int(config["round"])
        experiment = str(config.get("experiment", "experiment"))
        version = int(config.get("state-round", 0))
        state = self.store.load(experiment, version) if version > 0 else {}
        lost = version > 0 and not state
        dropped = str(config.get("state-dropped", "")).split(",")
        state = {key: kept for key, kept in state.items() if key not in dropped}
        self._load(parameters, state)
        metrics: dict[str, Scalar] = {}
        if config.get("evaluate-received", False):
            loss, accuracy = self._evaluate()
            metrics |= {"received-loss": loss, **_accuracy("received-accuracy", accuracy)}
            metrics |= self._measured("received-")
        with self._seeded(round) as (generator, for_sides):
            context = self._context(state, round, float(config["lr"]), for_sides)
            if round == 1 and self.shared.options.initial == "own":
                self._start_from_own()
                context.start_here()
            for side in self.sides.values():
                side.begin(context)
            sides = list(self.sides.values())
            if self.shared.options.reuse_training:
                summary, train_loss = self._take_trained(
                    Path(self.shared.options.reuse_training), context.lr
                )
            else:
                summary, train_loss = train_locally(
                    context, sides, self.optimizer, self.shared.options, generator
                )
            self.sent = {}
            for name, side in self.sides.items():
                self.sent |= _require_sent(name, side.end(context, summary))
        if self.shared.personal_names:
            context.state[PERSONAL] = self.shared.copies(self.shared.personal_names)
        self.state = require_state(context.state)
        if lost and (self.state or self.shared.compression.keeps_state):
            log(WARNING, "client %s lost its state of round %s", self.client_id, version)
            metrics[STATE_LOST] = 1.0
        # of the shared tensors, unless only personal ones are trained
        trained = (name for name in context.shared if name in context.params)
        lr_sum = max(map(summary.lr_sum_of, trained), default=0.0) or summary.lr_sum
        metrics |= {"num-steps": summary.num_steps, "lr-sum": lr_sum, "train-loss": train_loss}
        metrics |= _penalty_share(context.measurements())
        if config.get("evaluate-trained", False):
            with self._own_model(context):
                metrics |= self._evaluate_own()
        return summary.num_examples, metrics

    def save_state(self, config: Mapping[str, Scalar]) -> None:
        """Store ``state``, if there is any, as the version of the config's round."""
        if self.state:
            experiment = str(config.get("experiment", "experiment"))
            keep = {int(config.get("state-round", 0))}
            keep.update(map(int, str(config.get("state-keep", 0)).split(",")))
            self.store.save(experiment, int(config["round"]), self.state, keep)

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate ``parameters`` on the held-out examples, or on all if none are held out.

        Args:
            parameters: x, in the order of ``shared_names``.
            config: optionally "experiment", "state-round" (as for ``fit``), and "finetune-epochs":
                first train all tensors with the plain task loss at the step size "lr", or as the
                local optimizer has it (``for_finetuning``). The fine-tuned model is not kept.
        """
        state = self._load_known(parameters, config)
        if epochs := int(config.get("finetune-epochs", 0)):
            self._finetune(state, int(config["round"]), float(config["lr"]), epochs)
        loss, accuracy = self._evaluate()
        scores = {**_accuracy("accuracy", accuracy), **self._measured()}
        return loss, len(self._evaluation_data), scores

    def logits(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return logits (n, C) and labels (n,) of what it evaluates on; see ``evaluate``."""
        self._load_known(parameters, config)
        return logits_of(self.shared.model, self._evaluation_data)

    # ---- pieces ------------------------------------------------------------------------------

    def _seeded(
        self, round: int
    ) -> AbstractContextManager[tuple[torch.Generator, torch.Generator]]:
        return seeded(self.shared.seed, round, self.client_id, self.shared.device)

    @property
    def _evaluation_data(self) -> ClientData:
        return self.held_out if self.held_out is not None else self.data

    def _load(self, parameters: NDArrays, state: ClientState) -> None:
        arrays = zip(self.shared.shared_names, parameters, strict=True)
        received = {name: torch.from_numpy(value) for name, value in arrays}
        self.shared.load(received, {**self.kept, **state.get(PERSONAL, {})})

    def _load_known(self, parameters: NDArrays, config: dict[str, Scalar]) -> ClientState:
        """Load ``parameters`` and the committed client state; return the state."""
        experiment = str(config.get("experiment", "experiment"))
        state = self.store.load(experiment, int(config.get("state-round", 0)))
        self._load(parameters, state)
        return state

    def _start_from_own(self) -> None:
        if self.shared.build is None:
            raise ConfigError("local.initial=own needs `build`, which builds a client's own model")
        seed = np.random.SeedSequence([self.shared.seed, self.client_id]).generate_state(1)[0]
        self.shared.put(tensors_of(self.shared.build(int(seed))))

    def _take_trained(self, run: Path, lr: float) -> tuple[LocalSummary, float]:
        """Load this client's trained model of another run."""
        shared = self.shared
        found = load_trained(run / FILE, self.client_id, shared.tensors)
        shared.put(found.model)
        taken = steps_by_tensor(shared.options, shared.params, found.num_steps)
        summary = summary_of(found.num_examples, found.num_steps, taken, lr, self.optimizer)
        return summary, found.train_loss

    def _context(
        self, state: ClientState, round: int, lr: float, generator: torch.Generator
    ) -> LocalContext:
        shared = self.shared

        def on_device(payloads: Payloads) -> dict[str, Tensors]:
            return {
                name: {key: value.to(shared.device) for key, value in tensors.items()}
                for name, tensors in payloads.items()
            }

        context = LocalContext(
            model=shared.model,
            loaded=shared.loaded,
            shared=shared.shared_names,
            received=on_device(self.received),
            state=on_device(state),
            data=self.data,
            loss=self.training_loss or shared.loss,
            round=round,
            batch_size=shared.options.batch_size,
            lr=lr,
        )
        context.generator, context.optimizer = generator, self.optimizer
        return context

    def _evaluate(self, data: ClientData | None = None) -> tuple[float, float | None]:
        """Return loss and accuracy on some examples, by default those to evaluate on."""
        shared = self.shared
        known = self._evaluation_data if data is None else data
        return evaluate_model(shared.model, known, shared.loss, metrics=shared.metrics)

    def _measured(self, prefix: str = "") -> dict[str, Scalar]:
        """Return the metrics of the last evaluation, without an accuracy that it has itself."""
        found = {} if self.shared.metrics is None else self.shared.metrics.compute()
        own = {"accuracy"} if classifies(self.shared.model) else set()
        return {f"{prefix}{name}": value for name, value in found.items() if name not in own}

    @contextmanager
    def _own_model(self, context: LocalContext) -> Iterator[None]:
        """Put the client's own model in the place of y_i inside the block."""
        own: dict[str, Tensor] = {}
        for side in self.sides.values():
            own |= side.own_model(context)
        trained = self.shared.copies(own)
        self.shared.put(own)
        try:
            yield
        finally:
            self.shared.put(trained)

    def _evaluate_own(self) -> dict[str, Scalar]:
        """Return the scores of the client's own model, y_i if no side has another.

        "personal-test-loss" and "personal-test-accuracy" are on the global test set, if there is
        one; "personal-accuracy" is on the held-out examples, or else on the global test set with
        its classes weighted as in this client's examples. A model that does not classify has no
        accuracy.
        """
        scores: dict[str, Scalar] = {}
        shared = self.shared
        if self.held_out is not None:
            _, accuracy = self._evaluate(self.held_out)
            scores |= {**_accuracy("personal-accuracy", accuracy), **self._measured("personal-")}
        if (test_data := shared.test_data) is not None and not classifies(shared.model):
            loss, _ = self._evaluate(test_data)
            scores |= {"personal-test-loss": loss, **self._measured("personal-test-")}
        elif test_data is not None:
            classes, metrics = self.data.num_classes, shared.metrics
            loss, accuracy, by_class = class_accuracies(
                shared.model, test_data, shared.loss, classes, metrics=metrics
            )
            scores |= {"personal-test-loss": loss, "personal-test-accuracy": accuracy}
            scores |= self._measured("personal-test-")
            if (matched := self._weighted_as_held(by_class)) is not None:
                scores.setdefault("personal-accuracy", matched)
        return scores

    def _weighted_as_held(self, by_class: Tensor) -> float | None:
        """Return the mean over classes, weighted as held here; None if no such class was tested.

        An example with several labels belongs to no class.
        """
        if by_class.isnan().all():
            return None
        held = torch.tensor(self.data.class_counts(), dtype=by_class.dtype)
        held[by_class.isnan()] = 0.0
        return float((held * by_class.nan_to_num()).sum() / held.sum()) if held.sum() > 0 else None

    def _finetune(self, state: ClientState, round: int, lr: float, epochs: int) -> None:
        options = replace(self.shared.options, epochs=epochs, steps=None, phases=())
        optimizer, lr = self.optimizer.for_finetuning(lr)
        with self._seeded(round) as (generator, for_sides):
            context = self._context(dict(state), round, lr, for_sides)
            train_locally(context, [], optimizer, options, generator)


def _accuracy(name: str, accuracy: float | None) -> dict[str, Scalar]:
    """Return the metric; none for a model that does not classify."""
    return {} if accuracy is None else {name: accuracy}


def _require_sent(name: str, sent: object) -> Payloads:
    """Return what a side's ``end`` gave, if that is a mapping."""
    if not isinstance(sent, Mapping):
        raise ConfigError(
            f"strategy={name}: its end() returned a {type(sent).__name__}: it must "
            "return what it sends, tensors by payload and name ({} for nothing)"
        )
    return dict(sent)


def _penalty_share(means: Mapping[str, float]) -> dict[str, float]:
    """Return the means, with "objective" replaced by the penalties' share of it."""
    rest = {name: value for name, value in means.items() if name != "objective"}
    if means.get("objective"):
        rest["penalty-share"] = means["penalty"] / means["objective"]
    return rest
