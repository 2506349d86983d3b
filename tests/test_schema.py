"""The fixed keys of the recipe: each kind of value, and the line that refuses one."""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo

from fedhet.common import kinds
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Section, choices_of
from fedhet.conf import compose_overrides
from fedhet.conf.check import checked
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import FoundKey, fields_of, keys_below, variants_of
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.tasks.losses import KINDS, LOSSES
from fedhet.tasks.models import ALL, ON_TEXT
from tests.recipes import changed
from tests.refused import refused

ALLOWED = ("must be", "allowed: ", "set ", "lower ", "lacks ", "missing", "choose ")
# Each kind of value: what passes, and what does not.
KIND_VALUES = {
    "Whole": (kinds.Whole, "0 1 1000 2147483647", "-1 99999999999 2.5 abc null true 1e3 [1]"),
    "Count": (kinds.Count, "1 10", "0 -1 1.5 abc null true 99999999999999999999"),
    "Two": (kinds.Two, "2 10", "1 0 2.5 abc null"),
    "Seed": (kinds.Seed, "0 4294967295", "-1 4294967296 0.5 abc null"),
    "Share": (kinds.Share, "0 0.5 1 1.0", "-0.1 1.5 93 abc null true .nan"),
    "ShareAboveZero": (kinds.ShareAboveZero, "0.5 1", "0 -0.1 1.5 abc null true .nan .inf"),
    "ShareBelowOne": (kinds.ShareBelowOne, "0 0.9", "1 -0.1 abc null"),
    "Inside": (kinds.Inside, "0.2", "0 1 abc null"),
    "Delta": (kinds.Delta, "1.0e-5 0.1", "0 1.0e-11 0.2 abc null"),
    "Positive": (kinds.Positive, "1 0.01", "0 -1 abc null true .inf .nan"),
    "NotNegative": (kinds.NotNegative, "0 0.01", "-1 abc null .inf"),
    "Seconds": (kinds.Seconds, "1 0.5", "0 -1 abc null .inf 1e+12"),
    "Text": (kinds.Text, "abc '3'", "'' 3 null true [a]"),
    "Selector": (kinds.Selector, "all none last:2 head.*", "last:x first: first:0 '' 3 null true"),
    "Device": (kinds.Device, "auto cpu cuda cuda:1", "foo gpu cuda: cuda:x cuda0 0 null true"),
    "Address": (kinds.Address, "x:8 '[::1]:1'", "x :80 x:0 x:99999 https://x:1 ::1:1 3 null"),
    "Fetch": (kinds.Fetch, "'{server}:{here}'", "'{foo}' '{}' 3 null"),
    "Reference": (kinds.Reference, "a:b a.b:c.d", "a.b a: :b a-b:c 3 null a:b:c"),
    "bool": (bool, "true false", "1 0 maybe null 'yes'"),
    "text": (str, "abc '3'", "3 null true [a]"),
    "or null": (kinds.Count | None, "1 null", "0 abc"),
    "choice": (Literal["sgd", "adam"], "sgd adam", "sgdd SGD 3 null"),
    "choice or null": (Literal["a"] | None, "a null", "b 3"),
    "list": (list[kinds.Inside], "[] [0.1,0.2]", "0.1 [0] [0.1,2] [abc] null abc"),
    "list of lists": (list[list[int]] | None, "null [[0,1],[2]]", "3 [0,1] [[a]] abc"),
    "mapping": (dict[str, Any], "{} {a: 1}", "3 abc null"),
    "part": (kinds.Part, "{_target_: a.B} {_target_: a.B, more: 1}", "3 abc null {} {_target_: 3}"),
}
# Context (what the recipe is composed from), key, values that pass | values that do not. One key of
# each kind, and those whose values must fit others.
TABLE = """
 | clients | 1 10 1437 | -1 2.5 abc null true 100000000 5000 [3]
 | min_replies | 1 10 | 0 11
 | device | auto cpu | foo 0 null
 | evaluation.model | global clients both | globl 3 null
 | evaluation.metrics | [] [f1] [f1,auroc,top5_accuracy] | [f2] [aucroc] f1 [3] null
 | calibration.alphas | [] | 0.1 [0] [1] [0.1,2] [abc] null abc
 partition.holdout=0.1 | calibration.alphas | [0.1] [0.1,0.2] | [1.5]
 | checkpoint.best | true false accuracy loss | f1 acuracy 3 null
 evaluation.metrics=[f1] | checkpoint.best | f1 | received_f1 client_f1 mae
 strategy/secure_aggregation=secagg_plus | early_stopping.metric | received_loss | f1
 strategy/differential_privacy=local | early_stopping.metric | loss | received_loss
 strategy/differential_privacy=local | evaluation.model | global | clients both
 evaluation.every=0 | checkpoint.best | false | true
 | early_stopping.metric | accuracy loss received_loss | f1 client_loss acuracy 3 null
 | objective | accuracy loss bytes_up | accurcy f1 3 null
 evaluation.metrics=[f1] | objective | f1 best_f1 | best_mae f1/3 client_f1 client_loss
 evaluation.clients=true | objective | client_accuracy client_loss | client_f1
 | resume | true false auto | maybe yes 1 null
 | local.epochs | 1 5 | 0 null
 | local.steps | null | 5
 local.epochs=null,local.steps=3 | local.steps | 1 5 | 0 -1 1.5 abc null
 | local.optimizer | sgd adam | sgdd SGD 3 null
 local=adam | local.momentum | 0 | 0.9
 partition=disjoint_classes | partition.sets | null [[0,1],[2]] | 3 [0,1] [[a]] abc
 | schedule | {_target_:a.B} | 3 null abc
 | attack | null {_target_:a.B,allow:true} | 3 abc [a]
 attack=sign_flip,attack.allow=true,runtime=local | runtime.simulation | true | false
 runtime.client_cpus=4 | runtime.num_cpus | 4 | 2
 | runtime.min_clients | null 1 10 | 0 11 1.5 abc
 runtime=deployment | runtime.address | x:8 '[::1]:1' | x :80 x:99999 'https://x:1' ::1:1 3 null
 runtime=deployment | runtime.fetch | null '{server}:{here}' | '{foo}' '{}' "{server}{here}'" 3
 | task.name | digits | 3 null
 | task.model | mlp cvae vgg11 a.b:c | mpl bilstm a.b a: a-b:c 3 null
 | task.train_size | null 10 600 | 0 -1 1.5 abc 5
 | task.lora | null {r:8,alpha:16,target_modules:[a]} | 3 {} {r:8} {r:8,alpha:1,target_modules:[]}
 LORA | task.lora.dropout | 0 0.1 | 1 -0.1 abc null
 task=own,task.data=a.b:c,task.model=a.b:C | task.data | a:b a.b:c.d | null a.b 3 a:b:c
 task=own,task.data=a.b:c,task.model=a.b:C | task.loss | null mse l1 huber a:b | rmse 3
 | task.classes | null [a,b] [0,1] | abc [1.5] 3
 task=imdb | task.model | bilstm | mlp
 task=imdb | task.source | hub files | embedded
 | strategy.phases | [] [{layers:head.*,epochs:1}] | 3 abc [3] [{layer:all}] [{layers:last:x}] null
 | strategy.methods | {fedavg:'fedhet.strategies.fedavg:FedAvg'} | 3 abc null
 | strategy.aggregator | null {_target_:a.B} | 3 abc
 | strategy.asynchronous | null | 3 abc {}
 | strategy.compression | {_target_:a.B} | null 3 abc
 | local.optimizers | {sgd:{_target_:a.B}} | 3 {sgd:3} null
 logger=wandb | logger.wandb.mode | null online offline | onlin 3
 logger=wandb | logger.wandb | {_target_:a.B,project:a,entity:null,mode:null} | {_target_:a.B} 3
"""
LORA = "+task.lora.r=8,+task.lora.alpha=16,+task.lora.target_modules=[a]"


