"""The index against a real redis-server: what is announced is found, and nothing is trusted."""

import logging
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import trio
import xxhash

from kvfs.errors import ConfigError
from kvfs.pool.credentials import Credentials
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import Index
from kvfs.pool.offers import MOST, OFFER_S, Offers
from kvfs.pool.place import PoolPlace
from kvfs.pool.records import Announcement, GoneEntry, Lease, Owner, PoolEntry, Unlinked
from kvfs.pool.servers import Servers
from kvfs.s3.facts import Facts
from tests.pool.servers import answers, free_port, server

A, B = "a" * 8 + "-0000-0000-0000-000000000001", "b" * 8 + "-0000-0000-0000-000000000002"
LIFE = "0123456789abcdef"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    found = free_port()
    with server(tmp_path_factory.mktemp("redis"), found):
        yield found


@asynccontextmanager
async def index(port: int, pool: str = "kv", password: str = "") -> AsyncIterator[Index]:
    place = PoolPlace.parse(f"redis://127.0.0.1:{port}/{pool}")
    servers = Servers(place, Credentials(password=password))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(servers.run)
        found = Index(servers)
        with trio.fail_after(10):
            while True:
                try:
                    await found.expect_usable()
                    break
                except IndexDownError as error:
                    if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                        raise
                    await trio.sleep(0.01)
        yield found
        nursery.cancel_scope.cancel()


def facts(data: bytes, mtime_ns: int = 5) -> Facts:
    digest = xxhash.xxh3_128_digest(data)
    return Facts(
        size=len(data),
        digest=digest,
        mtime_ns=mtime_ns,
        mode=0o644,
        uid=0,
        gid=0,
        stored_size=len(data),
        stored_digest=digest,
    )


def said(
    key: str, data: bytes, node: str = A, *, fresh: bool = True, mtime_ns: int = 5
) -> Announcement:
    return Announcement(key, facts(data, mtime_ns), Owner(node, LIFE, "ram", "1f.1"), fresh)


def unlinked(key: str, data: bytes, mtime_ns: int = 5) -> Unlinked:
    return Unlinked(key, xxhash.xxh3_128_digest(data), mtime_ns)


def gone(data: bytes, mtime_ns: int = 5) -> GoneEntry:
    return GoneEntry(xxhash.xxh3_128_digest(data), mtime_ns)


def test_what_is_announced_is_found(port: int) -> None:
    async def case() -> None:
        async with index(port, "found") as one, index(port, "other") as other:
            assert await one.announce([said("@0/x", b"x"), said("@0/y", b"y")]) == ["here"] * 2
            assert await one.announce([said("@0/x", b"x", B, fresh=False)]) == ["here"]
            x, y, z = await one.find(["@0/x", "@0/y", "@0/z"])
            assert isinstance(x, PoolEntry)
            assert isinstance(y, PoolEntry)
            assert x.facts == facts(b"x")
            assert {owner.node for owner in x.owners} == {A, B}
            assert y.owners == (Owner(A, LIFE, "ram", "1f.1"),)
            assert z is None
            assert await other.find(["@0/x"]) == [None]

    trio.run(case)


def test_same_bytes_written_again_are_no_object_that_left(port: int) -> None:
    async def case() -> None:
        async with index(port, "same") as one:
            await one.announce([said("@0/x", b"x", mtime_ns=5)])
            await one.unlink([unlinked("@0/x", b"x", 5)])
            copy = said("@0/x", b"x", B, fresh=False, mtime_ns=9)
            assert await one.announce([copy]) == ["gone"]
            assert await one.announce([copy._replace(later=True)]) == ["here"]
            await one.unlink([unlinked("@0/x", b"x", 9)])
            assert await one.announce([copy._replace(later=True)]) == ["gone"]

    trio.run(case)


