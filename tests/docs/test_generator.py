"""docs/methods.md and docs/methods/ are what `make docs` makes, and what they say is so."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

import conf
from docs.generator import recipes
from docs.generator.__main__ import index
from docs.generator.checks import checks_of, matrix_of
from docs.generator.facts import Method, all_methods
from docs.generator.measure import measure
from docs.generator.page import page
from docs.generator.prose import cell, to_markdown, url_after
from docs.generator.recipes import ROOT, Option, read_recipe
from docs.generator.tables import PAGE, experiments_page, jobs_of
from tasks.models import MODELS

pytestmark = pytest.mark.slow  # what the pages say is measured anew


def test_the_page_of_experiments_is_as_made_and_has_every_file():
    assert PAGE.read_text() == experiments_page()
    files = {f"{p.parent.name}/{p.stem}" for p in (ROOT / "conf/experiment").glob("*/*.yaml")}
    assert files == set(re.findall(r"^\| \[([\w/]+)\]", PAGE.read_text(), re.M))


def test_jobs_are_the_product_of_what_is_swept():
    params = {"strategy": "fedavg,[moon,feddw],fedprox", "seed": "0,1", "clients": 10}
    assert jobs_of({"hydra": {"sweeper": {"params": params}}}) == 6


def test_the_readme_names_every_method_and_model():
    readme = (ROOT / "README.md").read_text()
    assert [method for method in METHODS if f"`{method}`" not in readme] == []
    assert [model for model in MODELS if f"`{model}`" not in readme] == []


@pytest.mark.parametrize("page", ["running.md", "reports.md"])
def test_a_page_names_the_keys_that_do_not_count(page):
    text = (ROOT / "docs" / page).read_text()
    keys = (*conf.SITE_KEYS, *conf.NOTES, *conf.FOLDER_KEYS)
    assert [key for key in keys if f"`{key}`" not in text] == []


METHODS = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml"))
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
AGAIN = "it is not what the code says now: run `make docs`"


@lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    return {method.recipe.method: method for method in all_methods()}


# ---- the committed pages -------------------------------------------------------------------------


@pytest.mark.flower  # it measures every method: half a second each
@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_page(name):
    path = ROOT / "docs" / "methods" / f"{name}.md"
    assert path.exists(), f"{path} is missing: run `make docs`"
    assert path.read_text(encoding="utf-8") == page(methods()[name], [*methods().values()]), AGAIN


@pytest.mark.flower  # it composes every recipe and reads every test
def test_the_table_has_every_method():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert text == index([*methods().values()]), AGAIN
    assert [name for name in METHODS if f"(methods/{name}.md)" not in text] == []


def test_no_page_is_left_of_a_method_that_is_gone():
    assert sorted(path.stem for path in (ROOT / "docs" / "methods").glob("*.md")) == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_in_the_matrix_and_in_a_test_of_its_own(name):
    """tests/test_every_strategy.py has a line with it, and tests/strategies something by hand."""
    assert matrix_of(name)
    own = [test for test in methods()[name].checks if test.path.parent.name == "strategies"]
    assert own, f"no test in tests/strategies names {name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path}: {target}"
        assert not anchor or anchor in anchors(file), f"{path}: {target}"


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


# ---- what is counted -----------------------------------------------------------------------------


def test_scaffold_sends_and_keeps_a_model_more():
    cost = measure("strategy=scaffold")
    assert cost.down == {"params": 1.0, "control_variate": 1.0}
    assert cost.up == {"update": 1.0, "control_variate_delta": 1.0}
    assert cost.client_state == {"control_variate": 1.0}
    assert cost.server_state == {"scaffold/control_variate": 1.0}
    assert cost.traffic == 4.0
    assert (cost.forward, cost.backward) == (1.0, 1.0)


def test_option_one_is_one_more_pass_over_the_data():
    cost = measure("strategy=scaffold", "strategy.option=I")
    assert (cost.forward, cost.backward) == (2.0, 2.0)


def test_what_is_personal_stays_and_does_not_travel():
    cost = measure("strategy=fedavg", "strategy.personal=last:1")
    kept = cost.client_state["personal"]
    assert 0 < kept < 0.1
    assert cost.down["params"] == cost.up["update"] == pytest.approx(1 - kept)


# ---- recipes -------------------------------------------------------------------------------------


def test_options_are_the_keys_with_a_comment():
    """Of the recipe's file, then of the slots that it chooses or needs; defaults as composed."""
    assert methods()["fedavgm"].recipe.options == [
        Option(
            "strategy.server_optimizer.momentum",
            "0.9",
            "of the mean update (FedAvgM: 0.9), in [0, 1]",
        ),
        Option(
            "server.lr", "0.1", "eta_g; the steady step is eta_g / (1 - momentum), here FedAvg's"
        ),
    ]
    assert [option.key for option in methods()["scaffold"].recipe.options] == ["strategy.option"]
    adam = {option.key: option.default for option in methods()["fedadam"].recipe.options}
    assert adam["strategy.server_optimizer.beta2"] == "0.99"


