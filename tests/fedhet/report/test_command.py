"""The command from end to end, on small results directories."""

import json
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedhet.common.results import read_rows, write_rows
from fedhet.report import command, data_file, paper_figures
from fedhet.report.blocks import Paragraph
from fedhet.report.colors import keys_of
from fedhet.report.figures import Quantity, line_panels, scores
from fedhet.report.layout import automatic_layout, first_runs
from fedhet.report.sources import completed_runs


@pytest.fixture
def sweep(write_run, tmp_path):
    """Two methods, two seeds, two alphas; scaffold's second seed failed at alpha 1."""
    for n in range(8):
        method, gain = ("scaffold", 0.1) if n >= 4 else ("fedavg", 0.0)
        seed, ratio = n // 2 % 2, 0.5 + gain
        figures = {"norm_ratio": ratio, "update_cosine": gain, "drift_diversity": 0.5 / ratio}
        write_run(
            method,
            seed,
            (0.1, 0.3 + gain, 0.5 + gain + 0.02 * seed),
            columns={"train_loss": 1.0 - gain, "lr": 0.1, **figures},
            summary={"status": "failed", "error": "a node died"} if n == 7 else {},
            partition__alpha=(0.1, 1.0)[n % 2],
        )
    return tmp_path / "sweep"


def report(*words):
    """Write a report and return its Markdown, where it is beside the first source."""
    command.main([*map(str, words), "--no-partitions"])
    return "".join(page.read_text() for page in pathlib.Path(words[0]).glob("report/*.md"))


