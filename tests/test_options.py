"""The options of the config groups: each is one class, which checks its own keys."""

from functools import partial

import pytest
from omegaconf import OmegaConf

from fedhet.common.configured import Configured, fields
from fedhet.common.errors import ConfigError
from fedhet.conf import build_part, catalogue, compose_overrides
from tests.refused import refused

# words | key | values that pass | values that do not; the key's node is built
TABLE = """
schedule=cosine | schedule.floor | 0 1 | -0.1 2 abc null
schedule=exponential | schedule.decay | 0.9 1 | 0 2 abc null
schedule=multi_step | schedule.milestones | [0.5] [] | [30] [0] [1] 0.5 [a] null
schedule=multi_step | schedule.decay | 0.1 | 0 1.5 null
system=lognormal | system.sigma | 0 1.5 | -1 101 null
system=constant | system.over_selection | 1 2 | 0.5 1001 null
system=trace | system.path | | /no/file null
attack=alie | attack.clients | 0.2 [0,3] | 0 1 0.6 1.5 [-1] [99] abc null true
attack=sign_flip | attack.factor | -1 0 10 | abc null .inf
attack=backdoor | attack.share | 0.5 1 | 0 2
strategy/aggregator=krum | strategy.aggregator.attackers | 0 2 | -1 1.5 abc null
strategy/aggregator=trimmed_mean | strategy.aggregator.trim | 0 0.4 | 0.5 -0.1
strategy/aggregator=fltrust | strategy.aggregator.root | 100 0.1 | 0 1.5 -1
strategy/server_optimizer=adam | strategy.server_optimizer.tau | 0.1 | 0 -1 yes null
strategy/sampler=bernoulli | strategy.sampler.seed | null 3 | -1 1.5 abc
strategy/sampler=fixed_size | strategy.sampler.seed | 3 | null
strategy/compression=top_k | strategy.compression.up.share | 0.1 1 | 0 2 null
strategy/compression=int8 | strategy.compression.up.block | 1 128 | 0 1.5
strategy/compression=none | strategy.compression.down | int8 none | int2 3 null
strategy/compression=none | strategy.compression.up | null | 3 int8
strategy/differential_privacy=local | strategy.differential_privacy.epsilon | 1 | 0 null
strategy/differential_privacy=central_fixed | strategy.differential_privacy.clipping | server | me 3
strategy/secure_aggregation=secagg_plus | strategy.secure_aggregation.num_shares | 1 0.5 3 | 0 1.5 4
local=adam | local.optimizers.adam.betas | [0.9,0.99] | [0.9] [0.9,1] 0.9 null
local=adam | local.optimizers.adam.eps | 1e-6 | 0 -1 null
"""
ROWS = [[part.strip() for part in f" {line} ".split("|")] for line in TABLE.strip().splitlines()]
OPTIONS = [(group, name) for group, known in catalogue.options().items() for name in known]
PLACES = {"local/optimizers": "local.optimizers.{}"}


def built(words, group, name):
    place = PLACES.get(group, group.replace("/", ".")).format(name)
    return build_part(compose_overrides(tuple(words)), place, classifier_tensors=1)


def words_of(group, name):
    words = [] if group in PLACES else [f"{group}={name}"]
    return [*words, "attack.allow=true"] if group == "attack" else words


@pytest.mark.slow
@pytest.mark.parametrize(("word", "key", "good", "bad"), ROWS)
def test_a_class_checks_its_keys(word, key, good, bad):
    group, name = ("local/optimizers", "adam") if word == "local=adam" else word.split("=")
    words = [word, *words_of(group, name)[1:]]
    build = partial(built, group=group, name=name)
    for value in good.split():
        build([*words, f"{key}={value}"])
    for value in bad.split():
        with pytest.raises(ConfigError) as refused:
            build([*words, f"{key}={value}"])
        assert key in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), OPTIONS)
def test_an_option_builds_its_class_with_the_recipes_values(group, name):
    words = words_of(group, name)
    if name == "trace":
        with refused("system.path"):
            built(words, group, name)
        return
    found = built(words, group, name)
    recipe = compose_overrides(tuple(words))
    node = OmegaConf.select(recipe, PLACES.get(group, group.replace("/", ".")).format(name))
    assert isinstance(found, Configured)
    for one in fields(type(found)):
        plain = OmegaConf.to_container(node, resolve=True)[one]
        kept = getattr(found, one)
        if not isinstance(kept, Configured) and plain is not None:  # None: the class chooses
            assert kept == plain


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["+schedule.flor=1"], "schedule.flor"),
        (["schedule._target_=no.such.Class"], "schedule._target_"),
        (["schedule={_target_:fractions.Fraction,denominater:3}"], "schedule"),
        (["strategy/aggregator=krum", "+strategy.aggregator.foo=1"], "strategy.aggregator.foo"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused_by_its_key(words, key):
    group = "schedule" if "schedule" in words[0] else "strategy/aggregator"
    with refused(key):
        built(words, group, "")
