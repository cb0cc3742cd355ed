"""The process that shows metrics: the daemon's child, with a socket that listens.

    python -m kvfs.metrics MOUNTPOINT DESCRIPTOR      until its standard input ends

Contract: GET /metrics has an answer within the scraper's timeout, whatever the daemon does: if it
does not answer that is `kvfs_up 0`. However many scrape, it is asked once in `serving.FRESH`
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
from kvfs.web.serving import BadRequest, Handler, Server, Snapshot, Status, ask_daemon, serve

PATIENCE = 5.0  # s for the daemon's answer; a scraper that says its own timeout gets MARGIN of that
MARGIN = 0.8


class Scrape(Collector):
    """The families of one status."""

    def __init__(self, status: Status | None) -> None:
        self._status = status

    def collect(self) -> list[core.Metric]:
        return list(families(self._status))


class Scraped(Handler):
    """One connection of a scraper. `snapshot` is set by a class of its own."""

    snapshot: Snapshot

    def answer(self) -> tuple[bytes, str]:
        """Raises BadRequest."""
        if self.path.partition("?")[0] not in {"/metrics", "/"}:
            raise BadRequest(HTTPStatus.NOT_FOUND)
        status = self.snapshot.look(self._patience())
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        return encode(Scrape(status)), content_type

    def _patience(self) -> float:
        try:
            told = float(self.headers["X-Prometheus-Scrape-Timeout-Seconds"])
        except (TypeError, ValueError):  # it says none, or nothing that is a number
            return PATIENCE
        return min(PATIENCE, told * MARGIN) if told > 0 else PATIENCE


def handler(snapshot: Snapshot, *, private: bool) -> type[Scraped]:
    """The class of connections that are answered from there; `private`: to this machine only."""
    return type("Scraper", (Scraped,), {"snapshot": snapshot, "private": private})


def main() -> None:
    """Return when the daemon has ended."""
    mountpoint, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    snapshot = Snapshot(partial(ask_daemon, mountpoint, "status"))
    serve(Server(listening, handler(snapshot, private=is_private(listening))))


if __name__ == "__main__":
    main()
