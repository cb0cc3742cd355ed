"""Refusals of a mount: reason and cure in one line, and nothing changed."""

import json
import os
import socket
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from kvfs import runtime
from kvfs.s3.facts import FORMAT
from scripts.s3_server import Server
from tests.conftest import Mount
from tests.faults.conftest import with_site
from tests.harness import KVFS, wait_for
from tests.s3.rig import says_no_secret
from tests.s3.test_mounted import all_uploaded, s3_of

USAGE, AWAY = 2, 1  # exit codes: the store refuses, or does not answer
SECRET = "aB3" * 14  # nobody's; it must not be repeated


def snapshot(tmp_path: Path, server: Server, bucket: str) -> object:
    """All that a mount could have made."""
    client = boto3.session.Session().client("s3", endpoint_url=server.endpoint)
    listed = client.list_objects_v2(Bucket=bucket).get("Contents", ())
    # The memory of a mount without NVMe; with it, an identity would be in a directory first.
    memory = runtime.ram_root() / str(uuid.uuid5(uuid.NAMESPACE_URL, f"kvfs:{tmp_path / 'kv'}"))
    return (
        sorted(str(path) for path in tmp_path.rglob("*") if path.suffix != ".log"),
        sorted(one.path for one in runtime.mounts() if one.path.startswith(str(tmp_path))),
        memory.exists(),
        sorted((one["Key"], one["ETag"]) for one in listed),
    )


Refused = Callable[..., str]


@pytest.fixture
def refused(s3: Server, bucket: str, tmp_path: Path) -> Refused:
    """The one line of a refused `kvfs mount`, which must have changed nothing.

    Options replace the usual ones.
    """

    def attempt(environment: dict[str, str] | None = None, **options: str) -> str:
        path = tmp_path / "kv"
        path.mkdir(exist_ok=True)
        usual = {
            "ram": "32M", "nvme": f"{tmp_path}/nvme", "nvme_size": "64M", "log": f"{path}.log",
            "s3": f"s3://{bucket}/p", "s3_endpoint": s3.endpoint, "s3_region": "us-east-1",
        }  # fmt: skip
        text = ",".join(f"{name}={value}" for name, value in (usual | options).items())
        before = snapshot(tmp_path, s3, bucket)
        done = subprocess.run(
            [*KVFS, "mount", str(path), "-o", text],
            capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        if done.returncode == 0:  # the next line says so
            subprocess.run(["umount", "-l", path], check=True)
        away = "s3_required=off mounts without it" in done.stderr
        assert done.returncode == (AWAY if away else USAGE), (done.stdout, done.stderr)
        assert snapshot(tmp_path, s3, bucket) == before
        told = done.stdout + done.stderr + Path(f"{path}.log").read_text()
        for secret in (SECRET, s3.credentials["AWS_SECRET_ACCESS_KEY"]):
            assert secret not in told
        said: str = done.stderr.strip()
        assert "\n" not in said, "nothing else, as of what it would have made"
        return said

    return attempt


def test_a_bucket_that_is_not_there(refused: Refused) -> None:
    assert refused(s3="s3://no-such-bucket-here/p") == (
        "kvfs: s3=s3://no-such-bucket-here/p/: no-such-bucket-here/p/: NoSuchBucket, HTTP 404: "
        "create the bucket, or name another one"
    )


def test_a_store_that_hangs_at_the_mount(
    refused: Refused, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes connections, and never answers.
    with_site(monkeypatch, "impatient")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = refused(s3_endpoint=endpoint)
    assert said == (
        f"kvfs: s3=s3://{bucket}/p/: s3://{bucket}/p/ has not answered in 3 s; "
        f"is s3_endpoint={endpoint} right? s3_required=off mounts without it meanwhile"
    )


NOBODY = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": SECRET}, "SignatureDoesNotMatch, HTTP 403"),
        ({"AWS_ACCESS_KEY_ID": "NOBODY"}, "InvalidAccessKeyId, HTTP 403"),
        (NOBODY, "NoCredentialsError"),
    ],
)
def test_credentials_that_are_wrong(
    refused: Refused, bucket: str, environment: dict[str, str], said: str
) -> None:
    assert refused({**environment, "HOME": "/nonexistent"}) == (
        f"kvfs: s3=s3://{bucket}/p/: {bucket}/p/: {said}; check the credentials that boto3 finds "
        "and what they permit: kvfs needs to list, read, write and delete below "
        f"s3://{bucket}/p/"
    )


def test_a_profile_that_is_not_there(refused: Refused, bucket: str) -> None:
    assert refused(s3_profile="nobody") == (
        f"kvfs: s3=s3://{bucket}/p/: s3://{bucket}/p/: ProfileNotFound (The config profile "
        "(nobody) could not be found); check the credentials that boto3 finds and what they permit"
    )


