"""The page's part by site: numbers computed by hand."""

import json

import pandas as pd
import pytest

from fedhet.common.decisions import Decisions
from fedhet.common.results import BY_SITE
from fedhet.report import by_site
from fedhet.report.blocks import Heading, Paragraph, Table
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from fedhet.report.site_data import Site, SiteFigures

SITES = (Site(0, "Bern", 100, 20), Site(1, "Basel", 300, 60), Site(2, "Genf", 50, 10, unseen=True))
FIGURES = SiteFigures(
    SITES,
    shared={"accuracy": [0.9, 0.7, 0.5], "loss": [0.1, 0.2, 0.3], "f1": [0.8, 0.6, None]},
    own={"accuracy": [0.8, 0.75, None]},
    models=(0, 1),
    matrix={"accuracy": [[0.8, 0.4, 0.3], [0.6, 0.75, 0.2]]},
    decisions=Decisions(
        ["well", "ill"],
        [[40, 10], [5, 35]],
        threshold=0.25,
        thresholds=[0.3, 0.2, 0.4],
        at_threshold=[[8, 2, 1, 9], [20, 10, 0, 30], None],
    ),
)


def tables_of(blocks):
    return [block for block in blocks if isinstance(block, Table)]


def row_of(table, name):
    found = [row for row in table.rows if row[0].text == name]
    return dict(zip(table.head, found[0], strict=True))


def test_each_site_has_its_figures_and_the_worst_one_is_named():
    blocks = by_site.site_blocks([by_site.Measured("FedAvg", [FIGURES])])
    accuracy, spread, f1, _, *_ = tables_of(blocks)
    assert accuracy.head == ["site", "examples", "evaluated on", "FedAvg", "FedAvg, own models"]
    genf = row_of(accuracy, "Genf")
    assert (genf["examples"].text, genf["evaluated on"].text) == ("60", "10")
    assert (genf["FedAvg"].text, genf["FedAvg"].under) == ("50.0", "lowest, never trained")
    assert genf["FedAvg, own models"].text == "-"
    bern = row_of(accuracy, "Bern")
    assert (bern["FedAvg"].text, bern["FedAvg, own models"].text) == ("90.0", "80.0")
    assert row_of(accuracy, "Basel")["FedAvg, own models"].under == "lowest"
    assert row_of(f1, "Basel")["FedAvg"].text == "0.600"
    found = row_of(spread, "FedAvg")
    assert (found["sites"].text, found["mean"].text, found["median"].text) == ("3", "70.0", "70.0")
    # with three values, the quantile q lies at 2 q of the way: 50 + 0.2 * 20
    assert [found[name].text for name in ("10 %", "25 %", "75 %", "90 %")] == [
        *("54.0", "60.0", "80.0", "86.0")
    ]
    assert (found["worst site"].text, found["worst site"].under) == ("50.0", "Genf")
    assert (found["best site"].text, found["best site"].under) == ("90.0", "Bern")
    assert (found["range"].text, found["std. dev."].text) == ("40.0", "20.0")
    said = [block.text for block in blocks if isinstance(block, Paragraph)]
    assert any("better at Bern, and worse at Basel" in text for text in said)


def test_of_an_error_the_worst_site_has_the_largest():
    figures = SiteFigures(SITES, shared={"loss": [1.0, 3.0, 2.0]})
    sites, spread = tables_of(by_site.site_blocks([by_site.Measured("FedAvg", [figures])]))
    assert row_of(sites, "Basel")["FedAvg"].under == "highest"
    assert row_of(spread, "FedAvg")["worst site"].under == "Basel"


def test_each_sites_model_at_every_site():
    blocks = by_site.site_blocks([by_site.Measured("FedAvg", [FIGURES])])
    place = blocks.index(Heading(3, by_site.CROSS_SITE))
    [table, *_] = tables_of(blocks[place:])
    assert table.head == ["model", "Bern", "Basel", "Genf"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["shared", "90.0", "70.0", "50.0"],
        ["Bern's own", "80.0", "40.0", "30.0"],
        ["Basel's own", "60.0", "75.0", "20.0"],
    ]
    assert [row[1].under for row in table.rows] == ["", "own", ""]
    assert "Never trained: Genf" in table.caption


