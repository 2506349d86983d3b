"""A results folder from somebody else runs no code of its choice, and tells no secret."""

import sys
from functools import cache
from itertools import product

import pytest
import yaml
from omegaconf import OmegaConf

from fedhet.common.checksums import text_sha256
from fedhet.common.outside import import_name, import_target
from fedhet.common.results import read_summary, write_summary
from fedhet.conf import compose_overrides, config_yaml, fingerprint, resolved
from fedhet.conf.trust import require_trust, trust
from fedhet.load_run import recipe_of, task_of
from fedhet.server_app.reused_training import check_reused_training
from fedhet.tools.conformal.command import main as conformal_main
from fedhet.tools.evaluate import main as evaluate_main
from fedhet.tools.export import main as export_main
from tests.recipes import TINY, run_recipe
from tests.refused import refused

FOREIGN = {  # a key and what it names, in a folder that somebody has sent
    "of the standard library": ("task.model", "os:system"),
    "the same, behind the module": ("task.model", "my_project.model:os.system"),
    "the same, of a class": ("strategy.aggregator._target_", "subprocess.Popen"),
    "the same, behind fedhet's": ("strategy.sampler._target_", "fedhet.strategies.base.os.system"),
    "a pickle's reader": ("task.test_data", "torch:load"),
    "the hub": ("task.model", "torch.hub:load"),
    "the hub, behind a library": ("task.model", "torchvision.models.resnet:torch.hub.load"),
    "NumPy's reader": ("task.data", "numpy:load"),
    "an import of fedhet's": ("task.data", "fedhet.tasks.tabular:Path.unlink"),
    "what deletes a cache": ("task.data", "fedhet.tasks.sources.store:shutil.rmtree"),
    "fedhet's own function": ("task.data", "fedhet.tasks.sources.store:Store"),
    "a function of a room": ("task.data", "fedhet.strategies.wire.tensor_files:save_tensors"),
    "a module in the folder": ("task.loss", "lying_here:loss"),
    "a method": ("strategy.methods.mine", "lying_here:Method"),
    "a metric in a list": ("evaluation.metrics", ["accuracy", "lying_here:loss"]),
    "a root set": ("strategy.aggregator.data", "lying_here:loss"),
    "a default of the environment": ("task.model", "${oc.env:NOBODY_SETS_IT,os:system}"),
    "a reference": ("task.model", "${oc.create:os}:system"),
}


OWN = ("task=own", "task.data=a:b", "task.model=a:c")
METHOD = "fedhet.strategies.fedavg:FedAvg"


@cache
def recipe_text():
    return config_yaml(compose_overrides(OWN), 2)


def sent(folder, key, value, **summary):
    """Write the folder of a run as somebody may send it, and return it."""
    recipe = yaml.safe_load(recipe_text())
    recipe["task"] |= {"data": "fedhet.tasks.tabular:load", "model": "torchvision.models:resnet18"}
    *parents, name = key.split(".")
    node = recipe
    for parent in parents:
        node[parent] = node = dict(node.get(parent) or {})
    node[name] = value
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    write_summary(folder, {"status": "completed", "clients": 2, **summary})
    return folder


@pytest.mark.parametrize(("key", "value"), FOREIGN.values(), ids=FOREIGN)
def test_a_folder_from_somebody_else_calls_nothing(key, value, tmp_path, own_project):
    (own_project / "lying_here.py").write_text("raise SystemExit(3)\n")
    model = own_project / "my_project" / "model.py"
    model.write_text(f"import os\n{model.read_text()}")
    folder = sent(tmp_path / "run", key, value)
    with refused(value if isinstance(value, str) and "$" not in value else ""):
        recipe_of(folder)


def test_names_of_fedhet_of_libraries_and_of_the_project_are_loaded(tmp_path, own_project):
    assert own_project
    for number, name in enumerate(("torchvision.models:resnet18", "my_project.model:Net")):
        assert recipe_of(sent(tmp_path / str(number), "task.model", name)).task.model == name
    folder = sent(tmp_path / "method", "strategy.methods", {"fedavg": METHOD})
    assert recipe_of(folder).strategy.methods.fedavg == METHOD


