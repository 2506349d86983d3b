"""The recipe matrix: each recipe runs once, and every test here reads that run.

A new method adds one line to RECIPES. The first line of each method is also resumed; a variant of
its options runs once, and a composition also in reversed order.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import Tensor

from fedhet.common.results import read_rows, rows_sha256, write_rows
from fedhet.conf.build import strategy_parts
from fedhet.conf.catalogue import methods
from fedhet.load_run import recipe_of, task_of
from fedhet.server_app.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.round.registration import CANNOT_TRAIN, FROZEN_MODEL, NAME
from fedhet.strategies.wire.records import CLIENT, METRICS, UPDATE
from fedhet.strategies.wire.tensor_files import below
from fedhet.tasks.evaluation import evaluate_model
from tests.adapted import LORA
from tests.recipes import TINY, newest_checkpoint, run_recipe
from tests.refused import refused
from tests.test_what_leaves import MESSAGES, NUMBERS, PAYLOADS

SIZES = {"epochs": 2, "steps": 2, "images": 16, "width": 4}
SHORT_DENSE = [f"strategy.dense.{key}={value}" for key, value in SIZES.items()]
NOISY_LABELS = [  # repeatable, so that a resumed run can be compared
    "strategy.soft_labels.noise_multiplier=2.0",
    "strategy.soft_labels.reproducible_noise=true",
]
COMPRESSED = ["strategy/compression=top_k", "strategy.compression.up.share=0.05"]
# recipe words, and the bytes they send for every byte of the model, down and up together
RECIPES = [
    (["strategy=fedavg"], 2.0),
    (["strategy=fedavg", "strategy/aggregator=uniform_mean"], 2.0),
    (["strategy=fedavg", "strategy/sampler=bernoulli", "participation=0.7"], 2.0),
    (["strategy=fedavg", "local.optimizer=adam", "local.lr=0.003"], 2.0),
    (["strategy=fedprox"], 2.0),
    (["strategy=scaffold"], 4.0),
    (["strategy=scaffold", "strategy.scaffold.option=I"], 4.0),
    (["strategy=fedpvr", "strategy.fedpvr.layers=last:2"], None),
    (["strategy=fedpvr", "strategy.fedpvr.layers=none"], 2.0),
    (["strategy=fedavgm"], 2.0),
    (["strategy=fedadagrad"], 2.0),
    (["strategy=fedadam"], 2.0),
    (["strategy=fedyogi"], 2.0),
    (["strategy=[fedprox,fedavgm]"], 2.0),
    (["strategy=[fedprox,scaffold]"], 4.0),
    (["strategy=[fedpvr,fedadam]"], None),
    (["strategy=fedavg", "strategy/aggregator=norm_mean"], 2.0),
    (["strategy=fedcm"], 3.0),
    (["strategy=fedcm", "strategy/aggregator=norm_mean"], 3.0),
    (["strategy=fedsam"], 2.0),
    (["strategy=mofedsam"], 3.0),
    (["strategy=fedinit"], 2.0),
    (["strategy=fedlesam"], 2.0),
    (["strategy=fedgamma"], 4.0),
    (["strategy=fedspeed"], 2.0),
    (["strategy=fedsmoo"], 4.0),
    (["strategy=fedmrur"], 3.0),
    (["strategy=fedmrur", "strategy.fedmrur.space=euclidean"], 3.0),
    (["strategy=fedmrur", "strategy.fedmrur.lifts=data"], 3.0),
    (["strategy=fednova"], None),
    (["strategy=fedbuff", "strategy.asynchronous.buffer=2"], 2.0),
    (["strategy=fedasync"], 2.0),
    (["strategy=fedexp"], 2.0),
    (["strategy=fedexp", "strategy/output=last_two"], 2.0),
    (["strategy=feddyn"], 2.0),
    (["strategy=feddyn", "strategy/output=latest"], 2.0),
    (["strategy=[fedcm,fedprox]"], 3.0),
    (["strategy=[scaffold,fedexp]"], 4.0),
    (["strategy=[feddyn,fedprox]"], 2.0),
    (["strategy=[feddw,fedmrur]"], None),
    (["strategy=maecho"], None),
    (["strategy=maecho", "strategy.maecho.loop=algorithm1"], None),
    (["strategy=maecho", "strategy.maecho.loop=equation11", "local.initial=own"], None),
    (["strategy=maecho", "strategy.projections.form=ridge"], None),
    (["strategy=maecho", "strategy.maecho.weights=program", "strategy.projections.rank=5"], None),
    (["strategy=[fedprox,maecho]"], None),
    (["strategy=[feddw,maecho]"], None),
    (["strategy=[maecho,alignment]", "local.initial=own"], None),
    (["strategy=alignment"], 2.0),
    (["strategy=average"], None),
    (["strategy=otfusion"], None),
    (["strategy=pfnm"], None),
    (["strategy=fedma"], None),
    (["strategy=regmean"], None),
    (["strategy=task_arithmetic"], 2.0),
    (["strategy=ties"], 2.0),
    (["strategy=fisher_merging"], 3.0),
    (["strategy=feddw"], None),
    (["strategy=feddw", "strategy.feddw.linearised_every=5"], None),
    (["strategy=feddw", *NOISY_LABELS], None),
    (["strategy=feddistill"], None),
    (["strategy=fedntd"], 2.0),
    (["strategy=fedlc"], 2.0),
    (["strategy=logit_adjustment"], 2.0),
    (["strategy=feddecorr"], 2.0),
    (["strategy=ccvr"], None),
    (["strategy=afl"], None),
    (["strategy=moon"], 2.0),
    (["strategy=feduv"], 2.0),
    (["strategy=fedbabu"], 2.0),
    (["strategy=fedper", "partition=iid"], 2.0),
    (["strategy=fedrep", "partition=iid"], 2.0),
    (["strategy=lg_fedavg", "partition=iid"], 2.0),
    (["strategy=fedbn", "task.model=bn_cnn", "partition=feature_shift"], None),
    (["strategy=ffa_lora", *LORA], 2.0),
    (["strategy=fedsa_lora", *LORA, "partition=iid"], 2.0),
    (["strategy=flora", *LORA], None),
    (["strategy=flora", *LORA, "strategy.flora.ranks=[4,2,1]"], None),
    (["strategy=fedex_lora", *LORA], None),
    (["strategy=ditto", "partition=iid"], 2.0),
    (["strategy=apfl", "partition=iid"], 2.0),
    (["strategy=pfedme", "partition=iid"], 2.0),
    (["strategy=fedrod", "partition=iid"], 2.0),
    (["strategy=fedala"], 2.0),
    (["strategy=fedala", "strategy.fedala.until_std=0.1"], 2.0),
    (["strategy=fedproto", "partition=iid"], None),
    (["strategy=fedamp", "task.model=bn_cnn", "partition=iid"], None),
    (["strategy=dbe", "partition=iid"], None),
    (["strategy=fedas", "partition=iid"], None),
    (["strategy=ifca", "partition=iid"], None),
    (["strategy=ifca", "partition=iid", "strategy.ifca.layers=head.*"], None),
    (["strategy=per_fedavg"], 2.0),
    (["strategy=per_fedavg", "strategy.per_fedavg.order=hessian_free", "local.epochs=3"], 2.0),
    (["strategy=per_fedavg", "strategy.per_fedavg.same_batch=true"], 2.0),
    (["strategy=local", "partition=iid"], 0.0),
    (["strategy=centralised", "clients=1"], 2.0),
    (["strategy=ensemble"], None),
    (["strategy=ensemble", "strategy.ensemble.masked=false"], None),
    (["strategy=dense", *SHORT_DENSE], 2.0),
    (["strategy=dense", *SHORT_DENSE, "strategy.dense.masked_teacher=true"], None),
    (["strategy=[feddw,moon]"], None),
    (["strategy=[feddw,feduv]"], None),
    (["strategy=[feddw,fedprox]"], None),
    (["strategy=[feddistill,feddw]"], None),
    (["strategy=[fedbabu,scaffold]"], 4.0),
    (["strategy=scaffold", *COMPRESSED, "strategy.compression.down=bfloat16"], None),
    (
        ["strategy=[feddw,fedpvr]", "strategy/compression=int4", "strategy.compression.down=int8"],
        None,
    ),
    (["strategy=maecho", "strategy/compression=int8"], None),
]
WORDS = [words for words, _ in RECIPES]
ALONE = {words[0]: words for words in reversed(WORDS) if "[" not in words[0]}
METHODS = [words for words in WORDS if words in ALONE.values()]  # the first line of each
SOMETIMES = {FROZEN_MODEL, CANNOT_TRAIN, NAME}  # in the roll call
EXAMPLES = 1437  # all training examples of digits
ROUNDS, CUT = 3, 2  # the copy that is resumed was made in the round after CUT
WHOLE = [*TINY, "task.train_size=null"]
SECURE = [
    "rounds=1",
    "strategy/secure_aggregation=secagg_plus",
    f"strategy.secure_aggregation.max_examples={EXAMPLES}",
]
# Secure aggregation, once for each thing that a part declares: what is equal to the plain round ...
SUMMED = [
    "strategy=fedavg",  # weighs by examples
    "strategy=fedavg strategy/aggregator=uniform_mean",  # by clients
    "strategy=fedavg strategy/sampler=bernoulli participation=0.7",
    "strategy=scaffold",  # a payload that is summed
    "strategy=fedpvr strategy.fedpvr.layers=last:2",  # of some tensors
    "strategy=fedyogi",  # a server optimizer that divides by the update
    "strategy=fedcm",  # a payload down alone
    "strategy=feddyn",  # a sum over rounds, and an output of its own
    "strategy=[feddw,fedprox]",  # sums over examples
    "strategy=fedrep partition=iid",  # tensors that stay, and their scores
]
REFUSED = {  # ... and what is refused, with what the error names
    "strategy=scaffold strategy/compression=top_k": "strategy/compression=none",
    "strategy=fedavg strategy/aggregator=norm_mean": "NormMean",
    "strategy=fedexp": "ExtrapolatedMean",
    "strategy=fednova": "NormalizedMean",
    "strategy=fedbuff": "strategy/secure_aggregation",
    "strategy=average": "class_counts",
    "strategy=maecho": "projections",
    "strategy=alignment": "strategy.transforms",
    "strategy=pfnm": "NeuralMatching",
    "strategy=ensemble": "AllClients",
    "strategy=fedproto": "prototype_sums",
    "strategy=centralised": "clients=1",
    "strategy=fedamp": "own_model",
}
# what they store is not the task's
OWN_NETWORK = ("pfnm", "fedma", "ensemble", "fedbabu", "ffa_lora")


def name_of(words: list[str]) -> str:
    return " ".join(words)


@dataclass
class Run:
    """A recipe's run of ROUNDS rounds, with two looks at it while it went on.

    Attributes:
        words: of the recipe.
        folder: the results directory.
        first: the checkpoint after round 1, by tensor.
        replies: by message, the names of its records and of its numbers.
    """

    words: list[str]
    folder: Path
    first: dict[str, Tensor] = field(default_factory=dict)
    replies: list[tuple[set[str], set[str]]] = field(default_factory=list)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return run_recipe(self.folder, *WHOLE, f"rounds={ROUNDS}", *self.words, tamper=self._watch)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl")

    @cached_property
    def recipe(self) -> DictConfig:
        return recipe_of(self.folder)  # to compose it takes longer than a round

    @property
    def cut(self) -> Path:
        """The results directory as a process leaves it that is killed in round CUT + 1."""
        return self.folder.with_name("cut")

    def again(self, name: str, *words: str) -> dict[str, Any]:
        """Run it into another folder with more words."""
        return run_recipe(self.folder.with_name(name), *WHOLE, *words)

    def _watch(self, reply: Message) -> Message:
        names = set(reply.content)
        self.replies.append((names, set(reply.content[METRICS if METRICS in names else CLIENT])))
        if found := newest_checkpoint(self.folder):
            done = int(found.stem.removeprefix("round-"))
            if done == 1:
                self.first = load_file(found)
            if done == CUT and not self.cut.exists():
                shutil.copytree(self.folder, self.cut)
        return reply


def test_every_secure_recipe_is_in_the_matrix():
    assert set(SUMMED) <= set(map(name_of, WORDS))
    assert set(map(refused_as, WORDS)) == {None, *REFUSED}


def test_every_method_is_in_the_matrix():
    assert {word.removeprefix("strategy=") for word in ALONE} == methods().keys()


def param(words: list[str]) -> Any:
    group = pytest.mark.xdist_group(name_of(words))  # so that workers share the matrix
    marks = [group] if words == ["strategy=scaffold"] else [group, pytest.mark.slow]
    return pytest.param(words, id=name_of(words), marks=marks)


@pytest.fixture(
    scope="module",
    params=map(param, WORDS),
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("matrix")
    made = Run(request.param, folder / "whole")
    assert made.summary["status"] == "completed"
    yield made
    shutil.rmtree(folder)


@pytest.mark.slow
def test_every_round_succeeds_and_the_loss_falls(run):
    """Every message builds its client anew, so what a method keeps must be in its state."""
    methods = run.words[0].removeprefix("strategy=").strip("[]").split(",")
    assert run.summary["strategy"] == "+".join(sorted(methods))
    assert run.summary["failures"] == 0
    assert run.rows[-1]["loss"] < 0.97 * run.rows[0]["loss"]


@pytest.mark.slow
def test_it_sends_the_stated_multiple_of_the_model(run):
    (ratio,) = (ratio for words, ratio in RECIPES if words == run.words)
    if ratio is None:
        pytest.skip("what it sends is no multiple of the model")
    stored = load_file(run.folder / "model.safetensors")
    model = sum(128 + value.numel() * 4 for value in stored.values())  # each array has a header
    sent = sum(len(row["clients"]) for row in run.rows[1:])
    assert run.summary["bytes_up"] + run.summary["bytes_down"] == ratio * model * sent


@pytest.mark.slow
def test_resumed_after_a_kill_it_equals_the_uninterrupted_run(run):
    """The time goes on, too: the killed process is said to have worked for an hour."""
    if run.words not in METHODS:
        pytest.skip("a variant or a composition")
    path = run.cut / "metrics.jsonl"
    rows = [row | {"elapsed_seconds": 3600.0} for row in read_rows(path)]
    write_rows(path, rows)
    last = checkpoints(run.cut / "checkpoints")[-1]
    names = below("params/", load_file(last))
    checkpoint = load_checkpoint(last, list(names))
    save_checkpoint(last.parent, replace(checkpoint, rows=rows_sha256(rows)))
    resumed = run.again("cut", f"rounds={ROUNDS}", *run.words, "resume=true")
    for key in ("parameters_sha256", "accuracy", "loss", "bytes_up", "bytes_down"):
        assert resumed.get(key) == run.summary.get(key), key
    times = [row["elapsed_seconds"] for row in read_rows(path)]
    assert times[: CUT + 1] == [3600.0] * (CUT + 1)
    assert 3600.0 < times[CUT + 1] < 3660.0


def test_the_stored_model_is_the_evaluated_one(run):
    """Loaded into a fresh network it gives the summary's figures."""
    if run.recipe.evaluation.model == "clients" or any(
        word in run.words[0] for word in OWN_NETWORK
    ):
        pytest.skip("no single model of the task's is evaluated")
    task = task_of(run.recipe)
    adapted = set(LORA) <= set(run.words)  # what LoRA leaves as it is comes from the run's seed
    model = task.build_model(run.recipe.seed if adapted else 5)
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    loss, accuracy = evaluate_model(model, task.test_data(torch.device("cpu")), task.loss)
    assert loss == pytest.approx(run.summary["loss"], rel=1e-5)
    assert accuracy == pytest.approx(run.summary["accuracy"], abs=1e-6)