def test_answers_and_those_at_the_threshold_of_the_other_sites():
    blocks = by_site.site_blocks([by_site.Measured("FedAvg", [FIGURES])])
    place = blocks.index(Heading(3, by_site.ANSWERS))
    counts, at_threshold = tables_of(blocks[place:])
    assert [[cell.text for cell in row] for row in counts.rows] == [
        ["is well", "40", "10"],
        ["is ill", "5", "35"],
    ]
    bern, everywhere = (row_of(at_threshold, name) for name in ("Bern", "all sites"))
    assert [bern[name].text for name in ("threshold", "sensitivity (%)", "specificity (%)")] == [
        *("0.300", "90.0", "80.0")
    ]
    # 39 of 40 ill ones found, 28 of 40 well ones cleared
    assert (everywhere["found"].text, everywhere["missed"].text) == ("39", "1")
    assert (everywhere["sensitivity (%)"].text, everywhere["specificity (%)"].text) == (
        *("97.5", "70.0"),
    )
    assert len(at_threshold.rows) == 3  # nothing could be evaluated in Genf
    assert "0.250" in at_threshold.caption


@pytest.mark.parametrize("flavour", ["natural", "dirichlet"])
def test_seeds_are_averaged_only_where_their_sites_are_the_same(flavour, write_run):
    """Client 0 of another Dirichlet draw is another client."""
    runs = []
    for seed, values in enumerate(([0.4, 0.6], [0.6, 0.8])):
        folder = write_run(seed=seed, partition__name=flavour, name=str(seed))
        summary = json.loads((folder / "summary.json").read_text())
        summary["parameters_sha256"] = str(seed)
        (folder / "summary.json").write_text(json.dumps(summary))
        figures = SiteFigures(
            SITES[:2], {"accuracy": values}, parameters_sha256=str(seed), task=["path=/data/new"]
        )
        figures.save(folder)
        runs.append(read_run(folder, folder.name, 0))
    sites, _ = tables_of(by_site.by_site(automatic_layout(runs)))
    expected = "50.0 ± 14.1" if flavour == "natural" else "40.0"
    assert row_of(sites, "Bern")["FedAvg"].text == expected
    assert ("first seed" in sites.caption) == (flavour == "dirichlet")
    assert "--task path=/data/new" in sites.caption


def test_figures_come_from_rows_and_those_of_another_model_are_left_out(write_run, tmp_path):
    folder = write_run(columns={"per_client": {"client_accuracy": {"0": 0.25, "1": 0.75}}})
    FIGURES.save(folder)  # of no known model
    sites = [{**vars(SITES[1]), "client": 1}]
    (folder / "sites.json").write_text(json.dumps({"sites": sites}))
    run = read_run(folder, "run", 0)
    assert [site.label for site in run.sites.sites] == ["client 0", "Basel"]
    assert run.sites.shared == {"accuracy": [0.25, 0.75]}
    again = parse(to_text(ReportData([run])), "report.json").runs[0]
    assert again.sites == run.sites
    (folder / BY_SITE).write_text("{")
    assert read_run(folder, "run", 0).sites is None  # it cannot be read


def test_of_many_sites_the_lowest_are_shown():
    count = by_site.MOST_SITES + 5
    sites = tuple(Site(client, examples=10, held_out=5) for client in range(count))
    figures = SiteFigures(sites, {"accuracy": [1 - client / count for client in range(count)]})
    table, spread = tables_of(by_site.site_blocks([by_site.Measured("FedAvg", [figures])]))
    assert [row[0].text for row in table.rows][:2] == ["client 5", "client 6"]
    assert len(table.rows) == by_site.MOST_SITES
    assert row_of(spread, "FedAvg")["sites"].text == str(count)
    assert isinstance(table.frame, pd.DataFrame)
