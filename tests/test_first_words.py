"""What a stranger types first: it works, or the error names the words that do."""

import pytest

from fedhet.common.errors import ConfigError
from fedhet.conf import compose_overrides
from fedhet.conf.mistakes import groups, options_of
from fedhet.conf.other_words import KEYS, OPTIONS
from fedhet.help import check_flags
from fedhet.tasks.models import build_model
from tests.refused import refused

FIRST_WORDS = """
use my own data
    data=my.csv -> task=image_folder tabular
    dataset=mnist -> task=mnist
    task=my.csv -> task=tabular my.csv
    task=csv -> task=tabular
    task=images -> task=image_folder
    task=image_folder task.folder=/data -> task.path=/data
    task=mnist data_dir=/data -> task.path=/data
    task=text -> task=hf_text
    task=CIFAR10 -> task=cifar10
    task=regression -> task=tabular task.kind=regression
    task=own task.model=a:b task.data=my_data.py -> task.data=my_data:NAME
use my own model
    model=resnet18 -> task.model
    task.model=my_model.py -> task.model=my_model:NAME
    task.model=torchvision.models.resnet18 -> task.model=torchvision.models:resnet18
    task.hidden=32 -> task.model_options
    task=own task.model=a:b task.data=a:c task.hidden=32 -> task.model_options
    pretrained=true -> initial_model.path
    optimizer=adam -> local.optimizer
    local.optimizer=AdamW -> adam
    learning_rate=0.1 -> local.lr=0.1 server.lr=0.1
    num_epochs=5 -> local.epochs=5
    local.lr='0.1' -> local.lr=0.1 $NAME
    local.epochs=0.5 -> local.epochs=null local.steps
    batch_size=32 -> local.batch_size
choose a method
    method=fedprox -> strategy=fedprox
    strategy=FedProx -> strategy=fedprox
    strategy=fedprox+scaffold -> strategy=[fedprox,scaffold]
    strategy=fedprox,scaffold -> fedhet -m strategy=[fedprox,scaffold]
    strategy=fedprox mu=0.1 -> strategy.fedprox.mu
    strategy=fedprox strategy.mu=0.1 -> strategy.fedprox.mu
    strategy=fedopt -> fedadam
    strategy=fedavgm strategy.momentum=0.9 -> strategy.fedavgm.momentum
    strategy.server_lr=1 -> server.lr=1
split the data
    num_clients=20 -> clients
    fraction_fit=0.1 -> participation=0.1
    num_rounds=10 -> rounds
    alpha=0.1 -> partition.alpha
    partition=non_iid -> partition=dirichlet partition.alpha
    partition=iid partition.alpha=0.1 -> dirichlet partition=iid
    partition=dirichlet partition.beta=1 -> partition.alpha=1
    dirichlet=0.1 -> partition=dirichlet partition.alpha=0.1
    partition=by_user -> partition=natural
write a method of my own
    strategy=my_method.Mine -> strategy=my_method:Mine
    strategy=my_method:Mine -> my_method
continue a run
    output_dir=/x -> results_dir=/x
    resume=/x -> resume=true results_dir=/x
    continue=true -> resume=true
    checkpoint=/x -> checkpoint.every
    initial_model=/x.pt -> initial_model.path
run it here, or at sites
    device=gpu -> cuda
    gpus=1 -> device=cuda
    num_workers=4 -> runtime.num_cpus=4
    runtime=docker -> runtime=deployment
    runtime=simulation -> runtime=local
    system=slow -> system=lognormal
    wandb=true -> logger=[csv,wandb]
measure it
    metrics=f1 -> evaluation.metrics=[f1]
    evaluation.metrics=f1 -> evaluation.metrics=[f1]
    evaluation.metrics=[auc] -> auroc
    early_stopping=5 -> early_stopping.patience
protect the data
    dp=true -> strategy/differential_privacy=central_fixed
    epsilon=1 -> strategy.differential_privacy.epsilon=1
    strategy/differential_privacy=true -> central_fixed
    strategy.differential_privacy=local -> strategy/differential_privacy=local
    secure_aggregation=true -> strategy/secure_aggregation=secagg_plus
    strategy/compression=8bit -> strategy/compression=int8
defend against a hostile site
    strategy=krum -> strategy/aggregator=krum
    aggregator=median -> strategy/aggregator=median
    strategy.aggregator=median -> strategy/aggregator=median
    attack=label_flipping -> label_flip
    attack=sign_flip -> attack.allow=true
    byzantine=2 -> attack.allow=true
"""
CASES = [line.strip().split(" -> ") for line in FIRST_WORDS.splitlines() if " -> " in line]


@pytest.mark.parametrize(("typed", "named"), CASES, ids=[typed for typed, _ in CASES])
def test_a_first_word_is_answered_with_the_one_that_works(typed, named):
    with refused(*named.split()):
        compose_overrides(tuple(typed.split()))


@pytest.mark.parametrize("flag", ["--rounds=3", "--local.lr=3", "--target-accuracy=3"])
def test_a_key_that_is_written_as_a_flag_is_shown_without_dashes(flag):
    with refused(flag.partition("=")[0], flag.removeprefix("--").replace("-", "_")):
        check_flags([flag])


def test_the_words_of_other_tools_are_none_of_fedhets_own():
    """And what is named in their place is there."""
    for group, words in OPTIONS.items():
        assert not words.keys() & {*options_of(group)}
    texts = [*KEYS.values(), *(text for words in OPTIONS.values() for text in words.values())]
    for word in " ".join(texts).replace("{value}", "1").split():
        key, is_word, value = word.partition("=")
        option = value.rstrip(",:;")
        if key in groups() and option.isidentifier() and option.islower():
            assert option in options_of(key), word
        elif is_word and key not in groups():
            with pytest.raises(ConfigError) as error:
                compose_overrides((f"{key}=[[]]",))
            known = ("it belongs to", "leaves it out")  # of another option, or of another task
            text = str(error.value)
            assert f"unknown key {key}" not in text or any(one in text for one in known), word


@pytest.mark.slow  # torchvision takes a second to import
def test_a_model_of_torchvision_has_the_tasks_classes():
    model = build_model(
        "torchvision.models:resnet18", input_shape=(3, 32, 32), num_classes=7, seed=0
    )
    assert model.head.out_features == 7
