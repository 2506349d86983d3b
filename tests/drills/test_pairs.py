"""Every two methods together: a recipe is refused for what it says, or all of its clients train."""

import math
import shutil

import pytest

from fedhet.common.errors import ConfigError
from fedhet.common.results import read_rows
from fedhet.conf.catalogue import methods
from tests.recipes import TINY, run_recipe
from tests.test_every_strategy import ALONE

NAMES = sorted(methods())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", NAMES[:-1])
def test_two_methods_train_together_or_are_refused(method, tmp_path):
    for other in NAMES[NAMES.index(method) + 1 :]:
        own, others = (ALONE[f"strategy={name}"][1:] for name in (method, other))
        words = [f"strategy=[{method},{other}]", *own, *sorted({*others} - {*own})]
        try:
            summary = run_recipe(tmp_path / other, *TINY, *words)
        except ConfigError:
            continue
        rows = read_rows(tmp_path / other / "metrics.jsonl")
        assert summary["failures"] == 0, words
        assert all(math.isfinite(row["loss"]) for row in rows), words
        shutil.rmtree(tmp_path / other)
