"""One line per recipe, and every recipe must pass every test here. A new method adds its line."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from common.results import read_rows
from conf import compose
from tests.recipes import TINY, overrides, run_recipe

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
    (["strategy=fedmrur"], 3.0),
    (["strategy=fedmrur", "strategy.fedmrur.space=euclidean"], 3.0),
    (["strategy=fedmrur", "strategy.fedmrur.lifts=data"], 3.0),
    (["strategy=fednova"], None),
    (["strategy=fedexp"], 2.0),
    (["strategy=fedexp", "strategy/output=last_two"], 2.0),
    (["strategy=feddyn"], 2.0),
    (["strategy=feddyn", "strategy/output=latest"], 2.0),
    (["strategy=[fedcm,fedprox]"], 3.0),
    (["strategy=[scaffold,fedexp]"], 4.0),
    (["strategy=[feddyn,fedprox]"], 2.0),
    (["strategy=[feddw,fedmrur]"], None),
    (["strategy=maecho"], None),
    (["strategy=maecho", "strategy/aggregator=maecho_algorithm1"], None),
    (["strategy=maecho", "strategy/aggregator=maecho_eq11", "local.initial=own"], None),
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
    (["strategy=feddw"], None),
    (["strategy=feddw", "strategy.feddw.linearised_every=5"], None),
    (["strategy=feddw", "strategy.soft_labels.noise_multiplier=2.0"], None),
    (["strategy=feddistill"], None),
    (["strategy=moon"], 2.0),
    (["strategy=feduv"], 2.0),
    (["strategy=fedbabu"], 2.0),
    (["strategy=fedper", "partition=iid"], 2.0),
    (["strategy=fedrep", "partition=iid"], 2.0),
    (["strategy=fedala"], 2.0),
    (["strategy=fedala", "strategy.fedala.until_std=0.1"], 2.0),
    (["strategy=fedproto", "partition=iid"], None),
    (["strategy=per_fedavg"], 2.0),
    (["strategy=per_fedavg", "strategy.per_fedavg.order=hessian_free", "local.epochs=3"], 2.0),
    (["strategy=per_fedavg", "strategy.per_fedavg.same_batch=true"], 2.0),
    (["strategy=local", "partition=iid"], 0.0),
    (["strategy=centralised", "clients=1"], 2.0),
    (["strategy=ensemble"], None),
    (["strategy=ensemble", "strategy.ensemble.masked=false"], None),
    (
        [
            "strategy=dense",
            "strategy.dense.epochs=2",
            "strategy.dense.steps=2",
            "strategy.dense.images=16",
            "strategy.dense.width=4",
        ],
        2.0,
    ),
    (
        [
            "strategy=dense",
            "strategy.dense.epochs=2",
            "strategy.dense.steps=2",
            "strategy.dense.images=16",
            "strategy.dense.width=4",
            "strategy.dense.masked_teacher=true",
        ],
        None,
    ),
    (["strategy=[feddw,moon]"], None),
    (["strategy=[feddw,feduv]"], None),
    (["strategy=[feddw,fedprox]"], None),
    (["strategy=[feddistill,feddw]"], None),
    (["strategy=[fedbabu,scaffold]"], 4.0),
]
WORDS = [words for words, _ in RECIPES]
ALONE = {words[0]: words for words in reversed(WORDS) if "[" not in words[0]}
QUICK = ("fedavg", "scaffold", "fedpvr", "feddw", "fedmrur", "maecho")
METHODS = [words for words in WORDS if words in ALONE.values()]  # the first line of each


def name_of(words: list[str]) -> str:
    return " ".join(words)


def cases(*columns: list) -> list:
    """Return the matrix's lines; `make check` runs those of QUICK, `-m "not flower"` METHODS."""
    return [
        pytest.param(*row, id=name_of(row[0]), marks=_mark(row[0]))
        for row in zip(*columns, strict=True)
    ]


def _mark(words: list[str]) -> list[pytest.MarkDecorator]:
    if words not in METHODS:
        return [pytest.mark.flower]
    return [] if words[0].removeprefix("strategy=") in QUICK else [pytest.mark.slow]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "traffic"), cases(WORDS, [row[1] for row in RECIPES]))
def test_the_loss_falls_and_the_traffic_is_as_said(words, traffic, tmp_path):
    """Every message builds its client anew, so what a method keeps must be in its state."""
    all_data = "task.train_size=null"  # of steps enough
    seldom = "evaluation.every=4"
    summary = run_recipe(tmp_path / "run", *TINY, all_data, seldom, "rounds=4", *words)
    methods = words[0].removeprefix("strategy=").strip("[]").split(",")
    assert summary["strategy"] == "+".join(sorted(methods))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert summary["status"] == "completed"
    assert summary["failures"] == 0
    assert rows[-1]["loss"] < 0.97 * rows[0]["loss"]
    stored = load_file(tmp_path / "run" / "model.safetensors")
    model = sum(128 + value.numel() * 4 for value in stored.values())  # each array has a header
    sent = sum(len(row["clients"]) for row in rows[1:])
    if traffic is not None:
        assert summary["bytes_up"] + summary["bytes_down"] == traffic * model * sent


