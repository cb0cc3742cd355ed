import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from kvfs import runtime
from kvfs.catalog import Catalog
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, local, wait_for
from tests.semantics.syscalls import opened, refused

M = 1 << 20


def write_back(kv: Mounted) -> None:
    kv.idle()  # what was closed is released a moment later, and is not asked for before
    wait_for(lambda: not request(kv.path, "write_back")["objects_left"], "all is on NVMe")
    wait_for(lambda: not kv.status()["writing_back"], "what comes now stays in RAM")
    kv.idle()


def test_staging(either: Mounted) -> None:
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
    (either.path / "a").write_bytes(b"x" * M)
    assert either.counter("sealed") == 1
    status = either.idle()
    assert status["objects"] == 1
    assert sum(tier["objects"] for tier in status["tiers"].values()) >= 1
    assert all(tier["reserved_bytes"] == 0 for tier in status["tiers"].values())


def test_resident(either: Mounted) -> None:
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
    assert counters["dropped"] == counters["opens_unreadable"] == 0


def test_open_object_stays(mount: Mount) -> None:
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
    assert either.counter("opens_unreadable") == 1


def test_damaged_and_open(either: Mounted) -> None:
    first, second = (either.path / name for name in ("a.kv", "b.kv"))
    for path in (first, second):
        path.write_bytes(b"right" * M)
    write_back(either)
    either.remount()
    nvme = Path(either.status()["tiers"]["nvme"]["path"])
    either.expect_log("put this copy into quarantine$")
    either.expect_log("put this copy into quarantine and drop the object with its names")
    os.close(os.open(first, os.O_RDONLY))
    with open(first, "rb", buffering=0) as file, open(second, "rb", buffering=0) as other:
        wait_for(lambda: either.idle()["counters"]["promoted"], "RAM has the first as well")
        for path in (first, second):
            (copy,) = nvme.glob(f"objects/*/{os.stat(path).st_ino:x}.*")
            with open(copy, "r+b") as rotten:
                rotten.write(b"wrong")
        check = [*KVFS, "fsck", "--repair", "--hashes", str(either.path)]
        assert subprocess.run(check, check=False, capture_output=True).returncode == 1
        either.idle()
        assert len(list((nvme / "quarantine").iterdir())) == 2
        assert os.listdir(either.path) == ["a.kv"]
        for path in (first, second):
            with refused(errno.ENOENT):
                os.open(path, os.O_RDONLY)
        with refused(errno.EBUSY):
            os.open(first, os.O_RDWR)
        assert [one.read(9) for one in (file, other)] == [b"wrongrigh"] * 2
    assert first.read_bytes() == b"right" * M


