"""`kvfs gc` on real mounts that share a bucket: its findings, deletes and refusals."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, descendants, wait_for
from tests.s3.test_mounted import all_uploaded, keys, unfinished

MIB = 1 << 20
_dice = random.Random(7)
SMALL, LARGE = _dice.randbytes(300_000), _dice.randbytes(70 * MIB)

Make = Callable[[str], Mounted]


@pytest.fixture
def node(s3: Server, bucket: str, mount: Mount) -> Make:
    """`node(name)` mounts one of several kvfs that share the prefix `p` of the bucket."""

    def make(name: str) -> Mounted:
        return mount(
            f"ram=512M,nvme={{tmp}}/{name}-nvme,nvme_size=1G,{at(s3, bucket)},s3_delay=0.1,"
            "s3_shared=off",  # each makes its namespaces itself
            name,
        )

    return make


def at(s3: Server, bucket: str) -> str:
    return f"s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1"


def nvme(kv: Mounted) -> Path:
    return kv.path.parent / f"{kv.path.name}-nvme"


def ns(kv: Mounted, verb: str, name: str, *settings: str) -> None:
    subprocess.run([*KVFS, "ns", verb, str(kv.path / name), *settings], check=True)


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*KVFS, "gc", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def gc(*arguments: str | Path) -> dict[str, Any]:
    done = run("--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def garbage(*arguments: str | Path) -> dict[str, int]:
    found = gc("--older-than", "0s", *arguments)["garbage"]
    return {kind: tally["objects"] for kind, tally in found.items()}


def recorded(kv: Mounted, *namespaces: str) -> None:
    """Wait until the node's record has these namespaces."""

    def there() -> bool:
        return any(
            one["mountpoint"] == str(kv.path) and one["namespaces"] == sorted(namespaces)
            for one in gc(kv.path)["nodes"]
        )

    wait_for(there, f"{kv.path} has a record of {namespaces}")


def lose(kv: Mounted) -> None:
    """Kill the mount, as with the machine: its movers do not survive it."""
    movers = descendants(kv.pid)
    kv.kill()
    for pid in movers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_garbage_of_a_lost_node_is_found_and_deleted(node: Make, s3: Server, bucket: str) -> None:
    kept, lost = node("kept"), node("lost")
    for kv, names in ((kept, "xy"), (lost, "xz")):
        for name in names:
            ns(kv, "create", name)
            (kv.path / name / kv.path.name).write_bytes(SMALL)
        (kv.path / f"of-{kv.path.name}").write_bytes(SMALL)
        all_uploaded(kv)
        recorded(kv, *(f"{name}@1" for name in names))
    who = next(one["identity"] for one in gc(kept.path)["nodes"] if "z@1" in one["namespaces"])
    (lost.path / "z" / "large").write_bytes(LARGE)
    wait_for(lambda: list((nvme(lost) / "uploads").glob("*.json")), "it is under way")
    lose(lost)
    shutil.rmtree(nvme(lost))
    ns(kept, "set", "x", "version=2")
    (kept.path / "x" / "new").write_bytes(SMALL)
    ns(kept, "drop", "y")
    live = {"@0/of-kept", "@0/of-lost", "x@2/new"}
    left = {"x@1/lost", "z@1/lost"}

    wait_for(lambda: keys(s3, bucket).keys() == live | left, "the kept node has done its part")
    recorded(kept, "x@2")
    half = len(unfinished(s3, bucket))
    assert half == 1, "it was killed in the middle of an upload"

    wait_for(lambda: garbage(kept.path) == {"upload": half}, "its namespaces count")
    assert garbage("--node-age", "0s", "--forget-node", who, "--older-than", "1d", kept.path) == {}
    forget = ("--node-age", "0s", "--forget-node", who, "--older-than", "0s")
    found = gc(*forget, kept.path)
    assert {one["name"] for one in found["namespaces"]} == {"x@1", "z@1"}
    told = {kind: tally["objects"] for kind, tally in found["garbage"].items()}
    assert told == {"version": 1, "namespace": 1, "upload": half}
    assert keys(s3, bucket).keys() == live | left, "nothing is deleted unless told to"
    found = gc("--delete", *forget, kept.path)
    assert found["deleted"] == {"objects": 3, "bytes": 2 * len(SMALL)}
    assert keys(s3, bucket).keys() == live
    assert not unfinished(s3, bucket)
    assert [one["mountpoint"] for one in gc(kept.path)["nodes"]] == [str(kept.path)]

    kept.expect_log("went away|is gone|objects/")
    for path in nvme(kept).glob("objects/*/*"):  # so that they have to come back
        path.unlink()
    kept.umount("--now")
    kept.mount()
    for name in ("x/new", "of-kept"):
        assert (kept.path / name).read_bytes() == SMALL


