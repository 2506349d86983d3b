"""A project of the user's own: fedhet-new, its recipes, and its code on the way to the clients."""

import sys

import pytest

from fedhet.conf import compose_overrides, fingerprint, project
from fedhet.conf.build import strategy_parts
from fedhet.conf.mistakes import check_option, groups, options_of
from fedhet.flower_apps import make_client_app
from fedhet.runtimes.flower_install import stage_app
from fedhet.server_app.assembly import check_parts
from fedhet.tasks.references import load_reference
from fedhet.tools.new import main, write_project
from tests.recipes import run_recipe
from tests.refused import refused

RUN = ["task=my_project", "clients=2", "rounds=1", "local.epochs=1"]


@pytest.fixture
def folder(own_project):
    return own_project


# ---- fedhet-new ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9lives", "9lives is not a package name"),
        ("my-project", "my-project is not a package name"),
        ("class", "class is not a package name"),
        ("x" * 33, "is not a package name"),
        ("numpy", "numpy is the name of an installed package"),
        ("json", "json is the name of an installed package"),
        ("sys", "sys is the name of an installed package"),
        ("tabular", "tabular is the name of one of fedhet's tasks"),
        ("fedhet", "fedhet is the name of an installed package"),
        ("taken", "taken exists"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line(name, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["fedhet-new", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedhet-new: ")
    assert message in line
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]


def test_the_name_is_everywhere(tmp_path):
    written = write_project(tmp_path / "two_words")
    text = "".join((tmp_path / "two_words" / name).read_text() for name in written)
    assert "my_project" not in text + "".join(written)
    assert "my-project" not in text
    assert 'name = "two-words"' in text
    assert "two_words/conf/task/two_words.yaml" in written


# ---- recipes -------------------------------------------------------------------------------------


METHOD = "my_project.method:KeepFeatures"


@pytest.mark.slow
def test_the_projects_task_and_method_are_composed(folder):
    recipe = compose_overrides(("task=my_project", f"strategy=[fedprox,{METHOD}]"))
    assert recipe.task.data == "my_project.data:load_data"
    assert recipe.strategy.methods.keepfeatures == METHOD
    assert set(strategy_parts(recipe, 1).client_sides) == {"fedprox", "keepfeatures"}
    assert {"my_project", "digits"} <= set(options_of("task"))
    for words in (
        ("strategy=my_project.method:KeepFeature",),
        ("strategy=my_project.nowhere:KeepFeatures",),
        ("strategy=my_project.data:load_data",),
        (f"strategy={METHOD}", "strategy.keepfeatures.weigth=1"),
        ("strategy.keepfeatures.weight=1",),
    ):
        with refused(words[-1].partition("=")[0]):
            compose_overrides(words)
    check_option("strategy", ["fedprox", METHOD])  # as a sweep does before its first job
    check_option("strategy", METHOD)
    with refused("strategy"):
        check_option("strategy", "my_project.method:KeepFeature")
    for method in ("fedprox", METHOD, [METHOD, "scaffold"]):
        assert make_client_app(list, list, method) is not None  # composed, and not called


def test_without_the_project_its_recipes_are_unknown_again(folder, monkeypatch):
    assert "my_project" in options_of("task")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    assert "my_project" not in options_of("task")
    with refused("task=my_project"):
        compose_overrides(("task=my_project",))
    assert "task" in groups()


@pytest.mark.slow
def test_a_project_above_is_named_and_not_taken(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(folder)])
    below = folder / "my_project" / "conf"
    for here in (below.parent, below):
        monkeypatch.chdir(here)
        for word in ("task=my_project",):
            with refused(word, str(here), str(folder)):
                compose_overrides((word,))
    monkeypatch.chdir(folder.parent)
    with refused(str(folder.parent), "pyproject.toml"):
        compose_overrides(("task=my_project",))
    with refused("strategy=fedavgg") as error:  # of a typing mistake it says no more than before
        compose_overrides(("strategy=fedavgg",))
    assert "project" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('conf = "nowhere"', "conf='nowhere'"),
        ('conf = ".."', "conf='..'"),
        ('conf = ""', "conf=''"),
        ('config = "conf"', "config"),
        ("conf = ", "pyproject.toml"),
        ('conf = "conf"', "conf/task/mnist.yaml task/mnist.yaml"),
    ],
)
def test_a_wrong_table_and_a_name_of_fedhets_are_refused(text, message, tmp_path, monkeypatch):
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "mnist.yaml").touch()
    (tmp_path / "pyproject.toml").write_text(f"[tool.fedhet]\n{text}\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with refused(*message.split()):
        compose_overrides(())


# ---- code ----------------------------------------------------------------------------------------


def recipe_of(*words):
    return compose_overrides(("task=my_project", *words))


@pytest.mark.slow
def test_the_code_that_a_recipe_names_is_the_users_and_no_installed_one(folder):
    (folder / "mine.py").write_text("def loss(outputs, targets): ...\n")
    words = ("task.model=torchvision.models:resnet18", "task.loss=mine:loss")
    assert project.own_code(recipe_of(*words)) == (folder / "mine.py", folder / "my_project")
    assert project.own_code(compose_overrides(("strategy=fedpvr",))) == ()
    assert project.travelling_code(compose_overrides(())) == (folder / "my_project",)
    missing = ("task.data=nowhere.at:all", "task.model=__main__:Net", "task.loss=json:loads")
    assert project.own_code(recipe_of(*missing)) == ()


@pytest.mark.slow
def test_the_same_bytes_have_the_same_hash_in_the_folder_and_in_the_bundle(
    folder, tmp_path, monkeypatch
):
    recipe = recipe_of(f"strategy={METHOD}")
    here = fingerprint(recipe)
    package = folder / "my_project"
    (package / "test_method.py").write_text("# Flower bundles no tests\n")
    (package / "notes.txt").write_text("not code\n")
    bundle = stage_app(tmp_path, project.travelling_code(recipe))
    (folder / "my_project" / "model.py").write_text("# edited\n")
    copied = {path.relative_to(bundle).as_posix() for path in (bundle / "my_project").rglob("*.*")}
    assert copied == {
        *(f"my_project/{name}.py" for name in ("__init__", "data", "method", "model")),
        "my_project/conf/task/my_project.yaml",
    }
    assert not (bundle / "strategies").exists()
    monkeypatch.setattr(sys, "path", [str(bundle), *sys.path])  # as Flower puts it
    assert project.project().folder == bundle
    again = recipe_of(f"strategy={METHOD}")
    assert again == recipe
    assert fingerprint(again) == here
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(bundle)])
    project_code = project.own_code(recipe)
    assert project.code_hash(project_code) != project.code_hash([bundle / "my_project"])


@pytest.mark.slow
def test_an_actor_of_ray_finds_modules_where_the_launcher_does(tmp_path, monkeypatch):
    (tmp_path / "other.py").write_text("def model(): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with refused("other"):
        load_reference("task.model", "other:model")
    from fedhet.runtimes.local.ray_workers import RayWorker  # Ray's import takes a second

    RayWorker(str(tmp_path))
    assert load_reference("task.model", "other:model")() is None
    assert sys.path[-1] == str(tmp_path)  # after Python's own and all installed modules


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_method_of_the_project_trains_and_is_fedavg_at_weight_zero(folder, tmp_path):
    plain = run_recipe(tmp_path / "fedavg", *RUN)
    hashes = [
        run_recipe(
            tmp_path / weight, *RUN, f"strategy={METHOD}", f"strategy.keepfeatures.weight={weight}"
        )
        for weight in ("0", "1")
    ]
    zero, one = (summary["parameters_sha256"] for summary in hashes)
    assert zero == plain["parameters_sha256"] != one
    with refused("strategy.keepfeatures.weight=-1"):
        check_parts(recipe_of(f"strategy={METHOD}", "strategy.keepfeatures.weight=-1"))