def rows() -> list[tuple[str, str, list[str], list[str]]]:
    found = []
    for line in TABLE.strip("\n").splitlines():
        context, key, good, bad = (part.strip() for part in f" {line}".split(" | "))
        found.append((context, key, good.split(), bad.split()))
    return found


def words_of(context: str) -> tuple[str, ...]:
    context = context.replace("LORA", LORA)
    return tuple(word for word in context.split(",") if word)


def mistake(context: str, key: str, value: str) -> str | None:
    """Return what is said of a value; None where it passes."""
    with changed(words_of(context), f"{key}={value}") as recipe:
        try:
            checked(recipe)
        except ConfigError as error:
            return str(error)
    return None


def all_keys() -> Iterator[FoundKey]:
    for name, field in fields_of(Recipe).items():
        for tag in variants_of(field) or [""]:
            yield from keys_below(Recipe, (), {name: tag})


def check_of(kind: Any) -> Callable[[Any], bool]:
    """Return what tells whether a value is of a kind, as in the recipe."""
    model = create_model("One", __base__=Section, value=(kind, ...))

    def passes(value: Any) -> bool:
        try:
            model.model_validate({"value": value})
        except (ValidationError, KeyError):
            return False
        return True

    return passes


@pytest.mark.parametrize("name", KIND_VALUES)
def test_a_kind_takes_its_values_and_no_others(name):
    kind, good, bad = KIND_VALUES[name]
    passes = check_of(kind)
    for words, expected in ((good, True), (bad, False)):
        for word in re.findall(r"\{_[^}]*\}|\{a[^}]*\}|\S+", words):
            assert passes(yaml.safe_load(word)) is expected, word


