"""How long does it take to drop a namespace, and how long do programs still see its files?

    .venv/bin/python -m scripts.bench.drop [--objects 1000000] [--json FILE]

Two namespaces have that many objects each on NVMe, in directories of a thousand. One gets another
version (`kvfs ns set PATH version=2`), the other is dropped (`kvfs ns drop PATH`). The benchmark
makes them without the mount, as a daemon would have left them: records and names in the catalog.
Only the first objects (--files) get backing files, which are empty. A million files take ten
minutes to make, and the daemon only unlinks each, in a thread. The timed part is the request of the
command to the daemon. The whole command is timed on an empty namespace; its time is the start of
Python.

Before the drop the kernel looks up a few thousand names. From the answer on, they are looked up
again, by their whole paths and relative to a descriptor of their directory. The files are opened,
too. `seen` is the time after the answer until none of them is found. Meanwhile, and until the space
is free, a process opens and closes objects of another namespace.
"""

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvfs.catalog import Catalog, Dentry, Inode
from kvfs.control import request
from kvfs.tiers.tier import FANOUT
from scripts.bench.busy import quantile
from scripts.bench.measure import Bar
from scripts.bench.mounted import Failed, Mounted, command, kvfs, scratch
from scripts.bench.report import Report, note, number

IN_DIRECTORY = 1000
SIZE = 4096  # bytes
OTHERS = 64  # objects of the namespace that stays
BATCH = 1000
SWITCHED, DROPPED, STAYS = "switched", "dropped", "stays"
PATIENCE = 600.0  # s for the space to be free
IDLE = 3.0  # s of opens before anything happens
LOOK = 0.5  # s between two looks at what is left
RETURNS = Bar("the request returns, s", 0.1, at_least=False)
SEEN = Bar("an old name is seen after that, s", 0, at_least=False)
processes = multiprocessing.get_context("spawn")


