"""An HTTP proxy before a real S3 server, for answers that no honest server gives.

Contract: requests go through with the host that their client signed, so the real server checks
them. A test decides about each request (`before` the server gets it) and each answer (`after`).
Whole bodies are kept in memory. Not for speed.
"""

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

_OWN = {"connection", "transfer-encoding", "content-length", "expect", "keep-alive"}


@dataclass(frozen=True)
class Request:
    """`verb` as `kvfs.s3.store` calls it; `key` without the bucket."""

    method: str
    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path.lstrip("/").partition("/")[2])

    @property
    def verb(self) -> str:
        query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        copied = any(name.lower() == "x-amz-copy-source" for name in self.headers)
        if "uploads" in query:
            return "begin" if self.method == "POST" else "uploads"
        if "uploadId" in query:
            return {"PUT": "put_part", "POST": "complete", "DELETE": "abort"}[self.method]
        if self.method == "PUT":
            return "copy" if copied else "put"
        if self.method == "GET":
            return "get" if self.key else "list"
        return {"HEAD": "head", "DELETE": "delete", "POST": "delete_many"}[self.method]


@dataclass(frozen=True)
class Answer:
    """`length`: the announced length, if it is not the real one; then the connection ends."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)
    length: int | None = None

    def of(self, body: bytes) -> "Answer":
        """The same with other bytes, honestly announced."""
        return replace(self, body=body, length=None)


class Hangup(Exception):  # noqa: N818 (nothing went wrong: a test wants it)
    """Raised by a test's function: the connection ends without an answer."""


def error(status: int, code: str) -> Answer:
    """An error as S3 servers send it."""
    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())


class Proxy:
    """The proxy; use `start` and `stop`. `seen`: the requests, without bodies."""

    def __init__(self, port: int) -> None:
        """`port` of the real server, on loopback."""
        self.before: Callable[[Request], Answer | None] = lambda _: None
        self.after: Callable[[Request, Answer], Answer] = lambda _, answer: answer
        self.seen: list[Request] = []
        self.delay = 0.0  # s between a request and what becomes of it
        self._stopped = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # says 100 to whoever expects that

            def respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers), body)
                try:
                    answer = proxy.handle(request, port)
                except (Hangup, ConnectionError, http.client.HTTPException):
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if self.command != "HEAD":
                    length = len(answer.body) if answer.length is None else answer.length
                    self.send_header("Content-Length", str(length))
                    self.close_connection |= length != len(answer.body)
                self.end_headers()
                self.wfile.write(answer.body)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = respond  # noqa: N815 (its names)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
                del format, args  # what is asked is in `seen`

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                del request, client_address  # clients that were killed hang up

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def honest(self) -> None:
        """Let everything through unchanged from now on."""
        self.before = lambda _: None
        self.after = lambda _, answer: answer

    def handle(self, request: Request, port: int) -> Answer:
        self.seen.append(replace(request, body=b""))
        self._stopped.wait(self.delay)
        if (refused := self.before(request)) is not None:
            return refused
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
            connection.putrequest(
                request.method, request.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            told = connection.getresponse()
            body = told.read()
            kept = {
                k: v
                for k, v in told.getheaders()
                if k.lower() not in _OWN or (request.method == "HEAD" and k == "Content-Length")
            }
            return self.after(request, Answer(told.status, kept, body))
        finally:
            connection.close()
