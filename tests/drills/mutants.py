# ruff: noqa: E501 (the code as it stands)
"""Mutants: small faults in the code, each of which some test must notice.

    python -m tests.drills.mutants [WORD ...]     # those whose name has one of the words; or all
    python -m tests.drills.mutants none           # no fault: do the tests pass without one?

Each fault is put into a copy of the tree, one at a time; the tests that are meant to notice it run
there. A fault is found by its text, not by its file, so that the list survives when files move. A
text that no file has any more is printed as "gone": the code was rewritten, and the line of the
list with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client_app", "common", "conf", "server_app", "strategies", "tasks")
_SECONDS = 240


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: starts with the part of the project.
        text: that exactly one place of the code has.
        fault: in its place.
        tests: names of test files without ``test_`` and ``.py``, wherever they are.
        only: pytest's ``-k``.
    """

    name: str
    text: str
    fault: str
    tests: str
    only: str = ""


def mutant(name: str, text: str, fault: str, tests: str, only: str = "") -> Mutant:
    """Return a mutant; ``fault`` may say ``old -> new`` of a part of the text."""
    if " -> " in fault:
        old, _, new = fault.partition(" -> ")
        assert text.count(old) == 1, name
        fault = text.replace(old, new)
    return Mutant(name, text, fault, tests, only)


