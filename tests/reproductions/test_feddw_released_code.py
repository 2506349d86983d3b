"""FedDW's released code on this project's data: its batches, its settings, its results."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from fedhet.report.run_data import read_run
from fedhet.reproductions.feddw.released_code import (
    BORDER,
    KERAS,
    MEAN,
    SIZE,
    STD,
    ClientImages,
    CroppedImages,
    load_batches,
    main,
)

# As the clone's files are used: names imported by others, a class of settings, numpy's own draws.
CLONE = {
    "config.py": """
class Configs:
    def __init__(self):
        self.name_method, self.server_epoch, self.dirichlet_alpha = "Fedprox", 52, 0.1
        self.participation_rate, self.learning_rate = 0.9, 0.001
""",
    "dataset.py": "from keras.src.datasets import imdb\n",
    "Updata.py": "",
    "utils.py": "def show_accury_list(*lists): raise RuntimeError\n",
    "main.py": """
import numpy as np, torch
from config import Configs
from utils import *
config = Configs()
assert (config.name_method, config.learning_rate) == ("FedDW", 0.001)
drawn = []
for epoch in range(config.server_epoch):
    print("epoch", epoch)
    drawn.append(100 * (np.random.rand() + float(torch.rand(1))) / 2)
    show_accury_list(drawn[-1], drawn, [])
""",
}


def test_a_clone_runs_unchanged_and_its_results_are_those_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in CLONE.items():
        (tmp_path / name).write_text(text)
    words = f"{tmp_path} --method FedDW --seed 3 --rounds 4 --part 0.5 --out {tmp_path}/out"
    monkeypatch.setenv("FEDHET_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["released_code", *words.split()])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in (*(Path(file).stem for file in CLONE), *KERAS):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # at the end as now
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.utils.data, "DataLoader", DataLoader)  # put back at the end
    main()
    run = read_run(tmp_path / "out" / "feddw_a0.1_s3", "a run", 0)
    assert (run.method, run.seed, run.status, run.error) == ("FedDW (released)", 3, "completed", "")
    assert (run.settings["participation"], run.settings["partition.alpha"]) == (0.5, 0.1)
    drawn, torchs = np.random.RandomState(3), torch.Generator().manual_seed(3)
    expected = [(drawn.rand() + float(torch.rand(1, generator=torchs))) / 2 for _ in range(4)]
    found = [value for _, value in run.points("accuracy")]
    assert found == pytest.approx(expected, rel=1e-5)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_batches_have_the_bits_that_torchvision_gives_without_workers() -> None:
    from torchvision import transforms

    as_released = transforms.Compose(
        [
            transforms.RandomCrop(SIZE, padding=BORDER),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (23, 3, SIZE, SIZE), generator=drawn, dtype=torch.uint8)
    labels = torch.arange(23) % 10

    class Released(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 23

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            image = Image.fromarray(pixels[row].permute(1, 2, 0).numpy())
            return as_released(image), int(labels[row])

    rows = list(range(2, 21))
    images = CroppedImages(pixels.numpy(), labels.numpy())
    pairs = (
        (DataLoader(Released(), 5), load_batches(images, 5, shuffle=False, num_workers=4)),
        (
            DataLoader(Subset(Released(), rows), 5, shuffle=True),
            load_batches(ClientImages(images, rows), 5, shuffle=True),
        ),
    )
    for theirs, ours in pairs:
        torch.manual_seed(1)
        expected = [batch for _ in range(2) for batch in theirs]
        state = torch.get_rng_state()
        torch.manual_seed(1)
        found = [batch for _ in range(2) for batch in ours]
        assert torch.equal(torch.get_rng_state(), state)
        assert len(found) == len(expected)
        for (data, target), (their_data, their_target) in zip(found, expected, strict=True):
            assert torch.equal(data, their_data)
            assert torch.equal(target, their_target)
