"""The schema of the recipe: every fixed key with its type, range and meaning.

``fedhet --help``, docs/keys.md, the comments in conf/ and docs/recipe.schema.json are made from it,
and ``fedhet.conf.check`` checks every recipe against it. Keys of one method
(``strategy.<method>.*``) and of classes (``_target_``) are typed by the classes
(``fedhet.common.configured``); ``fedhet.conf.catalogue`` lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from fedhet.common.kinds import (
    Count,
    Device,
    Inside,
    NotNegative,
    Part,
    Positive,
    Section,
    Seed,
    Selector,
    Share,
    ShareAboveZero,
    Text,
    Two,
    Whole,
)
from fedhet.common.partition_settings import AnyPartition
from fedhet.common.task_settings import AnyTask
from fedhet.conf.schema.groups import AnyRuntime, Local, Logger

MOST_CLIENTS = 1_000_000  # far beyond what a server can hold the registrations of
FIGURES = (  # of every summary
    "accuracy",
    "best_accuracy",
    "loss",
    "client_accuracy",
    "client_loss",
    "personal_accuracy",
    "rounds",
    "seconds",
    "seconds_per_round",
    "wall_seconds",
    "bytes_up",
    "bytes_down",
    "failures",
)


class Server(Section):
    """The server's step."""

    lr: Positive = Field(description="eta_g: x <- x + eta_g * Delta")


class InitialModel(Section):
    """The trained model that the server starts from, in place of the seed's."""

    path: Text | None = Field(
        description="a run's folder, or a file: model.safetensors, or a state_dict as "
        ".safetensors, .pt or .pth"
    )
    layers: Selector = Field(
        description="which of its tensors to take: all | last:N | first:N | name patterns; the "
        "others come from the seed"
    )


class Evaluation(Section):
    """When and where models are evaluated."""

    every: Whole = Field(description="evaluate every this many rounds; 0: only at the end")
    model: Literal["global", "clients", "both"] = Field(
        description="whose accuracy: global (the server's model) | clients (the mean of the "
        "clients' own) | both"
    )
    received: bool = Field(
        description="each client also evaluates the model it received, on its own examples"
    )
    clients: bool = Field(
        description="evaluate the new model at all clients, on their own data, in a second "
        "exchange a round"
    )
    metrics: list[Text] = Field(
        description="further metrics, of this task's kind: [f1,auroc], [mae,r2], or a function of "
        "your own: package.module:function (docs/metrics.md)"
    )
    per_class: bool = Field(description="also each metric's value for each class: f1/<class>")
    per_client: bool = Field(description="also each client's own values, in per_client of a row")
    confusion: bool = Field(
        description="after the last round clients send counts: the confusion matrix and, with two "
        "classes, a threshold"
    )
    finetune_epochs: Whole = Field(
        description="in that exchange, fine-tune the model at each client for this many epochs "
        "first"
    )


class Calibration(Section):
    """Prediction sets: after the last round clients calibrate on held-out examples."""

    alphas: list[Inside] = Field(
        description="sets contain the right class in a share 1 - alpha of cases, as [0.1]; []: "
        "no sets"
    )
    bins: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        description="bins of a client's histogram of scores"
    )
    temperature_share: Annotated[float, Field(ge=0, le=0.9)] = Field(
        description="share of the held-out examples that the temperature is fitted on"
    )


class Diagnostics(Section):
    """Figures of every layer in the results directory; the run does not change."""

    layers: Selector = Field(
        description="tensors whose drift diversity and update norm are recorded every round: none "
        "| all | last:N | first:N | name patterns"
    )
    cka: Selector = Field(
        description="tensors whose layers are compared between clients' models on the test set "
        "(linear CKA): same syntax"
    )
    cka_every: Count = Field(
        description="compare every this many rounds, and in the first and the last"
    )
    cka_examples: Two | None = Field(
        description="how many test examples to use, the first ones; null: all"
    )
    cka_clients: Two = Field(description="how many of a round's clients to use, the first ones")


class Checkpoint(Section):
    """What a run can be continued from."""

    every: Whole = Field(
        description="write a checkpoint every this many rounds; 0: only at the end"
    )
    best: bool | Text = Field(
        description="keep best.safetensors, the evaluated model of the best round: true (by "
        "early_stopping.metric) | a metric"
    )
    client_models: bool = Field(
        description="also keep what the clients of the last round sent "
        "(client_models.safetensors): models, projections and so on"
    )


class EarlyStopping(Section):
    """End the run when a metric no longer improves."""

    metric: Text = Field(
        description="accuracy, loss, one of evaluation.metrics, or these with client_ or received_"
    )
    patience: Count | None = Field(
        description="stop after this many evaluations in a row without improvement; null: never"
    )
    min_delta: NotNegative = Field(description="smaller changes are no improvement")
    mode: Literal["auto", "min", "max"] = Field(
        description="auto (losses and errors are minimised) | min | max; a metric of your own "
        "needs min or max"
    )