def test_the_code_that_made_a_run_is_known_by_its_hash_and_other_code_by_the_users_word(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "lying_here.py"
    module.write_text("def net(num_classes):\n    return None\n")
    name = "lying_here:net"
    made = sent(tmp_path / "made", "task.model", name)
    code = fingerprint(OmegaConf.load(made / "config.yaml"))["code"]
    same = sent(tmp_path / "same", "task.model", name, fingerprint={"code": code})
    assert recipe_of(same).task.model == name
    other = sent(tmp_path / "other", "task.model", name, fingerprint={"code": "another"})
    with refused(f"task.model={name}", "--trust"):
        recipe_of(other)
    trust(other)
    assert recipe_of(other).task.model == name
    sys.modules.pop("lying_here", None)


@pytest.mark.slow
def test_every_command_that_loads_a_run_asks_for_trust(tmp_path, capsys, monkeypatch):
    """And with it, a module of the standard library is still no model."""
    folder = tmp_path / "run"
    run_recipe(folder, *TINY, "rounds=1")
    recipe = yaml.safe_load((folder / "config.yaml").read_text())
    recipe["task"]["model"] = "os:system"
    summary = read_summary(folder)
    (folder / "config.yaml").write_text(text := yaml.safe_dump(recipe))
    write_summary(folder, {**summary, "config_sha256": text_sha256(text)})  # all checksums fit
    monkeypatch.setattr("os.system", lambda **_: pytest.fail("it was called"))
    commands = (
        (evaluate_main, []),
        (evaluate_main, ["--by-site"]),
        (export_main, []),
        (conformal_main, []),
    )
    for (main, given), words in product(commands, ([], ["--trust"])):
        with pytest.raises(SystemExit):
            main([str(folder), *given, *words])
        assert "task.model=os:system" in capsys.readouterr().err


def test_training_of_a_folder_from_somebody_else_is_not_reused(tmp_path):
    folder = sent(tmp_path / "run", "strategy.aggregator._target_", "torch.load")
    (folder / "client_models.safetensors").write_bytes(b"")
    with refused("strategy.aggregator._target_=torch.load"):
        check_reused_training(compose_overrides(()), folder, 2)


@pytest.mark.parametrize("name", ["os:system", "builtins:exec", "json:loads"])
def test_the_standard_library_has_no_models(name):
    with refused(f"task.model={name}"):
        import_name("task.model", name)
    with refused("attack._target_"):
        import_target("attack._target_", name.replace(":", "."))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("1 / 0\n", "line 1 ZeroDivisionError"),
        ("import torch\ndef f(:\n", "line 2 SyntaxError"),
        ("import sys\nsys.exit('no arguments')\n", "line 2 SystemExit"),
        ("import torch\ntorch.zeros(2) @ torch.zeros(3)\n", "line 2 RuntimeError"),
        ("from json import nothing\n", "line 1 ImportError"),
        ("import nowhere_at_all\n", "line 1 nowhere_at_all"),
    ],
)
def test_a_module_that_fails_at_import_is_told_with_file_and_line(
    text, named, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_here.py").write_text(text)
    with refused("task.data=failing_here:load", "failing_here.py", *named.split()):
        import_name("task.data", "failing_here:load")


def test_a_value_of_the_environment_is_in_no_result(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_TEST_SECRET", "hunter2")
    words = [*OWN]
    words += ["task.data_options.password=${oc.env:FEDHET_TEST_SECRET}"]
    words += ["task.data_options.url='ftp://${task.data_options.password}@here'"]
    words += ["task.data_options.both='${oc.env:NOT_SET,${oc.env:FEDHET_TEST_SECRET}}'"]
    words += ["task.data_options.number='${oc.decode:${oc.env:FEDHET_TEST_SECRET}}'"]
    recipe = compose_overrides(tuple(words))
    text = config_yaml(recipe, 2)
    assert "hunter2" not in text
    assert "hunter2" not in str(resolved(recipe, 2))  # which loggers get
    again = OmegaConf.create(text)
    assert again.task.data_options.url == "ftp://hunter2@here"
    assert config_yaml(again, 2) == text
    monkeypatch.delenv("FEDHET_TEST_SECRET")
    with refused("FEDHET_TEST_SECRET"):
        task_of(again)


def test_require_trust_leaves_what_is_never_imported(tmp_path):
    recipe = OmegaConf.create({"paper": {"title": "a:b"}, "logger": {"x": {"_target_": "os.x"}}})
    require_trust(tmp_path, recipe, {}, "")
