"""What bad input gets: an error before round 1 that names value, allowed values and key."""

import json
import logging
import shutil

import pytest
from hydra.errors import HydraException

from conf import compose
from server_app.app import results_folder
from tests.recipes import TINY, overrides, run_recipe

BEFORE_ROUND_1 = [
    (["rounds=0"], r"rounds=0 .* at least 1"),
    (["participation=0"], r"participation=0"),
    (["participation=1.5"], r"participation=1\.5 .* 1\.0\]"),
    (["target_accuracy=93"], r"target_accuracy=93 .* 1\.0\]"),
    (["target_accuracy=0.9", "evaluation.every=0"], r"evaluation\.every"),
    (["local.lr=0"], r"local\.lr=0"),
    (["local.epochs=null"], r"local\.epochs=None and local\.steps=None"),
    (["local.steps=5"], r"give exactly one"),
    (["local.batch_size=0"], r"local\.batch_size=0"),
    (["local.clip=0"], r"local\.clip=0"),
    (["local.optimizer=sgdd"], r"local\.optimizer='sgdd' is unknown; allowed: adam, sgd"),
    (["local.optimizer=adam", "local.momentum=0.9"], r"local\.momentum=0\.9"),
    (["server.lr=0"], r"server\.lr=0"),
    (["schedule=exponential", "schedule.decay=2"], r"schedule\.decay=2"),
    (["schedule=multi_step", "schedule.milestones=[30]"], r"schedule\.milestones=\[30\]"),
    (["strategy=fedprox", "strategy.fedprox.mu=-1"], r"fedprox\.mu=-1"),
    (["strategy=scaffold", "local.momentum=0.9"], r"local\.momentum=0"),
    (["strategy=scaffold", "local.optimizer=adam"], r"local\.optimizer=sgd"),
    (["strategy=per_fedavg", "local.optimizer=adam"], r"needs local\.optimizer=per_fedavg"),
    (
        ["strategy=fedmrur", "local.optimizer=sgd"],
        r"local\.optimizer=sgd.*needs local\.optimizer=sam",
    ),
    (["strategy=scaffold", "strategy.scaffold.option=III"], r"strategy\.scaffold\.option='III'"),
    (["strategy=[maecho,aggregator/masked_mean]"], r"strategy/aggregator=OTHER replaces it"),
    (
        ["strategy=fedpvr", "strategy.fedpvr.layers=fc9*"],
        r"none of .*head\.weight.*strategy\.fedpvr\.layers",
    ),
    (["strategy=fedpvr", "strategy.fedpvr.layers=last:99"], r"last:99"),
    (["strategy=[fedpvr,scaffold]"], r"control_variate"),
    (["strategy=[fedadam,fedyogi]"], r"both replace the server_optimizer"),
    (["min_replies=0"], r"min_replies=0"),
    (["min_replies=4"], r"min_replies=4, but of the 3 clients at most 3 .*to 3 or less"),
    (["min_replies=3", "participation=0.5"], r"min_replies=3.*at most 2 take part"),
    (["rounds=2.5"], r"rounds=2\.5 .*whole number"),
    (["local.lr=abc"], r"local\.lr=abc .*must be a number"),
    (["evaluation.every=0.5"], r"evaluation\.every=0\.5 .*whole number"),
    (["local.drop_last=On"], r"local\.drop_last=On .*write local\.drop_last=true"),
    (["task.test_size=abc"], r"task\.test_size='abc' must be a whole number or null"),
    (["partition.balance=maybe"], r"partition\.balance='maybe' must be true or false"),
    (["device=foo"], r"device=foo is unknown; allowed: auto, cpu"),
    (["calibration.alphas=[0.1,2]"], r"calibration\.alphas=\[0\.1, 2\] .*\(0, 1\)"),
    (["partition=pathological", "partition.classes=1.5"], r"partition\.classes=1\.5 .*whole"),
    (["strategy/aggregator=maecho"], r"strategy\.aggregator refers to keys .*strategy=fedavg"),
    (["strategy=[fedpvr,fedper]"], r"corrects \['head\.weight'\].*strategy\.personal"),
    (["strategy=[fedala,fedper]"], r"strategy\.fedala\.layers='head\.\*' selects none of"),
    (["strategy=fedcm", "local.initial=own"], r"needs local\.initial=received"),
    (["task.model=mpl"], r"task\.model.*mlp"),
    (["partition.alpha=0"], r"partition\.alpha=0"),
    (["clients=4"], r"clients=4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), BEFORE_ROUND_1, ids=lambda v: str(v)[:60])
def test_refused_before_round_1_with_the_key(words, message, tmp_path):
    with pytest.raises((ValueError, TimeoutError), match=message):
        run_recipe(tmp_path / "run", *TINY, "runtime.connect_timeout_seconds=0.1", *words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("strategy=fedprx", "fedprox"),
        ("task=minst", "mnist"),
        ("partition=dirichet", "feddf_dirichlet"),
        ("schedule=step", "multi_step"),
        ("local.lrr=0.1", r"\+local\.lrr"),
        ("round=3", r"\+round=3"),
    ],
)
def test_unknown_names_list_what_there_is(word, message):
    with pytest.raises(HydraException, match=message):
        compose(overrides(word))


def test_a_relative_results_dir_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be absolute"):
        results_folder(compose(overrides("results_dir=results/x")))


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="flwr")
    folder = tmp_path / "run"
    whole = run_recipe(tmp_path / "whole", *TINY)

    def kill(reply):  # in round 1: the row of round 0 is there
        if folder.exists() and (folder / "metrics.jsonl").read_text():
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run_recipe(folder, *TINY, tamper=kill)
    (folder / "summary.json").unlink()  # SIGKILL leaves none
    with pytest.raises(ValueError, match="set resume=true to continue it"):
        run_recipe(folder, *TINY)
    again = run_recipe(folder, *TINY, "resume=true")
    assert "holds no checkpoint: its run begins again with round 1" in caplog.text
    for key in ("parameters_sha256", "rounds", "accuracy", "bytes_up"):
        assert again[key] == whole[key]
    shutil.rmtree(folder / "checkpoints")  # a completed run does not
    with pytest.raises(ValueError, match="which is completed"):
        run_recipe(folder, *TINY, "resume=true")


@pytest.mark.slow
def test_a_run_is_neither_overwritten_nor_resumed_with_another_recipe(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run_recipe(tmp_path / "run", *TINY, "resume=true")
    first = run_recipe(tmp_path / "run", *TINY)
    for words, message in (
        ([], "resume=true"),
        (["rounds=4", "local.lr=0.3", "resume=true"], "another recipe"),
        (["resume=true"], "rounds=2 are done already"),
    ):
        with pytest.raises(ValueError, match=message):
            run_recipe(tmp_path / "run", *TINY, *words)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == first
