"""deployment.json in a results directory: which run of which SuperLink it belongs to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import save_text
from common.run_events import TOKEN_FILE
from fedhet.runtimes.flower_install import LaunchError


@dataclass(frozen=True)
class Record:
    """What the launcher keeps of a run that goes on without it.

    Attributes:
        token: made for the results directory; a ServerApp that finds it there writes there itself.
        run_id: the last run's, of those that have gone on with one another.
        server_folder: the results directory as the ServerApp sees it.
        address: of the SuperLink's Control.
        recipe: hash of what a resumed run has to share.
        rounds: the last round.
        log_begins: where in log.txt this run's words begin, in bytes.
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
        save_text(folder / TOKEN_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_record(folder: Path) -> Record | None:
    """Return the record of a results directory, None if there is none.

    Raises:
        LaunchError: if there is something else in its place.
    """
    path = folder / TOKEN_FILE
    if not path.exists():
        return None
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{path} is not what fedhet has written ({error})") from error
