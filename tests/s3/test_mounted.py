"""A real mount with a real bucket: files are uploaded, and come back."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount, make_bucket
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20
_dice = random.Random(5)
SMALL, LARGE = _dice.randbytes(300_000), _dice.randbytes(70 * MIB)

Make = Callable[..., Mounted]


@pytest.fixture
def made(s3: Server, bucket: str, mount: Mount) -> Make:
    """`made(options)` mounts with that bucket, below the prefix `p`."""

    def make(options: str = "ram=64M,nvme={tmp}/nvme,nvme_size=512M", name: str = "kv") -> Mounted:
        return mount(
            f"{options},s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,"
            "s3_delay=0.1",
            name,
        )

    return make


def test_movers_need_no_short_tmpdir_and_leave_no_directory_there(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a socket in one, and a daemon that is killed does not remove it."""
    scratch = tmp_path / ("t" * 120)  # the address of a socket has 107 bytes
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    kv = made()
    for number in range(3):
        (kv.path / f"{number}").write_bytes(b"x")
        all_uploaded(kv)
        assert len(list(scratch.iterdir())) == 1
        kv.kill_daemon()
    kv.umount("--now")
    assert not list(scratch.iterdir())


def keys(s3: Server, bucket: str) -> dict[str, int]:
    """The objects in the bucket, by key below the prefix, with their sizes."""
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    listed = client.list_objects_v2(Bucket=bucket, Prefix="p/").get("Contents", ())
    found = {one["Key"].removeprefix("p/"): one["Size"] for one in listed}
    return {key: size for key, size in found.items() if not key.startswith(".kvfs/")}


