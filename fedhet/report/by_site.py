"""The page's part by site: how well models do at each site, and each site's model elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fedhet.common.decisions import Decisions
from fedhet.common.metrics import larger_is_better
from fedhet.common.results import BY_CLIENT
from fedhet.report.blocks import Block, Entry, Heading, Paragraph, Table
from fedhet.report.layout import Layout
from fedhet.report.names import column_title, listed
from fedhet.report.run_data import Run
from fedhet.report.site_data import BEST, RECEIVED_MODEL, SiteFigures
from fedhet.report.statistics import mean_text

BY_SITE, CROSS_SITE, ANSWERS = "By site", "Each site's model at every site", "Right and wrong"
MOST_SITES = 40  # that a table shows: of more, those with the lowest figures
MOST_MODELS = 8  # whose cross-site tables and answers a page shows
_WORDS = {
    BEST: "The shared model is that of the best round.",
    RECEIVED_MODEL: "The shared model is the one that each site received when it last trained.",
}


@dataclass(frozen=True)
class Measured:
    """What was measured by site: a line of the page, and its runs over the seeds."""

    label: str
    figures: Sequence[SiteFigures]  # of the same sites, one a seed; or of the first seed alone
    runs: int = 1  # how many seeds there are

    @property
    def first(self) -> SiteFigures:
        """Those of the first seed, which say who the sites are."""
        return self.figures[0]

    def by_site(self, metric: str, *, own: bool) -> pd.DataFrame:
        """Return a metric by site and seed, of the shared or the sites' own models."""
        values = [(one.own if own else one.shared).get(metric) for one in self.figures]
        clients = [site.client for site in self.first.sites]
        known = {n: v for n, v in enumerate(values) if v is not None}
        return pd.DataFrame(known, index=clients, dtype=float).dropna(how="all")


def by_site(layout: Layout) -> list[Block]:
    """Return the part by site of the runs that have figures; nothing if no run has any."""
    found = [
        Measured(cell.name, figures, len(cell.runs))
        for cell in layout.measured
        if (figures := _aligned(cell.runs))
    ]
    return site_blocks(found)


def _aligned(runs: Sequence[Run]) -> list[SiteFigures]:
    """Return the figures of all seeds, or those of the first if each seed has other sites."""
    found = [(run, run.sites) for run in runs if run.sites is not None]
    figures = [sites for _, sites in found]
    same = all(_names(one) == _names(figures[0]) for one in figures)
    return figures if same and all(_keeps_sites(run) for run, _ in found) else figures[:1]


def _keeps_sites(run: Run) -> bool:
    """Return whether a site is the same one with every seed."""
    settings = run.settings
    given = run.summary.get("partition") == BY_CLIENT
    kept = settings.get("partition.name") in ("natural", "site")
    return given or kept or settings.get("partition.seed") is not None


def _names(figures: SiteFigures) -> tuple[str, ...]:
    return tuple(site.label for site in figures.sites)


def site_blocks(measured: Sequence[Measured]) -> list[Block]:
    """Return the tables by site, across sites and of answers."""
    groups: dict[object, list[Measured]] = {}
    for one in measured:
        sizes = tuple((site.label, site.examples) for site in one.first.sites)
        groups.setdefault(sizes, []).append(one)
    blocks: list[Block] = []
    for group in groups.values():
        blocks += _group(group)
    across = [one for one in measured if one.first.matrix]
    decided = [(one, one.first.decisions) for one in measured if one.first.decisions]
    if blocks:
        blocks = [Heading(3, BY_SITE), *blocks]
    if across:
        blocks += [Heading(3, CROSS_SITE), Paragraph(_ABOUT_CROSS_SITE)]
        blocks += [_cross_site(one) for one in across[:MOST_MODELS]]
    if decided:
        blocks += [Heading(3, ANSWERS)]
        blocks += [table for pair in decided[:MOST_MODELS] for table in _answers(*pair)]
    return blocks


_ABOUT_CROSS_SITE = (
    "Each row is a model, and each column the examples of a site. If the sites' examples differ, a "
    "site's own model is good in its own column and poor in others."
)


# ---- each site -----------------------------------------------------------------------------------


def _group(group: Sequence[Measured]) -> list[Block]:
    """Return the tables of runs with the same sites: a pair for each metric."""
    names = dict.fromkeys(
        name for one in group for figures in one.figures for name in (*figures.shared, *figures.own)
    )
    whole = [name for name in names if "/" not in name]
    blocks: list[Block] = []
    for metric in [name for name in whole if name != "loss" or "accuracy" not in whole]:
        columns = {
            f"{one.label}, own models" if own else one.label: values
            for one in group
            for own in (False, True)
            if not (values := one.by_site(metric, own=own)).empty
        }
        blocks += [_sites_table(group, metric, columns), _spread_table(group[0], metric, columns)]
        blocks += [Paragraph(text) for text in _own_or_shared(group, metric)]
    return blocks


