"""deployment.json in a results directory: the run and SuperLink that the directory belongs to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import save_text
from common.run_events import RECORD_FILE
from fedhet.runtimes.flower_install import LaunchError


@dataclass(frozen=True)
class RunRecord:
    """What the launcher needs to follow or resume a run.

    Attributes:
        token: of the results directory; a ServerApp that finds it there writes to it itself.
        run_id: the newest run's.
        server_folder: the results directory as the ServerApp sees it.
        address: of the SuperLink's Control.
        recipe: hash of what a resumed run must share.
        rounds: the last round.
        log_begins: where this run begins in log.txt, in bytes.
    """

    token: str
    run_id: int
    server_folder: str
    address: str
    recipe: str
    rounds: int
    log_begins: int

    def write(self, folder: Path) -> None:
        """Write it to a results directory."""
        save_text(folder / RECORD_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of a results directory, None if it has none.

    Raises:
        LaunchError: if the file is invalid.
    """
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    try:
        return RunRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{path} is not a record of fedhet ({error})") from error
