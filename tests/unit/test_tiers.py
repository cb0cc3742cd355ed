"""Directories of backing files: whose they are, which life they are in, what is kept."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs import mounts, runtime
from kvfs.errors import ConfigError, NoSpaceError, NotFoundError, TierError
from kvfs.tiers import NvmeTier, RamTier, Tier
from kvfs.tiers.tier import FANOUT
from tests.unit.test_own_files import DAMAGES

MIB = 1 << 20
Ram = Callable[..., RamTier]


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Ram]:
    root = tmp_path / "ram"

    def make(
        epoch: int | None = None, size: int = 4 * MIB, identity: str = "one", huge: str = "never"
    ) -> RamTier:
        return RamTier(root, size, identity=identity, epoch=epoch, huge=huge)

    yield make
    while runtime.mount_at(root) is not None:
        mounts.umount(root)


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[NvmeTier]:
    tier = NvmeTier(tmp_path / "nvme", 64 * MIB)
    yield tier
    tier.close()


def put(tier: Tier, ino: int, version: int, content: bytes = b"content") -> str:
    fd = tier.create(ino, version)
    os.write(fd, content)
    os.close(fd)
    return tier.path(ino, version)


# Any tier


def test_backing_files_are_named_by_inode_and_version(nvme: NvmeTier) -> None:
    paths = {nvme.path(ino, version) for ino in range(1, 600) for version in (1, 2, 300)}
    assert len(paths) == 599 * 3
    assert len({os.path.dirname(path) for path in paths}) == FANOUT


def test_backing_files_are_listed(nvme: NvmeTier) -> None:
    wanted = {
        (ino, version, put(nvme, ino, version)) for ino, version in [(1, 1), (1, 2), (999, 3)]
    }
    part = Path(f"{put(nvme, 5, 1)}.part")
    Path(nvme.path(5, 1)).rename(part)
    foreign = Path(nvme.path(6, 1)).with_name("lost+found")
    foreign.touch()
    assert set(nvme.files()) == wanted | {(0, 0, str(part)), (0, 0, str(foreign))}


def test_files_come_and_go(nvme: NvmeTier) -> None:
    path = put(nvme, 7, 1)
    assert os.stat(path).st_mode & 0o137 == 0, "the umask of the daemon leaves 0600"
    fd = nvme.open(7, 1, writable=False)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.write(fd, b"x")
    os.close(fd)
    os.close(nvme.open(7, 1, writable=True))
    nvme.rename(7, 1, 2)
    with pytest.raises(NotFoundError, match="is gone"):
        nvme.open(7, 1, writable=False)
    nvme.unlink(7, 2)
    nvme.unlink(7, 2)
    assert list(nvme.files()) == []
    assert nvme.health.why == ""


def test_a_new_file_is_empty_whatever_was_there(nvme: NvmeTier) -> None:
    put(nvme, 7, 1, b"left by a crash")
    fd = nvme.create(7, 1)
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_a_link_in_place_of_a_file_is_not_followed(nvme: NvmeTier, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    Path(nvme.path(7, 1)).symlink_to(tmp_path / "secret")
    with pytest.raises(TierError, match="ELOOP"):
        nvme.open(7, 1, writable=True)
    with pytest.raises(TierError, match="ELOOP"):
        nvme.create(7, 1)
    assert (tmp_path / "secret").read_text() == "secret"


def test_wrong_copies_go_to_quarantine(nvme: NvmeTier) -> None:
    put(nvme, 7, 1, b"wrong")
    nvme.quarantine(7, 1)
    nvme.quarantine(7, 1)
    assert (nvme.root / "quarantine/7.1").read_bytes() == b"wrong"
    assert list(nvme.files()) == []


def test_a_failure_is_described_and_logged_once(
    nvme: NvmeTier, caplog: pytest.LogCaptureFixture
) -> None:
    sick = OSError(errno.EIO, "sick")
    with caplog.at_level(logging.ERROR):
        errors = [nvme.failed("open", nvme.path(ino, 1), sick) for ino in range(3)]
        assert len(caplog.records) == 1
        nvme.failed("unlink", nvme.path(1, 1), sick)
        assert len(caplog.records) == 2
    assert all(type(error) is TierError for error in errors)
    assert f"nvme tier: open of {nvme.path(2, 1)} failed: EIO sick" in str(errors[2])
    assert (nvme.health.state, nvme.health.why) == ("suspect", "unlink: EIO")
    for code in (errno.ENOSPC, errno.EDQUOT):
        assert isinstance(
            nvme.failed("create", nvme.path(1, 1), OSError(code, "full")), NoSpaceError
        )


def test_failures_of_the_system_are_errors_of_the_tier(nvme: NvmeTier) -> None:
    os.rmdir(os.path.dirname(nvme.path(7, 1)))
    with pytest.raises(TierError):
        nvme.create(7, 1)
    with pytest.raises(TierError):
        nvme.rename(7, 1, 2)


def test_free_room_is_neither_used_nor_reserved(nvme: NvmeTier) -> None:
    nvme.used, nvme.reserved = 10 * MIB, 4 * MIB
    assert nvme.free == 50 * MIB
    assert Tier.cost(0) == 4096, "an empty file is not free"
    assert Tier.cost(100) == 51200


# NVMe


def test_the_directory_belongs_to_one(nvme: NvmeTier) -> None:
    nvme.write_holder("process 7, mounted on /mnt/kv")
    with pytest.raises(ConfigError) as refused:
        NvmeTier(nvme.root, MIB)
    assert str(refused.value) == (
        f"nvme={nvme.root} is in use by another kvfs (process 7, mounted on /mnt/kv): "
        "unmount that one (once unmounted, it ends with its last open file), or give this mount a "
        "directory of its own"
    )
    nvme.write_holder("me")
    with pytest.raises(ConfigError, match=r"\(me\)"):
        NvmeTier(nvme.root, MIB)


def test_holder_without_a_name_is_reported_as_unknown(nvme: NvmeTier) -> None:
    with pytest.raises(ConfigError, match=r"another kvfs \(unknown\)"):
        NvmeTier(nvme.root, MIB)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_lock_that_is_no_file_is_refused(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    kind(tmp_path / "lock")
    with pytest.raises(ConfigError, match=r"lock is [pd]rw.*, expected a file with .*: remove it"):
        NvmeTier(tmp_path, MIB)


def test_the_lock_goes_with_its_holder_and_the_identity_stays(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        tier = NvmeTier(tmp_path / "nvme", MIB)
        seen.add(tier.identity)
        put(tier, 1, 1)
        tier.close()
    other = NvmeTier(tmp_path / "other", MIB)
    assert len(seen) == 1
    assert other.identity not in seen
    other.close()


def test_another_directory_in_its_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    NvmeTier(tmp_path / "nvme", MIB).close()
    identity = (tmp_path / "nvme/identity").read_text().strip()
    NvmeTier(tmp_path / "nvme", MIB, expected=identity).close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"has identity none, expected {identity}: mount the"):
        NvmeTier(tmp_path / "empty", MIB, expected=identity)
    assert not list((tmp_path / "empty").iterdir())
    (tmp_path / "odd/identity").mkdir(parents=True)
    with pytest.raises(ConfigError, match="odd/identity is drwx"):
        NvmeTier(tmp_path / "odd", MIB, expected=identity)


def entries(root: Path) -> list[tuple[str, int, int]]:
    return [
        (str(path), path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
    ]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["identity", "identity.inode"])
def test_a_damaged_identity_is_refused_and_nothing_is_changed(
    tmp_path: Path, name: str, damage: str
) -> None:
    root = tmp_path / "nvme"
    NvmeTier(root, MIB).close()
    whole = (root / name).read_bytes()
    (root / name).unlink()
    DAMAGES[damage](root / name)
    before = entries(root)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            NvmeTier(root, MIB)
        assert str(root / name) in str(refused.value)
        assert entries(root) == before
    if damage == "directory":
        (root / name).rmdir()
    else:
        (root / name).unlink()
    (root / name).write_bytes(whole)
    NvmeTier(root, MIB, expected=None).close()


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("noted", [True, False])
def test_a_directory_of_a_version_before_keeps_its_identity(
    tmp_path: Path, end: str, *, noted: bool
) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    path, identity = root / "identity", "5d6c3f4e-2b1a-4c0d-9e8f-0123456789ab"
    path.write_text(identity + end)
    if noted:
        (root / "identity.inode").write_text(str(path.stat().st_ino))
    tier = NvmeTier(root, MIB, fresh="0b2bb2a5-1e4c-4f9c-8a3e-7a1f3b0c9d55")
    assert tier.identity == identity
    assert path.read_text() == identity + end
    tier.close()


def test_without_its_identity_a_directory_gets_a_new_one(tmp_path: Path) -> None:
    """Which is what a message about a damaged one tells people to do."""
    root = tmp_path / "nvme"
    first = NvmeTier(root, MIB)
    first.close()
    (root / "identity").unlink()
    second = NvmeTier(root, MIB)
    second.close()
    third = NvmeTier(root, MIB)
    third.close()
    assert first.identity != second.identity == third.identity


def test_the_directory_is_private(nvme: NvmeTier) -> None:
    for path in (nvme.root, nvme.root / "objects/00", nvme.root / "quarantine"):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("path", ["/proc/kvfs", "/dev/null", "/none/nvme"])
def test_a_directory_that_cannot_be_used_is_refused(path: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=f"nvme={path} cannot be used"):
        NvmeTier(Path(path), MIB)
    assert os.listdir("/proc/self/fd") == before


def test_a_failure_after_the_lock_lets_go_of_it(tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    (root / "objects").write_text("a file where the folders should be")
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be used"):
            NvmeTier(root, MIB)
    (root / "objects").unlink()
    NvmeTier(root, MIB).close()


def test_a_lost_directory_is_noticed(nvme: NvmeTier) -> None:
    assert nvme.present()
    nvme.root.rename(nvme.root.with_suffix(".away"))
    assert not nvme.present()
    nvme.root.with_suffix(".away").rename(nvme.root)
    assert nvme.present()


# RAM


def test_a_fresh_tmpfs_begins_an_epoch(ram: Ram) -> None:
    tier = ram(epoch=6)
    assert (tier.epoch, tier.adopted) == (7, False)
    found = runtime.mount_at(tier.root)
    assert found is not None
    assert (found.fstype, found.source) == ("tmpfs", "kvfs-ram")
    assert f"size={(tier.capacity + tier.slack) >> 10}k" in found.super_options
    assert tier.root.stat().st_mode & 0o777 == 0o700
    assert tier.present()
    assert not tier.slow


def test_ram_of_a_dead_daemon_is_taken_over(ram: Ram) -> None:
    before = ram(epoch=6)
    path = put(before, 1, 1)
    after = ram(epoch=7)
    assert (after.epoch, after.adopted) == (7, True)
    assert Path(path).read_bytes() == b"content"


def test_a_catalog_in_the_tmpfs_is_always_of_its_epoch(ram: Ram) -> None:
    put(ram(), 1, 1)
    again = ram()
    assert (again.epoch, again.adopted) == (1, True)
    assert len(list(again.files())) == 1


@pytest.mark.parametrize(("epoch", "identity"), [(9, "one"), (6, "one"), (7, "two")])
def test_ram_of_another_epoch_or_catalog_is_cleared(ram: Ram, epoch: int, identity: str) -> None:
    """Another life of the memory, or the memory of another catalog."""
    path = put(ram(epoch=6), 1, 1)
    after = ram(epoch=epoch, identity=identity)
    assert (after.epoch, after.adopted) == (epoch + 1, False)
    assert not Path(path).exists()


def test_memory_covers_no_files(ram: Ram, tmp_path: Path) -> None:
    (tmp_path / "ram").mkdir()
    (tmp_path / "ram/identity").write_text("one 7")
    with pytest.raises(ConfigError, match="ram has files in it, expected an empty directory"):
        ram(epoch=7)
    assert runtime.mount_at(tmp_path / "ram") is None
    assert (tmp_path / "ram/identity").read_text() == "one 7"


def test_a_mount_of_others_is_not_taken_away(ram: Ram, tmp_path: Path) -> None:
    root = tmp_path / "ram"
    root.mkdir()
    mounts.mount("precious", root, "tmpfs", 0, "size=1M")
    (root / "file").write_text("precious")
    with pytest.raises(ConfigError, match=f"is a mount of tmpfs from precious, .* umount {root}"):
        ram(epoch=7)
    assert (root / "file").read_text() == "precious"


@pytest.mark.parametrize("damage", [*DAMAGES, "words"])
def test_a_damaged_label_is_refused_and_the_memory_stays(ram: Ram, damage: str) -> None:
    """Clearing RAM would lose objects that only RAM has: a person must decide this, not damage."""
    before = ram(epoch=6)
    path = put(before, 1, 1)
    label = before.root / "identity"
    label.unlink()
    if damage == "words":
        label.write_text("one seven")
    else:
        DAMAGES[damage](label)
    with pytest.raises(ConfigError, match=f"{label} .*umount {before.root}"):
        ram(epoch=7)
    assert Path(path).read_bytes() == b"content"
    if damage == "directory":
        label.rmdir()
    else:
        label.unlink()
    label.write_text("one 7")
    assert ram(epoch=7).adopted


def test_ram_is_resized_at_a_takeover(ram: Ram) -> None:
    ram(epoch=6)
    for size in (8 * MIB, 2 * MIB):
        tier = ram(epoch=7, size=size)
        assert tier.adopted
        found = os.statvfs(tier.root)
        assert found.f_blocks * found.f_frsize == size + tier.slack
        assert tier.capacity == size


def test_ram_with_more_bytes_keeps_its_size(ram: Ram, caplog: pytest.LogCaptureFixture) -> None:
    before = ram(epoch=6)
    put(before, 1, 1, bytes(8 * MIB))
    tier = ram(epoch=7, size=2 * MIB)
    assert tier.adopted
    assert tier.capacity == 2 * MIB, "eviction brings it down to this"
    found = os.statvfs(tier.root)
    assert found.f_blocks * found.f_frsize == 4 * MIB + before.slack
    assert "keeps its former size" in caplog.text
    assert "has more than the new size of 2.0 MiB" in tier.shortage
    assert "Errno" not in caplog.text
    tier.shrink()
    assert tier.shortage, "nothing is evicted yet"
    tier.unlink(1, 1)
    tier.shrink()
    found = os.statvfs(tier.root)
    assert found.f_blocks * found.f_frsize == 2 * MIB + tier.slack
    assert not tier.shortage


def test_huge_pages_that_the_kernel_refuses_are_done_without(
    ram: Ram, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mounts.mount

    def refusing(source: str, target: Path, fstype: str, flags: int, data: str) -> None:
        if "huge=never" not in data:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(source, target, fstype, flags, data)

    monkeypatch.setattr(mounts, "mount", refusing)
    tier = ram(huge="within_size")
    assert not tier.huge
    assert tier.huge_why == "the kernel refuses huge=within_size on tmpfs: Invalid argument"
    assert tier.present()


@pytest.mark.parametrize("huge", ["within_size", "always", "advise", "never"])
def test_huge_pages_are_as_asked_for(ram: Ram, huge: str) -> None:
    tier = ram(huge=huge)
    assert tier.huge == (huge != "never")
    assert tier.huge_why == f"tmpfs huge={huge}"
    found = runtime.mount_at(tier.root)
    assert found is not None
    shown = [option for option in found.super_options if option.startswith("huge=")]
    assert shown == ([] if huge == "never" else [f"huge={huge}"])


def test_memory_that_cannot_be_had_is_refused(ram: Ram, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(mounts, "mount", refusing)
    for huge in ("never", "always"):
        with pytest.raises(ConfigError) as refusal:
            ram(huge=huge)
        found = re.fullmatch(
            "RAM tier of 4194304 bytes at (.*) cannot be made: Operation not permitted; root needs "
            "CAP_SYS_ADMIN to mount: use a privileged container",
            str(refusal.value),
        )
        assert found is not None
        assert not os.path.exists(found[1])


def test_memory_is_given_back(ram: Ram) -> None:
    tier = ram()
    put(tier, 1, 1)
    tier.remove()
    assert runtime.mount_at(tier.root) is None
    assert not tier.root.exists()
    tier.remove()


def test_without_privileges_it_is_a_folder_in_shared_memory(tmp_path: Path) -> None:
    os.seteuid(NOBODY)
    try:
        tier = RamTier(tmp_path / "ram", MIB, identity="test-tiers", epoch=None, huge="always")
        try:
            assert tier.root == Path(f"/dev/shm/kvfs-{NOBODY}-test-tiers")
            assert tier.root.stat().st_mode & 0o777 == 0o700
            assert (tier.huge, tier.adopted, tier.epoch) == (False, False, 1)
            assert "needs root" in tier.huge_why
            path = put(tier, 1, 1)
            again = RamTier(tmp_path, MIB, identity="test-tiers", epoch=1, huge="always")
            assert again.adopted
            assert Path(path).exists()
        finally:
            tier.remove()
        assert not tier.root.exists()
    finally:
        os.seteuid(0)


NOBODY = 65534


def test_a_copy_of_an_nvme_directory_has_an_identity_of_its_own(tmp_path: Path) -> None:
    """Two of one identity would share a RAM tier."""
    one = NvmeTier(tmp_path / "one", 1 << 20)
    identity = one.identity
    one.close()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    (tmp_path / "one").rename(tmp_path / "moved")
    moved, copy = NvmeTier(tmp_path / "moved", 1 << 20), NvmeTier(tmp_path / "copy", 1 << 20)
    assert moved.identity == identity
    assert copy.identity != identity
    again = copy.identity
    moved.close()
    copy.close()
    copy = NvmeTier(tmp_path / "copy", 1 << 20)
    assert copy.identity == again
    copy.close()
