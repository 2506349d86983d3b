"""Tables against numbers that are worked out here by hand."""

import numpy as np
import pandas
import pytest
import torch
import yaml
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from fedhet.tasks import tabular
from fedhet.tasks.column_statistics import MOST_CATEGORIES, ColumnStatistics, merged
from fedhet.tasks.losses import balanced, cross_entropy, focal, weighted
from fedhet.tasks.table_columns import Columns, labels_of, names_in
from tests.refused import refused
from tests.tasks.plain import SITE, task_of

ROWS = """age,town,member,income
20,Oslo,yes,low
40,Rome,no,high
,Rome,,low
30,Paris,yes,high
"""
# Of the first two rows: the mean of age is 30 and its standard deviation 10.
AGE = [-1.0, 1.0, 0.0, 0.0]
TOWN = [[1, 0], [0, 1], [0, 1], [0, 0]]  # Oslo, Rome; Paris is not in the public part
MEMBER = [[0, 1], [1, 0], [0, 0], [0, 1]]  # no, yes; nothing is not in the public part
INPUTS = np.column_stack([AGE, TOWN, MEMBER])
CLASSES = ["low", "high"]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    return path


def all_rows(path, **options):
    given = {"target": "income", "public": 2, "classes": CLASSES, "test_fraction": 0.0} | options
    return tabular.load(path=str(path), **given)[0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_fitted_on_the_public_rows_alone(table, tmp_path, kind):
    path = table
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pandas.read_csv(table).to_parquet(path)
    inputs, targets = all_rows(path)
    np.testing.assert_array_equal(inputs, INPUTS.astype(np.float32))
    assert targets.tolist() == [0, 1, 0, 1]


def test_a_file_with_public_rows_is_the_same_as_so_many_first_rows(table, tmp_path):
    public = tmp_path / "public.csv"
    public.write_text("".join(ROWS.splitlines(keepends=True)[:3]))
    inputs, _ = all_rows(table, public=str(public))
    np.testing.assert_array_equal(inputs, INPUTS.astype(np.float32))


def test_a_missing_category_of_the_public_part_is_a_category(table):
    inputs, _ = all_rows(table, public=4, categorical=["member"], numeric=[])
    assert inputs.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]  # no, yes, nothing


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_seconds_in_whatever_unit_a_file_has_them(unit):
    times = pandas.to_datetime(["1970-01-01 00:01:00", "1970-01-01 00:03:00", None])
    rows = {
        "seen": times.as_unit(unit),
        "at_home": times.as_unit("ns").tz_localize("Europe/Berlin").as_unit("us"),
        "stayed": pandas.to_timedelta([2, 4, 9], unit="h").as_unit(unit),
        "y": [0.0, 1.0, 2.0],
    }
    table = pandas.DataFrame(rows)
    columns = Columns.named("y", *names_in(table, "y", None, None)).fit(table)
    assert columns.prepared(table).to_numpy()[:2].tolist() == [
        [60.0, 60.0 - 3600, 7200.0],
        [180.0, 180.0 - 3600, 14400.0],
    ]
    assert np.isnan(columns.prepared(table).to_numpy()[2, :2]).all()
    assert [found["mean"] for found in columns.inputs()] == [120.0, 120.0 - 3600, 18000.0]


