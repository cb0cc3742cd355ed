"""Two nodes write the same name with different bytes, and then the first object leaves the pool."""

import json
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.test_two_nodes import (
    absent,
    announced,
    drop,
    gets,
    in_conflict,
    node,
    port_of,
    read,
    write,
)

KEY = "kvfs:kv:o:@0/block"


def count(kv: Mounted, name: str) -> int:
    found: int = kv.status()["pool"]["counters"][name]
    return found


def in_conflict_earlier(_: str, a: Mounted, b: Mounted) -> None:
    """As `in_conflict`, but b writes its object before a does, and closes it later."""
    with (b.path / "block").open("wb") as file:
        file.write(b"of b")
        file.flush()
        write(a, "block", b"of a")
        a.idle()  # a node announces an object again after its copy to NVMe
        wait_for(lambda: not a.status()["pool"]["lag_s"], "all is announced")
    wait_for(lambda: count(b, "conflicts") == 1, "b notices")


Conflict = Callable[[str, Mounted, Mounted], None]
ORDERS = pytest.mark.parametrize(
    "conflict", [in_conflict, in_conflict_earlier], ids=["later", "earlier"]
)


def settled(kv: Mounted) -> None:
    kv.idle()
    wait_for(lambda: not kv.status()["pool"]["lag_s"], "all is announced")


def stat_of(path: Path) -> str:
    """Return the words of `kvfs stat`; an empty text if there is no file."""
    words = [*KVFS, "stat", str(path)]
    return subprocess.run(words, check=False, capture_output=True, text=True).stdout


@ORDERS
@pytest.mark.parametrize("how", ["evicted", "unmounted"])
def test_object_in_conflict_gets_the_name_that_no_node_has(
    pool: str, mount: Mount, how: str, conflict: Conflict
) -> None:
    """Nobody looks at it meanwhile."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    c = node(mount, pool, "c")
    conflict(pool, a, b)
    settled(b)
    if how == "evicted":
        drop(a, "block")
    else:
        a.umount("--now")
    wait_for(lambda: announced(b) == 1, "b announces its own")
    assert ", this node)" in stat_of(b.path / "block")
    for kv in (c, b) if how == "unmounted" else (a, c, b):
        gets(kv, "block", b"of b")


def in_conflict_now(kv: Mounted) -> tuple[list[dict[str, object]], str]:
    """Return what `kvfs pool --conflicts` tells, as JSON and for people."""
    words = [*KVFS, "pool", "--conflicts", str(kv.path)]
    told, shown = (
        subprocess.run([*words, *more], check=True, capture_output=True, text=True).stdout
        for more in (["--json"], [])
    )
    return json.loads(told)["conflicts"], shown


def test_objects_in_conflict_are_listed_with_the_node_that_has_the_name(
    pool: str, mount: Mount
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    assert in_conflict_now(a)[0] == []
    in_conflict(pool, a, b)
    (one,), shown = in_conflict_now(b)
    assert (one["path"], one["nodes"]) == ("block", [f"{socket.gethostname()}:{a.path}"])
    assert re.search("conflicts +1 now, 1 since the daemon began", shown)
    assert re.search(f"block +{socket.gethostname()}:{a.path}", shown)
    assert b.status()["pool"]["in_conflict"] == 1
    a.umount("--now")
    wait_for(lambda: not b.status()["pool"]["in_conflict"], "b has the name")
    assert in_conflict_now(b)[0] == []


def change(path: Path, how: str) -> None:
    """Take the name from the object of this node."""
    if how == "unlink":
        path.unlink()
    elif how == "rename":
        path.rename(path.with_name("elsewhere"))
    elif how == "rewrite":
        path.write_bytes(b"new of a")
    else:
        other = path.with_name("other")
        other.write_bytes(b"new of a")
        other.rename(path)


@ORDERS
@pytest.mark.parametrize("how", ["unlink", "rename", "rewrite", "replace"])
def test_object_in_conflict_goes_with_a_change_of_the_first_one(
    pool: str, mount: Mount, how: str, conflict: Conflict
) -> None:
    """Nobody looks at it meanwhile."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    c = node(mount, pool, "c")
    conflict(pool, a, b)
    settled(b)
    change(a.path / "block", how)
    wait_for(lambda: count(b, "stale") == 1, "b lets its own go")
    for kv in (a, b, c):
        if how in {"unlink", "rename"}:
            wait_for(lambda: absent(kv.path / "block"), "no node has it")  # noqa: B023
        else:
            gets(kv, "block", b"new of a")


