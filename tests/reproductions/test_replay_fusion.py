"""MA-Echo's Figures 5 and 6: a replayed fusion, its plane, its path and its neurons."""

import dataclasses
import io
import json
import runpy
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import fedhet.reproductions.maecho as package
from fedhet.report.blocks import Picture
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from fedhet.reproductions.maecho import neuron_matching as matching
from fedhet.reproductions.maecho import replay_fusion as replay
from fedhet.reproductions.maecho.flat_model import unflat
from fedhet.reproductions.maecho.fusion_path import FusedNeurons, FusionPath, Stage
from fedhet.reproductions.maecho.fusion_path_plot import fusion
from fedhet.reproductions.maecho.neuron_matching import local_optima
from fedhet.reproductions.maecho.neuron_plot import neurons
from fedhet.reproductions.subprocess_call import CallError
from fedhet.strategies.base import local_model
from fedhet.strategies.fusion.projections import projected_layers
from fedhet.strategies.maecho import HarmonizedOptima, MAEcho
from fedhet.strategies.round.client_snapshots import FILE
from fedhet.tasks.evaluation import evaluate_model
from tests.recipes import TINY, run_recipe
from tests.reproductions.blocks import by_type, texts_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run of MA-Echo on aligned models that has kept its clients' models."""
    pytest.importorskip("ot")
    folder = tmp_path_factory.mktemp("replay") / "run"
    words = ["strategy=[maecho,alignment]", "checkpoint.client_models=true", "local.initial=own"]
    words += ["rounds=1", "strategy.maecho.iterations=9", "strategy.projections.rank=20"]
    run_recipe(folder, *TINY, *words)
    return folder


@pytest.fixture(scope="module")
def read(folder):
    return replay.read_fusion(folder)


@pytest.fixture(scope="module")
def path(read):
    return replay.fusion_path(read, grid=4, examples=10**6)


def test_a_plane_by_hand():
    """Through (1, 0, 0), (4, 0, 0) and (2, 0, 5): its axes are those of x and z."""
    rows = torch.tensor([[1.0, 0, 0], [4, 0, 0], [2, 0, 5]], dtype=torch.float64)
    plane = replay.Plane.through(*rows)
    expected = torch.tensor([[0.0, 0], [3, 0], [1, 5]], dtype=torch.float64)
    torch.testing.assert_close(plane.coordinates(rows), expected)
    torch.testing.assert_close(plane.point(1.0, 5.0), rows[2])
    off = torch.tensor([[2.0, 7.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(plane.coordinates(off), torch.tensor([[1.0, -1.0]]).double())
    assert plane.share(torch.tensor([[3.0, 0, 0], [0, 4.0, 0]]).double()) == pytest.approx(9 / 25)


@pytest.mark.slow
def test_the_path_ends_at_the_runs_own_model(folder, read, path):
    """Which it does not unless the replies are aligned before, as in the run."""
    run = read_run(folder, "run", 0)
    assert path.iterations == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert path.accuracy[-1] == pytest.approx(run.summary["accuracy"], abs=1e-4)
    assert path.loss[-1] == pytest.approx(run.summary["loss"], rel=1e-3)
    assert len(path.accuracy) == len(path.loss) == len(path.path) == len(path.iterations)
    start = replay.flat(replay.fused(read, 0))
    mean = torch.stack([replay.flat(local_model(read.params, r)) for r in read.replies]).mean(0)
    body = slice(0, -read.params["head.weight"].numel())  # the classifier is masked, not averaged
    torch.testing.assert_close(start[body], mean[body])


@pytest.mark.slow
def test_the_first_steps_span_the_plane_whose_loss_the_surface_is(read, path):
    """On a square grid that holds the path."""
    rows = [replay.flat(replay.fused(read, count)) for count in (0, 1, 2, 9)]
    plane = replay.Plane.through(*rows[:3])
    length = float((rows[1] - rows[0]).norm())
    assert path.path[0] == [0.0, 0.0]
    assert path.path[1] == pytest.approx([length, 0.0], rel=1e-4, abs=1e-6 * length)
    torch.testing.assert_close(plane.point(*path.path[2]), rows[2], atol=1e-3, rtol=1e-3)
    assert path.path[-1] == pytest.approx(plane.coordinates(rows[3][None])[0].tolist(), rel=1e-4)
    data, model = read.task.test_data(), read.task.build_model(0)
    assert path.examples == len(data)
    for x, y in ((0, 0), (3, 0), (1, 2), (2, 3)):
        point = plane.point(path.x[x], path.y[y])
        model.load_state_dict(unflat(point, read.params))
        loss, _ = evaluate_model(model, data, read.task.loss)
        assert path.surface[y][x] == pytest.approx(loss, rel=1e-2)
    grid, points = np.array([path.x, path.y]), np.array(path.path)
    assert np.all((grid[:, 0] < points.min(0)) & (points.max(0) < grid[:, -1]))
    assert np.allclose(np.diff(grid), [3 * [grid[0, 1] - grid[0, 0]]], rtol=1e-3)


@pytest.fixture
def not_embedded(monkeypatch):
    monkeypatch.setattr(matching, "embedded", lambda rows: [[0.0, 0.0]] * len(rows))  # seconds each


@pytest.mark.slow
@pytest.mark.usefixtures("not_embedded")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_what_a_process_prints_of_the_fusion_is_collected_or_why_it_failed(
    folder, tmp_path, monkeypatch, capsys
):
    """The process runs here: what calls it is tested in tests/fedhet/report."""

    def run(module, question, timeout):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(question)))
        runpy.run_module(module, run_name="__main__")
        return json.loads(capsys.readouterr().out)

    settings, said = read_run(folder, "run", 0).settings, []
    average = {key: one for key, one in settings.items() if key != "strategy.methods.maecho"}
    for other in (settings | {"task.model": "cvae"}, average):
        assert package.collect(folder, other, said.append) is None
    assert package.collect(tmp_path, settings, said.append) is None  # without clients' models
    monkeypatch.setattr(package, "call", run)
    found = package.collect(folder, settings, said.append)
    assert found["fusion"]["iterations"][-1] == 9
    assert found["neurons"]["stages"][-1]["title"] == "MA-Echo, 9 iterations"
    assert said == ["replaying the fusion of the clients' models of run"]
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes())
    found = package.collect(tmp_path, settings, said.append)
    assert found["fusion"]["error"].endswith("it has no config.yaml")
    recipe = OmegaConf.load(folder / "config.yaml")
    recipe.strategy.methods = {"fedavg": "fedhet.strategies.fedavg:FedAvg"}
    OmegaConf.save(recipe, tmp_path / "config.yaml")
    assert package.collect(tmp_path, settings, said.append) is None  # it does not iterate
    monkeypatch.setattr(package, "call", Mock(side_effect=CallError("it took longer")))
    error = "the fusion could not be replayed: it took longer"
    assert package.collect(folder, settings, said.append) == {"fusion": {"error": error}}