def test_a_whole_number_is_the_same_category_beside_a_missing_value():
    """For which pandas reads the column as 1.0, 2.0 and NaN."""
    whole = pandas.DataFrame({"ward": [1, 2, 3], "grade": [1.5, 2.0, -1.0], "y": [0.0, 1.0, 2.0]})
    columns = Columns.named("y", [], ["ward", "grade"]).fit(whole)
    assert [found["category"] for found in columns.inputs()] == ["1", "2", "3", "-1", "1.5", "2"]
    missing = pandas.DataFrame({"ward": [2, None, 3], "grade": [2, -1, 2], "y": [0.0, 1.0, 2.0]})
    assert columns.arrays(missing)[0].tolist() == [
        [0, 1, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 1],
    ]
    text = pandas.DataFrame({"ward": ["2.0", "2.05", None], "grade": ["2", "-1.0", "1.5"]})
    text["y"] = ["0.0", "1.0", "2.0"]  # a CSV file's columns of numbers
    assert columns.arrays(text)[0].tolist() == [
        [0, 1, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
    ]


def test_a_regression_has_its_targets_as_they_are(table):
    table.write_text("a,b\n1,0.5\n2,-3\n3,1e3\n")
    inputs, targets = all_rows(table, target="b", kind="regression", classes=None, public=3)
    assert targets.tolist() == [0.5, -3, 1000]
    np.testing.assert_allclose(inputs[:, 0], [-(1.5**0.5), 0, 1.5**0.5], rtol=1e-6)


def test_a_class_that_is_a_whole_number_may_be_written_as_a_float(table):
    table.write_text("a,b\n1,0.0\n2,1.0\n3,1\n")
    assert all_rows(table, target="b", classes=["1", "0"])[1].tolist() == [1, 0, 0]
    table.write_text("a,b\n1,0.0\n2,0\n3,0.5\n")
    assert all_rows(table, target="b", classes=["0", "0.0", "0.5"])[1].tolist() == [1, 0, 2]


def test_one_file_is_split_always_in_the_same_way(table):
    table.write_text("a,b\n" + "".join(f"{row},{row}\n" for row in range(10)))
    options = {"target": "b", "kind": "regression", "public": 10, "test_fraction": 0.3}
    (_, train), (_, test) = tabular.load(path=str(table), **options)
    assert len(test) == 3
    assert sorted([*train, *test]) == list(range(10))
    assert test.tolist() == tabular.load(path=str(table), **options)[1][1].tolist()


WRONG = [
    ({"target": None}, "task.target=null"),
    ({"target": "x"}, "rows.csv"),
    ({"numeric": ["town"]}, "1 task.data_options.categorical"),
    ({"target": "town", "kind": "regression"}, "1 task.kind=classification"),
    ({"numeric": ["town"], "categorical": ["town"]}, "town"),
    ({"classes": ["low"]}, "task.classes"),
    ({"classes": None}, "task.classes=null"),
    ({"target": "member", "classes": ["yes", "no"]}, "1 4"),
    ({"public": 0}, "public=0 1"),
    ({"public": -1}, "public=-1 1"),
    ({"public": True}, "public=true"),
    ({"public": "none.csv"}, "none.csv"),
    ({"test_fraction": 1.0}, "test_fraction=1.0"),
    ({"categorical": [], "numeric": []}, "income"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_is_wrong_is_said_with_the_key(table, options, said):
    with refused(*said.split()):
        all_rows(table, **options)


def test_a_table_that_is_none_is_said(tmp_path):
    with refused("train"):
        all_rows(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"abc")
    with refused("a.parquet"):
        all_rows(tmp_path / "a.parquet")
    with refused("no_such"):
        all_rows(tmp_path / "no_such")
    (tmp_path / "header.csv").write_text("age,income\n")
    with refused("/header.csv"):
        all_rows(tmp_path / "header.csv")
    for name in ("train.csv", "train.parquet"):
        (tmp_path / name).touch()
    with refused("train.csv", "train.parquet"):
        all_rows(tmp_path)


@pytest.mark.parametrize(("public", "row"), [(2, 3), (3, 1)])
def test_a_number_that_float32_has_not_is_said_with_its_row(tmp_path, public, row):
    """It is too large by itself, or it makes the standard deviation too large."""
    path = tmp_path / "rows.csv"
    path.write_text("age,income\n1,low\n2,high\n1e300,low\n")
    with refused("age", f"row {row}"):
        all_rows(path, public=public)


FILES = [
    ("a,b,a\n1,2,3\n", "its header has a twice"),
    (",a,b\n0,1,2\n", "field 1 of its header is empty"),
    ("a,b\n1,2,\n3,4,\n", "more fields than its header, which has 2"),
    ("a,b\n1,2\n3,4,5\n", "Expected 2 fields in line 3, saw 3"),
    ("", "No columns"),
]


@pytest.mark.parametrize(("text", "said"), FILES)
def test_a_csv_whose_columns_pandas_would_guess_is_refused(table, text, said):
    table.write_text(text)
    with refused("rows.csv", said):
        all_rows(table, target="b", kind="regression", classes=None)


@pytest.mark.parametrize(("value", "row"), [("n/a?", 7), ("inf", 2)])
def test_a_value_that_is_no_number_is_named_by_its_row_of_the_file(table, value, row):
    rows = [f"{number},{number}" for number in range(1, 11)]
    rows[row - 1] = f"{value},1"
    table.write_text("\n".join(["a,b", *rows]))
    options = {"target": "b", "kind": "regression", "classes": None, "test_fraction": 0.3}
    with refused("column a", f"row {row}") as said:
        all_rows(table, numeric=["a"], public=1, **options)
    assert value not in str(said.value).removeprefix(str(table))  # a site's error is sent


# ------------------------------------------------------------------------------ a federated fit
NUMERIC, CATEGORICAL = ["age", "score", "empty", "same"], ["town", "member"]


def pooled_rows(count=60):
    """Rows with missing values, a column without any number, and one that never changes."""
    rng = np.random.default_rng(3)
    towns, members = ["Oslo", "Rome", "Paris", "Bonn"], ["yes", "no", None]
    return pandas.DataFrame(
        {
            "age": np.where(rng.random(count) < 0.2, np.nan, rng.normal(4e4, 3.0, count)),
            "score": rng.normal(size=count) * 1e-3,
            "empty": np.full(count, np.nan),
            "same": np.full(count, 0.1),
            "town": rng.choice(towns, count),
            "member": rng.choice(np.array(members, dtype=object), count),
            "income": rng.choice(CLASSES, count),
        }
    )


def in_parts(table):
    """Uneven parts: one of a single row, one without a number in a column that others have."""
    parts = [table.iloc[rows] for rows in np.split(np.arange(len(table)), [1, 20, 50])]
    parts[1] = parts[1].assign(age=np.nan)
    return parts, pandas.concat(parts)


def test_the_statistics_of_all_parts_are_scikit_learns_of_the_pooled_rows():
    parts, pooled = in_parts(pooled_rows())
    names = ("income", NUMERIC, CATEGORICAL, labels_of("classification", CLASSES))
    sent = [Columns.named(*names).statistics(part) for part in parts]
    whole = ColumnStatistics.from_json(merged(sent, CATEGORICAL).to_json())
    found, _ = Columns.of_statistics(whole, *names).arrays(pooled)
    scaled = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    numbers = scaled.fit_transform(pooled[NUMERIC])
    one_hot = OneHotEncoder(sparse_output=False)
    texts = one_hot.fit_transform(pooled[CATEGORICAL].astype(object).replace({np.nan: None}))
    scaler = scaled[1]
    np.testing.assert_allclose(whole.means, scaler.mean_, rtol=1e-13)
    np.testing.assert_allclose(whole.variances(), scaler.var_, rtol=1e-10, atol=1e-20)
    np.testing.assert_allclose(found, np.hstack([numbers, texts]).astype(np.float32), atol=1e-6)
    assert [list(one) for one in whole.categories] == [list(one) for one in one_hot.categories_]
    assert whole.rows == len(pooled)


def test_a_federated_fit_needs_its_columns_named_and_a_column_of_few_categories(table):
    with refused("task.data_options.numeric"):
        all_rows(table, fit="federated")
    with refused("fit=both", "federated", "public"):
        all_rows(table, fit="both")
    names = [f"{number}" for number in range(MOST_CATEGORIES + 1)]
    rows = pandas.DataFrame({"town": names, "income": "low"})
    columns = Columns.named("income", [], ["town"])
    with refused("1001"):
        columns.statistics(rows)


# ------------------------------------------------------------------------------------ as a task
@pytest.mark.slow
def test_sites_read_their_own_folders_and_the_server_needs_the_public_file_alone(table, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "train.csv").write_text(ROWS)
    options = {"target": "income", "public": str(table)}
    task = task_of("tabular", options, SITE, classes=CLASSES)
    assert task.test_data() is None
    assert task.input_shape == (1 + 3 + 3,)  # age; three towns; yes, no, nothing
    train, held_out = task.client_data(1, site_folder=site)
    assert (len(train), len(held_out)) == (3, 1)
    (site / "test.csv").write_text(ROWS)
    train, held_out = task.client_data(1, site_folder=site)
    assert (len(train), len(held_out)) == (4, 4)
    with refused("data-folder"):
        task.client_data(1)
    with_test = {"test_data": "fedhet.tasks.tabular:load_test", "classes": CLASSES}
    for more in ({}, {"client_column": "town"}):  # the server does not ask whose a row is
        task = task_of("tabular", {**options, "path": str(table), **more}, SITE, **with_test)
        assert len(task.test_data()) == 4


def test_sites_must_share_a_public_file(table, tmp_path):
    (tmp_path / "train.csv").write_text(ROWS)
    task = task_of("tabular", {"target": "income"}, SITE, classes=CLASSES)
    with refused("fit=all", "data_options.public", "partition=site"):
        task.client_data(0, site_folder=tmp_path)


def test_the_mlp_has_the_widths_it_is_given(table):
    options = {"path": str(table), "target": "income", "public": 2}
    task = task_of("tabular", options, classes=CLASSES, model_options={"hidden": [7, 3]})
    shapes = [tuple(tensor.shape) for tensor in task.build_model(0).parameters()]
    assert shapes == [(7, 5), (7,), (3, 7), (3,), (2, 3), (2,)]


@pytest.mark.parametrize("wrong", [{"hidden": [0]}, {"mean": float("nan")}, {"std": float("inf")}])
def test_an_mlp_of_no_layer_or_no_scale_is_refused(wrong):
    with refused(f"model_options.{next(iter(wrong))}="):
        tabular.mlp([2], 1, **wrong)


def test_the_mlp_answers_in_the_unit_of_the_targets():
    model = tabular.mlp([2], 1, hidden=[], mean=150.0, std=10.0)
    assert isinstance(model[0], nn.Linear)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0]]))
        model[0].bias.fill_(2.0)
    assert model(torch.tensor([[3.0, 1.0]])).item() == 150 + 10 * (3 - 1 + 2)


