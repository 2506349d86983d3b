"""The committed pages are those that `make docs` writes, and links in pages lead somewhere."""

from __future__ import annotations

import re

import pytest

import conf
from docs.generator.__main__ import pages
from docs.generator.experiments import number_of_jobs
from docs.generator.markdown import to_markdown
from docs.generator.measure import measure
from docs.generator.recipes import ROOT

DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/*.md", "docs/methods/*.md", "docs/results/*.md")
    for path in sorted(ROOT.glob(pattern))
]


@pytest.mark.slow  # two rounds of every method
@pytest.mark.timeout(600)
def test_the_committed_pages_are_those_that_make_docs_writes():
    made = pages()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: run `make docs`"
    assert set((ROOT / "docs" / "methods").glob("*.md")) <= set(made)


@pytest.mark.parametrize("page", ["running.md", "reports.md"])
def test_a_page_names_the_keys_that_do_not_change_a_result(page):
    text = (ROOT / "docs" / page).read_text()
    keys = (*conf.SITE_KEYS, *conf.NOTES, *conf.FOLDER_KEYS)
    assert [key for key in keys if f"`{key}`" not in text] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{path}: {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.slow
def test_scaffold_sends_and_keeps_a_second_model_and_personal_tensors_do_not_travel():
    cost = measure("strategy=scaffold")
    assert cost.down == {"params": 1.0, "control_variate": 1.0}
    assert cost.up == {"update": 1.0, "control_variate_delta": 1.0}
    assert cost.client_state == cost.server_state == {"control_variate": 1.0}
    assert cost.traffic == 4.0
    cost = measure("strategy=fedavg", "strategy.personal=last:1")
    kept = cost.client_state["personal"]
    assert 0 < kept < 0.1
    assert cost.down["params"] == cost.up["update"] == pytest.approx(1 - kept)


def test_jobs_are_the_product_of_the_swept_values():
    params = {"strategy": "fedavg,[moon,feddw],fedprox", "seed": "0,1", "clients": 10}
    assert number_of_jobs({"hydra": {"sweeper": {"params": params}}}) == 6


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("One\ntwo *three* x_i <b>.", "One\ntwo \\*three\\* x_i \\<b>."),
        ("A:\n\n    y <- g\n\n    c <- 0\n\nB", "A:\n\n```text\ny <- g\n\nc <- 0\n```\n\nB"),
        ("See :class:`Foo` and ``a*b``.", "See `Foo` and ``a*b``."),
    ],
)
def test_docstrings_as_markdown(docstring, markdown):
    assert to_markdown(docstring) == markdown
