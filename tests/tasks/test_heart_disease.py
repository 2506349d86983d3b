"""FLamby's preparation of the four hospitals' table, on a table of the same columns."""

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F

from fedhet.tasks.heart_disease import LogisticRegression, load
from tests.refused import refused
from tests.tasks.plain import task_of

SIZES = {"north": 60, "east": 30, "south": 20}


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    count = sum(SIZES.values())
    table = pandas.DataFrame({"hospital": np.repeat(list(SIZES), list(SIZES.values()))})
    for name in ("age", "trestbps", "chol", "thalach", "oldpeak"):
        table[name] = rng.normal(50, 9, count)
    for name, values in (("sex", 2), ("fbs", 2), ("exang", 2), ("restecg", 3), ("target", 5)):
        table[name] = rng.integers(0, values, count)
    table["cp"] = rng.integers(1, 5, count)
    table["slope"] = table["ca"] = table["thal"] = np.nan  # left out before rows are
    table.loc[table.hospital == "south", "chol"] = 0
    table.loc[[3, 70], "age"] = np.nan
    table.to_csv(tmp_path / "heart_disease.csv", index=False)
    return tmp_path / "heart_disease.csv"


def test_two_thirds_of_each_hospitals_complete_rows_are_to_train_on(path):
    train, test = load(path=str(path))
    sizes = {name: (int((train[2] == name).sum()), int((test[2] == name).sum())) for name in SIZES}
    assert sizes == {"north": (38, 21), "east": (19, 10), "south": (13, 7)}
    assert train[0].shape == (70, 13)
    assert set(train[1]) == {0, 1}
    for name in SIZES:
        own = train[0][train[2] == name]
        np.testing.assert_allclose(own.mean(axis=0), 0, atol=1e-5)
        constant = own.std(axis=0) == 0
        np.testing.assert_allclose(own.std(axis=0, ddof=1)[~constant], 1, atol=1e-5)
        assert constant[3] == (name == "south")  # chol, which is 0 there


def test_all_rows_may_be_normalised_together_and_one_hospital_train_alone(path, monkeypatch):
    train, _ = load(path=str(path), normalise="pooled")
    np.testing.assert_allclose(train[0].mean(axis=0), 0, atol=1e-5)
    alone, test = load(path=str(path), hospitals=["east"])
    assert (set(alone[2]), len(test[2])) == ({"east"}, 38)
    for wrong in ({"hospitals": ["west"]}, {"normalise": "never"}):
        with refused(f"task.data_options.{next(iter(wrong))}"):
            load(path=str(path), **wrong)
    monkeypatch.delenv("FEDHET_DATA", raising=False)
    with refused("task.path", "FEDHET_DATA"):
        load()
    table = pandas.read_csv(path)
    table[table.index < SIZES["north"] + 3].to_csv(path, index=False)
    with refused("complete rows", "east"):
        load(path=str(path))


def test_one_output_has_the_gradients_of_the_binary_cross_entropy():
    model, inputs = LogisticRegression(), torch.randn(9, 13)
    labels = (torch.arange(9) % 2).long()
    F.cross_entropy(model(inputs), labels).backward()
    found = model.linear.weight.grad.clone()
    model.zero_grad()
    z = model.linear(inputs)[:, 0]
    F.binary_cross_entropy_with_logits(z, labels.float()).backward()
    torch.testing.assert_close(found, model.linear.weight.grad)


def test_the_hospitals_are_natural_clients_with_test_rows_of_their_own(path):
    task = task_of("heart_disease", {"path": str(path)}, {"name": "natural"}, clients=3)
    assert task.client_names == ("east", "north", "south")
    found = [[len(part) for part in task.client_data(client)] for client in range(3)]
    assert found == [[19, 10], [38, 21], [13, 7]]
    assert len(task.test_data()) == 38


def test_a_hospital_with_its_own_table_has_the_rows_of_a_natural_client(path, tmp_path):
    whole = task_of("heart_disease", {"path": str(path)}, {"name": "natural"}, clients=3)
    site = task_of("heart_disease", {"path": str(path)}, {"name": "site"}, clients=3)
    for client, (name, rows) in enumerate(pandas.read_csv(path).groupby("hospital")):
        folder = tmp_path / name
        folder.mkdir()
        rows.to_csv(folder / "heart_disease.csv", index=False)
        own = site.client_data(client, site_folder=folder)
        for one, other in zip(own, whole.client_data(client), strict=True):
            assert one.sha256() == other.sha256()
    assert site.test_data().sha256() == whole.test_data().sha256()
    with refused("task.data_options.normalise"):
        load(data_folder=path, normalise="pooled")
