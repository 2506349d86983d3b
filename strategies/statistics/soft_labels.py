"""Soft labels by class: the statistic of FedDW and FedDistill+, and its two halves.

Liu et al., FedDW, https://arxiv.org/abs/2412.04521, eq. 4 to 7. After local training a client
passes its training examples through its model, in eval mode and without augmentation:

    S_i[c] = sum of softmax(logits) over its examples of class c,   n_i[c] how many there are
    SL[c] <- sum_i S_i[c] / sum_i n_i[c]                                              (eq. 7)

and the server sends SL, the global soft-label matrix (C, C), with the next model. It starts as the
identity (as in the released code; the paper leaves it open). A class that nobody in the round holds
keeps its row. C^2 floats go down and C^2 + C up (the paper counts 2 (C + C^2)).

The released code, as options, off by default: SL <- .5 new + .5 old (``smoothing=0.5``); the
uploads of all rounds are summed (``history=all``); a class without examples gets the identity's row
(``absent=identity``). It computes S_i on augmented images, which is not an option here.

The server learns a client's class counts, and which classes its model mixes up. The mechanism clips
and adds noise: see modes/private/gaussian_mechanism.py. Under noise a count within four standard
deviations of zero is taken as zero; of a row the negative entries are cut off and the rest scaled
to sum 1, and a row without a positive entry counts as nobody's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import softmax

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Share
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import require_output_by_class
from fedhet.strategies.method import MethodPart
from fedhet.strategies.modes.private.gaussian_mechanism import GaussianMechanism, Uploads
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_means import COUNTS, MEANS, SUMS, class_means, class_sums

SOFT_LABELS = "soft_labels"
SOFT_LABEL_SUMS = "soft_label_sums"
HEAD = "head.weight"  # of the classifier, (C, d)
History = Literal["round", "all"]
Absent = Literal["keep", "identity"]
_SURE = 4.0  # standard deviations of noise that a count must exceed


class SoftLabelClient(ClientSide):
    """Sends the sums of the soft labels and the counts of its examples, by class."""

    by_class = True
    sends = frozenset({SOFT_LABEL_SUMS})
    per_example = frozenset({SOFT_LABEL_SUMS})

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self.mechanism = mechanism
        self.private = self.sends if self.mechanism.active else frozenset()
        self.noise_multiplier = self.mechanism.noise_multiplier
        self.reproducible_noise = self.mechanism.reproducible_noise
        self.counts = frozenset() if self.mechanism.active else frozenset({COUNTS})

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier without an output for each class."""
        require_output_by_class(model)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send sums (C, C) and counts (C,)."""
        found = class_sums(
            context, lambda features, logits: self.mechanism.clipped(softmax(logits, dim=1))
        )
        noised = {n: self.mechanism.noised(found[n], context.generator) for n in (SUMS, COUNTS)}
        return {SOFT_LABEL_SUMS: noised}


class SoftLabelServer(ServerSide):
    """Keeps SL, the class-wise mean of everybody's soft labels.

    ``how`` are its options, which say how much noise of the clients to expect, and epsilon, too.
    """

    needs, sends = frozenset({SOFT_LABEL_SUMS}), frozenset({SOFT_LABELS})

    def __init__(self, how: SoftLabels) -> None:
        self.how = how
        self._epsilons: dict[int, float] = {}

    def init(self, params: Tensors) -> None:
        """Start SL at the identity."""
        if HEAD not in params:
            raise ConfigError(
                f"soft labels need the classifier {HEAD!r} at the server, and the shared "
                f"tensors are {sorted(params)}: leave it out of strategy.personal"
            )
        classes = params[HEAD].shape[0]
        if self.how.active:
            self.how.epsilon(1)  # raises now if the accountant is missing
        # one object for all clients of a round: it is serialised once
        self.sent = {MEANS: torch.eye(classes)}
        self.sums, self.counts = torch.zeros(classes, classes), torch.zeros(classes)
        self.summed = 0
        self.uploads = Uploads()

    def broadcast(self, client_id: int) -> Payloads:
        """Send SL (C, C)."""
        return {SOFT_LABELS: self.sent}

    def asked(self, client_id: int) -> None:
        """Count the client as one that has uploaded."""
        self.uploads.add(client_id)

    def expected(self) -> Shapes:
        """Sums (C, C) and counts (C,)."""
        classes = len(self.sent[MEANS])
        return {SOFT_LABEL_SUMS: {SUMS: (classes, classes), COUNTS: (classes,)}}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """Eq. 7, with the options above."""
        sums, counts = (total.payloads[SOFT_LABEL_SUMS][name] for name in (SUMS, COUNTS))
        summed = len(total.replies)
        if self.how.history == "all":
            sums, counts, summed = self.sums + sums, self.counts + counts, self.summed + summed
            self.sums, self.counts, self.summed = sums, counts, summed
        old = self.sent[MEANS]
        otherwise = old if self.how.absent == "keep" else torch.eye(len(old))
        least = _SURE * self.how.noise * math.sqrt(summed)
        new = class_means(sums, counts, otherwise, least)
        if self.how.active:
            positive = new.clamp_min(0.0)
            totals = positive.sum(1, keepdim=True)
            new = torch.where(totals > 0, positive / totals, otherwise)
        smoothing = self.how.smoothing
        self.sent = {MEANS: (1 - smoothing) * new + smoothing * old}

    def metrics(self) -> Mapping[str, float]:
        """Return epsilon for the client that has uploaded most often, where there is noise."""
        if not self.how.active:
            return {}
        most = self.uploads.most
        if most not in self._epsilons:
            self._epsilons[most] = self.how.epsilon(most)
        return {"soft-label-epsilon": self._epsilons[most]}

    def state_dict(self) -> Payloads:
        """Return SL, what is averaged over rounds, and the uploads by client."""
        return {
            SOFT_LABELS: dict(self.sent),
            "history": {SUMS: self.sums, COUNTS: self.counts, "summed": torch.tensor(self.summed)},
            "uploads": self.uploads.tensors(),
        }

    def load_state_dict(self, state: Payloads) -> None:
        """Restore them."""
        self.sent = dict(state[SOFT_LABELS])
        history = state["history"]
        self.sums, self.counts = history[SUMS], history[COUNTS]
        self.summed = int(history["summed"])
        self.uploads = Uploads.of(state["uploads"])


class SoftLabels(MethodPart, GaussianMechanism):
    """Everybody's mean soft label by class; methods that are combined share one."""

    name = "soft_labels"

    smoothing: Share = 0.0
    """weight of the old matrix; the released code has .5"""
    history: History = "round"
    """which uploads are averaged: round | all (the released code)"""
    absent: Absent = "keep"
    """the row of a class that nobody held: keep | identity (the released code)"""

    def parts(self) -> Parts:
        """Add the two halves."""
        return Parts(
            client_sides={"soft_labels": SoftLabelClient(self)},
            server_sides={"soft_labels": SoftLabelServer(self)},
        )