# ------------------------------------------------------------------------------------ one line
def test_a_table_tells_its_columns_and_classes(table):
    task = task_of("tabular", {"path": str(table), "target": "income", "test_fraction": 0.25})
    assert task.class_names == ("high", "low")
    assert task.config.data_options["numeric"] == ["age"]
    assert task.config.data_options["categorical"] == ["town", "member"]
    numbers = [f"{n % 12}.0" for n in range(24)]
    table.write_text("\n".join(["a,b", *(f"{n},{n}" for n in numbers)]))
    task = task_of("tabular", {"path": str(table), "target": "b"})
    assert task.class_names == tuple(map(str, range(12)))  # as numbers, not as text
    table.write_text("\n".join(["a,b", *(f"{n},{n / 7}" for n in range(200))]))
    with refused("200", "task.kind=regression"):
        task_of("tabular", {"path": str(table), "target": "b"})
    table.write_text("\n".join(["a,b", *(f"{n},yes" for n in range(9))]))
    with refused("task.target", "task.classes"):
        task_of("tabular", {"path": str(table), "target": "b"})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_a_table_of_a_few_rows_is_read_and_hashed(table, rows):
    table.write_text("a,b\n" + "".join(f"{row},{'yn'[row % 2]}\n" for row in range(rows)))
    options = {"path": str(table), "target": "b"}
    task = task_of("tabular", options, classes=["y", "n"], clients=1)
    assert len(task.client_data(0)[0]) == rows - round(rows / 5)
    assert task.data_used()["train"]["sha256"]


