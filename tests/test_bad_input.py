"""What bad input gets: an error before round 1 that names value, allowed values and key."""

import json
import logging
import shutil

import pytest
from flwr.app import Context, RecordDict

from fedhet.common.errors import ConfigError
from fedhet.conf import compose, compose_overrides
from fedhet.conf.relations import without_effect
from fedhet.server_app import app as server
from fedhet.server_app.app import results_folder
from tests.adapted import LORA
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused

SECURE = "strategy.secure_aggregation"
TOGETHER = [
    (["target_accuracy=0.9", "evaluation.every=0"], "evaluation.every"),
    (["local.epochs=null"], "local.epochs=None local.steps=None"),
    (["local.steps=5"], "local.epochs local.steps"),
    (["local.optimizer=adam", "local.momentum=0.9"], "local.momentum=0.9"),
    (["strategy=per_fedavg", "local.optimizer=adam"], "local.optimizer=per_fedavg"),
    (
        ["strategy=per_fedavg", "strategy.per_fedavg.order=hessian_free", "local.autocast=true"],
        "local.autocast=true local.autocast=false",
    ),
    (["strategy=fedmrur", "local.optimizer=sgd"], "local.optimizer=sgd local.optimizer=sam"),
    (["strategy=[fedadam,fedyogi]"], "server_optimizer"),
    (["strategy=[fedlc,fedrod]"], "strategy=[fedlc,fedrod] loss"),
    (["strategy=fedex_lora", "strategy/server_optimizer=adam", *LORA], "server_optimizer=adam"),
    (["strategy=flora", "strategy.flora.ranks=[64,2]", *LORA], "ranks=[64, 2] task.lora.r=4"),
    (["clients=3", "min_replies=4"], "3 clients"),
    (["clients=3", "min_replies=3", "participation=0.5"], "min_replies=3 2"),
    (["clients=3", "runtime.min_clients=4"], "runtime.min_clients=4 clients=3"),
    (["clients=2000"], "clients=2000 1437"),
    (["task=mnist", "clients=60001"], "clients=60001 60000"),
    (["clients=20", "task.train_size=10"], "clients=20 10 task.train_size"),
    (["runtime.client_cpus=4", "runtime.num_cpus=2"], "runtime.num_cpus=2"),
    (["evaluation.per_class=true"], "evaluation.metrics="),
    (
        ["early_stopping.metric=client_accuracy", "early_stopping.patience=3"],
        "client_accuracy evaluation.clients=true",
    ),
    (["objective=client_loss"], "client_loss evaluation.clients=true"),
    (["objective=personal_accuracy"], "personal_accuracy evaluation.model=clients"),
    (["checkpoint.best=client_loss"], "client_loss evaluation.clients=true"),
    (
        ["checkpoint.best=received_loss", "evaluation.received=false"],
        "received_loss evaluation.received=true",
    ),
    (["checkpoint.best=client_f1"], "f1 evaluation.metrics evaluation.clients"),
    (
        ["task=tabular", "task.kind=regression", "early_stopping.metric=mae"],
        "evaluation.metrics received_loss",
    ),
    (["task=tabular", "task.kind=regression", "early_stopping.metric=los"], "received_loss"),
    (["calibration.alphas=[0.1]"], "partition.holdout=0.0 0.1"),
    (["strategy=fedcm", "local.initial=own"], "local.initial=received"),
    (["strategy=fednova", "local.initial=own"], "local.initial=received"),
    (["strategy=fedbabu", "local.initial=own"], "local.initial=received"),
    (["strategy=[dbe,fedasync]"], "strategy=dbe strategy.asynchronous=null"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), TOGETHER, ids=lambda v: str(v)[:60])
def test_values_that_do_not_fit_together_are_refused(words, message, monkeypatch):
    monkeypatch.delenv("FEDHET_DATA", raising=False)
    with refused(*message.split()):
        compose_overrides(tuple(words))


