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
import re
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


def mutant(name: str, code: str, tests: str, only: str = "") -> Mutant:
    """Return a mutant of a row of the table."""
    before, old, new, after = re.fullmatch(r"(.*)⟦(.*) → (.*)⟧(.*)", code).groups()
    found = (before + one + after for one in (old, new))
    text, fault = (one.replace(r"\n", "\n") for one in found)
    return Mutant(name, text, fault, tests, only)


# Name :: code, ⟦as it is → with the fault⟧ :: tests [:: only]; an indented line goes on.
TABLE = r"""
# exact sums
sum: whole numbers :: whole += ⟦_TO_WHOLE → 2.0**52⟧\n :: exact_sum
sum: room :: if self._bound + units > ⟦_MOST → 4 * _MOST⟧: :: exact_sum
sum: merge shares memory :: total = self._low[0]⟦ if self._own else self._low[0].copy() → ⟧ :: exact_sum folding scale_out
sum: norms :: rest: Tensor = ⟦ → 0 * ⟧torch.linalg.vector_norm( :: exact_sum
sum: layout :: return (value.permute(0, ⟦2, 3 → 3, 2⟧, 1) if :: exact_sum
sum: largest of a block :: if longest < ⟦_SPLIT / 2 → 8 * _SPLIT⟧: :: exact_sum
sum: largest :: return _LARGEST⟦ / max(weights, 1.0) → ⟧ :: exact_sum border round
sum: order of replies :: replies = ⟦sorted(self.replies, key=lambda reply: reply.client_id) → self.replies⟧
    :: round folding exact_sum
# the border
border: no step :: if steps < ⟦1 → 0⟧: :: round border
border: no example :: if found["num-examples"] < ⟦1 → 0⟧: :: border
border: examples :: if ⟦max_examples is not None and examples > max_examples → False⟧: :: border round
border: steps :: if ⟦sender.max_steps is not None and steps > sender.max_steps → False⟧: :: border round
border: lr-sum :: lr_sum <= ⟦most * (1 + 1e-6) → math.inf⟧ :: border round
border: claimed weight :: bounds.summand⟦ / metrics["num-examples"] → ⟧ :: border round
border: lost state :: if ⟦metrics.get(STATE_LOST) and sender.not_lost is not None → False⟧: :: border round
border: too large below :: if ⟦max(-low, high) → high⟧ > largest: :: border compressed_records
border: not finite :: if ⟦not (math.isfinite(low) and math.isfinite(high) → math.isnan(low⟧): :: round border
border: widest :: ⟦(wanted is None and length <= widest) → wanted is None⟧ :: border
border: evaluation ::     ⟦_check_sender(metrics, client_id, max_examples) → pass⟧\n
    :: registration
border: longest header :: if ⟦start > _LONGEST_HEADER → False⟧: :: border
border: packed size :: if sum(size for *_, size in heads) ⟦!= → >⟧ len(data) - end: :: packed_records
border: packed twice ::         if ⟦name in record → False⟧:\n            raise ValueError(f"a packed
    :: packed_records
border: negative size :: return right and⟦ head[-1] >= 0 and → ⟧ :: packed_records
# folding and the round
fold: discounts :: weights=[self.weights.⟦of_update → undiscounted⟧(reply) / whole :: fedbuff
fold: buffers :: self.buffers.add(reply.buffers, self.weights.⟦of_buffers → of_update⟧(reply))
    :: round fedbuff
fold: merged refusals :: ⟦self.refused |= other.refused → pass⟧ :: folding
fold: misfits :: if ⟦str(found) != usual → False⟧ :: round border fedproto initial_model
fold: missing :: missing = set⟦(sent) - fold.refused.keys() - {reply.client_id for reply in fold.replies} → [int]()⟧
    :: round folding
round: buffers stay :: {**tensors, **stepped⟦, **moved → ⟧} :: round batches reductions closed_forms
round: divergence :: if ⟦not all(math.isfinite(end) for end in value.aminmax()) → False⟧: :: round status
round: coupled state ::                 ⟦part.init(self._trainable(tensors)) → pass⟧\n
    :: round registration live_clients
round: output model kept :: ⟦states[OUTPUT] = {"params": self.output_model} → pass⟧
    :: every_strategy round :: feddyn or output
# asynchronous rounds, simulated systems
async: one more stale :: float((⟦1 → 2⟧ + staleness) ** -self.exponent) :: fedbuff
async: versions :: self.versions = {⟦v: Version(part.pop(_MODEL), part) for v, part in parts.items() → ⟧}
    :: fedbuff
async: buffers' shares :: shares = [r.num_examples ⟦* self.discounts[r.client_id]  → ⟧/ examples for r in total.replies]
    :: fedbuff
async: rebase :: m ⟦+ → -⟧ weight * (kept[n] - tensors[n]) :: fedbuff
async: too old :: staleness >⟦ → =⟧ self.max_staleness :: fedbuff server_parts live_clients
async: hinge :: (staleness - self.threshold) + ⟦1 → 2⟧.0) :: fedbuff
system: over-selection :: math.ceil(len(chosen) * self.over_selection⟦ - 1e-9 → ⟧) :: systems
system: deadline :: ⟦if seconds[client] <= deadline → ⟧][:most] :: systems
# compression
compression: rounding :: generator=draws) ⟦< → >⟧ exact - low) :: compression compressed_records
compression: residual :: state[key] = {_NUMBERS: numbers⟦ - codec.decode(arrays, len(numbers), seed) → ⟧}
    :: compressed_records
compression: indices rise :: ⟦(indices.diff() <= 0).any() or  → ⟧ :: compressed_records compression
compression: counts :: if ⟦(counts < 0).any() or int(counts.sum()) != len(indices) → False⟧:
    :: compressed_records compression
compression: random_k's scale :: values = arrays[VALUES]⟦ if self.error_feedback else arrays[VALUES] * lengths → ⟧
    :: compression
compression: int4's rest :: if ⟦(whole[size:] != 0).any() → False⟧: :: compression compressed_records
compression: scales :: if ⟦(arrays[SCALES] < 0).any() → False⟧: :: compression compressed_records
# privacy
privacy: clipped tensors :: left_out = ⟦reply.per_example | {NORM_BIT → {*reply.payloads⟧}
    :: differential_privacy
privacy: rounding's length :: self.sensitivity = self.norm.value⟦ + longer → ⟧ :: differential_privacy
privacy: over m :: mean = mean_reply(total, ⟦self.size → count⟧) :: differential_privacy
privacy: uploads :: self[client_id] = ⟦self.get(client_id, 0) +  → ⟧1
    :: differential_privacy gaussian_mechanism
privacy: two C :: return ⟦2 *  → ⟧self.clipping_norm * self.noise_multiplier :: differential_privacy
privacy: exact sigma :: if ⟦excess(classical) <= 0.0 → True⟧: :: differential_privacy
privacy: metrics leave :: metrics = ⟦{name: reply.metrics[name] for name in _NEEDED if name in reply.metrics} → reply.metrics⟧
    :: differential_privacy
privacy: an example's reach :: self.noise_multiplier * ⟦math.hypot(self.clip, 1.0) → self.clip⟧
    :: gaussian_mechanism
privacy: amplification :: return ⟦self.secret and  → ⟧rate < 1.0 and nobody :: differential_privacy
privacy: rounds restored :: self.rounds = ⟦int(state["released"]["rounds"]) → 0⟧ :: differential_privacy
privacy: adaptive norm :: math.exp(⟦- → ⟧self.lr * (0.5 + centred :: differential_privacy aggregators
secagg: which share :: hashes[:_HASH]⟦ if of_seed else hashes[_HASH:] → ⟧ :: secagg_attacks secure_aggregation
secagg: too many seeds :: or not state.sk1⟦ or len(nodes) > most → ⟧: :: secagg_attacks
secagg: seeds twice :: ⟦state.sk1 = b"" → pass⟧ :: secagg_attacks
secagg: keys' form :: if ⟦public_key_to_bytes(loaded) != key → False⟧: :: secagg_attacks
secagg: shares' hashes :: and lengths⟦ and share_hashes(*shares) == hashes → ⟧ :: secagg_attacks
# robust aggregation
robust: median :: ⟦(count - 1) → count⟧ // 2, count // 2 + 1 :: aggregators
robust: trimmed share :: int(self.trim * count⟦ + 1e-9 → ⟧) :: aggregators
robust: krum's neighbours :: neighbours = max(1, len(distances) - attackers - ⟦2 → 1⟧) :: aggregators
robust: bulyan's theta :: len(distances) - ⟦2 *  → ⟧self.attackers: :: aggregators
robust: trust below 0 :: ⟦max(0.0,  → abs(⟧product / (length * other)) :: aggregators round :: trust
robust: centre :: [*shares, 1.0⟦ - sum(shares) → ⟧] :: aggregators
robust: bound :: 1.0⟦ if length <= bound else bound / length → ⟧ :: aggregators
# components and statistics
optimizer: momentum :: ⟦self.momentum *  → ⟧v + update[n] :: server_parts closed_forms
optimizer: first second moment :: torch.⟦full_like(v, self.tau**2 → zeros_like(v⟧)
    :: server_parts closed_forms
optimizer: yogi :: * square⟦ * torch.sign(moment - square) → ⟧ :: server_parts closed_forms
training: steps of a phase :: taken[name] += context.num_steps⟦ - before → ⟧ :: phases
training: frozen momentum ::             if ⟦not param.requires_grad → False⟧:  # momentum would move it\n
    :: phases local_training client
training: seed of a client :: np.random.SeedSequence([seed, round⟦, client_id → ⟧])
    :: client local_training round
aggregator: cancelling updates :: stretch =⟦ 0.0 if cancelled else → ⟧
    :: fedmrur closed_forms server_parts fedcm update_diagnostics
schedule: cosine :: math.cos(math.pi * ⟦(round - 1) → round⟧ / num_rounds) :: server_parts
sampler: rounding :: int(self.participation * num_clients⟦ + 0.5 → ⟧) :: server_parts
sampler: nobody :: if ⟦chosen.size == 0 → False⟧: :: server_parts
selection: last :: ⟦ordered[-count:] if kind == "last" else → ⟧
    :: phases local_training personal client server_parts refused_values
soft labels: smoothing :: ⟦(1 - smoothing) * new + smoothing → smoothing * new + (1 - smoothing)⟧ * old
    :: soft_labels feddw
soft labels: too few :: least = ⟦_SURE * self.how.noise * math.sqrt(summed) → 0.0⟧
    :: soft_labels feddw gaussian_mechanism
cka: centred :: self._products⟦ - torch.outer(self._sums, self._sums) / self.count → ⟧ :: linear_cka
class counts: below 0 :: ((counts == counts.round())⟦ & (counts >= 0) → ⟧).all() :: border pfnm maecho ensemble dense
# methods
scaffold: c over N :: change[name] / cohort.⟦num_clients → size⟧ :: closed_forms own_models round
scaffold: sign :: grads[name].⟦add_ → sub_⟧(shift) :: gradients closed_forms
feddyn: share :: share = ⟦cohort.size / cohort.num_clients → 1.0⟧ :: feddyn
feddyn: half :: ⟦0.5 *  → ⟧m.square().sum() :: feddyn gradients
fedprox: half :: ⟦0.5 *  → ⟧self.mu * torch.stack(squares).sum() :: gradients closed_forms
fednova: untrained tensors :: ⟦torch.where(reaches > 0, reaches, torch.inf) → reaches⟧ :: closed_forms phases
feddw: decay :: step.context.round⟦ // self.decay_every → ⟧ :: feddw
fedexp: two :: squares / (⟦2 *  → ⟧len(total.replies) * of_mean) :: fedexp
apfl: clamp :: sum(along))⟦.clamp(0.0, 1.0) → ⟧ :: own_models personal
per_fedavg: difference :: (a - b) / ⟦(2 * self.delta) → self.delta⟧ :: per_fedavg
fedproto: unknown class :: ⟦torch.where(known, distances, 0.0) → distances⟧.mean() :: fedproto
fedlc: sign :: ⟦- → ⟧counts.pow(-0.25) :: fedlc
feddecorr: variances :: squares.triu(⟦diagonal=1 → ⟧) :: feddecorr
fedinit: side :: self.beta * (⟦x - last → last - x⟧) :: sharpness
fedsmoo: common :: add_(grad⟦ - self.common[name] → ⟧) :: sharpness
fedlesam: side :: subtract(context.⟦state.get(RECEIVED, {}), context.anchor → anchor, context.state.get(RECEIVED, context.anchor)⟧)
    :: sharpness
ccvr: unbiased :: ⟦(counts[..., None] - 1).clamp_min(1) → counts[..., None]⟧ :: ccvr
# tasks
dirichlet: balance :: ⟦shares = shares * (sizes < fair_share) → pass⟧ :: partitions
dirichlet: smallest :: ⟦min(map(len, rows)) >= self.min_size → True⟧: :: partitions
conformal: rank :: math.ceil(⟦(count + 1) → count⟧ * (1 - alpha) - 1e-9) :: conformal_scores conformal_sketch
conformal: edges :: np.searchsorted(self.edges, scores⟦, side="left") → ) - 1⟧ :: conformal_sketch
table: merged squares :: ⟦+ between**2 * a.counts * share → ⟧ :: tabular
loss: ignored pixels :: ⟦(labels != IGNORED).sum().clamp_min(1 → labels.numel(⟧) :: segmentation
metrics: absent classes :: float(value⟦[present] → ⟧.mean()) :: metrics
# conf
conf: two owners of a slot :: if ⟦slot in owners → False⟧: :: composition schema bad_input
conf: epochs and steps :: if ⟦(epochs is None) == (steps is None) → False⟧:
    :: schema bad_input refused_values composition
conf: required settings :: if ⟦found != needed → False⟧: :: bad_input composition refused_values schema
conf: more replies than clients :: if ⟦values["min_replies"] > cohort → False⟧:
    :: bad_input composition schema refused_values
conf: hostile clients :: if ⟦not attack.get("allow") → False⟧: :: bad_input attacks refused_values
# client and server
client: passing buffers :: ⟦setattr(self.model.get_submodule(owner), leaf, value.clone()) → pass⟧
    :: client own_models own_task
client: requires_grad :: ⟦param.requires_grad_(self._trained[name]) → pass⟧
    :: client own_models own_task generative_and_frozen_models
client: kept versions :: kept = {⟦*keep,  → ⟧round} :: client damaged_files
client: damaged state :: path⟦.replace(path.with_suffix(".damaged")) → ⟧ :: client damaged_files
policy: payloads :: yield ⟦line(f"the payload {name}", rules, "payloads" → from (⟧) :: policy
policy: own payloads :: if ⟦lines := list(forbidden_payloads(self.rules, reply.payloads)) → False⟧: :: policy
policy: few examples :: return ⟦enough and → ⟧ matches(name, self.rules.metrics) :: policy
policy: examples of a class :: if ⟦not class_name or self.rules.min_examples == 1 → True⟧: :: policy
policy: reproducible noise ::     if ⟦node.reproducible_noise → False⟧: :: policy
policy: a part of a folder :: ⟦place.is_relative_to(Path(one).expanduser().resolve() → str(place).startswith(one⟧)
    :: policy
policy: over midnight :: (begin <= now⟦ or now < end → ⟧) if over_midnight :: policy
policy: a pinned site :: is not None and ⟦simulated and compared → False⟧: :: policy
files: checksum :: if ⟦metadata.get("sha256") != found → False⟧: :: damaged_files
files: another file :: if ⟦label.get(key) != value → False⟧:
    :: damaged_files
files: left behind :: if ⟦_UNFINISHED.fullmatch(path.name) and not path.is_dir() → False⟧:
    :: full_disk damaged_files
checkpoint: two kept :: for old in ⟦checkpoints(folder)[:-_KEPT] → ()⟧:
    :: damaged_files full_disk best_round runtimes
checkpoint: its rows :: if ⟦rows_sha256([row for row in rows if row["round"] <= round]) != label.get("rows") → False⟧:
    :: damaged_files
best round: threshold :: sign * value > reference⟦ + self.min_delta → ⟧ :: best_round
best round: patience :: if passed <⟦ → =⟧ self.patience: :: best_round
best round: first of the best :: sign = ⟦1.0 if self.maximises else - → -1.0 if self.maximises else ⟧1.0\n        return max(
    :: best_round
target: reached :: (accuracy or -1.0) >⟦= target →  target + 1⟧ :: best_round
"""
MUTANTS = [
    mutant(*row.split(" :: "))
    for row in TABLE.replace("\n    ", " ").strip().splitlines()
    if not row.startswith("#")
]


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
