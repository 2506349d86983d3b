"""Which runs' client models another method may reuse: what each client side does to training."""

import pytest

from fedhet.common.checksums import CLIENT_MODELS
from fedhet.conf import compose_overrides, config_yaml
from fedhet.server_app.reused_training import check_reused_training
from fedhet.strategies.round.client_snapshots import FILE
from fedhet.strategies.wire.tensor_files import save_tensors
from tests.refused import refused

pytestmark = pytest.mark.slow  # each composes a recipe


@pytest.fixture
def trained(tmp_path):
    """A run of FedAvg, as far as the check reads it."""
    recipe = compose_overrides(("rounds=1",))
    (tmp_path / "config.yaml").write_text(config_yaml(recipe, 2))
    save_tensors(tmp_path / FILE, {}, {"kind": CLIENT_MODELS})
    return tmp_path


@pytest.mark.parametrize(
    ("strategy", "side"),
    [
        ("fedprox", "fedprox"),  # a penalty
        ("fedcm", "client_momentum"),  # corrects gradients
        ("fedala", "fedala"),  # mixes the received model at the start
    ],
)
def test_a_side_that_acts_in_training_has_no_models_of_plain_training(strategy, side, trained):
    recipe = compose_overrides(("rounds=1", f"strategy={strategy}"))
    with refused("local.reuse_training=", side):
        check_reused_training(recipe, trained, 2)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("attack=label_flip attack.allow=true", "attack."),
        ("strategy.compression.down=int8", "strategy.compression.down"),
    ],
)
def test_what_acts_in_training_has_to_be_the_same_in_both_runs(words, key, trained):
    plain, recipe = (compose_overrides(("rounds=1", *more)) for more in ((), words.split()))
    with refused(key):
        check_reused_training(recipe, trained, 2)
    (trained / "config.yaml").write_text(config_yaml(recipe, 2))
    check_reused_training(recipe, trained, 2)
    with refused(key):
        check_reused_training(plain, trained, 2)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("attack=sign_flip attack.allow=true", "attack"),
        ("strategy/compression=int8", "strategy.compression.up"),
        ("strategy/differential_privacy=local", "strategy.differential_privacy"),
    ],
)
def test_what_changes_a_model_on_its_way_comes_after_reused_training_and_never_twice(
    words, key, trained
):
    recipe = compose_overrides(("rounds=1", *words.split()))
    check_reused_training(recipe, trained, 2)
    (trained / "config.yaml").write_text(config_yaml(recipe, 2))
    with refused(key):
        check_reused_training(recipe, trained, 2)


def test_a_side_that_only_sends_more_at_the_end_may_have_them(trained):
    check_reused_training(compose_overrides(("rounds=1", "strategy=fednova")), trained, 2)
