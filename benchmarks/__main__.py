"""``python -m benchmarks NAME [WORDS]``: run one of the measurements below.

floor         seconds per round beside a plain PyTorch loop that does the same work
start         seconds to the end of round 1, and of a round whose training is trivial
epoch         a client's epoch of a method beside FedAvg's
fusion        the server's step of the one-shot methods beside the plain average
scale         large cohorts, 100,000 clients: memory, the server's time, and beside a plain loop
checks        CPU time that checking replies and the checksums of files add to a round
deployment    a deployment's round beside a plain Flower app that moves the same arrays
lora          LoRA's methods beside FedAvg on the same adapters: accuracy
comparison    tuned methods on tasks that need no download, in ranks
variants      the comparison with one thing changed: no last batches, or every class with a client
robust        robust aggregators under attack: accuracy, and what they cost
"""

from __future__ import annotations

import importlib
import sys

NAMES = (
    *("floor", "start", "epoch", "fusion", "scale", "checks", "deployment", "lora", "comparison"),
    *("variants", "robust"),
)


def main() -> None:
    """Run the measurement that the first word names."""
    name, *words = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        raise SystemExit(__doc__)
    sys.argv = [f"python -m benchmarks {name}", *words]
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
