"""A cache folder of the tests' own, and no data folder unless a test asks for one."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHET_CACHE", str(folder))
        yield folder


@pytest.fixture
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FEDHET_DATA", raising=False)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDHET_CACHE", str(folder))
    return folder
