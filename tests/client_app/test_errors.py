"""What a site sends of its errors: never a word of its examples."""

import json
import sys

import pytest
from flwr.app import Context, Message, RecordDict

from fedhet.client_app.app import app
from fedhet.client_app.errors import SiteError
from tests.refused import refused

SECRET = "J. Smith, HIV positive"
TABLE = [
    "task=tabular",
    "task.classes=[no,yes]",
    "task.target=sick",
    "task.data_options.numeric=[age]",
    "task.data_options.categorical=[]",
]
WRONG_TABLES = {
    "label": f'age,sick\n30,no\n40,"{SECRET}"\n',
    "no header": f'30,"{SECRET}"\n40,no\n',
    "number": f'age,sick\n30,no\n"{SECRET}",yes\n',
    "more fields": f'age,sick\n30,no\n40,yes,"{SECRET}"\n',
    "two names": f'"{SECRET}","{SECRET}"\n30,no\n',
}
OWN = ["task=own", "task.model=own_code:model", "task.data=own_code:data"]
CODE = f"""
import numpy as np
from torch import nn

def data(data_folder):
    {{}}

def model():
    return nn.Linear(2, 2)

SECRET = {SECRET!r}
"""
WRONG_FUNCTIONS = {
    "parsed": "return (np.array([float(SECRET)]), [0]), None",
    "own error": "raise KeyError(SECRET)",
    "texts": "return ([SECRET], [0]), None",
    "labels": "return (np.zeros((2, 2)), np.array([0, 1978])), None",
    "half labels": "return (np.zeros((2, 2)), np.array([0, 19.78])), None",
}


def register(words, **node) -> Message:
    run_config = {"overrides": json.dumps(["clients=2", *words])}
    context = Context(1, 1, {"partition-id": 0, **node}, RecordDict(), run_config)
    return app(Message(RecordDict(), dst_node_id=1, message_type="query", ttl=77.0), context)


def register_site(words, folder) -> Message:
    at_site = ["runtime.simulation=false", "partition=site"]
    return register([*words, *at_site], **{"data-folder": str(folder)})


def says_nothing(said: SiteError) -> None:
    assert str(said).endswith("; the site's log has its text")
    assert any(place in str(said) for place in ("fedhet.tasks", "text_files", "own_code"))
    for word in (*SECRET.split(), "1978", "19.78"):
        assert word not in str(said)
    assert said.__cause__ is not None  # which Flower logs there


@pytest.mark.parametrize("content", WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_table_that_is_refused_is_not_quoted(content, tmp_path):
    public = tmp_path / "public.csv"
    public.write_text("age,sick\n30,no\n40,yes\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "train.csv").write_text(content)
    with pytest.raises(SiteError) as said:
        register_site([*TABLE, f"task.data_options.public={public}"], tmp_path / "site")
    says_nothing(said.value)


@pytest.mark.parametrize("line", WRONG_FUNCTIONS.values(), ids=WRONG_FUNCTIONS)
def test_an_error_of_or_about_the_users_function_is_not_quoted(line, tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(CODE.format(line))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    with pytest.raises(SiteError) as said:
        register_site(OWN, tmp_path)
    says_nothing(said.value)


def test_what_a_machine_lacks_is_said_in_full(tmp_path):
    public = tmp_path / "public.csv"
    public.write_text("age,sick\n30,no\n40,yes\n")
    with refused("data-folder", kind=SiteError):
        register_site([*TABLE, f"task.data_options.public={public}"], tmp_path / "absent")


@pytest.mark.slow
def test_a_simulation_says_all(tmp_path):
    (tmp_path / "train.csv").write_text(WRONG_TABLES["label"])
    with refused(*SECRET.split()):
        register([*TABLE, f"task.path={tmp_path}", "task.data_options.public=1"])
