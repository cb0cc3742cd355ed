"""Small objects that are written once and must be there for ever.

Contract: what object `index` of a run with `seed` contains can be computed, so nothing is kept.
"""

import os
import random

from scripts.bench.workload.task import Calls, Task, WrongError, expect

FOLDERS = 64
SIZES = (100, 1000, 4096, 5000, 16_384)
LARGE, EACH = 1_000_000, 50  # every fiftieth object is large: bytes must move, too
HOT = 0.2  # of the objects get
HOT_READS = 0.8  # of the reads, so that promotion has something to find


def path(task: Task, index: int) -> str:
    """Where an object is."""
    return f"{task.folder}/sealed/{index % FOLDERS}/{index}.kv"


def content(seed: int, index: int) -> bytes:
    """Return the content of an object."""
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 (repeatable)
    return rng.randbytes(LARGE if index % EACH == 0 else rng.choice(SIZES))


def fill(task: Task, calls: Calls) -> None:
    """This client's share of all objects."""
    for index in range(task.client, task.objects, task.clients):
        name = path(task, index)
        fd = calls.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        calls.write_all(fd, content(task.seed, index), name)
        calls.close(fd)


def choose(task: Task, rng: random.Random) -> int:
    """Which object to read next."""
    among = task.objects if rng.random() > HOT_READS else max(1, int(task.objects * HOT))
    return rng.randrange(among)


def verify(task: Task, calls: Calls, index: int) -> bool:
    """Read one object. False if it is a miss, which only evicting mounts may show."""
    name = path(task, index)
    try:
        found = calls.read_all(name)
    except FileNotFoundError:
        if task.evict:
            return False
        raise WrongError("lost", name, "a sealed object is gone") from None
    expect(name, "content", found, content(task.seed, index))
    return True
