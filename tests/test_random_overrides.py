"""Random overrides, always the same: refused in one line with their key, or looked at by hand."""

import random

import pytest
from omegaconf import DictConfig, OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.conf import compose_overrides
from fedhet.conf.check import checked
from fedhet.conf.mistakes import known_keys
from tests.recipes import changed

VALUES = """
abc -1 0 1e999 -.inf .nan true True null [1,2] [] {a:1} '' 3.7 99999999999999999999 -0.5 yes none
1e-400 0x10 1_000 '1' 1e3 $HOME ${seed} ${nope} -0 1.0 [null] {} on 2e308 '0.5' a.b.c ../../x /etc
""".split()
# Names and paths are any text; channels, cka and client_gpus are refused where they are used.
ACCEPTED = """
choice=on diagnostics.cka=/etc diagnostics.cka_clients=1_000 initial_model.path=-.inf local.lr=1.0
local.momentum=0 local.reuse_training='0.5' local.reuse_training='1' local.weight_decay=1e3
local.weight_decay=3.7 partition.alpha=1_000 partition.seed=1_000 results_dir=-.inf rounds=${seed}
runtime.client_gpus=3.7 runtime.round_timeout_seconds=3.7 server.lr=1.0 task.channels=True
task.classifier='1' task.classifier=-.inf task.crop_probability=1.0 task.crop_probability=1e-400
task.head_bias=null task.hub=$HOME task.label_column=0x10 task.label_column=yes task.name=a.b.c
task.path=$HOME task.train_split=-.inf
"""


def keys() -> list[str]:
    """Return the default recipe's keys; of strategy.* the code of its classes decides."""
    recipe = compose_overrides(())
    known = (key.rpartition(".") for key in known_keys(recipe) if not key.startswith("strategy."))
    return [
        "".join(key)
        for key in known
        if not key[0] or isinstance(OmegaConf.select(recipe, key[0]), DictConfig)
    ]


def misspelt(draw: random.Random, key: str) -> str:
    """Return the key with a letter of its last word left out, doubled or replaced."""
    group, dot, name = key.rpartition(".")
    i = draw.randrange(len(name))
    wrong = (name[i] * 2, draw.choice("jqxz"), "" if len(name) > 1 else "q")
    return f"{group}{dot}{name[:i]}{draw.choice(wrong)}{name[i + 1 :]}"


def overrides(key: str) -> list[str]:
    """Return three overrides, of a seed of the key's own: a new key moves no other."""
    draw = random.Random(f"20261123 {key}")
    return [f"{name}={draw.choice(VALUES)}" for name in (key, key, misspelt(draw, key))]


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
    said = {word: refusal(word) for key in keys() for word in overrides(key)}
    assert len(said) >= 250
    assert [word for word, text in said.items() if len(text.splitlines()) > 1] == []
    unnamed = [word for word, text in said.items() if text and word.partition("=")[0] not in text]
    assert unnamed == []
    assert {word for word, text in said.items() if not text} == set(ACCEPTED.split())