def test_unexplained_keys_are_not_deleted(node: Make, s3: Server, bucket: str) -> None:
    kv = node("kv")
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    for key in ("old@3/a", "notes.txt"):
        client.put_object(Bucket=bucket, Key=f"p/{key}", Body=SMALL)
    wait_for(lambda: garbage(kv.path) == {"namespace": 1}, "it is older than now")
    done = run("--delete", "--older-than", "0s", kv.path)
    assert done.returncode == 2
    assert "no record of a node explains old@3" in done.stderr
    shown = run("--older-than", "0s", kv.path).stdout
    assert "old@3: no node uses it: 1 (293.0 KiB), no node record explains it" in shown
    assert "kept: 1 (293.0 KiB) not of kvfs: kvfs never changes them\n  p/notes.txt\n" in shown
    assert shown.endswith("1 objects (293.0 KiB) are garbage: --delete deletes them\n")
    done = run("--delete", "--all-recorded", "--older-than", "0s", kv.path)
    assert done.stdout.endswith("deleted: 1 (293.0 KiB)\n"), done.stderr
    assert keys(s3, bucket).keys() == {"notes.txt"}


def test_a_kvfs_that_is_not_mounted_and_none_at_all(
    node: Make, s3: Server, bucket: str, tmp_path: Path
) -> None:
    kv = node("kv")
    ns(kv, "create", "x")
    (kv.path / "x" / "a").write_bytes(SMALL)
    all_uploaded(kv)
    recorded(kv, "x@1")
    place = at(s3, bucket)
    without = ",".join(place.split(",")[1:])
    assert "mounted, and knows its bucket" in run(kv.path, "-o", place).stderr
    assert "is in use" in run(nvme(kv), "-o", without).stderr
    kv.umount()
    for target in ((nvme(kv), "-o", without), (nvme(kv), "-o", place), ("-o", place)):
        found = gc(*target)
        assert (found["garbage"], found["kept"]["live"]["objects"]) == ({}, 3)
    for arguments, reason in (
        ((), "no bucket: give MOUNTPOINT"),
        ((nvme(kv), "-o", place.replace("/p,", "/q,")), "the objects of .* are in s3://"),
        (("-o", place.replace("/p,", "/q,")), "expected the prefix of a mount"),
        (("-o", place.replace(f"//{bucket}/", "//no-such/")), "NoSuchBucket.*give the bucket"),
        (("-o", f"{place},ram=1G"), "ram does not say where a bucket is"),
        ((tmp_path, "-o", place), "is neither a mount point of kvfs"),
        (("-o", place, "--older-than", "soon"), "expected a duration"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
        assert re.search(reason, done.stderr), done.stderr
        assert done.stderr.count("\n") == 1
    done = run("-o", f"s3=s3://{bucket}/p,s3_endpoint=http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.endswith("; is s3_endpoint=http://127.0.0.1:1 right?\n")
    assert done.stderr.count("\n") == 1
    kv.mount()
    assert os.listdir(kv.path / "x") == ["a"]