def _sites_table(
    group: Sequence[Measured], metric: str, columns: Mapping[str, pd.DataFrame]
) -> Table:
    means = pd.DataFrame({label: values.mean(axis=1) for label, values in columns.items()})
    signed = means if larger_is_better(metric) else -means
    worst = signed.idxmin() if len(means) > 1 else {}
    lowest = signed.min(axis=1).nsmallest(MOST_SITES).index
    sites = [site for site in group[0].first.sites if site.client in lowest]
    frame = pd.DataFrame({"site": [site.label for site in sites]})
    frame["examples"] = [_count(site.total) for site in sites]
    frame["evaluated on"] = [_count(site.evaluated_on) for site in sites]
    lacking = {one.label: {s.client for s in one.first.sites if s.unseen} for one in group}
    for label, values in columns.items():
        unseen, entries = lacking[label.removesuffix(", own models")], []
        for client in (site.client for site in sites):
            far = "lowest" if larger_is_better(metric) else "highest"
            notes = [far] if client == worst.get(label) else []
            notes += ["never trained"] if client in unseen else []
            text = _text(values.loc[client], metric) if client in values.index else "-"
            entries.append(Entry(text, ", ".join(notes)))
        frame[label] = entries
    return Table(frame, _caption(group, metric, len(means), len(sites)))


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _caption(group: Sequence[Measured], metric: str, known: int, shown: int) -> str:
    title = _title(metric)
    words = [f"{title[0].upper()}{title[1:]} at each site"]
    if any(one.first.trained_on for one in group):
        words[0] += ", on the examples that it trained on, since no site holds any out."
    else:
        words[0] += ", on examples that no site trained on."
    words += dict.fromkeys(_WORDS[one.first.model] for one in group if one.first.model in _WORDS)
    changed = [" ".join(one.first.task) for one in group if one.first.task]
    words += [f"With --task {given}." for given in dict.fromkeys(changed)]
    if any(one.first.own for one in group):
        words.append("Own models: each site's model on its own examples.")
    seeds = {len(one.figures) for one in group}
    if seeds != {1}:
        words.append(f"Mean ± sample standard deviation over {listed(map(str, seeds))} seeds.")
    if any(len(one.figures) == 1 < one.runs for one in group):
        words.append("The first seed's, since each seed has other sites or no figures by site.")
    if shown < known:
        words.append(f"The {shown} lowest of {known} sites are shown; the next table has all.")
    return " ".join(words)


def _spread_table(first: Measured, metric: str, columns: Mapping[str, pd.DataFrame]) -> Table:
    """Return how far the sites lie apart: a row for each model."""
    names = {site.client: site.label for site in first.first.sites}
    rows = []
    for label, values in columns.items():
        means = values.mean(axis=1)
        said = means.describe([0.1, 0.25, 0.5, 0.75, 0.9])
        ends = [
            Entry(_number(said[k], metric), names[means.agg(f"idx{k}")]) for k in ("min", "max")
        ]
        worst, best = ends if larger_is_better(metric) else ends[::-1]
        quantiles = {"10 %": "10%", "25 %": "25%", "median": "50%", "75 %": "75%", "90 %": "90%"}
        rows.append(
            {
                "model": label,
                "sites": str(len(means)),
                "mean": _number(said["mean"], metric),
                "worst site": worst,
                **{name: _number(said[q], metric) for name, q in quantiles.items()},
                "best site": best,
                "range": _number(said["max"] - said["min"], metric),
                "std. dev.": _number(said["std"], metric),
            }
        )
    caption = (
        f"{_title(metric)} over the sites: each site counts once, however many examples it has. "
        "10 %: a tenth of the sites lie below it. Range: the largest less the smallest. Std. dev.: "
        "the sample standard deviation over the sites."
    )
    return Table(pd.DataFrame(rows), caption[0].upper() + caption[1:])


def _own_or_shared(group: Sequence[Measured], metric: str) -> Iterable[str]:
    """Yield at which sites the shared model is better than the site's own, in words."""
    for one in group:
        shared, own = (one.by_site(metric, own=k).mean(axis=1) for k in (False, True))
        both = shared.index.intersection(own.index)
        if len(both) == 0:
            continue
        gain = (shared[both] - own[both]) * (1 if larger_is_better(metric) else -1)
        names = {site.client: site.label for site in one.first.sites}
        better, worse = (
            listed(names[c] for c in gain.index[part]) for part in (gain > 0, gain < 0)
        )
        said = [f"better at {better}" if better else "", f"worse at {worse}" if worse else ""]
        found = ", and ".join(filter(None, said)) or "as good everywhere"
        yield f"{one.label}: beside each site's own model, the shared model is {found}."


