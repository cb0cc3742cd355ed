"""A pool together with other parts of kvfs: a bucket below, NFS on top, settings of namespaces."""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
import redis

from kvfs import prefix
from kvfs.control import request
from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.mount.test_sparse import movers
from tests.nfs.conftest import Exported, exported
from tests.pool.test_two_nodes import absent, announced, fetched, gets, node, port_of, read, write
from tests.s3.rig import bytes_in
from tests.s3.test_mounted import all_uploaded, attribute, s3_of
from tests.semantics.test_namespaces import FOR_EVER, Opener
from tests.semantics.test_prefixes import BLOCK, ROOT, ask, chain
from tests.semantics.test_prefixes import write as write_blocks

__all__ = ["exported"]  # a fixture of the tests of NFS

MIB = 1 << 20
OLD, NEW = (os.urandom(300_000) for _ in range(2))


@pytest.fixture
def both(pool: str, s3: Server, bucket: str) -> str:
    """The options of a pool with a bucket below."""
    return (
        f"{pool},s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,"
        "s3_delay=0.1,s3_recheck=2"
    )


def uploaded(kv: Mounted, name: str, data: bytes) -> None:
    write(kv, name, data)
    all_uploaded(kv)


def spill(kv: Mounted, *names: str) -> None:
    """Evict objects from the tiers of a node; the bucket has them."""
    for name in names:
        path = kv.path / name

        def is_spilled(path: Path = path) -> bool:
            subprocess.run([*KVFS, "evict", "--to", "s3", path], check=True, capture_output=True)
            return attribute(path, "tier") == "s3"

        wait_for(is_spilled, f"only the bucket has {name}")
    wait_for(lambda: not kv.status()["pool"]["lag_s"], "the index knows it")


class Kept:
    """An object of the bucket that a test brings back, as a store may that is late."""

    def __init__(self, s3: Server, bucket: str, key: str) -> None:
        self.client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
        self.bucket, self.key = bucket, f"p/{key}"
        self._copy(self.key, "aside")

    def bring_back(self) -> None:
        self._copy("aside", self.key)

    def _copy(self, source: str, key: str) -> None:
        there = {"Bucket": self.bucket, "Key": source}
        self.client.copy_object(Bucket=self.bucket, Key=key, CopySource=there)


# With a bucket below


def test_names_of_nodes_and_of_the_bucket(both: str, mount: Mount, s3: Server, bucket: str) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    for name in ("d", "e"):
        (a.path / name).mkdir()
    uploaded(a, "d/bucket", b"bucket")
    spill(a, "d/bucket")
    uploaded(a, "d/both", b"both")
    request(a.path, "set", s3_delay="3600")
    write(a, "d/pool", b"pool")
    assert set(bytes_in(s3, bucket)) == {"@0/d/both", "@0/d/bucket"}
    for name in ("both", "bucket", "pool"):
        gets(b, f"d/{name}", name.encode())
    assert (fetched(b), s3_of(b)["downloads"]) == (2, 1)
    c = node(mount, both, "c")
    wait_for(lambda: not absent(c.path / "d"), "it is found")
    (c.path / "d" / "own").write_bytes(b"own")
    names = ["both", "bucket", "own", "pool"]
    wait_for(lambda: sorted(os.listdir(c.path / "d")) == names, "all are listed")
    for name in names:
        gets(c, f"d/{name}", name.encode())
    assert s3_of(c)["downloads"] == 0, "now nodes have all"


def test_object_whose_node_has_left_comes_from_the_bucket(both: str, mount: Mount) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    wait_for(lambda: not absent(b.path / "block"), "it is found")
    a.umount("--now")
    assert (b.path / "block").read_bytes() == OLD
    assert (fetched(b), s3_of(b)["downloads"]) == (0, 1)


def test_object_that_was_evicted_everywhere_comes_from_the_bucket(both: str, mount: Mount) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    gets(b, "block", OLD)
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    subprocess.run([*KVFS, "evict", "--drop", b.path / "block"], check=True, capture_output=True)
    spill(a, "block")
    wait_for(lambda: announced(b) == 0, "the copy is withdrawn")
    gets(b, "block", OLD)
    assert s3_of(b)["downloads"] == 1
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    assert (a.path / "block").read_bytes() == OLD