def test_stat_never_calls_an_object_that_goes_unannounced(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    in_conflict(pool, a, b)
    settled(b)
    (a.path / "block").unlink()

    def is_gone() -> bool:
        told = stat_of(b.path / "block")
        assert "not announced yet" not in told
        return not told and absent(b.path / "block")

    wait_for(is_gone, "b lets its own go")
    assert redis.Redis(port=port_of(pool)).hkeys(KEY) == [b"gone"]


@pytest.mark.parametrize("when", ["before b knows it", "after b knows it"])
def test_object_written_after_the_unlink_is_announced(pool: str, mount: Mount, when: str) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    in_conflict(pool, a, b)
    (a.path / "block").unlink()
    if when == "after b knows it":
        wait_for(lambda: count(b, "stale") == 1, "b lets its own go")
    (b.path / "block").write_bytes(b"new of b")
    gets(a, "block", b"new of b")
    settled(b)
    assert read(b.path / "block") == b"new of b"
    assert announced(b) == 1


@ORDERS
def test_later_object_in_conflict_stands_after_a_loss_of_the_index(
    pool: str, mount: Mount, conflict: Conflict
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    c = node(mount, pool, "c")
    conflict(pool, a, b)
    settled(b)
    for kv in (a, b, c):
        kv.allow_log("the pool's index")
    redis.Redis(port=port_of(pool)).flushall()
    later = b"of b" if conflict is in_conflict else b"of a"
    for kv in (a, b, c):

        def told(kv: Mounted = kv) -> bool:
            found = read(kv.path / "block")
            assert found in {None, b"of a", b"of b"}
            return found == later

        wait_for(told, "the later one stands")
    for kv in (a, b, c):
        settled(kv)
    for kv in (a, b, c):
        assert read(kv.path / "block") == later


RESTARTS = pytest.mark.parametrize("how", ["kill", "upgrade", "mount"])


def restart(kv: Mounted, how: str) -> None:
    """Give a node another daemon."""
    if how == "kill":
        kv.kill_daemon()
    elif how == "upgrade":
        subprocess.run([*KVFS, "upgrade", str(kv.path)], check=True, capture_output=True)
    else:
        kv.remount()
    restarted(kv)


def restarted(kv: Mounted) -> None:
    """Wait until a new daemon has told the index of all its objects, the newest first."""
    wait_for(lambda: announced(kv) >= 1, "its other object is announced")
    settled(kv)


@ORDERS
@RESTARTS
def test_conflict_outlives_the_daemon(
    pool: str, mount: Mount, how: str, conflict: Conflict
) -> None:
    a, b, c = (node(mount, pool, name) for name in "abc")
    write(b, "before", b"b")
    conflict(pool, a, b)
    settled(b)
    for _ in range(2):  # the next daemon after that knows it, too
        restart(b, how)
        assert read(b.path / "block") == b"of b"
        assert read(a.path / "block") == b"of a"
    gets(c, "block", b"of a")
    assert [count(kv, "stale") for kv in (a, b)] == [0, 0]
    (a.path / "block").unlink()
    for kv in (a, b, c):
        wait_for(lambda: absent(kv.path / "block"), "no node has it")  # noqa: B023


@ORDERS
@pytest.mark.parametrize("how", ["evict", "evict and write", "unlink", "rewrite", "lose"])
def test_conflict_that_ends_while_its_node_is_away(
    pool: str, mount: Mount, how: str, conflict: Conflict
) -> None:
    """The later of two objects stands after a loss of the index, or if the first one is evicted."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(b, "before", b"b")
    conflict(pool, a, b)
    settled(b)
    b.umount()
    index = redis.Redis(port=port_of(pool))
    stands: bytes | None = b"of b"
    if how.startswith("evict"):
        drop(a, "block")
        wait_for(lambda: not index.exists(KEY), "the index knows it")
        if how == "evict and write":
            write(a, "block", stands := b"third")
    elif how == "lose":
        a.allow_log("the pool's index")
        index.flushall()
        wait_for(lambda: index.exists(KEY), "a announces its own again")
        stands = b"of b" if conflict is in_conflict else b"of a"
    else:
        change(a.path / "block", how)
        wait_for(lambda: index.hexists(KEY, "gone"), "the index knows it")
        settled(a)
        stands = None if how == "unlink" else b"new of a"
    b.mount()
    restarted(b)
    for kv in (a, b):
        wait_for(lambda: read(kv.path / "block") == stands, "each has it")  # noqa: B023
