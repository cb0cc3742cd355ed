"""`kvfs fsck --bucket` on a real mount with a real bucket, and without the mount."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.s3.test_mounted import all_uploaded, keys

SIZE = 300_000


@pytest.fixture
def place(s3: Server, bucket: str) -> str:
    return f"s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1"


@pytest.fixture
def kv(place: str, mount: Mount) -> Mounted:
    return mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=512M,{place},s3_delay=0.1")


def fsck(target: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*KVFS, "fsck", "--json", *options, str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_bucket_that_lost_something_gets_it_again(
    mount: Mount, place: str, s3: Server, bucket: str
) -> None:
    place += ",s3_shared=off"
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=512M,{place},s3_delay=0.1")
    content = {name: os.urandom(SIZE) for name in ("gone", "short", "good")}
    for name, data in content.items():
        (kv.path / name).write_bytes(data)
    all_uploaded(kv)
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    client.delete_object(Bucket=bucket, Key="p/@0/gone")
    client.put_object(Bucket=bucket, Key="p/@0/short", Body=b"short")
    exit_code, found = fsck(kv.path)
    assert (exit_code, found["findings"]) == (0, [])
    exit_code, found = fsck(kv.path, "--bucket", "--hashes")
    told = {(one["kind"], one["path"], one["state"]) for one in found["findings"]}
    assert (exit_code, told) == (4, {("absent", "/gone", "found"), ("altered", "/short", "found")})
    assert found["notes"]["in_bucket"] == 1
    kv.allow_log("check: .* repaired: upload it again")
    kv.allow_log("stays on this node only")  # what somebody else has put there is not overwritten
    exit_code, found = fsck(kv.path, "--bucket", "--repair")
    assert (exit_code, {one["state"] for one in found["findings"]}) == (1, {"repaired"})
    all_uploaded(kv)
    assert keys(s3, bucket) == {"@0/gone": SIZE, "@0/short": 5, "@0/good": SIZE}
    assert fsck(kv.path, "--bucket", "--hashes")[0] == 0
    kv.umount()
    nvme = kv.path.parent / "nvme"
    exit_code, found = fsck(nvme, "--bucket", "--hashes", "-o", place.partition(",")[2])
    assert (exit_code, found["notes"]["in_bucket"]) == (0, 2)
    kv.mount()
    assert {name: (kv.path / name).read_bytes() for name in content} == content


@pytest.mark.parametrize("live", [True, False])
def test_object_deleted_by_another_node_is_not_uploaded_again(
    kv: Mounted, place: str, mount: Mount, s3: Server, bucket: str, *, live: bool
) -> None:
    other = mount(f"ram=64M,{place},s3_delay=0.1,s3_recheck=600", "other")
    for name in ("gone", "new", "good"):
        (kv.path / name).write_bytes(os.urandom(SIZE))
    all_uploaded(kv)
    for name in ("gone", "new"):
        wait_for((other.path / name).exists, f"{name} is found")
    (other.path / "gone").unlink()
    (other.path / "new").write_bytes(b"new")
    wait_for(lambda: keys(s3, bucket) == {"@0/new": 3, "@0/good": SIZE}, "the bucket has followed")
    target, options = kv.path, ["--bucket", "--repair"]
    if not live:
        kv.umount()
        target, options = kv.path.parent / "nvme", [*options, "-o", place.partition(",")[2]]
    kv.allow_log("check: .* repaired: drop it")
    exit_code, found = fsck(target, *options)
    told = {(one["kind"], one["path"], one["state"]) for one in found["findings"]}
    assert told == {("absent", "/gone", "repaired"), ("altered", "/new", "repaired")}
    assert exit_code == 1
    if not live:
        kv.mount()
    assert fsck(kv.path, "--bucket", "--hashes")[0] == 0
    all_uploaded(kv)
    assert keys(s3, bucket) == {"@0/new": 3, "@0/good": SIZE}
    assert not (kv.path / "gone").exists()
    wait_for((kv.path / "new").exists, "it is found")
    assert (kv.path / "new").read_bytes() == b"new"


def test_fsck_bucket_is_refused_without_a_bucket(kv: Mounted, place: str, mount: Mount) -> None:
    other = mount("ram=64M,nvme={tmp}/o,nvme_size=64M", "other")
    for target, options, reason in (
        (kv.path, ("--bucket", "-o", place), "mounted, and knows its bucket"),
        (other.path, ("--bucket",), "mount it with s3="),
    ):
        done = subprocess.run(
            [*KVFS, "fsck", *options, str(target)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert reason in done.stderr