def s3_of(kv: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = kv.status()["tiers"]["s3"]
    return found


def all_uploaded(kv: Mounted) -> None:
    wait_for(lambda: s3_of(kv)["loaded"] and not s3_of(kv)["dirty_objects"], "all is uploaded")


def attribute(path: Path, name: str) -> str:
    return os.getxattr(path, f"user.kvfs.{name}").decode()


def spill(kv: Mounted, path: Path) -> None:
    """Write until only the bucket has it."""
    kv.allow_log("writers wait")
    number = 0
    while attribute(path, "tier") != "s3":
        (kv.path / f"filler{number % 8}").write_bytes(os.urandom(32 * MIB))
        number += 1
        assert number < 200, attribute(path, "tier")


def test_written_files_are_uploaded(made: Make, s3: Server, bucket: str) -> None:
    kv = made()
    (kv.path / "d").mkdir()
    (kv.path / "d" / "x y").write_bytes(SMALL)
    (kv.path / "large").write_bytes(LARGE)
    all_uploaded(kv)
    assert keys(s3, bucket) == {"@0/d/x%20y": len(SMALL), "@0/large": len(LARGE)}
    assert attribute(kv.path / "large", "dirty") == "0"
    assert attribute(kv.path / "large", "tier").endswith("+s3")
    assert not list((kv.path.parent / "nvme" / "uploads").glob("*.json"))


def test_upload_of_an_object_that_a_fast_open_reads_is_recorded(made: Make) -> None:
    """The daemon does not know that it is open, until it asks: the record that it has stays."""
    kv = made("ram=64M")
    subprocess.run([*KVFS, "set", kv.path, "s3_delay=60"], check=True)
    path = kv.path / "a"
    path.write_bytes(SMALL)
    wait_for(lambda: kv.status()["fast_open"]["objects"] == 1, "its opens are fast")
    with path.open("rb") as file:
        assert not kv.status()["counters"]["opens_served"]
        assert file.read() == SMALL
        subprocess.run([*KVFS, "flush", kv.path, "--wait"], check=True)
        all_uploaded(kv)
        assert attribute(path, "tier") == "ram+s3"
    kv.idle()
    assert attribute(path, "tier") == "ram+s3"


def test_sparse_file_is_not_uploaded(made: Make, s3: Server, bucket: str) -> None:
    kv = made()
    kv.expect_log("stays on this node only, and user.kvfs.dirty says 1: it is mostly holes")
    with (kv.path / "holes").open("wb") as file:
        file.write(SMALL)
        file.truncate(1 << 40)
    (kv.path / "a").write_bytes(SMALL)
    subprocess.run([*KVFS, "flush", kv.path, "--wait"], check=True)
    all_uploaded(kv)
    assert keys(s3, bucket) == {"@0/a": len(SMALL)}
    assert [attribute(kv.path / name, "dirty") for name in ("a", "holes")] == ["0", "1"]
    said = subprocess.run([*KVFS, "stat", kv.path / "holes"], capture_output=True, check=True)
    assert b"no: it is mostly holes, and s3 would store them as bytes" in said.stdout
    kv.remount()
    assert attribute(kv.path / "holes", "dirty") == "1"
    with (kv.path / "holes").open("rb") as file:
        assert file.read(len(SMALL) + 1) == SMALL + b"\0"
    memory = made("ram=64M", "memory")
    memory.expect_log("stays on this node only, and user.kvfs.dirty says 1: it is mostly holes")
    with (memory.path / "more holes").open("wb") as file:
        file.truncate(1 << 40)
    memory.remount()
    assert os.listdir(memory.path) == ["a"]


def test_spilled_object_keeps_its_name_and_is_hydrated(made: Make) -> None:
    kv = made("ram=32M,nvme={tmp}/nvme,nvme_size=128M")
    path = kv.path / "a"
    path.write_bytes(SMALL)
    all_uploaded(kv)
    before = path.stat()
    spill(kv, path)
    assert path.stat().st_size == len(SMALL)
    assert attribute(path, "tier") == "s3", "a look fetches nothing"
    assert path.read_bytes() == SMALL
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert s3_of(kv)["downloads"] == 1
    assert kv.status()["passthrough"]["on"] == (kv.counter("opens_served") == 0)
    assert attribute(path, "tier") in {"ram+s3", "nvme+s3"}


def test_copies_from_the_bucket_keep_the_hard_quota(made: Make) -> None:
    kv = made()
    directory = kv.path / "n"
    directory.mkdir()
    names = [f"{number}" for number in range(8)]
    for name in names:
        (directory / name).write_bytes(SMALL)
    all_uploaded(kv)
    subprocess.run([*KVFS, "ns", "set", directory, "quota_objects=3", "prefetch=off"], check=True)

    def held() -> int:
        (found,) = [one for one in kv.status()["namespaces"] if one["name"] == "n"]
        return int(found["objects"])

    wait_for(lambda: held() <= 3, "the others are in the bucket only")
    for name in names:
        assert (directory / name).read_bytes() == SMALL
        assert held() <= 3
    assert s3_of(kv)["downloads"] >= len(names) - 3


def test_an_open_waits_for_uploads_that_make_room(made: Make) -> None:
    kv = made("ram=64M,s3_dirty=1G")
    content = os.urandom(8 * MIB)
    (kv.path / "a").write_bytes(content)
    all_uploaded(kv)
    subprocess.run([*KVFS, "set", str(kv.path), "s3_delay=1000"], check=True)
    number = 0
    while attribute(kv.path / "a", "tier") != "s3":
        (kv.path / f"f{number}").write_bytes(content)
        number += 1
        assert number < 9, "it has to go for them"
    assert s3_of(kv)["dirty_objects"] == number
    assert (kv.path / "a").read_bytes() == content
    assert s3_of(kv)["waits"]
    assert s3_of(kv)["dirty_objects"] < number


def test_renames_and_unlinks_reach_the_bucket(made: Make, s3: Server, bucket: str) -> None:
    kv = made()
    (kv.path / "d").mkdir()
    for name in ("a", "b", "d/c"):
        (kv.path / name).write_bytes(SMALL + name.encode())
    all_uploaded(kv)
    (kv.path / "a").rename(kv.path / "a2")
    (kv.path / "b").unlink()
    (kv.path / "d").rename(kv.path / "e")
    wanted = {"@0/a2", "@0/e/c"}
    wait_for(lambda: keys(s3, bucket).keys() == wanted, f"{keys(s3, bucket)} becomes {wanted}")
    (kv.path / "a2").write_bytes(SMALL)
    all_uploaded(kv)
    assert keys(s3, bucket)["@0/a2"] == len(SMALL)
    assert s3_of(kv)["copies"] == 2


def test_a_flush_uploads_at_once(made: Make, s3: Server, bucket: str) -> None:
    kv = made()
    subprocess.run([*KVFS, "set", str(kv.path), "s3_delay=1000"], check=True)
    (kv.path / "a").write_bytes(SMALL)
    assert attribute(kv.path / "a", "dirty") == "1"
    assert s3_of(kv)["dirty_objects"] == 1
    assert not keys(s3, bucket)
    subprocess.run([*KVFS, "flush", str(kv.path), "--wait"], check=True)
    assert keys(s3, bucket) == {"@0/a": len(SMALL)}
    assert attribute(kv.path / "a", "dirty") == "0"


def unfinished(s3: Server, bucket: str) -> list[Any]:
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    found: list[Any] = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    return found


def test_deaths_in_the_middle_of_uploads_leave_nothing_half_made(
    made: Make, s3: Server, bucket: str
) -> None:
    kv = made("ram=512M,nvme={tmp}/nvme,nvme_size=1G")
    (kv.path / "large").write_bytes(LARGE)
    notes = kv.path.parent / "nvme" / "uploads"
    for _ in range(3):
        wait_for(lambda: list(notes.glob("*.json")) or keys(s3, bucket), "it is under way")
        kv.kill_daemon()
    all_uploaded(kv)
    assert keys(s3, bucket) == {"@0/large": len(LARGE)}
    wait_for(lambda: not list(notes.glob("*.json")), "nothing is noted any more")
    assert not unfinished(s3, bucket)
    for path in notes.parent.glob("objects/*/*"):  # so that it has to come back
        path.unlink()
    kv.umount("--now")
    kv.expect_log("went away|is gone|objects/")
    kv.mount()
    assert (kv.path / "large").read_bytes() == LARGE


def test_restart_finds_objects_that_are_not_uploaded(made: Make, s3: Server, bucket: str) -> None:
    kv = made()
    subprocess.run([*KVFS, "set", str(kv.path), "s3_delay=1000"], check=True)
    for number in range(20):
        (kv.path / f"f{number}").write_bytes(SMALL)
    kv.kill_daemon()
    wait_for(lambda: s3_of(kv)["loaded"], "the marks are read")
    assert s3_of(kv)["dirty_objects"] == 20
    kv.remount()
    all_uploaded(kv)
    assert len(keys(s3, bucket)) == 20


def test_without_nvme_an_unmount_uploads(made: Make, s3: Server, bucket: str) -> None:
    kv = made("ram=64M")
    subprocess.run([*KVFS, "set", str(kv.path), "s3_delay=1000"], check=True)
    (kv.path / "a").write_bytes(SMALL)
    kv.umount()
    assert keys(s3, bucket) == {"@0/a": len(SMALL)}
    kv.mount()


@pytest.mark.parametrize(
    ("change", "reason", "code"),
    [
        ({"s3": "s3://no-such-bucket-here"}, "NoSuchBucket", 2),
        ({"s3_endpoint": "http://127.0.0.1:1"}, "s3_required=off mounts without it", 1),
        ({"s3_profile": "nobody"}, "ProfileNotFound", 2),
    ],
)
def test_a_mount_is_refused_before_anything_changes(
    s3: Server, bucket: str, tmp_path: Path, change: dict[str, str], reason: str, code: int
) -> None:
    options = {"s3": f"s3://{bucket}", "s3_endpoint": s3.endpoint, "s3_region": "us-east-1"}
    text = ",".join(f"{name}={value}" for name, value in (options | change).items())
    path = tmp_path / "kv"
    path.mkdir()
    done = subprocess.run(
        [*KVFS, "mount", str(path), "-o", f"ram=32M,nvme={tmp_path}/nvme,nvme_size=64M,{text}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert reason in done.stderr
    assert s3.credentials["AWS_SECRET_ACCESS_KEY"] not in done.stderr
    assert not (tmp_path / "nvme" / "catalog").exists()
    assert not os.path.ismount(path)


def test_an_outage_is_a_miss_and_ends_by_itself(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    mount: Mount,
) -> None:
    own = Server(tmp_path_factory.mktemp("own") / "server")
    try:
        own.start()
        for name, value in own.credentials.items():
            monkeypatch.setenv(name, value)
        make_bucket(own, "bucket")
        kv = mount(
            "ram=32M,nvme={tmp}/nvme,nvme_size=128M,s3=s3://bucket/p,s3_delay=0.1,s3_region=us-east-1,"
            f"s3_endpoint={own.endpoint}"
        )
        kv.allow_log("s3 tier|is tried again|stays in the bucket|not aborted")
        gone, here = kv.path / "gone", kv.path / "here"
        gone.write_bytes(SMALL)
        all_uploaded(kv)
        spill(kv, gone)
        all_uploaded(kv)
        own.kill("rgw")
        here.write_bytes(SMALL)
        wait_for(lambda: s3_of(kv)["state"] == "down", "it is found out")
        assert here.read_bytes() == SMALL
        with pytest.raises(FileNotFoundError):
            gone.read_bytes()
        assert gone.exists(), "a miss at this open only"
        assert s3_of(kv)["dirty_objects"] == 1
        assert s3_of(kv)["oldest_dirty_s"] > 0
        own.start()
        wait_for(lambda: s3_of(kv)["state"] != "down", "it is back")
        all_uploaded(kv)
        assert gone.read_bytes() == SMALL
        kv.umount()
        own.stop()
        kv.allow_log("mounted without the bucket")
        kv.mount(f"{kv.options},s3_required=off")
        assert s3_of(kv)["state"] == "down"
        (kv.path / "meanwhile").write_bytes(SMALL)
        kv.kill_daemon()
        assert s3_of(kv)["state"] == "down"
        own.start()
        all_uploaded(kv)
        assert s3_of(kv)["uploads"] == 1
    finally:
        own.wipe()