def change(kv: Mounted, name: str) -> None:
    """Change a byte of a file on NVMe, without a trace in size or time."""
    inode = os.stat(kv.path / name).st_ino
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    (copy,) = nvme.glob(f"objects/*/{inode:x}.*")
    at = os.stat(copy)
    with open(copy, "r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    os.utime(copy, ns=(at.st_atime_ns, at.st_mtime_ns))


def test_rots(either: Mounted) -> None:
    either.expect_log("is quarantined: its bytes do not match their digest")
    for name in ("a.kv", "b.kv", "c.kv"):
        (either.path / name).write_bytes(b"right" * M)
    write_back(either)
    either.remount(f"{either.options},promote_after=0")
    change(either, "a.kv")
    with refused(errno.ENOENT):
        os.open(either.path / "a.kv", os.O_RDONLY)
    for _ in range(2):
        os.close(os.open(either.path / "b.kv", os.O_RDONLY))
        assert either.counter("verified") == 1
        change(either, "b.kv")
    change(either, "b.kv")
    either.remount(f"{either.options},verify_after=0")
    os.close(os.open(either.path / "b.kv", os.O_RDONLY))
    assert either.counter("verified") == 0
    set_option = [*KVFS, "set", str(either.path), "verify_after=1d"]
    subprocess.run(set_option, check=True)
    with refused(errno.ENOENT):
        os.open(either.path / "b.kv", os.O_RDONLY)
    assert (either.path / "c.kv").read_bytes() == b"right" * M


def test_not_compared(kv: Mounted) -> None:
    holes = kv.path / "holes.kv"
    with open(holes, "wb") as file:
        file.truncate(64 * M)
    (kv.path / "a.kv").write_bytes(b"right" * M)
    subprocess.run([*KVFS, "ns", "create", str(kv.path / "n"), "compression=nvme"], check=True)
    for name in ("teaches the size.kv", "packed.kv"):
        (kv.path / "n" / name).write_bytes(bytes(4 * M))
    write_back(kv)
    kv.remount()
    with open(kv.path / "a.kv", "rb"), open(kv.path / "a.kv", "rb"):
        assert kv.counter("verified") == 1
    os.close(os.open(kv.path / "a.kv", os.O_RDONLY))
    wait_for(lambda: kv.idle()["counters"]["promoted"], "RAM has it as well")
    os.close(os.open(kv.path / "a.kv", os.O_RDONLY))
    assert kv.counter("verified") == 1
    kv.remount(f"{kv.options},verify_after=0")
    kv.expect_log("is quarantined")
    change(kv, "n/packed.kv")
    with refused(errno.ENOENT):
        os.open(kv.path / "n" / "packed.kv", os.O_RDONLY)
    assert kv.counter("verified") == 0
    kv.umount()
    kv.mount()
    change(kv, "a.kv")
    done = subprocess.run([*KVFS, "fsck", "--hashes", kv.path], check=False)
    assert done.returncode == 4
    kv.remount()
    with refused(errno.ENOENT):
        os.open(kv.path / "a.kv", os.O_RDONLY)


def test_unmounted(kv: Mounted) -> None:
    root = kv.path
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
    kv.remount()
    assert everything() == before
    assert os.getxattr(root / "d" / "2", "user.x") == b"y"
    last = max(os.lstat(root / "d" / str(number)).st_ino for number in range(5))
    (root / "fresh").touch()
    assert os.stat(root / "fresh").st_ino > last


def test_numbers(kv: Mounted) -> None:
    seen = []
    kv.expect_log("did not end properly")
    for restart in (kv.umount, kv.kill):
        for number in range(3):
            (kv.path / f"{number}").touch()
            seen.append(os.stat(kv.path / f"{number}").st_ino)
            os.unlink(kv.path / f"{number}")
        restart()
        kv.mount()
    (kv.path / "last").touch()
    seen.append(os.stat(kv.path / "last").st_ino)
    assert seen == sorted(set(seen))


def test_holes(either: Mounted) -> None:
    either.expect_log("whose files cannot have its 9223372036854771712 bytes; it is lost when")
    (either.path / "small").write_bytes(b"teaches the size")
    for name, size in (("holes", 4 << 40), ("large", (1 << 63) - 4096)):
        with opened(either.path / name, os.O_CREAT | os.O_RDWR) as descriptor:
            os.pwrite(descriptor, b"begin", 0)
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, b"end", (4 << 40) - 3)
    assert os.getxattr(either.path / "holes", "user.kvfs.tier") == b"ram"
    either.umount()
    either.mount()
    assert sorted(os.listdir(either.path)) == ["holes", "small"]
    found = os.stat(either.path / "holes")
    assert (found.st_size, found.st_blocks * 512 < 16 * M) == (4 << 40, True)
    assert os.getxattr(either.path / "holes", "user.kvfs.tier") == b"nvme"
    with opened(either.path / "holes", os.O_RDONLY) as descriptor:
        assert os.pread(descriptor, 6, 0) == b"begin\0"
        assert os.pread(descriptor, 9, (4 << 40) - 5) == b"\0\0end"
    done = subprocess.run([*KVFS, "fsck", "--hashes", either.path], check=False)
    assert done.returncode == 0


def test_unmounted_now(kv: Mounted) -> None:
    (kv.path / "a.kv").write_bytes(b"kept" * M)
    write_back(kv)
    (kv.path / "b.kv").write_bytes(b"small, and only in RAM")
    kv.umount("--now")
    kv.mount()
    assert os.listdir(kv.path) == ["a.kv"]
    assert (kv.path / "a.kv").read_bytes() == b"kept" * M


def test_all_dies(either: Mounted) -> None:
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


