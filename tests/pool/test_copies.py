"""`pool_copies=keep`: the last copy of an object goes to a node with room before it is evicted."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from kvfs import prefix
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.authority import authority
from tests.pool.servers import free_port, let_nginx_pass, server
from tests.pool.test_two_nodes import absent, announced, gets, node, port_of, read, write
from tests.semantics.test_prefixes import ROOT as PREFIX
from tests.semantics.test_prefixes import ask, chain

PIECE = 1 << 19  # bytes of an object
FITS = 32 * 2  # objects in 32 MiB
NUMBER = 100  # objects that the first node writes
SMALL = "ram=32M"
ROOT = Path(__file__).parents[2]


def small(pool: str) -> str:
    """The options of a node that has 32 MiB in all."""
    return f"{SMALL},{pool[pool.index('pool=') :]}"


def data(number: int) -> bytes:
    return number.to_bytes(4, "big") * (PIECE // 4)


def count(kv: Mounted, name: str) -> int:
    found: int = kv.status()["pool"]["counters"][name]
    return found


def is_announced(kv: Mounted) -> bool:
    return not kv.status()["pool"]["lag_s"]


def fill(kv: Mounted, names: list[str], *, handed_over: bool = False) -> None:
    """Write more objects than the node has room for; handed_over: wait for each hand-over."""
    for at, name in enumerate(names, 1):
        (kv.path / name).write_bytes(data(at))
        if not at % 4:
            wait_for(lambda: is_announced(kv), "the index knows all")
        if handed_over and not at % 4:
            # An eighth is free or elsewhere, beside a sixteenth that is free.
            least = at - FITS * 13 // 16
            wait_for(lambda: count(kv, "handed_over") >= least, f"{least} are elsewhere")  # noqa: B023


def names_of(what: str, number: int = NUMBER) -> list[str]:
    return [f"{what}{at}" for at in range(number)]


def knows_room(kv: Mounted, nodes: int) -> None:
    wait_for(lambda: kv.status()["pool"]["nodes_live"] == nodes, "it knows the other nodes")


def rooms(kv: Mounted) -> dict[str, int]:
    """The room that each live node tells, by its mount point."""
    found = request(kv.path, "pool")["nodes"]
    return {Path(one["mountpoint"]).name: one["room"] for one in found if one["live"]}


@pytest.mark.parametrize("where", ["", "ns/one/two/"])
def test_evicted_objects_are_kept_by_a_node_with_room(pool: str, mount: Mount, where: str) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    for kv in (a, b):
        request(kv.path, "ns_create", name="ns", settings={}, uid=0, gid=0)
    (a.path / where).mkdir(parents=True, exist_ok=True)
    knows_room(a, 2)
    names = [f"{where}{name}" for name in names_of("a")]
    fill(a, names, handed_over=True)
    assert a.status()["counters"]["dropped_evicted"] >= NUMBER - FITS
    assert count(b, "taken_over") >= count(a, "handed_over") >= NUMBER - FITS
    assert count(b, "fetched") == count(b, "taken_over")
    for number, name in enumerate(names, 1):
        gets(a, name, data(number))
    assert count(b, "handed_over") == count(a, "taken_over") == 0


def test_objects_that_nvme_evicts_are_kept(pool: str, mount: Mount) -> None:
    tiers = "ram=16M,nvme={tmp}/a-nvme,nvme_size=32M"
    a = node(mount, f"{small(pool).replace(SMALL, tiers)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    for kv in (a, b):
        request(kv.path, "ns_create", name="ns", settings={"write": "through"}, uid=0, gid=0)
    knows_room(a, 2)
    names = [f"ns/{name}" for name in names_of("a")]
    for at, name in enumerate(names, 1):
        (a.path / name).write_bytes(data(at))
        if not at % 4:
            a.idle()
            wait_for(lambda: count(a, "handed_over") >= at - FITS * 7 // 8, "it goes")  # noqa: B023
    assert a.status()["counters"]["dropped_evicted"] >= NUMBER - FITS
    assert b.status()["tiers"]["ram"]["objects"] == 0, "what is cold goes to NVMe"
    # The copies of these reads go to NVMe, too, and evict other objects faster than they move.
    for number, name in enumerate(names[: NUMBER - FITS], 1):
        gets(a, name, data(number))


def test_blocks_of_a_prompt_are_kept(pool: str, mount: Mount) -> None:
    """The last blocks go first. The other node has none of the blocks before them."""
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    for kv in (a, b):
        request(kv.path, "ns_create", name="ns", settings={"prefix": "on"}, uid=0, gid=0)
    (a.path / "ns" / PREFIX.hex()).mkdir()
    knows_room(a, 2)
    prompts = [chain(4, salt=1000 * salt) for salt in range(NUMBER // 4)]
    names = [
        [f"ns/{prefix.path(before, key)}" for before, key in pairwise([PREFIX, *keys])]
        for keys in prompts
    ]
    fill(a, [name for of_prompt in names for name in of_prompt], handed_over=True)
    assert a.status()["counters"]["dropped_evicted"] >= NUMBER - FITS
    for keys in prompts:
        wait_for(lambda: ask(a.path / "ns", keys).blocks == 4, "all are found")  # noqa: B023
    for at, name in enumerate([name for of_prompt in names for name in of_prompt], 1):
        gets(a, name, data(at))


def test_evicted_objects_are_misses_without_the_option(pool: str, mount: Mount) -> None:
    a, b = node(mount, small(pool), "a"), node(mount, pool, "b")
    names = names_of("a")
    fill(a, names)
    dropped = a.status()["counters"]["dropped_evicted"]
    assert dropped >= NUMBER - FITS
    assert sum(read(a.path / name) is None for name in names) == dropped
    assert count(a, "handed_over") == count(b, "taken_over") == 0
    assert set(rooms(a).values()) == {0}


def test_node_that_is_full_takes_nothing(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{small(pool)},pool_copies=keep", "b")
    own = names_of("b", FITS * 14 // 16)
    fill(b, own)
    wait_for(lambda: rooms(a) == {"a": rooms(a)["a"], "b": 0}, "it has no room")
    names = names_of("a")
    fill(a, names)
    dropped = a.status()["counters"]["dropped_evicted"]
    assert dropped >= NUMBER - FITS
    # It began with objects of the other node, which was full first.
    own_dropped = dropped - count(a, "taken_over")
    assert sum(read(a.path / name) is None for name in names) >= own_dropped
    assert count(b, "taken_over") == 0
    for number, name in enumerate(own, 1):
        assert (b.path / name).read_bytes() == data(number)
    assert b.status()["counters"]["dropped"] == 0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_node_that_does_not_answer_costs_what_is_evicted(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep,watchdog=0", "b")
    b.allow_log("the pool's index|the pool learns later of changes|nodes of the pool")
    knows_room(a, 2)
    names = names_of("a")
    with stopped(b.pid):
        fill(a, names)
        assert count(a, "handed_over") == 0
    dropped = a.status()["counters"]["dropped_evicted"]
    assert dropped >= NUMBER - FITS
    for number, name in enumerate(names, 1):
        assert read(a.path / name) in {None, data(number)}
    (a.path / "more").write_bytes(data(0))
    wait_for(lambda: count(a, "handed_over"), "it takes the next ones")


def test_node_that_cannot_read_here_gets_no_more_offers(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    """Its certificate is of another authority, and it has the most room."""
    right, other = authority(tmp_path / "right"), authority(tmp_path / "other")
    keep = "pool_copies=keep,pool_tls="
    a = node(mount, f"{small(pool)},{keep}{right}", "a")
    b = node(mount, f"{pool},{keep}{other}", "b")
    c = node(mount, f"{pool.replace('nvme_size=256M', 'nvme_size=128M')},{keep}{right}", "c")
    b.allow_log("CERTIFICATE_VERIFY_FAILED")
    knows_room(a, 3)
    names = names_of("a")
    fill(a, names, handed_over=True)
    assert count(c, "taken_over") >= NUMBER - FITS
    assert count(b, "taken_over") == 0
    for number, name in enumerate(names, 1):
        gets(a, name, data(number))


def test_node_that_dies_costs_what_it_has_taken(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    knows_room(a, 2)
    names = names_of("a")
    fill(a, names[: FITS + 8], handed_over=True)
    b.umount("--now")
    fill(a, names[FITS + 8 :])
    for number, name in enumerate(names[: FITS + 8], 1):
        assert read(a.path / name) in {None, data(number)}


def test_index_that_hangs_stops_hand_overs_only(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    for kv in (a, b):
        kv.allow_log("the pool's index is down|the pool learns later of changes")
    knows_room(a, 2)
    fill(a, names_of("a", FITS), handed_over=True)
    with stopped(redis.Redis(port=port_of(pool)).info("server")["process_id"]):
        for at in range(FITS):
            (a.path / f"more{at}").write_bytes(data(at))
        assert (a.path / f"more{FITS - 1}").read_bytes() == data(FITS - 1)
    before = count(a, "handed_over")
    (a.path / "last").write_bytes(data(0))
    wait_for(lambda: count(a, "handed_over") > before, "it hands over again")


def test_object_that_is_unlinked_meanwhile_does_not_come_back(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{pool},pool_copies=keep", "b")
    knows_room(a, 2)
    index = redis.Redis(port=port_of(pool))
    names = names_of("a", FITS * 13 // 16)
    fill(a, names)
    gone: list[str] = []

    def offered() -> set[str]:
        keys = (key for one in index.keys("kvfs:kv:h:*") for key in index.smembers(one))
        return {name for key in keys if (name := os.fsdecode(key).partition("/")[2]) in names}

    def taken() -> set[str]:
        owners = {name: index.hkeys(f"kvfs:kv:o:@0/{name}") for name in names}
        return {name for name, of in owners.items() if sum(one[:1] == b"@" for one in of) > 1}

    for at in range(30):
        (a.path / f"more{at}").write_bytes(data(at))
        # The oldest one, but two closes in quick succession may be handled in the other order.
        name = min(wait_for(lambda: offered() | taken(), "an object is offered"))
        if at % 3:
            wait_for(lambda: name not in offered(), "the other node begins to take it")  # noqa: B023
        if at % 3 == 1:
            wait_for(lambda: name in taken(), "the other node has it")  # noqa: B023
        names.remove(name)
        gone.append(name)
        (a.path / name).unlink()
    assert count(b, "taken_over") > 0
    for kv in (a, b):
        wait_for(lambda: is_announced(kv), "the index knows all")  # noqa: B023
    for name in gone:
        for kv in (a, b):
            wait_for(lambda: absent(kv.path / name), f"{name} is gone")  # noqa: B023
        assert absent(a.path / name)
        assert not index.hexists(f"kvfs:kv:o:@0/{name}", "kvfs-xxh3-128")


def test_object_that_was_taken_over_does_not_go_back(pool: str, mount: Mount) -> None:
    a = node(mount, f"{small(pool)},pool_copies=keep", "a")
    b = node(mount, f"{small(pool)},pool_copies=keep", "b")
    knows_room(a, 2)
    names = names_of("a", FITS)
    fill(a, names, handed_over=True)
    taken = count(b, "taken_over")
    assert taken >= FITS // 8
    for name in names[-FITS // 2 :]:
        (a.path / name).unlink()  # now this node has room
    wait_for(lambda: rooms(b)["a"] > 8 * PIECE, "it has room")
    # The other node has no room any more, and gives what it has taken over.
    fill(b, names_of("b", FITS * 14 // 16))
    wait_for(lambda: b.status()["counters"]["dropped_evicted"], "it gives")
    assert count(a, "taken_over") == count(b, "handed_over") == 0


def test_option_changes_while_mounted(pool: str, mount: Mount) -> None:
    a, b = node(mount, small(pool), "a"), node(mount, pool, "b")
    fill(a, names_of("a", FITS * 14 // 16))
    for kv in (b, a):
        words = [*KVFS, "set", str(kv.path), "pool_copies=keep"]
        subprocess.run(words, check=True, capture_output=True)
    wait_for(lambda: count(a, "handed_over"), "it hands over")


def test_user_of_redis_with_the_rights_in_the_manual(tmp_path: Path, mount: Mount) -> None:
    manual = (ROOT / "docs" / "pool.md").read_text()
    (words,) = re.findall(r"ACL (SETUSER kvfs .*?)```", manual, re.DOTALL)
    port = free_port()
    let_nginx_pass(tmp_path)
    with server(tmp_path / "redis", port):
        told = words.replace("NAME", "kv").replace("PASSWORD", "secret").split()
        redis.Redis(port=port).execute_command("ACL", *told)  # type: ignore[no-untyped-call]
        secret = tmp_path / "secret"
        secret.write_text("kvfs\nsecret\n")
        secret.chmod(0o600)
        both = f"pool=redis://127.0.0.1:{port}/kv,pool_credentials={secret},pool_copies=keep"
        a, b = node(mount, f"{SMALL},{both}", "a"), node(mount, f"ram=64M,{both}", "b")
        knows_room(a, 2)
        write(a, "first", b"x")
        assert announced(a) == 1
        fill(a, names_of("a", FITS), handed_over=True)
        assert count(b, "taken_over")
        b.umount("--now")
        a.umount("--now")