def test_object_that_left_takes_no_name_from_an_earlier_one(port: int) -> None:
    async def case() -> None:
        async with index(port, "skew") as one:
            await one.announce([said("@0/x", b"replaced", mtime_ns=9)])
            await one.unlink([unlinked("@0/x", b"replaced", 9)])
            new = said("@0/x", b"new", B, mtime_ns=7)  # by a node whose clock is behind
            assert await one.announce([new]) == ["here"]
            assert await one.announce([said("@0/x", b"replaced", fresh=False, mtime_ns=9)]) == [
                "gone"
            ]
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry)
            assert found.facts == facts(b"new", 7)

    trio.run(case)


def test_server_that_forgets_the_scripts_is_told_again(port: int) -> None:
    server = redis.Redis(port=port)

    def calls(command: str) -> int:
        found: int = server.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)
        return found

    async def case() -> None:
        async with index(port, "scripts") as one:
            keys = [f"@0/{number}" for number in range(3)]
            await one.announce([said(key, b"x") for key in keys])
            told, run = calls("eval"), calls("evalsha")
            assert await one.announce([said(key, b"x") for key in keys]) == ["here"] * 3
            assert (calls("eval"), calls("evalsha")) == (told, run + 3)
            server.script_flush()
            assert await one.unlink([unlinked(key, b"x") for key in keys]) == [True] * 3
            assert await one.find(keys) == [gone(b"x")] * 3
            assert calls("eval") == told + 3

    trio.run(case)


def test_only_changed_attributes_replace_those_of_an_object(port: int) -> None:
    async def case() -> None:
        async with index(port, "attributes") as one:
            first = said("@0/x", b"x", mtime_ns=7)
            await one.announce([first])
            copy = said("@0/x", b"x", B, fresh=False, mtime_ns=8)
            other = copy._replace(facts=replace(copy.facts, mode=0o600, uid=1, gid=2))
            for wanted, facts in (
                (other, first.facts),
                (
                    other._replace(changed=True),
                    replace(first.facts, mode=0o600, uid=1, gid=2),
                ),
                (first, replace(first.facts, mode=0o600, uid=1, gid=2)),
            ):
                assert await one.announce([wanted]) == ["here"]
                (found,) = await one.find(["@0/x"])
                assert isinstance(found, PoolEntry)
                assert found.facts == facts

    trio.run(case)


def test_offers_are_few_and_each_is_taken_once(port: int) -> None:
    async def case() -> None:
        async with index(port, "offers") as one:
            offers = Offers(one)
            assert await offers.take(A, 10) == []
            keys = [f"@0/{number}" for number in range(2 * MOST)]
            await offers.offer(A, keys[:5])
            await offers.offer(A, keys[5:])
            taken = await offers.take(A, 10)
            assert len(taken) == 10
            assert 0 < redis.Redis(port=port).ttl(f"kvfs:offers:h:{A}") <= OFFER_S
            taken += await offers.take(A, 2 * MOST)
            assert len(set(taken)) == len(taken) == MOST
            assert set(keys[:5]) <= set(taken) <= set(keys)
            assert await offers.take(A, 10) == await offers.take(B, 10) == []

    trio.run(case)


def test_first_facts_stand_until_an_unlink(port: int) -> None:
    async def case() -> None:
        async with index(port, "facts") as one:
            await one.announce([said("@0/x", b"x")])
            assert await one.announce([said("@0/x", b"other", B)]) == ["conflict"]
            await one.unlink([unlinked("@0/x", b"x")])
            assert await one.find(["@0/x"]) == [gone(b"x")]
            assert await one.announce([said("@0/x", b"x", B, fresh=False)]) == ["gone"]
            assert await one.announce([said("@0/x", b"other", B)]) == ["here"]
            await one.unlink([unlinked("@0/x", b"x")])
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry), "another object has the name by now"

    trio.run(case)


