"""A pool together with other parts of kvfs: a bucket below, NFS on top, settings of namespaces."""

import errno
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from kvfs.control import request
from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.nfs.conftest import exported
from tests.pool.test_two_nodes import absent, announced, fetched, gets, node, write
from tests.s3.rig import bytes_in
from tests.s3.test_mounted import all_uploaded, attribute, s3_of

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
    """What a client sees of a file, once the server has forgotten its handle of an earlier one."""
    try:
        return look()
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno == errno.ESTALE:
            return error
        raise
