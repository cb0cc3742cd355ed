"""The control socket: one JSON line asks, one JSON line answers.

Contract: the socket is in the mount's private runtime directory, so who can open it is who mounted
it, or root. `request` is the client and imports nothing of the daemon. `serve` runs in the
daemon's loop; its handlers must not block. Not for data, nor for anything that needs a reply
later: long work is started by one request and looked at by others.
"""

import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from kvfs import runtime
from kvfs.errors import ControlError, KvfsError

log = logging.getLogger(__name__)

LINE_MAX = 64 << 10  # bytes of a request
PATIENCE = 30.0  # s that a client waits for an answer, and the daemon for a request

Handler = Callable[..., Awaitable[dict[str, Any]]]


def request(mountpoint: Path, verb: str, **arguments: object) -> dict[str, Any]:
    """Ask the daemon behind a mount point. Raises ControlError with the daemon's own reason."""
    path = runtime.socket_path(mountpoint)
    line = json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as stream:
                reply = stream.readline()
    except OSError as error:
        raise ControlError(
            f"no daemon answers for {mountpoint} ({path}: {error}): is it a kvfs mount?"
        ) from error
    if not reply:
        raise ControlError(f"the daemon of {mountpoint} closed the connection without an answer")
    answer: dict[str, Any] = json.loads(reply)
    if "error" in answer:
        raise ControlError(answer["error"])
    return answer


async def serve(path: Path, handlers: Mapping[str, Handler]) -> None:
    """Answer until cancelled. Raises OSError if the socket cannot be made."""
    path.unlink(missing_ok=True)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        await listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(16)
        listener = trio.SocketListener(listening)
        try:
            await trio.serve_listeners(lambda stream: _converse(stream, handlers), [listener])
        finally:
            path.unlink(missing_ok=True)


async def _converse(stream: trio.SocketStream, handlers: Mapping[str, Handler]) -> None:
    try:
        with trio.move_on_after(PATIENCE):
            answer = await _answer(await _line(stream), handlers)
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


async def _answer(line: bytes, handlers: Mapping[str, Handler]) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        verb, arguments = asked["verb"], asked.get("arguments", {})
        handler = handlers[verb]
    except (ValueError, KeyError, TypeError):
        return {
            "error": f"request {line[:80]!r}, expected one JSON object in a line with a verb of "
            + ", ".join(sorted(handlers))
        }
    try:
        return await handler(**arguments)
    except KvfsError as error:
        return {"error": str(error)}
    except Exception as error:
        log.exception("control request %s failed: a defect of kvfs", verb)
        return {"error": f"{verb} failed: {error!r}; the daemon's log has more"}
