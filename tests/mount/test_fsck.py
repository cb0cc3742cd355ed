"""`kvfs fsck` on real mounts: beside writers, after an unmount, after a kill; its refusals."""

import json
import os
import pty
import random
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from kvfs import runtime
from kvfs.catalog import Catalog, Dentry
from kvfs.tiers import NvmeTier
from tests.conftest import Mount
from tests.harness import KVFS, PATIENCE, Mounted, alive, wait_for
from tests.unit.formats import CONTENT, write_format1

MIB = 1 << 20
SEED = 40


def fsck(target: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [*KVFS, "fsck", *options, str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)


def found(target: Path, *options: str) -> tuple[int, list[tuple[str, str]], dict[str, int]]:
    """Run fsck: (exit code, (kind, state) of each finding, notes)."""
    done = fsck(target, "--json", *options)
    assert not done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["exit"] == done.returncode
    assert answer["target"] == str(target)
    findings = [(finding["kind"], finding["state"]) for finding in answer["findings"]]
    return done.returncode, sorted(findings), answer["notes"]


def fill(one: Mounted, count: int = 4, size: int = MIB) -> list[Path]:
    paths = [one.path / f"{number}.bin" for number in range(count)]
    print("seeds", SEED, "to", SEED + count)
    for number, path in enumerate(paths):
        path.write_bytes(random.Random(SEED + number).randbytes(size))
    one.idle()
    return paths


def nvme_of(one: Mounted) -> Path:
    return Path(one.status()["tiers"]["nvme"]["path"])


def ram_of(one: Mounted) -> Path:
    return Path(one.status()["tiers"]["ram"]["path"])


def backing(tier: Path, ino: int) -> Path:
    (path,) = Path(tier, "objects", f"{ino % 256:02x}").glob(f"{ino:x}.*")
    return path


def corrupt(path: Path) -> None:
    """Change one bit, as a disk does it: the file's times stay the same."""
    status = path.stat()
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_clean_mount_has_no_findings_under_a_writer(kv: Mounted) -> None:
    """Files and directories are made, renamed, rewritten and unlinked, without a finding."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(SEED + number)
        here = kv.path / f"{number}"
        try:
            here.mkdir()
            while not stop.is_set():
                name = here / str(dice.randrange(20))
                name.with_suffix(".tmp").write_bytes(dice.randbytes(dice.choice([100, MIB])))
                name.with_suffix(".tmp").rename(name)
                (kv.path / f"{number}.dir").mkdir()
                (kv.path / f"{number}.dir").rename(kv.path / f"{number}.moved")
                (kv.path / f"{number}.moved").rmdir()
                if dice.random() < 0.3:
                    name.unlink()
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for options in ((), ("--hashes",), ("--repair",), ("--repair", "--hashes")):
            assert found(kv.path, *options)[:2] == (0, []), options
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert kv.counter("sealed") > 20


def test_damage_to_backing_files_is_found_and_repaired_beside_the_mount(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    paths = fill(kv)
    nvme = nvme_of(kv)
    wait_for(lambda: kv.counter("settled") == 4, "all have a digest")
    kept = paths[3].read_bytes()
    files = [backing(nvme, path.stat().st_ino) for path in paths]
    os.truncate(files[0], 5)
    files[1].unlink()
    corrupt(files[2])
    (nvme / "objects/05/5.1").write_bytes(b"leftover")
    wrong = [("damaged", "found"), ("leftover", "found"), ("missing", "found")]
    assert found(kv.path)[:2] == (4, wrong)
    assert found(kv.path, "--hashes")[:2] == (4, [("damaged", "found"), *wrong])
    assert sorted(os.listdir(kv.path)) == [path.name for path in paths], "nothing is changed"

    kv.expect_log("repaired: put this copy into quarantine and drop the object with its names")
    kv.expect_log("repaired: forget this copy and drop the object with its names")
    kv.expect_log("repaired: remove it")
    mended = [(kind, "repaired") for kind, _ in [("damaged", ""), *wrong]]
    assert found(kv.path, "--repair", "--hashes")[:2] == (1, mended)
    assert found(kv.path, "--hashes") == (0, [], {"copies": 1, "verified": 1, "quarantined": 2})
    assert os.listdir(kv.path) == ["3.bin"], "the kernel was told, too"
    assert paths[3].read_bytes() == kept


def test_a_copy_in_memory_is_repaired_from_nvme(kv: Mounted) -> None:
    paths = fill(kv, 12, 24 * MIB)  # more than RAM: some are in both tiers
    both = [
        path
        for path in paths
        if all(list(Path(tier, "objects").rglob(f"{path.stat().st_ino:x}.*"))
               for tier in (ram_of(kv), nvme_of(kv)))
    ]  # fmt: skip
    assert both
    content = both[0].read_bytes()
    kv.idle()
    os.truncate(backing(ram_of(kv), both[0].stat().st_ino), 7)
    kv.expect_log("repaired: put this copy into quarantine$")
    assert found(kv.path, "--repair")[:2] == (1, [("damaged", "repaired")])
    assert both[0].read_bytes() == content
    assert found(kv.path)[:2] == (0, [])


def test_without_a_mount_the_nvme_directory_is_checked(kv: Mounted, tmp_path: Path) -> None:
    paths = fill(kv)
    inos = [path.stat().st_ino for path in paths]
    nvme = nvme_of(kv)
    kv.umount()
    assert found(nvme, "--hashes") == (0, [], {"copies": 4, "verified": 4})
    corrupt(backing(nvme, inos[0]))
    catalog = Catalog(nvme / "catalog")
    lost = catalog.lookup(1, b"1.bin")
    assert lost
    with catalog.batch() as batch:
        batch.unlink(1, Dentry(b"1.bin", lost.ino, lost.cookie))
        batch.link(1, Dentry(b"nothing", 5, 6))
    catalog.close()
    before = sorted(nvme.rglob("objects/*/*"))
    wrong = ["damaged", "link", "name"]
    assert found(nvme, "--hashes")[:2] == (4, [(kind, "found") for kind in wrong])
    assert sorted(nvme.rglob("objects/*/*")) == before
    repaired = (1, [(kind, "repaired") for kind in wrong])
    assert found(nvme, "--hashes", "--repair")[:2] == repaired
    assert found(nvme, "--hashes")[:2] == (0, [])
    kv.mount()
    assert sorted(os.listdir(kv.path)) == ["2.bin", "3.bin", "lost+found"]
    saved = kv.path / "lost+found" / str(inos[1])
    assert saved.read_bytes() == random.Random(SEED + 1).randbytes(MIB)
    assert not list(tmp_path.glob("*.json"))


def test_namespaces_are_checked_and_repaired_with_and_without_a_mount(kv: Mounted) -> None:
    """Namespaces have unreadable settings, and objects belong to a missing namespace."""
    space = kv.path / "n"
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"1G")
    (space / "a").write_bytes(b"x" * 5000)
    (space / "b").write_bytes(b"y" * 5000)
    kv.idle()
    assert found(kv.path)[:2] == (0, [])
    nvme = nvme_of(kv)

    def harm() -> None:
        kv.umount()
        catalog = Catalog(nvme / "catalog")
        top = catalog.lookup(1, b"n")
        assert top
        entry = catalog.lookup(top.ino, b"a")
        assert entry
        inode = catalog.inode(entry.ino)
        assert inode
        inode.namespace = 999
        with catalog.batch() as batch:
            batch.put(inode)
            batch.mark(b"n", top.ino, b"nonsense")
            batch.mark(b"r", 5)
            batch.mark(b"l", 77, b"nonsense")
        catalog.close()

    wrong = ["mark", "namespace", "record", "settings"]
    harm()
    assert found(nvme)[:2] == (4, [(kind, "found") for kind in wrong])
    assert found(nvme, "--repair")[:2] == (1, [(kind, "repaired") for kind in wrong])
    assert found(nvme)[:2] == (0, [])
    kv.mount()
    harm()
    kv.mount()
    kv.expect_log("has the default settings, since its own are bad: settings 'nonsense'")
    kv.expect_log("repaired: give it the default settings")
    kv.allow_log("check: .*repaired: ")
    # The walk over the dropped tree that there never was has ended, and taken its mark along.
    wait_for(lambda: not kv.status()["dropped"], "the walk has ended")
    wrong.remove("mark")
    assert found(kv.path)[:2] == (4, [(kind, "found") for kind in wrong])
    assert found(kv.path, "--repair")[:2] == (1, [(kind, "repaired") for kind in wrong])
    assert found(kv.path, "--hashes")[:2] == (0, [])
    spaces = {one["name"]: one["objects"] for one in kv.idle()["namespaces"]}
    assert spaces == {".": 0, "n": 2}


def test_a_directory_of_format_1_is_mounted_checked_and_used(mount: Mount, tmp_path: Path) -> None:
    """Read and extend the directory of a kvfs without namespaces, after a power loss."""
    nvme = tmp_path / "nvme"
    NvmeTier(nvme, 0).close()
    write_format1(nvme / "catalog", nvme)
    assert found(nvme, "--hashes")[:2] == (0, [])
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=1G")
    kv.expect_log("did not end properly: copies are verified before use")
    assert sorted(os.listdir(kv.path)) == ["a", "d"]
    assert (kv.path / "a").read_bytes() == (kv.path / "d/s").read_bytes() == CONTENT
    assert os.getxattr(kv.path / "a", "user.x") == b"y"
    os.setxattr(kv.path / "d", "user.kvfs.weight", b"7")
    (kv.path / "d/new").write_bytes(b"new")
    assert found(kv.path, "--hashes")[:2] == (0, [])
    kv.remount()
    assert (kv.path / "d/a2").read_bytes() == CONTENT
    assert os.getxattr(kv.path / "d", "user.kvfs.weight") == b"7"
    assert found(kv.path)[:2] == (0, [])


def test_after_a_kill_memory_is_checked_where_the_daemon_left_it(kv: Mounted) -> None:
    kv.expect_log("did not end properly: its bytes are all there")
    paths = fill(kv)
    inos = [path.stat().st_ino for path in paths]
    ram, nvme = ram_of(kv), nvme_of(kv)
    in_ram = [ino for ino in inos if list(Path(ram, "objects").rglob(f"{ino:x}.*"))]
    assert in_ram
    torn = os.open(kv.path / "torn", os.O_WRONLY | os.O_CREAT)
    os.write(torn, b"x")
    kv.kill()
    with pytest.raises(OSError, match=r"abort|connected"):
        os.close(torn)
    assert found(nvme) == (0, [], {"copies": 4, "unfinished": 1})
    os.truncate(backing(ram, in_ram[0]), 5)
    assert found(nvme)[:2] == (4, [("damaged", "found")])
    assert found(nvme, "--repair")[:2] == (1, [("damaged", "repaired")])
    kv.mount()
    assert kv.idle()["tiers"]["ram"]["objects"] == len(in_ram) - 1, "the memory was taken over"
    assert len(os.listdir(kv.path)) == 3
    assert found(kv.path)[:2] == (0, [])


def test_memory_that_is_gone_is_said_and_is_no_damage(kv: Mounted) -> None:
    kv.expect_log("did not end properly: its bytes are all there")
    fill(kv)
    ram, nvme = ram_of(kv), nvme_of(kv)
    only_ram = kv.status()["objects"] - kv.status()["tiers"]["nvme"]["objects"]
    assert only_ram
    kv.kill()
    subprocess.run(["umount", ram], check=True)
    code, findings, notes = found(nvme)
    assert (code, findings, notes["ram_gone"]) == (0, [], only_ram)
    assert f"{only_ram} objects were only in RAM, which is gone" in fsck(nvme).stdout
    kv.mount()
    assert found(kv.path)[:2] == (0, [])


def test_after_a_power_loss_copies_are_to_be_verified(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    paths = fill(kv, 3)
    inos = [path.stat().st_ino for path in paths]
    wait_for(lambda: kv.counter("settled") == 3, "all have a digest")
    nvme = nvme_of(kv)
    kv.kill()
    catalog = Catalog(nvme / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("boot", "another")
    catalog.close()
    corrupt(backing(nvme, inos[1]))
    assert found(nvme) == (0, [], {"copies": 3, "to_verify": 3})
    assert "are older than a power loss: verify them (--hashes)" in fsck(nvme).stdout
    code, findings, notes = found(nvme, "--hashes")
    assert (code, findings, notes["verified"]) == (4, [("damaged", "found")], 2)


def test_a_mounted_directory_is_refused_with_the_mount_point_to_use(kv: Mounted) -> None:
    nvme = nvme_of(kv)
    done = fsck(nvme)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"process {kv.pid}, mounted on {kv.path}" in done.stderr
    assert f"kvfs fsck {kv.path}" in done.stderr


def test_fsck_of_other_paths_is_refused(kv: Mounted, tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / "nothing", nvme_of(kv) / "identity"):
        done = fsck(target)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "neither a mount point of kvfs" in done.stderr
        assert str(kv.path) in done.stderr
        assert "it has no" in done.stderr
    assert fsck(tmp_path, "--nonsense").returncode == 2
    assert list(tmp_path.glob("identity")) == [], "nothing is made there"


def test_a_catalog_that_cannot_be_opened_is_an_error_of_its_own(kv: Mounted) -> None:
    nvme = nvme_of(kv)
    kv.umount()
    catalog = Catalog(nvme / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", "999")
    catalog.close()
    done = fsck(nvme)
    assert done.returncode == 8
    assert "has format 999" in done.stderr


def test_a_dead_daemon_is_an_error_of_its_own(kv: Mounted) -> None:
    daemon = kv.pid
    for pid in (kv.keeper, daemon):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(daemon), "the daemon ends")
    kv.allow_log("the keeper of .* is dead")
    assert runtime.mount_at(kv.path) is not None
    done = fsck(kv.path)
    assert done.returncode == 8
    assert "no daemon answers" in done.stderr
    subprocess.run(["umount", "-l", kv.path], check=True)


def test_memory_alone_is_checked_too(mount: Mount) -> None:
    kv = mount("ram=64M")
    paths = fill(kv, 2)
    assert found(kv.path, "--hashes", "--repair") == (0, [], {"copies": 2, "without_digest": 2})
    assert found(kv.path, "--hashes") == (0, [], {"copies": 2, "verified": 2})
    corrupt(backing(ram_of(kv), paths[0].stat().st_ino))
    kv.expect_log("repaired: put this copy into quarantine and drop the object with its names")
    assert found(kv.path, "--hashes", "--repair")[:2] == (1, [("damaged", "repaired")])
    assert os.listdir(kv.path) == ["1.bin"]


def test_finding_about_a_name_with_a_newline_is_one_line(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    path = kv.path / "two\nlines\x1b"
    path.write_bytes(b"x")
    kv.idle()
    backing(nvme_of(kv), path.stat().st_ino).unlink()
    line, _ = fsck(kv.path).stdout.splitlines()
    assert r"/two\nlines\x1b: nvme copy" in line
    kv.expect_log("repaired: forget this copy")
    assert found(kv.path, "--repair")[0] == 1


def test_people_get_a_line_for_each_finding_and_a_sum(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    (path, *_) = fill(kv, 2)
    done = fsck(kv.path)
    assert done.returncode == 0
    assert done.stdout == f"{kv.path}: 3 inodes and 2 copies are in order\n"
    ino = path.stat().st_ino
    file = backing(nvme_of(kv), ino)
    file.unlink()
    done = fsck(kv.path)
    assert done.returncode == 4
    assert done.stdout == (
        f"missing: inode {ino} /0.bin: nvme copy {file}: it is not there "
        "(--repair: forget this copy and drop the object with its names)\n"
        f"{kv.path}: 1 findings in 3 inodes, 0 repaired, 1 left\n"
    )
    kv.expect_log("repaired: forget this copy")
    done = fsck(kv.path, "--repair")
    assert done.returncode == 1
    assert "(repaired: forget this copy and drop" in done.stdout
    assert "1 findings in 3 inodes, 1 repaired, 0 left" in done.stdout


def on_a_terminal(target: Path, *, stdout: bool) -> tuple[str, str]:
    """(output on stdout, output on the terminal) of a run whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*KVFS, "fsck", str(target)],
            stdout=theirs if stdout else subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "400"},
            check=False,
            timeout=PATIENCE,
        )
        os.set_blocking(ours, False)
        return (done.stdout or b"").decode(), os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_bar_is_on_the_terminal_and_nowhere_else(kv: Mounted) -> None:
    fill(kv, 1)
    (nvme_of(kv) / "objects/05/5.1").write_bytes(b"leftover")
    out, screen = on_a_terminal(kv.path, stdout=False)
    assert "checking" in screen
    assert "leftover" not in screen
    assert "\x1b" not in out
    assert "leftover: inode 5" in out
    _, screen = on_a_terminal(kv.path, stdout=True)
    assert "checking" in screen
    assert "leftover: inode 5" in screen
    kv.expect_log("repaired: remove it")
    assert found(kv.path, "--repair")[0] == 1
