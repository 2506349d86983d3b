"""deployment.json in a results directory: the run and SuperLink that the directory belongs to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fedhet.common.files import save_text
from fedhet.common.run_events import RECORD_FILE
from fedhet.runtimes.flower_install import LaunchError


@dataclass(frozen=True)
class RunRecord:
    """What the launcher needs to follow or resume a run."""

    token: str  # of the results directory; a ServerApp that finds it there writes there itself
    run_id: int  # id of the newest run
    server_folder: str  # the results directory as the ServerApp sees it
    address: str  # of the SuperLink's Control
    recipe: str  # hash of the part of the recipe that a resumed run must share
    rounds: int
    log_begins: int  # where this run begins in log.txt, in bytes
    values: str  # hash of the whole recipe

    def write(self, folder: Path) -> None:
        """Write the record to a results directory."""
        save_text(folder / RECORD_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of a results directory, None if it has none."""
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        return RunRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{path} is not a record of fedhet ({error})") from error
