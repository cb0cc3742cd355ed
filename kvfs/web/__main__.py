"""The process that shows the page: the daemon's child, with a socket that listens.

    python -m kvfs.web MOUNTPOINT DESCRIPTOR      until its standard input ends

Contract: the process asks the daemon for its status once in `history.STEP` seconds, for any number
of browsers. Not for the daemon's own process: nothing here may hold up its loop.
"""

import socket
import sys
import threading
import time
from pathlib import Path

from kvfs.metrics.address import is_private
from kvfs.rates import Look
from kvfs.web.history import STEP, History
from kvfs.web.page import Questions, Sources, handler
from kvfs.web.serving import WebServer, ask_daemon, serve


def _sample(mountpoint: Path, history: History) -> None:
    """Add a sample of the mount to the history in each step, for ever."""
    due = time.monotonic()
    while True:
        status = ask_daemon(mountpoint, "status", STEP)
        history.add(time.time(), None if status is None else Look(time.monotonic(), status))
        due = max(due + STEP, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def main() -> None:
    """Serve the page, and return when the daemon has ended."""
    mountpoint, listening = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    history = History()
    threading.Thread(target=_sample, args=(mountpoint, history), daemon=True).start()
    sources = Sources(history, Questions(mountpoint))
    serve(WebServer(listening, handler(sources, private=is_private(listening))))


if __name__ == "__main__":
    main()
