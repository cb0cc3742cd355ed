"""The process that shows metrics: the daemon's child, with a socket that listens.

    python -m kvfs.metrics MOUNTPOINT DESCRIPTOR      until its standard input ends

Contract: GET /metrics has an answer within the scraper's timeout. If the daemon does not answer,
that is `kvfs_up 0`. For any number of scrapers the process asks the daemon once in `serving.FRESH`
seconds. Not for people, nor for the daemon's own process: nothing here may hold up its loop.
"""

import socket
import sys
from functools import partial
from http import HTTPStatus
from pathlib import Path

from prometheus_client import core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvfs.metrics.address import is_private
from kvfs.metrics.families import families
from kvfs.web.serving import BadRequest, Handler, Snapshot, Status, WebServer, ask_daemon, serve

PATIENCE = 5.0  # s for the daemon's answer; a scraper that sends its timeout gets MARGIN of that
MARGIN = 0.8


class Scrape(Collector):
    """The families of one status, as prometheus_client collects them."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> list[core.Metric]:
        return list(families(self._status))


class Scraped(Handler):
    """One connection of a scraper. A subclass sets `snapshot`."""

    snapshot: Snapshot

    def answer(self) -> tuple[bytes, str]:
        """Return the metrics and their type. Raises BadRequest."""
        if self.path.partition("?")[0] not in {"/metrics", "/"}:
            raise BadRequest(HTTPStatus.NOT_FOUND)
        status = self.snapshot.look(self._patience())
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # the version is no number
            encode, content_type = choose_encoder("")
        return encode(Scrape(status)), content_type

    def _patience(self) -> float:
        try:
            told = float(self.headers["X-Prometheus-Scrape-Timeout-Seconds"])
        except (TypeError, ValueError):  # the scraper sends no timeout, or one that is no number
            return PATIENCE
        return min(PATIENCE, told * MARGIN) if told > 0 else PATIENCE


def handler(snapshot: Snapshot, *, private: bool) -> type[Scraped]:
    """Return the class of connections to this snapshot; `private`: to this machine only."""
    return type("Scraper", (Scraped,), {"snapshot": snapshot, "private": private})


def main() -> None:
    """Serve metrics, and return when the daemon has ended."""
    mountpoint, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    snapshot = Snapshot(partial(ask_daemon, mountpoint, "status"))
    serve(WebServer(listening, handler(snapshot, private=is_private(listening))))


if __name__ == "__main__":
    main()
