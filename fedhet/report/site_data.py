"""What a run's models do at each site: from fedhet-evaluate --by-site, or from the run's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedhet.common.decisions import CONFUSION, Decisions
from fedhet.common.files import save_text
from fedhet.common.metrics import CLIENT, PERSONAL, RECEIVED, MetricName
from fedhet.common.results import BY_SITE, SITES, Row

Values = Sequence[float | None]
NEW, BEST, RECEIVED_MODEL = "new", "best", "received"  # which shared model
DIGITS = 6  # that a data file keeps


@dataclass(frozen=True)
class Site:
    """A site, which is one client."""

    client: int
    name: str = ""  # "" if nobody has named it
    examples: int | None = None  # to train on; None: the server does not know
    held_out: int | None = None  # to evaluate on
    unseen: bool = False  # it never trained

    @property
    def label(self) -> str:
        """Its name, or else its number."""
        return self.name or f"client {self.client}"

    @property
    def total(self) -> int | None:
        """How many examples it has."""
        return None if self.examples is None else self.examples + (self.held_out or 0)

    @property
    def evaluated_on(self) -> int | None:
        """How many examples models are evaluated on there."""
        return self.held_out or self.examples


@dataclass(frozen=True)
class SiteFigures:
    """What models do at each site; lists are in the order of ``sites``, None: not measured."""

    sites: Sequence[Site] = ()
    shared: Mapping[str, Values] = field(default_factory=dict)  # the shared model, by metric
    own: Mapping[str, Values] = field(default_factory=dict)  # each site's own model, there
    models: Sequence[int] = ()  # the clients whose own models were evaluated at every site
    matrix: Mapping[str, Sequence[Values]] = field(default_factory=dict)  # by model and site
    decisions: Decisions | None = None
    model: str = NEW
    trained_on: bool = False  # nothing is held out: models are evaluated on what they train on
    parameters_sha256: str = ""  # of the shared model
    task: Sequence[str] = ()  # changes of the run's task for the evaluation, such as path=/data/new

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SiteFigures:
        """Return what :func:`dataclasses.asdict` has made plain."""
        decisions = content.get("decisions")
        sites = tuple(Site(**site) for site in content["sites"])
        found = Decisions(**decisions) if decisions else None
        kept = {key: tuple(content.get(key, ())) for key in ("models", "task")}
        return cls(**{**content, **kept, "sites": sites, "decisions": found})

    def save(self, folder: Path) -> None:
        """Write the figures into a run's folder."""
        save_text(folder / BY_SITE, json.dumps(asdict(self)) + "\n")


def read_site_figures(
    folder: Path, rows: Sequence[Row], summary: Mapping[str, Any]
) -> SiteFigures | None:
    """Return a run's figures by site; None if it has none, or its files cannot be read."""
    try:
        return _evaluated(folder, summary) or _of_run(folder, rows, summary)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _evaluated(folder: Path, summary: Mapping[str, Any]) -> SiteFigures | None:
    """Return what fedhet-evaluate has measured, unless the model is another one since."""
    if not (folder / BY_SITE).is_file():
        return None
    figures = SiteFigures.from_json(json.loads((folder / BY_SITE).read_text(encoding="utf-8")))
    about = summary.get("best_model", {}) if figures.model == BEST else summary
    return figures if figures.parameters_sha256 == about.get("parameters_sha256") else None


def _of_run(folder: Path, rows: Sequence[Row], summary: Mapping[str, Any]) -> SiteFigures | None:
    """Return each client's last values (evaluation.per_client), and evaluation.confusion's."""
    counted = summary.get(CONFUSION, {})
    decisions = Decisions(**counted) if "classes" in counted else None
    last: dict[str, dict[int, float]] = {}
    for row in rows:
        measured = row.get("per_client", {})
        if any(MetricName.read(name).where == CLIENT for name in measured):
            last = {n: v for n, v in last.items() if MetricName.read(n).where != CLIENT}
        for name, values in measured.items():
            last.setdefault(name, {}).update({int(c): v for c, v in values.items()})
    if not last and decisions is None:
        return None
    known = _read_sites(folder)
    measured = {client for values in last.values() for client in values}
    clients = sorted(known if decisions else measured)
    sites = tuple(known.get(client, Site(client)) for client in clients)
    by_where: dict[str, dict[str, Values]] = {}
    for text, values in last.items():
        name = MetricName.read(text)
        plain = str(MetricName(name.name, class_name=name.class_name))
        of_sites = [_rounded(values.get(client)) for client in clients]
        by_where.setdefault(name.where, {})[plain] = of_sites
    new, received = by_where.get(CLIENT, {}), by_where.get(RECEIVED, {})
    return SiteFigures(
        sites,
        shared=new or received,
        own=by_where.get(PERSONAL, {}),
        decisions=decisions,
        model=NEW if new or not received else RECEIVED_MODEL,
        trained_on=bool(known) and not any(site.held_out for site in sites),
    )


def _read_sites(folder: Path) -> dict[int, Site]:
    path = folder / SITES
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {site["client"]: Site(**site) for site in content["sites"]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
