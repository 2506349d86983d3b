"""Fusing again what clients sent: the path, the plane, and the neurons."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhet.report import command, sources
from fedhet.report.blocks import Gallery, Heading, Table
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from reproductions.maecho import fusion_path as paths
from reproductions.maecho import neuron_matching as matching
from reproductions.maecho import replay_fusion as fusing
from reproductions.maecho.fusion_path import FusionPath, Neurons, fuse_again
from reproductions.maecho.fusion_path_plot import fusion
from reproductions.maecho.neuron_matching import embedded, local_optima, matched
from reproductions.maecho.neuron_plot import neurons
from strategies.base import local_model
from strategies.fusion.projected_layers import projected_layers
from strategies.maecho import HarmonizedOptima, Released
from strategies.round.client_snapshots import FILE, load_replies
from tasks.evaluation import evaluate_model
from tests.recipes import TINY, run_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run of MA-Echo that has kept its clients' models."""
    folder = tmp_path_factory.mktemp("fusing") / "run"
    words = ["strategy=maecho", "checkpoint.client_models=true", "local.initial=own", "rounds=1"]
    run_recipe(
        folder, *TINY, *words, "strategy.maecho.iterations=9", "strategy.projections.rank=20"
    )
    return folder


@pytest.fixture(scope="module")
def read(folder):
    return fusing.read_fusion(folder)


@pytest.fixture(scope="module")
def path(read):
    return fusing.fusion_path(read, grid=4, examples=10**6)


# ---- the plane -----------------------------------------------------------------------------------


