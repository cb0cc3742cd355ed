"""Two mounts of one pool: an object that one of them sealed is read at the other."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from kvfs import failpoints, matching, prefix, runtime
from kvfs.control import request
from kvfs.pool.nginx import Nginx
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, alive, wait_for
from tests.pool.authority import authority
from tests.pool.servers import free_port, server, start
from tests.semantics.test_prefixes import BLOCK, ROOT, ask, chain
from tests.semantics.test_prefixes import write as write_blocks

MIB = 1 << 20
LISTED_S = 10.0  # s: without a question, repeated listings kept an object for more than 20


def node(mount: Mount, pool: str, name: str) -> Mounted:
    options = f"{pool.replace('NAME', name)},pool_address=127.0.0.1:{free_port()}"
    return mount(options, name)


def port_of(pool: str) -> int:
    """The port of the index."""
    return int(pool.partition("pool=redis://")[2].partition("/")[0].rpartition(":")[2])


def announced(kv: Mounted) -> int:
    found: int = kv.status()["pool"]["objects"]
    return found


def write(kv: Mounted, name: str, data: bytes) -> None:
    # An object that is about to be withdrawn counts until then.
    wait_for(lambda: not kv.status()["pool"]["lag_s"], "the index knows all")
    before = announced(kv)
    (kv.path / name).write_bytes(data)
    wait_for(lambda: announced(kv) > before, "it is announced")


def test_object_of_one_node_is_read_at_the_other(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    data = os.urandom(8 * MIB)
    write(a, "block", data)
    assert (b.path / "block").stat().st_size == len(data)
    gets(b, "block", data)
    assert b.status()["pool"]["counters"]["fetched"] == 1
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    a.umount()
    assert read(b.path / "block") == data


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def gets(kv: Mounted, name: str, data: bytes) -> None:
    """Read an object that another node may have: an index that takes 20 ms is a miss."""
    wait_for(lambda: read(kv.path / name) == data, f"{name} is there")


def absent(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    return False


def test_nodes_of_the_pool_are_shown(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)

    def shown() -> str:
        return subprocess.run(
            [*KVFS, "pool", b.path], check=True, capture_output=True, text=True
        ).stdout

    wait_for(lambda: re.search(r"/a +127.0.0.1:\d+ +live +1 +1.0 MiB", shown()), "a has it")
    assert re.search(r"/b \(this\) +127.0.0.1:\d+ +live +0 +0 B", shown())
    a.umount("--now")
    wait_for(lambda: "/a " not in shown(), "it has left")
    done = subprocess.run([*KVFS, "pool", "--json", b.path], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert [one["mountpoint"] for one in found["nodes"]] == [str(b.path)]


def test_lag_counts_an_object_whose_digest_takes_long(
    pool: str, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "movement.read=delay:2@1")
    a = node(mount, pool.replace("nvme={tmp}/NAME-nvme,nvme_size=256M,", ""), "a")
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a has a lease")
    (a.path / "block").write_bytes(b"x" * MIB)
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    assert announced(a) == 1


def test_same_bytes_written_again_before_a_kill_stay(
    pool: str, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "movement.read=delay:2@2")
    a = node(mount, pool.replace("nvme={tmp}/NAME-nvme,nvme_size=256M,", ""), "a")
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a has a lease")
    write(a, "block", b"x" * MIB)
    index = redis.Redis(port=port_of(pool))
    (a.path / "block").write_bytes(b"x" * MIB)
    wait_for(lambda: index.hexists("kvfs:kv:o:@0/block", "gone"), "the first one is gone")
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a new daemon serves")
    wait_for(lambda: announced(a) == 1, "it is announced")
    assert read(a.path / "block") == b"x" * MIB
    assert a.status()["pool"]["counters"]["stale"] == 0


def test_later_object_stands_if_the_index_has_an_earlier_one_instead(
    pool: str, mount: Mount
) -> None:
    a = node(mount, pool, "a")
    write(a, "block", b"later")
    a.idle()
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    key, index = "kvfs:kv:o:@0/block", redis.Redis(port=port_of(pool))
    later = index.hgetall(key)
    # As after a loss of the index, of which this node has not learned yet.
    index.hset(key, mapping=dict.fromkeys(["kvfs-xxh3-128", "kvfs-stored-xxh3-128"], "0" * 32))
    index.hset(key, "kvfs-mtime-ns", "5")

    def stands() -> bool:
        assert not absent(a.path / "block")
        return index.hget(key, "kvfs-xxh3-128") == later[b"kvfs-xxh3-128"]

    wait_for(stands, "the index has the later one again")
    assert read(a.path / "block") == b"later"


def test_names_of_directories_and_namespaces(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "one" / "two").mkdir(parents=True)
    write(a, "one/two/block", b"x" * 100)
    gets(b, "one/two/block", b"x" * 100)
    assert absent(b.path / "one" / "three")


def test_listing_shows_objects_of_both_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "one").mkdir()
    names = ["100 %", "\u00fc", *map(str, range(150))]
    for name in names:
        (a.path / "one" / name).write_bytes(name.encode())
    (b.path / "mine").write_bytes(b"")
    wait_for(lambda: announced(a) == len(names), "they are announced")
    wait_for(lambda: sorted(os.listdir(b.path)) == ["mine", "one"], "they are listed")
    wait_for(lambda: sorted(os.listdir(b.path / "one")) == sorted(names), "they are listed, too")
    for name in names:
        gets(b, f"one/{name}", name.encode())
    a.umount("--now")


def test_names_that_no_program_can_make_hide_no_others(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "dir" / "sub").mkdir(parents=True)
    write(a, "dir/sub/block", b"x")
    control, index = sorted(os.listdir(b.path / ".kvfs")), redis.Redis(port=port_of(pool))
    wrong = ["%2E%2E", "%2E", "%00", "a%2Fb", "a%00b", "a" * 256, "..", "a b", ""]
    for text in wrong:
        index.sadd("kvfs:kv:d:dir@1/", text, f"{text}/")
        index.sadd("kvfs:kv:d:@0/", text, f"{text}/")
        index.sadd(f"kvfs:kv:d:dir@1/{text}/", "x")
        index.sadd(f"kvfs:kv:d:{text}@1/", "x")
    index.sadd("kvfs:kv:d:@0/", ".kvfs/")
    index.sadd("kvfs:kv:d:.kvfs@1/", "x")
    index.sadd("kvfs:kv:d:new@1/", "x")
    index.hset("kvfs:kv:v:new", "version", 9_999_999_999)
    wait_for(lambda: not absent(b.path / "new"), "a wrong version is none")
    wait_for(lambda: sorted(os.listdir(b.path)) == ["dir", "new"], "the top is listed")
    wait_for(lambda: os.listdir(b.path / "dir") == ["sub"], "the directory is listed")
    gets(b, "dir/sub/block", b"x")
    assert sorted(os.listdir(b.path / ".kvfs")) == control


def test_new_attributes_of_an_object_reach_the_index(pool: str, mount: Mount) -> None:
    """A copy with other attributes does not revert them; no file gets set-user-id from there."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    index = redis.Redis(port=port_of(pool))

    def mode(name: str) -> bytes | None:
        found: bytes | None = index.hget(f"kvfs:kv:o:@0/{name}", "kvfs-mode")  # type: ignore[assignment]
        return found

    write(a, "block", b"x")
    write(a, "tool", b"y")
    write(a, "known", b"z")
    wait_for(lambda: not absent(b.path / "known"), "it is known")
    (a.path / "known").chmod(0o600)
    wait_for(
        lambda: not absent(b.path / "known") and (b.path / "known").stat().st_mode & 0o777 == 0o600,
        "a name that is only elsewhere follows",
    )
    assert mode("block") == b"0644"
    (a.path / "block").chmod(0o600)
    os.chown(a.path / "block", 12, 34)
    (a.path / "tool").chmod(0o6755)
    wait_for(lambda: (mode("block"), mode("tool")) == (b"0600", b"6755"), "the index has them")
    wait_for(lambda: index.hget("kvfs:kv:o:@0/block", "kvfs-gid") == b"34", "and the owner")
    wait_for(lambda: not absent(b.path / "block") and not absent(b.path / "tool"), "they are found")
    found = (b.path / "block").stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o600, 12, 34)
    assert (b.path / "tool").stat().st_mode & 0o7777 == 0o755
    gets(b, "block", b"x")
    gets(b, "tool", b"y")
    wait_for(lambda: announced(b) == 2, "the copies are announced")
    assert (mode("block"), mode("tool")) == (b"0600", b"6755")
    (b.path / "block").chmod(0o640)
    wait_for(lambda: mode("block") == b"0640", "the other node changes them, too")
    os.utime(a.path / "block")
    wait_for(lambda: not a.status()["pool"]["lag_s"], "it is announced again")
    assert mode("block") == b"0640"