HUGE = "1" + "0" * 400
STRANGE = [("unknown", 57), (HUGE, 30), ("-", 1), ("1e999", 2)]


@pytest.mark.parametrize(("value", "row"), STRANGE, ids=["word", "huge", "dash", "infinite"])
def test_one_value_among_numbers_is_said_with_its_column_and_row(table, value, row):
    rows = [f"{n},{'yn'[n % 2]}" for n in range(100)]
    rows[row - 1] = f"{value},y"
    table.write_text("\n".join(["age,b", *rows]))
    options = {"path": str(table), "target": "b", "test_fraction": 0.0}
    with refused("column age", f"row {row}", "task.data_options.categorical") as error:
        tabular.load(**options, classes=["y", "n"])
    assert value not in str(error.value).split(":", 1)[1]
    for given in ({"numeric": ["age"]}, {"numeric": ["age"], "fit": "public", "public": 5}):
        with refused("column age", f"row {row}"):
            tabular.load(**options, classes=["y", "n"], **given)
    inputs = tabular.load(**options, classes=["y", "n"], categorical=["age"])[0][0]
    assert inputs.shape == (100, 100)


def test_a_column_of_names_is_left_out_and_said(table, caplog):
    rows = [f"p{n},{n},{'yn'[n % 2]}" for n in range(40)]
    table.write_text("\n".join(["name,age,b", *rows]))
    options = {"path": str(table), "target": "b", "classes": ["y", "n"]}
    assert tabular.load(**options)[0][0].shape[1] == 1
    assert "left out" in caplog.text
    assert "name" in caplog.text