MUTANTS = (
    # ---- exact sums
    mutant("sum: low part", "scaled *= scaled.dtype.type(_LOW)", "scaled *= 0", "exact_sum"),
    mutant("sum: merge shares memory", "other._parts.copy()", "other._parts", "exact_sum folding"),
    mutant("sum: norms", "(one + next(squares)) ** 0.5", "(one + 0 * next(squares)) ** 0.5",
           "exact_sum"),
    mutant("sum: largest", "return _LARGEST / max(weights, 1.0)", "return _LARGEST",
           "exact_sum border round"),
    mutant("sum: order of replies",
           "replies = sorted(self.replies, key=lambda reply: reply.client_id)",
           "replies = self.replies", "round folding exact_sum"),
    # ---- the border
    mutant("border: no step", "if steps < 1:", "if steps < 0:", "round border"),
    mutant("border: no example", 'if found["num-examples"] < 1:', 'if found["num-examples"] < 0:',
           "border"),
    mutant("border: examples", "if max_examples is not None and examples > max_examples:",
           "if False:", "border round"),
    mutant("border: steps", "if sender.max_steps is not None and steps > sender.max_steps:", "if False:",
           "border round"),
    mutant("border: lr-sum", "lr_sum <= most * (1 + 1e-6)", "lr_sum <= math.inf", "border round"),
    mutant("border: claimed weight", 'bounds.summand / metrics["num-examples"]', "bounds.summand",
           "border round"),
    mutant("border: lost state", "if metrics.get(STATE_LOST) and sender.not_lost is not None:", "if False:",
           "border round"),
    mutant("border: too large below", "if max(-low, high) > largest:", "if high > largest:",
           "border compressed_records"),
    mutant("border: not finite", "if not (math.isfinite(low) and math.isfinite(high)):",
           "if math.isnan(low):", "round border"),
    mutant("border: widest", "(wanted is None and length <= widest)", "wanted is None", "border"),
    mutant("border: evaluation", "    _check_sender(metrics, client_id, max_examples)\n", "    pass\n",
           "border client_metrics own_metric"),
    mutant("border: bytes of an array", "if len(data) != start + math.prod(shape) * dtype.itemsize:",
           "if False:", "border"),
    mutant("border: longest header", "if start > _LONGEST_HEADER:", "if False:", "border"),
    mutant("border: packed size", "if sum(size for *_, size in heads) != len(data) - end:",
           "if sum(size for *_, size in heads) > len(data) - end:", "packed_records"),
    mutant("border: packed twice", "        if name in record:\n            raise ValueError(f\"a packed",
           "if name in record: -> if False:", "packed_records"),
    mutant("border: negative size", "return right and head[-1] >= 0 and", "return right and",
           "packed_records"),
    # ---- folding and the round
    mutant("fold: discounts", "weights=[self.weights.of_update(reply) / whole",
           "weights=[self.weights.undiscounted(reply) / whole", "fedbuff"),
    mutant("fold: buffers", "self.buffers.add(reply.buffers, self.weights.of_buffers(reply))",
           "self.buffers.add(reply.buffers, self.weights.of_update(reply))", "round fedbuff"),
    mutant("fold: merged refusals", "self.refused |= other.refused", "pass", "folding"),
    mutant("fold: misfits", "if str(found) != usual", "if False", "round border fedproto initial_model"),
    mutant("fold: missing",
           "missing = set(sent) - fold.refused.keys() - {reply.client_id for reply in fold.replies}",
           "missing = set[int]()", "round folding"),
    mutant("round: buffers stay", "{**tensors, **stepped, **moved}", "{**tensors, **stepped}",
           "round batches reductions closed_forms"),
    mutant("round: divergence", "if not all(math.isfinite(end) for end in value.aminmax()):",
           "if False:", "round status"),
    mutant("round: coupled state", "                part.init(self._trainable(tensors))\n",
           "                pass\n", "round registration live_clients"),
    mutant("round: output model kept", 'states[OUTPUT] = {"params": self.output_model}', "pass",
           "every_strategy round", "feddyn or output"),
    # ---- asynchronous rounds, simulated systems
    mutant("async: one more stale", "float((1 + staleness) ** -self.exponent)",
           "float((2 + staleness) ** -self.exponent)", "fedbuff"),
    mutant("async: versions", 'self.versions = {v: Version(part.pop(_MODEL), part) for v, part in parts.items()}',
           "self.versions = {}", "fedbuff"),
    mutant("async: buffers' shares",
           "shares = [r.num_examples * self.discounts[r.client_id] / examples for r in total.replies]",
           "shares = [r.num_examples / examples for r in total.replies]", "fedbuff"),
    mutant("async: rebase", "m + weight * (kept[n] - tensors[n])", "m - weight * (kept[n] - tensors[n])",
           "fedbuff"),
    mutant("async: too old", "staleness > self.max_staleness", "staleness >= self.max_staleness",
           "fedbuff server_parts live_clients"),
    mutant("async: hinge", "(staleness - self.threshold) + 1.0)", "(staleness - self.threshold) + 2.0)",
           "fedbuff"),
    mutant("system: over-selection", "math.ceil(len(chosen) * self.over_selection - 1e-9)",
           "math.ceil(len(chosen) * self.over_selection)", "systems"),
    mutant("system: deadline", "if seconds[client] <= deadline][:most]", "][:most]", "systems"),
    # ---- compression
    mutant("compression: rounding", "generator=draws) < exact - low)", "generator=draws) > exact - low)",
           "compression compressed_records"),
    mutant("compression: residual",
           "state[key] = {_NUMBERS: numbers - codec.decode(arrays, len(numbers), seed)}",
           "state[key] = {_NUMBERS: numbers}", "compressed_records"),
    mutant("compression: indices rise", "(indices.diff() <= 0).any() or ", "", "compressed_records compression"),
    mutant("compression: counts", "if (counts < 0).any() or int(counts.sum()) != len(indices):",
           "if False:", "compressed_records compression"),
    mutant("compression: random_k's scale",
           "values = arrays[VALUES] if self.error_feedback else arrays[VALUES] * lengths",
           "values = arrays[VALUES]", "compression"),
    mutant("compression: int4's rest", "if (whole[size:] != 0).any():", "if False:",
           "compression compressed_records"),
    mutant("compression: scales", "if (arrays[SCALES] < 0).any():", "if False:",
           "compression compressed_records"),
    # ---- privacy
    mutant("privacy: clipped tensors", "left_out = reply.per_example | {NORM_BIT}",
           "left_out = {*reply.payloads}", "differential_privacy"),
    mutant("privacy: rounding's length", "self.sensitivity = self.norm.value + longer",
           "self.sensitivity = self.norm.value", "differential_privacy"),
    mutant("privacy: over m", "mean = mean_reply(total, self.size)",
           "mean = mean_reply(total, count)", "differential_privacy"),
    mutant("privacy: uploads", "self[client_id] = self.get(client_id, 0) + 1", "self[client_id] = 1",
           "differential_privacy gaussian_mechanism"),
    mutant("privacy: two C", "return 2 * self.clipping_norm * self.noise_multiplier",
           "return self.clipping_norm * self.noise_multiplier", "differential_privacy"),
    mutant("privacy: exact sigma", "if excess(classical) <= 0.0:", "if True:", "differential_privacy"),
    mutant("privacy: metrics leave",
           "metrics = {name: reply.metrics[name] for name in _NEEDED if name in reply.metrics}",
           "metrics = reply.metrics", "differential_privacy"),
    mutant("privacy: an example's reach", "self.noise_multiplier * math.hypot(self.clip, 1.0)",
           "self.noise_multiplier * self.clip", "gaussian_mechanism"),
    mutant("privacy: amplification", "return self.secret and rate < 1.0 and nobody",
           "return rate < 1.0 and nobody", "differential_privacy"),
    mutant("privacy: rounds restored", 'self.rounds = int(state["released"]["rounds"])',
           "self.rounds = 0", "differential_privacy"),
    mutant("privacy: adaptive norm", "math.exp(-self.lr * (0.5 + centred", "math.exp(self.lr * (0.5 + centred",
           "differential_privacy aggregators"),
    mutant("secagg: which share", "hashes[:_HASH] if of_seed else hashes[_HASH:]", "hashes[:_HASH]",
           "secagg_attacks secure_aggregation"),
    mutant("secagg: too many seeds", "or not state.sk1 or len(nodes) > most:", "or not state.sk1:",
           "secagg_attacks"),
    mutant("secagg: seeds twice", 'state.sk1 = b""', "pass", "secagg_attacks"),
    mutant("secagg: keys' form", "if public_key_to_bytes(loaded) != key:", "if False:",
           "secagg_attacks"),
    mutant("secagg: shares' hashes", "and lengths and share_hashes(*shares) == hashes", "and lengths",
           "secagg_attacks"),
    # ---- robust aggregation
    mutant("robust: median", "(count - 1) // 2, count // 2 + 1", "count // 2, count // 2 + 1", "aggregators"),
    mutant("robust: trimmed share", "int(self.trim * count + 1e-9)", "int(self.trim * count)",
           "aggregators"),
    mutant("robust: krum's neighbours", "neighbours = max(1, len(distances) - attackers - 2)",
           "neighbours = max(1, len(distances) - attackers - 1)", "aggregators"),
    mutant("robust: bulyan's theta", "len(distances) - 2 * self.attackers:",
           "len(distances) - self.attackers:", "aggregators"),
    mutant("robust: trust below 0", "max(0.0, product / (length * other))", "abs(product / (length * other))",
           "aggregators round", "trust"),
    mutant("robust: centre", "[*shares, 1.0 - sum(shares)]", "[*shares, 1.0]", "aggregators"),
    mutant("robust: bound", "1.0 if length <= bound else bound / length", "1.0", "aggregators"),
    # ---- components and statistics
    mutant("optimizer: momentum", "self.momentum * v + update[n]", "v + update[n]",
           "server_parts closed_forms"),
    mutant("optimizer: first second moment", "torch.full_like(v, self.tau**2)", "torch.zeros_like(v)",
           "server_parts closed_forms"),
    mutant("optimizer: yogi", "* square * torch.sign(moment - square)", "* square", "server_parts closed_forms"),
    mutant("training: steps of a phase", "taken[name] += context.num_steps - before",
           "taken[name] += context.num_steps", "phases"),
    mutant("training: frozen momentum", "            if not param.requires_grad:  # momentum would move it\n",
           "if not param.requires_grad: -> if False:", "phases local_training client"),
    mutant("training: seed of a client", "np.random.SeedSequence([seed, round, client_id])",
           "np.random.SeedSequence([seed, round])", "client local_training round"),
    mutant("aggregator: cancelling updates", "stretch = 0.0 if cancelled else", "stretch =",
           "fedmrur closed_forms server_parts fedcm update_diagnostics"),
    mutant("schedule: cosine", "math.cos(math.pi * (round - 1) / num_rounds)",
           "math.cos(math.pi * round / num_rounds)", "server_parts"),
    mutant("sampler: rounding", "int(self.participation * num_clients + 0.5)",
           "int(self.participation * num_clients)", "server_parts"),
    mutant("sampler: nobody", "if chosen.size == 0:", "if False:", "server_parts"),
    mutant("selection: last", 'ordered[-count:] if kind == "last" else', "", "phases local_training personal client server_parts refused_values"),
    mutant("soft labels: smoothing", "(1 - smoothing) * new + smoothing * old",
           "smoothing * new + (1 - smoothing) * old", "soft_labels feddw"),
    mutant("soft labels: too few", "least = _SURE * self.how.noise * math.sqrt(summed)",
           "least = 0.0", "soft_labels feddw gaussian_mechanism"),
    mutant("cka: centred", "self._products - torch.outer(self._sums, self._sums) / self.count",
           "self._products", "linear_cka"),
    mutant("class counts: below 0", "if (counts < 0).any():\n", "if False:\n", "border pfnm maecho ensemble dense"),
    # ---- methods
    mutant("scaffold: c over N", "change[name] / cohort.num_clients", "change[name] / cohort.size",
           "closed_forms own_models round"),
    mutant("scaffold: sign", "grads[name].add_(shift)", "grads[name].sub_(shift)",
           "gradients closed_forms"),
    mutant("feddyn: share", "share = cohort.size / cohort.num_clients", "share = 1.0", "feddyn"),
    mutant("feddyn: half", "0.5 * m.square().sum()", "m.square().sum()", "feddyn gradients"),
    mutant("fedprox: half", "0.5 * self.mu * torch.stack(squares).sum()",
           "self.mu * torch.stack(squares).sum()", "gradients closed_forms"),
    mutant("fednova: untrained tensors", "torch.where(reaches > 0, reaches, torch.inf)", "reaches",
           "closed_forms phases"),
    mutant("feddw: decay", "step.context.round // self.decay_every", "step.context.round", "feddw"),
    mutant("fedexp: two", "squares / (2 * len(total.replies) * of_mean)",
           "squares / (len(total.replies) * of_mean)", "fedexp"),
    mutant("apfl: clamp", "sum(along)).clamp(0.0, 1.0)", "sum(along))", "own_models personal"),
    mutant("per_fedavg: difference", "(a - b) / (2 * self.delta)", "(a - b) / self.delta",
           "per_fedavg"),
    mutant("fedproto: unknown class", "torch.where(known, distances, 0.0).mean()", "distances.mean()",
           "fedproto"),
    mutant("fedlc: sign", "-counts.pow(-0.25)", "counts.pow(-0.25)", "fedlc"),
    mutant("feddecorr: variances", "squares.triu(diagonal=1)", "squares.triu()", "feddecorr"),
    mutant("fedinit: side", "self.beta * (x - last)", "self.beta * (last - x)", "sharpness"),
    mutant("fedsmoo: common", "add_(grad - self.common[name])", "add_(grad)", "sharpness"),
    mutant("fedlesam: side", "subtract(context.state.get(RECEIVED, {}), context.anchor)",
           "subtract(context.anchor, context.state.get(RECEIVED, context.anchor))", "sharpness"),
    mutant("ccvr: unbiased", "(counts[..., None] - 1).clamp_min(1)", "counts[..., None]", "ccvr"),
    # ---- tasks
    mutant("dirichlet: balance", "shares = shares * (sizes < fair_share)", "pass", "partitions"),
    mutant("dirichlet: smallest", "min(map(len, rows)) >= self.min_size:", "True:", "partitions"),
    mutant("conformal: rank", "math.ceil((count + 1) * (1 - alpha) - 1e-9)",
           "math.ceil(count * (1 - alpha) - 1e-9)", "conformal_scores conformal_sketch"),
    mutant("conformal: edges", 'np.searchsorted(self.edges, scores, side="left")',
           "np.searchsorted(self.edges, scores) - 1", "conformal_sketch"),
    mutant("table: merged squares", "+ between**2 * a.counts * share", "", "tabular"),
    mutant("loss: ignored pixels", "(labels != IGNORED).sum().clamp_min(1)", "labels.numel()",
           "segmentation"),
    mutant("metrics: absent classes", "float(value[present].mean())", "float(value.mean())", "metrics"),
    # ---- conf
    mutant("conf: two owners of a slot", "if slot in owners:", "if False:", "composition schema bad_input"),
    mutant("conf: epochs and steps", "if (epochs is None) == (steps is None):", "if False:",
           "schema bad_input refused_values composition"),
    mutant("conf: required settings", "if found != needed:", "if False:",
           "bad_input composition refused_values schema"),
    mutant("conf: more replies than clients", 'if values["min_replies"] > cohort:', "if False:",
           "bad_input composition schema refused_values"),
    mutant("conf: hostile clients", 'if not attack.get("allow"):', "if False:", "bad_input attacks refused_values"),
    # ---- client and server
    mutant("client: passing buffers", "setattr(self.model.get_submodule(owner), leaf, value.clone())",
           "pass", "client own_models own_task"),
    mutant("client: requires_grad", "param.requires_grad_(self._trained[name])", "pass",
           "client own_models own_task generative_and_frozen_models"),
    mutant("client: kept versions", "kept = {*keep, round}", "kept = {round}", "client damaged_files"),
    mutant("client: damaged state", 'path.replace(path.with_suffix(".damaged"))', "path",
           "client damaged_files"),
    mutant("policy: payloads", "yield line(f\"the payload {name}\", rules, \"payloads\")", "yield from ()", "policy"),
    mutant("policy: own payloads", "if lines := list(forbidden_payloads(self.rules, reply.payloads)):", "if False:",
           "policy"),
    mutant("policy: few examples", "return enough and matches(name, self.rules.metrics)",
           "enough and -> ", "policy"),
    mutant("policy: examples of a class", "if not class_name or self.rules.min_examples == 1:", "if True:", "policy"),
    mutant("policy: reproducible noise", "    if node.reproducible_noise:", "    if False:", "policy"),
    mutant("policy: a part of a folder", "place.is_relative_to(Path(one).expanduser().resolve())",
           "str(place).startswith(one)", "policy"),
    mutant("policy: over midnight", "(begin <= now or now < end) if over_midnight", "(begin <= now) if over_midnight",
           "policy"),
    mutant("policy: a pinned site", "is not None and simulated and compared:", "is not None and False:", "policy"),
    mutant("files: checksum", 'if metadata.get("sha256") != found:', "if False:", "damaged_files"),
    mutant("files: length", "if end != len(content):", "if False:", "damaged_files"),
    mutant("files: another file", "        if found != value:\n            raise DamagedFileError(",
           "if found != value: -> if False:", "damaged_files"),
    mutant("files: left behind", "if _UNFINISHED.fullmatch(path.name) and not path.is_dir():", "if False:",
           "full_disk damaged_files"),
    mutant("checkpoint: two kept", "for old in checkpoints(folder)[:-_KEPT]:", "for old in ():",
           "damaged_files full_disk best_round runtimes"),
    mutant("checkpoint: its rows",
           'if rows_sha256([row for row in rows if row["round"] <= round]) != expected:', "if False:",
           "damaged_files"),
    mutant("best round: threshold", "sign * value > reference + self.min_delta",
           "sign * value > reference", "best_round"),
    mutant("best round: patience", "if passed < self.patience:", "if passed <= self.patience:",
           "best_round"),
    mutant("best round: first of the best", 'sign = 1.0 if self.maximises else -1.0\n        return max(',
           "sign = -1.0 if self.maximises else 1.0\n        return max(", "best_round"),
    mutant("target: reached", "(accuracy or -1.0) >= target", "(accuracy or -1.0) > target + 1",
           "best_round last_steps flower_apps"),
)  # fmt: skip


