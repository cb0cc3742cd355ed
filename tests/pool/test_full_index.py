"""A pool whose index has no memory left: its nodes live on, and announcements wait."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from kvfs.pool.index import LEASE_S
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.pool.test_two_nodes import MIB, absent, announced, gets, node, read, write
from tests.pool.test_visible import index_of, news, run

FULL = "the memory of the index is full: raise maxmemory"
QUIET = "the pool's index takes no new objects|the pool learns later of changes here"


@contextmanager
def full(index: redis.Redis) -> Iterator[None]:
    """An index that refuses each command that may need memory."""
    index.config_set("maxmemory-policy", "noeviction")
    index.config_set("maxmemory", "1mb")  # less than an empty server takes
    yield
    index.config_set("maxmemory", "0")


def expiries(index: redis.Redis) -> list[int]:
    """When each lease expires, in ms since 1970."""
    names = (name.decode() for name in index.keys("kvfs:kv:n:*") if isinstance(name, bytes))
    return [index.pexpiretime(name) for name in names]


def says_full(kv: Mounted) -> None:
    wait_for(lambda: kv.status()["pool"]["index"]["full"], "the node sees that the index is full")
    assert re.search(f"index +full: .*{FULL}", " ".join(run("pool", kv.path).split()))


def test_nodes_live_on_with_a_full_index(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        kv.allow_log(QUIET)
    write(a, "block", b"x" * MIB)
    wait_for(lambda: b.status()["pool"]["nodes_live"] == 2, "b knows both nodes")
    index = index_of(pool)
    with full(index):
        last = max(expiries(index))
        says_full(a)
        says_full(b)
        (a.path / "new").write_bytes(b"y" * MIB)
        wait_for(
            lambda: min(expiries(index), default=0) > last + 1000 * LEASE_S,
            "both leases have outlived those of before",
            seconds=4 * LEASE_S,
        )
        wait_for(lambda: a.status()["pool"]["lag_s"] > LEASE_S, "the new object waits")
        assert absent(b.path / "new")
        gets(b, "block", b"x" * MIB)
        found = b.status()["pool"]
        assert (found["nodes_live"], found["index"]["up"]) == (2, True)
        assert not news(a, "node died") + news(b, "node died")
        assert not news(a, "index down") + news(b, "index down")
        assert news(a, "index full")[-1]["why"].endswith(FULL)
    wait_for(lambda: announced(a) == 2, "the new object is announced")
    wait_for(lambda: read(b.path / "new") == b"y" * MIB, "b reads it")
    wait_for(lambda: not b.status()["pool"]["index"]["full"], "the index has room")


def test_unlinked_object_is_gone_with_a_full_index(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        kv.allow_log(QUIET)
    write(a, "block", b"x" * MIB)
    gets(b, "block", b"x" * MIB)
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    with full(index_of(pool)):
        for number in range(200):  # several turns of announcements
            (a.path / f"new{number}").write_bytes(b"y")
        wait_for(lambda: a.status()["pool"]["lag_s"] > 2, "they wait")
        (a.path / "block").unlink()
        wait_for(lambda: absent(b.path / "block"), "it is unlinked for all nodes")


def scripts(index: redis.Redis) -> int:
    """Calls of scripts until now, also of those that a full index has refused."""
    (found,) = (one for name, one in index.info("commandstats").items() if "evalsha" in name)
    return int(found["calls"]) + int(found["rejected_calls"])


def test_unlink_waits_for_few_of_many_objects_that_a_full_index_refuses(
    pool: str, mount: Mount
) -> None:
    a, many = node(mount, pool, "a"), 4000
    a.allow_log(QUIET)
    write(a, "block", b"x")
    index = index_of(pool)
    with full(index):
        for number in range(many):
            (a.path / f"new{number}").write_bytes(b"y")
        before = scripts(index)
        wait_for(lambda: scripts(index) > before + many, "all were refused once")
        before = scripts(index)
        (a.path / "block").unlink()
        wait_for(lambda: index.hexists("kvfs:kv:o:@0/block", "gone"), "the index knows")
        assert scripts(index) - before < many / 3
    wait_for(lambda: announced(a) == many, "all are announced")


def test_node_without_a_lease_gets_none_from_a_full_index(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    write(a, "block", b"x" * MIB)
    index = index_of(pool)
    with full(index):
        b = node(mount, pool, "b")
        b.allow_log(QUIET)
        gets(b, "block", b"x" * MIB)
        a.allow_log(QUIET)
        says_full(b)
        assert len(expiries(index)) == 1
    wait_for(lambda: len(expiries(index)) == 2, "b has a lease")