# ---- across sites --------------------------------------------------------------------------------


def _cross_site(one: Measured) -> Table:
    """Return the table of models by sites, the mean over the seeds that have the same models."""
    first = one.first
    metric = "accuracy" if "accuracy" in first.matrix else "loss"
    same = [f for f in one.figures if f.models == first.models and metric in f.matrix]
    names = {site.client: site.label for site in first.sites}
    # by model: its name and client, and its figures (seeds, sites)
    own = [
        (f"{names[client]}'s own", client, [f.matrix[metric][place] for f in same])
        for place, client in enumerate(first.models)
    ]
    models = [("shared", None, [f.shared[metric] for f in same if metric in f.shared]), *own]
    rows = []
    for name, owner, by_seed in models:
        texts = [_text(values, metric) for _, values in pd.DataFrame(by_seed, dtype=float).items()]
        pairs = zip(first.sites, texts, strict=False)
        entries = [Entry(text, "own" if site.client == owner else "") for site, text in pairs]
        rows += [[name, *entries]] if entries else []
    columns = ["model", *(names[site.client] for site in first.sites)]
    caption = f"{one.label}: {_title(metric)} of each model (row) on each site's examples (column)."
    unseen = listed(site.label for site in first.sites if site.unseen)
    caption += f" Never trained: {unseen}." if unseen else ""
    if len(same) > 1:
        caption += f" Mean ± sample standard deviation over {len(same)} seeds."
    return Table(pd.DataFrame(rows, columns=columns), caption)


# ---- answers -------------------------------------------------------------------------------------


def _answers(one: Measured, decisions: Decisions) -> list[Table]:
    """Return the confusion matrix, and with two classes the answers at a chosen threshold."""
    columns = [f"answered {name}" for name in decisions.classes]
    counts = pd.DataFrame(decisions.counts, columns=columns).astype(str)
    counts.insert(0, "class", [f"is {name}" for name in decisions.classes])
    caption = (
        f"{one.label}: the confusion matrix, how many examples of each class (row) got which "
        "answer (column), all sites together. The shared model answers with the most probable "
        f"class.{_of_first(one)}"
    )
    tables = [Table(counts, caption)]
    if decisions.threshold is not None and any(decisions.at_threshold):
        tables.append(_thresholds(one, decisions))
    return tables


def _thresholds(one: Measured, decisions: Decisions) -> Table:
    """Return each site's answers at the threshold that the other sites' examples choose."""
    counted = [place for place, counts in enumerate(decisions.at_threshold) if counts is not None]
    kinds = ["rightly cleared", "false alarms", "missed", "found"]
    counts = pd.DataFrame([decisions.at_threshold[n] for n in counted], columns=kinds)
    counts.loc[len(counts)] = counts.sum()  # of all sites
    cleared, alarms, missed, found = (counts[kind] for kind in kinds)
    shares = {
        "sensitivity (%)": 100 * found / (found + missed),
        "specificity (%)": 100 * cleared / (cleared + alarms),
    }
    columns = {
        "site": [*(one.first.sites[n].label for n in counted), "all sites"],
        "threshold": [*(f"{decisions.thresholds[n]:.3f}" for n in counted), ""],
        **{name: share.map("{:.1f}".format).replace("nan", "-") for name, share in shares.items()},
        **counts[kinds[::-1]].astype(str),
    }
    negative, positive = decisions.classes
    caption = (
        f"{one.label}: the answer is {positive} if its probability is at least the threshold. "
        "Each site's threshold is the one with the largest sensitivity + specificity (Youden's J) "
        "on the other sites' examples, so no example is counted that has chosen its threshold. "
        f"Sensitivity: of the examples that are {positive}, the share that was found. Specificity: "
        f"of the examples that are {negative}, the share that was recognised as such. For a new "
        f"site, the examples of all sites choose {decisions.threshold:.3f}.{_of_first(one)}"
    )
    return Table(pd.DataFrame(columns), caption)


def _of_first(one: Measured) -> str:
    return " Of the first seed." if one.runs > 1 else ""


# ---- numbers -------------------------------------------------------------------------------------


def _title(metric: str) -> str:
    return "accuracy (%)" if metric == "accuracy" else column_title(metric)


def _text(values: pd.Series, metric: str) -> str:
    """Return the mean over the seeds with its spread; a dash without a value."""
    scale, digits = (100, 1) if metric == "accuracy" else (1, 3)
    return mean_text((scale * values.dropna()).tolist(), digits)


def _number(value: float, metric: str) -> str:
    return _text(pd.Series([value]), metric)
