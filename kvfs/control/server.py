"""The daemon's end of the control socket.

Contract: `serve` runs in the daemon's loop; its handlers must not block. For any request a client
gets one line with an answer or with a reason. A handler with a parameter `again` learns from it
whether the request was made before, to a daemon that died without an answer. One with a parameter
`process` gets the number of the client's process.
"""

import inspect
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs.control import peer
from kvfs.control.client import PATIENCE
from kvfs.errors import (
    ConfigError,
    ExistsError,
    InvalidError,
    KvfsError,
    NameTooLongError,
    NoAttributeError,
    NotFoundError,
)

log = logging.getLogger(__name__)

LINE_MAX = 64 << 10  # bytes of a request
# Faults of the caller, who named a wrong thing: the command exits with 2, and nothing has changed.
CALLERS = (
    ConfigError,
    ExistsError,
    InvalidError,
    NameTooLongError,
    NoAttributeError,
    NotFoundError,
)

VerbHandler = Callable[..., Awaitable[dict[str, Any]]]


async def serve(
    path: Path,
    handlers: Mapping[str, VerbHandler],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer until cancelled; the task counts as started when the first client may come.

    Raises OSError if the socket cannot be made.
    """
    _remove(path)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        await listening.bind(str(path))
        os.chmod(path, 0o600)
        listening.listen(16)
        listener = trio.SocketListener(listening)
        task_status.started()
        try:
            await trio.serve_listeners(partial(_converse, handlers), [listener])
        finally:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove the socket; /run is a tmpfs, so this waits for no disk."""
    path.unlink(missing_ok=True)


async def _converse(handlers: Mapping[str, VerbHandler], stream: trio.SocketStream) -> None:
    try:
        with trio.move_on_after(PATIENCE):
            answer = await _answer(stream.socket, await _line(stream), handlers)
            await stream.send_all(json.dumps(answer).encode() + b"\n")
    except trio.BrokenResourceError:
        log.debug("a control client went away")
    finally:
        await trio.aclose_forcefully(stream)


async def _line(stream: trio.SocketStream) -> bytes:
    got = b""
    while b"\n" not in got and len(got) < LINE_MAX:
        more = await stream.receive_some()
        if not more:
            break
        got += more
    return got


async def _answer(
    connection: peer.Connected, line: bytes, handlers: Mapping[str, VerbHandler]
) -> dict[str, Any]:
    try:
        verb, arguments, again = peer.asked(connection, line, handlers)
        handler = handlers[verb]
        wanted = inspect.signature(handler).parameters
        if again and "again" in wanted:
            handler = partial(handler, again=True)
        if "process" in wanted:
            handler = partial(handler, process=peer.process(connection))
        return await handler(**arguments)
    except CALLERS as error:
        return {"error": str(error), "invalid": True}
    except KvfsError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("control request %s failed: a defect of kvfs", verb)
        return {"error": f"{verb} failed: {error!r}; the daemon's log has more"}