def folders(objects: int) -> int:
    """Directories of a namespace."""
    return -(-objects // IN_DIRECTORY)


def prepare(mounted: Mounted, objects: int) -> None:
    """Directories, one sealed object on NVMe, and those that stay."""
    for name in (SWITCHED, DROPPED, STAYS):
        command("ns", "create", str(mounted.path / name))
    for name in (SWITCHED, DROPPED):
        for folder in range(folders(objects)):
            (mounted.path / name / f"{folder:04}").mkdir()
    (mounted.path / SWITCHED / "0000" / "model.bin").write_bytes(os.urandom(SIZE))
    for at in range(OTHERS):
        (mounted.path / STAYS / f"{at}.bin").write_bytes(os.urandom(SIZE))


def populate(disk: Path, objects: int, files: int) -> float:
    """Make the objects behind an unmounted mount; seconds for all."""
    begin = time.perf_counter()
    catalog = Catalog(disk / "catalog")
    try:
        model = _inode(
            catalog, _inode(catalog, _inode(catalog, None, SWITCHED), "0000"), "model.bin"
        )
        for name in (SWITCHED, DROPPED):
            top = _inode(catalog, None, name)
            begun = 0
            for folder in range(folders(objects)):
                directory = _inode(catalog, top, f"{folder:04}")
                count = min(IN_DIRECTORY, objects - folder * IN_DIRECTORY)
                _fill(catalog, directory, model, count, disk if begun < files else None)
                begun += count
    finally:
        catalog.close()
    return time.perf_counter() - begin


def _inode(catalog: Catalog, parent: Inode | None, name: str) -> Inode:
    entry = catalog.lookup(1 if parent is None else parent.ino, name.encode())
    found = None if entry is None else catalog.inode(entry.ino)
    if found is None:
        raise Failed(f"{name} is not in {catalog.path}")
    return found


def _fill(catalog: Catalog, directory: Inode, model: Inode, count: int, disk: Path | None) -> None:
    """With backing files on the disk, if one is given."""
    with catalog.batch() as batch:
        for at in range(count):
            inode = model.copy()
            inode.ino = catalog.next_id()
            inode.key, inode.parent_key, inode.namespace = inode.ino, 0, directory.namespace
            inode.links = ((directory.ino, inode.ino),)
            batch.put(inode)
            batch.link(directory.ino, Dentry(b"%d.bin" % at, inode.ino, inode.ino))
            if disk is not None:
                name = f"{inode.ino:x}.{inode.version:x}"
                os.mknod(disk / "objects" / f"{inode.ino % FANOUT:02x}" / name)


# Opens of another namespace


def opens(folder: str, stop: Any, results: Any) -> None:  # noqa: ANN401 (of multiprocessing)
    """Open and close, until told to stop; moments and seconds."""
    paths = [f"{folder}/{at}.bin" for at in range(OTHERS)]
    found = []
    while not stop.is_set():
        for path in paths:
            begin = time.monotonic()
            os.close(os.open(path, os.O_RDONLY))
            found.append((begin, time.monotonic() - begin))
        time.sleep(0.002)  # a client, not a second load
    results.put(found)


@dataclass
class Opens:
    """The times that the process has measured; `between` gives those between two moments."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Microseconds."""
        spent = [took for at, took in self.samples if begin <= at < end]
        if not spent:
            raise Failed("no open was measured")
        return {
            "opens": len(spent),
            "p50_us": quantile(spent, 0.5),
            "p99_us": quantile(spent, 0.99),
            "max_us": max(spent) * 1e6,
        }


@contextmanager
def opening(mounted: Mounted) -> Iterator[Opens]:
    """A process that opens objects of the namespace that stays; its samples come at the end."""
    stop, results = processes.Event(), processes.Queue()
    folder = str(mounted.path / STAYS)
    child = processes.Process(target=opens, args=(folder, stop, results))
    child.start()
    found = Opens()
    try:
        yield found
        stop.set()
        found.samples = results.get(timeout=PATIENCE)
    finally:
        child.terminate()
        child.join()


# Names that are still seen


@contextmanager
def absent() -> Iterator[None]:
    """Accept the error of a missing name: ENOENT, or ESTALE if its directory is gone, too."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOENT, errno.ESTALE}:
            raise


class Watcher:
    """Names below a directory that the kernel knows, to be looked up again afterwards."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.inside: list[tuple[int, str]] = []
        self.descriptors: list[int] = []

    def learn(self, top: Path, known: int) -> None:
        """Have the kernel look up so many names."""
        self.descriptors.append(os.open(top, os.O_RDONLY | os.O_DIRECTORY))
        for folder in range(folders(known)):
            where = top / f"{folder:04}"
            descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
            self.descriptors.append(descriptor)
            for entry in os.listdir(descriptor)[: known - len(self.paths)]:
                self.paths.append(str(where / entry))
                self.inside.append((descriptor, entry))
                os.stat(self.paths[-1])

    def look(self) -> Iterator[str]:
        """Old names that are still found, each in one of several ways."""
        for path, (descriptor, name) in zip(self.paths, self.inside, strict=True):
            with absent():
                os.stat(path)
                yield path
            with absent():
                os.stat(name, dir_fd=descriptor)
                yield f"{name}, by descriptor"
            with absent():
                os.close(os.open(name, os.O_RDONLY, dir_fd=descriptor))
                yield f"{name}, opened by descriptor"
        for descriptor in self.descriptors:
            with absent():
                yield from os.listdir(descriptor)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextmanager
def watching(top: Path, known: int) -> Iterator[Watcher]:
    """Names that are known, until the descriptors are closed."""
    watcher = Watcher()
    try:
        watcher.learn(top, known)
        yield watcher
    finally:
        watcher.close()


def watch(watcher: Watcher, answered: float) -> tuple[float, int]:
    """Seconds after the answer at which an old name was seen last, and how often in all."""
    seen, times = 0.0, 0
    while True:
        before = times
        for found in watcher.look():
            seen, times = time.monotonic() - answered, times + 1
            if times == 1:
                note(f"still seen {seen:.6f} s later: {found}")
        if times == before:
            return seen, times
        if seen > PATIENCE:
            raise Failed("old names are seen for ever")


def until_free(mounted: Mounted, name: str, begin: float) -> float:
    """Wait until nothing is left of what was dropped, and its files are gone; seconds."""
    while True:
        status = mounted.status()
        if not status["dropped"] and not status["trash"]:
            return time.monotonic() - begin
        if time.monotonic() - begin > PATIENCE:
            raise Failed(f"{name}: not free after {PATIENCE:.0f} s: {status['dropped']}")
        time.sleep(LOOK)


def case(mounted: Mounted, name: str, known: int) -> dict[str, Any]:
    """Take a namespace's content away, and watch."""
    with watching(mounted.path / name, known) as watcher:
        return watched(mounted, name, watcher)


def watched(mounted: Mounted, name: str, watcher: Watcher) -> dict[str, Any]:
    """The row of one namespace."""
    before = mounted.status()["tiers"]["nvme"]
    row: dict[str, Any] = {"namespace": name, "objects_before": before["objects"]}
    lag = threading.Event()
    with opening(mounted) as found:
        lag.wait(IDLE)
        began = time.monotonic()
        if name == DROPPED:
            request(mounted.path, "ns_drop", name=name)
        else:
            request(mounted.path, "ns_set", name=name, settings={"version": "2"})
        answered = time.monotonic()
        row["request_s"] = answered - began
        row["seen_s"], row["seen"] = watch(watcher, answered)
        row["free_s"] = until_free(mounted, name, answered)
        ended = time.monotonic()
    after = mounted.status()["tiers"]["nvme"]
    row |= {
        "objects_after": after["objects"],
        "freed_bytes": before["used_bytes"] - after["used_bytes"],
        "idle": found.between(began - IDLE, began),
        "beside": found.between(began, ended),
        "request_beside_max_us": max(
            (took for at, took in found.samples if at < answered < at + took + 0.05), default=0.0
        )
        * 1e6,
    }
    return row


@click.command()
@click.option("--objects", default=1_000_000, show_default=True, help="Of each namespace.")
@click.option("--files", default=10_000, show_default=True, help="Of each, on the disk.")
@click.option("--known", default=5000, show_default=True, help="Names that the kernel knows.")
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, objects: int, files: int, known: int, nvme: Path, output: Path | None) -> None:
    """Drop namespaces, and watch who notices."""
    report = Report("drop", objects=objects, files=files, known=known)
    with scratch() as folder, scratch(nvme) as disk:
        options = f"ram=256M,nvme={disk}/kvfs,nvme_size={4 * SIZE * objects + (1 << 30)}"
        with kvfs(folder / "kv", options) as mounted:
            prepare(mounted, objects)
            mounted.umount()
            note(f"{2 * objects:,} objects in {populate(disk / 'kvfs', objects, files):.0f} s")
            mounted.mount()
            while not mounted.status()["census_done"]:
                time.sleep(LOOK)
            for at in range(OTHERS):  # into memory, all of them
                path = mounted.path / STAYS / f"{at}.bin"
                path.write_bytes(path.read_bytes())
            rows = [case(mounted, name, min(known, objects)) for name in (SWITCHED, DROPPED)]
            begin = time.perf_counter()
            command("ns", "set", str(mounted.path / SWITCHED), "version=3")
            again = time.perf_counter() - begin
    report.document |= {"results": rows, "command_s": again}
    report.table(
        f"namespaces of {objects:,} objects",
        [
            "",
            "request s",
            "seen s",
            "free s",
            "objects",
            "p50 us",
            "p99 us",
            "beside: p50",
            "p99",
            "max",
        ],
        [
            [
                row["namespace"],
                f"{row['request_s']:.4f}",
                f"{row['seen_s']:.3f}",
                f"{row['free_s']:.0f}",
                f"{row['objects_before']:,} to {row['objects_after']:,}",
                *(number(row["idle"][name]) for name in ("p50_us", "p99_us")),
                *(number(row["beside"][name]) for name in ("p50_us", "p99_us", "max_us")),
            ]
            for row in rows
        ],
    )
    bars = [RETURNS.judged(row["request_s"], row["namespace"]) for row in rows]
    bars += [SEEN.judged(row["seen_s"], row["namespace"]) for row in rows]
    report.bars(bars)
    note(f"the whole command, of an empty namespace: {again:.2f} s")
    report.write(output)


if __name__ == "__main__":
    main()