def test_a_column_of_dates_is_warned_of(table, caplog):
    rows = [f"2026-01-{1 + n // 2:02},{n % 3},{'yn'[n % 2]}" for n in range(40)]
    table.write_text("\n".join(["seen,ward,b", *rows]))
    options = {"path": str(table), "target": "b", "classes": ["y", "n"], "test_fraction": 0.0}
    assert tabular.load(**options, numeric=[])[0][0].shape[1] == 20 + 3
    assert "seen is taken as categories and has 20 in 40 rows" in caplog.text
    assert "ward is" not in caplog.text


@pytest.mark.parametrize(("mark", "decimal"), [(",", "comma"), (".", "point")])
def test_separated_thousands_are_warned_of_and_no_decimal_point_is_advised(
    mark, decimal, table, caplog
):
    def costs(*values: str) -> dict[str, object]:
        rows = [f"{value};{'yn'[n % 2]}" for n, value in enumerate(values * 8)]
        table.write_text("\n".join(["cost;b", *rows]))
        options = {"path": str(table), "target": "b", "classes": ["y", "n"], "separator": ";"}
        return options | {"test_fraction": 0.0}

    for fine in ((f"0{mark}250", "1", "2"), (f"1{mark}25", f"3{mark}125", "2")):
        tabular.load(**costs(*fine), decimal=decimal)
        assert "thousands" not in caplog.text
    thousands = costs("950", f"1{mark}250", f"12{mark}000")
    tabular.load(**thousands, decimal=decimal)
    assert "cost" in caplog.text
    assert "thousands" in caplog.text
    if decimal == "comma":
        with refused("cost", "thousands", "task.data_options.categorical") as error:
            tabular.load(**thousands)
        assert "decimal" not in str(error.value)


