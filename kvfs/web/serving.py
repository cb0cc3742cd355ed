"""The common parts of the processes beside the daemon that listen: `kvfs.metrics` and `kvfs.web`.

Contract: only GET and HEAD have answers. No answer repeats the request, and each error is one fixed
line. On an address of this machine, only a Host that is an address, or `localhost`, gets an answer.
Another name could belong to a foreign site that leads here (DNS rebinding). `Snapshot` shares one
answer of the daemon among all clients that ask at about the same time. `WebServer` gets a socket
that listens already. It serves CONNECTIONS at a time, and closes the oldest for a further one.
`serve` ends with the daemon, and does not log clients that go away.
"""

import ipaddress
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvfs.control import request_within
from kvfs.errors import KvfsError

FRESH = 0.5  # s
NICENESS = 10  # more than the daemon's, so that these processes do not slow it down
CONNECTIONS = 64
SLOW_CLIENT = 10.0  # s that a client may take for its request

Status = dict[str, Any]
Ask = Callable[[float], Status | None]


def ask_daemon(mountpoint: Path, verb: str, seconds: float, **arguments: object) -> Status | None:
    """Return the daemon's answer, or None without one; the daemon's log has the reason."""
    try:
        return request_within(mountpoint, seconds, verb, **arguments)
    except KvfsError:
        return None


class Snapshot:
    """The daemon's last answer, shared by all clients that ask at about the same time."""

    def __init__(self, ask: Ask, fresh: float = FRESH) -> None:
        """Keep `ask(seconds)`: the answer within that time, or None. fresh: s of its life."""
        self._ask = ask
        self._lock = threading.Lock()
        self._last: Status | None = None
        self._at = -math.inf
        self._fresh = fresh

    def look(self, patience: float) -> Status | None:
        """Return an answer at most `fresh` s old, or None after `patience` s without one."""
        until = time.monotonic() + patience
        if not self._lock.acquire(timeout=patience):
            return None
        try:
            if time.monotonic() - self._at >= self._fresh:
                self._last = self._ask(max(0.0, until - time.monotonic()))
                self._at = time.monotonic()
            return self._last
        finally:
            self._lock.release()


class BadRequest(Exception):  # noqa: N818 (it is not our error)
    """A request that has no answer."""

    def __init__(self, code: HTTPStatus) -> None:
        super().__init__(code.phrase)
        self.code = code


class Handler(BaseHTTPRequestHandler, ABC):
    """One connection. A subclass sets `private`: its address is of this machine only."""

    timeout = SLOW_CLIENT
    private: bool
    headers_of_all: Mapping[str, str] = {"X-Content-Type-Options": "nosniff"}
    server_version, sys_version = "kvfs", ""

    @abstractmethod
    def answer(self) -> tuple[bytes, str]:
        """Return the body and its type. Raises BadRequest."""

    def do_GET(self) -> None:
        try:
            self._check_host()
            body, kind = self.answer()
        except BadRequest as error:
            self.send_error(error.code)
            return
        self._send(HTTPStatus.OK, body, kind)

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Refuse every other method."""
        if not name.startswith("do_"):
            raise AttributeError(name)
        return lambda: self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    def _check_host(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if self.request_version == "HTTP/0.9" or len(hosts) > 1:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if not hosts:
            if self.request_version != "HTTP/1.0":
                raise BadRequest(HTTPStatus.BAD_REQUEST)
        elif self.private and not _is_address(hosts[0]):
            raise BadRequest(HTTPStatus.MISDIRECTED_REQUEST)

    def send_error(
        self,
        code: int,
        message: str | None = None,  # noqa: ARG002 (it may repeat what was asked)
        explain: str | None = None,  # noqa: ARG002
    ) -> None:
        """Send one fixed line for each code."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(status, f"{code} {status.phrase}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        if self.request_version == "HTTP/0.9":
            self.request_version = self.protocol_version  # or there would be no headers
        self.send_response(status, status.phrase)
        for name, value in self.headers_of_all.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a request is not worth a line."""


def _is_address(host: str) -> bool:
    """Return whether the Host is an address or `localhost`, and no name that others could set."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+)|(localhost))(?::[0-9]{1,5})?", host)
    if found is None:
        return False
    try:
        return bool(found[3]) or bool(ipaddress.ip_address(found[1] or found[2]))
    except ValueError:
        return False


class WebServer(ThreadingHTTPServer):
    """A server on a socket that listens already."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._open: dict[Any, None] = {}  # connections, the oldest first
        self._counting = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - theirs
        """Give the connection a thread. One beyond CONNECTIONS closes the oldest."""
        with self._counting:
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - theirs
        with self._counting:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Log a defect for the daemon; a client that went away is none."""
        if not isinstance(sys.exc_info()[1], OSError):
            sys.excepthook(*sys.exc_info())


def serve(server: WebServer) -> None:
    """Serve until the daemon has ended: it holds the other end of our standard input."""
    os.nice(NICENESS)
    # The mount ends through the keeper; all processes of a service get this signal too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()
