"""fedhet-evaluate --by-site and --cross-site, against figures computed by hand."""

import json

import numpy as np
import pytest

from fedhet.common.decisions import counts_of, decisions_of
from fedhet.common.results import BY_SITE
from fedhet.load_run import model_of, recipe_of, task_of
from fedhet.report.run_data import read_run
from fedhet.strategies.round.client_snapshots import FILE, load_trained
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tools.by_site import evaluate_sites
from fedhet.tools.evaluate import main
from tests.recipes import TINY, run_recipe

HELD_OUT = [*TINY, "rounds=2", "partition.holdout=0.3", "evaluation.metrics=[f1]"]


def test_the_threshold_has_the_largest_sum_of_sensitivity_and_specificity():
    labels, scores = np.array([0, 0, 1, 0, 1, 1]), np.array([0.1, 0.2, 0.3, 0.4, 0.6, 0.9])

    def best(scores, labels):
        found = counts_of(np.stack([1 - scores, scores], 1), labels)
        return decisions_of({0: found}, [0], ["well", "ill"]).threshold

    # from 0.3 on: sensitivity 1, specificity 2/3; from 0.6 on: 2/3 and 1: of equal ones the largest
    assert best(scores, labels) == 0.6
    assert best(np.array([0.1, 0.2, 0.3, 0.35, 0.6, 1.0]), np.sort(labels)) == 0.35
    assert best(np.array([0.1, 0.2, 0.3, 0.3507, 0.6, 1.0]), np.sort(labels)) == 0.35  # in steps
    assert best(scores, np.ones(6, dtype=np.int64)) is None


@pytest.mark.slow
def test_every_model_is_evaluated_at_every_site(tmp_path, capsys):
    """One site has never trained: it has no model, and is evaluated."""
    folder = tmp_path / "run"
    run_recipe(folder, *HELD_OUT, "checkpoint.client_models=true", "partition.unseen=[1]")
    main([str(folder), "--cross-site"])
    assert "client 2's own" in capsys.readouterr().out
    run = read_run(folder, "run", 0)
    found, task = run.sites, task_of(recipe_of(folder))
    assert [site.unseen for site in found.sites] == [False, True, False]
    assert (found.models, found.trained_on) == ((0, 2), False)
    held_out = [task.client_data(client)[1] for client in range(3)]
    assert [site.held_out for site in found.sites] == [len(data) for data in held_out]
    shared = model_of(folder, task)
    by_hand = [evaluate_model(shared, data, task.loss)[1] for data in held_out]
    assert found.shared["accuracy"] == pytest.approx(by_hand)
    parameters = dict(shared.named_parameters())
    shared.load_state_dict(dict(load_trained(folder / FILE, 2, parameters).model), strict=False)
    by_hand = [evaluate_model(shared, data, task.loss)[1] for data in held_out]
    assert found.matrix["accuracy"][1] == pytest.approx(by_hand)
    assert found.own["accuracy"][1:] == [None, found.matrix["accuracy"][1][2]]
    assert np.array(found.decisions.counts).sum() == sum(map(len, held_out))
    assert set(found.shared) == {"accuracy", "loss", "f1"}


@pytest.mark.slow
def test_personalised_models_are_those_that_the_clients_keep(tmp_path, refused):
    """Ditto's are those that the run has scored; FedPer's clients share no whole model."""
    folder = tmp_path / "fedper"
    run_recipe(folder, *HELD_OUT, "strategy=fedper")
    found = evaluate_sites(folder, cross=True)
    assert (found.models, found.shared, found.decisions) == ((0, 1, 2), {}, None)
    folder = tmp_path / "ditto"
    summary = run_recipe(folder, *HELD_OUT, "strategy=ditto", "evaluation.model=both")
    found = evaluate_sites(folder, cross=True)
    assert set(found.shared) == set(found.own) == {"accuracy", "loss", "f1"}
    assert np.mean(found.own["accuracy"]) == pytest.approx(summary["personal_accuracy"], abs=1e-6)
    assert np.diag(found.matrix["accuracy"]) == pytest.approx(found.own["accuracy"])
    assert "--best" in refused(main, folder, "--cross-site", "--best")


@pytest.mark.slow
def test_what_cannot_be_evaluated_by_site_is_refused(fedavg_run, tmp_path, refused):
    assert "partition.holdout" in refused(main, fedavg_run, "--cross-site")
    folder = tmp_path / "run"
    run_recipe(folder, *HELD_OUT)
    assert "checkpoint.client_models" in refused(main, folder, "--cross-site")
    main([str(folder), "--by-site", "--out", str(tmp_path / "figures.json")])
    [written] = json.loads((tmp_path / "figures.json").read_text())
    assert written["name"] == "run"
    kept = json.loads((folder / BY_SITE).read_text())
    assert kept["shared"] == written["shared"]
    for words in (["--augmented", "2"], ["--state", "none.safetensors"]):
        assert words[0] in refused(main, folder, "--by-site", *words)


@pytest.mark.slow
def test_a_binary_task_has_a_threshold_of_the_other_sites(tmp_path):
    """The run's clients send counts of what fedhet-evaluate counts: brute force over thresholds."""
    random = np.random.default_rng(0)
    rows = [
        f"{x:.4f},{'ill' if x + random.normal() > 1 else 'well'}" for x in random.normal(size=90)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    table = [f"task.path={tmp_path / 'rows.csv'}", "task.target=y"]
    run_recipe(
        tmp_path / "run",
        *("task=tabular", *table, "task.classes=[well,ill]", "partition=iid", "clients=3"),
        *("partition.holdout=0.4", "rounds=2", "local=adam", "evaluation.confusion=true"),
        "partition.unseen=[2]",
    )
    found = evaluate_sites(tmp_path / "run").decisions
    sent = read_run(tmp_path / "run", "run", 0).sites  # by_site.json is not there
    assert (sent.decisions, [site.client for site in sent.sites]) == (found, [0, 1, 2])
    assert list(found.classes) == ["well", "ill"]
    task = task_of(recipe_of(tmp_path / "run"))
    model = model_of(tmp_path / "run", task).cpu()
    parts = []
    for client in range(3):
        [(inputs, labels)] = task.client_data(client)[1].batches(1000, generator=None, train=False)
        parts.append((model(inputs)[1].double().softmax(1)[:, 1].detach().numpy(), labels.numpy()))
    scores, labels = (np.concatenate(part) for part in zip(*parts[1:], strict=True))
    steps = np.arange(1000) / 1000
    sums = {t: (scores[labels == 1] >= t).mean() + (scores[labels == 0] < t).mean() for t in steps}
    chosen = max(sums, key=lambda t: (round(sums[t], 9), t))
    assert found.thresholds[0] == chosen
    own_scores, own_labels = parts[0]
    positive = own_scores >= chosen
    assert list(found.at_threshold[0]) == [
        int((~positive & (own_labels == 0)).sum()),
        int((positive & (own_labels == 0)).sum()),
        int((~positive & (own_labels == 1)).sum()),
        int((positive & (own_labels == 1)).sum()),
    ]
    scores, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert found.counts[1][0] == int(((scores <= 0.5) & (labels == 1)).sum())
