"""Text files of users: what is read, and what is refused with the file, the cause and the key."""

import gzip
import json
import os

import pytest

from fedhet.common.text_files import Dialect, read_csv, read_json, read_text
from fedhet.strategies.modes.systems import Trace
from fedhet.tasks import tabular
from fedhet.tasks.vocabulary import read_vocabulary
from tests.refused import refused

TRACE = "client,start,end\nÅse,0,10\n"
GOOD = {
    "UTF-8": TRACE.encode(),
    "UTF-8 with its mark": TRACE.encode("utf-8-sig"),
    "UTF-16 with its mark": TRACE.encode("utf-16"),
    "UTF-32 with its mark": TRACE.encode("utf-32"),
    "lines of Windows": TRACE.replace("\n", "\r\n").encode(),
    "a long field": TRACE.replace("Åse", "Å" * 200_000).encode(),
}
BAD = {
    "latin-1": (TRACE.encode("latin-1"), "line 2"),
    "UTF-16 without its mark": (TRACE.encode("utf-16-le"), "UTF-16"),
    "gzip": (gzip.compress(TRACE.encode()), "gzip"),
    "a ZIP, as of a spreadsheet": (b"PK\x03\x04" + bytes(50), "CSV"),
    "nothing": (b"", "No columns"),
    "semicolons": (TRACE.replace(",", ";").encode(), "semicolon"),
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
def test_a_text_is_read_as_its_mark_says(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    trace = Trace(path=str(tmp_path / "a.csv"))
    assert trace.available([0, 1], 5) == [0, 1]
    assert read_csv(tmp_path / "a.csv", "key").client[0].startswith("Å")


@pytest.mark.parametrize(("content", "cause"), BAD.values(), ids=BAD)
def test_what_is_no_such_text_is_said_with_its_file_and_key(tmp_path, content, cause):
    (tmp_path / "a.csv").write_bytes(content)
    with refused("a.csv", "system.path", cause):
        Trace(path=str(tmp_path / "a.csv"))
    with refused("a.csv", "task.path", cause):
        tabular.load(path=str(tmp_path / "a.csv"), target="start", classes=["0", "1"])


def test_no_reader_waits_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    path = tmp_path / "a.csv"
    for key, read in (
        ("system.path", lambda: Trace(path=str(path))),
        ("task.path", lambda: tabular.load(path=str(path), target="a", classes=["0"])),
        ("public", lambda: tabular.load(public=str(path), target="a", classes=["0"])),
        ("task.vocabulary_file", lambda: read_vocabulary(path, 9)),
        ("key", lambda: read_text(path, "key")),
    ):
        with refused(str(path), key):
            read()


@pytest.mark.parametrize(
    ("text", "cause"), [("[" * 100_000, "nested"), ("{", "line 1"), ('"\\udc00', "JSON")]
)
def test_json_that_is_none_is_said_in_one_form(tmp_path, text, cause):
    (tmp_path / "a.json").write_text(text)
    with refused("a.json", "system.path", cause):
        Trace(path=str(tmp_path / "a.json"))
    (tmp_path / "b.json").write_text(json.dumps({"a": "é"}), encoding="utf-16")
    assert read_json(tmp_path / "b.json", "key") == {"a": "é"}


SEMICOLONS = "größe;stadt;krank\n1,52;Köln;ja\n1,8;Bonn;nein\n"
KEY = "task.data_options"


@pytest.mark.parametrize(
    ("dialect", "encoding", "named"),
    [
        ({}, "utf-8", (f"{KEY}.separator=semicolon",)),
        ({"separator": ";"}, "latin-1", (f"{KEY}.encoding", "latin-1")),
        ({"separator": "x"}, "utf-8", (f"{KEY}.separator='x'",)),
        ({"decimal": "'"}, "utf-8", (f"{KEY}.decimal",)),
        ({"encoding": "latin1000"}, "utf-8", (f"{KEY}.encoding=latin1000",)),
    ],
)
def test_a_dialect_that_does_not_fit_names_the_key_to_set(tmp_path, dialect, encoding, named):
    (tmp_path / "a.csv").write_text(SEMICOLONS, encoding=encoding)
    with refused(*named):
        tabular.load(
            path=str(tmp_path / "a.csv"), target="krank", classes=["ja", "nein"], **dialect
        )


@pytest.mark.parametrize("separator", ["semicolon", ";"])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8", None])
def test_a_table_is_read_in_its_dialect(tmp_path, separator, encoding):
    (tmp_path / "a.csv").write_text(SEMICOLONS, encoding=encoding or "utf-8-sig")
    (inputs, labels), _ = tabular.load(
        path=str(tmp_path / "a.csv"),
        target="krank",
        classes=["ja", "nein"],
        test_fraction=0.0,
        separator=separator,
        decimal="comma",
        encoding=encoding,
    )
    assert inputs.tolist() == [[-1, 0, 1], [1, 1, 0]]  # Bonn, Köln
    assert labels.tolist() == [0, 1]
    assert Dialect("tab").separator == "\t"


def test_numbers_with_another_decimal_point_are_not_taken_for_categories(tmp_path):
    rows = [f'"{n},5",{n}.5,{"yn"[n % 2]}' for n in range(30)]
    (tmp_path / "a.csv").write_text("\n".join(["u,v,y", *rows]))
    given = {"path": str(tmp_path / "a.csv"), "target": "y", "classes": ["y", "n"]}
    with refused("column u", f"{KEY}.decimal=comma", f"{KEY}.categorical"):
        tabular.load(**given)
    with refused("column v", f"{KEY}.decimal=point"):
        tabular.load(**given, decimal=",")
    with refused("column u", "row 1 and 29 more", f"{KEY}.decimal"):
        tabular.load(**given, numeric=["u", "v"], test_fraction=0.0)
