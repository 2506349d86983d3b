"""An empty cache folder, and no data folder, for the tests that ask for them."""

import pytest


@pytest.fixture
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FEDHET_DATA", raising=False)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDHET_CACHE", str(folder))
    return folder
