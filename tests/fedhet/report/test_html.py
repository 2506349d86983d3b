"""The HTML page, read by a parser: what it may run and fetch, its parts, and its charts' data."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from itertools import combinations, product

import pandas as pd
import pytest

from fedhet.report.blocks import Heading, Paragraph, Table
from fedhet.report.colors import PAGE, PALETTE, keys_of
from fedhet.report.command import main
from fedhet.report.render import to_html, to_markdown
from tests.finished_runs import write_run

__all__ = ["write_run"]
EVIL = "<script>alert('x')</script> \"&'"


class Page(HTMLParser):
    """The elements of a page, and the texts inside scripts, headings and list items."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), []))
        self._open.append(self.found[-1])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, _, texts in self._open:
            texts.append(data)

    def all(self, tag):
        return [
            (attributes, "".join(texts)) for name, attributes, texts in self.found if name == tag
        ]


@pytest.fixture
def page(write_run, tmp_path):
    """Two methods and three seeds; a fourth run failed, with markup in its reason."""
    for method, seed in product(("fedavg", "fedpvr"), range(3)):
        more = 0.02 + seed / 100 if method == "fedpvr" else 0.0
        columns = {"elapsed_seconds": 1.5, "simulated_seconds": 9.0, "staleness": seed / 2}
        folder = write_run(method, seed, (0.1, 0.3, 0.5 + seed / 10 + more), columns=columns)
        counts = {"class_names": [EVIL, "b"], "counts": [[3, 0], [1, 4]], "clients": 2}
        (folder / "class_counts.json").write_text(json.dumps(counts))
    write_run("moon", 0, (0.1,), summary={"status": "failed", "error": EVIL})
    main([str(tmp_path / "sweep")])
    folder = tmp_path / "sweep" / "report"
    return Page((folder / "report.html").read_text())


@pytest.mark.slow
def test_the_page_answers_and_its_charts_have_every_axis(page, tmp_path):
    folder = tmp_path / "sweep" / "report"
    (_, title), *_ = page.all("h1")
    assert title == "FedAvg, FedPVR and MOON on digits, dirichlet partition with alpha 0.1"
    (verdict,) = (text for a, text in page.all("ul") if a.get("class") == "verdict")
    assert verdict.startswith("FedPVR is 3.0 points above FedAvg [0.5, 5.5] over 3 common seeds.")
    rows = [text.split() for attributes, text in page.all("tr")]
    assert any(row[:3] == ["★best:", "FedPVR", "1"] for row in rows)
    assert ["7_moon_seed0", "failed"] in [row[:2] for row in rows] or any(
        "failed" in r for r in rows
    )
    accuracy, *_, partition = (
        json.loads(text) for a, text in page.all("script") if a.get("type") == "application/json"
    )
    axes = ["round", "MB up and down, all clients", "wall time (s)", "simulated time (s)"]
    assert [text for _, text in page.all("option")][:4] == axes
    columns = accuracy["data"]["columns"]
    points = [dict(zip(columns, row, strict=True)) for row in accuracy["data"]["data"]]
    first = [point for point in points if point["line"] == "FedAvg"]
    found = {name: [point[name] for point in first] for name in ("x0", "x1", "y", "low", "high")}
    assert found == {
        **{"x0": [0, 1, 2], "x1": [0, 3, 6]},
        **{"y": [10, 30, 60], "low": [10, 30, 50], "high": [10, 30, 70]},
    }
    for place, spec in enumerate(accuracy["specs"]):
        line, *_ = spec["concat"][0]["layer"]
        x, legend = line["encoding"]["x"], line["encoding"]["color"]["scale"]
        assert (x["field"], x["title"]) == (f"x{place}", axes[place])
        assert legend["domain"] == ["FedAvg", "FedPVR", "MOON"]
    assert partition["data"]["columns"] == ["client", "place", "examples", "class"]
    assert partition["data"]["data"] == [[0, 0, 3, EVIL], [1, 0, 1, EVIL], [1, 1, 4, "b"]]
    pictures = {path.name for path in folder.glob("*.png")}
    assert {f"report_{kind}.png" for kind in ("rounds", "bytes", "time", "simulated")} <= pictures


@pytest.mark.slow
def test_texts_of_runs_are_no_markup_and_only_the_pages_own_scripts_may_run(page):
    assert any(EVIL in text for _, text in page.all("td"))
    run = [(a, text) for a, text in page.all("script") if a.get("type") != "application/json"]
    assert [set(a) for a, _ in run] == [set(), set()]
    (policy,) = (a["content"] for a, _ in page.all("meta") if "http-equiv" in a)
    digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for _, t in run]
    assert all(f"'sha256-{digest}'" in policy for digest in digests)
    assert policy.startswith("default-src 'none'; img-src data: blob:;")
    sources = [a[key] for _, a, _ in page.found for key in ("src", "href") if key in a]
    assert all(source.startswith(("#", "data:", "report_")) for source in sources)
    blocks = [
        Heading(1, EVIL),
        Paragraph(EVIL),
        Paragraph(EVIL, warning=True),
        Table(pd.DataFrame(columns=[EVIL]), EVIL),
    ]
    small = Page(to_html(blocks))
    assert len(small.all("script")) == 2
    assert "<script" not in to_markdown(blocks).replace("\\<script", "")


@pytest.mark.slow
def test_contents_lead_to_every_part_and_every_cell_has_a_named_column(page):
    ids = [a["id"] for _, a, _ in page.found if "id" in a]
    assert len(ids) == len(set(ids))
    links = [a["href"] for a, _ in page.all("a") if a["href"].startswith("#")]
    assert {link[1:] for link in links} <= set(ids)
    assert len(links) - 1 == len(page.all("h2")) + len(page.all("h3"))  # and the link to skip
    assert all(text.strip() for _, text in page.all("th"))
    assert all(a["alt"] for a, _ in page.all("img"))


def luminance(color):
    shares = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_lines_stand_out_from_the_page_and_from_each_other():
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) is 3 or more for graphical objects (1.4.11)."""
    for color, theme in product(PALETTE, range(2)):
        low, high = sorted((luminance(color[theme]), luminance(PAGE[theme])))
        assert (high + 0.05) / (low + 0.05) >= 3
    methods = ["fedavg", "x", "fedpvr", "fedprox", *map(str, range(20))]
    keys = keys_of([(method, method) for method in methods]).values()
    assert all((a.color, a.style) != (b.color, b.style) for a, b in combinations(keys, 2))
    assert len({key.style for key in list(keys)[:4]}) == 4
