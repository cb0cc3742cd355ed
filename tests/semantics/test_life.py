import errno
import os
import subprocess
from pathlib import Path

from kvfs.catalog import Catalog
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import opened, refused

M = 1 << 20


def write_back(kv: Mounted) -> None:
    kv.idle()  # what was closed is released a moment later, and is not asked for before
    wait_for(lambda: not request(kv.path, "write_back")["objects_left"], "all is on NVMe")
    wait_for(lambda: not kv.status()["writing_back"], "what comes now stays in RAM")
    kv.idle()


def test_staging(either: Mounted) -> None:
    """
    An object is *staging* as long as anybody has it open for writing. Everybody on this mount sees
    it, with the bytes and the size it has at that moment; it has one copy, in the tier where there
    was room when it was created, and is neither moved nor dropped.
    """
    before = either.status()["counters"]
    with opened(either.path / "a", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"half")
        assert (either.path / "a").read_bytes() == b"half"
        status = either.status()
        assert (status["writers"], status["objects"]) == (1, 1)
        assert status["counters"]["created"] == before["created"] + 1
        assert status["counters"]["sealed"] == before["sealed"]
        assert sum(tier["objects"] for tier in status["tiers"].values()) == 0
        assert sum(tier["reserved_bytes"] for tier in status["tiers"].values()) > 0


def test_sealed(either: Mounted) -> None:
    """
    It is *sealed* when the last writer's `close` returns: size, times and content are now what they
    are, and the catalog has them. What follows happens behind it: its digest is computed, and it is
    copied to NVMe before RAM gets short.
    """
    (either.path / "a").write_bytes(b"x" * M)
    assert either.counter("sealed") == 1
    status = either.idle()
    assert status["objects"] == 1
    assert sum(tier["objects"] for tier in status["tiers"].values()) >= 1
    assert all(tier["reserved_bytes"] == 0 for tier in status["tiers"].values())


def test_resident(either: Mounted) -> None:
    """
    A sealed object is *resident* in RAM, on NVMe or in both, as one file in each. Where it is
    cannot be seen from its name, inode number, times or bytes; opens are answered from RAM if it is
    there, and the `hits` of each tier count them.
    """
    path = either.path / "b.kv"
    (either.path / "a.kv").write_bytes(b"teaches the size")
    path.write_bytes(b"x" * M)
    shown, hits = os.stat(path), either.idle()["tiers"]["ram"]["hits"]
    write_back(either)
    tiers = either.status()["tiers"]
    assert (tiers["ram"]["objects"], tiers["nvme"]["objects"]) == (1, 2)
    assert path.read_bytes() == b"x" * M
    assert either.status()["tiers"]["ram"]["hits"] == hits + 1
    after = os.stat(path)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        shown.st_ino,
        shown.st_size,
        shown.st_mtime_ns,
    )


def test_demoted(mount: Mount) -> None:
    """
    When RAM is needed, objects that are on NVMe as well leave RAM, in the order that their
    namespace gives them, and are read from NVMe from then on. An object that is opened there
    `promote_after` times is copied back to RAM. None of this is seen by programs but in time.
    """
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G,promote_after=2")
    names = [f"{number}.kv" for number in range(40)]
    for number, name in enumerate(names, start=1):
        (kv.path / name).write_bytes(bytes([number]) * 4 * M)
    tiers = kv.idle()["tiers"]
    assert tiers["ram"]["used_bytes"] <= 64 * M
    assert tiers["nvme"]["objects"] >= 24
    for _ in range(2):
        for number, name in enumerate(names[:3], start=1):
            assert (kv.path / name).read_bytes() == bytes([number]) * 4 * M
    wait_for(lambda: kv.counter("promoted"), "what is read again comes back")
    for number, name in enumerate(names, start=1):
        assert (kv.path / name).read_bytes() == bytes([number]) * 4 * M
    counters = kv.idle()["counters"]
    assert counters["demoted"]
    assert counters["dropped"] == counters["misses"] == 0


def test_open_object_stays(mount: Mount) -> None:
    """
    An object that is open stays on the copy it was opened on, and later opens share that copy,
    until the last descriptor is closed; a move takes effect after that.
    """
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G")
    (kv.path / "a.kv").write_bytes(b"teaches the size")
    (kv.path / "b.kv").write_bytes(b"b" * M)
    with opened(kv.path / "b.kv", os.O_RDONLY) as reader:
        for number in range(40):
            (kv.path / f"{number}.kv").write_bytes(b"x" * 4 * M)
        hits = kv.idle()["tiers"]["nvme"]["hits"]
        assert os.pread(reader, M, 0) == (kv.path / "b.kv").read_bytes() == b"b" * M
        assert kv.status()["tiers"]["nvme"]["hits"] == hits
    for number in range(40, 80):
        (kv.path / f"{number}.kv").write_bytes(b"x" * 4 * M)
    kv.idle()
    assert (kv.path / "b.kv").read_bytes() == b"b" * M
    assert kv.status()["tiers"]["nvme"]["hits"] == hits + 1


