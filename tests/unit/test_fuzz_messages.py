"""Any bytes on a socket get an answer or a reason, and the server continues to listen."""

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from hypothesis import example, given

from kvfs.clock import REAL, Clock
from kvfs.control import client, server
from kvfs.control.channel import Channel, Closed
from kvfs.errors import ConfigError, ControlError
from kvfs.keeper import keeper
from kvfs.keeper.keeper import Keeper
from kvfs.metrics.__main__ import handler
from kvfs.web.serving import Snapshot
from tests.unit.fuzz import fuzzed, in_time, long_ones, spoiled_bytes

US, _THEM = socket.socketpair()  # both ends belong to the user that mounted
NEST = b"[" * 3000  # more than Python has stack for
REQUESTS = (
    '{"verb": "echo", "arguments": {"name": "a", "settings": {"ttl": "7d"}}, "again": true}\n',
    '{"verb": "ns_create", "arguments": {}}\n',
    '{"verb": "status"}\n',
    '{"verb": "upgrade", "arguments": {"command": ["/nowhere"], "config": {}}}\n',
)


async def echo(**arguments: object) -> dict[str, Any]:
    return {"echo": arguments}


def answer(line: bytes) -> dict[str, Any]:
    return trio.run(server._answer, US, line, {"echo": echo, "status": echo})


@fuzzed
@given(spoiled_bytes(REQUESTS))
@example(NEST)
@example(b'{"verb": []}')
@example(b'{"verb": "echo", "arguments": 5}')
def test_requests_to_the_daemon(line: bytes) -> None:
    """Each answer is JSON in one line."""
    assert b"\n" not in json.dumps(answer(line)).encode()


class Nobody:
    """A keeper without a daemon."""

    daemon = standby = None
    takeovers = 0
    file_system = ""

    _status = Keeper._status

    def __init__(self, clock: Clock = REAL) -> None:
        self.clock = clock

    def _upgrade(self, command: list[str], config: dict[str, Any]) -> dict[str, Any]:
        """Start a process with the command of the request, as an upgrade does; it dies."""
        subprocess.Popen([*command, ""], executable="/nowhere")
        return config


@fuzzed
@given(spoiled_bytes(REQUESTS))
@example(NEST)
@example(b'{"verb": "upgrade", "arguments": {"command": ["\\u0000"], "config": {}}}')
@example(b'{"verb": "upgrade", "arguments": {"command": 5, "config": {}}}')
@example(b'{"verb": "status", "arguments": 5}')
def test_requests_to_the_keeper(line: bytes) -> None:
    """It must outlive them all: the mount ends with it."""
    json.dumps(Keeper._answer(cast("Keeper", Nobody()), US, line))


@fuzzed
@given(
    spoiled_bytes(
        ['{"echo": {"a": 1}}\n', '{"error": "no"}\n', '{"error": "x", "invalid": true}\n']
    )
)
@example(NEST + b"\n")
@example(b'{"invalid": true}\n')
@example(b"5\n")
def test_answers_to_a_command(reply: bytes) -> None:
    try:
        found = client.read_answer(Path("/s"), reply)
    except (ControlError, ConfigError, ConnectionResetError):
        return
    assert isinstance(found, dict)


@fuzzed
@given(spoiled_bytes(['{"what": "ready", "watchdog": 30.0}', '{"what": "alive"}']))
@example(NEST)
@example(b"5")
@example(b'{"what": []}')
def test_messages_between_keeper_and_daemon(data: bytes) -> None:
    """A side that talks nonsense is as good as gone."""
    one, other = Channel.pair()
    try:
        other.socket.send(data)
        found, _ = one.receive()
        assert isinstance(found["what"], str)
    except Closed:
        return
    finally:
        one.close()
        other.close()


HTTP = (
    "GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text;version=1.0.0,*/*\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n",
    "GET /metrics?x=y HTTP/1.0\r\nAccept: text/plain;version=1.0.0;escaping=allow-utf-8\r\n\r\n",
    "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "GET /nowhere HTTP/0.9\r\n\r\n",
)


SCRAPER = handler(Snapshot(lambda _: None), private=False)


def scraped(data: bytes) -> bytes:
    """Return the answer to a client that sends these bytes and closes its side."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        SCRAPER(theirs, ("", 0), cast("Any", None))
        theirs.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: ours.recv(1 << 16), b""))


@fuzzed
@given(spoiled_bytes(HTTP))
@example(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text;version=9.9.9\r\n\r\n")
@example(b"GET /metrics HTTP/1.0\r\nAccept: application/openmetrics-text;version=x\r\n\r\n")
@example(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Prometheus-Scrape-Timeout-Seconds: nan\r\n\r\n")
def test_requests_for_metrics(data: bytes) -> None:
    """Nothing of what was asked comes back as a header, or as HTML that would run."""
    answer = scraped(data)
    assert not answer or b"<script" not in answer.partition(b"\r\n\r\n")[2]


def test_no_message_takes_for_ever() -> None:
    parsers: list[Callable[[bytes], object]] = [answer, scraped]
    for text in long_ones('{"verb": "', "\r\n\r\n"):
        for parse in parsers:
            with in_time(repr(text[:20])):
                parse(text.encode()[: server.LINE_MAX])


@pytest.mark.parametrize("piece", [b"x", b"x" * 1000])
def test_a_request_without_an_end_is_refused(piece: bytes) -> None:
    """The server keeps no more than LINE_MAX bytes of a client's request."""

    class Endless:
        sent = 0

        async def receive_some(self) -> bytes:
            self.sent += len(piece)
            return piece

    stream = Endless()
    trio.run(server._line, cast("trio.SocketStream", stream))
    assert stream.sent < server.LINE_MAX + len(piece)


def test_strategies_reach_correct_requests() -> None:
    """Right input is among the examples: the tests above try more than refusals."""
    assert answer(REQUESTS[0].encode())["echo"]["name"] == "a"
    assert scraped(HTTP[0].encode()).startswith(b"HTTP/1.0 200")


class Dribbling:
    """A client that sends a byte each half second, and notes when the server closes it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timeout = 0.0

    def accept(self) -> tuple["Dribbling", None]:
        return self, None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv(self, _most: int) -> bytes:
        self.now += min(0.5, self.timeout)
        if self.timeout < 0.5:
            raise TimeoutError
        return b"x"


def test_the_keeper_waits_for_no_client_longer_than_for_another() -> None:
    """While it waits it hears no daemon: one that says nothing for long would be replaced."""
    control = Dribbling()
    Keeper._converse(
        cast("Keeper", Nobody(Clock(lambda: control.now))), cast("socket.socket", control)
    )
    assert control.now <= keeper.CLIENT + 0.001