def test_unlinked_object_is_gone_everywhere(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    (a.path / "block").unlink()
    wait_for(lambda: absent(b.path / "block"), "the other node lets its copy go")


def test_name_that_was_only_looked_up_goes_with_its_object(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    (a.path / "block").unlink()
    wait_for(lambda: absent(b.path / "block"), "the other node forgets the name")
    assert b.status()["pool"]["counters"]["unlinked"] == 0


def test_rewritten_object_has_its_new_bytes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    (a.path / "block").write_bytes(b"new")
    wait_for(lambda: a.status()["pool"]["counters"]["unlinked"] > 0, "the old one is unlinked")
    wait_for(lambda: announced(a) == 1, "the new one is announced")
    wait_for(lambda: read(b.path / "block") == b"new", "the other node gets the new bytes")


@pytest.mark.parametrize("how", ["copy", "looked up", "own"])
def test_listings_do_not_keep_an_unlinked_object(pool: str, mount: Mount, how: str) -> None:
    """Each listing gives the kernel the names, with the time for which they are valid."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(b if how == "own" else a, "block", b"x")
    if how != "looked up":
        other = a if how == "own" else b
        gets(other, "block", b"x")
        wait_for(lambda: announced(other) == 1, "the copy is announced")
    wait_for(lambda: "block" in os.listdir(b.path), "it is listed")
    (a.path / "block").unlink()

    def gone() -> bool:
        with os.scandir(b.path) as found:
            list(found)
        return absent(b.path / "block")

    wait_for(gone, "it is gone", seconds=LISTED_S)


def test_listings_do_not_keep_a_rewritten_object(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    (a.path / "block").write_bytes(b"new")

    def new() -> bool:
        os.listdir(b.path)
        return read(b.path / "block") == b"new"

    wait_for(new, "it has its new bytes", seconds=LISTED_S)


def test_listings_alone_lose_unlinked_names(pool: str, mount: Mount) -> None:
    """More of them than the questions that lookups may have under way."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "many").mkdir()
    names = [f"{number} %" for number in range(200)]
    for name in [*names, "stays"]:
        (a.path / "many" / name).write_bytes(name.encode())
    wait_for(lambda: announced(a) == len(names) + 1, "they are announced")
    gets(b, "many/stays", b"stays")
    for name in names[:100]:
        gets(b, f"many/{name}", name.encode())
    wait_for(lambda: len(os.listdir(b.path / "many")) == len(names) + 1, "they are listed")
    for name in names:
        (a.path / "many" / name).unlink()
    wait_for(lambda: os.listdir(b.path / "many") == ["stays"], "they go", seconds=2 * LISTED_S)
    assert read(b.path / "many" / "stays") == b"stays"


def test_renamed_directory_takes_its_objects_along(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "old" / "below").mkdir(parents=True)
    write(a, "old/below/block", b"x")
    wait_for(lambda: not absent(b.path / "old"), "it is found")
    (a.path / "old").rename(a.path / "new")
    wait_for(lambda: read(b.path / "new" / "below" / "block") == b"x", "it has its new name")
    assert absent(b.path / "old" / "below" / "block")


def test_renamed_object_has_its_new_name(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    (a.path / "block").rename(a.path / "other")
    wait_for(lambda: read(b.path / "other") == b"x", "it has its new name")
    assert absent(b.path / "block")


def test_object_renamed_at_another_node_loses_its_old_name(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    (b.path / "block").rename(b.path / "other")
    wait_for(lambda: absent(a.path / "block"), "the first node lets the old name go")
    wait_for(lambda: read(a.path / "other") == b"x", "it has the new name")


def test_copy_to_nvme_does_not_bring_an_unlinked_name_back(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    names = [f"{number}" for number in range(20)]
    for name in names:
        write(a, name, os.urandom(MIB))
    for name in names:
        wait_for(partial(read, b.path / name), "it is there")
        (b.path / name).unlink()
        assert absent(b.path / name)
    a.idle()
    wait_for(lambda: all(absent(a.path / name) for name in names), "the first node learns it")
    assert b.status()["pool"]["counters"]["unlinked"] == len(names)


def test_object_keeps_its_name_after_a_rename_there_and_back(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    index = redis.Redis(port=port_of(pool))
    for old, new in (("block", "other"), ("other", "block")):
        (b.path / old).rename(b.path / new)
        key = f"kvfs:kv:o:@0/{new}"
        wait_for(partial(index.hexists, key, "kvfs-xxh3-128"), "it is announced")
    assert read(b.path / "block") == b"x"


def test_remote_name_that_is_forgotten_stays_in_the_pool(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", os.urandom(MIB))
    a.idle()
    aside = {path: path.with_name("aside") for path in backing(a, "block")}
    for path, to in aside.items():
        path.rename(to)
    assert read(b.path / "block") is None
    for path, to in aside.items():
        to.rename(path)
    (b.path / "other").write_bytes(b"x")
    wait_for(lambda: announced(b) == 1, "the index has been told of all changes")
    assert b.status()["pool"]["counters"]["unlinked"] == 0
    wait_for(lambda: read(b.path / "block") is not None, "the first node still has it")


def test_evicted_object_stays_with_the_other(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    gets(b, "block", b"x" * MIB)
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    subprocess.run([*KVFS, "evict", "--drop", a.path / "block"], check=True, capture_output=True)
    wait_for(lambda: announced(a) == 0, "it is withdrawn")
    gets(a, "block", b"x" * MIB)
    assert a.status()["pool"]["counters"]["fetched"] == 1


def test_killed_daemon_costs_no_miss(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    before = a.status()["pool"]["node"]
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"], "a new daemon serves")
    assert a.status()["pool"]["node"] == before == a.status()["identity"]
    gets(b, "block", b"x" * MIB)


def test_index_that_lost_its_data_is_filled_again(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    index = redis.Redis(port=port_of(pool))
    index.flushall()
    wait_for(lambda: index.exists("kvfs:kv:o:@0/block"), "it is announced again")
    wait_for(lambda: not absent(b.path / "block"), "the lease is there again")
    gets(b, "block", b"x" * MIB)


def backing(kv: Mounted, name: str) -> list[Path]:
    """The files of an object, in all tiers."""
    ino = (kv.path / name).stat().st_ino
    roots = [Path(kv.status()["tiers"][tier]["path"]) for tier in ("ram", "nvme")]
    return [one for root in roots for one in root.glob(f"objects/{ino % 256:02x}/{ino:x}.*")]


def test_wrong_bytes_of_a_peer_are_a_miss(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.idle()
    for path in backing(a, "block"):
        with path.open("r+b") as file:
            file.seek(1000)
            file.write(b"y")
    assert read(b.path / "block") is None
    assert b.status()["pool"]["counters"]["failed"] == 1
    assert b.status()["pool"]["counters"]["unlinked"] == 0
    (b.path / "block").write_bytes(b"mine")
    assert read(b.path / "block") == b"mine"


def test_both_nodes_have_what_both_have_written(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        (kv.path / "new").write_bytes(b"x" * MIB)
        (kv.path / "new").rename(kv.path / "block")
        wait_for(lambda at=kv: announced(at) == 1, "it is announced")  # type: ignore[misc]
    index = redis.Redis(port=port_of(pool))

    def owners() -> int:
        assert read(a.path / "block") in {None, b"x" * MIB}  # each lookup compares
        (key,) = index.keys("kvfs:kv:o:*/block") or [b""]
        return sum(str(name).startswith("b'@") for name in index.hgetall(key))

    wait_for(lambda: owners() == 2, "each of them gives it")


def in_conflict(pool: str, a: Mounted, b: Mounted) -> None:
    """Write `block` at both nodes; that of a is announced first."""
    index = redis.Redis(port=port_of(pool))
    write(a, "block", b"of a")
    a.idle()  # a node announces an object again after its copy to NVMe
    wait_for(lambda: not a.status()["pool"]["lag_s"], "all is announced")
    index.rename("kvfs:kv:o:@0/block", "aside")  # so that b does not find it
    wait_for(lambda: absent(b.path / "block"), "it is not found")
    with (b.path / "block").open("wb") as file:
        file.write(b"of b")
        index.rename("aside", "kvfs:kv:o:@0/block")
    wait_for(lambda: b.status()["pool"]["counters"]["conflicts"] == 1, "b notices")


def test_first_object_of_a_name_stands(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    c = node(mount, pool, "c")
    in_conflict(pool, a, b)
    assert read(b.path / "block") == b"of b"
    gets(c, "block", b"of a")


@pytest.mark.parametrize("how", ["rewrite", "replace", "unlink"])
def test_change_of_an_object_in_conflict_is_for_all_nodes(
    pool: str, mount: Mount, how: str
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    in_conflict(pool, a, b)
    block, other = b.path / "block", b.path / "other"
    if how == "unlink":
        block.unlink()
        assert absent(block)
        wait_for(lambda: absent(a.path / "block"), "a lets it go")
        assert absent(block)
        return
    if how == "rewrite":
        block.write_bytes(b"new of b")
    else:
        other.write_bytes(b"new of b")
        other.rename(block)

    def is_new() -> bool:
        try:
            return (a.path / "block").stat().st_size == len(b"new of b")
        except FileNotFoundError:
            return False

    wait_for(is_new, "a lets its own go")
    gets(a, "block", b"new of b")
    assert read(block) == b"new of b"


def test_unlinked_name_does_not_come_back_with_a_new_index(pool: str, mount: Mount) -> None:
    """The other node has a copy, and announces it again; it may be the first to do so."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    (a.path / "block").unlink()
    wait_for(lambda: not announced(a), "the index knows it")
    index = redis.Redis(port=port_of(pool))
    index.flushall()
    wait_for(lambda: index.exists("kvfs:kv:o:@0/block"), "some node tells of it")
    wait_for(lambda: absent(b.path / "block"), "b lets it go")
    assert absent(a.path / "block")
    a.allow_log("the pool's index")
    b.allow_log("the pool's index")


def test_same_bytes_written_again_are_found_at_the_other(pool: str, mount: Mount) -> None:
    """The node that unlinked the first object has evicted the second."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x")
    (a.path / "block").unlink()
    wait_for(lambda: not announced(a), "the index knows it")
    write(a, "block", b"x")
    gets(b, "block", b"x")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    request(a.path, "evict", inos=[(a.path / "block").stat().st_ino], drop=True)
    gets(a, "block", b"x")


def test_earlier_version_does_not_come_back_with_a_new_index(pool: str, mount: Mount) -> None:
    """The other node has a copy of the first version. The second one is evicted everywhere."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"first")
    gets(b, "block", b"first")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    (a.path / "block").write_bytes(b"second")
    index = redis.Redis(port=port_of(pool))
    key, mark = "kvfs:kv:o:@0/block", "gone"
    wait_for(lambda: index.hget(key, "kvfs-size") == b"6", "the second version is announced")
    ino = (a.path / "block").stat().st_ino

    def evicted() -> bool:
        request(a.path, "evict", inos=[ino], drop=True)  # it stays while a mover has it
        return bool(index.hkeys(key) == [mark.encode()])

    wait_for(evicted, "no node has it any more")
    assert absent(a.path / "block")
    for kv in (a, b):
        kv.allow_log("the pool's index")
    index.flushall()
    wait_for(lambda: index.hget(key, mark), "a tells again of what it has replaced")
    wait_for(lambda: absent(b.path / "block"), "b lets its copy go")
    assert absent(a.path / "block")


def test_unlinked_name_does_not_come_back_after_a_kill(pool: str, mount: Mount) -> None:
    """The daemon dies before the index knows of the unlink, and the index loses its data."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for name in ("block", "other", "moved", "kept"):
        write(a, name, name.encode())
        gets(b, name, name.encode())
    wait_for(lambda: announced(b) == 4, "the copies are announced")
    index = redis.Redis(port=port_of(pool))
    for kv in (a, b):
        kv.allow_log("the pool's index")
        kv.allow_log("the pool learns later")
    index.client_pause(1500, all=True)  # ms
    (a.path / "block").unlink()
    (a.path / "other").write_bytes(b"a new version")
    (a.path / "moved").rename(a.path / "elsewhere")
    request(a.path, "evict", inos=[(a.path / "kept").stat().st_ino], drop=True)
    a.kill_daemon()
    ino = (a.path / "other").stat().st_ino
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    index.flushall()

    def evicted() -> bool:
        request(a.path, "evict", inos=[ino], drop=True)
        return bool(index.hkeys("kvfs:kv:o:@0/other") == [b"gone"])

    wait_for(evicted, "no node has it any more")
    for name in ("block", "other", "moved"):
        assert absent(a.path / name)
        wait_for(partial(absent, b.path / name), "b lets its copy go")
        assert absent(a.path / name)
    gets(b, "elsewhere", b"moved")
    gets(a, "kept", b"kept")  # only kvfs dropped it


def test_earlier_version_is_not_seen_after_a_later_one_was_dropped(pool: str, mount: Mount) -> None:
    """The node could not know that the other one has the first version."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        kv.allow_log("the pool's index")
        kv.allow_log("the pool learns later")
    write(a, "block", b"first")
    gets(b, "block", b"first")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    drop(a, "block")
    index = redis.Redis(port=port_of(pool))
    index.client_pause(1000, all=True)  # ms
    assert read(a.path / "block") is None
    (a.path / "block").write_bytes(b"second")
    wait_for(lambda: a.status()["pool"]["counters"]["conflicts"] == 1, "the index has another")
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    a.idle()
    drop(a, "block")
    assert read(a.path / "block") is None
    a.kill_daemon()
    wait_for(lambda: a.status()["pool"]["index"]["up"], "a new daemon serves")
    assert read(a.path / "block") is None
    assert read(b.path / "block") == b"first"


def drop(kv: Mounted, name: str) -> None:
    """Evict an object from a node, once no mover has it."""
    ino, files = (kv.path / name).stat().st_ino, backing(kv, name)

    def gone() -> bool:
        request(kv.path, "evict", inos=[ino], drop=True)
        return not any(file.exists() for file in files)

    wait_for(gone, f"{name} is dropped")


def test_index_that_hangs_costs_misses_only(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        kv.allow_log("the pool's index is down|the pool learns later of changes")
    write(a, "block", b"x" * MIB)
    write(b, "here", b"y" * MIB)
    index = redis.Redis(port=port_of(pool))
    pid = index.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert absent(b.path / "block")
        for number in range(20):
            assert read(b.path / "here") == b"y" * MIB
            (b.path / f"{number}").write_bytes(b"z")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "the index answers again")
    wait_for(lambda: read(a.path / "19") == b"z", "what was written meanwhile is announced")


def test_peer_that_hangs_is_a_miss_within_the_wait(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, f"{pool},pool_wait=1", "b")
    write(a, "block", b"x" * MIB)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    folder = runtime.runtime_dir(a.path) / "nginx"
    workers = Nginx(folder).pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert read(b.path / "block") is None
        assert time.monotonic() - began < 5
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "the peer answers again")


def test_writer_takes_no_name_from_a_node_that_hangs(pool: str, mount: Mount) -> None:
    """The node of the object would lose it."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    workers = Nginx(runtime.runtime_dir(a.path) / "nginx").pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(FileNotFoundError):
            os.open(b.path / "block", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        # Now b leaves the node alone, and the name is free there.
        (b.path / "block").write_bytes(b"of b")
        wait_for(lambda: b.status()["pool"]["counters"]["conflicts"], "b learns of the object")
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not b.status()["pool"]["lag_s"], "the index knows all")
    c = node(mount, pool, "c")
    gets(c, "block", b"x" * MIB)
    assert (read(a.path / "block"), read(b.path / "block")) == (b"x" * MIB, b"of b")
    for kv in (a, c):
        kv.umount("--now")
    wait_for(lambda: announced(b) == 1, "b gets the name")


@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_names_of_other_nodes_are_no_misses_after_a_takeover(
    pool: str, mount: Mount, how: str
) -> None:
    """The new daemon connects to the index while programs ask for names."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    names = [f"block-{number}" for number in range(20)]
    for name in names:
        write(a, name, name.encode())
    if how == "kill":
        b.kill_daemon()
    else:
        subprocess.run([*KVFS, "upgrade", b.path], check=True, capture_output=True)
    found = [read(b.path / name) for name in names]
    assert set(found) <= {None, *(name.encode() for name in names)}
    assert found.count(None) <= 2, "only a connection that takes 100 ms costs a miss"


@pytest.mark.parametrize("known", [False, True])
def test_writer_of_a_name_that_another_node_unlinks_makes_a_file(
    pool: str, mount: Mount, *, known: bool
) -> None:
    """The kernel may know the name yet."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    index = redis.Redis(port=port_of(pool))
    for number in range(8):
        name = f"block{number}"
        write(a, name, b"x" * MIB)
        if known:
            wait_for(partial(Path.exists, b.path / name), "it is found")
        (a.path / name).unlink()
        key = f"kvfs:kv:o:@0/{name}"
        wait_for(partial(index.hexists, key, "gone"), "the index knows it")
        opened = os.open(b.path / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(opened, b"new")
        os.close(opened)
        assert read(b.path / name) == b"new"


def test_opens_that_wait_for_one_object_wait_together(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, f"{pool},pool_wait=2", "b")
    c = node(mount, pool, "c")
    write(a, "block", b"x" * MIB)
    gets(c, "block", b"x" * MIB)
    wait_for(lambda: announced(c) == 1, "the copy is announced")
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    workers = [pid for kv in (a, c) for pid in Nginx(runtime.runtime_dir(kv.path) / "nginx").pids]
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(read, [b.path / "block"] * 4)) == [None] * 4
        assert time.monotonic() - began < 3  # two owners: 4 s, if each open had its own wait
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def test_next_owner_is_asked_while_an_open_waits_for_one_that_hangs(
    pool: str, mount: Mount
) -> None:
    a, b, c = (node(mount, pool, name) for name in "abc")
    names = [f"block{number}" for number in range(8)]  # each node is asked first for some
    for name in names:
        write(a, name, name.encode())
        gets(c, name, name.encode())
    wait_for(lambda: announced(c) == len(names), "the copies are announced")
    assert not any(absent(b.path / name) for name in names)
    workers = Nginx(runtime.runtime_dir(a.path) / "nginx").pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert [read(b.path / name) for name in names] == [name.encode() for name in names]
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def test_node_that_leaves_is_not_asked(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.umount()
    assert read(b.path / "block") is None
    a.mount()
    wait_for(lambda: read(b.path / "block") == b"x" * MIB, "it is announced from nvme")


def test_remote_names_end_with_the_mount(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    b.umount("--now")
    a.umount("--now")
    b.mount()
    b.idle()
    assert os.listdir(b.path) == []
    b.check_accounts()


def test_daemon_that_takes_over_fetches_what_its_predecessor_found(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    with os.fdopen(os.open(b.path / "block", os.O_PATH)) as held:
        b.kill_daemon()
        wait_for(lambda: b.status()["pool"]["index"]["up"], "a new daemon serves")
        path = f"/proc/self/fd/{held.fileno()}"
        wait_for(lambda: read(Path(path)) == b"x" * MIB, "it is fetched")


def test_copies_of_other_nodes_go_before_own_objects(pool: str, mount: Mount) -> None:
    a = node(mount, pool, "a")
    own_ram = pool.replace("ram=64M,nvme={tmp}/NAME-nvme,nvme_size=256M", "ram=32M")
    b = node(mount, own_ram, "b")
    for number in range(40):
        write(a, f"a{number}", bytes([number]) * MIB)
    for number in range(16):
        write(b, f"b{number}", bytes([number]) * MIB)
    for number in range(40):
        gets(b, f"a{number}", bytes([number]) * MIB)
    assert b.status()["pool"]["counters"]["fetched"] >= 40
    a.umount("--now")  # from now on b has what it has
    for number in range(16):
        assert (b.path / f"b{number}").read_bytes() == bytes([number]) * MIB


def test_blocks_of_other_nodes_count_in_matches(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    keys = chain(200)
    for kv in (a, b):
        request(kv.path, "ns_create", name="blocks", settings={"prefix": "on"}, uid=0, gid=0)
        (kv.path / "blocks" / ROOT.hex()).mkdir()
    write_blocks(a.path / "blocks", keys)
    write_blocks(b.path / "blocks", keys[:3])
    wait_for(lambda: announced(a) == 200, "they are announced")
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 200, "the index answers in time")
    found = ask(b.path / "blocks", [*keys, bytes(16)])
    assert (found.blocks, found.ram + found.nvme, found.bucket) == (200, 3 * BLOCK, 197 * BLOCK)
    assert found.tiers[3:] == bytes([matching.BUCKET]) * 197
    assert found.sizes == (BLOCK,) * 200
    for before, key in pairwise([ROOT, *keys[:20]]):
        gets(b, f"blocks/{prefix.path(before, key)}", key * (BLOCK // len(key)))
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 200, "the index answers in time")
    assert (found := ask(b.path / "blocks", keys)).ram + found.nvme >= 20 * BLOCK
    a.umount("--now")

    def has_own_only() -> bool:
        found = ask(b.path / "blocks", keys)
        return found.blocks * BLOCK == found.ram + found.nvme >= 20 * BLOCK

    wait_for(has_own_only, "only its own are left")


def test_match_counts_own_blocks_behind_those_of_other_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    keys = chain(20)
    for kv in (a, b):
        request(kv.path, "ns_create", name="blocks", settings={"prefix": "on"}, uid=0, gid=0)
        (kv.path / "blocks" / ROOT.hex()).mkdir()
    write_blocks(a.path / "blocks", keys[:10])
    (b.path / "blocks" / keys[9].hex()).mkdir()
    write_blocks(b.path / "blocks", keys[10:], keys[9])
    wait_for(lambda: announced(a) + announced(b) == 20, "they are announced")
    wait_for(lambda: ask(a.path / "blocks", keys).blocks == 20, "a has the first ones")
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 20, "b has the others")


def fetched(kv: Mounted) -> int:
    found: int = kv.status()["pool"]["counters"]["fetched"]
    return found


def test_next_blocks_of_a_matched_prompt_come_ahead(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    keys = chain(60)
    for kv in (a, b):
        request(kv.path, "ns_create", name="blocks", settings={"prefix": "on"}, uid=0, gid=0)
        (kv.path / "blocks" / ROOT.hex()).mkdir()
    write_blocks(a.path / "blocks", keys)
    wait_for(lambda: announced(a) == 60, "they are announced")
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 60, "b finds all")
    for above, key in pairwise([ROOT, *keys]):
        path = b.path / "blocks" / prefix.path(above, key)
        wait_for(lambda at=path: read(at) is not None, "it is fetched")  # type: ignore[misc]
        assert path.read_bytes() == key * (BLOCK // len(key))
    counters = b.status()["pool"]["counters"]
    assert counters["fetched"] == 60
    assert 0 < counters["prefetch_used"] <= counters["prefetched"] < 60


def test_next_files_come_ahead_in_the_order_of_their_lookups(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    names = [f"m@1@0@{number * 7919:032x}@bfloat16.data" for number in range(12)]
    for name in names:
        write(a, name, name.encode())
    for name in names:
        wait_for(lambda at=b.path / name: not absent(at), "b knows it")  # type: ignore[misc]
    for name in names[:2]:
        assert (b.path / name).read_bytes() == name.encode()
    wait_for(lambda: fetched(b) >= 6, "four more come ahead")
    for name in names:
        assert (b.path / name).read_bytes() == name.encode()
    assert b.status()["pool"]["counters"]["prefetch_used"] > 0


def test_match_forgets_a_block_whose_node_has_left(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    keys = chain(5)
    for kv in (a, b):
        request(kv.path, "ns_create", name="blocks", settings={"prefix": "on"}, uid=0, gid=0)
        (kv.path / "blocks" / ROOT.hex()).mkdir()
    write_blocks(a.path / "blocks", keys)
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 5, "b finds all")
    paths = [b.path / "blocks" / prefix.path(*pair) for pair in pairwise([ROOT, *keys])]
    for path in paths:
        wait_for(lambda at=path: not absent(at), "b knows it")  # type: ignore[misc]
    a.umount("--now")
    wait_for(lambda: all(read(path) is None for path in paths), "nobody gives them")
    wait_for(lambda: ask(b.path / "blocks", keys).blocks == 0, "b knows none")


def make_namespace(kv: Mounted, **settings: str) -> None:
    request(kv.path, "ns_create", name="ns", settings=settings, uid=0, gid=0)


def change_namespace(kv: Mounted, setting: str, value: str) -> None:
    os.setxattr(kv.path / "ns", f"user.kvfs.{setting}", value.encode())


def test_directory_renamed_again_and_again_is_in_one_place(pool: str, mount: Mount) -> None:
    """Renames come while the index learns of earlier ones."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    (a.path / "top" / "0" / "below").mkdir(parents=True)
    names = ["one", "two", *(f"below/{number}" for number in range(20))]
    for name in names:
        (a.path / "top" / "0" / name).write_bytes(name.encode())
    wait_for(lambda: announced(a) == len(names), "all are announced")
    for number in range(300):
        old, new = (f"top/{one % 4}" for one in (number, number + 1))
        (a.path / old).rename(a.path / new)
        name = names[number % len(names)]
        assert read(a.path / new / name) == name.encode()
        read(b.path / old / name)
    index = redis.Redis(port=port_of(pool), decode_responses=True)
    last = a.path / "top" / "0"
    keys = sorted(f"kvfs:kv:o:top@1/0/{name}" for name in names)

    def owned() -> list[str]:
        found = [str(key) for key in index.keys("kvfs:kv:o:*")]
        return sorted(key for key in found if index.hkeys(key) != ["gone"])

    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    wait_for(lambda: owned() == keys, "they are in one place")
    for name in names:
        assert read(last / name) == name.encode()
        gets(b, f"top/0/{name}", name.encode())


def test_namespace_with_pool_off_is_in_no_index(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a, pool="off")
    make_namespace(b)
    (a.path / "ns" / "of a").write_bytes(b"a")
    write(b, "ns/of b", b"b")
    write(a, "other", b"x")  # after this, `of a` would be announced
    assert announced(a) == 1
    assert not redis.Redis(port=port_of(pool)).keys("*of a")
    assert absent(b.path / "ns" / "of a")
    assert absent(a.path / "ns" / "of b")
    assert os.listdir(a.path / "ns") == ["of a"]
    assert a.status()["pool"]["counters"]["found"] == 0


def test_namespace_that_leaves_the_pool_is_withdrawn(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        make_namespace(kv)
    names = [f"ns/{number}" for number in range(5)]
    for name in names:
        write(a, name, name.encode())
    gets(b, names[0], names[0].encode())
    wait_for(lambda: not absent(b.path / names[1]), "a remote name is known")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    change_namespace(a, "pool", "off")
    wait_for(lambda: announced(a) == 0, "they are withdrawn")
    assert read(b.path / names[0]) == names[0].encode()
    wait_for(lambda: all(absent(b.path / name) for name in names[1:]), "the others are misses")
    (a.path / names[0]).unlink()
    write(a, "other", b"x")
    assert read(b.path / names[0]) == names[0].encode()
    assert absent(a.path / names[0])
    change_namespace(a, "pool", "on")
    wait_for(lambda: announced(a) == len(names), "they are announced again, with the other one")
    for name in names[1:]:
        gets(b, name, name.encode())
    gets(a, names[0], names[0].encode())


def test_remote_names_go_when_a_namespace_leaves_the_pool(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        make_namespace(kv)
    write(a, "ns/block", b"x")
    wait_for(lambda: not absent(b.path / "ns" / "block"), "the name is known")
    change_namespace(b, "pool", "off")
    wait_for(lambda: absent(b.path / "ns" / "block"), "the name is forgotten")
    assert os.listdir(b.path / "ns") == []
    assert b.status()["pool"]["counters"]["unlinked"] == 0


def test_node_comes_again_beside_the_nginx_of_its_killed_daemon(pool: str, mount: Mount) -> None:
    """The nginx of the killed daemon has the address of the node still."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    a.kill()
    a.expect_log("the last session did not end properly")
    a.mount()
    wait_for(lambda: announced(a) == 1, "it is announced again")
    assert (b.path / "block").read_bytes() == b"x" * MIB


def test_umount_of_a_killed_mount_ends_its_nginx(pool: str, mount: Mount) -> None:
    """The memory of RAM stays for the next mount; `--now` gives it up."""
    a = node(mount, pool, "a")
    write(a, "block", b"x" * MIB)
    memory = Path(a.status()["tiers"]["ram"]["path"])
    servers = Nginx(runtime.runtime_dir(a.path) / "nginx").pids
    assert servers
    a.kill(unmount=False)
    said = a.umount()
    wait_for(lambda: not any(map(alive, servers)), "its nginx ends")
    assert f"{memory} stays" in said
    a.mount()
    assert (a.path / "block").read_bytes() == b"x" * MIB
    a.expect_log("the last session did not end properly")
    a.kill(unmount=False)
    a.umount("--now")
    assert not memory.exists()
    assert not runtime.runtime_dir(a.path).exists()


@pytest.mark.parametrize("change", ["without a pool", "refused"])
def test_next_mount_ends_the_nginx_of_a_killed_mount(pool: str, mount: Mount, change: str) -> None:
    """Also a mount that is refused: it removes the file that names the process."""
    a = node(mount, pool, "a")
    folder = runtime.runtime_dir(a.path) / "nginx"
    servers = Nginx(folder).pids
    assert servers
    a.kill()
    options = a.options.partition(",pool=")[0]
    if change == "refused":
        options = f"{a.options.partition(',pool_address=')[0]},pool_address=192.0.2.1"
    words = [*KVFS, "mount", str(a.path), "-o", f"{options},log={a.log}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if change == "refused" else 0), done.stderr
    assert change != "refused" or "192.0.2.1" in done.stderr
    wait_for(lambda: not any(map(alive, servers)), "the old nginx ends")
    a.allow_log("the last session did not end properly")
    if change != "refused":
        a.umount()


def test_reader_of_an_object_unlinked_at_another_node_survives_a_kill(
    pool: str, mount: Mount
) -> None:
    """The daemon serves it, so the next daemon has to open its file again."""
    a, b = (node(mount, f"{pool},passthrough=off", name) for name in "ab")
    write(a, "block", b"x" * MIB)
    assert (b.path / "block").read_bytes() == b"x" * MIB
    with (b.path / "block").open("rb", buffering=0) as reader:
        (a.path / "block").unlink()
        wait_for(lambda: not (b.path / "block").exists(), "the other node has dropped it")
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        b.kill_daemon()
        assert reader.read(2 * MIB) == b"x" * MIB
    b.check_gauges()
    wait_for(lambda: not b.idle()["objects"], "it goes with its last close")
    b.check_accounts()


def test_version_of_a_namespace_is_for_all_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        make_namespace(kv)
    write(a, "ns/block", b"old")
    gets(b, "ns/block", b"old")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    change_namespace(a, "version", "3")
    assert absent(a.path / "ns" / "block")
    wait_for(lambda: os.getxattr(b.path / "ns", "user.kvfs.version") == b"3", "b follows")
    assert absent(b.path / "ns" / "block")
    wait_for(lambda: announced(a) + announced(b) == 0, "their objects are withdrawn")
    write(b, "ns/block", b"new")
    gets(a, "ns/block", b"new")
    b.umount("--now")
    change_namespace(a, "version", "4")
    index = redis.Redis(port=port_of(pool))
    wait_for(lambda: index.hget("kvfs:kv:v:ns", "version") == b"4", "the index knows it")
    b.mount()
    make_namespace_again(b)
    wait_for(lambda: os.getxattr(b.path / "ns", "user.kvfs.version") == b"4", "b follows later")


def test_namespace_of_one_node_is_a_directory_of_all(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    """Settings are for one node. They take no object away from the others."""
    templates = tmp_path / "namespaces.toml"
    templates.write_text('[namespace."tmpl*"]\nquota_hard = "30M"\n')
    a, b = node(mount, pool, "a"), node(mount, f"{pool},namespaces={templates}", "b")
    make_namespace(a, quota_hard="20M")
    write(a, "ns/block", b"x")
    gets(b, "ns/block", b"x")
    assert os.listdir(b.path) == ["ns"]
    (b.path / "plain" / "below").mkdir(parents=True)
    write(b, "plain/below/of b", b"b")
    gets(a, "plain/below/of b", b"b")
    os.setxattr(a.path / "plain", "user.kvfs.quota_hard", b"20M")
    write(a, "plain/of a", b"a")
    gets(b, "plain/of a", b"a")
    assert read(a.path / "plain" / "below" / "of b") == b"b"
    assert a.status()["pool"]["counters"]["unlinked"] == 0
    (a.path / "tmpl@1").mkdir()
    write(a, "tmpl@1/block", b"t")
    gets(b, "tmpl@1/block", b"t")
    assert os.getxattr(b.path / "tmpl@1", "user.kvfs.quota_hard") == b"30M"


def test_directory_follows_the_version_of_a_namespace(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    write(a, "ns/block", b"old")
    gets(b, "ns/block", b"old")
    change_namespace(a, "version", "2")
    wait_for(lambda: os.getxattr(b.path / "ns", "user.kvfs.version") == b"2", "b follows")
    write(a, "ns/block", b"new")
    gets(b, "ns/block", b"new")
    c = node(mount, pool, "c")
    wait_for(lambda: os.listdir(c.path) == ["ns"], "the listing shows it")
    gets(c, "ns/block", b"new")
    request(a.path, "ns_drop", name="ns")
    for kv in (b, c):
        wait_for(partial(absent, kv.path / "ns"), "all drop it")


def make_namespace_again(kv: Mounted) -> None:
    """Make the namespace, unless NVMe has kept it."""
    if absent(kv.path / "ns"):
        make_namespace(kv)


def test_drop_of_a_namespace_is_for_all_nodes(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    for kv in (a, b):
        make_namespace(kv)
    for name in ("ns/1", "ns/2"):
        write(a, name, b"old")
    gets(b, "ns/1", b"old")
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    index = redis.Redis(port=port_of(pool))
    request(a.path, "ns_drop", name="ns")
    wait_for(lambda: absent(b.path / "ns"), "b drops it, too")
    wait_for(lambda: not index.keys("kvfs:kv:o:ns@*"), "their objects are withdrawn")
    for kv in (a, b):
        make_namespace(kv)
    assert os.listdir(b.path / "ns") == []
    write(a, "ns/1", b"new")
    gets(b, "ns/1", b"new")
    b.kill_daemon()
    gets(b, "ns/1", b"new")
    assert index.hget("kvfs:kv:v:ns", "version") is None


def test_drop_reaches_a_node_that_has_just_read_for_the_first_time(pool: str, mount: Mount) -> None:
    """A directory that the index shows belongs to the time before a later drop."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    write(a, "ns/1", b"old")
    gets(b, "ns/1", b"old")
    request(a.path, "ns_drop", name="ns")
    wait_for(lambda: absent(b.path / "ns"), "b drops it, too")
    index = redis.Redis(port=port_of(pool))
    wait_for(lambda: not index.keys("kvfs:kv:o:ns@*"), "their objects are withdrawn")
    assert absent(a.path / "ns")


def test_drop_reaches_a_directory_that_a_program_has_just_made(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    for make in ((b.path / "ns").mkdir, partial(make_namespace, b)):
        make_namespace_again(a)
        wait_for(lambda: absent(b.path / "ns"), "b has none")
        make()
        (b.path / "ns" / "of b").write_bytes(b"b")
        request(a.path, "ns_drop", name="ns")
        wait_for(lambda: absent(b.path / "ns"), "b drops it, too")


@pytest.mark.parametrize("renamed", [False, True])
def test_drop_is_not_for_a_directory_that_is_made_later(
    pool: str, mount: Mount, *, renamed: bool
) -> None:
    """Not even if an earlier directory of the name was here at an earlier drop."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    index = redis.Redis(port=port_of(pool))
    make_namespace(a)
    make_namespace(b)
    request(a.path, "ns_drop", name="ns")
    wait_for(lambda: absent(b.path / "ns"), "b drops it, too")
    first = index.hget("kvfs:kv:v:ns", "dropped")
    make_namespace(a)
    request(a.path, "ns_drop", name="ns")
    wait_for(lambda: index.hget("kvfs:kv:v:ns", "dropped") != first, "the index knows it")
    made = b.path / ("other" if renamed else "ns")
    made.mkdir()
    made.rename(b.path / "ns")
    make_namespace(a, quota_hard="20M")
    change_namespace(a, "version", "2")  # b compares the name when it follows
    wait_for(lambda: has_version(b, "2"), "b follows")
    second = index.hget("kvfs:kv:v:ns", "dropped")
    request(b.path, "ns_drop", name="ns")
    wait_for(lambda: index.hget("kvfs:kv:v:ns", "dropped") != second, "the index knows it")
    wait_for(lambda: absent(a.path / "ns"), "a drops it, too")


def has_version(kv: Mounted, version: str) -> bool:
    try:
        return os.getxattr(kv.path / "ns", "user.kvfs.version") == version.encode()
    except FileNotFoundError as error:
        raise AssertionError("the directory is gone") from error


def test_drop_that_the_index_has_not_learned_of_outlives_the_mount(
    pool: str, tmp_path: Path, mount: Mount
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    make_namespace(b)
    write(b, "ns/1", b"old")
    is_down(pool, a, b)
    wait_for(lambda: not a.status()["pool"]["lag_s"], "nothing waits for the index")
    request(a.path, "ns_drop", name="ns")
    assert a.status()["pool"]["lag_s"] > 0
    a.remount(f"{a.options},pool_required=off")
    assert a.status()["pool"]["lag_s"] > 0
    with server(tmp_path / "again", port_of(pool)):
        wait_for(lambda: absent(b.path / "ns"), "b drops it, too")
        wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")


@pytest.mark.parametrize("listed", [False, True])
def test_name_whose_unlink_a_node_has_seen_does_not_come_back_there(
    pool: str, mount: Mount, *, listed: bool
) -> None:
    """The index has lost its data, and another node announces its object from before."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    index, key = redis.Redis(port=port_of(pool)), "kvfs:kv:o:@0/block"
    write(a, "block", b"old")
    a.idle()
    wait_for(lambda: not a.status()["pool"]["lag_s"], "the index knows all")
    old = index.hgetall(key)
    (a.path / "block").unlink()
    wait_for(partial(index.hexists, key, "gone"), "the index knows it")
    wait_for(partial(absent, b.path / "block"), "b knows it")
    index.delete(key)
    index.hset(key, items=[word for pair in old.items() for word in pair])
    index.sadd("kvfs:kv:d:@0/", "block")
    for _ in range(100):
        assert not listed or os.listdir(b.path) == []
        assert absent(b.path / "block")
    (b.path / "block").write_bytes(b"new")
    assert read(b.path / "block") == b"new"


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("renamed", [False, True])
def test_object_written_while_the_index_is_down_stays(
    pool: str, tmp_path: Path, mount: Mount, *, renamed: bool, seen: bool
) -> None:
    """A program had unlinked the name, and the index comes back without its data.

    Then another node that has not seen the unlink may announce the first object before.
    """
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    names = [f"block{number}" for number in range(20)]
    for name in names:
        write(a, name, b"first")
        gets(b, name, b"first")
    for name in names:
        (a.path / name).unlink()
    for name in names if seen else ():
        wait_for(partial(absent, b.path / name), "b knows it")
    is_down(pool, a, b)
    for name in names:
        path = a.path / (f"{name}.new" if renamed else name)
        path.write_bytes(name.encode())
        if renamed:
            path.rename(a.path / name)
    with server(tmp_path / "again", port_of(pool)):
        for name in names:
            gets(b, name, name.encode())
        assert [read(a.path / name) for name in names] == [name.encode() for name in names]


def is_down(pool: str, *nodes: Mounted) -> None:
    """Let the index end, and wait until these nodes know it."""
    redis.Redis(port=port_of(pool)).shutdown(nosave=True)
    for one in nodes:
        one.expect_log("the pool's index is down")
        one.allow_log("the pool learns later of changes here")
        wait_for(partial(sees_no_index, one), "the index is down")


def sees_no_index(kv: Mounted) -> bool:
    return not kv.status()["pool"]["index"]["up"]


@pytest.mark.parametrize("renamed", [False, True])
def test_later_drop_is_for_a_directory_that_is_made_while_the_index_is_down(
    pool: str, tmp_path: Path, mount: Mount, *, renamed: bool
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    is_down(pool, a, b)
    made = b.path / ("other" if renamed else "ns")
    made.mkdir()
    made.rename(b.path / "ns")
    request(a.path, "ns_drop", name="ns")
    (a.path / "ns").mkdir()
    with server(tmp_path / "again", port_of(pool)):
        wait_for(lambda: absent(b.path / "ns"), "b drops it, too")
        assert not absent(a.path / "ns")


def test_object_from_before_a_drop_stays_hidden(pool: str, mount: Mount) -> None:
    """Its node hangs, so the index still has it."""
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a)
    write(b, "ns2", b"x")
    gets(a, "ns2", b"x")  # a knows that b lives
    (b.path / "ns").mkdir(exist_ok=True)
    write(b, "ns/1", b"old")
    gets(a, "ns/1", b"old")
    index = redis.Redis(port=port_of(pool))
    key = "kvfs:kv:o:ns@1/1"
    old = index.hgetall(key)
    request(a.path, "ns_drop", name="ns")
    wait_for(lambda: absent(b.path / "ns") and not index.exists(key), "b drops it, too")
    make_namespace(a)
    index.hset(key, items=[word for pair in old.items() for word in pair])
    index.sadd("kvfs:kv:d:ns@1/", "1")
    assert os.listdir(a.path / "ns") == []
    assert absent(a.path / "ns" / "1")
    write(b, "ns3", b"x")
    (b.path / "ns").mkdir(exist_ok=True)
    index.delete(key)
    write(b, "ns/1", b"new")
    gets(a, "ns/1", b"new")


def test_drop_of_a_namespace_with_pool_off_is_for_one_node(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    make_namespace(a, pool="off")
    make_namespace(b)
    write(b, "ns/1", b"x")
    request(a.path, "ns_drop", name="ns")
    write(a, "other", b"x")
    assert read(b.path / "ns" / "1") == b"x"
    assert not redis.Redis(port=port_of(pool)).exists("kvfs:kv:v:ns")


def test_index_by_tls_of_the_authority_of_the_pool(tmp_path: Path, mount: Mount) -> None:
    """The machine does not know that authority: a mount without pool_tls trusts no such index."""
    folder = authority(tmp_path / "tls")
    files = (
        *("--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem")),
        *("--tls-ca-cert-file", str(folder / "ca.pem"), "--tls-auth-clients", "yes"),
    )
    port = free_port()
    index = start(tmp_path / "redis", 0, *files, "--tls-port", str(port))
    options = f"ram=64M,pool=rediss://127.0.0.1:{port}/kv,pool_address=127.0.0.1:{free_port()}"
    try:
        words = [*KVFS, "mount", str(tmp_path), "-o", options]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "kvfs refuses its certificate" in done.stderr
        kv = mount(f"{options},pool_tls={folder}", "a")
        write(kv, "block", b"x" * 100)
        assert kv.status()["pool"]["index"]["up"]
        kv.umount("--now")
    finally:
        index.kill()
        index.wait()


def test_node_with_certificates_reads_from_no_node_without(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    folder = authority(tmp_path / "tls")
    safe = f"{pool},pool_tls={folder}"
    a, b, c = node(mount, safe, "a"), node(mount, safe, "b"), node(mount, pool, "c")
    for kv, name in ((a, "with"), (c, "without")):
        write(kv, name, b"x" * MIB)
    assert read(b.path / "with") == b"x" * MIB
    assert read(b.path / "without") is None
    assert read(c.path / "with") is None


def test_node_whose_own_certificate_is_wrong_says_so(
    pool: str, mount: Mount, tmp_path: Path
) -> None:
    """As after the first half of a rotation, if the next daemon reads the files."""
    folder, other = authority(tmp_path / "tls"), authority(tmp_path / "other")
    mine = shutil.copytree(folder, tmp_path / "mine")
    a = node(mount, f"{pool},pool_tls={folder}", "a")
    b = node(mount, f"{pool},pool_tls={mine}", "b")
    write(a, "block", b"x" * MIB)
    b.allow_log("kvfs cannot use the certificate of this node")
    shutil.copy(other / "cert.pem", mine)
    b.kill_daemon()

    def failing() -> list[dict[str, Any]]:
        assert read(b.path / "block") is None
        found: list[dict[str, Any]] = b.status()["pool"]["failing"]
        return found

    wait_for(failing, "the node says that it reads nothing")
    assert f"pool_tls={mine}" in failing()[0]["why"]
    shutil.copy(folder / "cert.pem", mine)
    gets(b, "block", b"x" * MIB)
