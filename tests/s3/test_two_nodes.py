"""Two real mounts on one real bucket: when each one sees the other's changes."""

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.s3.test_mounted import all_uploaded, attribute, keys, s3_of
from tests.semantics.syscalls import drop_caches

_dice = random.Random(7)
OLD, NEW, OTHER = (_dice.randbytes(300_000) for _ in range(3))
BLOCK = "m@2@1@abc@half"  # of LMCache's fs backend: .tmp, then .data

Two = Callable[..., tuple[Mounted, Mounted]]


@pytest.fixture
def two(s3: Server, bucket: str, mount: Mount) -> Two:
    """`two(options)`: mounts A and B on the prefix `p` of one bucket."""

    def make(options: str = "", **more: str) -> tuple[Mounted, Mounted]:
        def one(name: str) -> Mounted:
            return mount(
                f"ram=64M,s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,"
                f"s3_delay=0.1,s3_recheck=2{options}{more.get(name, '')}",
                name,
            )

        return one("a"), one("b")

    return make


def found(path: Path) -> Path:
    """Wait for a path: on a busy machine a look-up may take longer than an operation waits."""
    wait_for(path.exists, f"{path} is found")
    return path


def gone(s3: Server, bucket: str) -> None:
    wait_for(lambda: not keys(s3, bucket), "the bucket has followed")