def test_no_earlier_version_of_a_name_comes_back(port: int) -> None:
    """Not while a later version is there, nor after it was unlinked, or evicted by all nodes."""
    now = 1_795_849_376_278_793_001  # as a number of Lua, it is not different from the next one

    async def case() -> None:
        async with index(port, "versions") as one:
            first = said("@0/x", b"1", B, fresh=False, mtime_ns=now)
            assert await one.announce([first]) == ["here"]
            await one.unlink([unlinked("@0/x", b"1", now)])
            second = said("@0/x", b"2", mtime_ns=now + 1)
            assert await one.announce([second]) == ["here"]
            assert await one.announce([first]) == ["conflict"]
            await one.withdraw(A, ["@0/x"])
            assert await one.find(["@0/x"]) == [gone(b"1", now)]
            assert await one.announce([first]) == ["gone"]
            again = second._replace(fresh=False)
            assert await one.announce([again]) == ["here"], "it was only evicted"
            await one.unlink([unlinked("@0/x", b"2", now + 1)])
            assert await one.announce([first, again]) == ["gone"] * 2
            assert await one.find(["@0/x"]) == [gone(b"2", now + 1)]
            await one.unlink([unlinked("@0/x", b"0", now - 1)])
            assert await one.find(["@0/x"]) == [gone(b"0", now + 1)], "the latest time stays"
            assert await one.announce([first, again]) == ["gone"] * 2
            assert await one.announce([first._replace(fresh=True)]) == ["here"]
            left = redis.Redis(port=port).ttl("kvfs:versions:o:@0/x")
            assert left == -1, "it expires no more"
            await one.unlink([unlinked("@0/x", b"3", now - 2)])
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry), "it is later"
            await one.withdraw(B, ["@0/x"])
            assert await one.find(["@0/x"]) == [gone(b"3", now + 1)]
            assert 3500 < redis.Redis(port=port).ttl("kvfs:versions:o:@0/x") <= 3600

    trio.run(case)


def test_the_same_bytes_may_be_written_again(port: int) -> None:
    """Copies of the new object are as good as it is. Those of the first one are not."""

    async def case() -> None:
        async with index(port, "again") as one:
            await one.announce([said("@0/x", b"x", mtime_ns=5)])
            await one.unlink([unlinked("@0/x", b"x", 5)])
            assert await one.announce([said("@0/x", b"x", mtime_ns=9)]) == ["here"]
            await one.withdraw(A, ["@0/x"])
            first, second = (
                said("@0/x", b"x", B, fresh=False, mtime_ns=mtime_ns) for mtime_ns in (5, 9)
            )
            assert await one.announce([first]) == ["gone"]
            assert await one.announce([second]) == ["here"]

    trio.run(case)


def test_later_object_stands_after_a_loss_of_the_index(port: int) -> None:
    async def case() -> None:
        async with index(port, "later") as one:
            first = said("@0/x", b"1", B, fresh=False, mtime_ns=10)
            assert await one.announce([first]) == ["here"]
            assert await one.announce([said("@0/x", b"2", mtime_ns=11)]) == ["conflict"]
            later = said("@0/x", b"2", fresh=False, mtime_ns=11)
            assert await one.announce([later]) == ["here"]
            assert await one.announce([first]) == ["conflict"]
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry)
            assert found.facts == facts(b"2", 11)
            assert [owner.node for owner in found.owners] == [A]

    trio.run(case)


def test_greater_digest_stands_of_two_objects_with_the_same_time(port: int) -> None:
    async def case() -> None:
        less, more = sorted((b"1", b"2"), key=xxhash.xxh3_128_digest)
        for pool, order in (("less", (less, more)), ("more", (more, less))):
            async with index(port, pool) as one:
                for data, node in zip(order, (A, B), strict=True):
                    await one.announce([said("@0/x", data, node, fresh=False)])
                (found,) = await one.find(["@0/x"])
                assert isinstance(found, PoolEntry)
                assert found.facts == facts(more)

    trio.run(case)


