import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvfs import prefix
from kvfs.control import request
from kvfs.errors import ConfigError
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import NOBODY, as_nobody, opened, refused

M = 1 << 20
SMALL = "ram=16M,nvme={tmp}/nvme,nvme_size=48M"
ONE_TIER = ["ram=48M", "ram=0,nvme={tmp}/nvme,nvme_size=48M"]
OPEN_OR_CLOSE = {"257", "3", "56", "57"}  # openat and close, of x86-64 and of arm64
FOR_EVER = "1B"  # byte/s: who owes a MiB waits for 12 days


def tell(directory: Path, **settings: str) -> None:
    for name, text in settings.items():
        os.setxattr(directory, f"user.kvfs.{name}", text.encode())


def told(directory: Path, name: str) -> str:
    return os.getxattr(directory, f"user.kvfs.{name}").decode()


def change(mounted: Mounted, name: str, **settings: str) -> None:
    request(mounted.path, "ns_set", name=name, settings=settings)


def show(mounted: Mounted, name: str) -> dict[str, Any]:
    return request(mounted.path, "ns_show", name=name)


def held(mounted: Mounted, name: str) -> dict[str, int]:
    """Objects by tier."""
    tiers = show(mounted, name)["tiers"].items()
    return {name: tier["objects"] for name, tier in tiers if tier["objects"]}


def namespace(mounted: Mounted, name: str, **settings: str) -> Path:
    request(mounted.path, "ns_create", name=name, settings=settings, uid=0, gid=0)
    return mounted.path / name