def test_every_named_kind_is_in_the_table():
    named = {name for name, one in vars(kinds).items() if get_origin(one) is Annotated}
    assert named <= KIND_VALUES.keys()


def test_the_bounds_of_every_number_are_kept():
    """Of the kinds, and of fields with bounds of their own."""
    seen = 0
    for key in all_keys():
        bounds = list(bounds_of(key.field))
        passes = check_of(rebuilt(key.field)) if bounds else None
        for kind, bound, inside in bounds:
            seen += 1
            step = 1 if kind is int else 1e-6
            outside = {"ge": bound - step, "gt": bound, "le": bound + step, "lt": bound}[inside]
            assert not passes(kind(outside)), key.name
            if inside in ("ge", "le"):
                assert passes(kind(bound)), key.name
    assert seen > 60


def rebuilt(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def bounds_of(field: FieldInfo) -> Iterator[tuple[type, float, str]]:
    """Yield the bounds of a field that is a number, or a number or null: type, bound, which."""
    hint, *metadata = field.annotation, *field.metadata
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        if get_origin(one) is Annotated:
            hint, *metadata = get_args(one)
    if hint in (int, float):
        for one in metadata:
            for bound in getattr(one, "metadata", [one]):
                for which in ("ge", "gt", "le", "lt"):
                    if hasattr(bound, which):
                        yield hint, getattr(bound, which), which


def test_every_key_has_a_kind_a_type_in_words_and_a_meaning():
    for key in all_keys():
        assert key.allowed, key.name
        assert key.field.annotation is not Any, key.name
        assert key.field.description, key.name
        assert "\n" not in key.field.description


@pytest.mark.slow
@pytest.mark.parametrize(("context", "key", "good", "bad"), rows())
def test_good_values_pass(context, key, good, bad):
    assert {value: mistake(context, key, value) for value in good} == dict.fromkeys(good)


@pytest.mark.parametrize(
    ("context", "key", "good", "bad"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] else ()) for row in rows()],
)
def test_a_bad_value_gets_one_line_with_value_allowed_and_key(context, key, good, bad):
    """The form of every error about a key."""
    for value in bad:
        line = mistake(context, key, value)
        assert line is not None, f"{value} passes"
        assert "\n" not in line
        assert key.removesuffix("._target_") in line
        assert any(word in line for word in ALLOWED), line
        if value[0] not in "[{.'\"" and not value.endswith(("e3", "e12")):
            assert value in line, line


