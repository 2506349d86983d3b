"""Columns that sites fit together: the exchange before round 1, and what a site may send in it."""

import json
from copy import deepcopy

import numpy as np
import pandas
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedhet.server_app.columns import FILE, bounded, decode_statistics
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.wire.records import CATEGORIES, COLUMNS, to_record, to_tensors
from fedhet.tasks.column_statistics import ColumnStatistics, merged
from fedhet.tools.evaluate import evaluate
from tests.recipes import run_recipe
from tests.refused import refused

SITES = 3
RECIPE = (
    *("task=tabular", "task.data_options.fit=federated", "task.target=income"),
    *("task.data_options.numeric=[age]", "task.data_options.categorical=[town]"),
    *("task.classes=[low,high]", "partition=site", "partition.holdout=0.25", f"clients={SITES}"),
    *("local.epochs=2", "local.batch_size=8"),
)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Write a folder for each site; the last one alone has the town of Bonn."""
    folder = tmp_path_factory.mktemp("sites")
    rng = np.random.default_rng(0)
    for site in range(SITES):
        high = rng.random(40) < 0.5
        towns = rng.choice(["Oslo", "Rome", "Bonn"][: 2 + (site == 2)], 40)
        age = rng.normal(30 + 20 * high, 5 + site)
        income = np.where(high, "high", "low")
        table = pandas.DataFrame({"age": age, "town": towns, "income": income})
        (folder / str(site)).mkdir()
        table.to_csv(folder / str(site) / "train.csv", index=False)
    return folder


def run(sites, folder, *words, **how):
    def node_config(client):
        return {"data-folder": str(sites / str(client))}

    return run_recipe(folder, *RECIPE, *words, node_config=node_config, **how)


@pytest.mark.slow
def test_a_run_fits_the_training_rows_of_all_sites_and_is_resumed_with_the_same(sites, tmp_path):
    summary = run(sites, tmp_path, "rounds=3")
    assert summary["client_accuracy"] > 0.8
    found = json.loads((tmp_path / FILE).read_text())
    tables = [pandas.read_csv(sites / str(site) / "train.csv") for site in range(SITES)]
    ages = pandas.concat(tables).age
    # A quarter of each site's 40 rows is held out: the fit is on the other 90, about as their mean.
    assert found["rows"] == found["counts"][0] == 90
    assert found["means"][0] == pytest.approx(ages.mean(), abs=2)
    assert found["categories"] == [["Bonn", "Oslo", "Rome"]]
    (tmp_path / FILE).write_text(json.dumps(found | {"means": [0.0]}) + "\n")
    with refused("columns"):
        run(sites, tmp_path, "rounds=4", "resume=true")
    (tmp_path / FILE).write_text(json.dumps(found) + "\n")
    assert run(sites, tmp_path, "rounds=4", "resume=true")["rounds"] == 4
    one = sites / "2" / "train.csv"
    task = [f"path={one}", "test_data=fedhet.tasks.tabular:load_test"]
    assert (
        evaluate(tmp_path, task).examples == 40
    )  # with the columns that the model was stored with


@pytest.mark.slow
def test_a_site_that_sends_nonsense_is_left_out_of_the_fit(sites, tmp_path, caplog):
    def tamper(reply):
        if CATEGORIES in reply.content and len(reply.content[CATEGORIES]["town"]) == 3:
            reply.content[CATEGORIES]["town"] = ["Oslo", "Oslo"]
        return reply

    run(sites, tmp_path, "rounds=1", tamper=tamper)
    assert json.loads((tmp_path / FILE).read_text())["categories"] == [["Oslo", "Rome"]]
    assert "columns of client 2: refused: its categories of town must be different" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("words", ["class_weights=balanced", "loss=focal"])
def test_a_weighted_loss_at_private_sites_and_an_unseen_site_is_not_in_the_fit(
    sites, tmp_path, words
):
    """Weights come from each site's own labels: nothing but the update leaves the site."""
    sent = []

    def tamper(reply):
        sent.append(set(reply.content))
        return reply

    summary = run(
        sites, tmp_path, "rounds=3", f"task.{words}", "partition.unseen=[2]", tamper=tamper
    )
    assert summary["client_accuracy"] > 0.8
    found = json.loads((tmp_path / FILE).read_text())
    assert (found["rows"], found["categories"]) == (60, [["Oslo", "Rome"]])  # without Bonn
    assert {"update", "metrics"} in sent
    assert set().union(*sent) == {"client", COLUMNS, CATEGORIES, "update", "metrics"}


def part(mean=30.0, deviation=9.0, rows=90, categories=("Oslo", "Rome")):
    squares = np.array([deviation**2 * rows])
    return ColumnStatistics(rows, np.array([float(rows)]), np.array([mean]), squares, (categories,))