@pytest.mark.parametrize("word", ["strategy=[]", "~strategy"])
def test_a_run_without_a_method_is_refused(word):
    with refused("strategy=[]", "strategy=fedavg"):
        compose_overrides((word,))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["local.optimizers.adam.eps=1e-7"], "local.optimizers.adam.eps local.optimizer=sgd"),
        (["local.optimizer=adam", "local.optimizers.adam.eps=1e-7"], ""),
        (["early_stopping.min_delta=0.1"], "early_stopping.min_delta early_stopping.patience=null"),
        (["early_stopping.mode=min", "checkpoint.best=true"], ""),
        (["calibration.bins=10"], "calibration.bins calibration.alphas=[]"),
        (["local.momentum_layers=last:2", "rounds=3"], "local.momentum_layers local.momentum=0"),
    ],
)
def test_keys_without_effect_are_said(words, named):
    lines = without_effect(words, compose_overrides(tuple(words)))
    assert len(lines) == bool(named)
    assert all(name in "".join(lines) for name in named.split())


UNREADABLE = {  # and how they are written
    "task.path=~/images": "task.path='~/images'",
    "results_dir=größe": "results_dir='größe'",
    "task.target=Größe (cm)": "task.target='Größe (cm)'",
    "task.path=a=b.csv": "task.path='a=b.csv'",
    "task.path=a,b.csv": "task.path='a,b.csv'",
    "task.classes=[größer,kleiner,1]": "task.classes=['größer',kleiner,1]",
}


@pytest.mark.parametrize(("word", "quoted"), UNREADABLE.items())
def test_a_text_that_hydra_cannot_read_is_shown_with_its_quotes(word, quoted):
    task = "task=image_folder" if word.startswith("task.path") else "task=tabular"
    with pytest.raises(ConfigError) as refused:
        compose_overrides((task, word))
    line = str(refused.value)
    assert line.startswith(f"{word} ")
    assert f'"{quoted}"' in line
    assert "Exception" not in line
    compose_overrides((task, quoted))


@pytest.mark.parametrize("word", ["rounds", "--rounds=3", "task = digits", "task.path='x"])
def test_a_word_that_quotes_do_not_mend_is_shown_the_form(word):
    with refused(word, "KEY=VALUE"):
        compose_overrides((word,))


BROKEN_TASKS = {
    "  model: my_project.model:Net": "broken.yaml cannot be read as YAML: line 3, column 8: mapp",
    "model:\tmy_project.model:Net\n\tlora: null": "broken.yaml cannot be read as YAML: line 3, co",
    "name: again": "broken.yaml cannot be read as YAML: line 3, column 1: found duplicate key name",
}


@pytest.mark.parametrize(("line", "message"), BROKEN_TASKS.items())
def test_a_task_file_that_is_no_yaml_is_named_with_the_place(line, message, own_project):
    path = own_project / "my_project" / "conf" / "task" / "broken.yaml"
    path.write_text(f"defaults: [own]\nname: broken\n{line}\n")
    with refused(*message.split()):
        compose_overrides(("task=broken",))


def test_a_task_file_that_is_not_utf_8_is_named_with_the_line(own_project):
    path = own_project / "my_project" / "conf" / "task" / "broken.yaml"
    path.write_bytes("defaults: [own]\nname: café\n".encode("latin-1"))
    with refused("broken.yaml", "UTF-8", "2"):
        compose_overrides(("task=digits",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("strategy/broken.yaml", "strategy=broken"),
        ("strategy/sampler/broken.yaml", "strategy/sampler=broken"),
        ("strategy/sampler/broken.yaml", "strategy.sampler.rho=1"),  # keys are looked up
        ("strategy/broken.yaml", "strategy.broken.mu=1"),
    ],
)
def test_a_file_of_an_option_that_is_no_yaml_is_named(file, word, own_project):
    path = own_project / "my_project" / "conf" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("methods: {broken: []}\n  mu: 1\n")
    with refused("broken.yaml", "2"):
        compose_overrides((word,))


def test_a_key_of_a_projects_method_is_told_with_the_method(own_project):
    path = own_project / "my_project" / "conf" / "strategy" / "gentle.yaml"
    path.parent.mkdir()
    path.write_text("defaults: [fedprox]\ngentle: {mu: 1}\n")
    with refused("strategy.gentle.mu", "strategy=gentle", "strategy=fedavg"):
        compose_overrides(("strategy.gentle.mu=2",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rounds=-1"], "rounds"),
        (["local.lrr=1"], "local.lrr"),
        (["strategy=fedprox", "strategy.fedprox.mu=abc"], "strategy.fedprox.mu"),
        (["strategy=[fedpvr,scaffold]"], "control_variate"),
        (["strategy=[fedala,fedinit]"], "'fedala' 'fedinit' strategy"),
        (["strategy=feddw", "task=shapes"], "strategy=feddw"),
    ],
)
def test_flwr_run_refuses_before_it_makes_a_folder(words, message, tmp_path):
    words = [*words, f"results_dir={tmp_path / 'run'}"]
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=overrides(*words)
    )
    with refused(*message.split()):
        server.main(None, context)
    assert list(tmp_path.iterdir()) == []