# ---------------------------------------------------------------- words, which Hydra must compose
WORDS = [
    ("local.lrr=0.1", "local.lrr local.lr epochs"),
    ("+local.lrr=0.1", "local.lrr local.lr"),
    ("++local.lrr=0.1", "local.lrr local.lr"),
    ("round=3", "round rounds"),
    ("stratgy=fedavg", ""),
    ("zzz=1", "zzz"),
    ("local.lr=0,1", "local.lr=0,1 local.lr=[0,1]"),
    ("+round=3", "round rounds"),
    ("epochs=3", "epochs local.epochs"),
    ("rounds.x=3", "rounds.x rounds"),
    ("+strategy.foo.bar=1", "strategy.foo.bar"),
    ("+strategy.sam.rho=1", "strategy.sam.rho strategy=fedgamma fedsam"),
    ("strategy.sam.rho=1", "strategy=fedavg"),
    ("strategy.asynchronous.buffer=2", "strategy=fedasync fedbuff strategy=fedavg"),
    ("partition.classes=2", "partition=pathological partition=dirichlet"),
    ("runtime.address=a:1", "runtime=deployment runtime=local"),
    ("schedule.decay=0.5", "schedule=exponential multi_step schedule=constant"),
    ("attack.clients=0.2", "attack=none"),
    ("strategy.compression.up.share=0.1", "strategy/compression=random_k top_k"),
    ("aggregator=median", "strategy/aggregator=median"),
    ("strategy.aggregator=median", "strategy/aggregator=median"),
    ("strategy.aggregator=middle", "strategy/aggregator bulyan centered_clipping"),
    ("task.path=/x", "task.path +task.path=/x"),
    ("+local.lr=1", "local.lr"),
    ("~local.lr", "local.lr"),
    ("strategy=fedprx", "strategy=fedprx fedpvr"),
    ("strategy=[fedavgm,fedprx]", "strategy=fedprx"),
    ("strategy/aggregator=uniform", "uniform_mean bulyan"),
    ("task=minst", "task=minst mnist femnist"),
    ("schedule=step", "multi_step"),
    ("foo/bar=1", "foo/bar"),
    ("strategy/agregator=regmean", "strategy/agregator strategy/aggregator"),
    ("local=3", "local=3"),
    ("local.lr=[", "local.lr=["),
    ("+logger.foo=1", "logger.foo"),
    ("+logger.csvv.a=1", "logger.csvv logger.csv"),
    ("task.mean=${foo}", "task.mean=${foo}"),
    ("strategy=[fedadam,fedyogi]", "server_optimizer"),
    ("strategy=[fedsam,per_fedavg]", "optimizer"),
]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        pytest.param(*row, marks=pytest.mark.slow if number % 4 else ())
        for number, row in enumerate(WORDS)
    ],
)
def test_an_unknown_word_gets_one_line_with_the_nearest(word, said):
    with refused(*said.split()):
        compose_overrides((word,))


# ------------------------------------------------------------------------- the schema and the code
def test_the_schema_has_what_the_constructors_have():
    tasks = variants_of(fields_of(Recipe)["task"])
    images, texts, own = (choices_of(fields_of(one)["model"].annotation) for one in tasks.values())
    assert set(images) == set(own) == {*ALL, "package.module:function"} - {*ON_TEXT}
    assert set(texts) == {*ON_TEXT, "package.module:function"}
    assert set(get_args(fields_of(tasks["own"])["kind"].annotation)) == set(KINDS)
    losses = choices_of(fields_of(tasks["own"])["loss"].annotation)
    assert set(losses) == {*chain(*LOSSES.values()), "package.module:function", "null"}
    local = set(fields_of(Recipe.model_fields["local"].annotation))
    assert set(LocalTrainingConfig.__dataclass_fields__) - {"phases"} <= local


def test_helper_keys_of_an_experiment_file_pass_only_where_something_refers_to_them():
    recipe = compose_overrides(()).copy()
    OmegaConf.set_struct(recipe, False)
    recipe.settings = {"a": {"clients": 3}}
    recipe.setting = "a"
    with refused("settings"):
        checked(recipe)
    recipe.clients = "${settings.${setting}.clients}"
    assert checked(recipe).clients == 3