def test_a_recipe_without_its_line_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# no name\nmethods: {x: []}\n")
    with pytest.raises(ValueError, match=r"x\.yaml must begin with a comment"):
        read_recipe(path)


RECIPE_ONLY = """\
# FedPer-like (Somebody et al. 2019): the last tensor stays
# at the client. https://example.org/paper
methods: {stays: []}
personal: last:1   # what stays
"""


def test_a_method_that_is_only_a_recipe_has_a_page(tmp_path, monkeypatch):
    """No file in strategies/, no note, no line in the generator."""
    folder = tmp_path / "conf"
    shutil.copytree(conf.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "experiment"))
    (folder / "strategy" / "stays.yaml").write_text(RECIPE_ONLY)
    monkeypatch.setattr(conf, "FOLDER", folder)
    monkeypatch.setattr(recipes, "FOLDER", folder)
    conf.compose_overrides.cache_clear()
    try:
        recipe = read_recipe(folder / "strategy" / "stays.yaml")
        recipe = replace(recipe, path=ROOT / "conf" / "strategy" / "stays.yaml")
        method = Method(recipe, methods()["fedavg"].recipe)
        text = page(method, [*methods().values()])
    finally:
        conf.compose_overrides.cache_clear()
    assert "# FedPer-like\n\nSomebody et al. 2019: the last tensor stays at the client." in text
    assert "| `strategy.personal` | `last:1` | what stays |" in text
    assert "`personal` 0.0079" in text
    assert re.search(r"\[FedDW\]\(feddw.md\).*: the one needs tensors at the server", text)
    assert method.url == "https://example.org/paper"


# ---- combining -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "why"),
    [
        ("fedadam", "fedyogi", "both replace the server optimiser"),
        ("scaffold", "fedpvr", "both send `control_variate` and `control_variate_delta`"),
        ("scaffold", "fedprox", ""),
        ("fedpvr", "fedadam", ""),
        (
            "feddw",
            "fedper",
            "the one needs tensors at the server that the other keeps at the clients",
        ),
        ("feddw", "moon", ""),
        ("fedbabu", "scaffold", ""),
    ],
)
def test_what_is_refused_together(left, right, why):
    assert methods()[left].clash_with(methods()[right]) == why
    assert methods()[right].clash_with(methods()[left]) == why


# ---- tests that name a method --------------------------------------------------------------------


def test_checks_are_found_by_name_by_class_and_through_constants():
    def names(method: str) -> list[str]:
        chosen = methods()[method]
        return [test.name for test in checks_of(chosen.recipe, chosen.base)]

    assert "test_fedprox_at_zero_is_fedavg" in names("fedprox")  # by its name
    assert "test_penalty_gradients" in names("fedprox")  # its class is in the list PENALTIES
    assert "test_yogi_by_hand" in names("fedyogi")  # Yogi is the recipe's server optimiser
    assert "test_yogi_by_hand" not in names("fedadam")
    assert "test_scaffold_by_hand" not in names("fedprox")


# ---- docstrings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("One\ntwo *three* x_i <b>.", "One\ntwo \\*three\\* x_i \\<b>."),
        (
            "Step:\n\n    y <- y - g\n\n    c <- 0\n\nEnd",
            "Step:\n\n```text\ny <- y - g\n\nc <- 0\n```\n\nEnd",
        ),
        ("Step:\n    y <- y - g\nwith g", "Step:\n\n```text\ny <- y - g\n```\n\nwith g"),
        (
            "Local (eq. 3):   y <- y\nServer:          x <- x",
            "```text\nLocal (eq. 3):   y <- y\nServer:          x <- x\n```",
        ),
        ("Options:\n- a * b\n  more\n- c", "Options:\n\n- a \\* b\n  more\n- c"),
        ("The change is c\n- c_i, or\n2. of them", "The change is c\n\\- c_i, or\n2\\. of them"),
        ("See :class:`Foo` and ``a*b``.", "See `Foo` and ``a*b``."),
    ],
)
def test_docstrings_as_markdown(docstring, markdown):
    assert to_markdown(docstring) == markdown


def test_cells_and_addresses():
    assert cell("||x||\n= 1") == "\\|\\|x\\|\\| = 1"
    text = "Hsu (https://a.org/1), Reddi et al. (https://a.org/2)."
    assert url_after(text, "Reddi") == "https://a.org/2"
    assert url_after(text, "Nobody") == ""
