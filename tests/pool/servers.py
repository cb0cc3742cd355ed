"""Real servers for tests of the pool: redis-server alone, with sentinels, or as a cluster."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from kvfs import acl
from kvfs.pool import nginx
from tests.harness import wait_for


def free_port() -> int:
    """A port that nobody listens at now, with a cluster's second port (10,000 more) free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port: int = found.getsockname()[1]
        if port < 1 << 15 or port > 55_000:
            port = 20_000 + port % 10_000
        with socket.socket() as first, socket.socket() as second:
            if first.connect_ex(("127.0.0.1", port)) and second.connect_ex(
                ("127.0.0.1", port + 10_000)
            ):
                return port


def let_nginx_pass(folder: Path) -> None:
    """Let the workers of nginx reach files below a folder; pytest's folders are private."""
    uid = nginx.account().pw_uid
    for one in (folder, *folder.parents):
        if not acl.passes(one, uid):
            acl.allow(one, uid, acl.PASS)


def start(folder: Path, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start a redis-server with these options; the caller ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    return subprocess.Popen(
        ["redis-server", *options, *words, "--save", "", "--logfile", str(log)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def answers(port: int, password: str | None = None) -> bool:
    try:
        return bool(redis.Redis(port=port, password=password, socket_timeout=1).ping())
    except redis.RedisError:
        return False


def command(port: int, *words: str | int, password: str | None = None) -> Any:  # noqa: ANN401
    """Send a command to a server, and return its reply."""
    client = redis.Redis(port=port, password=password)
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def server(
    folder: Path, port: int, *options: str, password: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One server, until the end of the block."""
    secret = () if password is None else ("--requirepass", password)
    process = start(folder, port, *options, *secret)
    try:
        wait_for(lambda: answers(port, password), "redis answers")
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def cluster(folder: Path, ports: list[int]) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """A cluster in which each server has a part of the slots, and none has a replica."""
    with contextlib.ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
        found = {
            port: stack.enter_context(server(folder / str(port), port, *options)) for port in ports
        }
        for number, port in enumerate(ports):
            first, end = (
                REDIS_CLUSTER_HASH_SLOTS * at // len(ports) for at in (number, number + 1)
            )
            command(port, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            command(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            command(port, "CLUSTER", "MEET", "127.0.0.1", ports[0])
        wait_for(lambda: all(whole(port, len(ports)) for port in ports), "the cluster is whole")
        yield found


def whole(port: int, servers: int) -> bool:
    """Whether a server of a cluster knows that many servers, with all slots."""
    told = command(port, "CLUSTER", "INFO")
    lines = told.decode().split()
    return {"cluster_state:ok", f"cluster_known_nodes:{servers}"} <= set(lines)


def sentinel(folder: Path, port: int, master: int, *lines: str) -> Path:
    """Write the configuration of a sentinel that watches `master` as `main`, alone."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sentinel.conf"
    told = (
        f"port {port}",
        f"sentinel monitor main 127.0.0.1 {master} 1",
        "sentinel down-after-milliseconds main 500",
        "sentinel failover-timeout main 2000",
    )
    file.write_text("\n".join((*told, *lines, "")))
    return file


def seen(watch: int, replica: int) -> bool:
    """Whether a sentinel knows a replica that is connected."""
    with contextlib.suppress(redis.RedisError):
        told = redis.Redis(port=watch).sentinel_slaves("main")
        return any(one["port"] == replica and not one["is_disconnected"] for one in told)
    return False


@contextlib.contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server, each of whose connections `serve` has in a thread of its own."""
    threads: list[threading.Thread] = []
    open_now: list[socket.socket] = []

    def connection(taken: socket.socket) -> None:
        with taken, contextlib.suppress(OSError):
            serve(taken)

    def accept(at: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = at.accept()
                open_now.append(taken)
                thread = threading.Thread(target=connection, args=(taken,))
                threads.append(thread)
                thread.start()

    with socket.create_server(("127.0.0.1", 0)) as at:
        first = threading.Thread(target=accept, args=(at,))
        first.start()
        try:
            yield at.getsockname()[1]
        finally:
            at.shutdown(socket.SHUT_RDWR)
            first.join()
            for taken in open_now:
                with contextlib.suppress(OSError):
                    taken.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
