"""A name that was unlinked or replaced at one node is given again at another one."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import redis

from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.pool.test_two_nodes import gets, node, port_of, read, write

LOOKS = 3  # of each node
LONG_AGO = 10**9  # s since 1970

Again = Callable[[redis.Redis, Mounted, Mounted], bytes]


def is_there(index: redis.Redis, name: str = "block", *, there: bool = True) -> None:
    key = f"kvfs:kv:o:@0/{name}"
    wait_for(lambda: index.hexists(key, "kvfs-xxh3-128") == there, f"{name}: there is {there}")


def unlinked(index: redis.Redis, a: Mounted, b: Mounted) -> bytes:
    """b unlinks it, and a writes the same bytes."""
    (b.path / "block").unlink()
    is_there(index, there=False)
    (a.path / "block").write_bytes(b"first")
    return b"first"


def rewritten(_: redis.Redis, a: Mounted, b: Mounted) -> bytes:
    """b writes other bytes, and a the first ones again."""
    (b.path / "block").write_bytes(b"other")
    gets(a, "block", b"other")
    (a.path / "block").write_bytes(b"first")
    return b"first"


def renamed(index: redis.Redis, a: Mounted, b: Mounted) -> bytes:
    """b renames it, and a renames it back."""
    (b.path / "block").rename(b.path / "aside")
    is_there(index, "aside")
    gets(a, "aside", b"first")
    (a.path / "aside").rename(a.path / "block")
    return b"first"


def restored(index: redis.Redis, a: Mounted, b: Mounted) -> bytes:
    """b unlinks it, and a writes other bytes with an early time, as `cp -p` and rsync do."""
    (b.path / "block").unlink()
    is_there(index, there=False)
    copied(a.path / "block", b"other")
    return b"other"


def replaced(index: redis.Redis, a: Mounted, _: Mounted) -> bytes:
    """a renames a file with the same bytes and an early time to it."""
    copied(a.path / "new", b"first")
    (a.path / "new").rename(a.path / "block")
    is_there(index, "new", there=False)
    return b"first"


def copied(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.utime(file.fileno(), (LONG_AGO, LONG_AGO))


WAYS = pytest.mark.parametrize("again", [unlinked, rewritten, renamed, restored, replaced])


@WAYS
def test_name_that_is_given_again_is_there_on_all_nodes(
    pool: str, mount: Mount, again: Again
) -> None:
    index = redis.Redis(port=port_of(pool))
    a, b, c = (node(mount, pool, name) for name in "abc")
    write(a, "block", b"first")
    for kv in (b, c):
        gets(kv, "block", b"first")
    data = again(index, a, b)
    is_there(index)
    stays(index, (a, b, c), data)
    index.flushall()
    is_there(index)
    stays(index, (a, b, c), data)


def stays(index: redis.Redis, nodes: Sequence[Mounted], data: bytes) -> None:
    """Read the object until each node has compared it with the index and has kept it.

    A node may have to give up a copy with an earlier time, and fetch the object once more.
    """
    since = comparisons(index)

    def all_have_read_it() -> bool:
        nonlocal since
        if [read(kv.path / "block") for kv in nodes] != [data] * len(nodes):
            since = comparisons(index)
        return comparisons(index) > since + LOOKS * len(nodes)

    wait_for(all_have_read_it, "all nodes read it")


def comparisons(index: redis.Redis) -> int:
    found: int = index.info("commandstats")["cmdstat_hgetall"]["calls"]
    return found


@pytest.mark.parametrize("above", [".", "above"])
def test_directory_that_was_removed_does_not_come_back(pool: str, mount: Mount, above: str) -> None:
    """The index lists its last file until it is told that a program has unlinked the file."""
    a = node(mount, pool, "a")
    for number in range(10):
        folder = a.path / above / f"{number}"
        folder.mkdir(parents=True)
        write(a, f"{above}/{number}/block", b"x")
        shutil.rmtree(folder)
        assert not folder.exists()
        folder.mkdir()
