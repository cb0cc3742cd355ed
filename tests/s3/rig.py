"""Helpers for tests of a failing bucket: spilled objects, and checks that no secret shows."""

import json
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import boto3  # type: ignore[import-untyped]

from kvfs import runtime
from scripts.s3_server import Server
from tests.harness import KVFS, Mounted, wait_for
from tests.s3.test_mounted import attribute


def narrow(kv: Mounted, name: str, objects: int = 1) -> Path:
    """A namespace whose tiers keep only its last `objects` objects."""
    path = kv.path / name
    path.mkdir()
    command = [*KVFS, "ns", "set", str(path), f"quota_objects={objects}"]
    command += ["eviction=fifo", "prefetch=off"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def send_away(directory: Path, contents: dict[str, bytes]) -> None:
    """Write files into a `narrow` namespace, until only the bucket has them."""
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    for name in contents:  # or a later one, which is there first, goes in its place
        wait_for(lambda: attribute(directory / name, "dirty") == "0", f"{name} is there")  # noqa: B023 (it is called at once)
    for number in range(len(contents)):
        (directory / f"last{number}").write_bytes(b"stays")
    for name in contents:
        wait_for(lambda: attribute(directory / name, "tier") == "s3", f"{name} is there only")  # noqa: B023 (it is called at once)


def bytes_in(server: Server, bucket: str, prefix: str = "p/") -> dict[str, bytes]:
    """The bucket's objects by key below the prefix; not those that go during the listing."""
    client = boto3.session.Session().client("s3", endpoint_url=server.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    found = [one["Key"] for page in pages for one in page.get("Contents", ())]
    seen: dict[str, bytes] = {}
    for key in found:
        if "/.kvfs/" not in f"/{key}":
            with suppress(client.exceptions.NoSuchKey):
                body = client.get_object(Bucket=bucket, Key=key)["Body"]
                seen[key.removeprefix(prefix)] = body.read()
    return seen


def says_no_secret(kv: Mounted, secret: str) -> None:
    """Check that the logs, the status and all command lines of processes have no secret."""
    told = [path.read_text() for path in kv.log.parent.glob(f"{kv.log.name}*")]
    told += _command_lines()
    if runtime.mount_at(kv.path) is not None:
        told.append(json.dumps(kv.status()))
        shown = [*KVFS, "status", str(kv.path)]
        told.append(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
    assert told
    assert not [text[:200] for text in told if secret in text]


def _command_lines() -> Iterable[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
