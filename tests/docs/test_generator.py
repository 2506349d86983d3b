"""The committed pages are those that `make docs` writes, and links in pages lead somewhere."""

import json
import re

import pytest
import yaml
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from docs.generator.__main__ import made_of_schema, pages
from docs.generator.experiments import number_of_jobs
from docs.generator.markdown import to_markdown
from docs.generator.pages import METHODS
from docs.generator.recipes import ROOT
from fedhet import conf

FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "methods", ROOT / "docs" / "results")
DOCUMENTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.md"))]


def test_keys_json_schema_and_comments_are_those_of_the_schema():
    for path, text in made_of_schema().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: run `make docs`"


def test_an_editor_accepts_every_recipe_of_the_repository_and_marks_mistakes():
    validator = Draft202012Validator(json.loads((ROOT / "docs" / "recipe.schema.json").read_text()))
    experiments = sorted((ROOT / "conf" / "experiment").rglob("*.yaml"))
    for path in [ROOT / "conf" / "config.yaml", *experiments]:
        assert [error.message for error in validator.iter_errors(load(path))] == [], path
    for wrong in ("local: {lrr: 1}", "rounds: 0", "device: gpu", "partition: {alpha: 0}"):
        assert list(validator.iter_errors(yaml.safe_load(wrong))), wrong


def load(path):
    return OmegaConf.to_container(OmegaConf.load(path))  # which reads 1e-3 as a number


@pytest.mark.slow  # two rounds of every method
@pytest.mark.timeout(600)
def test_the_committed_pages_are_those_that_make_docs_writes():
    made = pages()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: run `make docs`"
    assert set(METHODS.glob("*.md")) <= set(made)
    scaffold, fedper = (made[METHODS / f"{name}.md"] for name in ("scaffold", "fedper"))
    assert (
        "`params` 1, `control_variate` 1 |\n| up | `update` 1, `control_variate_delta` 1"
        in scaffold
    )
    assert "client | `control_variate` 1 |\n| kept by the server | `control_variate` 1" in scaffold
    # the head's weights, 10 * 100 of 64 * 400 + 400 * 200 + 200 * 100 + 10 * 100, do not travel
    assert "| kept by a client | `personal` 0.0079 |" in fedper
    assert "| sent in all | 1.98 |" in fedper


def test_pages_name_the_keys_that_do_not_change_a_result():
    for page in ("running.md", "reports.md"):
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


def anchors(text):
    """Return the anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_jobs_are_the_product_of_the_swept_values():
    params = {"strategy": "fedavg,[moon,feddw],fedprox", "seed": "0,1", "clients": 10}
    assert number_of_jobs({"hydra": {"sweeper": {"params": params}}}) == 6


def test_docstrings_as_markdown():
    for docstring, markdown in (
        ("One\ntwo *three* x_i <b>.", "One\ntwo \\*three\\* x_i \\<b>."),
        ("A:\n\n    y <- g\n\n    c <- 0\n\nB", "A:\n\n```text\ny <- g\n\nc <- 0\n```\n\nB"),
        ("See :class:`Foo` and ``a*b``.", "See `Foo` and ``a*b``."),
    ):
        assert to_markdown(docstring) == markdown
