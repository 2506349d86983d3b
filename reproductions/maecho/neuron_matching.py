"""Measures which neurons of clients' networks come together in a fusion (MA-Echo, Figure 5).

The V_i are iterated as in the docstring of strategies/maecho.py, with P (d, d) itself: the
aggregator holds them in other coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.reproductions.maecho.flat_model import Batches
from fedhet.reproductions.maecho.fusion_path import FusedNeurons, Stage
from fedhet.strategies.base import Reply, Tensors, local_model
from fedhet.strategies.fusion.projections import (
    PROJECTIONS,
    flattened,
    projected_layers,
    unflattened,
)
from fedhet.strategies.maecho import HarmonizedOptima
from fedhet.strategies.otfusion import NeuronAlignment
from fedhet.tasks import Task
from fedhet.tasks.evaluation import evaluate_model

LATER = 30  # iterations of the last stage
MOST_NEURONS = 100  # of a layer
EXAMPLES = 2000  # of a client's own
STARTS = ("average", "first")
Models = Sequence[Tensors]


@dataclass(frozen=True)
class Fusion:
    """The fusion of a run."""

    task: Task
    aggregator: HarmonizedOptima
    params: Tensors  # x
    sent: Sequence[Reply]  # as the clients sent them
    replies: Sequence[Reply]  # as the aggregator got them


def neurons(fusion: Fusion) -> FusedNeurons | None:
    """Return the neurons of the last layer before the classifier, in up to four stages of a fusion.

    None where this module does not know the V_i of the aggregator's loop.
    """
    aggregator, params, replies = fusion.aggregator, fusion.params, fusion.replies
    layers = projected_layers(replies)
    how = aggregator.how
    known = how.loop == "released" and how.initial in STARTS
    if not known or how.weights != "uniform" or not layers:
        return None
    local = [local_model(params, reply) for reply in replies]
    trained = [local_model(params, reply) for reply in fusion.sent]
    stages: list[tuple[str, Models]] = [("as trained", trained)]
    if (aligned := _aligned(params, fusion.sent)) is not None:
        stages.append(("aligned by optimal transport", aligned))
    for count in dict.fromkeys(min(n, aggregator.iterations) for n in (1, LATER)):
        words = f"MA-Echo, {count} iteration{'s' if count > 1 else ''}"
        stages.append((words, local_optima(aggregator, replies, local, layers, count)))
    own = [_own_examples(fusion.task, reply.client_id) for reply in replies]
    return FusedNeurons(
        layers[-1],
        len(replies),
        min(MOST_NEURONS, len(local[0][layers[-1]])),
        [_stage(fusion.task, title, layers[-1], models, own) for title, models in stages],
    )


def local_optima(
    aggregator: HarmonizedOptima,
    replies: Sequence[Reply],
    local: Models,
    layers: Sequence[str],
    iterations: int,
) -> list[dict[str, Tensor]]:
    """Return the clients' models with the V_i as these layers, after so many iterations.

    The aggregator has the released loop, and an ``initial`` of STARTS.
    """
    found = [dict(model) for model in local]
    for name in layers:
        start = torch.stack([flattened(name, model) for model in local])
        factors = [reply.payloads[PROJECTIONS][name] for reply in replies]
        projections = torch.stack([factor @ factor.T for factor in factors])
        optima = _iterated(aggregator, start, projections, iterations)
        for model, layer in zip(found, optima, strict=True):
            model |= unflattened(name, layer, model)
    return found


def _iterated(
    aggregator: HarmonizedOptima, local: Tensor, projections: Tensor, count: int
) -> Tensor:
    """Return V_i (N, out, d), from W_i (N, out, d) and P_i (N, d, d)."""
    step = aggregator.how.step
    model = local[0] if aggregator.how.initial == "first" else local.mean(0)
    optima = local
    for _ in range(count):
        model = model - step * ((model - optima) @ projections).mean(0)
        free = (model - optima) - (model - optima) @ projections
        if aggregator.how.normalise:
            free = free / free.norm(dim=2, keepdim=True).clamp_min(1e-12)
        optima = optima + step * free
    return optima


def _aligned(params: Tensors, sent: Sequence[Reply]) -> Models | None:
    """Return the models in the order of the first one's neurons; None if that is not possible."""
    bare = [dataclasses.replace(reply, payloads={}) for reply in sent]
    try:
        return [local_model(params, reply) for reply in NeuronAlignment()(params, bare)]
    except ConfigError:
        return None


def _own_examples(task: Task, client: int) -> Batches:
    data, _ = task.client_data(client)
    kept = list(data.batches(500, generator=None, train=False))
    return Batches(kept[: -(-EXAMPLES // 500)])


def _stage(task: Task, title: str, layer: str, models: Models, own: Sequence[Batches]) -> Stage:
    rows = torch.stack([flattened(layer, model)[:MOST_NEURONS] for model in models]).double()
    network, scores = task.build_model(0), []
    for model, data in zip(models, own, strict=True):
        network.load_state_dict(model, strict=False)
        scores.append(evaluate_model(network, data, task.loss)[1])
    known = [score for score in scores if score is not None]
    return Stage(
        title,
        [[round(x, 2) for x in point] for point in embedded(rows.flatten(0, 1))],
        round(matched(rows), 4),
        round(sum(known) / len(known), 4) if known else None,
    )


def embedded(rows: Tensor) -> list[list[float]]:
    """Return (x, y) of rows (n, d) by t-SNE, the same for the same rows."""
    perplexity = min(30.0, (len(rows) - 1) / 3)
    from sklearn.manifold import TSNE  # takes a second to import

    found = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(rows.numpy())
    return [[float(x), float(y)] for x, y in found]


def matched(rows: Tensor) -> float:
    """Return the share of rows (N, n, d) whose nearest one of the first client has their number."""
    nearest = torch.cdist(rows[1:], rows[:1].expand(len(rows) - 1, -1, -1)).argmin(2)
    return float((nearest == torch.arange(rows.shape[1])).double().mean())