def test_a_column_that_holds_lists_is_refused_and_a_stored_index_is_a_column(tmp_path):
    path = tmp_path / "rows.parquet"
    frame = pandas.DataFrame({"age": range(8), "icd": [["I10", "E11"]] * 8, "y": ["a", "b"] * 4})
    frame.to_parquet(path)
    options = {"path": str(path), "target": "y", "classes": ["a", "b"], "test_fraction": 0.0}
    with refused(str(path), "icd", "task.data_options.categorical"):
        tabular.load(**options)
    frame.drop(columns="icd").set_index("age").to_parquet(path)
    inputs, _ = tabular.load(**options)[0]
    np.testing.assert_allclose(inputs[:, 0], StandardScaler().fit_transform(frame[["age"]])[:, 0])


def test_columns_in_another_order_are_the_same(table, tmp_path):
    whole = pandas.read_csv(table)
    whole[whole.columns[::-1]].to_csv(tmp_path / "b.csv", index=False)
    options = {"numeric": ["age"], "categorical": ["town", "member"]}
    found = [all_rows(path, **options)[0] for path in (table, tmp_path / "b.csv")]
    np.testing.assert_array_equal(*found)


# ------------------------------------------------------------------------------ clients by column
WARDS = [f"{n},{'cab'[n % 3]},{'yn'[n % 2]}" for n in range(60)]
NATURAL = {"name": "natural"}


@pytest.mark.parametrize("order", [1, -1])
def test_clients_are_the_sorted_values_of_a_column_whatever_the_order_of_the_rows(table, order):
    table.write_text("\n".join(["age,ward,y", *WARDS[::order]]))
    options = {"path": str(table), "target": "y", "client_column": "ward"}
    task = task_of("tabular", options, NATURAL, clients=3)
    assert task.client_names == ("a", "b", "c")
    assert task.input_shape == (1,)  # the column is no input
    sizes = [[len(one) for one in task.client_data(client)] for client in range(3)]
    assert sizes == [[16, 4]] * 3  # a fifth of each client's rows is for testing
    assert len(task.test_data()) == 12
    with refused("clients=4", "3"):
        task_of("tabular", options, NATURAL, clients=4).client_data(0)


def test_a_folder_with_a_file_for_each_site_has_their_names(tmp_path, caplog):
    for ward in "cab":
        rows = [row.replace(f",{ward},", ",") for row in WARDS if f",{ward}," in row]
        ending = "CSV" if ward == "b" else "csv"
        (tmp_path / f"{ward}.{ending}").write_text("\n".join(["age,y", *rows]))
    options = {"path": str(tmp_path), "target": "y"}
    task = task_of("tabular", options, NATURAL, clients=3)
    assert task.client_names == ("a", "b", "c")
    assert task.about[-1].endswith("site (task.client_column) has 3 values")
    assert [len(task.client_data(client)[0]) for client in range(3)] == [16, 16, 16]
    assert task.input_shape == (1,)
    (tmp_path / "d.csv").write_text("y\ny\nn\n")
    task = task_of("tabular", options, NATURAL, clients=4)
    assert task.client_names[3] == "d"
    assert "d.csv has no column age" in caplog.text
    (tmp_path / "c.csv").write_text("age,y\n" + "30,y\n" * 20 + "old,n\n")
    with refused("c.csv", "age", "row 21"):
        task_of("tabular", options, NATURAL, clients=4).client_data(0)


def test_a_row_of_nobody_is_refused(table):
    table.write_text("\n".join(["age,ward,y", *WARDS, "1,,y"]))
    options = {"target": "y", "client_column": "ward", "path": str(table), "test_fraction": 0.0}
    with refused("row 61", "ward", "task.client_column"):
        tabular.load(**options, classes=["y", "n"])
    with refused("no column bed", "task.client_column"):
        tabular.load(**{**options, "client_column": "bed"}, classes=["y", "n"])


