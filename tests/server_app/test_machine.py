"""What summary.json says of the machine."""

import os

import torch

from server_app.machine import machine


def test_it_names_cpu_cores_and_system():
    found = machine(torch.device("cpu"))
    assert sorted(found) == ["cores", "cpu", "gpu", "memory_gb", "python", "system"]
    assert found["cpu"]
    assert 1 <= found["cores"] <= os.cpu_count()
    assert found["memory_gb"] >= 1
    assert found["gpu"] == "none used"


def test_a_gpu_is_named_when_the_run_uses_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert machine(torch.device("cuda:1"))["gpu"] == "GPU 1"
