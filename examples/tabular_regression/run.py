"""Predicts the progression of diabetes from a table that five clients share: python run.py"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression

from fedhet import load_weights
from fedhet.tasks import tabular

HIDDEN, EPOCHS = [32], 60  # epochs over all rows: of the federation 30 rounds of 2
WORDS = [
    "task=tabular",
    "task.kind=regression",
    "task.path=data/diabetes.csv",
    "task.target=progression",
    "task.data_options.categorical=[sex]",
    f"task.model_options={{hidden:{HIDDEN},mean:150,std:75}}",  # of the target, about
    "partition=dirichlet",
    "partition.alpha=1.0",
    "clients=5",
    "rounds=30",
    "local=adam",
    "local.lr=0.003",
    "local.epochs=2",
    "local.batch_size=32",
    "evaluation.metrics=[mae]",
    "runtime=local",
]


def write_table(path):
    """Write scikit-learn's diabetes data as CSV."""
    table = load_diabetes(as_frame=True, scaled=False).frame
    table["sex"] = table["sex"].map({1: "a", 2: "b"})  # which is which, the data do not say
    path.parent.mkdir(exist_ok=True)
    table.rename(columns={"target": "progression"}).to_csv(path, index=False)


def compare(path, folder):
    """Return the mean absolute errors on the test rows: federated, and on all rows at once."""
    options = {"target": "progression", "categorical": ["sex"], "kind": "regression"}
    (inputs, targets), (test_inputs, test_targets) = tabular.load(path=str(path), **options)
    torch.manual_seed(0)
    federated, central = (
        tabular.mlp(inputs.shape[1:], 1, HIDDEN, mean=150.0, std=75.0) for _ in range(2)
    )
    load_weights(federated, folder)
    optimizer = torch.optim.Adam(central.parameters(), lr=0.003)
    rows = torch.utils.data.TensorDataset(torch.tensor(inputs), torch.tensor(targets).float())
    for _ in range(EPOCHS):
        for batch, wanted in torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(central(batch)[:, 0], wanted).backward()
            optimizer.step()
    linear = LinearRegression().fit(inputs, targets)
    with torch.no_grad():
        predicted = {
            "federated": federated(torch.tensor(test_inputs))[:, 0].numpy(),
            "centralised, plain PyTorch": central(torch.tensor(test_inputs))[:, 0].numpy(),
            "centralised, LinearRegression": linear.predict(test_inputs),
            "the mean of the training rows": np.full(len(test_targets), targets.mean()),
        }
    return {name: float(np.abs(found - test_targets).mean()) for name, found in predicted.items()}


if __name__ == "__main__":
    table = Path("data/diabetes.csv")
    write_table(table)
    results = Path("results") / time.strftime("diabetes_%Y-%m-%d_%H-%M-%S")
    command = [sys.executable, "-m", "fedhet", *WORDS, f"results_dir={results}"]
    subprocess.run([*command, *sys.argv[1:]], check=True)
    print(pandas.Series(compare(table, results), name="MAE").round(1).to_string())
