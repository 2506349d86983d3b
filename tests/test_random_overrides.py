"""Random overrides, always the same: refused in one line with their key, or looked at by hand."""

import random

import pytest

from fedhet.common.errors import ConfigError
from fedhet.conf.check import checked
from tests.recipes import changed
from tests.test_schema import TABLE

KEYS = [
    key.strip()
    for context, key, _ in (line.split("|", 2) for line in TABLE.strip("\n").splitlines())
    # those of the default recipe; of strategy.* the code of its classes decides
    if not context.strip() and not key.strip().startswith("strategy.")
]
VALUES = """
abc -1 0 1e999 -.inf .nan true True null [1,2] [] {a:1} '' 3.7 99999999999999999999 -0.5 yes none
1e-400 0x10 1_000 '1' 1e3 $HOME ${seed} ${nope} -0 1.0 [null] {} on 2e308 '0.5' a.b.c ../../x /etc
""".split()
ACCEPTED = """
calibration.alphas=[] choice=$HOME choice=.nan choice=0x10 clients=${seed}
diagnostics.cka_examples=1_000 diagnostics.layers='0.5' local.clip=1_000 local.drop_last=True
local.reuse_training=/etc partition.holdout=-0 results_dir=.nan runtime.client_gpus=1.0
runtime.num_cpus=1_000 runtime.round_timeout_seconds=3.7 runtime.simulation=true
schedule._target_=a.b.c task.classes=null task.group_column='0.5' task.group_column=../../x
task.image_size=1_000 task.test_split=none task.train_split=../../x
"""


def misspelt(draw: random.Random, key: str) -> str:
    """Return the key with a letter of its last word left out, doubled or replaced."""
    group, dot, name = key.rpartition(".")
    i = draw.randrange(len(name))
    wrong = (name[i] * 2, draw.choice("jqxz"), "" if len(name) > 1 else "q")
    return f"{group}{dot}{name[:i]}{draw.choice(wrong)}{name[i + 1 :]}"


def overrides(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    keys = [draw.choice(KEYS) for _ in range(count)]
    keys = [misspelt(draw, key) if draw.random() < 0.3 else key for key in keys]
    return [f"{key}={draw.choice(VALUES)}" for key in keys]


def refusal(word: str) -> str:
    """Return what the recipe's check says of an override, nothing if it is accepted."""
    with changed((), word) as recipe:
        try:
            checked(recipe, (word,))
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_random_overrides_are_refused_in_one_line_or_make_sense():
    said = {word: refusal(word) for word in overrides(300, seed=20261123)}
    assert [word for word, text in said.items() if len(text.splitlines()) > 1] == []
    unnamed = [word for word, text in said.items() if text and word.partition("=")[0] not in text]
    assert unnamed == []
    assert {word for word, text in said.items() if not text} == set(ACCEPTED.split())