def test_a_plane_by_hand():
    """Through (1, 0, 0), (4, 0, 0) and (2, 0, 5): its axes are those of x and z."""
    rows = torch.tensor([[1.0, 0, 0], [4, 0, 0], [2, 0, 5]], dtype=torch.float64)
    plane = fusing.Plane.through(*rows)
    expected = torch.tensor([[0.0, 0], [3, 0], [1, 5]], dtype=torch.float64)
    torch.testing.assert_close(plane.coordinates(rows), expected)
    torch.testing.assert_close(plane.point(1.0, 5.0), rows[2])
    off = torch.tensor([[2.0, 7.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(plane.coordinates(off), torch.tensor([[1.0, -1.0]]).double())
    assert plane.share(torch.tensor([[3.0, 0, 0], [0, 4.0, 0]]).double()) == pytest.approx(9 / 25)


def test_it_looks_at_the_first_iterations_and_at_the_last():
    assert fusing.looked_at(4) == [0, 1, 2, 3, 4]
    found = fusing.looked_at(300)
    assert found[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert found[-1] == 300
    assert sorted(set(found)) == found
    assert len(found) < 30


# ---- a run ---------------------------------------------------------------------------------------


def test_the_way_ends_at_the_runs_own_model(folder, read, path):
    run = read_run(folder, "run", 0)
    assert path.iterations[-1] == 9
    assert path.accuracy[-1] == pytest.approx(run.summary["accuracy"], abs=1e-4)
    assert path.loss[-1] == pytest.approx(run.summary["loss"], rel=1e-3)
    assert len(path.accuracy) == len(path.loss) == len(path.path) == len(path.iterations)
    start = fusing.flat(fusing.fused(read, 0))
    mean = torch.stack([fusing.flat(local_model(read.params, r)) for r in read.replies]).mean(0)
    body = slice(0, -read.params["head.weight"].numel())  # the classifier is masked, not averaged
    torch.testing.assert_close(start[body], mean[body])


def test_the_first_steps_span_the_plane_whose_loss_the_surface_is(read, path):
    rows = [fusing.flat(fusing.fused(read, count)) for count in (0, 1, 2, 9)]
    plane = fusing.Plane.through(*rows[:3])
    length = float((rows[1] - rows[0]).norm())
    assert path.path[0] == [0.0, 0.0]
    assert path.path[1] == pytest.approx([length, 0.0], rel=1e-4, abs=1e-6 * length)
    torch.testing.assert_close(plane.point(*path.path[2]), rows[2], atol=1e-3, rtol=1e-3)
    assert path.path[-1] == pytest.approx(plane.coordinates(rows[3][None])[0].tolist(), rel=1e-4)
    data, model = read.task.test_data(), read.task.build_model(0)
    for y, line in zip(path.y, path.surface, strict=True):
        for x, loss in zip(path.x, line, strict=True):
            start, state = 0, {}
            for name, value in read.params.items():
                size = value.numel()
                state[name] = plane.point(x, y)[start : start + size].view_as(value).float()
                start += size
            model.load_state_dict(state)
            assert loss == pytest.approx(evaluate_model(model, data, read.task.loss)[0], rel=1e-2)
    assert path.examples == len(data)


def test_the_grid_is_a_square_that_holds_the_path(path):
    points = np.array(path.path)
    assert path.x[0] < points[:, 0].min() < points[:, 0].max() < path.x[-1]
    assert path.y[0] < points[:, 1].min() < points[:, 1].max() < path.y[-1]
    assert len(path.x) == len(path.y) == 4
    steps = np.diff([*path.x]), np.diff([*path.y])
    assert np.allclose(np.concatenate(steps), steps[0][0], rtol=1e-3)


def test_transforms_of_the_recipe_come_before_the_fusion(folder, tmp_path):
    pytest.importorskip("ot")
    copy = tmp_path / "copy"
    copy.mkdir()
    text = (folder / "config.yaml").read_text()
    bare = "  transforms: {}\n"
    assert text.count(bare) == 1
    aligned = (
        "  transforms:\n    align:\n      _target_: strategies.fusion.neuron_alignment.Alignment\n"
    )
    (copy / "config.yaml").write_text(text.replace(bare, aligned))
    (copy / FILE).write_bytes((folder / FILE).read_bytes())
    found = fusing.read_fusion(copy)
    assert torch.equal(
        found.replies[0].update["body.1.weight"], found.sent[0].update["body.1.weight"]
    )
    changed = [r.update["body.1.weight"] for r in (found.replies[1], found.sent[1])]
    assert not torch.equal(*changed)
    model, other = (local_model(found.params, r[1]) for r in (found.replies, found.sent))
    inputs = torch.randn(5, 1, 8, 8)
    network = found.task.build_model(0)
    outputs = []
    for state in (model, other):
        network.load_state_dict(state)
        outputs.append(network(inputs)[1])
    torch.testing.assert_close(*outputs)


def test_a_fusion_that_does_not_iterate_is_none(folder, tmp_path):
    text = (folder / "config.yaml").read_text()
    start = text.index("  aggregator:\n")
    end = text.index("\n  ", text.index("    device:", start)) + 1
    plain = "  aggregator:\n    _target_: strategies.components.aggregators.UniformMean\n"
    (tmp_path / "config.yaml").write_text(text[:start] + plain + text[end:])
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes())
    assert fusing.read_fusion(tmp_path) is None


@pytest.mark.flower  # a process of its own
def test_the_process_answers_or_says_why_not(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    way, found = fuse_again(folder)
    assert way.iterations[-1] == 9
    assert [stage["title"] for stage in found.stages][-1] == "MA-Echo, 9 iterations"
    (tmp_path / "config.yaml").write_text("strategy: {}\n")
    way, found = fuse_again(tmp_path)
    assert "fusing again failed" in way.error
    assert found is None


# ---- neurons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("initial", ["average", "first"])
@pytest.mark.parametrize("iterations", [1, 7])
def test_the_mean_of_the_local_optima_is_what_the_aggregator_returns(
    normalise, initial, iterations, folder
):
    """Which holds them in other coordinates (strategies/maecho.py)."""
    params, replies = load_replies(folder / FILE)
    step = 0.05 if normalise else 1.2
    aggregator = HarmonizedOptima(
        Released(step, normalise), iterations, initial=initial, tolerance=0.0, device="cpu"
    )
    local = [local_model(params, reply) for reply in replies]
    layers = projected_layers(replies)
    optima = local_optima(aggregator, replies, local, layers, iterations)
    fused = aggregator(params, replies)
    for name in layers:
        mean = torch.stack([model[name] for model in optima]).mean(0)
        torch.testing.assert_close(mean, params[name] + fused[name], atol=2e-5, rtol=1e-4)
    assert torch.equal(optima[1]["head.weight"], local[1]["head.weight"])


def test_no_iterations_leave_the_clients_models(folder):
    params, replies = load_replies(folder / FILE)
    local = [local_model(params, reply) for reply in replies]
    layers = projected_layers(replies)
    optima = local_optima(HarmonizedOptima(), replies, local, layers, 0)
    for before, after in zip(local, optima, strict=True):
        torch.testing.assert_close(after, before)


def test_matched_counts_the_neurons_whose_nearest_has_their_number():
    first = torch.eye(4).double()
    same, swapped = first + 0.1, first[[1, 0, 2, 3]]
    assert matched(torch.stack([first, same])) == 1.0
    assert matched(torch.stack([first, swapped])) == 0.5
    assert matched(torch.stack([first, same, swapped])) == 0.75


def test_the_same_rows_are_the_same_points():
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).double()
    assert embedded(rows) == embedded(rows)
    assert np.shape(embedded(rows)) == (12, 2)


def test_stages_have_the_accuracy_on_the_clients_own_examples(read, monkeypatch):
    monkeypatch.setattr(matching, "embedded", lambda rows: [[0.0, 0.0]] * len(rows))  # seconds each
    found = matching.neurons(read.task, read.aggregator, read.params, read.sent, read.replies)
    scores = []
    for reply in read.sent:
        model = read.task.build_model(0)
        model.load_state_dict(local_model(read.params, reply))
        data, _ = read.task.client_data(reply.client_id)
        scores.append(evaluate_model(model, data, read.task.loss)[1])
    first = found.stages[0]
    assert first["accuracy"] == pytest.approx(np.mean(scores), abs=1e-4)
    assert found.layer == "body.5.weight"
    assert (found.clients, found.count) == (3, 100)
    assert len(first["points"]) == 300
    assert found.stages[-1]["matched"] > first["matched"]


def test_a_loop_whose_local_optima_are_not_known_has_none(read):
    for changes in ({"initial": "random"}, {"weights": "program"}, {"loop": object()}):
        other = HarmonizedOptima()
        vars(other).update(changes)
        assert matching.neurons(read.task, other, read.params, read.sent, read.replies) is None


# ---- the page ------------------------------------------------------------------------------------


def a_way(accuracy=(0.2, 0.5, 0.6), **changes):
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
        **changes,
    )


def some_neurons():
    points = np.random.default_rng(0).normal(size=(6, 2)).tolist()
    stage = {"title": "as trained", "points": points, "matched": 0.5, "accuracy": 0.9}
    return Neurons("body.5.weight", 2, 3, [stage, {**stage, "title": "later", "accuracy": None}])


@pytest.fixture
def run(write_run):
    return read_run(write_run("maecho"), "run", 0)


def blocks_by_type(blocks):
    return {type(block): block for block in blocks}


def test_the_section_of_the_way(run, tmp_path):
    layout = automatic_layout([replace(run, fusion=a_way())])
    found = blocks_by_type(fusion(layout, tmp_path / "report"))
    assert found[Heading].text == "The way of the fusion"
    labels = [drawing.label for drawing in found[Gallery].drawings]
    assert labels == ["loss · maecho", "by iteration · maecho"]
    (row,) = found[Table].rows
    assert [entry.text for entry in row] == ["maecho", "20.00", "60.00", "1", "25"]
    assert (tmp_path / "report_fusion.png").stat().st_size > 10_000


def test_a_way_that_is_not_to_be_had_is_named(run, tmp_path):
    layout = automatic_layout([replace(run, fusion=FusionPath(error="no test set"))])
    *_, listing = fusion(layout, tmp_path / "report")
    assert listing.items == ["maecho: no test set"]
    assert fusion(automatic_layout([run]), tmp_path / "report") == []


def test_without_accuracy_the_loss_is_shown(run, tmp_path):
    layout = automatic_layout([replace(run, fusion=a_way(accuracy=()))])
    (row,) = blocks_by_type(fusion(layout, tmp_path / "report"))[Table].rows
    assert [entry.text for entry in row][1:4] == ["2.00", "0.80", "1"]


def test_the_section_of_the_neurons(run, tmp_path):
    layout = automatic_layout([replace(run, neurons=some_neurons())])
    found = blocks_by_type(neurons(layout, tmp_path / "report"))
    assert [d.label for d in found[Gallery].drawings] == [
        *("as trained (90.0 %) · maecho", "later · maecho")
    ]
    assert [key.label for key in found[Gallery].legend] == ["client 0", "client 1"]
    rows = [[entry.text for entry in row][1:] for row in found[Table].rows]
    assert rows == [["as trained", "50", "90.00"], ["later", "50", "-"]]
    assert neurons(automatic_layout([run]), tmp_path / "report") == []


KEY = "strategy__aggregator___target_"


@pytest.fixture
def fused(write_run, monkeypatch):
    """Write runs of MA-Echo of three seeds, two of which can be fused again; note which are."""
    done = []

    def pretend(folder):
        done.append(folder.name)
        return a_way(), some_neurons()

    monkeypatch.setattr(sources, "fuse_again", pretend)
    for seed in (0, 1, 2):
        folder = write_run("maecho", seed, **{KEY: "strategies.maecho.HarmonizedOptima"})
        if seed:
            (folder / FILE).write_bytes(b"")
    plain = write_run("fedavg", 0, **{KEY: "strategies.components.aggregators.WeightedMean"})
    (plain / FILE).write_bytes(b"")
    return done


def test_of_each_cell_one_run_is_fused_again_and_that_is_said(fused, tmp_path):
    said = []
    data = sources.read_sources([tmp_path / "sweep"], said.append)
    assert fused == ["1_maecho_seed1"]
    assert [run.seed for run in data.runs if run.fusion and run.neurons] == [1]
    assert said == ["fusing again, step by step, what the clients of 1_maecho_seed1 have sent"]


def test_only_classifiers_with_an_iterated_fusion_can_be_fused_again(tmp_path):
    (tmp_path / FILE).write_bytes(b"")
    key = "strategy.aggregator._target_"
    iterated = {key: "strategies.maecho.HarmonizedOptima"}
    assert paths.can_fuse_again(tmp_path, iterated)
    assert not paths.can_fuse_again(tmp_path, {**iterated, "task.model": "cvae"})
    assert not paths.can_fuse_again(tmp_path, {key: "strategies.regmean.RegressionMean"})
    assert not paths.can_fuse_again(tmp_path / "elsewhere", iterated)


@pytest.mark.flower  # it draws pages
@pytest.mark.usefixtures("fused")
def test_the_page_is_made_again_from_its_data_file(tmp_path):
    command.main([str(tmp_path / "sweep"), "--no-partitions"])
    first = tmp_path / "sweep" / "report"
    command.main([str(first / "report.json"), "--no-partitions", "--out", str(tmp_path / "again")])
    written = {path.name: path.read_bytes() for path in first.iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == written
    assert b"The way of the fusion" in written["report.html"]
    assert b"report_neurons.png" in written["report.md"]
