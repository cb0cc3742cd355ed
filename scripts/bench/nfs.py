"""Does exporting kvfs cost more than exporting its tmpfs, and do file handles last?

    .venv/bin/python -m scripts.bench.nfs read [--rounds 7] [--version 4]
    .venv/bin/python -m scripts.bench.nfs handles [--kills 20] [--restarts 5] [--clients 4]

read: libnfs reads in turns from a real nfs-ganesha of a mount, and from one of a tmpfs as kvfs has
it. The figures are GB/s of the calls. The client is on the same machine and takes as much CPU as
the server.

handles: clients read by handles which they got at the beginning, and compare each byte. They also
write, rename and unlink other files. Meanwhile the daemon is killed and the server is restarted.
"""

import contextlib
import ctypes
import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from scripts.bench.measure import Bar, Series, size, size_name, turns
from scripts.bench.mounted import Failed, Mounted, kvfs, scratch
from scripts.bench.report import Report, note, number
from scripts.libnfs import READ_MOST, File
from scripts.nfs_server import Server, forget

READ = Bar("read, kvfs exported / tmpfs exported", 0.9)
PATIENCE = 60.0  # s until another daemon serves
OBJECT = 1 << 20  # bytes of what handles are of


@click.group()
def main() -> None:
    """Measure and print."""


@contextlib.contextmanager
def _served(folder: Path, path: Path) -> Iterator[Server]:
    server = Server(folder, path)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        forget(path)


@contextlib.contextmanager
def _tmpfs(path: Path, bytes_: int) -> Iterator[Path]:
    """With huge pages as the RAM tier has them."""
    path.mkdir()
    options = f"size={bytes_},huge=within_size"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@main.command()
@click.option("--size", "text", default="64M", show_default=True, help="of an object")
@click.option("--objects", default=4, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--version", default=4, show_default=True, help="of NFS: 3 or 4")
@click.option("--json", "output", type=click.Path(path_type=Path))
def read(text: str, objects: int, rounds: int, version: int, output: Path | None) -> None:
    """Sequential reads of hot objects."""
    bytes_ = size(text)
    report = Report("nfs", size=size_name(bytes_), objects=objects, rounds=rounds, version=version)
    room = 3 * bytes_ * objects
    data = os.urandom(bytes_)
    rates: dict[str, list[float]] = {"kvfs": [], "tmpfs": []}
    with (
        scratch() as folder,
        _tmpfs(folder / "tmpfs", room) as plain,
        kvfs(folder / "kv", f"ram={room},allow_other") as mounted,
    ):
        mounted.require("passthrough", on=True)
        mounted.require("huge_pages", on=True)
        for path in (mounted.path, plain):
            for number_ in range(objects):
                (path / f"{number_}").write_bytes(data)
        mounted.settle()
        with (
            _served(folder / "a", mounted.path) as ours,
            _served(folder / "b", plain) as theirs,
        ):
            servers = {"kvfs": ours, "tmpfs": theirs}
            for round_ in range(-1, rounds):  # the first one is not counted
                for turn in turns(2, round_ + 1):
                    name = list(servers)[turn]
                    rate = _rate(servers[name], objects, data, version)
                    if round_ >= 0:
                        rates[name].append(rate)
                        note(f"round {round_ + 1}, {name}: {number(rate)} GB/s")
    ours_, theirs_ = (Series(tuple(rates[name])) for name in rates)
    rows = [[name, number(max(of)), number(Series(tuple(of)).median)] for name, of in rates.items()]
    report.table(f"Reads by NFSv{version}, GB/s", ["exported", "best", "median"], rows)
    found = ours_.against(theirs_)
    report.bars([READ.judged(found["best"], size_name(bytes_), found["median"])])
    report.document["rates"] = rates
    report.write(output)


def _rate(server: Server, objects: int, data: bytes, version: int) -> float:
    """GB/s of reading all objects, of which the last one is compared."""
    buffer = ctypes.create_string_buffer(READ_MOST)
    with server.client(version) as client:
        began = time.perf_counter()
        for number_ in range(objects):
            with client.open(f"{number_}") as file:
                for offset in range(0, len(data), READ_MOST):
                    if file.read_into(buffer, offset) != min(READ_MOST, len(data) - offset):
                        raise Failed(f"a short read of object {number_} at {offset}")
        spent = time.perf_counter() - began
        if client.read(f"{objects - 1}") != data:
            raise Failed(f"object {objects - 1} has wrong bytes")
    return len(data) * objects / spent / 1e9


@main.command()
@click.option("--kills", default=20, show_default=True, help="of the daemon")
@click.option("--restarts", default=5, show_default=True, help="of the NFS server")
@click.option("--clients", default=4, show_default=True)
@click.option("--files", default=16, show_default=True, help="of each client")
@click.option("--seed", default=1, show_default=True)
def handles(kills: int, restarts: int, clients: int, files: int, seed: int) -> None:
    """Handles across deaths."""
    with scratch() as folder:
        options = f"ram=256M,nvme={folder}/nvme,nvme_size=2G,allow_other,log={folder}/log"
        with kvfs(folder / "kv", options) as mounted, _served(folder / "a", mounted.path) as server:
            found = last(mounted, server, kills, restarts, clients, files, seed)
    print(f"{kills} kills, {restarts} restarts, {clients} clients: {dict(found)}")
    if found["wrong bytes"] or found["stale"] or found["errors"]:
        raise Failed("handles did not last")


def last(
    mounted: Mounted, server: Server, kills: int, restarts: int, clients: int, files: int, seed: int
) -> Counter[str]:
    """Count the results of the clients: reads, wrong bytes, stale handles, other errors."""
    found = Counter({"reads": 0, "wrong bytes": 0, "stale": 0, "errors": 0})
    ended = threading.Event()
    ready = threading.Barrier(clients + 1)
    workers = [
        threading.Thread(target=_work, args=(server, seed + who, files, found, ended, ready))
        for who in range(clients)
    ]
    for worker in workers:
        worker.start()
    try:
        ready.wait()
        deaths = ["kill"] * kills + ["restart"] * restarts
        random.Random(seed).shuffle(deaths)  # noqa: S311 (reproducible)
        for death in deaths:
            before = found["reads"]
            if death == "kill":
                _kill(mounted)
            else:
                server.kill()
                server.start()
            _until(lambda then=before: found["reads"] >= then + 2 * clients, "clients read on")
    finally:
        ended.set()
        ready.abort()
        for worker in workers:
            worker.join()
    return found


def _kill(mounted: Mounted) -> None:
    status = mounted.status()
    os.kill(status["daemon_pid"], signal.SIGKILL)
    _until(lambda: mounted.status()["takeovers"] > status["takeovers"], "another daemon serves")


def _until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.01)