def test_replies_hold_what_the_page_lists(run):
    """docs/what-leaves.md; evaluation rides along, so there is no second exchange."""
    registration, *_ = MESSAGES.values()
    sides = strategy_parts(run.recipe, 1).client_sides.values()
    payloads, trained = {name for side in sides for name in side.sends}, 0
    for names, numbers in run.replies:
        if CLIENT in names:
            assert names == {CLIENT}
            assert set(registration) - SOMETIMES <= numbers <= set(registration)
        else:
            trained += 1
            assert names - {UPDATE, METRICS} == payloads <= PAYLOADS.keys()
            assert numbers <= NUMBERS
    assert trained == sum(len(row["clients"]) for row in run.rows[1:])
    if run.words in METHODS:  # no option adds or drops a payload
        (method,) = run.recipe.strategy.methods
        assert payloads == {name for name, methods in PAYLOADS.items() if method in methods}


def test_none_of_its_parts_looks_for_a_gpu_when_it_is_made(run, monkeypatch):
    """They are made before runtime=local forks its workers, which could not use one after that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked for a GPU"))
    strategy_parts(run.recipe, 1)


def test_the_order_of_methods_does_not_matter(run):
    """One round: the same tensors, and the same state, to the last bit."""
    method, *options = run.words
    names = method.removeprefix("strategy=").strip("[]").split(",")
    if names == ["mofedsam"]:
        names = ["fedcm", "fedsam"]
    if len(names) == 1:
        pytest.skip("one method")
    words = ["rounds=1", f"strategy=[{','.join(reversed(names))}]", *options]
    run.again("reversed", *words)
    found = load_file(checkpoints(run.folder.with_name("reversed") / "checkpoints")[-1])
    torch.testing.assert_close(found, run.first, rtol=0, atol=0)


def refused_as(words: list[str]) -> str | None:
    """Return the text in REFUSED that this recipe is the first to start with."""
    for text in REFUSED:
        if words == next(one for one in WORDS if f"{name_of(one)} ".startswith(f"{text} ")):
            return text
    return None


@pytest.mark.slow
def test_what_reads_single_replies_refuses_secure_aggregation(run):
    if (name := refused_as(run.words)) is None:
        pytest.skip("another recipe declares the same")
    with refused(REFUSED[name]):
        run.again("secure", *run.words, *SECURE)


@pytest.mark.slow
def test_a_secure_round_equals_the_plain_one(run):
    """Equal up to quantisation."""
    if name_of(run.words) not in SUMMED:
        pytest.skip("another recipe declares the same")
    text, plain, expected = name_of(run.words), run.first, run.rows[1]
    words = [word for word in run.words if word != "participation=0.7"]  # three are needed
    if words != run.words:
        run.again("plain", *words, "rounds=1")
        folder = run.folder.with_name("plain")
        plain = load_file(checkpoints(folder / "checkpoints")[-1])
        expected = read_rows(folder / "metrics.jsonl")[1]
    summary = run.again("secure", *words, *SECURE)
    assert (summary["status"], summary["failures"]) == ("completed", 0)
    folder = run.folder.with_name("secure")
    summed = load_file(checkpoints(folder / "checkpoints")[-1])
    row = read_rows(folder / "metrics.jsonl")[-1]
    # of x a step over the mean weight; adaptive server optimisers divide by tau and multiply by lr
    step = SecAggPlus().step(3) * 3
    gain = 40.0 if any(word in words[0] for word in ("adagrad", "adam", "yogi")) else 2.0
    jumps = int("yogi" in text)  # where Delta^2 is v up to quantisation, sign(v - Delta^2) flips
    assert summed.keys() == plain.keys()
    for name, value in plain.items():
        # of what is kept beside: sums over step sizes of .4, and means of soft labels by class
        atol = gain * step if name.startswith("params/") else 2e-4
        wrong = ~torch.isclose(summed[name], value, rtol=1e-5, atol=atol)
        assert int(wrong.sum()) <= jumps, name
    for metric in ("train_loss", "received_loss", "received_accuracy", "num_examples"):
        assert row.get(metric) == pytest.approx(expected.get(metric), abs=1e-4), metric
    if "personal_accuracy" in expected:
        assert row["personal_accuracy"] == pytest.approx(expected["personal_accuracy"], abs=1e-4)
    assert "norm_ratio" not in row