# What only the model or the data tell.
BEFORE_ROUND_1 = [
    (["strategy=scaffold", "local.momentum=0.9"], "local.momentum=0"),
    (["strategy=scaffold", "local.optimizer=adam"], "local.optimizer=sgd"),
    (["strategy=[pfedme,fedsam]"], "local.optimizer=sgd"),
    (["strategy=[pfedme,per_fedavg]"], "PerFedAvgOptimizer"),
    (["strategy=fedpvr", "strategy.fedpvr.layers=fc9*"], "head.weight strategy.fedpvr.layers"),
    (["strategy=fedpvr", "strategy.fedpvr.layers=last:99"], r"last:99"),
    (["strategy=[fedpvr,fedper]"], "['head.weight'] strategy.personal"),
    (["strategy=[fedala,fedper]"], "strategy.fedala.layers='head.*"),
    (["strategy=[local,ties]"], "strategy.personal=all TrimmedElectedMean"),
    (["strategy=[fedsa_lora,fedex_lora]", *LORA], "body.first.lora_B strategy.personal"),
    (
        ["strategy/secure_aggregation=secagg_plus", f"{SECURE}.num_shares=7"],
        f"{SECURE}.num_shares=7",
    ),
    (["strategy=[fedsa_lora,flora]", *LORA], "body.first.lora_B strategy.personal"),
    (["clients=4"], r"clients=4"),
    (
        ["task.head_init=orthogonal", "task.model=cvae", "task.mean=[0]", "task.std=[1]"],
        "head_init",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), BEFORE_ROUND_1, ids=lambda v: str(v)[:60])
def test_refused_before_round_1_with_the_key(words, message, tmp_path):
    with refused(*message.split(), kind=(ValueError, TimeoutError)):
        run_recipe(tmp_path / "run", *TINY, "runtime.connect_timeout_seconds=0.1", *words)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"]


@pytest.mark.slow
@pytest.mark.parametrize("method", "ensemble feddistill fedproto fedrod feduv maecho".split())
def test_methods_that_work_by_class_are_refused_where_there_are_none(method, tmp_path):
    words = ["task=shapes", f"strategy={method}", "device=cpu"]
    with refused(f"strategy={method}", "segmentation"):
        run_recipe(tmp_path / "run", *words)


def test_a_relative_results_dir_is_refused(tmp_path):
    with refused("results_dir", kind=ValueError):
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
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("stopped", "stopped after round 0")
    (folder / "summary.json").unlink()  # SIGKILL leaves none
    with refused("resume=true", kind=ValueError):
        run_recipe(folder, *TINY)
    (folder / "client_state/of the killed run").mkdir(parents=True)
    again = run_recipe(folder, *TINY, "resume=true")
    assert not (folder / "client_state/of the killed run").exists()
    assert "holds no checkpoint: its run begins again with round 1" in caplog.text
    for key in ("parameters_sha256", "rounds", "accuracy", "bytes_up"):
        assert again[key] == whole[key]
    shutil.rmtree(folder / "checkpoints")  # a completed run does not
    with refused("completed", kind=ValueError):
        run_recipe(folder, *TINY, "resume=true")


@pytest.mark.slow
def test_a_run_is_neither_overwritten_nor_resumed_with_another_recipe(tmp_path):
    with refused("checkpoint", kind=ValueError):
        run_recipe(tmp_path / "run", *TINY, "resume=true")
    first = run_recipe(tmp_path / "run", *TINY)
    for words, message in (
        ([], "resume=true"),
        (["rounds=4", "local.lr=0.3", "resume=true"], "local.lr=0.3 rounds"),
        (["task.model=resnet8", "rounds=4", "resume=true"], "task.model=resnet8"),
        (["strategy=fedprox", "rounds=4", "resume=true"], "methods.fedprox methods.fedavg"),
        (["resume=true"], "rounds=2"),
    ):
        with refused(*message.split(), kind=ValueError):
            run_recipe(tmp_path / "run", *TINY, *words)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == first