def test_the_log_is_damaged(kv: Mounted) -> None:
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    for number in range(30):
        (kv.path / f"{number}.tmp").write_bytes(bytes([number]) * 5000)
        os.rename(kv.path / f"{number}.tmp", kv.path / f"{number}.kv")
    os.unlink(kv.path / "7.kv")
    kv.kill()
    kv.expect_log(r"log ends too early, after change \d+: the \d+ changes .* from the journal")
    kv.expect_log("its log was damaged, what was missing is restored")
    for log in (nvme / "catalog").glob("*.log"):
        log.unlink()
    kv.mount()
    names = {f"{number}.kv" for number in range(30)} - {"7.kv"}
    assert set(os.listdir(kv.path)) == names
    for name in names:
        assert (kv.path / name).read_bytes() == bytes([int(name[:-3])]) * 5000

    (kv.path / "one more.kv").write_bytes(b"more")
    kv.kill()
    kv.expect_log("did not end properly: its bytes are all there")
    (log,) = (nvme / "catalog").glob("*.log")
    os.truncate(log, log.stat().st_size * 2 // 3)
    assert run("fsck", str(nvme)).returncode == 4
    assert run("fsck", "--repair", str(nvme)).returncode == 1
    assert run("fsck", str(nvme)).returncode == 0
    kv.mount()
    assert set(os.listdir(kv.path)) == {*names, "one more.kv"}


def test_log_and_journal_are_damaged(kv: Mounted) -> None:
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    for number in range(30):
        (kv.path / f"{number}.kv").write_bytes(bytes([number]) * 5000)
    files = {tier["path"]: count(tier["path"]) for tier in local(kv.status()).values()}
    kv.kill()
    kv.expect_log("its journal is gone: .* names may be missing; files without a name stay")
    kv.expect_log("names may be missing, its bytes stay for kvfs fsck --repair")
    kv.expect_log("repaired: ")
    (log,) = (nvme / "catalog").glob("*.log")
    os.truncate(log, log.stat().st_size * 2 // 3)
    shutil.rmtree(nvme / "catalog.journal")
    kv.mount()
    kv.idle()
    left = os.listdir(kv.path)
    assert 0 < len(left) < 30
    for name in left:
        assert (kv.path / name).read_bytes() == bytes([int(name[:-3])]) * 5000
    # One was about to be sealed, perhaps, and went when the mount began.
    assert sum(files.values()) - sum(map(count, files)) <= 1
    assert "its journal is gone" in kv.status()["catalog"]["doubt"]
    assert run("fsck", "--repair", str(kv.path)).returncode == 1
    assert not kv.status()["catalog"]["doubt"]
    assert sum(map(count, files)) == len(left) == len(os.listdir(kv.path))
    assert run("fsck", str(kv.path)).returncode == 0


def test_a_table_is_damaged(kv: Mounted) -> None:
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    for number in range(30):
        (kv.path / f"{number}.kv").write_bytes(bytes([number]) * 5000)
    kv.umount()
    (table,) = (nvme / "catalog").glob("*.sst")
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 3)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    before = count(nvme)
    done = run("mount", str(kv.path), "-o", f"{kv.options},log={kv.log}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(table) in done.stderr
    assert "nothing is changed" in done.stderr
    assert runtime.mount_at(kv.path) is None
    assert count(nvme) == before == 30
    checked = run("fsck", str(nvme))
    assert checked.returncode == 8
    assert str(table) in checked.stderr
    assert "Traceback" not in kv.log.read_text() + done.stderr + checked.stderr


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*KVFS, *arguments], capture_output=True, text=True, check=False)


def count(tier: Path | str) -> int:
    """The number of a tier's backing files."""
    return sum(path.is_file() for path in Path(tier, "objects").rglob("*.*"))


def test_power_fails(kv: Mounted) -> None:
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
    kv = mount("ram=64M")
    (kv.path / "a").write_bytes(b"a" * M)
    kv.expect_log("did not end properly")
    kv.kill()
    kv.mount()
    assert (kv.path / "a").read_bytes() == b"a" * M
    kv.remount()
    assert os.listdir(kv.path) == []


def test_scrubbed(kv: Mounted) -> None:
    assert kv.status()["options"]["scrub"] == "7d"
    (kv.path / "a.kv").write_bytes(b"teaches the size")
    (kv.path / "b.kv").write_bytes(b"right" * M)
    write_back(kv)
    (kv.path / "c.kv").write_bytes(b"in RAM only" * M)
    kv.idle()  # its RELEASE comes after close(2): until then it is being written
    content = {"b.kv": b"right" * M}
    kv.expect_log("quarantined")

    def scrub() -> dict[str, Any]:
        found: dict[str, Any] = kv.status()["scrub"]
        return found

    def a_pass() -> dict[str, Any]:
        """The result of a pass that begins after now, or of several."""
        now = time.time()
        request(kv.path, "set", scrub="1s")
        wait_for(lambda: (scrub()["last"] or {"began": 0})["began"] > now, "a pass ends")
        request(kv.path, "set", scrub="off")
        wait_for(lambda: scrub()["pass"] is None, "no other one runs")
        found: dict[str, Any] = scrub()["last"]
        return found

    found = a_pass()
    assert (found["objects"], found["rotten"], found["without_digest"]) == (3, 0, 1)
    assert scrub()["progress"] == 1.0
    tiers = {name: Path(tier["path"]) for name, tier in kv.status()["tiers"].items()}
    inode = os.stat(kv.path / "b.kv").st_ino
    for left, name in enumerate(("nvme", "ram")[::-1]):
        bad = next(tiers[name].glob(f"objects/*/{inode:x}.*"))
        times = bad.stat()
        with open(bad, "r+b") as file:
            file.write(b"wrong")
        os.utime(bad, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a disk does it
        a_pass()
        assert scrub()["tiers"][name]["rotten"] == 1, name
        kv.idle()
        assert [path.name for path in (tiers[name] / "quarantine").iterdir()] == [bad.name]
        if not left:
            assert (kv.path / "b.kv").read_bytes() == content["b.kv"]
        else:
            assert not (kv.path / "b.kv").exists()
    assert a_pass()["rotten"] == 0
