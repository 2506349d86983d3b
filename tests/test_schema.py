"""Every fixed key of the recipe: values that pass, and values that get one line of ConfigError."""

from dataclasses import fields
from itertools import chain
from typing import get_args

import pytest
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import choices_of
from fedhet.conf import FOLDER, compose_overrides
from fedhet.conf.check import checked
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import fields_of, keys_below, variants_of
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.tasks.config import INPUTS
from fedhet.tasks.losses import KINDS, LOSSES
from fedhet.tasks.models import ALL, ON_TEXT
from fedhet.tasks.partitions import FLAVOURS
from tests.recipes import changed
from tests.refused import refused

ALLOWED = ("must be", "allowed: ", "set ", "lower ", "lacks ", "missing", "choose ")
# Context (what the recipe is composed from), key, values that pass | values that do not.
TABLE = """
 | clients | 1 10 1437 | -1 2.5 abc null true 100000000 5000 [3]
 | participation | 0.5 1 1.0 | 0 -0.1 1.5 abc null true .nan .inf
 | rounds | 0 1 30 1000 | -1 99999999999 2.5 abc null true 1e3 [1]
 | seed | 0 4294967295 | -1 4294967296 0.5 abc null
 | target_accuracy | 0 0.9 1 null | 93 -0.1 abc true .nan
 | device | auto cpu cuda cuda:1 | foo gpu cuda: cuda:x cuda0 0 null true
 | min_replies | 1 10 | 0 11 -1 1.5 abc null
 | max_failed_rounds | 1 5 | 0 1.5 abc null
 | server.lr | 1 0.01 | 0 -1 abc null true .inf
 | initial_model.path | null a.pt /runs/a | 3 true
 | initial_model.layers | all last:2 head.* | last:x first: 3 null
 | evaluation.every | 0 1 5 | -1 0.5 abc null true
 | evaluation.model | global clients both | globl all 3 null
 | evaluation.received | true false | yes 1 maybe null
 | evaluation.clients | true false | nope 0 null
 | evaluation.metrics | [] [f1] [f1,auroc,top5_accuracy] | [f2] [aucroc] f1 [3] null
 evaluation.metrics=[f1] | evaluation.per_class | true false | yes 1 null
 | evaluation.per_client | true false | yes 1 null
 | evaluation.finetune_epochs | 0 3 | -1 1.5 abc null
 | calibration.alphas | [] | 0.1 [0] [1] [0.1,2] [abc] null abc
 partition.holdout=0.1 | calibration.alphas | [0.1] [0.1,0.2] | [1.5]
 | calibration.bins | 1 1000 | 0 -5 1.5 abc null 100000000
 | calibration.temperature_share | 0 0.9 | 1 -0.1 abc null
 | diagnostics.layers | none all last:2 head.* | last:x first: 3 null
 | diagnostics.cka | none all first:1 | last:0 true null
 | diagnostics.cka_every | 1 10 | 0 -1 abc null
 | diagnostics.cka_examples | 2 null | 1 0 abc
 | diagnostics.cka_clients | 2 10 | 1 abc null
 | checkpoint.every | 0 1 | -1 true abc null
 | checkpoint.best | true false accuracy loss | f1 acuracy 3 null
 evaluation.metrics=[f1] | checkpoint.best | f1 received_f1 | client_f1 mae
 strategy/secure_aggregation=secagg_plus | early_stopping.metric | received_loss | f1
 strategy/differential_privacy=local | early_stopping.metric | loss | received_loss
 strategy/differential_privacy=local | evaluation.model | global | clients both
 evaluation.every=0 | checkpoint.best | false | true
 | checkpoint.client_models | true false | maybe 1 null
 | early_stopping.metric | accuracy loss received_loss | f1 client_loss acuracy 3 null
 | early_stopping.patience | 1 5 null | 0 -1 1.5 abc true
 | early_stopping.min_delta | 0 0.01 | -1 abc null .inf
 | early_stopping.mode | auto min max | largest 3 null
 | objective | accuracy loss bytes_up | accurcy f1 3 null
 evaluation.metrics=[f1] | objective | f1 best_f1 | best_mae f1/3 client_f1 client_loss
 evaluation.clients=true | objective | client_accuracy client_loss | client_f1
 | choice | null abc | 3 [a]
 | paper | null {} | 3 abc
 | results_dir | null a/b | 7 true [a]
 | resume | true false auto | maybe yes 1 null
 | local.epochs | 1 5 | 0 -1 1.5 abc true null
 local.epochs=null,local.steps=3 | local.steps | 1 5 | 0 -1 1.5 abc null
 | local.steps | null | 5
 | local.batch_size | 1 32 | 99999999999999999999 0 -1 1.5 abc null
 | local.lr | 0.1 1 | 0 -0.1 abc null true .nan .inf
 | local.optimizer | sgd adam | sgdd SGD 3 null
 | local.momentum | 0 0.9 1 | -0.1 1.5 abc null
 local=adam | local.momentum | 0 | 0.9
 | local.momentum_layers | all none last:2 | last:0 3 null
 | local.weight_decay | 0 0.001 | -1 abc null .inf
 | local.clip | null 1 0.5 | 0 -1 abc
 | local.drop_last | true false | On no 1 null
 | local.initial | received own | sent 1 null
 | local.reuse_training | null /a/b | 3 true
 | local.autocast | true false | maybe 1 null
 | partition.name | dirichlet | dirichet 3 null
 | partition.holdout | 0 0.5 | 1 -0.1 abc null
 | partition.seed | null 0 7 | -1 0.5 abc
 | partition.alpha | 0.1 100 | 0 -1 abc null .inf
 | partition.min_size | 1 10 | 0 1.5 abc null
 | partition.balance | true false | maybe yes 1 null
 partition=feddf_dirichlet | partition.group_size | 1 10 | 0 2.5 null
 partition=class_prior_dirichlet | partition.alpha | 0.3 | 0 abc
 partition=pathological | partition.classes | 1 2 | 0 1.5 abc null
 partition=pathological | partition.equal_sizes | true false | maybe 1 null
 partition=shards | partition.shards_per_client | 1 2 | 0 1.5 null
 partition=disjoint_classes | partition.sets | null [[0,1],[2]] | 3 [0,1] [[a]] abc
 partition=natural | partition.min_size | 1 | 0 null
 partition=iid | partition.holdout | 0.1 | 2
 partition=site | partition.holdout | 0.1 | x
 | schedule._target_ | my.own.Schedule | 3 null
 schedule=cosine | schedule.floor | 0 1 | -0.1 2 abc null
 schedule=exponential | schedule.decay | 0.9 1 | 0 2 abc null
 schedule=multi_step | schedule.milestones | [0.5] [] | [30] [0] [1] 0.5 [a] null
 schedule=multi_step | schedule.decay | 0.1 | 0 1.5 null
 | attack | null | 3 abc [a]
 attack=sign_flip,attack.allow=true | attack._target_ | fedhet.A | 3 null
 attack=sign_flip,attack.allow=true | attack.clients | 0.2 [0] [0,3] | 0 1 1.5 [-1] abc null true
 attack=sign_flip,attack.allow=true | attack.allow | true | false maybe 1 null
 attack=sign_flip,attack.allow=true,runtime=local | runtime.simulation | true | false
 | runtime.name | flower local | moon ray deployment 3 null
 | runtime.client_cpus | 1 4 | 0 1.5 abc null 100000
 | runtime.client_gpus | null 0 0.5 | -1 abc .inf
 | runtime.num_cpus | null 1 16 | 0 -1 1.5 abc
 runtime.client_cpus=4 | runtime.num_cpus | 4 | 2
 | runtime.simulation | true false | maybe 1 null
 | runtime.channels_last | true false | abc 0 null
 | runtime.round_timeout_seconds | 1 0.5 | 0 -1 abc null .inf 1e12
 | runtime.connect_timeout_seconds | 1 0.5 | 0 -1 abc null .inf
 | runtime.min_clients | null 1 10 | 0 11 1.5 abc
 runtime=ray | runtime.address | null auto | 3 true
 runtime=deployment | runtime.address | x:8 '[::1]:1' | x :80 x:0 x:99999 'https://x:1' ::1:1 3 null
 runtime=deployment | runtime.root_certificates | null a.crt | 3
 runtime=deployment | runtime.insecure | true false | maybe null
 runtime=deployment | runtime.connection | null mine | 3
 runtime=deployment | runtime.server_results | null /x | 3
 runtime=deployment | runtime.fetch | null '{server}:{here}' | '{foo}' '{}' "{server}{here}'" 3
 runtime=deployment | runtime.stop_on_interrupt | true false | abc null
 runtime=deployment | runtime.reconnect_seconds | 1 3600 | 0 -1 abc null
 | task.name | digits | 3 null
 | task.inputs | images | texts 3
 | task.source | embedded | embeded web 3 null
 | task.model | mlp cvae vgg11 | mpl bilstm 3 null
 | task.channels | 1 3 | 2 0 abc null
 | task.image_size | 1 8 | 0 -8 1.5 abc null 100000
 | task.num_classes | null 2 10 | 1 0 2.5 abc
 | task.mean | [0.3] [0,0] | 0.3 [a] abc null [.nan]
 | task.std | [0.3] | [0] [-1] 0.3 abc null
 | task.test_fraction | 0.2 | 0 1 abc null
 | task.test_split | null test | 3
 | task.train_split | train | 3 null
 | task.train_size | null 10 600 | 0 -1 1.5 abc 5
 | task.test_size | null 1 | 0 1.5 abc
 | task.head_bias | null true false | maybe 1
 | task.head_init | null orthogonal | ortogonal 3
 | task.model | mlp a.b:c | mlpp a.b a: :b a-b:c 3 null
 | task.classifier | null fc | 3
 | task.model_options | null {a:1} | 3 abc
 | task.lora | null {r:8,alpha:16,target_modules:[a]} | 3 {} {r:8} {r:8,alpha:1,target_modules:[]}
 LORA | task.lora.r | 1 8 | 0 1.5 abc null
 LORA | task.lora.alpha | 0.5 16 | 0 abc null
 LORA | task.lora.target_modules | [a] [a,b.c] | [] a [3] null
 LORA | task.lora.dropout | 0 0.1 | 1 -0.1 abc null
 LORA | task.lora.modules_to_save | [] [a] | a [3] null
 | task.loss | null cross_entropy a:b | mse a.b 3
task=own,task.data=a.b:c,task.model=a.b:C | task.data | a:b a.b:c.d | null a.b 3 a:b:c
task=own,task.data=a.b:c,task.model=a.b:C | task.test_data | null a:b | a 3
task=own,task.data=a.b:c,task.model=a.b:C | task.kind | regression segmentation | sound null
task=own,task.data=a.b:c,task.model=a.b:C | task.loss | null mse l1 huber a:b | rmse 3
task=own,task.data=a.b:c,task.model=a.b:C | task.data_options | null {a:1} | 3
task=own,task.data=a.b:c,task.model=a.b:C | task.columns | null [image,label] | 3 image
task=own,task.data=a.b:c,task.model=a.b:C | task.input_shape | null [1,8,8] | 3 [0]
task=own,task.data=a.b:c,task.model=a.b:C | task.input_range | null [0,1] | 3 [a]
 | task.stem | null imagenet cifar | cifr 3
 | task.classes | null [a,b] [0,1] | abc [1.5] 3
 | task.hub | null a/b | 3
 | task.path | null /a | 3 true
 | task.group_column | null writer | 3
 task=mnist | task.image_column | img | 3 null
 task=mnist | task.label_column | label | 3 null
 task=cifar10 | task.flip | true false | yes 1 null
 task=cifar10 | task.crop_padding | 0 4 | -1 1.5 abc null
 task=cifar10 | task.crop_probability | 0 0.5 1 | -0.1 1.5 abc null
 task=imdb | task.length | 2 200 | 1 0 abc null
 task=imdb | task.vocabulary_size | 4 10000 | 3 0 abc null
 task=imdb | task.vocabulary_file | null a.txt | 3
 task=imdb | task.text_column | text | 3 null
 task=imdb | task.model | bilstm | mlp
 task=imdb | task.source | hub files | embedded
 | strategy.personal | none all last:2 head.* | last:x first:0 3 null
 | strategy.phases | [] [{layers:head.*,epochs:1}] | 3 abc [3] [{layer:all}] [{layers:last:x}] null
 | strategy.allow_stacked_corrections | true false | maybe 1 null
 | strategy.methods | {} {a:[aggregator]} | 3 abc {a:[engine]} {a:b} null
 | strategy.requires | {} | 3 abc null
 | strategy.client_sides | {} | 3 {a:3} {a:{}} null
 | strategy.server_sides | {} | 3 {a:3} null
 | strategy.transforms | {} | 3 {a:3} null
 | strategy.aggregator._target_ | my.own.Mean | 3 null
 | strategy.aggregator | {_target_:a.B} | 3 null abc
 | strategy.server_optimizer | {_target_:a.B} | 3 null
 | strategy.output | {_target_:a.B} | 3 null
 | strategy.sampler | {_target_:a.B} | 3 null
 | strategy.asynchronous | null | 3 abc {}
 | system | null {_target_:a.B} | 3 abc
 | strategy.compression | {_target_:a.B} | null 3 abc
 | strategy.secure_aggregation | null {_target_:a.B} | 3 abc
 | local.optimizers | {sgd:{_target_:a.B}} | 3 {sgd:3} null
 | logger.csv | {_target_:a.B} | 3 abc null
 logger=tensorboard | logger.tensorboard | {_target_:a.B} | 3 null
 logger=wandb | logger.wandb.project | fedhet | 3 null
 logger=wandb | logger.wandb.entity | null me | 3
 logger=wandb | logger.wandb.mode | null online offline | onlin 3
 logger=wandb | logger.wandb | {_target_:a.B,project:a,entity:null,mode:null} | {_target_:a.B} 3
 logger=mlflow | logger.mlflow.tracking_uri | null http://x | 3
 logger=mlflow | logger.mlflow.experiment | a | 3 null
 logger=mlflow | logger.mlflow | {_target_:a.B,tracking_uri:null,experiment:a} | {_target_:a.B} 3
"""
LORA = "+task.lora.r=8,+task.lora.alpha=16,+task.lora.target_modules=[a]"
OPEN = ("logger.wandb", "logger.mlflow", "logger.run_log")


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


