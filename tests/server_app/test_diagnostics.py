"""layers.jsonl and similarity.jsonl: their content, and that they change nothing in the run."""

import pytest
import torch

from fedhet.common.results import RowsFile, read_rows
from fedhet.server_app.listeners.diagnostics import LAYERS, SIMILARITY
from fedhet.strategies.round.client_snapshots import FILE, load_replies
from tests.recipes import TINY, run_recipe
from tests.refused import refused

pytestmark = pytest.mark.slow
SHORT = [*TINY, "local.epochs=1"]
MEAN = "strategy/aggregator=uniform_mean"
ALL = ["diagnostics.layers=all", "diagnostics.cka=head.weight", "diagnostics.cka_every=3"]
ALL += ["diagnostics.cka_clients=2", "diagnostics.cka_examples=50"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    return folder, run_recipe(folder, *SHORT, "rounds=4", "checkpoint.client_models=true", *ALL)


def test_the_files_hold_the_figures_of_the_clients_models_and_the_run_has_the_same_bits(
    measured, tmp_path
):
    folder, summary = measured
    plain = run_recipe(tmp_path, *SHORT, "rounds=4")
    assert summary["parameters_sha256"] == plain["parameters_sha256"]
    assert summary["fingerprint"] == plain["fingerprint"]
    assert not {LAYERS, SIMILARITY} & {path.name for path in tmp_path.iterdir()}
    rows = read_rows(folder / LAYERS)
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    _, replies = load_replies(folder / FILE)
    examples = torch.tensor([reply.num_examples for reply in replies]).double()
    weights = (examples / examples.sum())[:, None]  # as in the aggregate
    assert len(weights.unique()) > 1
    for name, update in replies[0].update.items():
        assert rows[0]["shapes"][name] == list(update.shape)
        updates = torch.stack([reply.update[name].flatten() for reply in replies]).double()
        moves = weights * updates
        diversity, norm = moves.square().sum() / moves.sum(0).square().sum(), moves.norm(dim=1)
        # y_i was stored as float32
        assert rows[-1]["drift_diversity"][name] == pytest.approx(float(diversity), rel=1e-4)
        assert rows[-1]["update_norm"][name] == pytest.approx(float(norm.sum()), rel=1e-4)
    alike = read_rows(folder / SIMILARITY)
    assert [(row["round"], row["clients"]) for row in alike] == [(r, [0, 1]) for r in (1, 3, 4)]
    (first, similar), (again, second) = alike[-1]["cka"]["head"]
    assert first == pytest.approx(1.0) == second
    assert similar == pytest.approx(again)
    assert 0 < similar < 1


def test_a_resumed_run_has_every_round_once(measured, tmp_path):
    run_recipe(tmp_path, *SHORT, *ALL, "rounds=3")
    late = {"round": 4, "drift_diversity": {}, "update_norm": {}}  # died before its checkpoint
    RowsFile(tmp_path / LAYERS, 3).append(late)
    run_recipe(tmp_path, *SHORT, *ALL, "rounds=4", "resume=true")
    for name in (LAYERS, SIMILARITY):
        assert (tmp_path / name).read_text() == (measured[0] / name).read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["diagnostics.layers=all", "strategy/differential_privacy=central_fixed", MEAN],
            "strategy/ diagnostics LayerFigures",
        ),
        (
            ["diagnostics.layers=all", "strategy/secure_aggregation=secagg_plus", "clients=3"],
            "strategy/ diagnostics LayerFigures",
        ),
        (["diagnostics.layers=tail.*"], "diagnostics.layers='tail.*'"),
        (["diagnostics.cka=all", "strategy=fedper"], "strategy.personal="),
    ],
)
def test_invalid_diagnostics_are_refused_before_round_1(words, named, tmp_path):
    with refused(*named.split()):
        run_recipe(tmp_path, *TINY, *words)
    assert read_rows(tmp_path / "metrics.jsonl") == []