def source_files(tree: Path) -> Iterator[Path]:
    """Yield the project's Python files."""
    for package in PACKAGES:
        yield from sorted((tree / package).rglob("*.py"))


def place_of(text: str, tree: Path) -> Path | None:
    """Return the only file that has the text once; None if there is none, or more."""
    found = [path for path in source_files(tree) if (n := path.read_text().count(text)) and n == 1]
    return found[0] if len(found) == 1 else None


def tests_of(one: Mutant, tree: Path) -> list[str]:
    """Return the paths of a mutant's tests that there are."""
    names = {f"test_{name}.py" for name in one.tests.split()}
    found = (path for path in (tree / "tests").rglob("test_*.py") if path.name in names)
    return sorted(str(path.relative_to(tree)) for path in found)


def outcome(tests: Sequence[str], only: str, tree: Path) -> str:
    """Return what becomes of tests: pass, fail, slow or error (pytest's own)."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-m", "not flower and not docker and not drill"]
    command += ["-k", only] if only else []
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = partial(subprocess.run, cwd=tree, env=environment, capture_output=True, text=True)
    try:
        done = run([*command, *tests], timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "slow"
    if done.returncode > 1:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return {0: "pass", 1: "fail"}.get(done.returncode, "error")


def verdict(one: Mutant, tree: Path) -> str:
    """Return what becomes of a mutant: killed, SURVIVED, gone, or why nobody knows."""
    path = place_of(one.text, tree)
    if path is None:
        return "gone"
    tests = tests_of(one, tree)
    if not tests:
        return "no tests"
    before = path.read_text()
    path.write_text(before.replace(one.text, one.fault))
    try:
        found = outcome(tests, one.only, tree)
    finally:
        path.write_text(before)
    return {"pass": "SURVIVED", "fail": "killed"}.get(found, found)


def main(words: Sequence[str]) -> None:
    """Print a table of the mutants and what became of them."""
    chosen = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", "results", "site", "__pycache__", ".*_cache"
        )
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        if list(words) == ["none"]:
            for test in sorted({test for one in MUTANTS for test in tests_of(one, tree)}):
                print(f"{outcome([test], '', tree):9} {test}", flush=True)
            return
        for one in chosen:
            began = time.perf_counter()
            found = verdict(one, tree)
            counts[found] = counts.get(found, 0) + 1
            print(f"{found:9} {time.perf_counter() - began:5.0f} s  {one.name}", flush=True)
    print(f"{len(chosen)} mutants: " + ", ".join(f"{n} {what}" for what, n in counts.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
