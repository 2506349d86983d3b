"""A full disk: the error names the file, and the old file stays."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from fedhet.common.checksums import MODEL
from fedhet.common.results import ResultsFolder, read_rows, read_summary
from fedhet.server_app.run import log_write_errors, write_error
from fedhet.strategies.wire import tensor_files
from fedhet.strategies.wire.tensor_files import save_tensors
from tests.refused import refused

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def test_a_row_that_does_not_fit_names_its_file_and_is_not_counted(tmp_path):
    results = ResultsFolder(tmp_path)
    results.append({"round": 0})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "kept")
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    with refused("metrics.jsonl", "No space left", kind=OSError):
        results.append({"round": 1})
    assert results.rows == [{"round": 0}]
    assert read_rows(tmp_path / "kept") == [{"round": 0}]


@pytest.mark.parametrize("error", [SafetensorError("code: 28"), OSError(28, "No space left")])
def test_tensors_that_do_not_fit_name_their_file_and_leave_the_old_one(
    tmp_path, monkeypatch, error
):
    path = tmp_path / "round-000001.safetensors"
    save_tensors(path, {"a": torch.ones(2)}, {"kind": MODEL})
    before = path.read_bytes()
    monkeypatch.setattr(tensor_files, "save_file", Mock(side_effect=error))
    with refused("round-000001.safetensors", "28", kind=OSError):
        save_tensors(path, {"a": torch.zeros(2)}, {"kind": MODEL})
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_summary_that_does_not_fit_does_not_hide_why_the_run_ended(tmp_path, monkeypatch):
    results, first = ResultsFolder(tmp_path), RuntimeError("3 rounds in a row")
    write_error(results, first)
    assert read_summary(tmp_path)["error"] == f"RuntimeError: {first}"
    full = OSError("summary.json could not be written: No space left on device")
    monkeypatch.setattr("fedhet.common.results.save_text", Mock(side_effect=full))
    with log_write_errors(tmp_path):
        write_error(results, first)
