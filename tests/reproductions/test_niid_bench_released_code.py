"""NIID-Bench's released code with its two faults or without, and what is written of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedhet.reproductions.niid_bench.released_code import DIVISION, PATCHED, changed, main

# As the clone's files are used: SCAFFOLD's two lines, and accuracies of the server and of clients.
CLONE = {
    "utils.py": """
from torch.utils.model_zoo import tqdm
from torchvision.datasets import CIFAR10
def compute_accuracy(model, dataloader, get_confusion_matrix=False, device="cpu"):
    return (float(model.weight.sum()), None) if get_confusion_matrix else 1 / 0
""",
    "experiments.py": """
import argparse, torch
from utils import *
parser = argparse.ArgumentParser()
parser.add_argument("--n_parties", type=int), parser.add_argument("--comm_round", type=int)
parser.add_argument("--alg"), parser.add_argument("--partition"), parser.add_argument("--sample")
args, _ = parser.parse_known_args()
assert (args.alg, args.partition, args.sample) == ("scaffold", "noniid-#label2", "0.1")
assert CIFAR10.__module__.startswith("fedhet.")
def network(value):
    made = torch.nn.Linear(2, 2, bias=False)
    made.weight.data.fill_(value)
    return made
def local_train(net):
    return compute_accuracy(net, None), compute_accuracy(net, None, get_confusion_matrix=True)
if __name__ == '__main__':
    selected = list(range(10))
    global_model, c_globals = network(0), [network(3)]
    c_global = c_globals[0]
    c_nets = {i: network(float(c_global.weight[0, 0])) for i in range(args.n_parties)}
    for round in range(args.comm_round):
        for i in selected:
            c_nets[i].weight.data.add_(1)
            assert local_train(network(7)) == (0.0, (0.0, None))
        total_delta = {0: torch.full((2, 2), 10.0)}
        for key in total_delta:
            total_delta[key] /= args.n_parties
            c_global.weight.data += total_delta[key]
        global_model.weight.data += 0.05
        compute_accuracy(global_model, None)
        compute_accuracy(global_model, None, get_confusion_matrix=True)
""",
}


@pytest.mark.parametrize(("divisor", "start"), [(100, "random"), (10, "zero")])
def test_the_two_lines_are_the_settings_and_each_round_has_the_norms(
    divisor: int, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in CLONE.items():
        (tmp_path / name).write_text(text)
    setting = f"--partition noniid-#label2 --divisor {divisor} --start {start} --rounds 2"
    words = ["released_code", str(tmp_path), *setting.split(), "--out", str(tmp_path / "runs.json")]
    monkeypatch.setenv("FEDHET_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "utils", raising=False)
    for name in ("torchvision", *PATCHED):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    main()
    monkeypatch.delitem(sys.modules, "utils")
    found = json.loads((tmp_path / "runs.json").read_text())
    begun = {"random": 3, "zero": 0}[start]
    assert (found["divisor"], found["start"]) == (divisor, start)
    assert found["accuracy"] == pytest.approx([None, 0.2, 0.4])
    assert found["c"] == pytest.approx([None, *(2 * (begun + t * 10 / divisor) for t in (1, 2))])
    assert found["mean_c_i"] == pytest.approx([None, *(2 * (begun + t * 10 / 100) for t in (1, 2))])


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="total_delta"):
        changed(f"{DIVISION}\n{DIVISION}", 100, "random")
