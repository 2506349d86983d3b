"""Runs that start from a trained model, and the files that are refused."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fedhet import load_run
from fedhet.common.results import read_rows
from fedhet.conf import compose_overrides
from fedhet.server_app.assembly import check_parts, task_of
from fedhet.server_app.initial_model import load_initial_model
from fedhet.strategies.components.tensor_selection import TensorSelector, shared_names, tensors_of
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.models.wrapped import WrappedModel
from tests.recipes import TINY, run_recipe
from tests.refused import refused


@pytest.fixture
def loaded():
    """Return a function: the model of a recipe after its initial model, and what is said of it."""

    def load(*words):
        recipe = compose_overrides(("task=digits", *map(str, words)))
        task = task_of(recipe)
        model = task.build_model(int(recipe.seed))
        shared = shared_names(model, TensorSelector(recipe.strategy.personal))
        about, _ = load_initial_model(recipe, task, model, shared)
        return tensors_of(model), about

    return load


@pytest.fixture
def trained(loaded, tmp_path):
    """Return the tensors of another seed's model, and the file that holds them."""
    tensors, about = loaded("seed=7")
    assert about == {}
    tensors = {name: value.clone() for name, value in tensors.items()}
    save_file(tensors, tmp_path / "trained.safetensors")
    return tensors, tmp_path / "trained.safetensors"


@pytest.mark.slow
def test_the_named_tensors_are_the_files_and_the_others_the_seeds(loaded, trained):
    theirs, path = trained
    found, about = loaded(f"initial_model.path={path}")
    assert all(torch.equal(value, theirs[name]) for name, value in found.items())
    assert about["initial_model"]["tensors"] == len(theirs)
    ours, _ = loaded()
    found, _ = loaded(f"initial_model.path={path}", "initial_model.layers='body.*'")
    for name, value in found.items():
        source = theirs if name.startswith("body.") else ours
        assert torch.equal(value, source[name])
    assert not torch.equal(found["head.weight"], theirs["head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["strategy=fedper", "evaluation.clients=true"], ""),
        (["strategy=lg_fedavg", "evaluation.clients=true"], ""),
        (["strategy=local", "evaluation.clients=true"], ""),
        (["strategy=fedper", "strategy/secure_aggregation=secagg_plus"], ""),
        (["strategy=fedper", "initial_model.layers='body.*'"], "body."),
        (["strategy=lg_fedavg", "initial_model.layers='head.*'"], "head."),
    ],
    ids=str,
)
def test_what_clients_keep_begins_as_the_file_has_it(words, taken, loaded, trained, tmp_path):
    """Steps of 1e-30 move nothing: every score is of the model that a run began with.

    The run is resumed without the file, when most clients have not trained.
    """
    theirs, path = trained
    recipe = compose_overrides((*TINY, "clients=6", "partition=iid"))
    task, ours = task_of(recipe), loaded()[0]
    model = task.build_model(0)
    begun = {n: v if n.startswith(taken) else ours[n] for n, v in theirs.items()}
    model.load_state_dict(begun)
    _, expected = evaluate_model(model, task.test_data(torch.device("cpu")), task.loss)
    words = [*words, "clients=6", "participation=0.5", "local.lr=1e-30", "partition=iid"]
    run, begin = tmp_path / "run", f"initial_model.path={path}"
    for more in (["rounds=1", begin], ["rounds=3", "resume=true", begin]):
        run_recipe(run, *TINY, *words, *more, clients=6)
        path.unlink(missing_ok=True)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["personal_test_accuracy"] for row in rows[1:]] == [pytest.approx(expected)] * 3
    assert len({client for row in rows[1:] for client in row["clients"]}) > 3
    if "evaluation.clients=true" in words:  # at all six, on the examples of each
        every = [evaluate_model(model, task.client_data(c)[0], task.loss)[1] for c in range(6)]
        mean = pytest.approx(sum(every) / 6)  # of as many examples each
        assert [row["client_accuracy"] for row in rows[1:]] == [mean] * 3


@pytest.mark.slow
def test_a_state_dict_of_ones_own_network_is_taken_by_its_own_names(loaded, tmp_path):
    words = ["task=own", "task.data=sklearn.datasets:load_iris", "task.model=torch.nn:Sequential"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    recipe = compose_overrides(
        (*words, "task.num_classes=3", f"initial_model.path={tmp_path}/a.pt")
    )
    theirs = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    torch.save({name: value.double() for name, value in theirs.items()}, tmp_path / "a.pt")
    wrapped = WrappedModel(model)
    names = shared_names(wrapped, TensorSelector("none"))
    load_initial_model(recipe, task_of(recipe), wrapped, names)
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, theirs[f"0.{name}"])
    assert torch.equal(wrapped.head.weight, theirs["2.weight"])