@pytest.mark.slow
@pytest.mark.parametrize(("normalise", "step"), [(False, 1.2), (True, 0.05)])
@pytest.mark.parametrize("initial", ["average", "first"])
def test_the_mean_of_the_local_optima_is_what_the_aggregator_returns(
    normalise, step, initial, read
):
    """Which holds them in other coordinates (strategies/maecho.py)."""
    fixed = {"iterations": 7, "tolerance": 0.0, "device": "cpu"}
    method = MAEcho.unbound({"step": step, "normalise": normalise, "initial": initial, **fixed})
    aggregator = HarmonizedOptima(method)
    local = [local_model(read.params, reply) for reply in read.replies]
    layers = projected_layers(read.replies)
    optima = local_optima(aggregator, read.replies, local, layers, 7)
    fused = aggregator(read.params, read.replies)
    for name in layers:
        mean = torch.stack([model[name] for model in optima]).mean(0)
        torch.testing.assert_close(mean, read.params[name] + fused[name], atol=2e-5, rtol=1e-4)
    assert torch.equal(optima[1]["head.weight"], local[1]["head.weight"])


@pytest.mark.slow
@pytest.mark.usefixtures("not_embedded")
def test_stages_have_the_accuracy_on_the_clients_own_examples(read):
    found = matching.neurons(read)
    scores = []
    for reply in read.sent:
        model = read.task.build_model(0)
        model.load_state_dict(local_model(read.params, reply))
        data, _ = read.task.client_data(reply.client_id)
        scores.append(evaluate_model(model, data, read.task.loss)[1])
    first, *_, last = found.stages
    assert first.accuracy == pytest.approx(np.mean(scores), abs=1e-4)
    assert (found.layer, found.clients, found.count) == ("body.5.weight", 3, 100)
    assert len(first.points) == 300
    assert last.matched > first.matched


def a_path(accuracy=(0.2, 0.5, 0.6)):
    return FusionPath(
        iterations=[0, 1, 2],
        accuracy=list(accuracy),
        loss=[2.0, 1.0, 0.8],
        path=[[1.0, 0.5], [1.0, 1.0], [1.0, 1.5]],
        in_plane=0.25,
        x=[-1.0, 0.0, 1.0, 2.0, 3.0],
        y=[-1.0, 0.5, 2.0, 3.5],
        surface=(1 + np.arange(20.0)).reshape(4, 5).tolist(),
        examples=100,
    )


@pytest.fixture
def layout_of(finished_run):
    """Return a function that lays out a run with these figures."""

    def layout(**figures):
        found = {"maecho": {name: dataclasses.asdict(each) for name, each in figures.items()}}
        return automatic_layout([dataclasses.replace(finished_run("maecho"), figures=found)])

    return layout


@pytest.mark.slow
def test_the_sections_of_the_path_and_of_the_neurons(layout_of, tmp_path):
    points = np.eye(6, 2).tolist()
    stages = [Stage("as trained", points, 0.5, 0.9), Stage("later", points, 0.5, None)]
    layout = layout_of(fusion=a_path(), neurons=FusedNeurons("body.5.weight", 2, 3, stages))
    found = by_type(fusion(layout, tmp_path / "report"))
    assert "loss · MA-Echo" in found[Picture].svg
    assert texts_of(found) == [["MA-Echo", "20.00", "60.00", "1", "25"]]
    assert (tmp_path / "report_fusion.png").stat().st_size > 10_000
    found = by_type(neurons(layout, tmp_path / "report"))
    for text in ("as trained (90.0 %) · MA-Echo", "later · MA-Echo", "client 0", "client 1"):
        assert text in found[Picture].svg
    rows = [row[1:] for row in texts_of(found)]
    assert rows == [["as trained", "50", "90.00"], ["later", "50", "-"]]
