"""Keys of the groups local, runtime and logger."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from fedhet.common.kinds import (
    Address,
    Count,
    Fetch,
    NotNegative,
    Part,
    Positive,
    Seconds,
    Section,
    Selector,
    Share,
    Text,
)

_RUNTIME = "where it runs; set by runtime=..."


class Local(Section):
    """Local training; the optimizer is fresh each round."""

    epochs: Count | None = Field(
        description="E, passes over the client's data; null when steps is given"
    )
    steps: Count | None = Field(description="K, optimizer steps; null when epochs is given")
    batch_size: Count = Field(description="examples of a mini-batch")
    lr: Positive = Field(description="eta_l, times the schedule's factor of the round")
    optimizer: Text = Field(
        description="a name of local.optimizers: sgd | adam, or a method's own (sam, per_fedavg)"
    )
    momentum: Share = Field(description="momentum of sgd and sam")
    momentum_layers: Selector = Field(description="sgd: the tensors that momentum acts on")
    weight_decay: NotNegative = Field(description="added to the gradient after clipping")
    clip: Positive | None = Field(description="maximum L2 norm of the corrected gradient")
    drop_last: bool = Field(
        description="leave out a last, smaller batch, unless it is the only one"
    )
    initial: Literal["received", "own"] = Field(
        description="where round 1 starts: received (the server's model) | own (each client's own "
        "random model; one-shot methods)"
    )
    reuse_training: Text | None = Field(
        description="the folder of a finished one-round run with the same local training that "
        "kept its clients' models (checkpoint.client_models): aggregate these instead of training"
    )
    autocast: bool = Field(description="bfloat16 in the forward pass")
    optimizers: dict[str, Part] = Field(description="what local.optimizer can name")


# -------------------------------------------------------------------------------------- runtime
class Runtime(Section):
    """Flower's simulation on this machine, or warm processes of this machine."""

    name: Literal["flower", "local"] = Field(description=_RUNTIME)
    client_cpus: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="CPUs a client gets, and its torch threads; as many clients at once as fit "
        "num_cpus"
    )
    client_gpus: Annotated[float, Field(ge=0, le=64)] | None = Field(
        description="share of a GPU a client gets; null: none without a GPU or with device=cpu, "
        "else what lets all CPUs work"
    )
    num_cpus: Annotated[int, Field(ge=1, le=65536)] | None = Field(
        description="CPUs of the whole simulation; null: all that affinity and control groups "
        "(a container's quota) let it keep busy"
    )
    simulation: bool = Field(
        description="all clients share this machine's disk, so their state lives below results_dir"
    )
    channels_last: bool = Field(
        description="memory format of fedhet's convolutional models: 20 to 25 % faster, on a CPU "
        "too; a model of the user's keeps its own"
    )
    round_timeout_seconds: Seconds = Field(
        description="how long the server waits for a round's replies"
    )
    connect_timeout_seconds: Seconds = Field(
        description="how long it waits for the clients before round 1"
    )
    min_clients: Count | None = Field(
        description="how many clients are enough for round 1 when that time is over; the others "
        "may join later; null: all"
    )


class RayRuntime(Runtime):
    """A Ray cluster: clients as warm Ray actors on all its nodes."""

    name: Literal["ray"] = Field(description=_RUNTIME)  # type: ignore[assignment]
    address: Text | None = Field(
        description="address of the cluster; null: start one on this machine for this run"
    )


class DeploymentRuntime(Runtime):
    """A federation that is up elsewhere: the run is submitted to it and followed."""

    name: Literal["deployment"] = Field(description=_RUNTIME)  # type: ignore[assignment]
    address: Address = Field(
        description="host:port of the SuperLink's Control: its own loopback, or a tunnel to it"
    )
    root_certificates: Text | None = Field(
        description="file with the CA's certificate; null: the system's"
    )
    insecure: bool = Field(description="true: Control without TLS")
    connection: Text | None = Field(
        description="in place of these three: a name in Flower's own config.toml, as in `flwr run "
        ". NAME`"
    )
    server_results: Text | None = Field(
        description="folder at the server where the run writes; null: results_dir, which is then "
        "on a disk that the server sees"
    )
    fetch: Fetch | None = Field(
        description="a command that brings the results, after the run: {server} is the run's "
        "folder there, {here} results_dir"
    )
    stop_on_interrupt: bool = Field(
        description="true: Ctrl-C stops the run; false: it goes on, and resume=true follows it "
        "again"
    )
    reconnect_seconds: Seconds = Field(
        description="how long a connection may be broken before the launcher gives up following"
    )


AnyRuntime = Annotated[Runtime | RayRuntime | DeploymentRuntime, Field(discriminator="name")]


# --------------------------------------------------------------------------------------- logger
class PlainLogger(Section):
    """A logger without settings."""

    target: Text = Field(alias="_target_", description="class of the logger")


class MLflowLogger(PlainLogger):
    """MLflow."""

    tracking_uri: Text | None = Field(
        description="http://... | sqlite:////an/absolute/path.db; null: MLFLOW_TRACKING_URI, else "
        "below results_dir"
    )
    experiment: Text = Field(description="MLflow's experiment that gets the run")


class WandBLogger(PlainLogger):
    """Weights & Biases."""

    project: Text = Field(description="W&B's project that gets the run")
    entity: Text | None = Field(description="the user or team; null: the account's default")
    mode: Literal["online", "offline"] | None = Field(
        description="null: what WANDB_MODE says, else online"
    )


class Logger(Section):
    """Outputs beside metrics.jsonl, by name."""

    __pydantic_extra__: dict[str, Part]
    model_config = ConfigDict(extra="allow")

    csv: PlainLogger = Field(None, description="metrics.csv: a line per round")  # type: ignore[assignment]
    tensorboard: PlainLogger = Field(None, description="event files in tensorboard/")  # type: ignore[assignment]
    mlflow: MLflowLogger = Field(None, description="MLflow")  # type: ignore[assignment]
    wandb: WandBLogger = Field(None, description="Weights & Biases")  # type: ignore[assignment]
    run_log: PlainLogger = Field(  # type: ignore[assignment]
        None, description="rows as lines of the log; runtime=deployment sets it by itself"
    )