@pytest.mark.parametrize("mtime_ns", [1, 9])
def test_object_in_conflict_gets_a_name_that_nobody_unlinked(port: int, mtime_ns: int) -> None:
    async def case() -> None:
        async with index(port, f"conflict{mtime_ns}") as one:
            first = unlinked("@0/x", b"1", 5)
            await one.announce([said("@0/x", b"1", mtime_ns=5)])
            new = said("@0/x", b"2", B, mtime_ns=mtime_ns)
            assert await one.announce([new]) == ["conflict"]
            waits = new._replace(other=first)
            assert await one.announce([waits]) == ["conflict"]
            await one.unlink([first])
            assert await one.announce([waits]) == ["gone"]
            await one.announce([said("@0/x", b"3", mtime_ns=6)])
            assert await one.announce([waits]) == ["gone"], "also while a third one has the name"
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry)
            assert found.facts == facts(b"3", 6)
            after = new._replace(other=unlinked("@0/x", b"3", 6))
            assert await one.announce([after]) == ["gone" if mtime_ns < 5 else "conflict"]
            await one.withdraw(A, ["@0/x"])
            assert await one.announce([after]) == ["gone" if mtime_ns < 5 else "here"]

    trio.run(case)


@pytest.mark.parametrize("digest", [b"1", b"2"])
def test_object_in_conflict_stays_at_an_unlink_that_is_told_again(port: int, digest: bytes) -> None:
    """The index has lost the unlink. The object may have been written after it."""

    async def case() -> None:
        async with index(port, f"told{digest.decode()}") as one:
            first = unlinked("@0/x", b"1", 5)
            await one.announce([said("@0/x", b"1", fresh=False, mtime_ns=5)])
            new = said("@0/x", b"3", B, mtime_ns=9)
            assert await one.announce([new]) == ["conflict"]
            assert await one.unlink([unlinked("@0/x", digest, 6)], again=True) == [True]
            assert await one.announce([new._replace(other=first)]) == ["here"]
            again = said("@0/x", b"1", fresh=False, mtime_ns=5)
            assert await one.announce([again]) == ["conflict"]
            await one.withdraw(B, ["@0/x"])
            assert await one.announce([again]) == ["gone"]

    trio.run(case)


def test_the_last_owner_takes_the_object_along(port: int) -> None:
    async def case() -> None:
        async with index(port, "last") as one:
            await one.announce([said("@0/x", b"x"), said("@0/x", b"x", B)])
            await one.withdraw(A, ["@0/x"])
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry)
            assert [owner.node for owner in found.owners] == [B]
            await one.withdraw(B, ["@0/x"])
            assert await one.find(["@0/x"]) == [None]
            await one.unlink([unlinked("@0/y", b"y")])
            await one.withdraw(A, ["@0/y"])
            assert await one.find(["@0/y"]) == [gone(b"y")]

    trio.run(case)


def test_leases_and_epochs(port: int) -> None:
    async def case() -> None:
        async with index(port, "lease") as one:
            lease = Lease(A, LIFE, "127.0.0.1:1", host="gpu1", mountpoint="/mnt/kv", room=5)
            assert await one.renew(lease, "first", 7.0) == "first"
            assert await one.renew(lease, "second", 8.0) == "first"
            assert await one.leases([A, B]) == [lease, None]
            assert await one.nodes() == {A: 8.0}
            assert await one.node_names() == {A: ("gpu1", "/mnt/kv")}
            redis.Redis(port=port).flushall()
            assert await one.renew(lease, "third", 9.0) == "third", "the index has lost its data"
            await one.leave(A)
            assert await one.leases([A]) == [None]
            assert await one.nodes() == {}
            assert await one.node_names() == {}

    trio.run(case)