def written(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_everything_is_written_beside_the_sweep_and_again_from_its_data_file(
    sweep, tmp_path, capsys
):
    text = report(sweep, "--title", "A title")
    first = written(sweep / "report")
    kinds = ("_agreement", "_bytes", "_diagnostics", "_rounds")
    pictures = {f"report{kind}.{ending}" for kind in kinds for ending in ("png", "svg")}
    assert set(first) == {"report.html", "report.json", "report.md"} | pictures
    # fedavg: .50 and .52, mean 51, sample sd sqrt(2) = 1.41
    assert "| FedAvg | 51.00 ± 1.41 (n = 2) | 51.00 ± 1.41 (n = 2) |" in text
    assert "| SCAFFOLD | **61.00 ± 1.41 (n = 2)** | **60.00 (n = 1)** |" in text
    assert "| alpha 0.1 | SCAFFOLD | 0.600 ± 0.000 | 0.100 ± 0.000 | 0.833 ± 0.000 |" in text
    assert "norm_ratio" not in text  # not once more among the columns per round
    assert "1 of 8 runs failed: 7_scaffold_seed1. No mean includes it; see What went wrong." in text
    assert "| 7_scaffold_seed1 | failed | a node died |" in text
    assert "61.00 ± 1.41" in capsys.readouterr().out

    moved = tmp_path / "elsewhere.json"
    shutil.move(sweep / "report" / "report.json", moved)
    shutil.rmtree(sweep)
    report(moved, "--out", tmp_path / "again")
    assert written(tmp_path / "again") == first


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_several_sweeps_make_one_page_and_again_from_a_thinned_data_file(
    sweep, write_run, tmp_path, monkeypatch
):
    for seed in (0, 1):
        write_run("fedprox", seed, (0.1, 0.2, 0.4 + 0.1 * seed), sweep="other", rounds=2)
    monkeypatch.setattr(data_file, "MOST_POINTS", 60)
    twice = sweep / "0_fedavg_seed0"  # counts once
    text = report(sweep, tmp_path / "other", twice, "--targets", "0.4", "--name", "short")
    assert "# FedAvg, SCAFFOLD and FedProx on digits, dirichlet partition with alpha" in text
    assert "10 runs, 9 of them completed;" in text
    assert "other/1_fedprox_seed1" in text
    assert "vl-convert-python is missing" in text
    assert "rounds to 40 %" in text
    first = written(sweep / "report")
    assert sorted(first) == ["short.html", "short.json", "short.md"]
    report(sweep / "report" / "short.json", "--name", "short", "--out", tmp_path / "again")
    assert written(tmp_path / "again") == first


@pytest.mark.slow
def test_each_published_table_has_a_section_and_a_wrong_description_is_said(write_run, tmp_path):
    def paper(source, published):
        rows = {"FedAvg": {"runs": {"strategy": "fedavg"}, "published": [published]}}
        return {"source": source, "unit": "%", "columns": {"digits": {}}, "rows": rows}

    write_run("fedavg", 0, (0.1, 0.5), paper=paper("Table 1", 50.0))
    write_run("fedavg", 0, (0.1, 0.7), paper=paper("Table 2", 75.0))
    write_run("scaffold", 0, (0.1, 0.9))
    write_run("moon", 0, (0.1, 0.8), paper={"source": "Table 3", "metric": "f1"})
    tables, _, methods = report(tmp_path / "sweep").partition("\n## Methods\n")
    _, first, second = tables.split("\n## Table ")
    assert "| FedAvg | 50.00<br>paper 50 (+0.0) |" in first
    assert "| FedAvg | 70.00<br>paper 75 (-5.0) |" in second
    for words in ("paper.metric", "| MOON | 80.0 | - | 1 |", "| SCAFFOLD | 90.0 | - | 1 |"):
        assert words in methods
    assert (tmp_path / "sweep" / "report" / "report_2_scores.png").exists()


@pytest.mark.usefixtures("no_pictures")
def test_an_experiment_file_lays_out_other_runs(write_run, tmp_path):
    write_run("fedavg", 0, (0.1, 0.5), task__name="cifar10", task__model="resnet8")
    text = report(tmp_path / "sweep", "--experiment", "fedpvr/table3_cifar10")
    cells = "not run<br>paper 69.3 | not run<br>paper 80.9 | 50.00<br>paper 64.9 (-14.9)"
    assert f"| FedAvg | {cells}" in text


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_papers_figures_are_collected_once_and_their_absence_is_said(
    write_run, tmp_path, monkeypatch, capsys
):
    """The package of ``reproductions/`` that ``paper.name`` names makes them."""
    collected = []

    def collect(folder, settings, say):
        say(f"reading {folder.name}")
        collected.append((folder.name, settings["seed"]))
        return {"seed": settings["seed"]} if settings["seed"] else None

    def sections(layout, partitions, stem):
        ((label, run, _),) = first_runs(layout, lambda run: run.figures)
        return [Paragraph(f"{label} has {run.figures['somebody']} in {stem.name}")]

    paper = {"name": "somebody", "columns": {"all": {}}, "rows": {"A": {"published": [1]}}}
    for seed in (2, 1, 0):
        write_run("fedavg", seed, name=f"seed{seed}", paper=paper)
    package = SimpleNamespace(collect=collect, sections=sections)
    monkeypatch.setattr(paper_figures, "package", lambda name: package)
    text = report(tmp_path / "sweep")
    assert collected == [("seed0", 0), ("seed1", 1)]  # the first seed that has them
    assert "reading seed1 ..." in capsys.readouterr().err
    expected = "FedAvg (not in the paper's table) · all has {'seed': 1} in report"
    assert expected in text
    data = tmp_path / "sweep" / "report" / "report.json"
    again = tmp_path / "again"
    report(data, "--out", again / "report")
    assert expected in (again / "report" / "report.md").read_text()
    assert len(collected) == 2
    monkeypatch.undo()
    report(data, "--out", again / "report")
    missing = "The paper's own figures are missing: reproductions/somebody is not installed."
    assert missing in (again / "report" / "report.md").read_text()


STATUSES = {"diverged": "the loss is nan", "stopped": "by Ctrl-C", "failed": "a node died"}


@pytest.mark.usefixtures("no_pictures")
def test_what_a_run_had_that_did_not_complete_is_shown_with_its_status(write_run, tmp_path):
    for seed, (status, error) in enumerate(STATUSES.items()):
        ended = {"status": status, "error": error}
        write_run("fedavg", seed, (0.1, 0.3 + seed / 100), summary=ended, local__lr=seed + 0.1)
    text = report(tmp_path / "sweep")
    for seed, (status, error) in enumerate(STATUSES.items()):
        accuracy = f"{30 + seed}.00"
        assert f"{status} after round 1: {accuracy}" in text
        assert f"| {seed} | {status} | 1 | {accuracy} | {accuracy} |" in text  # under Runs
        assert f"| {status} | {error} |" in text
        verb = "stopped before the end" if status == "stopped" else status
        assert f"1 of 3 runs {verb}: " in text


def test_a_run_that_did_not_complete_has_a_curve_as_far_as_it_came(finished_run, tmp_path):
    ended = {"status": "stopped"}
    whole, cut = finished_run("fedavg", 0), finished_run("fedavg", 1, (0.1, 0.2), summary=ended)
    layout = automatic_layout([whole, cut])
    keys = keys_of(list(layout.methods.items()))
    quantity = Quantity(lambda run: dict(run.points("accuracy")))
    (panel,) = line_panels(layout, keys, [quantity], incomplete=True)
    mean, line = panel.curves
    assert (line.completed, line.points["mean"].to_dict()) == (False, {0: 0.1, 1: 0.2})
    assert (mean.completed, mean.runs) == (True, 1)
    blocks = scores(automatic_layout([cut]), keys, None, (), tmp_path / "page")
    assert "A cross: the end of a run that is not completed." in blocks[1].caption


@pytest.mark.slow
def test_metrics_have_curves_and_tables_of_their_own(write_run, tmp_path, panels):
    def titles(kind):
        return [panel.title for panel in panels.get(kind, [])]

    for seed, f1 in enumerate((0.4, 0.6)):
        write_run(seed=seed, columns={"f1": f1, "client_f1": 0.3, "f1/cat": f1 / 2, "f1/dog": f1})
    text = report(tmp_path / "sweep")
    assert titles("metrics") == ["F1", "client F1"]
    assert not {"F1", "client F1"} & set(titles("diagnostics"))
    # .4 and .6: mean .5, sample sd sqrt(.02) = .1414
    spread = "0.5000 ± 0.1414"
    assert "| method | n | F1 | best F1 | client F1 | best client F1 |" in text
    assert f"| FedAvg | 2 | {spread} | {spread} | 0.3000 ± 0.0000 | 0.3000 ± 0.0000 |" in text
    assert "| class | FedAvg |" in text
    assert f"| dog | {spread} |" in text
    write_run(seed=2, columns={"accuracy/cat": 0.25})  # without the metric
    text = report(tmp_path / "sweep")
    assert titles("metrics") == ["F1", "client F1"]
    assert "accuracy of each class after the last round" in text
    assert "| cat | 0.2500 (n = 1) |" in text


def measured_by_clients(folder):
    """Turn a run into one that the clients alone have evaluated."""
    rows = [
        {f"client_{name}" if name in ("accuracy", "loss") else name: v for name, v in row.items()}
        for row in read_rows(folder / "metrics.jsonl")
    ]
    write_rows(folder / "metrics.jsonl", rows)
    summary = json.loads((folder / "summary.json").read_text())
    nothing = {"accuracy": None, "best_accuracy": None}
    (folder / "summary.json").write_text(json.dumps(summary | nothing))


@pytest.mark.slow
def test_what_clients_alone_have_measured_is_not_said_to_be_of_the_test_set(
    write_run, tmp_path, panels
):
    measured_by_clients(write_run())
    text = report(tmp_path / "sweep")
    assert [panel.y_label for panel in panels["rounds"]] == ["accuracy at the clients (%)"]
    assert text.count("ccuracy at the clients") == 3  # the curves, the targets, final and best
    assert "test set" not in text
    assert "| 0_fedavg_seed0 | FedAvg | 0 | completed | 3 | 50.00 | 60.00 |" in text
    write_run(task__name="cifar10")
    text = report(tmp_path / "sweep")
    assert {panel.y_label for panel in panels["rounds"]} == {"accuracy (%)"}
    assert text.count("ccuracy on the test set or at the clients") == 3
    losses = [panel.title for panel in panels["diagnostics"] if "loss" in panel.title]
    assert losses == ["loss · cifar10", "client loss · digits"]


def test_runs_that_do_not_classify_are_shown_by_their_loss(write_run, tmp_path, panels):
    for seed in (0, 1):
        folder = write_run(seed=seed, columns={"loss": 30.0 + seed})
        rows = [{**row, "loss": row["loss"] / (1 + row["round"])} for row in rows_of(folder)]
        write_rows(folder / "metrics.jsonl", rows)
    text = report(tmp_path / "sweep")
    [panel] = panels["rounds"]
    assert (panel.y_label, panel.marks) == ("test loss", [])
    assert list(panel.curves[0].points["mean"]) == pytest.approx(
        [2.0, 15.25, 30.5 / 3, 7.625], rel=1e-5
    )
    assert "loss" not in [panel.title for panel in panels.get("diagnostics", [])]
    assert "| 0_fedavg_seed0 | FedAvg | 0 | completed | 3 | 7.5 | 2 |" in text  # final and best
    assert "### Loss" in text
    assert "ccuracy" not in text


def rows_of(folder):
    """Return a run's rows as one has them that is not of a classification."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name != "accuracy"} for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_different_code_refusals_and_jobs_that_left_nothing_are_warned_of(write_run, tmp_path):
    write_run("fedavg", 0, name="0_fedavg")
    other = {"fedhet": "0.1.0", "torch": "2.16.0"}
    write_run("fedavg", 1, summary={"versions": other, "failures": 2})
    write_run("fedavg", 2, summary={"fingerprint": {"recipe": "r", "code": "code2"}})
    jobs = [
        {"folder": "8_fedavg", "status": "failed", "error": "unknown key"},
        {"folder": "0_fedavg", "status": "completed"},
        {"folder": "9_fedavg", "status": "completed"},
        {"folder": "10_fedavg", "status": "running"},
    ]
    index = {"overrides": ["strategy=fedavg,scaffold", "seed=0,1"], "jobs": jobs}
    index |= {"status": "stopped", "total": 4, "began": "2026-11-28"}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(index))
    text = report(tmp_path / "sweep")
    for words in (
        "different versions of torch: 2.15.0 (0_fedavg and 1 more); 2.16.0 (1_fedavg_seed1)",
        "code of the runs differs, fedhet's or that of your own packages (recipes may name",
        "different ones): code1 (0_fedavg and 1 more); code2 (2_fedavg_seed2)",
        "2 replies of clients were refused or missing",
        "Jobs of the sweep without results: 8_fedavg: unknown key; 9_fedavg: its folder is missing",
        "The sweep sweep was stopped: 3 of its 4 jobs are done. fedhet -m --resume "
        f"{tmp_path / 'sweep'} continues it.",
        "fedhet -m strategy=fedavg,scaffold seed=0,1",
    ):
        assert words in text
    assert "10_fedavg" not in text
    _, left_out = completed_runs([tmp_path / "sweep"])
    assert left_out[0] == "left out: 8_fedavg: unknown key"
    assert left_out[1].startswith("left out: 9_fedavg: its folder is missing or empty, though")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("index", ['{"jobs": 5, "overrides": 3, "status": []}', '{"jobs": [5]}'])
def test_a_sweep_json_that_is_none_is_taken_for_missing(write_run, tmp_path, index):
    write_run()
    (tmp_path / "sweep" / "sweep.json").write_text(index)
    assert "1 run, 1 of them completed" in report(tmp_path / "sweep")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("nowhere", 1, "nowhere is not a folder"),
        (".", 1, "has no run"),
        (
            "../model",
            1,
            "../model is not a data file of fedhet-report: 'utf-8' codec can't decode",
        ),
        ("../sweep --by partition.alfa", 1, "alfa is unknown; the runs' keys are: clients"),
        ("../sweep --targets abc", 2, "abc is not an accuracy in (0, 1]; 30 % is 0.3"),
        ("../sweep --targets 30", 2, "30 is not an accuracy in (0, 1]; 30 % is 0.3"),
        ("../sweep --baseline moon", 1, "moon is unknown; allowed: fedavg, FedAvg, scaffold"),
        ("../sweep --experiment fedpvr/x", 2, "fedpvr/x is unknown; allowed: "),
    ],
)
@pytest.mark.usefixtures("sweep")
def test_bad_input_ends_with_the_reason(tmp_path, monkeypatch, capsys, words, code, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").write_bytes(b"\xe8\x01" * 8)
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(SystemExit) as end:
        report(*words.split())
    assert end.value.code == code
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_command_does_not_import_torch():
    code = "import sys, fedhet.report.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