def test_usual_sites_have_the_statistics_of_the_pooled_rows():
    parts = {0: part(), 1: part(34.0, 5.0), 2: part(50.0, 12.0, categories=("Bonn", "Rome"))}
    assert bounded(parts, ["age"], ["town"]) == parts
    assert bounded({0: part(), 1: part(3e6)}, ["age"], ["town"])[1].means == [3e6]  # of two sites


LIES = {
    "squares x 100": (part(deviation=90.0), 2.7),
    "squares x 1e6": (part(deviation=9e3), 2.7),
    "mean x 3": (part(mean=90.0), 2.6),
    "mean x 1000": (part(mean=3e4), 2.6),
    "rows x 1e9": (part(mean=90.0, rows=90_000_000_000), 3.4),
}


@pytest.mark.parametrize("name", LIES)
def test_what_one_site_moves_is_bounded_and_its_name_said(name, caplog):
    """A lie of one site in four widens the common deviation at most so many times."""
    lie, most = LIES[name]
    honest = {client: part(mean) for client, mean in enumerate([29.0, 30.0, 31.0])}
    kept = bounded({**honest, 3: lie}, ["age"], ["town"])
    assert all(kept[client] is honest[client] for client in honest)
    whole = merged(list(kept.values()), ["town"])
    assert whole.variances()[0] ** 0.5 < most * 9
    assert abs(whole.means[0] - 30) < 2.6 * 9
    assert "columns of client 3" in caplog.text


def test_sites_may_have_categories_of_their_own_as_many_as_is_usual(caplog):
    def own(site, count):
        return part(categories=("Oslo", *(f"{site}-{n:03}" for n in range(count))))

    parts = {site: own(site, 30) for site in range(3)}
    assert bounded(parts, ["age"], ["town"]) == parts
    kept = bounded({**parts, 3: own(3, 900)}, ["age"], ["town"])
    assert kept[3].categories == (("Oslo",),)
    assert "columns of client 3: town has 900" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["strategy/secure_aggregation=secagg_plus", "strategy/differential_privacy=local"]
)
def test_a_fit_that_shows_single_sites_is_refused_where_they_are_hidden(sites, tmp_path, word):
    with refused("strategy/", "fit=public"):
        run(sites, tmp_path, word)


def answer():
    arrays = {"rows": [9.0], "counts": [8.0, 0.0], "means": [1.5, 0.0], "squares": [2.0, 0.0]}
    tensors = {name: np.array(value) for name, value in {**arrays, "missing": [1.0]}.items()}
    record = to_record({name: torch.from_numpy(value) for name, value in tensors.items()})
    return RecordDict({COLUMNS: record, CATEGORIES: ConfigRecord({"town": ["Rome", "Oslo"]})})


def test_what_a_site_may_send():
    found = decode_statistics(answer(), 2, ["town"])
    assert (found.rows, found.categories) == (9, (("Oslo", "Rome", None),))
    assert found.variances().tolist() == [2 / 9, 0]


WRONG = [
    ("rows", [0.0], "its rows are 0: they must be a whole number from 1"),
    ("rows", [1e30], "its rows are 1e"),
    ("counts", [10.0, 0.0], "counts must be whole numbers from 0 to 9"),
    ("counts", [-1.0, 0.0], "counts must be whole numbers"),
    ("counts", [0.5, 0.0], "counts must be whole numbers"),
    ("counts", [1.0], "has shape"),
    ("means", [np.nan, 0.0], "holds NaN or Inf"),
    ("means", [1e120, 0.0], "means must be within 1e"),
    ("squares", [-1.0, 0.0], "squares at least 0"),
    ("squares", [1e250, 0.0], "holds 1e"),
    ("missing", [0.5], "missing must be 0 or 1"),
    ("more", [1.0], "unknown ones"),
    ("town", None, "other columns"),
    ("town", "Rome", "a list of text"),
    ("town", [1, 2], "a list of text"),
    ("town", ["x" * 201], "at most 200 characters"),
    ("town", [str(n) for n in range(1001)], "at most 1000"),
    ("town", ["Rome", "Rome"], "must be different ones"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG, ids=[said for *_, said in WRONG])
def test_what_a_site_may_not_send(name, value, said):
    content = deepcopy(answer())
    if name == "town":
        content[CATEGORIES] = ConfigRecord({} if value is None else {"town": value})
    else:
        tensors = to_tensors(content[COLUMNS]) | {name: torch.tensor(value, dtype=torch.float64)}
        content[COLUMNS] = to_record(tensors)
    with refused(said, kind=RefusedReplyError):
        decode_statistics(content, 2, ["town"])


def test_other_records_and_none_are_refused():
    with refused("'x'", kind=RefusedReplyError):
        decode_statistics(RecordDict({**answer(), "x": ConfigRecord()}), 2, ["town"])
    with refused("columns", kind=RefusedReplyError):
        decode_statistics(RecordDict({}), 2, ["town"])