class Phase(Section):
    """A part of local training in which only some tensors are trained."""

    layers: Selector = Field(description="the tensors that are trained")
    epochs: Count | None = Field(
        None, description="for how many epochs; null: the rest of local.epochs"
    )


class Strategy(Section):
    """The method: halves of clients and server, and the parts that a method may replace."""

    __pydantic_extra__: dict[str, dict[str, Any]]
    model_config = ConfigDict(extra="allow")

    methods: dict[str, Text] = Field(
        description="the classes of the methods, by name; set by strategy=..."
    )
    phases: list[Phase] = Field(
        description="local training in parts: [{layers: head.*, epochs: 1}, {layers: body.*, "
        "epochs: null}]; null: the remaining epochs"
    )
    personal: Selector = Field(
        description="tensors that stay at the client: none | all | last:N | name patterns"
    )
    asynchronous: dict[str, Any] | None = Field(
        description="rounds that wait for nobody; strategy=fedbuff and fedasync set it"
    )
    allow_stacked_corrections: bool = Field(
        description="permit several sides that edit gradients (their order matters)"
    )
    aggregator: Part | None = Field(
        description="how replies become one; null: the method's own; set by strategy/aggregator=..."
    )
    server_optimizer: Part | None = Field(
        description="how the server steps along it; null: the method's own; set by "
        "strategy/server_optimizer=..."
    )
    output: Part | None = Field(
        description="the model that is evaluated and stored; null: the method's own; set by "
        "strategy/output=..."
    )
    sampler: Part = Field(description="who takes part in a round; set by strategy/sampler=...")
    compression: Part = Field(
        description="what travels in fewer bytes; set by strategy/compression=..."
    )
    differential_privacy: Part | None = Field(
        description="clipping and noise; set by strategy/differential_privacy=..."
    )
    secure_aggregation: Part | None = Field(
        description="the server sees the sum of the replies; set by strategy/secure_aggregation=..."
    )


class Sites(Section):
    """What the sites of a simulation have of their own."""

    policy: Text | dict[int, Text] | None = Field(
        description="file with the rules of all sites, or of some by client: {1: strict.yaml}; "
        "null: none (docs/policy.md)"
    )


class Recipe(Section):
    """The recipe of a run."""

    __pydantic_extra__: dict[str, Any]  # what an experiment file's references name: conf.check
    model_config = ConfigDict(extra="allow")

    clients: Annotated[int, Field(ge=0, le=MOST_CLIENTS)] = Field(
        description="N, the number of clients; 0: the num-partitions of the SuperNodes' node "
        "configs"
    )
    participation: ShareAboveZero = Field(description="|S| / N, the share of clients in a round")
    rounds: Whole = Field(
        description="the last round; 0: evaluate the initial model and train nothing"
    )
    seed: Seed = Field(
        description="seed of model, partition, cohorts, batches, augmentation and dropout"
    )
    target_accuracy: Share | None = Field(description="stop after the round that reaches it")
    device: Device = Field(description="auto (a GPU where there is one) | cpu | cuda | cuda:N")
    min_replies: Count = Field(
        description="a round with fewer valid replies leaves the model unchanged"
    )
    max_failed_rounds: Count = Field(
        description="the run ends with an error after this many such rounds in a row"
    )
    server: Server
    initial_model: InitialModel
    evaluation: Evaluation
    calibration: Calibration
    diagnostics: Diagnostics
    checkpoint: Checkpoint
    early_stopping: EarlyStopping
    objective: Text = Field(
        description="the figure of summary.json that a search (hydra/sweeper=optuna) or "
        f"fedhet-tune optimizes: {', '.join(FIGURES)}; with evaluation.metrics=[f1] also f1, "
        "best_f1, client_f1, best_client_f1, personal_f1"
    )
    choice: Text | None = Field(description="how fedhet-tune chose some of the values")
    paper: dict[str, Any] | None = Field(
        description="a paper's results for this experiment; the experiment sets it, fedhet-report "
        "reads it"
    )
    results_dir: Text | None = Field(
        description="where the run writes; absolute, or below the current directory"
    )
    resume: bool | Literal["auto"] = Field(
        description="continue from the last checkpoint in results_dir; auto: continue a run if "
        "there is one, else begin one"
    )
    site: Sites
    local: Local
    schedule: Part = Field(description="the factor of local.lr in a round; set by schedule=...")
    system: Part | None = Field(
        description="slow, absent and vanishing clients of a simulation; set by system=..."
    )
    partition: AnyPartition
    task: AnyTask
    strategy: Strategy
    attack: Part | None = Field(
        None, description="what hostile clients do; null: all are honest; set by attack=..."
    )
    runtime: AnyRuntime
    logger: Logger