def test_rewritten(either: Mounted) -> None:
    """
    An object that is opened for writing again is staging again: it keeps its inode and the copy
    that is written to, the other copies are thrown away, and no reader ever gets one of those.
    """
    for name in ("a.kv", "b.kv"):
        (either.path / name).write_bytes(b"old" * M)
    write_back(either)
    inode = os.stat(either.path / "b.kv").st_ino
    with opened(either.path / "b.kv", os.O_RDWR) as descriptor:
        os.pwrite(descriptor, b"new", 3 * M - 3)
        tiers = either.status()["tiers"]
        assert sum(tier["objects"] for tier in tiers.values()) == 1
    (either.path / "a.kv").write_bytes(b"rewritten")
    for _ in range(2):
        assert (either.path / "b.kv").read_bytes() == b"old" * (M - 1) + b"new"
        assert (either.path / "a.kv").read_bytes() == b"rewritten"
        write_back(either)
    assert os.stat(either.path / "b.kv").st_ino == inode


def test_dropped(mount: Mount) -> None:
    """
    A *dropped* object is gone from every tier, with all its names. That is a miss: ENOENT, at
    `stat` and at `open`, never an error in the middle of a read and never a wrong byte. Writing the
    name again makes a new object.
    """
    kv = mount("ram=16M")
    os.mkdir(kv.path / "d")
    (kv.path / "d" / "a.kv").write_bytes(b"a" * M)
    os.link(kv.path / "d" / "a.kv", kv.path / "second")
    first = os.stat(kv.path / "second").st_ino
    for number in range(30):
        (kv.path / f"{number}.kv").write_bytes(b"x" * M)
    for name in ("d/a.kv", "second"):
        with refused(errno.ENOENT):
            os.stat(kv.path / name)
        with refused(errno.ENOENT):
            os.open(kv.path / name, os.O_RDONLY)
    assert os.listdir(kv.path / "d") == []
    (kv.path / "second").write_bytes(b"again")
    assert os.stat(kv.path / "second").st_ino > first
    os.rmdir(kv.path / "d")


def test_damaged(either: Mounted) -> None:
    """
    A copy whose size is not what was sealed, or that was written to behind kvfs's back and does not
    have its digest, is never served: it is put into the tier's `quarantine` directory, and the open
    takes another copy or is a miss.
    """
    (either.path / "a.kv").write_bytes(b"teaches the size")
    (either.path / "b.kv").write_bytes(b"right" * M)
    write_back(either)
    tiers = {name: Path(tier["path"]) for name, tier in either.status()["tiers"].items()}
    inode = os.stat(either.path / "b.kv").st_ino
    backing = {name: next(root.glob(f"objects/*/{inode:x}.*")) for name, root in tiers.items()}
    either.expect_log("quarantined")
    for left, name in enumerate(("nvme", "ram")[::-1]):
        with open(backing[name], "r+b") as file:
            file.write(b"wrong")
        if not left:
            assert (either.path / "b.kv").read_bytes() == b"right" * M
        else:
            with refused(errno.ENOENT):
                os.open(either.path / "b.kv", os.O_RDONLY)
        either.idle()
        assert len(list((tiers[name] / "quarantine").iterdir())) == 1
    assert either.counter("quarantined") == 2
    assert either.counter("misses") == 1


def test_unmounted(either: Mounted) -> None:
    """
    An unmount writes back what only RAM holds before it ends. The next mount has the same names,
    inode numbers, attributes, links and bytes.
    """
    root = either.path
    os.makedirs(root / "d" / "e")
    for number in range(5):
        (root / "d" / str(number)).write_bytes(os.urandom(M))
    os.link(root / "d" / "0", root / "link")
    os.symlink("d/1", root / "symlink")
    os.setxattr(root / "d" / "2", "user.x", b"y")
    os.utime(root / "d" / "3", ns=(1, 2))
    os.chmod(root / "d" / "e", 0o700)

    def everything() -> list[object]:
        found: list[object] = []
        for folder, folders, files in os.walk(root):
            for name in sorted([*folders, *files]):
                path = Path(folder) / name
                at = os.lstat(path)
                content = path.read_bytes() if path.is_file() else None
                times = (at.st_mtime_ns, at.st_ctime_ns)
                found.append((path, at.st_ino, at.st_mode, at.st_nlink, at.st_size, times, content))
        return found

    before = everything()
    either.remount()
    assert everything() == before
    assert os.getxattr(root / "d" / "2", "user.x") == b"y"
    last = max(os.lstat(root / "d" / str(number)).st_ino for number in range(5))
    (root / "fresh").touch()
    assert os.stat(root / "fresh").st_ino > last