def test_unlinked_object_does_not_come_back_from_the_bucket(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    for kv in (a, b):
        (kv.path / "d").mkdir()
    uploaded(a, "d/block", OLD)
    gets(b, "d/block", OLD)
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    kept = Kept(s3, bucket, "@0/d/block")
    (a.path / "d" / "block").unlink()
    wait_for(lambda: not bytes_in(s3, bucket), "the bucket has followed")
    kept.bring_back()
    wait_for(lambda: absent(b.path / "d" / "block"), "b lets its copy go")
    c = node(mount, both, "c")
    wait_for(lambda: os.listdir(c.path) == ["d"], "c lists the bucket")
    for kv in (a, b, c):
        for _ in range(3):
            assert absent(kv.path / "d" / "block")
        assert os.listdir(kv.path / "d") == []
        assert absent(kv.path / "d" / "block")


def test_object_unlinked_by_a_reader_goes_from_the_bucket(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    for name in ("read", "found"):
        uploaded(a, name, name.encode())
    gets(b, "read", b"read")
    wait_for(lambda: not absent(b.path / "found"), "it is found")
    for name in ("read", "found"):
        (b.path / name).unlink()
        assert absent(b.path / name)
    wait_for(lambda: not bytes_in(s3, bucket), "the bucket follows")
    for kv in (a, b):
        for name in ("read", "found"):
            wait_for(partial(absent, kv.path / name), "it is gone")


def test_object_unlinked_before_its_upload_stays_out_of_the_bucket(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    slow = both.replace("s3_delay=0.1", "s3_delay=3600")
    a, b = node(mount, slow, "a"), node(mount, both, "b")
    write(a, "block", OLD)
    gets(b, "block", OLD)
    (b.path / "block").unlink()
    wait_for(lambda: b.status()["pool"]["counters"]["unlinked"] == 1, "the index knows it")
    subprocess.run([*KVFS, "flush", a.path, "--wait"], check=True, capture_output=True)
    assert not bytes_in(s3, bucket)
    assert absent(a.path / "block")
    assert absent(b.path / "block")


def test_object_unlinked_where_only_the_bucket_has_it_goes_from_the_pool(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    spill(a, "block")
    wait_for(lambda: not absent(b.path / "block"), "b finds it in the bucket")
    assert attribute(b.path / "block", "tier") == "s3"
    assert (a.path / "block").read_bytes() == OLD
    wait_for(lambda: announced(a) == 1, "it is announced again")
    (b.path / "block").unlink()
    wait_for(lambda: not bytes_in(s3, bucket), "the bucket has followed")
    assert absent(b.path / "block")
    wait_for(lambda: absent(a.path / "block"), "a lets it go")
    assert absent(b.path / "block")


@contextlib.contextmanager
def paused(pids: Iterable[int]) -> Iterator[None]:
    """Some processes do nothing."""
    stopped_pids = list(pids)
    for pid in stopped_pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped_pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stopped(pool: str) -> Iterator[None]:
    """The index does not answer."""
    pid = redis.Redis(port=port_of(pool)).info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def knows_all(kv: Mounted) -> bool:
    """Whether the index answers, and knows all changes of a node."""
    found = kv.status()["pool"]
    return bool(found["index"]["up"]) and not found["lag_s"]


@pytest.mark.parametrize("trying", [True, False])
def test_object_unlinked_during_its_upload_does_not_come_back(
    both: str, mount: Mount, monkeypatch: pytest.MonkeyPatch, *, trying: bool
) -> None:
    """Another node has it from the bucket, and the index never heard of it.

    trying: the node waits for the index, or else for the next attempt.
    """
    monkeypatch.setenv("KVFS_FAILPOINTS", "movement.uploaded=delay:8")
    a = node(mount, both, "a")
    monkeypatch.delenv("KVFS_FAILPOINTS")
    b, c = node(mount, both, "b"), node(mount, both, "c")
    for kv in (a, b, c):
        kv.allow_log("the pool's index is down|the pool learns later of changes")
    with stopped(both):
        (a.path / "block").write_bytes(OLD)
        gets(b, "block", OLD)
        if not trying:
            wait_for(lambda: "the pool learns later" in a.log.read_text(), "its turn has failed")
        assert s3_of(a)["uploads"] == 0
        (a.path / "block").unlink()
        assert absent(a.path / "block")
    wait_for(lambda: all(knows_all(one) for one in (a, b)), "the index knows all")
    assert absent(a.path / "block")
    wait_for(lambda: not redis.Redis(port=port_of(both)).exists("kvfs:kv:d:@0/"), "not listed")
    assert redis.Redis(port=port_of(both)).hkeys("kvfs:kv:o:@0/block") == [b"gone"]
    wait_for(lambda: absent(b.path / "block"), "b lets it go")
    wait_for(lambda: not s3_of(a)["to_delete"], "the bucket has followed")
    assert absent(a.path / "block")
    assert absent(c.path / "block")


def test_late_delete_of_an_earlier_object_leaves_the_later_one_of_another_node(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    spill(a, "block")
    gets(b, "block", OLD)
    assert s3_of(b)["downloads"] == 1
    with paused(movers(a.pid)):
        (a.path / "block").unlink()
        wait_for(lambda: absent(b.path / "block"), "b lets it go")
        (b.path / "block").write_bytes(NEW)
        wait_for(lambda: bytes_in(s3, bucket) == {"@0/block": NEW}, "the new one is there")
        assert s3_of(a)["to_delete"]
    wait_for(lambda: not s3_of(a)["to_delete"], "the late delete has ended")
    assert bytes_in(s3, bucket) == {"@0/block": NEW}
    for kv in (a, b):
        gets(kv, "block", NEW)


def change_in_the_outage(kv: Mounted, how: str) -> tuple[str, bytes]:
    """Let another state of a block go up, whose name, or the block's, the result tells."""
    block = kv.path / "block"
    if how == "rename":
        block.rename(block.with_name("other"))
        return "other", OLD
    block.write_bytes(NEW)
    return "block", NEW


@pytest.mark.parametrize("last", ["unlink", "rename", "rewrite"])
@pytest.mark.parametrize("how", ["rewrite", "rename"])
def test_state_of_an_object_that_only_the_bucket_had_does_not_come_back(
    both: str, mount: Mount, how: str, last: str
) -> None:
    """The index had the first state, and did not answer until the second one had left, too."""
    a, b = node(mount, both, "a"), node(mount, both, "b")
    for kv in (a, b):
        kv.allow_log("the pool's index is down|the pool learns later of changes")
    uploaded(a, "block", OLD)
    request(b.path, "set", s3_recheck="3600")
    wait_for(lambda: announced(a) == 1, "the index has the first state")
    with stopped(both):
        name, data = change_in_the_outage(a, how)
        all_uploaded(a)
        gets(b, name, data)
        if last == "rewrite":
            (a.path / name).write_bytes(b"last")
        elif last == "rename":
            (a.path / name).rename(a.path / "away")
        else:
            (a.path / name).unlink()

    def seen(kv: Mounted) -> list[bytes | None]:
        return [read(kv.path / one) for one in ("block", name)]

    found = b"last" if last == "rewrite" else None
    wanted = [None if how == "rename" else found, found]

    def is_right_at_both() -> bool:
        assert seen(a) == wanted
        return seen(b) == wanted

    wait_for(is_right_at_both, "b lets it go")
    wait_for(lambda: all(knows_all(one) for one in (a, b)), "the index knows all")
    wait_for(lambda: not s3_of(a)["to_delete"], "the bucket has followed")
    assert is_right_at_both()
    if last == "rename":
        gets(b, "away", data)


def test_object_rewritten_by_its_writer_stays_in_the_bucket(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    """The other node has downloaded the earlier version, and knows its key in the bucket."""
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    spill(a, "block")
    gets(b, "block", OLD)
    assert s3_of(b)["downloads"] == 1
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    (a.path / "block").write_bytes(NEW)
    all_uploaded(a)
    wait_for(lambda: bytes_in(s3, bucket) == {"@0/block": NEW}, "the bucket has followed")
    gets(b, "block", NEW)
    subprocess.run([*KVFS, "flush", b.path, "--wait"], check=True, capture_output=True)
    wait_for(lambda: not s3_of(b)["to_delete"], "b has nothing to delete")
    assert bytes_in(s3, bucket) == {"@0/block": NEW}


def test_object_rewritten_by_a_reader_is_replaced_in_the_bucket(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    uploaded(a, "block", OLD)
    gets(b, "block", OLD)
    (b.path / "block").write_bytes(NEW)
    wait_for(lambda: bytes_in(s3, bucket) == {"@0/block": NEW}, "the bucket follows")
    gets(a, "block", NEW)
    assert s3_of(b)["conflicts"] == 0
    b.umount()
    a.umount()
    c = node(mount, both, "c")
    gets(c, "block", NEW)
    assert bytes_in(s3, bucket) == {"@0/block": NEW}


def test_object_written_again_with_the_same_bytes_is_found(both: str, mount: Mount) -> None:
    """As an engine does that evicts a block and computes it again."""
    a, b = node(mount, both, "a"), node(mount, both, "b")
    write(a, "block", OLD)
    (a.path / "block").unlink()
    uploaded(a, "block", OLD)
    spill(a, "block")
    gets(b, "block", OLD)
    assert s3_of(b)["downloads"] == 1
    wait_for(lambda: announced(b) == 1, "it is announced")
    assert (a.path / "block").read_bytes() == OLD
    wait_for(lambda: announced(a) == 1, "it is announced again")
    for kv in (a, b):
        assert (kv.path / "block").read_bytes() == OLD


def test_object_renamed_by_a_reader_has_its_new_key(
    both: str, mount: Mount, s3: Server, bucket: str
) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    (a.path / "d").mkdir()
    for name in ("block", "d/below"):
        uploaded(a, name, name.encode())
        gets(b, name, name.encode())
    wait_for(lambda: announced(b) == 2, "the copies are announced")
    (b.path / "block").rename(b.path / "other")
    (b.path / "d").rename(b.path / "e")
    now = {"@0/other": b"block", "@0/e/below": b"d/below"}
    wait_for(lambda: bytes_in(s3, bucket) == now, "the bucket follows")
    gets(a, "other", b"block")
    gets(a, "e/below", b"d/below")
    for kv in (a, b):
        for name in ("block", "d/below"):
            wait_for(partial(absent, kv.path / name), "the old name is gone")


# With NFS on top


def seen(look: Callable[[], object]) -> object:
    """The result of a look at a file; None without the file, an error with an obsolete handle."""
    try:
        return look()
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno == errno.ESTALE:
            return error
        raise


@pytest.mark.parametrize("version", [3, 4])
def test_nfs_clients_of_a_node_see_the_pool(
    pool: str, mount: Mount, exported: Exported, version: int
) -> None:
    a, b = node(mount, pool, "a"), node(mount, f"{pool},allow_other", "b")
    (a.path / "d").mkdir()
    for name in ("first", "second"):
        write(a, f"d/{name}", name.encode() * MIB)
    b.path.chmod(0o777)  # clients are nobody
    with exported(b).client(version) as client:

        def shown() -> set[bytes]:
            return {entry.name for entry in client.listdir("d")} - {b".", b".."}

        wait_for(lambda: client.exists("d"), "it is found")
        wait_for(lambda: shown() == {b"first", b"second"}, "they are listed")
        for name in ("first", "second"):
            assert client.stat(f"d/{name}").st_size == len(name) * MIB
            assert client.read(f"d/{name}") == name.encode() * MIB
        assert fetched(b) == 2
        (a.path / "d" / "first").write_bytes(b"new")
        first = partial(client.read, "d/first")
        wait_for(lambda: seen(first) == b"new", "the client reads the new version")
        (a.path / "d" / "first").unlink()
        wait_for(lambda: seen(first) is None, "the client sees that it is gone")
        (b.path / "d").chmod(0o777)
        client.unlink("d/second")
        wait_for(lambda: absent(a.path / "d" / "second"), "an unlink by the client is for all")
        client.write("d/third", b"third")
        wait_for(lambda: read(a.path / "d" / "third") == b"third", "a reads what it has written")
        wait_for(lambda: shown() == {b"third"}, "the listing follows")
        wait_for(lambda: b.status()["open_handles"] == 0, "the server has closed them")


# With settings of namespaces


def namespace(kv: Mounted, **settings: str) -> Path:
    request(kv.path, "ns_create", name="ns", settings=settings, uid=0, gid=0)
    return kv.path / "ns"


def of_namespace(kv: Mounted) -> dict[str, Any]:
    (found,) = [one for one in kv.status()["namespaces"] if one["name"] == "ns"]
    return dict(found)


def test_file_with_publish_at_close_is_in_the_pool_after_its_close(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    here, there = (namespace(kv, publish="close") for kv in (a, b))
    with (here / "block").open("wb") as mine, (there / "block").open("wb") as other:
        mine.write(b"of a")
        other.write(b"of b")
        assert absent(there / "block")
        mine.close()
        wait_for(lambda: announced(a) == 1, "it is announced")
        wait_for(lambda: read(there / "block") == b"of a", "it is found")
    wait_for(lambda: b.status()["writers"] == 0, "the other one is closed")
    for path in (here, there):
        assert (path / "block").read_bytes() == b"of a"
        assert os.listdir(path) == ["block"]
    assert b.status()["pool"]["counters"]["conflicts"] == 0


def test_blocks_of_nodes_and_of_the_bucket_count_in_matches(both: str, mount: Mount) -> None:
    a, b = node(mount, both, "a"), node(mount, both, "b")
    keys = chain(30)
    for kv in (a, b):
        (namespace(kv, prefix="on") / ROOT.hex()).mkdir()
    write_blocks(a.path / "ns", keys)
    wait_for(lambda: announced(a) == len(keys), "they are announced")
    all_uploaded(a)
    wait_for(lambda: ask(b.path / "ns", keys).blocks == len(keys), "b counts all")
    paths = [prefix.path(*pair) for pair in pairwise([ROOT, *keys])]
    for path, key in zip(paths, keys[:10], strict=False):
        gets(b, f"ns/{path}", key * (BLOCK // len(key)))
    wait_for(lambda: announced(b) >= 10, "the copies are announced")
    spill(a, *(f"ns/{path}" for path in paths))
    wait_for(lambda: ask(a.path / "ns", keys).blocks == len(keys), "a counts those of the bucket")
    gets(a, f"ns/{paths[0]}", keys[0] * (BLOCK // len(keys[0])))
    for path, key in zip(paths, keys, strict=True):
        gets(b, f"ns/{path}", key * (BLOCK // len(key)))


def test_fetched_copies_keep_the_quotas_of_their_reader(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    namespace(a)
    there = namespace(b, quota_hard="4M")
    for number in range(8):
        write(a, f"ns/{number}", bytes([number]) * MIB)
    for number in range(8):
        gets(b, f"ns/{number}", bytes([number]) * MIB)
        assert 0 < of_namespace(b)["bytes"] <= 4 * MIB
    assert of_namespace(a)["objects"] == 8
    assert fetched(b) == 8
    for name, value in (("quota_hard", "0"), ("quota_objects", "2")):
        os.setxattr(there, f"user.kvfs.{name}", value.encode())
    for number in range(8):
        gets(b, f"ns/{number}", bytes([number]) * MIB)
        assert 0 < of_namespace(b)["objects"] <= 2
    write(a, "ns/large", b"x" * 5 * MIB)
    os.setxattr(there, "user.kvfs.quota_hard", b"4M")
    assert read(there / "large") is None
    assert of_namespace(b)["bytes"] <= 4 * MIB
    os.setxattr(there, "user.kvfs.quota_hard", b"0")
    gets(b, "ns/large", b"x" * 5 * MIB)


def test_namespace_beyond_its_soft_quota_gives_room_to_fetched_copies(
    pool: str, mount: Mount
) -> None:
    small = pool.replace("ram=64M,nvme={tmp}/NAME-nvme,nvme_size=256M", "ram=32M")
    a, b = node(mount, pool, "a"), node(mount, small, "b")
    namespace(a)
    namespace(b, quota_soft="8M")
    for number in range(12):
        (b.path / f"{number}").write_bytes(bytes([number]) * MIB)
    for number in range(30):
        write(a, f"ns/{number}", bytes([number]) * MIB)
        gets(b, f"ns/{number}", bytes([number]) * MIB)
    a.umount("--now")  # from now on b has what it has
    for number in range(12):
        assert (b.path / f"{number}").read_bytes() == bytes([number]) * MIB


def test_reads_of_other_nodes_count_for_the_limits_of_their_reader(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    here, there = namespace(a), namespace(b)
    for name in ("first", "second"):
        write(a, f"ns/{name}", name.encode() * MIB)
    os.setxattr(there, "user.kvfs.read_bytes", FOR_EVER.encode())
    os.setxattr(here, "user.kvfs.read_bytes", FOR_EVER.encode())
    assert (there / "first").read_bytes() == b"first" * MIB  # on credit
    reader = Opener(lambda: gets(b, "ns/second", b"second" * MIB))
    assert (here / "first").read_bytes() == b"first" * MIB, "a read of b costs nothing here"
    assert not reader.done
    assert fetched(b) == 1
    os.setxattr(there, "user.kvfs.read_bytes", b"0")
    reader.end()
    assert fetched(b) == 2


def test_lifetime_of_a_fetched_copy_is_that_of_its_object(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    namespace(a)
    there = namespace(b)
    write(a, "ns/fetched", b"x")
    write(a, "ns/found", b"x")
    gets(b, "ns/fetched", b"x")
    wait_for(lambda: not absent(there / "found"), "it is found")
    os.setxattr(there, "user.kvfs.ttl", b"1s")
    for name in ("fetched", "found"):
        wait_for(partial(absent, there / name), "its lifetime has ended")
        assert read(there / name) is None
    assert os.listdir(there) == []
    for name in ("fetched", "found"):
        assert (a.path / "ns" / name).read_bytes() == b"x"
    os.setxattr(there, "user.kvfs.ttl", b"0")
    gets(b, "ns/fetched", b"x")