@pytest.mark.slow
@pytest.mark.parametrize(("context", "key", "good", "bad"), rows())
def test_good_values_pass(context, key, good, bad):
    assert {value: mistake(context, key, value) for value in good} == dict.fromkeys(good)


@pytest.mark.parametrize(
    ("context", "key", "good", "bad"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] else ()) for row in rows()],
)
def test_a_bad_value_gets_one_line_with_value_allowed_and_key(context, key, good, bad):
    for value in bad:
        line = mistake(context, key, value)
        assert line is not None, f"{value} passes"
        assert "\n" not in line
        assert key.removesuffix("._target_") in line
        assert any(word in line for word in ALLOWED), line
        if value[0] not in "[{.'\"" and not value.endswith(("e3", "e12")):
            assert value in line, line


def test_the_table_has_every_key_and_enough_values():
    assert sum(len(good) + len(bad) for _, _, good, bad in rows()) >= 500
    in_table = {key for _, key, _, _ in rows()}
    for name, field in fields_of(Recipe).items():
        for tag in variants_of(field) or [""]:
            for key in keys_below(Recipe, (), {name: tag}):
                known = key.name in in_table or key.name.startswith(OPEN)
                assert known or key.path[0] != name, key.name


# ---------------------------------------------------------------- words, which Hydra must compose
WORDS = [
    ("local.lrr=0.1", "unknown key local.lrr: did you mean local.lr?; local has: epochs, steps,"),
    ("+local.lrr=0.1", "unknown key local.lrr: did you mean local.lr?"),
    ("++local.lrr=0.1", "unknown key local.lrr: did you mean local.lr?"),
    ("round=3", "unknown key round: did you mean rounds?"),
    ("stratgy=fedavg", "unknown key stratgy: did you mean strategy?"),
    ("zzz=1", "unknown key zzz; `fedhet --help` lists all keys"),
    ("local.lr=0,1", "local.lr=0,1 has several values: fedhet -m runs each, local.lr=[0,1] is a l"),
    ("+round=3", "unknown key round: did you mean rounds?"),
    ("epochs=3", "unknown key epochs: did you mean local.epochs?"),
    ("rounds.x=3", "unknown key rounds.x: did you mean rounds?"),
    ("+strategy.foo.bar=1", "unknown key strategy.foo.bar"),
    ("+strategy.sam.rho=1", "strategy.sam.rho: it is of strategy=fedmrur, strategy=fedsam"),
    ("strategy.sam.rho=1", "and this is strategy=fedavg"),
    ("strategy.asynchronous.buffer=2", "strategy=fedasync or fedbuff, and this is strategy=fedavg"),
    ("partition.classes=2", "of partition=pathological, and this is partition=dirichlet"),
    ("runtime.address=a:1", "of runtime=deployment or ray, and this is runtime=local"),
    ("schedule.decay=0.5", "schedule=exponential or multi_step, and this is schedule=constant"),
    ("attack.clients=0.2", "or another, and this is attack=none"),
    ("strategy.compression.up.share=0.1", "it is of strategy/compression=random_k or top_k"),
    ("aggregator=median", "unknown key aggregator: write strategy/aggregator=median"),
    ("strategy.aggregator=median", "not allowed: write strategy/aggregator=median"),
    ("strategy.aggregator=middle", "strategy/aggregator is of: bulyan, centered_clipping"),
    ("task.path=/x", "unknown key task.path: this task's file leaves it out; write +task.path=/x"),
    ("+local.lr=1", "local.lr is in the recipe already"),
    ("~local.lr", "local.lr is missing"),
    ("strategy=fedprx", "strategy=fedprx is unknown: did you mean fedprox or fedpvr"),
    ("strategy=[fedavgm,fedprx]", "strategy=fedprx is unknown: did you mean fedprox"),
    ("strategy/aggregator=uniform", "did you mean uniform_mean?; allowed: bulyan, "),
    ("task=minst", "task=minst is unknown: did you mean mnist or femnist?; allowed: cifar10, "),
    ("schedule=step", "allowed: constant, cosine, exponential, multi_step"),
    ("foo/bar=1", "unknown group foo/bar"),
    (
        "strategy/agregator=regmean",
        "unknown group strategy/agregator: did you mean strategy/aggregator",
    ),
    ("local=3", "local=3: a group takes the name of an option"),
    ("local.lr=[", "local.lr=[ cannot be read"),
    ("+logger.foo=1", "unknown key logger.foo"),
    ("+logger.csvv.a=1", "unknown key logger.csvv: did you mean logger.csv?"),
    ("task.mean=${foo}", "task.mean=${foo} cannot be read: "),
    ("strategy=[fedadam,fedyogi]", "both replace the server_optimizer"),
    ("strategy=[fedsam,per_fedavg]", "both replace the optimizer"),
]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        pytest.param(*row, marks=pytest.mark.slow if number % 4 else ())
        for number, row in enumerate(WORDS)
    ],
)
def test_an_unknown_word_gets_one_line_with_the_nearest(word, said):
    with pytest.raises(ConfigError) as refused:
        compose_overrides((word,))
    assert "\n" not in str(refused.value)
    for part in said.split(", strategy="):
        assert part in str(refused.value)