@pytest.mark.slow
def test_what_is_not_this_runs_model_is_refused(loaded, trained, tmp_path):
    theirs, path = trained
    files = {
        "lacks": {name: value for name, value in theirs.items() if name != "head.weight"},
        "shape": theirs | {"head.weight": torch.zeros(3, 5)},
        "complex": theirs | {"head.weight": theirs["head.weight"] * 1j},
        "nan": theirs | {"head.weight": torch.full_like(theirs["head.weight"], torch.nan)},
    }
    files["large"] = theirs | {"head.weight": theirs["head.weight"].double() + 1e300}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    torch.save({"model": 3}, tmp_path / "other.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:-100])
    (tmp_path / "code.pth").write_bytes(pickle.dumps(shutil.rmtree, protocol=2))
    (tmp_path / "words.safetensors").write_text("words")
    (tmp_path / "words.pt").write_text("words")
    shutil.copy(path, tmp_path / "model.ckpt")
    for words, named in (
        (["lacks.safetensors"], ["head.weight"]),
        (["shape.safetensors"], ["head.weight", "(3, 5)", "(10, 100)"]),
        (["complex.safetensors"], ["head.weight", "torch.complex64", "torch.float32"]),
        (["nan.safetensors"], ["head.weight", "NaN or Inf"]),
        (["large.safetensors"], ["head.weight", "NaN or Inf", "torch.float32"]),
        (["cut.pt"], ["cut.pt", "state_dict"]),
        (["other.pt"], ["state_dict"]),
        (["code.pth"], ["state_dict"]),
        (["words.pt"], ["state_dict"]),
        (["words.safetensors"], ["words.safetensors", "damaged"]),
        (["model.ckpt"], ["model.ckpt", ".safetensors", "state_dict"]),
        (["nothing.pt"], ["nothing.pt"]),
        (["."], ["model.safetensors"]),
        (
            ["trained.safetensors", "strategy=fedbabu", "initial_model.layers='head.*'"],
            ["initial_model.layers"],
        ),
        (
            ["lacks.safetensors", "strategy=local", "initial_model.layers='head.w*'"],
            ["head.weight"],
        ),
        (["trained.safetensors", "initial_model.layers=nothing"], ["initial_model.layers"]),
    ):
        with refused(*named):
            loaded(f"initial_model.path={tmp_path / words[0]}", *words[1:])


def test_a_model_of_other_classes_is_warned_of_and_one_beside_other_frozen_weights_refused(
    loaded, trained, tmp_path, caplog
):
    classes = {"classes": json.dumps([*"abcdefghij"])}
    for metadata in ({}, classes, {"frozen_sha256": "0" * 16}):
        save_file(trained[0], tmp_path / "labelled.safetensors", metadata)
        words = f"initial_model.path={tmp_path / 'labelled.safetensors'}"
        if "frozen_sha256" in metadata:
            with refused("frozen"):
                loaded(words)
        else:
            loaded(words)
        warned = "was trained with other classes than those of this run" in caplog.text
        assert warned == bool(metadata)


@pytest.mark.slow
def test_a_missing_file_is_refused_before_the_workers_start_unless_the_run_is_resumed(tmp_path):
    words = ("task=digits", f"initial_model.path={tmp_path}/nothing.safetensors")
    with refused("initial_model", "(path, layers)"):
        compose_overrides(("initial_model=a.pt",))
    with refused("nothing.safetensors"):
        check_parts(compose_overrides(words))
    check_parts(compose_overrides((*words, "resume=true", f"results_dir={tmp_path}")))


@pytest.mark.slow
def test_no_round_evaluates_a_model_at_the_server_and_at_every_client(tmp_path):
    """The clients' figures are those of a pass over their examples by hand."""
    first = run_recipe(tmp_path / "first", *TINY, "rounds=1")
    words = [*TINY, f"initial_model.path={tmp_path / 'first'}", "rounds=0"]
    words += ["evaluation.clients=true", "evaluation.per_client=true", "schedule=cosine"]
    summary = run_recipe(tmp_path / "none", *words)
    [row] = read_rows(tmp_path / "none" / "metrics.jsonl")
    names = ("accuracy", "loss", "parameters_sha256")
    assert {name: summary[name] for name in names} == {name: first[name] for name in names}
    assert summary["status"] == "completed"
    task = load_run.task_of(load_run.recipe_of(tmp_path / "none"))
    model = load_run.model_of(tmp_path / "none", task)
    for client in range(3):
        loss, accuracy = evaluate_model(model, task.client_data(client)[0], task.loss)
        assert row["per_client"]["client_accuracy"][str(client)] == pytest.approx(accuracy)
        assert row["per_client"]["client_loss"][str(client)] == pytest.approx(loss)
    tuned = run_recipe(tmp_path / "tuned", *words, "evaluation.finetune_epochs=1")
    assert tuned["client_loss"] < summary["client_loss"]


@pytest.mark.slow
def test_a_run_begins_with_the_figures_of_the_other_and_goes_on_without_its_file(tmp_path):
    first = run_recipe(tmp_path / "first", *TINY, "rounds=2", "partition=iid")
    words = [*TINY, "seed=5", "strategy=scaffold", f"initial_model.path={tmp_path / 'first'}"]
    summary = run_recipe(tmp_path / "second", *words, "rounds=1")
    row, *_ = read_rows(tmp_path / "second" / "metrics.jsonl")
    assert (row["accuracy"], row["loss"]) == (first["accuracy"], first["loss"])
    about = summary["data"]["initial_model"]
    assert about["path"] == str(tmp_path / "first" / "model.safetensors")
    whole = run_recipe(tmp_path / "whole", *words, "rounds=2")
    shutil.rmtree(tmp_path / "first")
    resumed = run_recipe(
        tmp_path / "second", *words, "rounds=2", "resume=true", f"results_dir={tmp_path / 'second'}"
    )
    assert resumed["data"]["initial_model"] == {"sha256": about["sha256"]}
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
