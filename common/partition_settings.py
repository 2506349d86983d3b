"""Keys of the group partition, with their types, ranges and meanings."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from fedhet.common.kinds import (
    Count,
    NotNegative,
    Positive,
    Section,
    Seed,
    ShareBelowOne,
    Text,
    Whole,
)

_PARTITION = "how examples are split over clients; set by partition=..."


class Partition(Section):
    """Every client gets a random part of the same size."""

    name: Literal["iid"] = Field(description=_PARTITION)
    holdout: ShareBelowOne = Field(
        0.0, description="fraction that each client holds out; none trains on what any holds out"
    )
    seed: Seed | None = Field(None, description="seed of the partition; null: the run's seed")
    unseen: list[Whole | Text] = Field(
        [], description="clients that are never trained on, only evaluated: their ids or names"
    )


class _WithAlpha(Partition):
    alpha: Positive = Field(0.3, description="small: few classes a client, large: near iid")


class Dirichlet(_WithAlpha):
    """Each class is spread over the clients by a Dirichlet draw: sizes and classes differ."""

    name: Literal["dirichlet"] = Field(description=_PARTITION)  # type: ignore[assignment]
    min_size: Count = Field(
        10, description="everything is redrawn until every client has that many examples"
    )
    balance: bool = Field(
        True,
        description="leave out clients that already have their equal share (Yurochkin et al.; "
        "FedDW: false)",
    )


class ClassPriorDirichlet(_WithAlpha):
    """Clients of equal size draw their examples' classes from Dirichlet priors of their own."""

    name: Literal["class_prior_dirichlet"] = Field(description=_PARTITION)  # type: ignore[assignment]


class FedDFDirichlet(_WithAlpha):
    """The Dirichlet draw of each class over the clients, re-cut into equal sizes."""

    name: Literal["feddf_dirichlet"] = Field(description=_PARTITION)  # type: ignore[assignment]
    alpha: Positive = Field(0.1, description="small: few classes a client, large: near iid")
    group_size: Count = Field(
        10, description="with more clients than that, the draw is made for groups of so many"
    )


class Pathological(Partition):
    """Every client has some random classes."""

    name: Literal["pathological"] = Field(description=_PARTITION)  # type: ignore[assignment]
    classes: Count = Field(2, description="the number of classes of each client")
    equal_sizes: bool = Field(
        True,
        description="true: equal sizes, a class that has run out is used again (FedMRUR); false: "
        "a class is shared among its clients, and no example is used twice",
    )
    class_assignment_mode: Literal["random", "first-deterministic", "deterministic"] = Field(
        "random",
        description="random: a class may be with no client; first-deterministic: client i has "
        "class i, its others are random (NIID-Bench); deterministic: client i has class i and the "
        "next",
    )


class Shards(Partition):
    """The examples are sorted by class and cut into shards of equal size."""

    name: Literal["shards"] = Field(description=_PARTITION)  # type: ignore[assignment]
    shards_per_client: Count = Field(
        2, description="the examples that do not fill a shard are left out"
    )


class DisjointClasses(Partition):
    """Every class is with one client, all its examples."""

    name: Literal["disjoint_classes"] = Field(description=_PARTITION)  # type: ignore[assignment]
    sets: list[list[int]] | None = Field(
        None,
        description="a list of classes for each client, such as [[0,1,3,4,7],[2,5,6,8,9]]; classes "
        "in no list are left out; null: all at random",
    )


class Natural(Partition):
    """Every client is one natural id, such as a writer."""

    name: Literal["natural"] = Field(description=_PARTITION)  # type: ignore[assignment]
    min_size: Count = Field(1, description="ids with fewer examples are not chosen")


class FeatureShift(Partition):
    """Every client gets a random part of the same size, of images as its own camera takes them."""

    name: Literal["feature_shift"] = Field(description=_PARTITION)  # type: ignore[assignment]
    brightness: NotNegative = Field(0.3, description="the most that a client's images are lighter")
    contrast: NotNegative = Field(0.5, description="the most that its contrast's logarithm is off")
    noise: NotNegative = Field(0.2, description="the most noise, as a standard deviation")
    rotation: NotNegative = Field(30.0, description="the most degrees by which they are turned")


class Site(Partition):
    """Every node reads its own folder, which its node config names."""

    name: Literal["site"] = Field(description=_PARTITION)  # type: ignore[assignment]


AnyPartition = Annotated[
    Partition
    | Dirichlet
    | ClassPriorDirichlet
    | FedDFDirichlet
    | Pathological
    | Shards
    | DisjointClasses
    | Natural
    | FeatureShift
    | Site,
    Field(discriminator="name"),
]
PARTITIONS: dict[str, type[Partition]] = {
    get_args(kind.model_fields["name"].annotation)[0]: kind
    for kind in get_args(get_args(AnyPartition)[0])
}