def test_object_uploaded_by_one_node_is_found_by_the_other(two: Two) -> None:
    a, b = two()
    (a.path / "d" / "e").mkdir(parents=True)
    path = a.path / "d" / "e" / "k"
    path.write_bytes(OLD)
    path.chmod(0o640)
    path.write_bytes(OLD)
    all_uploaded(a)
    other = found(b.path / "d" / "e" / "k")
    assert attribute(other, "tier") == "s3"
    there, here = path.stat(), other.stat()
    for name in ("st_size", "st_mtime_ns", "st_mode", "st_uid", "st_gid"):
        assert getattr(here, name) == getattr(there, name), name
    assert s3_of(b)["downloads"] == 0
    assert other.read_bytes() == OLD
    assert attribute(other, "tier") == "ram+s3"
    assert attribute(other, "dirty") == "0"
    assert s3_of(b)["found"] == 1
    b.remount()
    assert found(other).read_bytes() == OLD
    for one in (a, b):
        done = subprocess.run(
            [*KVFS, "fsck", one.path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_an_absent_name_is_asked_for_once_a_second(two: Two) -> None:
    _, b = two()

    def believed() -> bool:
        assert not (b.path / "x").exists()
        return bool(s3_of(b)["absent_cached"])

    wait_for(believed, "an answer is believed")
    asked = s3_of(b)["lookups"]
    (b.path / f"{BLOCK}.tmp").write_bytes(OLD)
    assert not (b.path / f"{BLOCK}2.tmp").exists()
    assert s3_of(b)["lookups"] == asked


def test_listing_shows_objects_of_both_nodes(two: Two) -> None:
    a, b = two()
    (a.path / "d").mkdir()
    for number in range(50):
        (a.path / "d" / f"{number}").write_bytes(OLD[: number + 1])
    (a.path / "d" / "7").chmod(0o600)
    (a.path / "d" / "7").write_bytes(OLD[:8])
    (b.path / "own").write_bytes(NEW)
    all_uploaded(a)
    wait_for(lambda: sorted(os.listdir(b.path)) == ["d", "own"], "a directory is listed")
    names = {str(number) for number in range(50)}
    wait_for(lambda: set(os.listdir(b.path / "d")) == names, "so are names")
    assert s3_of(b)["imported"] > 0
    before = (a.path / "d" / "7").stat()
    facts = (before.st_mtime_ns, before.st_mode)

    def true_ones() -> bool:
        listed = {entry.name: entry.stat() for entry in os.scandir(b.path / "d")}
        assert {name: one.st_size for name, one in listed.items()} == {
            name: int(name) + 1 for name in names
        }
        return (listed["7"].st_mtime_ns, listed["7"].st_mode) == facts

    wait_for(true_ones, "they have their own times and modes")
    for number in range(25):
        (a.path / "d" / f"{number}").unlink()
    left = {str(number) for number in range(25, 50)}
    wait_for(lambda: set(os.listdir(b.path / "d")) == left, "what was unlinked is not listed")


def test_deletes_and_new_versions_of_others_are_seen(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    for name in ("k", "gone"):
        (a.path / name).write_bytes(OLD)
    all_uploaded(a)
    assert found(b.path / "gone").stat().st_size == len(OLD)
    with found(b.path / "k").open("rb", buffering=0) as file:
        half = len(OLD) // 2
        assert file.read(half) == OLD[:half]
        (a.path / "k").write_bytes(NEW + OTHER)
        (a.path / "gone").unlink()
        all_uploaded(a)
        assert file.read() == OLD[half:]
        wait_for(lambda: not (b.path / "gone").exists(), "what only the bucket had is gone")
    seen: set[bytes] = set()

    def is_new() -> bool:
        seen.add((b.path / "k").read_bytes())
        return NEW + OTHER in seen

    wait_for(is_new, "the new bytes are seen")
    assert seen <= {OLD, NEW + OTHER}
    wait_for(lambda: s3_of(a)["to_delete"] == 0, "all is deleted")
    assert keys(s3, bucket) == {"@0/k": len(NEW + OTHER)}


def test_an_open_asks_the_bucket_itself(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    subprocess.run([*KVFS, "ns", "set", b.path, "prefetch=off"], check=True, capture_output=True)
    names = [str(number) for number in range(20)]
    for name in names:
        (a.path / name).write_bytes(OLD)
    all_uploaded(a)
    for name in names:
        assert found(b.path / name).stat().st_size == len(OLD)
    drop_caches()
    assert (b.path / names[0]).read_bytes() == OLD
    for name in names[10:]:
        (a.path / name).unlink()
    wait_for(lambda: len(keys(s3, bucket)) == 10, "the bucket has followed")
    for name in names[10:15]:
        with pytest.raises(FileNotFoundError):
            (b.path / name).open("rb")
    (b.path / names[15]).exists()
    wait_for(lambda: not (b.path / names[15]).exists(), "the bucket's answer counts")
    for name in names[16:]:
        assert not (b.path / name).exists(), "it opens nothing now, so that each look asks"


def test_listing_shows_objects_of_the_other_node(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    (a.path / "d").mkdir()
    for name in ("k", "m", "n"):
        (a.path / "d" / name).write_bytes(OLD)
    all_uploaded(a)
    for name in ("k", "m", "n"):
        assert found(b.path / "d" / name).read_bytes() == OLD
    inode = (b.path / "d" / "n").stat().st_ino

    def listed() -> dict[str, int]:
        return {entry.name: entry.stat().st_size for entry in os.scandir(b.path / "d")}

    wait_for(lambda: listed() == {"k": len(OLD), "m": len(OLD), "n": len(OLD)}, "all are listed")
    (a.path / "d" / "k").unlink()
    (a.path / "d" / "m").write_bytes(NEW + OTHER)
    all_uploaded(a)
    wait_for(lambda: "@0/d/k" not in keys(s3, bucket), "the bucket has followed")
    downloads = s3_of(b)["downloads"]
    wait_for(lambda: listed() == {"m": len(NEW + OTHER), "n": len(OLD)}, "the listing tells")
    assert s3_of(b)["downloads"] == downloads
    assert (b.path / "d" / "n").stat().st_ino == inode
    assert attribute(b.path / "d" / "n", "tier") == "ram+s3"
    assert (b.path / "d" / "m").read_bytes() == NEW + OTHER


def test_a_bare_listing_sees_it_too(two: Two, s3: Server, bucket: str) -> None:
    # As `ls` without any option: no name is ever looked at.
    a, b = two()
    for name in ("k", "n"):
        (a.path / name).write_bytes(OLD)
    all_uploaded(a)
    for name in ("k", "n"):
        assert found(b.path / name).read_bytes() == OLD
    (a.path / "k").unlink()
    wait_for(lambda: "@0/k" not in keys(s3, bucket), "the bucket has followed")
    wait_for(lambda: os.listdir(b.path) == ["n"], "the listing tells")


def test_unlinked_and_renamed_objects_do_not_come_back(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    (a.path / "d").mkdir()
    for name in ("x", "y", "d/z"):
        (a.path / name).write_bytes(OLD)
    all_uploaded(a)
    found(b.path / "x").unlink()
    found(b.path / "y").rename(b.path / "y2")
    found(b.path / "d").rename(b.path / "e")
    wanted = {"@0/y2", "@0/e/z"}

    def followed() -> bool:
        for name in ("x", "y", "d"):
            assert not (b.path / name).exists(), name
            assert name not in os.listdir(b.path), name
        return keys(s3, bucket).keys() == wanted

    wait_for(followed, "the bucket has followed")
    assert followed()
    assert (b.path / "e" / "z").read_bytes() == OLD
    wait_for((a.path / "y2").exists, "the other one finds its new name")
    assert (a.path / "y2").read_bytes() == OLD


def test_a_namespace_is_found(two: Two, tmp_path: Path) -> None:
    templates = tmp_path / "namespaces.toml"
    templates.write_text('[namespace."m-*"]\nweight = 7\n')
    a, b = two(b=f",namespaces={templates}")
    for name in ("m-1", "n"):
        subprocess.run([*KVFS, "ns", "create", a.path / name, "version=4"], check=True)
        (a.path / name / "k").write_bytes(OLD)
    all_uploaded(a)
    for name, weight in (("m-1", "7"), ("n", "")):
        assert found(b.path / name / "k").read_bytes() == OLD
        told = {
            key: os.getxattr(b.path / name, f"user.kvfs.{key}").decode()
            for key in ("version", "weight")
        }
        default = os.getxattr(b.path, "user.kvfs.weight").decode()
        assert told == {"version": "4", "weight": weight if name == "m-1" else default}


@contextmanager
def away(s3: Server) -> Iterator[None]:
    s3.kill("rgw")
    try:
        yield
    finally:
        s3.start()


def test_a_bucket_that_is_away_is_a_miss(two: Two, s3: Server) -> None:
    a, b = two()
    b.allow_log("s3 tier|is tried again|record is not in")
    a.allow_log("s3 tier|is tried again|record is not in")
    (a.path / "k").write_bytes(OLD)
    all_uploaded(a)
    with away(s3):
        assert not (b.path / "k").exists()
        (b.path / "own").write_bytes(NEW)
        assert (b.path / "own").read_bytes() == NEW
        assert os.listdir(b.path) == ["own"]
        wait_for(lambda: (b.path / "k").exists() or s3_of(b)["failures"], "it is noticed")
        assert not (b.path / "k").exists()
    wait_for((b.path / "k").exists, "it is back")
    assert (b.path / "k").read_bytes() == OLD
    all_uploaded(b)


def test_an_import(two: Two, s3: Server, bucket: str) -> None:
    a, b = two(b=",s3_shared=off")
    b.expect_log("an object is skipped")
    deep = Path("d", "e" * 250, "f" * 250, "g" * 250, "h" * 250)
    (a.path / deep).mkdir(parents=True)
    for name in ("k", "d/k", deep / "k"):
        (a.path / name).write_bytes(OLD)
    all_uploaded(a)
    client = boto3.session.Session().client("s3", endpoint_url=s3.endpoint)
    client.put_object(Bucket=bucket, Key="p/@0/strange", Body=b"x")
    assert not (b.path / "k").exists()
    assert os.listdir(b.path) == []
    assert s3_of(b)["lookups"] == 0
    asked = [*KVFS, "import", str(b.path)]
    done = subprocess.run([*asked, "d"], capture_output=True, text=True, check=True)
    assert ": 2 names are new, 0 were known, 0 were refused" in done.stdout
    assert os.listdir(b.path) == ["d"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert ": 1 names are new, 2 were known, 1 were refused" in done.stdout
    assert "1: no object of this kvfs" in done.stdout
    assert (b.path / "k").stat().st_mtime_ns == (a.path / "k").stat().st_mtime_ns
    assert (b.path / deep / "k").read_bytes() == OLD
    assert s3_of(b)["lookups"] == 0
    done = subprocess.run([*asked, "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"nowhere: no such path on {b.path} or in s3://{bucket}/p/" in done.stderr
    done = subprocess.run([*asked, "d", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, "a part of it was done"
    done = subprocess.run([*asked, "/"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected a path below" in done.stderr


def test_written_on_one_node_read_on_another(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    path = Path("d", "k")
    assert not (b.path / path).exists()
    (a.path / "d").mkdir()
    (a.path / path).write_bytes(OLD)
    wait_for((b.path / path).exists, "it is there")
    assert (b.path / path).stat().st_mtime_ns == (a.path / path).stat().st_mtime_ns
    with (b.path / path).open("rb", buffering=0) as file:
        assert file.read(1000) == OLD[:1000]
        (a.path / path).unlink()
        gone(s3, bucket)
        assert file.read() == OLD[1000:]
    wait_for(lambda: not (b.path / path).exists(), "it is gone")


def test_deleted_by_one_made_by_another(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    (a.path / "k").write_bytes(OLD)
    all_uploaded(a)
    assert found(b.path / "k").exists()
    (a.path / "k").unlink()
    gone(s3, bucket)
    wait_for(lambda: not (b.path / "k").exists(), "it is gone for the other one")
    (b.path / "k").write_bytes(NEW)
    wait_for((a.path / "k").exists, "it is there again")
    assert (a.path / "k").read_bytes() == NEW


def test_the_same_name_at_the_same_time(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    b.expect_log("stays on this node only")
    for one in (a, b):
        subprocess.run([*KVFS, "set", str(one.path), "s3_delay=1000"], check=True)
    for one, content in ((a, OLD), (b, NEW)):
        (one.path / "k").write_bytes(content)
        (one.path / "block").write_bytes(OTHER)
    for one in (a, b):
        subprocess.run([*KVFS, "flush", str(one.path), "--wait"], check=True)
    assert (s3_of(a)["conflicts"], s3_of(b)["conflicts"]) == (0, 1)
    assert keys(s3, bucket).keys() == {"@0/k", "@0/block"}
    assert [(one.path / "k").read_bytes() for one in (a, b)] == [OLD, NEW]
    assert attribute(b.path / "block", "tier") == "ram+s3"
    assert attribute(b.path / "k", "tier") == "ram"
    wait_for(lambda: attribute(b.path / "k", "dirty") == "conflict", "all is looked for")
    assert attribute(a.path / "k", "dirty") == "0"
    (b.path / "k").unlink()
    assert found(b.path / "k").read_bytes() == OLD
    subprocess.run([*KVFS, "set", str(b.path), "s3_shared=off"], check=True)  # it was quicker
    for one, name, content in ((a, "of-a", OLD), (b, "of-b", NEW)):
        (one.path / name).write_bytes(content)
        subprocess.run([*KVFS, "flush", str(one.path), "--wait"], check=True)
    for one, name in ((a, "of-a"), (b, "of-b")):
        (one.path / name).rename(one.path / "m")
        subprocess.run([*KVFS, "flush", str(one.path), "--wait"], check=True)
    left = {"@0/k", "@0/block", "@0/m"}
    wait_for(lambda: keys(s3, bucket).keys() == left, "the other name goes")
    assert s3_of(b)["conflicts"] == 2
    assert (attribute(b.path / "m", "tier"), attribute(b.path / "m", "dirty")) == (
        "ram",
        "conflict",
    )
    assert [(one.path / "m").read_bytes() for one in (a, b)] == [OLD, NEW]


def make_conflict(a: Mounted, b: Mounted, *names: str) -> None:
    """Upload A's files of these names first, so that B's stay on B."""
    b.expect_log("stays on this node only")
    for one in (a, b):
        subprocess.run([*KVFS, "set", str(one.path), "s3_delay=1000"], check=True)
    for one, content in ((a, OLD), (b, NEW)):
        for name in names:
            (one.path / name).write_bytes(content)
    for one in (a, b):
        subprocess.run([*KVFS, "flush", str(one.path), "--wait"], check=True)
        subprocess.run([*KVFS, "set", str(one.path), "s3_delay=0.1"], check=True)
    assert s3_of(b)["in_conflict"] == len(names)


def test_a_name_that_is_free_again(two: Two, s3: Server, bucket: str) -> None:
    a, b = two(b=",nvme={tmp}/nvme,nvme_size=256M")
    make_conflict(a, b, "k", "m")
    (a.path / "m").write_bytes(OTHER)
    all_uploaded(a)
    (a.path / "k").unlink()
    wait_for(lambda: s3_of(b)["conflicts_ended"] == 1, "nobody looks at it, and it ends")
    all_uploaded(b)
    assert keys(s3, bucket) == {"@0/k": len(NEW), "@0/m": len(OTHER)}
    assert (attribute(b.path / "k", "tier")[-3:], attribute(b.path / "k", "dirty")) == ("+s3", "0")
    assert "no other object has its name" in b.log.read_text()
    wait_for((a.path / "k").exists, "the other one finds it")
    assert (a.path / "k").read_bytes() == NEW
    assert attribute(b.path / "m", "dirty") == "conflict"
    assert (b.path / "m").read_bytes() == NEW
    b.kill_daemon()
    wait_for(lambda: s3_of(b)["in_conflict"] == 1, "the next daemon knows it")
    b.remount()
    wait_for(lambda: s3_of(b)["in_conflict"] == 1, "so does the next mount")
    (a.path / "m").unlink()
    wait_for(lambda: s3_of(b)["in_conflict"] == 0, "it ends there, too")
    all_uploaded(b)
    assert keys(s3, bucket) == {"@0/k": len(NEW), "@0/m": len(NEW)}


def test_flush_asks_for_conflicts_that_are_over(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    make_conflict(a, b, "k", "m")
    subprocess.run([*KVFS, "set", str(b.path), "s3_recheck=1000"], check=True)
    (a.path / "k").unlink()
    wait_for(lambda: keys(s3, bucket) == {"@0/m": len(OLD)}, "the bucket has followed")

    def flushed() -> bool:  # an answer may have been on its way when the name became free
        subprocess.run([*KVFS, "flush", str(b.path), "--wait"], check=True)
        return keys(s3, bucket) == {"@0/k": len(NEW), "@0/m": len(OLD)}

    wait_for(flushed, "what is free is there")
    assert s3_of(b)["in_conflict"] == 1
    assert (b.path / "m").read_bytes() == NEW
    b.remount()  # without NVMe nothing here outlives that, and the name is that of the other one
    assert found(b.path / "m").read_bytes() == OLD
    assert s3_of(b)["in_conflict"] == 0


def test_of_two_that_wait_for_a_name_one_gets_it(
    two: Two, s3: Server, bucket: str, mount: Mount
) -> None:
    a, b = two()
    c = mount(
        f"ram=64M,s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,"
        "s3_delay=1000,s3_recheck=2",
        "c",
    )
    c.expect_log("stays on this node only")
    (c.path / "k").write_bytes(OTHER)
    make_conflict(a, b, "k")
    subprocess.run([*KVFS, "flush", str(c.path), "--wait"], check=True)
    assert s3_of(c)["in_conflict"] == 1
    subprocess.run([*KVFS, "set", str(c.path), "s3_delay=0.1"], check=True)
    with away(s3):
        for one in (a, b, c):
            one.allow_log("s3 tier|is tried again|record is not in")
        (a.path / "k").unlink()
        assert [(one.path / "k").read_bytes() for one in (b, c)] == [NEW, OTHER]

    def ended() -> bool:
        told = [s3_of(one) for one in (b, c)]
        return any(one["conflicts_ended"] for one in told) and not any(
            one["dirty_objects"] for one in told
        )

    wait_for(ended, "one of them has gone up")
    wait_for(lambda: s3_of(b)["in_conflict"] + s3_of(c)["in_conflict"] == 1, "only one")
    winner, loser = (b, c) if s3_of(c)["in_conflict"] else (c, b)
    assert keys(s3, bucket) == {"@0/k": len((winner.path / "k").read_bytes())}
    assert (loser.path / "k").read_bytes() in {NEW, OTHER} - {(winner.path / "k").read_bytes()}
    wait_for((a.path / "k").exists, "it is found")
    assert (a.path / "k").read_bytes() == (winner.path / "k").read_bytes()


def test_replaced_or_unlinked_in_the_moment_of_an_open(two: Two, s3: Server, bucket: str) -> None:
    a, b = two()
    for number in range(3):
        k, m = f"k{number}", f"m{number}"
        (a.path / k).write_bytes(OLD + NEW)
        (a.path / m).write_bytes(OTHER)
        all_uploaded(a)
        for name in (k, m):
            found(b.path / name).stat()
        (a.path / k).write_bytes(NEW)
        (a.path / m).unlink()
        left = {f"@0/k{one}": len(NEW) for one in range(number + 1)}
        wait_for(lambda: keys(s3, bucket) == left, "the bucket has followed")  # noqa: B023 (it is called at once)
        assert (b.path / k).read_bytes() == NEW
        with pytest.raises(FileNotFoundError):
            (b.path / m).read_bytes()
    assert (s3_of(b)["state"], s3_of(b)["failures"], s3_of(b)["why"]) == ("healthy", 0, "")
    assert " ERROR " not in b.log.read_text()
