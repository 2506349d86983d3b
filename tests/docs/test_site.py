"""The documentation: it builds offline, its links lead somewhere, its commands compose."""

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from jsonschema import Draft202012Validator
from mkdocs.commands.build import build
from mkdocs.config import load_config
from omegaconf import OmegaConf

from docs.generator.__main__ import made_of_schema
from docs.generator.experiments import number_of_jobs
from docs.generator.markdown import to_markdown
from docs.generator.measure import measure, stored
from docs.generator.pages import BESIDE
from docs.generator.recipes import ROOT
from fedhet import conf
from fedhet.conf import compose_overrides
from fedhet.conf.mistakes import options_of

FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
OTHERS = {"tutorial.md", "own.md", "hospitals.md"}  # tests of their own run their commands
PAGES = [*(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in OTHERS)]
PAGES += [ROOT / "README.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]
TEXT = {path: path.read_text(encoding="utf-8") for path in PAGES}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(site):
    """A strict build checks every link and anchor, also those to the repository's files."""
    for method in options_of("strategy"):
        page = (site / "methods" / f"{method}.html").read_text(encoding="utf-8")
        assert "<math " in page, method
        assert 'id="when-to-use-it"' in page, method
        assert 'id="what-travels"' in page, method
    scaffold = (site / "methods" / "scaffold.html").read_text(encoding="utf-8")
    assert "<code>strategy.scaffold.option</code>" in scaffold
    assert "fedhet.strategies.fedpvr.FedPVR" in (site / "api.html").read_text(encoding="utf-8")
    choosing = (site / "choosing.html").read_text(encoding="utf-8")
    assert '<a href="methods/fedavg.html">fedavg</a>' in choosing
    assert "puts the table here" not in choosing
    outside = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="?(https?://[^" >]+)')
    for path in site.rglob("*.html"):
        assert outside.findall(path.read_text(encoding="utf-8")) == [], path


@cache
def commands() -> list[tuple[str, str]]:
    """Return page and command of every line in a fence that starts with one of our programs."""
    found = {}
    for path, text in TEXT.items():
        for _, content in FENCE.findall(text):
            for line in content.replace("\\\n", " ").splitlines():
                line = line.strip().removeprefix("$ ").removeprefix("nice ")
                if re.match(r"fedhet(-\w+)? [^:]", line):
                    found.setdefault(line, path.name)
    return [(page, line) for line, page in found.items()]


def test_every_command_in_the_pages_is_one_of_ours():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(commands()) > 40
    for page, line in commands():
        assert line.split()[0] in scripts, f"{page}: {line}"


@pytest.mark.slow
def test_every_fedhet_command_in_the_pages_composes():
    parser = OverridesParser.create()
    for page, line in commands():
        program, *words = shlex.split(line, comments=True)
        overrides = [w for w in words if "=" in w and not w.startswith(("-", "hydra"))]
        placeholder = any(w.isupper() or "..." in w for w in words)
        if program != "fedhet" or placeholder or "-m --resume" in line or "--shell" in line:
            continue
        parsed = parser.parse_overrides(overrides)
        tried = [one for one in parsed if not one.is_sweep_override() or one.is_discrete_sweep()]
        (jobs,) = BasicSweeper.split_arguments(tried, None)
        for job in {tuple(jobs[0]), tuple(jobs[-1])}:
            try:
                compose_overrides(job)
            except Exception as error:
                raise AssertionError(f"{page}: {line}\n{error}") from error


def test_every_test_that_the_pages_name_is_there():
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    known = set(re.findall(r"^def (test_\w+)", written, re.MULTILINE))
    known |= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for text in TEXT.values() for name in re.findall(r"\b(test_\w+)", text)}
    keys = {"test_data", "test_fraction", "test_size", "test_split"}
    assert len(named) > 20
    assert named - keys - known == set()


def test_json_schema_and_comments_are_those_of_the_schema():
    for path, text in made_of_schema().items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is out of date: run `make docs`"


def test_every_method_has_equations_its_use_and_what_it_sends():
    for method in options_of("strategy"):
        notes = (ROOT / "docs" / "generator" / "notes" / f"{method}.md").read_text()
        assert notes.startswith("```math\n"), method
        assert "\n## When to use it\n" in notes, method
        assert stored(method).down or method in ("local", "fedproto"), method
    assert json.loads(BESIDE.read_text()).keys() <= set(options_of("strategy"))
    others = f", and {len(options_of('strategy')) - 4} others"  # than the four papers' own
    for page in ("README.md", "docs/index.md", "CITATION.cff"):
        assert others in (ROOT / page).read_text(encoding="utf-8"), page


@pytest.mark.slow
def test_what_travels_is_what_is_measured():
    scaffold, fedper = (measure(f"strategy={name}") for name in ("scaffold", "fedper"))
    assert (scaffold, fedper) == (stored("scaffold"), stored("fedper"))
    assert scaffold.down == {"params": 1, "control_variate": 1}
    assert scaffold.up == {"update": 1, "control_variate_delta": 1}
    # the head's weights, 10 * 100 of 64 * 400 + 400 * 200 + 200 * 100 + 10 * 100, do not travel
    assert fedper.client_state["personal"] == pytest.approx(1000 / 126600)
    assert fedper.traffic == pytest.approx(2 * (1 - 1000 / 126600))


@pytest.mark.slow
def test_an_editor_accepts_every_recipe_of_the_repository_and_marks_mistakes():
    validator = Draft202012Validator(json.loads((ROOT / "docs" / "recipe.schema.json").read_text()))
    experiments = sorted((ROOT / "reproductions").glob("*/conf/**/*.yaml"))
    for path in [ROOT / "conf" / "config.yaml", *experiments]:
        assert [error.message for error in validator.iter_errors(load(path))] == [], path
    for wrong in ("local: {lrr: 1}", "rounds: -1", "device: gpu", "partition: {alpha: 0}"):
        assert list(validator.iter_errors(yaml.safe_load(wrong))), wrong


def load(path: Path):
    return OmegaConf.to_container(OmegaConf.load(path))  # which reads 1e-3 as a number


def test_pages_name_the_keys_that_do_not_change_a_result():
    for page in ("running.md", "reports.md"):
        text = (ROOT / "docs" / page).read_text()
        keys = (*conf.SITE_KEYS, *conf.NOTES, *conf.FOLDER_KEYS)
        assert [key for key in keys if f"`{key}`" not in text] == []


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
