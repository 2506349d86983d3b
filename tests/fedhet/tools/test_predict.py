"""fedhet-predict: a table's rows with the predictions of an exported model."""

import shutil
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

from fedhet.common.results import read_summary, write_summary
from fedhet.load_run import label_metadata_of, model_of, recipe_of, task_of
from fedhet.tasks import tabular
from fedhet.tools.export import export
from fedhet.tools.predict import main

pytestmark = pytest.mark.slow  # the tests need runs


def predicted(folder, table):
    """Return what the command writes for a table, as text."""
    out = folder / "predictions.csv"
    main([str(folder / "model.pt2"), str(table), "--out", str(out)])
    return pd.read_csv(out, dtype=str)


def test_rows_get_their_classes_and_the_models_probabilities(table_run, tmp_path):
    folder, table = table_run
    export(folder, tmp_path / "model.pt2")
    given = pd.read_csv(table, dtype=str)
    given[["town", "constant", "age"]].to_csv(tmp_path / "new.csv", index=False)  # no target
    found = predicted(tmp_path, tmp_path / "new.csv")
    assert list(found) == ["town", "constant", "age", "predicted", "p_no", "p_yes"]
    pd.testing.assert_frame_equal(found[["age", "town"]], given[["age", "town"]])
    options = {"path": str(table), "target": "y", "classes": ["no", "yes"], "test_fraction": 0.0}
    (inputs, _), _ = tabular.load(**options, public=100)
    model = model_of(folder, task_of(recipe_of(folder), label_metadata_of(folder)))
    outputs = model(torch.from_numpy(inputs))[1].softmax(dim=1).detach().numpy()
    np.testing.assert_allclose(found[["p_no", "p_yes"]].astype(float), outputs, atol=1e-4)
    assert found["predicted"].tolist() == [("no", "yes")[n] for n in outputs.argmax(axis=1)]


@pytest.mark.parametrize("threshold", [0.5, 0.0, None])
def test_a_set_has_classes_until_the_likelier_ones_exceed_the_threshold(
    threshold, table_run, tmp_path
):
    folder, table = tmp_path / "run", table_run[1]
    shutil.copytree(table_run[0], folder)
    sets = [{"score": name, "alpha": 0.1, "threshold": threshold} for name in ("APS", "RAPS")]
    calibrated = {"prediction_sets": {"temperature": 2.0, "sets": sets}}
    write_summary(folder, read_summary(folder) | calibrated)
    export(folder, tmp_path / "model.pt2")
    found = predicted(tmp_path, table)
    for _, row in found.iterrows():
        odds = {name: float(row[f"p_{name}"]) ** 0.5 for name in ("no", "yes")}  # T = 2
        likeliest = max(odds.values()) / sum(odds.values())
        both = threshold is None or likeliest <= threshold
        ranked = sorted(odds, key=odds.__getitem__, reverse=True)
        assert row["set_0.9"] == (" or ".join(ranked) if both else row["predicted"])


def test_a_regression_gets_its_values(regression_run, tmp_path):
    folder, table = regression_run
    export(folder, tmp_path / "model.pt2")
    found = predicted(tmp_path, table).astype(float)
    assert list(found) == ["x", "y", "predicted"]
    assert (found["predicted"] - found["y"]).abs().max() < 100
    main([str(tmp_path / "model.pt2"), str(table), "--out", str(tmp_path / "p.parquet")])
    stored = pd.read_parquet(tmp_path / "p.parquet").astype(float)
    np.testing.assert_allclose(stored["predicted"], found["predicted"], rtol=1e-5)


def test_what_is_no_model_of_a_table_is_refused(fedavg_run, table_run, tmp_path, refused):
    _, table = table_run
    export(fedavg_run, tmp_path / "model.pt2")
    assert "task=tabular" in refused(main, tmp_path / "model.pt2", table)
    whole = (tmp_path / "model.pt2").read_bytes()
    (tmp_path / "cut.pt2").write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        other.writestr("about.json", "{}")
    for wrong in (table, tmp_path / "cut.pt2", tmp_path / "other.pt2"):
        assert "fedhet-export" in refused(main, wrong, table)
    assert "MODEL" in refused(main, tmp_path / "missing.pt2", table)
    export(table_run[0], tmp_path / "model.pt2")
    (tmp_path / "new.csv").write_text("age,town\n30,A\n")
    assert "no column constant" in refused(main, tmp_path / "model.pt2", tmp_path / "new.csv")
    (tmp_path / "new.csv").write_text("age,town,constant\n30,A,1\n1e300,A,1\n")
    assert "row 2" in refused(main, tmp_path / "model.pt2", tmp_path / "new.csv")
    (tmp_path / "new.csv").write_text("age,town,constant,predicted\n30,A,1,no\n")
    assert "column predicted" in refused(main, tmp_path / "model.pt2", tmp_path / "new.csv")
    assert "TABLE" in refused(main, tmp_path / "model.pt2", tmp_path / "missing.csv")


def test_values_that_the_model_does_not_know_are_told(table_run, tmp_path, caplog):
    export(table_run[0], tmp_path / "model.pt2")
    (tmp_path / "new.csv").write_text("age,town,constant\n30,Nowhere,1\n40,Nowhere,1\n")
    with caplog.at_level("WARNING", logger="flwr"):
        assert len(predicted(tmp_path, tmp_path / "new.csv")) == 2
    assert "column town: 2 of 2 values" in caplog.text
