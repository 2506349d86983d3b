"""The machine of a run, for summary.json."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch
from torch import nn

from fedhet.common.cpus import usable_cpus

# Parameters times examples that one thread has evaluated before others are awake: on a machine
# whose cores have just trained clients, that took up to 30 ms.
_ALONE = 10**8


def machine(device: torch.device) -> dict[str, str | int]:
    """Return CPU, cores, memory, GPU and system, without the machine's name."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none used"
    return {
        "cpu": _cpu_model(),
        "cores": usable_cpus(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def evaluation_threads(model: nn.Module, examples: int) -> int:
    """Return how many threads evaluate a model on so many examples, while no client trains."""
    numbers = sum(param.numel() for param in model.parameters())
    return usable_cpus() if numbers * examples > _ALONE else 1
