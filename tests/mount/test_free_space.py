"""The figures of df: the stored bytes, and the bytes that a writer then gets."""

import errno
import os
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

MIB = 1 << 20
BLOCK = 64 << 10
BOTH = "ram=64M,nvme={tmp}/nvme,nvme_size=192M"
WEIGHT = {"weight": "10"}
WITHIN = 0.01  # of what a writer gets
REFUSED = "writers get (ENOSPC|EDQUOT)"
FULL = "nothing is demoted: the NVMe tier has no room"


def namespace(kv: Mounted, name: str, **settings: str) -> Path:
    request(kv.path, "ns_create", name=name, settings=settings, uid=0, gid=0)
    return kv.path / name


def write(folder: Path, count: int, size: int = BLOCK, prefix: str = "") -> int:
    """Write so many blocks, or as many as there is room for. Return their bytes."""
    for number in range(count):
        try:
            with open(folder / f"{prefix}{number:05}", "wb", buffering=0) as file:
                file.write(b"x" * size)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return number * size
            raise
    return count * size


def fill(folder: Path, size: int = BLOCK) -> int:
    """Write blocks until the first that is refused. Return their bytes."""
    return write(folder, 100_000, size, prefix="fill-")


def write_one(path: Path, size: int) -> bool:
    """Write one file of so many bytes; return whether there was room for it."""
    try:
        with open(path, "wb", buffering=0) as file:
            file.writelines(b"x" * MIB for _ in range(size // MIB))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return False
        raise
    return True


@contextmanager
def all_open(folder: Path) -> Iterator[list[BinaryIO]]:
    """Hold all files of a folder open for reading."""
    with ExitStack() as stack:
        yield [stack.enter_context(open(path, "rb")) for path in folder.iterdir()]


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def size(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def near(found: int, expected: int) -> bool:
    return abs(found - expected) <= max(WITHIN * expected, 2 * BLOCK)


def shows(path: Path, expected: int) -> bool:
    return near(free(path), expected)


def check_fill(kv: Mounted, folder: Path, size: int = BLOCK) -> int:
    """A writer that never pauses gets the bytes that df showed before."""
    kv.idle()
    shown = free(folder)
    got = fill(folder, size)
    assert near(shown, got), f"df showed {shown} and a writer got {got}"
    return got


def lines(kv: Mounted) -> list[str]:
    return [line for line in kv.log.read_text().splitlines() if re.search(REFUSED, line)]


@pytest.mark.parametrize("options", ["ram=64M", BOTH])
def test_what_is_stored_is_used_and_evictable(mount: Mount, options: str) -> None:
    kv = mount(options)
    capacity = sum(tier["capacity_bytes"] for tier in kv.status()["tiers"].values())
    before = free(kv.path)
    assert (used(kv.path), size(kv.path)) == (0, capacity)
    assert before == pytest.approx(capacity - 4 * MIB, abs=MIB), "RAM has a headroom"
    write(kv.path, 300)
    kv.idle()
    assert used(kv.path) == 300 * BLOCK
    assert free(kv.path) == before


@pytest.mark.parametrize("options", ["ram=64M", BOTH])
def test_a_mount_full_of_what_stays_has_no_room(mount: Mount, options: str) -> None:
    """It refuses an empty file, and df says so."""
    kv = mount(options)
    kv.allow_log(FULL)
    space = namespace(kv, "stays", eviction="never")
    check_fill(kv, space)
    kv.idle()
    assert free(kv.path) < 2 * BLOCK
    with pytest.raises(OSError, match="No space") as refused:
        (space / "empty").touch()
    assert refused.value.errno == errno.ENOSPC
    assert used(kv.path) >= 0.98 * (size(kv.path) - 4 * MIB)
    assert len(lines(kv)) == 1
    assert re.search(r"namespace stays has \d+\.\d MiB \(eviction=never\)", lines(kv)[0])


@pytest.mark.parametrize("size", [4 * BLOCK, 4 * MIB])
@pytest.mark.parametrize("settings", [{"eviction": "never"}, {"pin": "on"}])
def test_a_writer_without_pauses_gets_what_is_shown(
    mount: Mount, settings: dict[str, str], size: int
) -> None:
    """Copies to NVMe that are under way take room in both tiers: a create waits for them."""
    kv = mount("ram=128M,nvme={tmp}/nvme,nvme_size=512M")
    kv.allow_log(FULL)
    check_fill(kv, namespace(kv, "stays", **settings), size)


def test_pinned_files_are_no_room(mount: Mount) -> None:
    kv = mount("ram=128M")
    space, before = namespace(kv, "mixed"), free(kv.path)
    write(space, 1000)
    kv.idle()
    assert free(space) == before
    pinned = sorted(space.iterdir())
    for count, path in enumerate(pinned, 1):
        os.setxattr(path, "user.kvfs.pin", b"on")
        assert count % 100 or near(free(space), before - count * BLOCK)
    check_fill(kv, namespace(kv, "stays", eviction="never"))
    for path in pinned:
        os.removexattr(path, "user.kvfs.pin")
    assert near(free(space), 1000 * BLOCK)


@pytest.mark.parametrize("options", ["ram=64M", BOTH])
def test_a_pinned_namespace_gets_what_is_shown(mount: Mount, options: str) -> None:
    """Its objects stay in RAM when NVMe has them as well."""
    kv = mount(options)
    kv.allow_log(FULL)
    got = check_fill(kv, namespace(kv, "pinned", pin="on"))
    copies = got if options == "ram=64M" else got + 60 * MIB
    count = "" if options == "ram=64M" else "; copies in ram and nvme both count"
    said = re.search(r"has (\d+\.\d) MiB \(pin=on(.*?)\)", lines(kv)[0])
    assert said is not None
    assert said[2] == count
    assert near(int(float(said[1]) * MIB), copies)


def test_a_namespace_with_a_quota_shows_its_quota(mount: Mount) -> None:
    kv = mount(BOTH)
    space = namespace(kv, "small", quota_hard="32M", eviction="never")
    assert (size(space), used(space), free(space)) == (32 * MIB, 0, 32 * MIB)
    assert size(kv.path) == 256 * MIB
    check_fill(kv, space)
    kv.idle()
    assert free(space) < BLOCK
    assert near(used(space), 32 * MIB)
    assert free(kv.path) > 200 * MIB
    assert re.search(
        "writers get EDQUOT.*; eviction=never; set another .*raise its quota", lines(kv)[0]
    )
    evictable = namespace(kv, "evictable", quota_hard="32M")
    write(evictable, 1000)
    kv.idle()
    assert near(free(evictable), 32 * MIB)


def test_a_quota_of_objects_is_one_of_files(mount: Mount) -> None:
    kv = mount(BOTH)
    space = namespace(kv, "few", quota_objects="100", eviction="never")
    write(space, 40)
    kv.idle()
    found = os.statvfs(space)
    assert (found.f_files, found.f_ffree) == (100, 60)
    assert write(space, 100, prefix="more-") == 60 * BLOCK
    kv.idle()
    assert os.statvfs(space).f_ffree == 0


@pytest.mark.parametrize("pin", [False, True])
def test_stored_files_are_used_whether_kvfs_may_drop_them_or_not(
    mount: Mount, *, pin: bool
) -> None:
    kv = mount(BOTH)
    space = namespace(kv, "few", quota_objects="5")
    write(space, 3)
    if pin:
        subprocess.run([*KVFS, "pin", space], check=True, capture_output=True)
    kv.idle()
    found = os.statvfs(space)
    assert (found.f_files, found.f_ffree) == (5, 2)
    write(namespace(kv, "others"), 4)
    kv.idle()
    found = os.statvfs(kv.path)
    assert found.f_files - found.f_ffree == 7


def test_open_files_count_for_a_quota_of_objects(mount: Mount) -> None:
    kv = mount("ram=64M")
    space = namespace(kv, "few", quota_objects="20")
    write(space, 10)
    kv.idle()
    assert os.statvfs(space).f_ffree == 10
    with open(space / "new", "wb"):
        assert os.statvfs(space).f_ffree == 9


@pytest.mark.parametrize(("others", "settings", "parts"), [(3800, {}, 2), (1600, WEIGHT, 11)])
def test_what_others_need_not_give_is_no_room(
    mount: Mount, others: int, settings: dict[str, str], parts: int
) -> None:
    """A namespace that gives nothing gets room from others only until their shares are equal.

    parts: the others keep one part of the room. A demotion of theirs may give more.
    """
    kv = mount(BOTH)
    kv.allow_log(FULL)
    write(namespace(kv, "others", **settings), others)
    kv.idle()
    space = namespace(kv, "stays", eviction="never")
    share = free(space)
    assert near(share, (256 - 4) * MIB * (parts - 1) // parts)
    assert fill(space) >= share * (1 - WITHIN)


def test_others_of_more_weight_give_copies_in_ram(mount: Mount) -> None:
    kv = mount(BOTH)
    kv.allow_log(FULL)
    heavy = namespace(kv, "heavy", eviction="never", weight="300")
    write(heavy, 60, MIB)
    kv.idle()
    check_fill(kv, namespace(kv, "stays", eviction="never"))
    assert len(list(heavy.iterdir())) == 60


@pytest.mark.parametrize("others", [1, 3])
def test_copies_in_ram_of_what_nvme_has_are_room(mount: Mount, others: int) -> None:
    """They go for any namespace, since no name is lost."""
    kv = mount("ram=48M,nvme={tmp}/nvme,nvme_size=128M")
    kv.allow_log(FULL)
    folders = [namespace(kv, f"other{number}") for number in range(others)]
    for folder in folders:
        write(folder, 24 // others, MIB)
    kv.idle()
    check_fill(kv, namespace(kv, "stays", eviction="never"), MIB)
    assert sum(len(list(folder.iterdir())) for folder in folders) == 24


@pytest.mark.parametrize("settings", [{}, {"pin": "on"}, {"eviction": "never"}])
def test_a_namespace_without_a_tier_has_no_room(mount: Mount, settings: dict[str, str]) -> None:
    kv = mount(BOTH)
    space = namespace(kv, "homeless", media="ram", **settings)
    kv.remount(kv.options.replace("ram=64M", "ram=0"))
    kv.allow_log("takes no new file")
    assert (free(space), size(space)) == (0, 192 * MIB)
    assert write(space, 1) == 0


def test_a_namespace_in_one_tier_shows_the_room_there(mount: Mount) -> None:
    kv = mount(BOTH)
    kv.allow_log(FULL)
    check_fill(kv, namespace(kv, "fast", media="ram", eviction="never"))
    assert free(kv.path) > 150 * MIB
    check_fill(kv, namespace(kv, "slow", media="nvme", eviction="never"))
    wait_for(lambda: free(kv.path) < 2 * BLOCK, "nothing is left")


def test_what_others_need_not_give_is_no_room_for_one_file_either(mount: Mount) -> None:
    """A namespace that may give itself gets from others until their shares are equal, too."""
    kv = mount("ram=64M")
    write(namespace(kv, "pinned", pin="on"), 30, MIB)
    write(namespace(kv, "others"), 15, MIB)
    kv.idle()
    space = namespace(kv, "empty")
    shown = free(space)
    assert near(shown, 15 * MIB), "what is free: the others have no more than that"
    kv.expect_log("'empty/large' is cut off")
    headroom = 4 * MIB  # one growing file may have that as well
    assert not write_one(space / "large", shown + headroom + 2 * MIB)
    line = next(line for line in kv.log.read_text().splitlines() if "is cut off" in line)
    assert "and of the 64.0 MiB of ram nothing more may be dropped for it; the room is held" in line
    assert "namespace pinned has 30.0 MiB (pin=on), namespace others has 15.0 MiB (" in line
    assert (
        "(it gives room only after namespace empty); set pin=off, unlink files, raise the" in line
    )
    kv.idle()
    assert free(space) == shown
    assert write_one(space / "fits", shown + headroom - 2 * MIB)
    assert len(list((kv.path / "others").iterdir())) == 15


def test_one_file_gets_the_room_of_one_tier(mount: Mount) -> None:
    """And several files get all that is shown."""
    kv = mount(BOTH)
    space = namespace(kv, "large", eviction="never")
    shown = free(space)
    assert near(shown, (60 + 192) * MIB)
    kv.expect_log("'large/one' is (cut off|dropped at its close)")
    assert not write_one(space / "one", 200 * MIB)
    lines = [line for line in kv.log.read_text().splitlines() if "'large/one' is " in line]
    assert all(
        "nvme has 192.0 MiB: it needs a larger tier" in line
        or "its tiers have ram 64.0 MiB and nvme 192.0 MiB" in line
        for line in lines
    )
    kv.idle()
    assert write_one(space / "one", 180 * MIB)
    kv.idle()
    assert near(free(space), shown - 180 * MIB)
    kv.allow_log(FULL)
    check_fill(kv, space)


def test_a_namespace_with_its_share_gets_its_own_bytes(mount: Mount) -> None:
    kv = mount("ram=64M")
    write(namespace(kv, "others"), 20, MIB)
    space = namespace(kv, "grows")
    write(space, 40, MIB)
    kv.idle()
    assert near(free(space), 40 * MIB)
    assert near(free(kv.path / "others"), 30 * MIB), "up to its share"


@pytest.mark.parametrize("fast_open", ["on", "off"])
def test_open_files_are_no_room(mount: Mount, fast_open: str) -> None:
    kv = mount(f"ram=64M,fast_open={fast_open}")
    before = free(kv.path)
    write(kv.path, 60, MIB)
    kv.idle()
    assert near(free(kv.path), before)
    with all_open(kv.path):
        assert free(kv.path) < MIB
        assert write(kv.path, 2, MIB, prefix="more-") < 2 * MIB
        assert "for a new file (1.0 MiB expected from earlier files of this kind)" in lines(kv)[0]
        assert "held: namespace . has 60.0 MiB (open files); close open files" in lines(kv)[0]
    wait_for(lambda: near(free(kv.path), before), "the files are closed")


def test_files_are_room_as_they_are_closed(mount: Mount) -> None:
    """In any order, and though the daemon knows nothing of these opens yet."""
    kv = mount("ram=64M")
    write(kv.path, 60, MIB)
    kv.idle()
    wait_for(lambda: kv.status()["fast_open"]["objects"] == 60, "the daemon need not open them")
    with all_open(kv.path) as files, all_open(kv.path) as twice:
        for file in twice:
            file.close()
        random.Random(7).shuffle(files)
        for at in range(0, 60, 10):
            wait_for(partial(shows, kv.path, at * MIB), f"{at} files are closed")
            for file in files[at : at + 10]:
                file.close()
    assert kv.status()["fast_open"]["objects"] == 60


def test_open_files_of_a_quota_are_no_room(mount: Mount) -> None:
    kv = mount("ram=64M")
    space = namespace(kv, "small", quota_hard="8M")
    write(space, 8, MIB)
    kv.idle()
    assert near(free(space), 8 * MIB)
    with all_open(space):
        assert free(space) == 0
        assert write(space, 1, MIB, prefix="more-") == 0
        assert "has 8 objects of 8.0 MiB, its quota is 8M, and nothing more" in lines(kv)[0]
        assert "; open files; close open files (unlinked ones keep " in lines(kv)[0]
        assert lines(kv)[0].endswith("or raise its quota (said once in 10 minutes per cause)")
    wait_for(lambda: near(free(space), 8 * MIB), "the files are closed")


def test_a_block_is_refused_by_its_expected_size_and_another_file_is_not(mount: Mount) -> None:
    """The blocks of a model have one size. df has room for smaller files, and they get it."""
    kv = mount("ram=64M")
    space = namespace(kv, "same", quota_hard="26M", pin="on")
    for number in range(2):
        (space / f"model@1@0@{number:x}@half.data").write_bytes(b"x" * 8 * MIB)
    assert write(space, 1, 6 * MIB, prefix="other-") == 6 * MIB
    kv.idle()
    assert free(space) == 4 * MIB
    with pytest.raises(OSError, match="Disk quota exceeded"):
        (space / "model@1@0@2@half.data").write_bytes(b"content")
    assert "a new file is expected to take 8.0 MiB, as earlier ones of its kind" in lines(kv)[0]
    assert write(space, 1, 4 * MIB, prefix="more-") == 4 * MIB
    kv.idle()
    assert free(space) == 0


def test_unlinked_files_that_are_open_are_no_room(mount: Mount) -> None:
    kv = mount("ram=64M")
    space = namespace(kv, "gone")
    write(space, 55, MIB)
    kv.idle()
    before = free(kv.path)
    with all_open(space):
        for path in space.iterdir():
            path.unlink()
        assert free(kv.path) < 6 * MIB
        fill(namespace(kv, "stays", eviction="never"))
        assert "the room is held: namespace gone has 55.0 MiB (open files), " in lines(kv)[0]
        assert "close open files (unlinked ones keep their room)" in lines(kv)[0]
    wait_for(lambda: free(kv.path) >= before, "the files are closed")
