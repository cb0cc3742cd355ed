"""A pool together with other parts of kvfs: a bucket below, NFS on top, settings of namespaces."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.harness import KVFS, Mounted, wait_for
from tests.nfs.conftest import exported
from tests.pool.test_two_nodes import write
from tests.s3.test_mounted import all_uploaded, attribute

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
