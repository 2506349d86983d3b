"""fedhet-watch: the report of runs and sweeps while they go on, in a browser.

    fedhet-watch FOLDER [FOLDER ...]

FOLDER is that of a sweep or of a run. The page is served on this machine alone, by default at
http://127.0.0.1:8265/, and follows the runs as rounds end. Ctrl-C ends it; nothing is written.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console

from fedhet.commands import number_between, parser_of, reported_errors, say_error
from fedhet.common.errors import ConfigError
from fedhet.common.results import CONFIG, METRICS, SUMMARY
from fedhet.report.comparison import check_baseline
from fedhet.report.data_file import ReportData, thinned
from fedhet.report.page import build_page, layouts_of
from fedhet.report.partitions import with_partitions
from fedhet.report.render import to_html, vega_script
from fedhet.report.run_data import RUNNING, UNFINISHED, Run, find_runs, read_run
from fedhet.report.sources import has_all_runs, read_sources, require_folders

ADDRESS, PORT = "127.0.0.1", 8265
SILENT_SECONDS, SILENT_ROUNDS = 120.0, 5.0  # without a new row for so long, a run is not running
IDLE_SECONDS = 60.0  # after which a connection without a request is closed
_HTML, _TEXT, _SCRIPT = "text/html", "text/plain", "text/javascript"


class LivePage:
    """The page of folders, made anew when one of their files has changed."""

    def __init__(self, sources: Sequence[Path], baseline: str = "") -> None:
        """Check sources and baseline; a ConfigError says what is wrong with them."""
        require_folders(sources)
        self._sources, self._baseline = sources, baseline
        self._lock = Lock()
        self._made: tuple[str, str] = ("", "")  # the version, and its page
        if baseline and all(map(has_all_runs, sources)):  # elsewhere it may yet appear
            check_baseline(layouts_of(self._data()), baseline)

    def version(self) -> str:
        """Return a text that changes when a file does: when the last one did, and their sizes."""
        found = [stamp for source in self._sources for stamp in _stamps(source)]
        newest = max((modified for modified, _ in found), default=0.0)
        at = time.strftime("%H:%M:%S", time.localtime(newest)) if found else "none"
        # a minute's tick: a run that has fallen silent stops to be called running
        return f"{at} {newest:.3f} {sum(size for _, size in found)} {int(time.time() // 60)}"

    def html(self) -> str:
        """Return the page."""
        with self._lock:
            version = self.version()
            if self._made[0] != version:
                data = self._data()
                data = replace(data, baseline=self._baseline if data.runs else "")
                with tempfile.TemporaryDirectory() as folder:  # for those pictures in the page
                    blocks = build_page(thinned(with_partitions(data)), Path(folder), "report")
                self._made = (version, to_html(blocks, live=version))
            return self._made[1]

    def _data(self) -> ReportData:
        try:
            data = read_sources(self._sources)
        except ConfigError:  # no run has begun
            return ReportData(runs=(), title="No run has begun")
        return replace(data, runs=[_running(run) for run in data.runs])


def _stamps(folder: Path) -> list[tuple[float, int]]:
    """Return when each file of runs that a page is made from was changed, and its size."""
    runs = (run / name for run in find_runs(folder) for name in (CONFIG, METRICS, SUMMARY))
    found = []
    for path in (folder / "sweep.json", *runs):
        with suppress(OSError):  # it is not there, or replaced at this moment
            found.append((path.stat().st_mtime, path.stat().st_size))
    return found


def _running(run: Run) -> Run:
    """Return the run with the status running if it has no end, and news of late."""
    rounds = sum(round > 0 for round, _ in run.points("round"))
    ended = run.status != UNFINISHED and run.summary.get("rounds", rounds) == rounds
    if run.folder is None or ended:
        return run
    newest = max((modified for modified, _ in _stamps(run.folder)), default=0.0)
    seconds = [value for _, value in run.points("seconds")]
    allowed = max(SILENT_SECONDS, SILENT_ROUNDS * max(seconds, default=0.0))
    if time.time() - newest >= allowed:
        return run
    if run.summary:  # of before it was resumed
        run = read_run(run.folder, run.name, run.source, resumed=True)
    return replace(run, status=RUNNING, error="")


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for three addresses, of browsers that asked for this machine by its address."""

    server_version, sys_version, protocol_version = "fedhet-watch", "", "HTTP/1.1"
    timeout = IDLE_SECONDS

    def __init__(self, page: LivePage, *arguments: Any) -> None:
        self._answers: dict[str, tuple[str, Callable[[], str]]] = {
            "/": (_HTML, page.html),
            "/version": (_TEXT, page.version),
            "/vega.js": (_SCRIPT, vega_script),
        }
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer with the page, its version, or Vega."""
        host, _, port = self.headers.get("Host", "").rpartition(":")
        # By another name, a page of somebody else's wants to read this one (DNS rebinding).
        if host not in (ADDRESS, "localhost") or port != str(self.connection.getsockname()[1]):
            return self._answer(HTTPStatus.FORBIDDEN, _TEXT, "open it as http://127.0.0.1:PORT/\n")
        if self.path not in self._answers:
            return self._answer(HTTPStatus.NOT_FOUND, _TEXT, "there is only /\n")
        kind, make = self._answers[self.path]
        try:
            status, text = HTTPStatus.OK, make()
        except (ConfigError, OSError) as error:
            say_error("fedhet-watch", error)
            status, kind, text = HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, f"{error}\n"
        return self._answer(status, kind, text)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "max-age=86400" if kind == _SCRIPT else "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        with suppress(ConnectionError):  # a browser that went away
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing of each request."""


def server_of(page: LivePage, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on this machine's loopback address; port 0 is any free one."""
    try:
        server = ThreadingHTTPServer((ADDRESS, port), partial(_Handler, page))
    except OSError as error:
        raise ConfigError(
            f"--port {port} cannot be used: {error}; --port 0 takes a free one"
        ) from None
    server.daemon_threads = True
    return server


def main(words: Sequence[str] | None = None) -> None:
    """Run the command on ``words``, by default those of the command line."""
    options = _parser().parse_args(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
    with reported_errors("fedhet-watch"):
        page = LivePage(options.sources, options.baseline)
        with server_of(page, options.port) as server:
            address = f"http://{ADDRESS}:{server.server_port}/"
            Console().print(f"live     {address}   (Ctrl-C ends it)", highlight=False)
            server.serve_forever()


def _port(text: str) -> int:
    return int(number_between(0, 65536, with_low=True)(text))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-watch", __doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="FOLDER", help="folder of a sweep or run")
    add("--port", type=_port, default=PORT, help=f"on 127.0.0.1; 0: a free one ({PORT})")
    baseline = "the method or row that others are compared with (FedAvg, or else the first row)"
    add("--baseline", default="", metavar="METHOD", help=baseline)
    return parser


if __name__ == "__main__":
    main()