def test_a_key_that_a_task_may_have_is_added_with_a_plus():
    assert compose_overrides(("+task.path=/x", "task=digits")).task.path == "/x"


# ------------------------------------------------------------------------- the schema and the code
def test_the_schema_has_what_the_constructors_have():
    tasks = variants_of(fields_of(Recipe)["task"])
    for name, config in INPUTS.items():
        assert set(fields_of(tasks[name])) == {field.name for field in fields(config)}
        if name != "own":
            assert choices(fields_of(tasks[name])["source"]) == set(config.sources)
    images, texts, own = (choices_of(fields_of(one)["model"].annotation) for one in tasks.values())
    assert set(images) == set(own) == {*ALL, "package.module:function"} - {*ON_TEXT}
    assert set(texts) == {*ON_TEXT, "package.module:function"}
    assert set(get_args(fields_of(tasks["own"])["kind"].annotation)) == set(KINDS)
    losses = choices_of(fields_of(tasks["own"])["loss"].annotation)
    assert set(losses) == {*chain(*LOSSES.values()), "package.module:function", "null"}
    partitions = variants_of(fields_of(Recipe)["partition"])
    assert set(partitions) == set(FLAVOURS)
    for name, options in FLAVOURS.items():
        keys = fields_of(partitions[name])
        assert set(keys) == {"name", "holdout", "seed", *options}
        assert {key: keys[key].default for key in options} == options
    local = set(fields_of(Recipe.model_fields["local"].annotation))
    assert set(LocalTrainingConfig.__dataclass_fields__) - {"phases"} <= local