@pytest.mark.flower  # two more runs of every recipe
@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_a_resumed_run_equals_an_uninterrupted_one(words, tmp_path):
    whole = run_recipe(tmp_path / "whole", *TINY, "rounds=2", "evaluation.every=0", *words)
    run_recipe(tmp_path / "cut", *TINY, "rounds=1", "evaluation.every=0", *words)
    resumed = run_recipe(
        tmp_path / "cut", *TINY, "rounds=2", "evaluation.every=0", *words, "resume=true"
    )
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    assert resumed["accuracy"] == whole["accuracy"]  # where nothing is shared, all there is
    assert resumed["bytes_up"] == whole["bytes_up"]


def test_the_time_of_a_resumed_run_goes_on(tmp_path):
    """An hour that the killed process has worked, and the next process does not know of."""
    run_recipe(tmp_path / "run", *TINY, "rounds=1")
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [json.loads(line) | {"elapsed_seconds": 3600.0} for line in path.open(encoding="utf-8")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_recipe(tmp_path / "run", *TINY, "rounds=2", "resume=true")
    times = [json.loads(line)["elapsed_seconds"] for line in path.open(encoding="utf-8")]
    assert times[:2] == [3600.0, 3600.0]
    assert 3600.0 < times[2] < 3660.0


@pytest.mark.flower  # two runs each
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("[fedprox,scaffold]", "[scaffold,fedprox]"),
        ("[moon,feddw]", "[feddw,moon]"),
        ("[feduv,feddw]", "[feddw,feduv]"),
        ("[fedprox,feddw]", "[feddw,fedprox]"),
        ("[feddistill,feddw]", "[feddw,feddistill]"),
        ("[fedmrur,feddw]", "[feddw,fedmrur]"),
        ("[fedcm,fedsam]", "mofedsam"),
    ],
)
def test_the_order_of_methods_does_not_matter(left, right, tmp_path):
    hashes = {
        run_recipe(tmp_path / str(i), *TINY, f"strategy={names}")["parameters_sha256"]
        for i, names in enumerate((left, right))
    }
    assert len(hashes) == 1


def test_seeds_differ(tmp_path):
    hashes = {
        run_recipe(tmp_path / str(seed), *TINY, f"seed={seed}")["parameters_sha256"]
        for seed in (0, 1)
    }
    assert len(hashes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], ["strategy=fedexp", "strategy/output=last_two"], ["strategy=feddyn"]],
    ids=["latest", "last_two", "participants"],
)
def test_the_stored_model_is_the_one_that_was_evaluated(words, tmp_path):
    """Loaded into a fresh network, model.safetensors gives the summary's loss and accuracy."""
    from conf import plain_part
    from tasks import build_task
    from tasks.evaluation import evaluate_model

    summary = run_recipe(tmp_path / "run", *TINY, *words)
    recipe = compose(overrides(*TINY, *words))
    task = build_task(
        plain_part(recipe, "task"), plain_part(recipe, "partition"), seed=0, num_clients=3
    )
    model = task.build_model(5)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    loss, accuracy = evaluate_model(model, task.test_data(torch.device("cpu")), task.loss)
    assert loss == pytest.approx(summary["loss"], rel=1e-5)
    assert accuracy == pytest.approx(summary["accuracy"], abs=1e-6)


@pytest.mark.flower  # a model of the papers
@pytest.mark.parametrize(
    ("strategy", "ratio"), [("fedavg", 2.0), ("fedpvr", 2.02), ("scaffold", 4.0)]
)
def test_resnet8_sends_what_the_paper_says(strategy, ratio, tmp_path):
    """FedPVR, Table 3: 2.02 x the model up and down on ResNet-8 (the classifier has 2 tensors)."""
    words = ["task.model=resnet8", "task.image_size=32", "local.epochs=null", "local.steps=1"]
    summary = run_recipe(
        tmp_path / "run", *TINY, *words, f"strategy={strategy}", "rounds=1", "task.test_size=20"
    )
    stored = load_file(tmp_path / "run" / "model.safetensors")
    model = sum(128 + value.numel() * 4 for value in stored.values())
    assert (summary["bytes_up"] + summary["bytes_down"]) / 3 / model == pytest.approx(
        ratio, abs=0.005
    )