@pytest.mark.parametrize("name", [b"", b"gpu1", b"gpu1:mnt", b":/mnt", b"gpu1:/" + b"x" * 4096])
def test_names_of_nodes_are_not_trusted(port: int, name: bytes) -> None:
    async def case() -> None:
        async with index(port, "names") as one:
            redis.Redis(port=port).hset("kvfs:names:names", A, name)
            assert await one.node_names() == {}

    trio.run(case)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kvfs-size", "-1"),
        ("kvfs-size", "9" * 30),
        ("kvfs-xxh3-128", "zz"),
        ("kvfs-format", "2"),
        ("kvfs-mode", "99999"),
        ("kvfs-size", "1" * 5000),
        ("kvfs-stored-size", "1" * 5000),
        ("kvfs-key", "8" + "0" * 15),
    ],
)
def test_what_kvfs_did_not_write_is_nothing(
    port: int, name: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def case() -> None:
        async with index(port, "lies") as one:
            await one.announce([said("@0/x", b"x")])
            redis.Redis(port=port).hset("kvfs:lies:o:@0/x", name, value)
            assert await one.find(["@0/x"]) == [None]
            assert await one.look("@0/x", "") == (None, False, (0, ""))
            redis.Redis(port=port).delete("kvfs:lies:o:@0/x")
        (said_so,) = caplog.messages
        assert "has an object that kvfs would not write, so it is a miss: @0/x: " in said_so

    trio.run(case)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"@{B}", f"{LIFE} ram ../../etc/passwd"),
        (f"@{B}", f"{LIFE} tape 1.1"),
        ("@../x", f"{LIFE} ram 1.1"),
        (f"@{B}", "life ram 1.1"),
    ],
)
def test_owners_that_kvfs_did_not_write_are_none(port: int, name: str, value: str) -> None:
    async def case() -> None:
        async with index(port, "owners") as one:
            await one.announce([said("@0/x", b"x")])
            redis.Redis(port=port).hset("kvfs:owners:o:@0/x", name, value)
            (found,) = await one.find(["@0/x"])
            assert isinstance(found, PoolEntry)
            assert [owner.node for owner in found.owners] == [A]
            redis.Redis(port=port).delete("kvfs:owners:o:@0/x")

    trio.run(case)


@pytest.mark.parametrize(
    "told", ["{", "[]", '{"incarnation": 5, "address": ""}', '{"x": 1}', "[" * 100_000]
)
def test_leases_that_kvfs_did_not_write_are_none(port: int, told: str) -> None:
    async def case() -> None:
        async with index(port, "leases") as one:
            redis.Redis(port=port).set(f"kvfs:leases:n:{A}", told)
            assert await one.leases([A]) == [None]

    trio.run(case)


def test_pool_of_another_format_is_refused(port: int) -> None:
    async def case() -> None:
        redis.Redis(port=port).set("kvfs:newer:format", "2")
        async with index(port, "newer"):
            pass

    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="has format 2.*knows 1")):
        trio.run(case)


def test_index_that_ends_and_comes_back(tmp_path: Path) -> None:
    """Questions fail at once meanwhile, and the connection comes back by itself."""
    port = free_port()

    async def case() -> None:
        with server(tmp_path / "one", port):
            async with index(port) as one:
                await one.announce([said("@0/x", b"x")])
                yield_to = one
                await ended(yield_to)
                await back(yield_to)

    async def ended(one: Index) -> None:
        redis.Redis(port=port).shutdown(nosave=True)
        with trio.fail_after(5):
            while True:
                try:
                    await one.find(["@0/x"])
                except IndexDownError:
                    return
                await trio.sleep(0.01)

    async def back(one: Index) -> None:
        with server(tmp_path / "two", port), trio.fail_after(10):
            while True:
                try:
                    assert await one.find(["@0/x"]) == [None]
                except IndexDownError:
                    await trio.sleep(0.01)
                else:
                    return

    trio.run(case)