def choices(field: FieldInfo) -> set[str]:
    return {str(value) for value in field.annotation.__args__}


@pytest.mark.parametrize("group", ["partition", "task", "schedule", "logger", "local"])
def test_every_option_of_a_group_fits_the_schema(group):
    for path in sorted((FOLDER / group).glob("*.yaml")):
        own = OmegaConf.load(path)
        if "defaults" in own:
            continue  # composed by other tests
        recipe = compose_overrides(()).copy()
        OmegaConf.set_struct(recipe, False)
        recipe[group] = own
        for key in OmegaConf.missing_keys(recipe) if group == "task" else ():
            OmegaConf.update(recipe, key, "package.module:function")
        checked(recipe)


def test_every_key_has_a_type_in_words_and_a_meaning():
    for name, field in fields_of(Recipe).items():
        for tag in variants_of(field) or [""]:
            for key in keys_below(Recipe, (), {name: tag}):
                assert key.allowed
                assert key.field.description, key.name
                assert "\n" not in key.field.description


def test_helper_keys_of_an_experiment_file_pass_only_where_something_refers_to_them():
    recipe = compose_overrides(()).copy()
    OmegaConf.set_struct(recipe, False)
    recipe.settings = {"a": {"clients": 3}}
    recipe.setting = "a"
    with refused("settings"):
        checked(recipe)
    recipe.clients = "${settings.${setting}.clients}"
    assert checked(recipe).clients == 3