def test_unseen_clients_are_named_by_id_or_by_what_their_rows_say(table):
    table.write_text("\n".join(["age,ward,y", *WARDS]))
    options = {"path": str(table), "target": "y", "client_column": "ward"}
    task = task_of("tabular", options, {**NATURAL, "unseen": ["c", 0]}, clients=3)
    assert task.unseen_clients() == {0, 2}
    with refused("partition.unseen", "d", "a, b, c"):
        task_of("tabular", options, {**NATURAL, "unseen": ["d"]}, clients=3).unseen_clients()


def test_a_site_gives_the_name_that_its_rows_have(table, tmp_path):
    options = {"target": "y", "client_column": "ward", "fit": "federated"}
    options |= {"numeric": ["age"], "categorical": []}
    task = task_of("tabular", options, SITE, classes=["y", "n"], clients=3)
    for rows, name in (([WARDS[0], WARDS[3]], "c"), (WARDS, None), ([], None)):
        table.write_text("\n".join(["age,ward,y", *rows]))
        assert task.name_of(0, table) == name


def test_a_site_with_a_header_alone_is_told_to_fill_its_data(table):
    options = {"target": "y", "fit": "federated", "numeric": ["age"], "categorical": []}
    site = {**SITE, "holdout": 0.25}
    task = task_of("tabular", options, site, classes=["y", "n"], clients=3)
    table.write_text("age,y\n")
    with refused("client 1", "data-folder"):
        task.column_statistics(1, table)


def test_a_task_file_has_what_a_table_tells(table):
    from fedhet.tools.task_file import task_file

    table.write_text("\n".join(["age;ward;y", *(row.replace(",", ";") for row in WARDS)]))
    keys = {"path": str(table), "target": "y", "client_column": "ward", "separator": ";"}
    config = task_of("tabular", keys).config
    values = yaml.safe_load(task_file(config, "wards"))
    assert values["data_options"] == {
        "fit": "federated",
        "numeric": ["age"],
        "categorical": [],
        "separator": ";",
    }
    assert (values["name"], values["classes"]) == ("wards", ["n", "y"])
    assert (values["target"], values["client_column"]) == ("y", "ward")
    assert "path" not in values


# -------------------------------------------------------------------------------- class weights
def test_weights_of_classes_weigh_the_loss_that_is_trained_on():
    logits, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2])
    weights = torch.tensor([1.0, 2.0, 0.5])
    expected = torch.nn.functional.cross_entropy(logits, labels, weight=weights)
    torch.testing.assert_close(weighted(cross_entropy, weights)(logits, labels), expected)
    p = logits.softmax(1)[torch.arange(8), labels]
    torch.testing.assert_close(focal(logits, labels), -((1 - p) ** 2 * p.log()).mean())
    each = -((1 - p) ** 2 * p.log()) * weights[labels]
    found = weighted(focal, weights)(logits, labels)
    torch.testing.assert_close(found, each.sum() / weights[labels].sum())
    nothing = weighted(cross_entropy, torch.tensor([0.0, 1.0, 1.0]))
    assert nothing(logits[:1], labels[:1]) == 0  # a client with examples of class 0 alone


def test_balanced_weights_are_scikit_learns_of_the_classes_that_a_client_has():
    labels = np.repeat([0, 2], [30, 10])
    expected = compute_class_weight("balanced", classes=np.array([0, 2]), y=labels)
    found = balanced(np.bincount(labels, minlength=3).tolist())
    assert found.tolist() == pytest.approx([expected[0], 1.0, expected[1]])


@pytest.mark.parametrize(
    "wrong", [{"class_weights": "equal"}, {"class_weights": [1, 2, 3]}, {"class_weights": [1, -1]}]
)
def test_weights_that_do_not_fit_are_refused(table, wrong):
    options = {"path": str(table), "target": "income"}
    with refused("task.class_weights"):
        task_of("tabular", options, classes=CLASSES, **wrong)
    with refused("task.class_weights", "task.loss"):
        keys = {"kind": "regression", "class_weights": "balanced"}
        task_of("tabular", {**options, "target": "age"}, **keys)
