"""The control socket, both ends of it."""

# ruff: noqa: ASYNC240 - files of a few bytes, in a loop that nobody waits for

import json
import logging
import socket
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs import runtime
from kvfs.control import client, request, request_keeper, server
from kvfs.errors import ConfigError, ControlError
from tests.harness import PATIENCE, wait_for

MOUNTPOINT = Path("/nowhere/kv")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime, "socket_path", lambda _mountpoint: tmp_path / "s")
    return tmp_path / "s"


async def echo(**arguments: object) -> dict[str, Any]:
    return {"echo": arguments}


async def refuse() -> dict[str, Any]:
    raise ConfigError("there is a reason")


async def break_down() -> dict[str, Any]:
    raise ZeroDivisionError("oops")


async def repeat(*, again: bool = False) -> dict[str, Any]:
    return {"again": again}


HANDLERS: dict[str, server.VerbHandler] = {
    "echo": echo,
    "refuse": refuse,
    "break": break_down,
    "repeat": repeat,
}


def serve(path: Path, case: Callable[[], Awaitable[None]], **options: Any) -> None:  # noqa: ANN401
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, path, HANDLERS)
            await case()
            nursery.cancel_scope.cancel()

    trio.run(main, **options)


async def ask(verb: str, **arguments: object) -> dict[str, Any]:
    call = partial(request, MOUNTPOINT, verb, **arguments)
    answer: dict[str, Any] = await trio.to_thread.run_sync(call)
    return answer


async def say(path: Path, line: bytes) -> dict[str, Any]:
    """Send bytes, and nothing after them; the one line that comes back."""
    async with await trio.open_unix_socket(str(path)) as stream:
        await stream.send_all(line)
        await stream.send_eof()
        got = b"".join([part async for part in stream])
    assert got.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(got)
    return answer


def test_a_request_is_answered(path: Path) -> None:
    async def case() -> None:
        assert await ask("echo", number=5, text="a\nb \u20ac") == {
            "echo": {"number": 5, "text": "a\nb \u20ac"}
        }
        assert await ask("echo") == {"echo": {}}

    serve(path, case)


def test_the_socket_is_private_and_goes_with_its_server(path: Path) -> None:
    path.write_text("left by a crash")

    async def case() -> None:
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600

    serve(path, case)
    assert not path.exists()


def test_a_refusal_gives_its_reason(path: Path) -> None:
    async def case() -> None:
        with pytest.raises(ConfigError, match=r"^there is a reason$"):
            await ask("refuse")

    serve(path, case)


def test_a_defect_is_an_answer_too(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def case() -> None:
        with pytest.raises(ControlError, match="break failed: ZeroDivisionError"):
            await ask("break")

    serve(path, case)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_wrong_arguments_are_an_answer(path: Path) -> None:
    async def case() -> None:
        with pytest.raises(ControlError, match="refuse failed"):
            await ask("refuse", nonsense=1)

    serve(path, case)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"[1, 2]\n",
        b'"status"\n',
        b"{}\n",
        b'{"verb": "none"}\n',
        b'{"verb": ["echo"]}\n',
        b'{"verb": {}}\n',
        b"\xff\xfe\x00\n",
        b'{"verb": "echo"',
        b"[" * 60_000 + b"\n",
        b"x" * server.LINE_MAX,
    ],
    ids=[f"line{number}" for number in range(13)],
)
def test_whatever_is_sent_gets_a_line(path: Path, line: bytes) -> None:
    async def case() -> None:
        answer = await say(path, line)
        assert (
            "expected a line with one JSON object, and in it a verb of break, echo, refuse, repeat"
            in answer["error"]
        )
        assert await ask("echo") == {"echo": {}}

    serve(path, case)


@pytest.mark.parametrize("arguments", [b"5", b"[1]", b"null", b'"a"'])
def test_arguments_are_an_object(path: Path, arguments: bytes) -> None:
    async def case() -> None:
        answer = await say(path, b'{"verb": "echo", "arguments": ' + arguments + b"}\n")
        assert "error" in answer

    serve(path, case)


def test_a_line_may_come_in_pieces(path: Path) -> None:
    async def case() -> None:
        async with await trio.open_unix_socket(str(path)) as stream:
            for byte in b'{"verb": "echo"}\n':
                await stream.send_all(bytes([byte]))
                await trio.testing.wait_all_tasks_blocked()
            assert await stream.receive_some() == b'{"echo": {}}\n'

    serve(path, case)


@pytest.mark.parametrize("line", [b"", b'{"verb": "ec', b'{"verb": "echo"}\n'])
def test_a_client_may_go_away(path: Path, line: bytes) -> None:
    async def case() -> None:
        for _ in range(3):
            stream = await trio.open_unix_socket(str(path))
            await stream.send_all(line)
            await stream.aclose()
        assert await ask("echo") == {"echo": {}}

    serve(path, case)


def test_silent_client_delays_no_other(path: Path) -> None:
    async def case() -> None:
        async with await trio.open_unix_socket(str(path)) as silent:
            async with await trio.open_unix_socket(str(path)) as stream:
                await stream.send_all(b'{"verb": "echo"}\n')
                assert await stream.receive_some() == b'{"echo": {}}\n'
            assert await silent.receive_some() == b"", "it was given up in the end"

    serve(path, case, clock=MockClock(autojump_threshold=0.05))


