"""Names with a meaning in HTTP, S3 or a terminal, in a real store: on this node and another."""

import json
import os
import subprocess
from pathlib import Path

import boto3  # type: ignore[import-untyped]

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, wait_for
from tests.s3.test_mounted import all_uploaded

NAMES = (
    *(
        b"a\nb",
        b"a\r\nx-amz-meta-kvfs-size: 0",
        b"%00",
        b"%2E%2E",
        b"...",
        b" ",
        b"a b+c",
        b"?x=y#z",
    ),
    *(
        b"\xff\xfe",
        "\u00e9".encode(),
        "e\u0301".encode(),
        b"\x1b]0;title\x07",
        b"\x7f",
        b"<Key>&amp;",
    ),
    *(b"@", b"a@1", b"\\", b"\"'", b".kvfs", b"x" * 255, b"\xff" * 255, "\u202etxt".encode()),
)
DEEP = [
    b"%d" % number + b"\xe2\x82\xac" * 84 for number in range(8)
]  # 8 x 253 bytes, each of them escaped


def tree(root: Path) -> dict[bytes, bytes]:
    """Every file's bytes, by its path below the root."""
    base = os.fsencode(root)
    return {
        os.path.relpath(os.path.join(folder, name), base): Path(
            os.fsdecode(os.path.join(folder, name))
        ).read_bytes()
        for folder, _, names in os.walk(base)
        for name in names
    }


def test_any_name_is_a_key_and_comes_back(s3: Server, bucket: str, mount: Mount) -> None:
    options = (
        f"ram=64M,log_level=debug,s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},"
        "s3_region=us-east-1,s3_delay=0.1"
    )
    one = mount(options, "one")
    wanted = {}
    deep = b"/".join(DEEP)
    top = os.open(one.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.mkdir(b"d\n", dir_fd=top)
        os.makedirs(os.path.join(os.fsencode(one.path), deep))
        for number, name in enumerate(NAMES):
            for path in (name, b"d\n/" + name)[name == b".kvfs" :]:  # at the top it is kvfs's
                with os.fdopen(
                    os.open(path, os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=top), "wb"
                ) as file:
                    file.write(b"%d" % number)
                wanted[path] = b"%d" % number
        (one.path / os.fsdecode(deep) / "x").write_bytes(b"deep")
        wanted[deep + b"/x"] = b"deep"
    finally:
        os.close(top)
    all_uploaded(one)
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    listed = [one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert all(key.startswith("p/") and key.isascii() and key.isprintable() for key in listed)
    assert max(map(len, listed)) <= 1024

    other = mount(options, "other")
    done = subprocess.run(
        [*KVFS, "import", str(other.path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.returncode == 0
    wait_for(lambda: tree(other.path) == wanted, "the other node has them all")
    for kv in (one, other):
        lines = kv.log.read_bytes()
        assert b"\x1b" not in lines
        assert b"\rx-amz" not in lines
        status = subprocess.run(
            [*KVFS, "status", str(kv.path)], capture_output=True, timeout=PATIENCE, check=True
        )
        assert b"\x1b]0" not in status.stdout
        json.dumps(kv.status())