def test_stopped_index_is_down_within_its_patience(tmp_path: Path) -> None:
    port = free_port()

    async def case(process: "subprocess.Popen[bytes]") -> None:
        async with index(port) as one:
            process.send_signal(19)
            began = trio.current_time()
            with pytest.raises(IndexDownError, match="no answer within 100 ms"):
                await one.find(["@0/x"])
            assert trio.current_time() - began < 1
            process.send_signal(18)
            with trio.fail_after(10):
                while True:
                    try:
                        assert await one.find(["@0/x"]) == [None]
                    except IndexDownError:
                        await trio.sleep(0.01)
                    else:
                        return

    with server(tmp_path, port) as process:
        trio.run(case, process)


def test_wrong_password_is_said(tmp_path: Path) -> None:
    port = free_port()

    async def case(password: str) -> None:
        async with index(port, password=password) as one:
            assert await one.find(["@0/x"]) == [None]

    with server(tmp_path, port, password="secret"):  # noqa: S106 (of this test's server)
        assert answers(port, "secret")
        trio.run(case, "secret")


def test_versions_of_namespaces_grow_until_a_drop(port: int) -> None:
    client = redis.Redis(port=port)

    async def case() -> None:
        async with index(port, "versions") as one:
            assert await one.switches(["a", "b"]) == [(0, ""), (0, "")]
            for version in (3, 2):
                await one.set_version("a", version)
            assert await one.switches(["a"]) == [(3, "")]
            await one.drop_namespace("a", "0123456789abcdef")
            assert await one.switches(["a"]) == [(0, "0123456789abcdef")]
            client.hset(f"{one.pool}v:b", mapping={"version": "-1", "dropped": "../x"})
            await one.set_version("b", 2)
            assert await one.switches(["b"]) == [(2, "")]

    trio.run(case)


def test_key_of_another_type_is_nothing_and_hides_no_other(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = redis.Redis(port=port)
    caplog.set_level(logging.WARNING)

    async def case() -> None:
        async with index(port, "types") as one:
            client.lpush("kvfs:types:nodes", "x")
            for key in ("o:@0/x", "d:@0/", "v:c"):
                client.set(f"kvfs:types:{key}", "x")
            client.lpush(f"kvfs:types:n:{A}", "x")
            wanted = [said("@0/x", b"x"), said("@0/y", b"y")]
            assert await one.announce(wanted) == ["conflict", "here"]
            assert await one.announce(wanted) == ["conflict", "here"]
            found = await one.find(["@0/x", "@0/y"])
            assert found[0] is None
            assert isinstance(found[1], PoolEntry)
            assert [held is None for held in await one.held(["@0/x", "@0/y"])] == [True, False]
            assert await one.look("@0/x", "@0/x/", "c") == (None, False, (0, ""))
            assert await one.names("@0/") == []
            assert await one.switches(["c", "d"]) == [(0, "")] * 2
            await one.set_version("c", 2)
            await one.drop_namespace("c", "0123456789abcdef")
            await one.list_names([("@0/", "y"), ("@1/", "z")])
            assert await one.names("@1/") == ["z"]
            await one.unlist_names([("@0/", "y")])
            assert await one.unlink([unlinked("@0/x", b"x")]) == [False]
            assert await one.withdraw(A, ["@0/x", "@0/y"]) == [False, True]
            assert not await one.forget_owners("@0/x", [wanted[0].owner])
            assert await one.leases([A, B]) == [None, None]
            assert await one.renew(Lease(A, LIFE, ""), "first", 7.0) == "first"
            assert await one.nodes() == {}
            assert len(await one.leases([A])) == 1
            await one.leave(A)
            client.delete("kvfs:types:epoch")
            client.lpush("kvfs:types:epoch", "x")
            with pytest.raises(IndexDownError, match="kvfs:types:epoch"):
                await one.renew(Lease(A, LIFE, ""), "first", 7.0)

    trio.run(case)
    told = [one.getMessage() for one in caplog.records if "kvfs:types:o:@0/x" in one.getMessage()]
    assert len(told) == 1, told