def test_numbers(either: Mounted) -> None:
    """
    An inode number is used once. Neither unlinking nor mounting again, nor the death of the daemon,
    makes kvfs give it out a second time, as long as its NVMe directory stays.
    """
    seen = []
    either.expect_log("did not end properly")
    for restart in (either.umount, either.kill):
        for number in range(3):
            (either.path / f"{number}").touch()
            seen.append(os.stat(either.path / f"{number}").st_ino)
            os.unlink(either.path / f"{number}")
        restart()
        either.mount()
    (either.path / "last").touch()
    seen.append(os.stat(either.path / "last").st_ino)
    assert seen == sorted(set(seen))


def test_unmounted_now(either: Mounted) -> None:
    """
    `kvfs umount --now` does not write back: names whose bytes only RAM held are gone afterwards, as
    after a power loss, and nothing else is.
    """
    (either.path / "a.kv").write_bytes(b"kept" * M)
    write_back(either)
    (either.path / "b.kv").write_bytes(b"small, and only in RAM")
    either.umount("--now")
    either.mount()
    assert os.listdir(either.path) == ["a.kv"]
    assert (either.path / "a.kv").read_bytes() == b"kept" * M


def test_all_dies(either: Mounted) -> None:
    """
    If keeper and daemon die both, the mount ends with them: ENOTCONN, until it is unmounted. All
    that was sealed is there after the next mount, also what only RAM held: the RAM tier outlives
    both. What was staging is gone with its name.
    """
    for number in range(3):
        (either.path / f"{number}.kv").write_bytes(bytes([number]) * M)
    descriptor = os.open(either.path / "begun.kv", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"half")
    either.kill()
    with refused(errno.ENOTCONN):
        os.close(descriptor)
    either.expect_log("did not end properly")
    either.mount()
    assert sorted(os.listdir(either.path)) == ["0.kv", "1.kv", "2.kv"]
    for number in range(3):
        assert (either.path / f"{number}.kv").read_bytes() == bytes([number]) * M
    assert either.counter("dropped_unfinished") == 1


def test_power_fails(kv: Mounted) -> None:
    """
    After a power loss or a reboot RAM is empty, and names whose bytes were only there are gone.
    What was on NVMe with a digest is read through once before it is served; what does not have its
    digest, or never got one, is a miss.
    """
    (kv.path / "a.kv").write_bytes(b"teaches the size")
    (kv.path / "kept.kv").write_bytes(b"kept" * M)
    (kv.path / "torn.kv").write_bytes(b"torn" * M)
    write_back(kv)
    (kv.path / "lost.kv").write_bytes(b"only in RAM")
    inode, tiers = os.stat(kv.path / "torn.kv").st_ino, kv.status()["tiers"]
    kv.kill()
    subprocess.run(["umount", "-l", tiers["ram"]["path"]], check=True)
    torn = next(Path(tiers["nvme"]["path"]).glob(f"objects/*/{inode:x}.*"))
    at = os.stat(torn)
    with open(torn, "r+b") as file:
        file.write(bytes(4096))
    os.utime(torn, ns=(at.st_atime_ns, at.st_mtime_ns))
    catalog = Catalog(Path(tiers["nvme"]["path"]) / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("boot", "another one")
    catalog.close()
    kv.expect_log("did not end properly: copies are verified before use")
    kv.expect_log("quarantined")
    kv.mount()
    assert not (kv.path / "lost.kv").exists()
    assert (kv.path / "kept.kv").read_bytes() == b"kept" * M
    with refused(errno.ENOENT):
        os.open(kv.path / "torn.kv", os.O_RDONLY)


def test_ram_only(mount: Mount) -> None:
    """
    Without `nvme` there is nowhere to write back to: kvfs is empty after each mount. It outlives
    the death of its daemons all the same.
    """
    kv = mount("ram=64M")
    (kv.path / "a").write_bytes(b"a" * M)
    kv.expect_log("did not end properly")
    kv.kill()
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"a" * M
    kv.remount()
    assert os.listdir(kv.path) == []
