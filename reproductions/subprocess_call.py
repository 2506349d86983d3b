"""Calls a module in a process of its own, for work that imports torch; it downloads nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fedhet

ROOT = Path(fedhet.__file__).resolve().parents[1]  # where the package fedhet lies
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class CallError(RuntimeError):
    """The process has no answer; the message is the reason."""


def call(module: str, question: Any, timeout: float) -> Any:
    """Run ``python -m module`` with JSON on its standard input; return the JSON of its last line.

    A process that fails, or takes longer than ``timeout`` seconds, is a CallError.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **OFFLINE, "PYTHONPATH": path},
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise CallError(f"it took longer than {timeout} s") from None
    except (ValueError, IndexError):
        raise CallError(done.stderr.strip()[-300:]) from None