def write(directory: Path, names: list[str], size: int = M) -> None:
    for name in names:
        (directory / name).write_bytes(name.encode() * (size // len(name)))


def left(directory: Path, names: list[str]) -> list[str]:
    """Those of the names that are there, complete."""
    found = []
    for name in names:
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:  # perhaps a moment ago
            continue
        assert set(content) == set(name.encode())
        found.append(name)
    return found


def learn(directory: Path) -> None:
    """Let kvfs know the size of .kv files in a namespace, so that the next ones begin in RAM."""
    write(directory, ["a.kv"])
    (directory / "a.kv").unlink()


def numbered(first: int, end: int, suffix: str = "kv") -> list[str]:
    return [f"{number:04}.{suffix}" for number in range(first, end)]


def counted(mounted: Mounted, name: str, objects: int) -> None:
    wait_for(lambda: show(mounted, name)["objects"] == objects, f"{name} has {objects} objects")


def gone(mounted: Mounted) -> None:
    wait_for(lambda: not request(mounted.path, "ns_list")["dropped"], "space has followed")


def test_namespace_is_a_top_level_directory_with_settings(here: Path, shared: Mounted) -> None:
    (here / "a" / "b").mkdir(parents=True)
    write(here, numbered(0, 2))
    assert show(shared, here.name)["own"] is False
    shared.idle()  # the kernel tells of a file's end after its close
    others = show(shared, ".")["objects"]
    tell(here, weight="200")
    assert show(shared, here.name)["own"] is True
    write(here / "a" / "b", numbered(2, 5))
    counted(shared, here.name, 5)
    assert show(shared, here.name)["bytes"] == sum(
        file.stat().st_blocks * 512 for file in here.rglob("*.kv")
    )
    assert show(shared, ".")["objects"] == others - 2


def test_namespace_is_made_by_mkdir_attribute_or_command(mount: Mount, tmp_path: Path) -> None:
    templates = tmp_path / "templates.toml"
    templates.write_text('[namespace."vllm-*"]\nquota_hard = "64M"\nttl = "2d"\n')
    kv = mount(f"{SMALL},namespaces={templates}")
    (kv.path / "vllm-8b").mkdir()
    assert told(kv.path / "vllm-8b", "quota_hard") == "64M"
    (kv.path / "plain").mkdir()
    write(kv.path / "plain", numbered(0, 3))
    assert told(kv.path / "plain", "ttl") == "0"
    change(kv, "plain", weight="7")
    counted(kv, "plain", 3)
    namespace(kv, "made", pin="on")
    (kv.path / "by-attribute").mkdir()
    tell(kv.path / "by-attribute", priority="bulk")
    names = {one["name"] for one in request(kv.path, "ns_list")["namespaces"]}
    assert names == {".", "vllm-8b", "plain", "made", "by-attribute"}

    kv.remount()
    counted(kv, "plain", 3)
    assert told(kv.path / "made", "pin") == "on"
    (kv.path / "made").rmdir()
    (kv.path / "made").mkdir()
    assert told(kv.path / "made", "pin") == "off"


def test_settings_as_attributes(here: Path, shared: Mounted) -> None:
    assert told(here, "eviction") == "adaptive"
    assert os.listxattr(here) == []
    tell(here, ttl="90m", quota_hard="2G")
    assert (told(here, "ttl"), told(here, "quota_hard")) == ("90m", "2G")
    assert sorted(os.listxattr(here)) == ["user.kvfs.quota_hard", "user.kvfs.ttl"]
    shared.expect_log("attribute user.kvfs.* is refused")
    for name, text in (("quota_hard", "much"), ("quota_soft", "3G"), ("pin", "on"), ("nix", "1")):
        with refused(errno.EINVAL):
            tell(here, **{name: text})
    assert "quota_soft=3G contradicts quota_hard=2G" in shared.log.read_text()
    assert sorted(os.listxattr(here)) == ["user.kvfs.quota_hard", "user.kvfs.ttl"]
    os.removexattr(here, "user.kvfs.ttl")
    assert told(here, "ttl") == "0"
    with refused(errno.ENODATA):
        told(here, "nix")
    (here / "sub").mkdir()
    (here / "file").touch()
    for path in (here / "sub", here / "file"):
        with refused(errno.EINVAL):
            tell(path, ttl="1h")
    os.setxattr(here / "sub", "user.other", b"as ever")
    set_it, remove_it = (
        partial(os.setxattr, ".", "user.kvfs.ttl", b"1h"),
        partial(os.removexattr, ".", "user.kvfs.quota_hard"),
    )
    assert [as_nobody(here, call) for call in (set_it, remove_it)] == [errno.EACCES] * 2
    os.chown(here, NOBODY, NOBODY)
    assert [as_nobody(here, call) for call in (set_it, remove_it)] == [errno.EPERM] * 2
    assert as_nobody(here, partial(os.setxattr, ".", "user.other", b"as ever")) == 0
    assert as_nobody(here, partial(os.getxattr, ".", "user.kvfs.quota_hard")) == 0
    assert (told(here, "ttl"), told(here, "quota_hard")) == ("0", "2G")


def test_hard_quota(here: Path, shared: Mounted) -> None:
    tell(here, quota_hard="9M", quota_objects="6", eviction="fifo")
    other = namespace(shared, "beside-hard-quota")
    write(other, numbered(0, 3))
    write(here, numbered(0, 20))
    there = left(here, numbered(0, 20))
    assert len(there) == 6
    assert set(there) > set(numbered(16, 20))  # closes may overtake each other
    tell(here, quota_objects="0")
    write(here, numbered(20, 40))
    there = left(here, numbered(0, 40))
    assert 7 <= len(there) <= 9
    assert set(there) > set(numbered(36, 40))
    assert show(shared, here.name)["bytes"] <= 9 * M
    with opened(here / "large", os.O_CREAT | os.O_WRONLY) as descriptor:
        for _ in range(6):
            os.write(descriptor, b"x" * M)
        wait_for(lambda: len(left(here, numbered(0, 40))) <= 3, "others make room while it grows")
    assert show(shared, here.name)["bytes"] <= 9 * M
    wait_for(lambda: len(left(here, numbered(0, 40))) <= 3, "others made room for it")
    assert (here / "large").stat().st_size == 6 * M
    assert left(other, numbered(0, 3)) == numbered(0, 3)
    for name in numbered(0, 3):
        (other / name).unlink()
    other.rmdir()


def test_quota_exceeded(here: Path, shared: Mounted) -> None:
    tell(here, quota_hard="4M", eviction="never")
    write(here, numbered(0, 4))
    for _ in range(2):
        with refused(errno.EDQUOT):
            os.open(here / "more.kv", os.O_CREAT | os.O_WRONLY)
    assert not (here / "more.kv").exists()
    (here / "directory").mkdir()
    (here / "link").symlink_to("0000.kv")
    (shared.path / "elsewhere.kv").write_bytes(b"x" * M)
    with refused(errno.EDQUOT):
        (shared.path / "elsewhere.kv").rename(here / "elsewhere.kv")
    assert (shared.path / "elsewhere.kv").read_bytes() == b"x" * M
    (shared.path / "elsewhere").mkdir()
    (shared.path / "elsewhere.kv").rename(shared.path / "elsewhere" / "x.kv")
    with refused(errno.EDQUOT):
        (shared.path / "elsewhere").rename(here / "elsewhere")
    (shared.path / "elsewhere" / "x.kv").unlink()
    (shared.path / "elsewhere").rename(here / "elsewhere")
    (shared.path / "large.kv").write_bytes(b"x" * (5 * M))
    tell(here, eviction="lru")
    with refused(errno.EDQUOT):
        (shared.path / "large.kv").rename(here / "large.kv")
    (shared.path / "large.kv").unlink()
    assert left(here, numbered(0, 4)) == numbered(0, 4)
    (here / "0002.kv").unlink()
    write(here, ["more.kv"])


@pytest.mark.parametrize("tier", ONE_TIER)
def test_namespace_furthest_over_its_share_gives_room(mount: Mount, tier: str) -> None:
    kv = mount(tier)
    soft, heavy, light = (
        namespace(kv, "soft", quota_soft="4M", weight="1000"),
        namespace(kv, "heavy", weight="300"),
        namespace(kv, "light"),
    )
    names = numbered(0, 12)
    for name in names:
        write(soft, [name])
        kv.check_gauges()  # closes may overtake each other
    for space in (heavy, light):
        write(space, names)
    write(heavy, numbered(12, 20))
    write(light, numbered(12, 18))  # 50M in all; the tier has 48M, of which RAM keeps 3M free
    assert left(heavy, numbered(0, 20)) == numbered(0, 20)
    assert left(light, numbered(0, 18)) == numbered(0, 18)
    there = left(soft, names)
    assert there == names[12 - len(there) :]
    assert 4 <= len(there) < 12
    write(heavy, numbered(20, 30))  # for a weight of 100 these are less than what light has
    assert left(heavy, numbered(0, 30)) == numbered(0, 30)
    assert len(left(soft, names)) >= 3
    assert len(left(light, numbered(0, 18))) < 16


@pytest.mark.parametrize("tier", ONE_TIER)
def test_namespace_over_its_share_gives_room_to_growing_files(mount: Mount, tier: str) -> None:
    kv = mount(tier)
    kv.expect_log("is cut off")
    small, large = namespace(kv, "small"), namespace(kv, "large")
    write(small, numbered(0, 12))
    write(large, numbered(0, 10))
    kv.idle()
    files = [os.open(large / f"{number}.bin", os.O_CREAT | os.O_WRONLY) for number in range(4)]
    for _ in range(30):
        for file in files:
            with suppress(OSError):  # RAM may end before the daemon looks
                os.write(file, b"x" * M)
    assert left(small, numbered(0, 12)) == numbered(0, 12)
    write(small, numbered(12, 16))
    assert left(small, numbered(0, 16)) == numbered(0, 16)
    assert left(large, numbered(0, 10)) == []
    said = set()
    for file in files:
        try:
            os.close(file)
        except OSError as error:
            said.add(error.errno)
    assert said == {errno.ENOSPC}


def test_policy_decides_which_object_is_dropped_first(here: Path, shared: Mounted) -> None:
    write(here, ["a.kv"])
    (here / "a.kv").unlink()  # how large they are is known from now on: all go to the same tier
    for policy, first in (("lru", 1), ("lfu", 1), ("adaptive", 1), ("fifo", 0), ("ttl", 0)):
        tell(here, eviction=policy, quota_objects="4", ttl="1d")
        for name in numbered(0, 4):
            write(here, [name])
            shared.check_gauges()  # closes may overtake each other
        (here / "0000.kv").read_bytes()
        shared.check_gauges()  # what is still being closed does not go
        write(here, numbered(4, 5))
        assert left(here, numbered(0, 5)) == [n for n in numbered(0, 5) if n != f"{first:04}.kv"]
        for name in numbered(0, 5):
            (here / name).unlink(missing_ok=True)


def test_prefixes_go_from_their_end(here: Path, shared: Mounted) -> None:
    write(here, ["a.kv"])
    (here / "a.kv").unlink()  # how large they are is known from now on: all go to the same tier
    for policy in ("lru", "fifo", "adaptive"):
        tell(here, eviction=policy, quota_objects="0")
        keys = [prefix.root_key("a model"), *(prefix.root_key(f"{n}") for n in range(8))]
        chain = [prefix.path(*two, "kv") for two in pairwise(keys)]
        for path in chain:
            (here / path).parent.mkdir()
        write(here, chain)
        counted(shared, here.name, len(chain))  # none is being closed
        tell(here, quota_objects="4")
        write(here, ["another.kv"])
        assert left(here, chain) == chain[:3], policy
        for file in list(here.iterdir()):
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def test_groups(here: Path) -> None:
    tell(here, quota_hard="8M")
    blocks = [
        [f"meta-SEP-llama@2@{rank}@{number:x}@bfloat16.data" for rank in range(2)]
        for number in range(8)
    ]
    for shards in blocks:
        write(here, shards)
    there = [len(left(here, shards)) for shards in blocks]
    assert there[-3:] == [2, 2, 2]
    assert set(there) == {0, 2}


def test_ttl(here: Path, shared: Mounted) -> None:
    tell(here, ttl="1h")
    write(here, ["young.kv", "old.kv", "open.kv"])
    shared.idle()  # who has written them may still be closing them
    wait_for(lambda: not shared.status()["open_handles"], "every RELEASE has come")
    past = time.time() - 2 * 3600
    with opened(here / "open.kv", os.O_RDONLY) as descriptor:
        os.utime(here / "old.kv", (time.time(), past))
        os.utime(here / "open.kv", (time.time(), past))
        with refused(errno.ENOENT):
            os.open(here / "old.kv", os.O_RDONLY)
        assert os.pread(descriptor, 7, 0) == b"open.kv"
    wait_for(lambda: sorted(os.listdir(here)) == ["young.kv"], "names are gone")
    counted(shared, here.name, 1)
    tell(here, ttl_from="use")
    os.utime(here / "young.kv", (time.time(), past))
    assert left(here, ["young.kv"]) == ["young.kv"]
    os.utime(here / "young.kv", (past, time.time()))
    with refused(errno.ENOENT):
        os.open(here / "young.kv", os.O_RDONLY)


def test_files_that_are_pinned(here: Path, shared: Mounted) -> None:
    block = [f"meta-SEP-llama@2@{rank}@5eed@bfloat16.data" for rank in range(2)]
    write(here, ["a.kv", *block])
    shared.idle()
    for name in ("a.kv", block[0]):
        tell(here / name, pin="on")
    (here / "a.kv").chmod(0o666)
    unpin = partial(os.setxattr, "a.kv", "user.kvfs.pin", b"off")
    assert as_nobody(here, unpin) == errno.EPERM
    (here / "a.kv").rename(here / "b.kv")
    with (here / "b.kv").open("r+b") as file:
        file.write(b"b" * M)
    tell(here, eviction="lru", quota_objects="3")
    for name in numbered(0, 6):
        write(here, [name])
        shared.check_gauges()  # what is still being closed does not go
    assert (here / "b.kv").read_bytes()[:M] == b"b" * M
    assert left(here, block) == block[:1]
    assert told(here / "b.kv", "pin") == "on"
    (here / "0005.kv").rename(here / "b.kv")
    assert told(here / "b.kv", "pin") == "off"
    tell(here / block[0], pin="off")
    for name in numbered(6, 12):
        write(here, [name])
        shared.check_gauges()
    assert left(here, block) == []


def test_pinned_and_never_evicted_objects_are_never_dropped(mount: Mount) -> None:
    kv = mount(SMALL)
    kv.allow_log("nothing is demoted: .* namespace never has")
    never = namespace(kv, "never", eviction="never", quota_soft="1")  # each is asked first
    pinned = namespace(kv, "pinned", pin="on", quota_soft="1")
    chosen = namespace(kv, "chosen", eviction="lru")
    chunks = [f"meta-llama@1@0@{number:x}@bfloat16.pt" for number in range(6)]
    (kv.path / "lmcache").mkdir()
    for directory in (kv.path, never, pinned):
        learn(directory)
    write(never, numbered(0, 6))
    write(pinned, numbered(0, 4))
    write(kv.path / "lmcache", chunks)
    write(chosen, chunks)
    for _ in range(2):
        (kv.path / "other").mkdir()
        write(kv.path / "other", numbered(0, 100))
        for name in numbered(0, 100):
            (kv.path / "other" / name).unlink(missing_ok=True)
        (kv.path / "other").rmdir()
    write(kv.path, numbered(0, 100))
    assert left(never, numbered(0, 6)) == numbered(0, 6)
    assert left(pinned, numbered(0, 4)) == numbered(0, 4)
    assert held(kv, "pinned")["ram"] == 4
    assert left(kv.path / "lmcache", chunks) == chunks
    change(kv, "chosen", quota_objects="3")
    write(chosen, ["more.pt"])
    assert len(left(chosen, chunks)) <= 2


@pytest.mark.parametrize("tier", ONE_TIER)
def test_tier_full_of_unevictable_objects_is_enospc(mount: Mount, tier: str) -> None:
    kv = mount(tier)
    write(kv.path, ["a.kv"])
    kv.allow_log("is cut off")
    (kv.path / "a.kv").unlink()  # or the mount's own files would have its room to share
    kept = namespace(kv, "kept", eviction="never")
    names = numbered(0, 60)
    written = []
    with refused(errno.ENOSPC):
        for name in names:
            write(kept, [name])
            written.append(name)
    assert 40 <= len(written) <= 48
    with refused(errno.ENOSPC):
        write(kv.path, numbered(0, 4))
    assert left(kept, written) == written
    for name in written[:10]:
        (kept / name).unlink()
    write(kv.path, numbered(0, 4))
    assert left(kv.path, numbered(0, 4)) == numbered(0, 4)


def test_media(mount: Mount) -> None:
    kv = mount(SMALL)
    cold, hot = namespace(kv, "cold", media="nvme"), namespace(kv, "hot", media="ram")
    write(cold, numbered(0, 8))
    for name in numbered(0, 8) * 3:
        (cold / name).read_bytes()
    kv.idle()
    assert held(kv, "cold") == {"nvme": 8}
    write(hot, numbered(0, 40))
    there = left(hot, numbered(0, 40))
    # One that the kernel had not released yet was open, and outlives some that are younger.
    assert there[-4:] == numbered(36, 40)
    assert 8 <= len(there) <= 16
    assert set(held(kv, "hot")) == {"ram"}
    with pytest.raises(ConfigError, match=r"media=s3: this mount has no s3 tier"):
        namespace(kv, "far", media="s3")
    kv.remount()
    assert left(kv.path / "cold", numbered(0, 8)) == numbered(0, 8)
    assert left(kv.path / "hot", numbered(0, 40)) == []
    write(hot, ["new.kv"])
    kv.remount(kv.options.replace("ram=16M", "ram=0"))
    for _ in range(2):
        with refused(errno.ENOSPC):
            os.open(hot / "newer.kv", os.O_CREAT | os.O_WRONLY)
    why = "its objects may be in media=ram, and the mount has nvme only"
    kv.expect_log(f"WARNING .* namespace hot takes no new file: {why}")
    assert why in show(kv, "hot")["problem"]
    write(kv.path / "cold", numbered(8, 9))


def test_compressed_on_nvme(mount: Mount) -> None:
    kv = mount("ram=32M,nvme={tmp}/nvme,nvme_size=128M")
    directory = namespace(kv, "n", compression="nvme", write="through")
    (directory / "first").write_bytes(b"x")  # begins on NVMe, and tells that the next ones may not
    contents = {
        "small": b"s" * (M - 1),
        "ones": b"1" * (4 * M),
        "twos": b"2" * (4 * M),
        "noise": os.urandom(4 * M),
    }

    def nvme() -> dict[str, int]:
        found: dict[str, int] = kv.status()["tiers"]["nvme"]
        return found

    for name, content in contents.items():
        (directory / name).write_bytes(content)
    wait_for(lambda: held(kv, "n") == {"ram": 4, "nvme": 5}, "all are copied")
    assert (nvme()["compressed"], nvme()["not_compressed"]) == (2, 1)
    assert nvme()["compressed_bytes"] == 8 * M > 100 * nvme()["compressed_to_bytes"]
    shown = show(kv, "n")
    assert shown["bytes"] >= 13 * M - 1 > shown["tiers"]["nvme"]["bytes"]
    tell(directory, compression="off")
    (directory / "later").write_bytes(contents["ones"])
    wait_for(lambda: held(kv, "n") == {"ram": 5, "nvme": 6}, "it is copied")
    assert nvme()["compressed"] == 2
    kv.remount()
    assert (directory / "ones").stat().st_size == 4 * M
    for name in ("ones", "noise", "small"):
        assert (directory / name).read_bytes() == contents[name]
    assert nvme()["decompressed"] == 1
    assert held(kv, "n")["ram"] == 1, "what is plain is read where it is"
    kv.umount()
    kv.mount(kv.options.replace("ram=32M", "ram=0"))
    for _ in range(2):
        assert (directory / "twos").read_bytes() == contents["twos"]
    assert nvme()["decompressed"] == 1
    kv.check_accounts()


def test_write_through(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    back, through = namespace(kv, "back"), namespace(kv, "through", write="through")
    for directory in (back, through):
        learn(directory)
    write(back, numbered(0, 4))
    write(through, numbered(0, 4))
    counted(kv, "through", 4)
    wait_for(lambda: held(kv, "through") == {"ram": 4, "nvme": 4}, "all is on NVMe")
    kv.idle()
    assert held(kv, "back") == {"ram": 4}


def test_version(here: Path, shared: Mounted) -> None:
    tell(here, weight="5")
    os.setxattr(here, "user.mine", b"as ever")
    here.chmod(0o750)
    (here / "deep" / "er").mkdir(parents=True)
    write(here, numbered(0, 40), 64 << 10)
    write(here / "deep" / "er", numbered(0, 40), 64 << 10)
    before = here.stat().st_ino
    with (
        opened(here / "deep", os.O_RDONLY) as inside,
        opened(here / "deep" / "er" / "0007.kv", os.O_RDONLY) as descriptor,
    ):
        tell(here, version="2")
        assert os.listdir(here) == []
        for path in ("0000.kv", "deep", "deep/er/0003.kv"):
            with refused(errno.ENOENT):
                os.stat(here / path)
        for name in ("er/0003.kv", "er/new", "new"):
            for flags in (os.O_RDONLY, os.O_CREAT | os.O_WRONLY):
                with pytest.raises(OSError, match=r"No such file|Stale file handle"):
                    os.open(name, flags, dir_fd=inside)
        assert os.pread(descriptor, 7, 0) == b"0007.kv"
    assert here.stat().st_ino != before
    assert here.stat().st_mode & 0o777 == 0o750
    assert (told(here, "weight"), told(here, "version")) == ("5", "2")
    assert os.getxattr(here, "user.mine") == b"as ever"
    write(here, numbered(0, 2))
    gone(shared)
    assert left(here, numbered(0, 2)) == numbered(0, 2)
    counted(shared, here.name, 2)
    shared.expect_log("attribute user.kvfs.version is refused")
    with refused(errno.EINVAL):
        tell(here, version="1")


def test_drop(here: Path, shared: Mounted) -> None:
    space = namespace(shared, f"{here.name}-of", weight="5")
    (space / "deep").mkdir()
    write(space / "deep", numbered(0, 40), 64 << 10)
    with opened(space / "deep" / "0007.kv", os.O_RDONLY) as descriptor:
        request(shared.path, "ns_drop", name=space.name)
        assert space.name not in os.listdir(shared.path)
        with refused(errno.ENOENT):
            os.stat(space / "deep" / "0003.kv")
        space.mkdir()
        assert list(space.iterdir()) == []
        assert told(space, "weight") == "100"
        assert os.pread(descriptor, 7, 0) == b"0007.kv"
    gone(shared)
    space.rmdir()
    with pytest.raises(ConfigError, match="cannot be dropped"):
        request(shared.path, "ns_drop", name=".")


def test_publish_at_close(here: Path) -> None:
    tell(here, publish="close")
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
    with opened(here / "k", flags) as slow:
        os.write(slow, b"slow")
        with opened(here / "k", flags | os.O_EXCL) as quick:
            os.write(quick, b"quick")
            assert os.listdir(here) == []
            for call in (os.stat, os.unlink, lambda path: os.rename(path, f"{path}2")):
                with refused(errno.ENOENT):
                    call(here / "k")
        assert (here / "k").read_bytes() == b"quick"
        os.write(slow, b"er")
        with opened(Path(f"/proc/self/fd/{slow}"), os.O_RDONLY) as reader:
            assert os.pread(reader, 9, 0) == b"slower"
    assert (here / "k").read_bytes() == b"quick"
    with opened(here / "k", flags) as writer:
        assert (here / "k").stat().st_size == 0
        os.write(writer, b"anew")
        assert (here / "k").read_bytes() == b"anew"
    (here / "empty").touch()
    wait_for((here / "empty").exists, "an empty file has its name when it is closed for good")


def test_owner_and_mode(here: Path) -> None:
    tell(here, uid=str(NOBODY), gid="7", mode="0644")
    os.close(os.open(here / "private", os.O_CREAT | os.O_WRONLY, 0o600))
    found = (here / "private").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (NOBODY, 7, 0o644)
    (here / "directory").mkdir(0o700)
    found = (here / "directory").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, 0o700)
    (here / "private").chmod(0o600)
    os.chown(here / "private", 1, 1)
    found = (here / "private").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (1, 1, 0o600)


def test_moving_between(here: Path, shared: Mounted) -> None:
    tell(here, weight="5")
    other = namespace(shared, f"{here.name}-other")
    (here / "deep" / "er").mkdir(parents=True)
    write(here, numbered(0, 4))
    write(here / "deep" / "er", numbered(4, 7))
    write(other, ["old.kv"])
    counted(shared, other.name, 1)
    change(shared, other.name, quota_objects="1")
    (here / "0000.kv").rename(other / "0000.kv")
    assert show(shared, other.name)["objects"] == 1
    assert os.listdir(other) == ["0000.kv"]
    change(shared, other.name, quota_objects="0")
    (here / "deep").rename(other / "deep")
    assert left(other / "deep" / "er", numbered(4, 7)) == numbered(4, 7)
    counted(shared, other.name, 4)
    counted(shared, here.name, 3)
    with refused(errno.EXDEV):
        os.link(here / "0001.kv", other / "link")
    os.link(here / "0001.kv", here / "link")
    for name in ("0001.kv", "link"):
        with refused(errno.EXDEV):
            (here / name).rename(other / "link")
    with refused(errno.EXDEV):
        other.rename(here / "below")
    renamed = other.rename(shared.path / f"{other.name}-renamed")
    assert told(renamed, "weight") == "100"
    counted(shared, renamed.name, 4)
    request(shared.path, "ns_drop", name=renamed.name)
    gone(shared)


class Opener:
    """A thread that reads or writes a file, and has to wait for its open or its close."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.done = False
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: self._opens, "the open waits for its answer")

    def _run(self) -> None:
        self._call()
        self.done = True

    @property
    def _opens(self) -> bool:
        """Whether the thread waits in openat(2) or close(2)."""
        call = Path(f"/proc/self/task/{self._thread.native_id}/syscall").read_text().split()[0]
        return call in OPEN_OR_CLOSE

    def end(self) -> None:
        self._thread.join()
        assert self.done


def test_limits(here: Path, shared: Mounted) -> None:
    write(here, numbered(0, 40))
    tell(here, weight="5")
    counted(shared, here.name, 40)
    other = namespace(shared, f"{here.name}-other")
    write(other, numbered(0, 20))

    tell(here, read_bytes=FOR_EVER)
    with opened(here / "0000.kv", os.O_RDONLY) as descriptor:  # on credit
        reader = Opener(lambda: write(here, left(here, ["0001.kv"])))
        assert os.pread(descriptor, 2 * M, 0) == b"0000.kv" * (M // 7)
        assert left(other, numbered(0, 20)) == numbered(0, 20)
        assert not reader.done
        change(shared, here.name, read_bytes="0")
        reader.end()
    tell(here, write_bytes=FOR_EVER)
    write(here, ["first.kv"])
    counted(shared, here.name, 41)  # it is charged
    writer = Opener(lambda: write(here, ["second.kv"]))
    write(other, numbered(0, 20))
    assert not writer.done
    change(shared, here.name, write_bytes="0")
    writer.end()
    assert left(here, ["first.kv", "second.kv"]) == ["first.kv", "second.kv"]
    request(shared.path, "ns_drop", name=other.name)
    gone(shared)


def test_bandwidth(here: Path, shared: Mounted) -> None:
    tell(here, weight="5")
    bulk = namespace(shared, f"{here.name}-bulk", priority="bulk")
    write(here, numbered(0, 3))
    write(bulk, numbered(0, 3))
    order: list[str] = []

    def read(space: Path) -> None:
        (space / "0001.kv").read_bytes()
        order.append(space.name)

    shared.idle()  # what was written is charged: the kernel tells of it after its close
    request(shared.path, "set", bandwidth=FOR_EVER)
    try:
        (here / "0000.kv").read_bytes()  # on credit
        open_predictor = [Opener(partial(read, space)) for space in (bulk, here)]
        assert not any(opener.done for opener in open_predictor)
        request(shared.path, "set", bandwidth="2M")  # half a second for each
        for opener in open_predictor:
            opener.end()
        assert order == [here.name, bulk.name]

        def store(space: Path) -> None:
            write(space, ["new.kv"])
            order.append(space.name)

        order.clear()
        request(shared.path, "set", bandwidth=FOR_EVER)
        with subprocess.Popen(["cat", here / "0000.kv"], stdout=subprocess.DEVNULL) as killed:
            call = Path(f"/proc/{killed.pid}/syscall")
            wait_for(lambda: call.read_text().split()[0] in OPEN_OR_CLOSE, "its open waits")
            killed.terminate()
            assert killed.wait(60) == -signal.SIGTERM
        writers = [Opener(partial(store, space)) for space in (bulk, here)]  # in debt for a read
        assert not any(writer.done for writer in writers)
        request(shared.path, "set", bandwidth="2M")
        for writer in writers:
            writer.end()
        assert order == [here.name, bulk.name]
        shared.idle()
    finally:
        request(shared.path, "set", bandwidth="0")
    request(shared.path, "ns_drop", name=bulk.name)
    gone(shared)
