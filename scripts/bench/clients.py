"""Client processes that make one kind of call on a directory of objects, together.

Each call is timed. Not for deciding what to compare: ops.py does.
"""

import math
import multiprocessing
import os
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Barrier

from scripts.bench.measure import percentile

START_LIMIT_S = 60.0
SAMPLE = 1000
processes = multiprocessing.get_context("spawn")
_start: Barrier | None = None  # of this client process


@dataclass(frozen=True, slots=True)
class Task:
    """A client's work: `count` calls of `op` in `folder`, which holds `objects` objects."""

    op: str
    folder: str
    objects: int
    bytes_each: int
    count: int
    client: int
    round_: int
    seed: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One client's calls: when the first began and the last ended, and how long each took.

    Of a listing, `seconds` has the time for one entry and `count` counts entries.
    """

    begin: float
    end: float
    count: int
    seconds: "array[float]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """All clients' calls of one task together."""

    rate: float
    p50: float
    p99: float

    @classmethod
    def of(cls, timed: list[Timed]) -> "Outcome":
        """Calls a second from the first client's start to the last one's end."""
        seconds = [second for one in timed for second in one.seconds]
        span = max(one.end for one in timed) - min(one.begin for one in timed)
        count = sum(one.count for one in timed)
        return cls(count / span, percentile(seconds, 0.5), percentile(seconds, 0.99))


def name(index: int) -> str:
    """How object number `index` is called: as long as connectors' names are."""
    return f"meta-llama-Llama-3.1-8B@1@0@{index:032x}@bfloat16.pt"


def sample(task: Task) -> list[str]:
    """Paths for this client's calls.

    As many different objects in a small as in a large directory: both fit the CPU's caches alike.
    """
    chosen = random.Random(task.seed).sample(  # noqa: S311
        range(task.objects), min(SAMPLE, task.objects)
    )
    start = task.client * task.count % len(chosen)  # clients begin at different objects
    repeated = (chosen[start:] + chosen[:start]) * math.ceil(task.count / len(chosen))
    return [os.path.join(task.folder, name(index)) for index in repeated[: task.count]]


def fresh(task: Task, kind: str) -> list[str]:
    """Paths of names that no earlier round has used."""
    stem = os.path.join(task.folder, f"{kind}-{task.round_}-{task.client}")
    return [f"{stem}-{index}" for index in range(task.count)]


def write(path: str, data: bytes) -> None:
    """Create, write and close one object."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(descriptor, data)
    os.close(descriptor)


def absent(path: str) -> None:
    """Stat what is not there."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    message = f"{path} exists"
    raise AssertionError(message)


def listing(task: Task) -> Timed:
    """List the directory until `count` entries were seen: whole listings only, timed by entry."""
    seconds: array[float] = array("d")
    begin, count = time.perf_counter(), 0
    while count < task.count:
        start = time.perf_counter()
        with os.scandir(task.folder) as entries:
            found = sum(1 for _ in entries)
        if found < task.objects:
            message = f"{task.folder}: {found} entries listed of {task.objects}"
            raise AssertionError(message)
        seconds.append((time.perf_counter() - start) / found)
        count += found
    return Timed(begin, time.perf_counter(), count, seconds)


def calls(task: Task) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
    """The calls of a task, each with its arguments."""
    data = bytes(task.bytes_each)
    if task.op == "create":
        yield from ((write, (path, data)) for path in fresh(task, "new"))
    elif task.op == "rename":
        pairs = zip(fresh(task, "new"), fresh(task, "renamed"), strict=True)
        yield from ((os.rename, pair) for pair in pairs)
    elif task.op == "unlink":
        yield from ((os.unlink, (path,)) for path in fresh(task, "renamed"))
    elif task.op == "stat miss":
        yield from ((absent, (path,)) for path in fresh(task, "absent"))
    elif task.op in {"stat hit", "stat cold"}:
        yield from ((os.stat, (path,)) for path in sample(task))
    elif task.op == "open+close":
        yield from ((open_close, (path,)) for path in sample(task))
    else:
        yield from ((open_close, (task.folder,)) for _ in range(task.count))


def open_close(path: str) -> None:
    """Open for reading and close."""
    os.close(os.open(path, os.O_RDONLY))


def perform(task: Task) -> Timed:
    """Run in a client process: waits for the other clients, then makes its calls."""
    prepared = list(calls(task)) if task.op != "readdir" else []
    seconds: array[float] = array("d")
    clock = time.perf_counter
    if _start is not None:
        _start.wait(START_LIMIT_S)
    if task.op == "readdir":
        return listing(task)
    begin = clock()
    for call, arguments in prepared:
        start = clock()
        call(*arguments)
        seconds.append(clock() - start)
    return Timed(begin, clock(), len(seconds), seconds)


def populate(task: Task) -> int:
    """Run in a client process: makes the objects `objects` to `objects + count`."""
    data = bytes(task.bytes_each)
    for index in range(task.objects, task.objects + task.count):
        write(os.path.join(task.folder, name(index)), data)
    return task.count


def _join(start: Barrier) -> None:
    global _start  # noqa: PLW0603  (each client process has one)
    _start = start


class Clients:
    """A number of client processes, started once."""

    def __init__(self, number: int) -> None:
        """Start them."""
        self.number = number
        self._pool: Pool = processes.Pool(number, _join, (processes.Barrier(number),))

    def run(self, make: Callable[[int], Task]) -> Outcome:
        """All clients at once, each with the task that `make` gives for its number."""
        tasks = [make(client) for client in range(self.number)]
        return Outcome.of(self._pool.map(perform, tasks, chunksize=1))

    def populate(self, tasks: list[Task]) -> Iterator[int]:
        """Yields how many objects were made, as they are made."""
        return self._pool.imap_unordered(populate, tasks)

    def __enter__(self) -> "Clients":  # noqa: PYI034  (Self is of Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()
        self._pool.join()
