"""A bucket and an NVMe directory of the version before, from tests/data."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount, make_bucket
from tests.data import make
from tests.harness import KVFS, Mounted
from tests.mount.test_version_before import settings_known
from tests.s3.test_mounted import attribute, s3_of

SHARED = ("mode", "uid", "gid", "size", "mtime_ns", "sha256")  # what a bucket has of a file


@pytest.fixture
def before(s3: Server, tmp_path: Path) -> Iterator[Path]:
    """Fill the bucket; the folder has the rest of the archive."""
    make.unpack("bucket.tar.gz", tmp_path)
    make_bucket(s3, make.BUCKET)
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    index = json.loads((tmp_path / "bucket/index.json").read_text())
    for number, (key, metadata) in enumerate(index.items()):
        body = (tmp_path / f"bucket/{number}").read_bytes()
        client.put_object(Bucket=make.BUCKET, Key=key, Body=body, Metadata=metadata)
    yield tmp_path
    for one in client.list_objects_v2(Bucket=make.BUCKET)["Contents"]:
        client.delete_object(Bucket=make.BUCKET, Key=one["Key"])
    client.delete_bucket(Bucket=make.BUCKET)


@pytest.fixture
def options(s3: Server) -> str:
    return (
        f"ram=64M,s3=s3://{make.BUCKET}/{make.PREFIX},s3_endpoint={s3.endpoint},"
        "s3_region=us-east-1,s3_delay=0.1"
    )


def fsck(kv: Mounted) -> None:
    command = [*KVFS, "fsck", "--hashes", "--bucket", "--json", str(kv.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, []), done.stdout


def test_directory_with_objects_only_in_the_bucket_mounts(
    before: Path, mount: Mount, options: str
) -> None:
    shown = json.loads((before / "spilled.json").read_text())
    kv = mount(f"{options},nvme={{tmp}}/spilled,nvme_size=1G")
    kv.expect_log("spilled is a copy")
    assert kv.status()["catalog"]["doubt"] == ""
    files = [name for name, one in shown["files"].items() if "sha256" in one]
    assert {attribute(kv.path / name, "tier") for name in files} == {"s3"}
    assert make.state(kv.path) == shown["files"]
    assert settings_known(kv, shown["settings"]) == shown["settings"]
    assert s3_of(kv)["uploads"] == 0
    kv.idle()
    fsck(kv)


def test_a_new_node_finds_all_objects_by_name(before: Path, mount: Mount, options: str) -> None:
    kv = mount(options)
    version = [
        *KVFS,
        "ns",
        "set",
        str(kv.path / "a@b"),
        "version=3",
    ]  # each node has its own settings
    subprocess.run(version, check=True, capture_output=True)
    shown = shared(json.loads((before / "spilled.json").read_text())["files"])
    assert len(shown) == 9
    for name in shown:  # a look-up asks the bucket
        if name.endswith("beyond 896 bytes"):  # a look-up of directories does not find its key
            (kv.path / name).parent.mkdir(parents=True)
        assert attribute(kv.path / name, "tier") == "s3"
    assert shared(make.state(kv.path)) == shown
    kv.idle()
    fsck(kv)


def shared(files: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {field: one[field] for field in SHARED}
        for name, one in files.items()
        if "sha256" in one
    }