def test_a_bucket_that_may_only_be_read(refused: Refused, s3: Server, bucket: str) -> None:
    making = [
        "user",
        "create",
        f"--uid={bucket}",
        "--display-name=reader",
        f"--secret-key={SECRET}",
    ]
    made = subprocess.run(
        ["radosgw-admin", "-c", s3.folder / "ceph.conf", "-n", "client.rgw", *making],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    reader = json.loads(made.stdout)["keys"][0]["access_key"]
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    client.put_bucket_acl(Bucket=bucket, GrantRead=f"id={bucket}", GrantFullControl="id=test")
    said = refused({"AWS_ACCESS_KEY_ID": reader, "AWS_SECRET_ACCESS_KEY": SECRET})
    assert said.startswith(f"kvfs: s3=s3://{bucket}/p/: {bucket}/p/.kvfs/probe/")
    assert said.endswith(
        ": AccessDenied, HTTP 403; check the credentials that boto3 finds and what they permit: "
        f"kvfs needs to list, read, write and delete below s3://{bucket}/p/"
    )


def test_an_endpoint_that_does_not_answer(refused: Refused, s3: Server, bucket: str) -> None:
    cure = "; is s3_endpoint={} right? s3_required=off mounts without it meanwhile"
    for endpoint in ("http://127.0.0.1:1", "http://no-such-host.invalid"):
        assert refused(s3_endpoint=endpoint) == (
            f"kvfs: s3=s3://{bucket}/p/: {bucket}/p/: EndpointConnectionError: Could not connect "
            f'to the endpoint URL: "{endpoint}/{bucket}"' + cure.format(endpoint)
        )
    tls = s3.endpoint.replace("http:", "https:")
    said = refused(s3_endpoint=tls)
    assert said.startswith(f"kvfs: s3=s3://{bucket}/p/: {bucket}/p/: SSLError: SSL validation")
    assert said.endswith(cure.format(tls))


NEWER = (
    f"the prefix has format {FORMAT + 1}, this kvfs knows {FORMAT}; mount it with a newer kvfs, "
)
TAKEN = "the prefix belongs to kvfs c0ffee alone, this kvfs is "
MARKER = "p/.kvfs/format.json"


def mark(s3: Server, bucket: str, **marker: object) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    client.put_object(Bucket=bucket, Key=MARKER, Body=json.dumps(marker).encode())


def test_a_prefix_that_is_not_ours(refused: Refused, s3: Server, bucket: str) -> None:
    said = f"kvfs: s3=s3://{bucket}/p/: {bucket}/{MARKER}: "
    mark(s3, bucket, format=FORMAT + 1, owner="")
    assert refused() == f"{said}{NEWER}or give another prefix"
    mark(s3, bucket, format=FORMAT, owner="c0ffee")
    told = refused()
    assert told.startswith(f"{said}{TAKEN}")
    assert told.endswith(
        "; give another prefix, or delete this object if the other kvfs is gone for good"
    )
    mark(s3, bucket, name="somebody else's")
    assert refused() == f"{said}kvfs did not write this object; give another prefix"


def test_a_prefix_of_one_kvfs_alone(mount: Mount, s3: Server, bucket: str) -> None:
    where = f"ram=32M,s3_endpoint={s3.endpoint},s3_region=us-east-1,s3_delay=0"
    kv = mount(f"{where},nvme={{tmp}}/new,nvme_size=64M,s3=s3://{bucket}/p,s3_exclusive=on")
    (kv.path / "a").write_bytes(b"mine")
    all_uploaded(kv)
    assert not (kv.path / "b").exists()
    assert s3_of(kv)["lookups"] == 0
    with pytest.raises(AssertionError, match=r"the prefix belongs to kvfs .* alone, this kvfs is"):
        mount(f"{where},s3=s3://{bucket}/p", "other")
    kv.umount()
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"mine"
    mount(f"{where},s3=s3://{bucket}/q", "shared")
    with pytest.raises(AssertionError, match="the prefix is shared with other nodes; give another"):
        mount(f"{where},s3=s3://{bucket}/q,s3_exclusive=on", "late")


def test_a_prefix_that_is_not_ours_is_left_alone(mount: Mount, s3: Server, bucket: str) -> None:
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    mark(s3, bucket, format=FORMAT + 1, owner="")
    kv = mount(
        f"ram=32M,s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,s3_delay=0,"
        "s3_required=off"
    )
    kv.expect_log(f"mounted without the bucket s3://{bucket}/p/, until it answers: ")
    kv.allow_log("s3 tier")
    assert s3_of(kv)["state"] == "down"
    (kv.path / "a").write_bytes(b"mine")
    since = s3_of(kv)["state_s"]
    wait_for(lambda: s3_of(kv)["state_s"] > since + 3, "it is asked again")
    assert NEWER in s3_of(kv)["why"]
    assert s3_of(kv)["state"] == "down"
    listed = client.list_objects_v2(Bucket=bucket)["Contents"]
    assert [one["Key"] for one in listed] == [MARKER]
    client.delete_object(Bucket=bucket, Key=MARKER)
    all_uploaded(kv)
    assert client.get_object(Bucket=bucket, Key="p/@0/a")["Body"].read() == b"mine"
    says_no_secret(kv, s3.credentials["AWS_SECRET_ACCESS_KEY"])


def test_a_catalog_of_another_prefix(mount: Mount, s3: Server, bucket: str, tmp_path: Path) -> None:
    where = f"s3_endpoint={s3.endpoint},s3_region=us-east-1,s3_delay=0"
    kv = mount(f"ram=32M,nvme={{tmp}}/nvme,nvme_size=64M,s3=s3://{bucket}/p,{where}")
    (kv.path / "a").write_bytes(b"mine")
    all_uploaded(kv)
    kv.umount()
    other = kv.options.replace(f"{bucket}/p", f"{bucket}/q")
    done = subprocess.run(
        [*KVFS, "mount", str(kv.path), "-o", other], capture_output=True, text=True, check=False
    )
    assert done.returncode == USAGE
    assert done.stderr.strip() == (
        f"kvfs: s3=s3://{bucket}/q/: the objects of catalog {tmp_path}/nvme/catalog are in "
        f"s3://{bucket}/p/: mount with that, or give an empty directory to nvme="
    )
    assert runtime.mount_at(kv.path) is None
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    assert client.list_objects_v2(Bucket=bucket, Prefix="q/")["KeyCount"] == 0, "nothing is claimed"
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"mine"