def _work(
    server: Server,
    seed: int,
    files: int,
    found: Counter[str],
    ended: threading.Event,
    ready: threading.Barrier,
) -> None:
    """One client. Its handles are of the beginning; what else it does is for the disturbance."""
    dice = random.Random(seed)  # noqa: S311 (reproducible)
    with server.client() as client:
        contents = [dice.randbytes(OBJECT) for _ in range(files)]
        held: list[File] = []
        for at, content in enumerate(contents):
            client.write(f"{seed}-{at}", content)
            held.append(client.open(f"{seed}-{at}"))
        ready.wait()
        turn = 0
        while not ended.is_set():
            at = dice.randrange(files)
            try:
                if held[at].read(OBJECT) != contents[at]:
                    found["wrong bytes"] += 1
                found["reads"] += 1
                turn += 1
                client.write(f"{seed}.tmp", contents[at][: 64 << 10])
                client.rename(f"{seed}.tmp", f"{seed}-now")
                if turn % 3 == 0:
                    client.unlink(f"{seed}-now")
            except OSError as error:
                if not _repeated(error):
                    _refused(held[at], error, found)


def _repeated(error: OSError) -> bool:
    """A change of names that the server carried out before it died, and is asked for again."""
    return error.errno == errno.ENOENT and "nfs_pread" not in str(error)


def _refused(file: File, error: OSError, found: Counter[str]) -> None:
    """Of a read libnfs only says that it failed: the handle is asked for its attributes."""
    try:
        file.stat()
    except OSError as why:
        found["stale" if why.errno == errno.ESTALE else "errors"] += 1
        note(f"{error}; {why}")
    else:
        found["errors"] += 1
        note(f"{error}")


if __name__ == "__main__":
    main()
