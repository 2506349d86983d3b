"""A method is one class: from the command, in code, in a Flower app, and one of the user's own."""

import pytest

import fedhet
from fedhet.common.configured import fields
from fedhet.conf import compose_overrides, project
from fedhet.conf.build import strategy_of
from fedhet.flower_apps import _App
from fedhet.server_app.assembly import check_parts
from fedhet.strategies.fedbuff import FedAsync
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.method import Method, combined
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.systems import Constant
from fedhet.strategies.parts import Parts, Setup
from fedhet.strategies.scaffold import SCAFFOLD, control_variates
from tests.recipes import TINY, run_recipe
from tests.refused import refused

OWN = f"{__name__}:Mine"


class Mine(Method):
    """Mine (this test): SCAFFOLD on the classifier, by another name."""

    weight: int = 1

    def parts(self) -> Parts:
        """Add SCAFFOLD's halves."""
        return control_variates(self.name, "head.*", "II")


class NotAMethod:
    """Not one."""


def of_app(method) -> Method:
    """Return the strategy that an app's server makes."""
    settings = {"system": "none"}  # an app's clients are real
    made = _App.of(model, data, method, "classification", None, None, settings)
    return strategy_of(compose_overrides(made.overrides), 2, Setup(system=Constant()))


def model():
    """Not called."""


def data(partition_id):
    """Not called."""


def parameters(method: Method) -> dict:
    """Return a method's parameters, and those of its sections in words."""
    known = fields(type(method)).values()
    return {one.name: str(getattr(method, one.name)) for one in known if not one.in_code}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "method"),
    [
        (("strategy=fedpvr", "strategy.fedpvr.layers=last:2"), FedPVR(layers="last:2")),
        (
            ("strategy=fedasync", "strategy.asynchronous.exponent=2.0"),
            FedAsync(asynchronous={"exponent": 2.0}),
        ),
        (("strategy=fedadam", "strategy.fedadam.tau=0.1"), fedhet.FedAdam(tau=0.1)),
        (("strategy=maecho", "strategy.maecho.loop=algorithm1"), fedhet.MAEcho(loop="algorithm1")),
    ],
)
def test_all_doors_make_the_same_class_with_the_same_parameters(words, method):
    command = strategy_of(compose_overrides(words), 2, Setup(system=Constant()))
    app = of_app(method)
    assert type(command) is type(app) is type(method)
    assert parameters(command) == parameters(app) == parameters(method)


def test_a_section_of_its_own_reaches_an_app_whole():
    """FedAsync's buffer is 1, unlike Asynchronous's own default."""
    method = FedAsync(asynchronous=Asynchronous(exponent=2.0))
    assert parameters(of_app(method)) == parameters(method)


def test_a_method_of_the_users_is_the_same_kind_of_class():
    recipe = compose_overrides((f"strategy={OWN}", "strategy.mine.weight=3"))
    command = strategy_of(recipe, 2, Setup())
    assert type(command) is Mine
    assert parameters(command) == parameters(of_app(Mine(weight=3))) == parameters(Mine(weight=3))
    assert [path.name for path in project.own_code(recipe)] == ["tests"]
    with refused("strategy.mine.weight=many"):
        check_parts(compose_overrides((f"strategy={OWN}", "strategy.mine.weight=many")))


@pytest.mark.slow
def test_a_method_of_the_users_runs_as_fedhets_do(tmp_path):
    words = [*TINY, "rounds=1"]
    found = run_recipe(tmp_path / "mine", *words, f"strategy={OWN}")
    expected = run_recipe(
        tmp_path / "fedpvr", *words, "strategy=fedpvr", "strategy.fedpvr.layers='head.*'"
    )
    assert found["parameters_sha256"] == expected["parameters_sha256"]


@pytest.mark.parametrize(
    "name",
    [
        "tests.nowhere:Mine",
        f"{__name__}:Nowhere",
        f"{__name__}:NotAMethod",
        "fedhet.strategies.fedcm:ClientMomentum",
    ],
)
def test_a_class_that_is_no_method_is_refused_by_its_name(name):
    with refused(f"strategy={name}"):
        compose_overrides((f"strategy={name}",))


def test_two_methods_that_replace_one_slot_are_refused():
    with refused("strategy=[fedadam,fedyogi]", "server_optimizer"):
        compose_overrides(("strategy=[fedyogi,fedadam]",))
    with refused("strategy=[fedadam,fedyogi]", "server_optimizer"):
        combined([fedhet.FedYogi(), fedhet.FedAdam()], Parts(), Setup())


def test_several_methods_are_a_class_that_names_them():
    found = combined([SCAFFOLD(), fedhet.FedProx()], Parts(), Setup())
    assert type(found).__name__ == "FedProx_SCAFFOLD"
    assert found.__doc__ == "FedProx and SCAFFOLD."
    assert set(found.client_sides) == {"fedprox", "scaffold"}


@pytest.mark.parametrize("words", ["fedprox", "[fedprox,feddw]"])
def test_the_servers_rate_reaches_one_method_and_several(words):
    recipe = compose_overrides((f"strategy={words}", "server.lr=0.5"))
    strategy = strategy_of(recipe, 2, Setup())
    assert strategy.server_step.optimizer.lr == 0.5