def test_the_next_daemon_is_told_that_it_is_asked_again(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the dead one can have heard it; and only a handler that wants to know."""
    monkeypatch.setattr(runtime, "keeper_path", lambda _mountpoint: tmp_path / "keeper")
    keeper = socket.socket(socket.AF_UNIX)
    keeper.bind(str(tmp_path / "keeper"))
    keeper.listen()

    async def dies(*, hears: bool) -> None:
        listening = trio.socket.socket(socket.AF_UNIX)
        await listening.bind(str(path))
        if hears:
            listening.listen()
            connection, _ = await listening.accept()
            await connection.recv(1000)
            connection.close()
        listening.close()
        path.unlink()

    async def main() -> None:
        for verb, hears, expected in (
            ("repeat", True, {"again": True}),
            ("repeat", False, {"again": False}),
            ("echo", True, {"echo": {}}),
        ):
            async with trio.open_nursery() as nursery:

                async def succeed(hears: bool = hears) -> None:  # noqa: FBT001 (bound)
                    await dies(hears=hears)
                    await nursery.start(server.serve, path, HANDLERS)

                nursery.start_soon(succeed)
                assert await ask(verb) == expected
                nursery.cancel_scope.cancel()

    with keeper:
        trio.run(main)


def test_a_client_of_a_dead_mount_does_not_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets are there, and nobody listens: no keeper will replace the daemon."""
    keeper = path.with_name("keeper")
    monkeypatch.setattr(runtime, "keeper_path", lambda _mountpoint: keeper)
    monkeypatch.setattr(time, "sleep", lambda _seconds: pytest.fail("it waits"))
    for one in (path, keeper):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(one))
    with pytest.raises(ControlError, match="Connection refused"):
        request(MOUNTPOINT, "echo")


def test_a_client_waits_for_its_turn_at_a_busy_keeper(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses a connection that does not wait while a listener's queue is full."""
    monkeypatch.setattr(runtime, "keeper_path", lambda _mountpoint: path)

    def is_full() -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(0)
            try:
                one.connect(str(path))
            except BlockingIOError:
                return True
        return False

    def sleeps(thread: threading.Thread) -> bool:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] == "S"

    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(request_keeper(MOUNTPOINT, "status")), daemon=True
    )
    with socket.socket(socket.AF_UNIX) as keeper:
        keeper.bind(str(path))
        keeper.listen(1)
        keeper.settimeout(PATIENCE)
        while not is_full():
            pass
        with pytest.raises(ControlError, match="no keeper answers"):
            request_keeper(MOUNTPOINT, "status", patience=0.01)
        asking.start()
        wait_for(lambda: sleeps(asking), "the client waits")
        asked = b""
        while not asked:
            connection, _ = keeper.accept()
            with connection:
                if asked := connection.recv(1000):
                    connection.sendall(b'{"asked": true}\n')
        asking.join()
    assert answers == [{"asked": True}]


# Without a daemon


@pytest.mark.usefixtures("path")
def test_without_a_daemon_the_client_says_so() -> None:
    with pytest.raises(
        ControlError, match=r"no daemon answers for /nowhere/kv .*: give a mount point of kvfs"
    ):
        request(MOUNTPOINT, "status")


@pytest.mark.usefixtures("path")
def test_missing_sockets_are_told_from_a_dead_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mounted = runtime.MountEntry("/", str(MOUNTPOINT), runtime.FSTYPE, "kvfs", ("rw", "user_id=0"))
    monkeypatch.setattr(runtime, "mount_at", lambda _: mounted)
    with pytest.raises(ControlError, match=r"sockets are not in .*user_id=0.* umount /nowhere/kv$"):
        request(MOUNTPOINT, "status")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("uid", "who"), [(1, "user daemon"), (77777, "uid 77777")])
def test_a_mount_of_another_user_is_told(
    monkeypatch: pytest.MonkeyPatch, uid: int, who: str
) -> None:
    options = ("rw", f"user_id={uid}")
    mounted = runtime.MountEntry("/", str(MOUNTPOINT), runtime.FSTYPE, "kvfs", options)
    monkeypatch.setattr(runtime, "mount_at", lambda _: mounted)
    with pytest.raises(ConfigError, match=f"mounted by {who}: run this as that user: sudo"):
        request(MOUNTPOINT, "status")


def test_a_dead_daemons_socket_is_no_daemon(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    with pytest.raises(ControlError, match="no daemon answers"):
        request(MOUNTPOINT, "status")


def test_a_daemon_that_hangs_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.01)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        with pytest.raises(ControlError, match="timed out"):
            request(MOUNTPOINT, "status")


def test_a_daemon_that_dies_over_a_request_is_an_error(path: Path) -> None:
    async def case() -> None:
        listening = trio.socket.socket(socket.AF_UNIX)
        await listening.bind(str(path))
        listening.listen()

        async def accept() -> None:
            connection, _ = await listening.accept()
            await connection.recv(1000)
            connection.close()
            listening.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            with pytest.raises(ControlError, match="closed without an answer"):
                await ask("status")

    trio.run(case)
