"""From mount to umount and back: objects that a restart keeps, and those that it cannot."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvfs import mounts, runtime
from kvfs.catalog import FORMAT, Catalog
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, alive, apart, wait_for

MIB = 1 << 20
SEED = 20


def write(path: Path, size: int, seed: int) -> str:
    """Write a file of reproducible bytes; return their digest."""
    data = random.Random(seed).randbytes(size)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fill(one: Mounted, count: int, size: int) -> dict[str, str]:
    print("seeds", SEED, "to", SEED + count)
    return {
        f"{number}.bin": write(one.path / f"{number}.bin", size, SEED + number)
        for number in range(count)
    }


def lose_power(one: Mounted) -> None:
    """Simulate a power loss: kill the daemon, delete the RAM tier, change the boot id."""
    ram = Path(one.status()["tiers"]["ram"]["path"])
    nvme = Path(one.status()["tiers"]["nvme"]["path"])
    one.kill()
    mounts.umount(ram, mounts.MNT_DETACH)
    catalog = Catalog(nvme / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("boot", "another")
    catalog.close()


def refused(*arguments: str) -> str:
    done = subprocess.run([*KVFS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, "one line"
    return done.stderr


def test_umount_and_mount_keep_names_numbers_bytes_and_attributes(kv: Mounted) -> None:
    digests = fill(kv, 6, 3 * MIB)
    (kv.path / "a/b").mkdir(parents=True)
    (kv.path / "a/link").symlink_to("b")
    os.link(kv.path / "1.bin", kv.path / "a/second")
    os.setxattr(kv.path / "2.bin", "user.x", b"value")
    os.utime(kv.path / "3.bin", ns=(1_000, 2_000))
    os.chmod(kv.path / "4.bin", 0o640)
    names = sorted(path.relative_to(kv.path) for path in kv.path.rglob("*"))
    before = {name: os.lstat(kv.path / name) for name in names}

    kv.remount()

    assert sorted(path.relative_to(kv.path) for path in kv.path.rglob("*")) == names
    for name, was in before.items():
        now = os.lstat(kv.path / name)
        for field in ("st_ino", "st_mode", "st_nlink", "st_size", "st_mtime_ns", "st_ctime_ns"):
            assert getattr(now, field) == getattr(was, field), (name, field)
    assert {name: digest(kv.path / name) for name in digests} == digests
    assert digest(kv.path / "a/second") == digests["1.bin"]
    assert os.getxattr(kv.path / "2.bin", "user.x") == b"value"


def test_umount_writes_back_ram_and_returns_the_memory(kv: Mounted) -> None:
    digests = fill(kv, 8, 8 * MIB)
    status = kv.idle()
    assert status["tiers"]["ram"]["objects"] > status["tiers"]["nvme"]["objects"]
    kv.umount()
    assert runtime.mount_at(Path(status["tiers"]["ram"]["path"])) is None
    kv.mount()
    assert kv.idle()["tiers"]["nvme"]["objects"] == 8
    assert {name: digest(kv.path / name) for name in digests} == digests


def test_umount_now_loses_objects_only_in_ram_and_no_others(kv: Mounted) -> None:
    digests = fill(kv, 8, 8 * MIB)
    kv.idle()
    in_ram = kv.status()["objects"] - kv.status()["tiers"]["nvme"]["objects"]
    assert in_ram > 0
    said = kv.umount("--now")
    assert said == (
        f"kvfs: {in_ram} objects ({in_ram * 8}.0 MiB) are lost with RAM: neither NVMe nor the "
        "bucket had them\n"
    )
    told = said.removeprefix("kvfs: ").strip()
    assert f"{kv.path}: unmounted with --now: {told}" in kv.log.read_text()
    kv.mount()
    left = sorted(os.listdir(kv.path))
    assert len(left) == 8 - in_ram
    assert all(digest(kv.path / name) == digests[name] for name in left)
    assert kv.idle()["census_done"]
    assert kv.umount("--now") == "nothing was lost\n"


@pytest.mark.parametrize("command", ["kvfs", "umount"])
def test_an_unmount_says_what_media_ram_loses(kv: Mounted, command: str) -> None:
    """The log says it, and so does the command of kvfs."""
    settings = ["media=ram", "eviction=never"]
    made = [*KVFS, "ns", "create", str(kv.path / "r"), *settings]
    hint = subprocess.run(made, capture_output=True, text=True, check=True).stderr
    assert "media=ram: each unmount loses its objects, although eviction=never" in hint
    for number in range(3):
        (kv.path / "r" / f"{number}").write_bytes(b"abc")
    (kv.path / "saved").write_bytes(b"abc")
    kv.idle()
    lost = "3 objects (9 B) are lost with RAM: neither NVMe nor the bucket had them"
    if command == "kvfs":
        assert kv.umount() == f"kvfs: {lost}\n"
    else:
        subprocess.run(["umount", kv.path], check=True)
        wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    assert f"{kv.path}: unmounted: {lost}" in kv.log.read_text()
    kv.mount()
    assert (os.listdir(kv.path / "r"), (kv.path / "saved").read_bytes()) == ([], b"abc")
    assert kv.idle()["census_done"]
    assert kv.umount() == ""


def test_the_systems_own_umount_writes_back_too(kv: Mounted) -> None:
    digests = fill(kv, 4, 8 * MIB)
    subprocess.run(["umount", kv.path], check=True)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    kv.mount()
    assert {name: digest(kv.path / name) for name in digests} == digests


@pytest.mark.parametrize("command", ["kvfs", "umount"])
def test_an_unmount_says_how_many_objects_nvme_had_no_room_for(mount: Mount, command: str) -> None:
    kv = _overfilled(mount)  # however far the movers have come
    before = set(os.listdir(kv.path))
    if command == "kvfs":
        arguments = [*KVFS, "umount", str(kv.path)]
        said = subprocess.run(arguments, check=True, capture_output=True, text=True).stderr
        wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    else:
        subprocess.run(["umount", kv.path], check=True)
        wait_for(lambda: not alive(kv.keeper), "the keeper ends")
        said = kv.log.read_text()
    kv.mount()
    lost = len(before - set(os.listdir(kv.path)))
    assert lost > 0
    assert f"{lost} objects were dropped to save what RAM held: NVMe is full" in said


def _overfilled(mount: Mount) -> Mounted:
    """A mount whose RAM alone holds more than its NVMe can take."""
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=48M")
    kv.allow_log("nothing is demoted: the NVMe tier has no room")  # while writes outrun eviction
    (kv.path / "learn.kv").write_bytes(b"l" * MIB)  # the size of files is known from now on
    for number in range(140):
        (kv.path / f"{number}.kv").write_bytes(b"x" * MIB)
    kv.idle()
    return kv


@pytest.mark.parametrize("user", ["reader", "directory", "mapping", "mount"])
@pytest.mark.parametrize("arguments", [(), ("--now",)])
def test_a_refused_unmount_drops_and_saves_nothing(
    mount: Mount, user: str, arguments: tuple[str, ...]
) -> None:
    kv = _overfilled(mount)
    (kv.path / "folder").mkdir()
    newest = kv.path / "139.kv"
    names, before = set(os.listdir(kv.path)), kv.idle()
    with ExitStack() as stack:
        if user == "mount":
            subprocess.run(["mount", "-t", "tmpfs", "none", kv.path / "folder"], check=True)
            stack.callback(mounts.umount, kv.path / "folder")
            name = f"the mount on {kv.path}/folder"
        else:
            script = {
                "reader": f"file = open({str(newest)!r})",
                "directory": f"import os; os.chdir({str(kv.path / 'folder')!r})",
                "mapping": f"import mmap; file = open({str(newest)!r}); "
                "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()",
            }[user]
            program = [sys.executable, "-c", f"{script}; print(flush=True); input()"]
            process = stack.enter_context(
                subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert process.stdout is not None
            process.stdout.readline()
            name = f"({process.pid})"
        command = [*KVFS, "umount", *arguments, str(kv.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = kv.status()
        if user != "mount":
            process.communicate(b"\n")
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvfs: {kv.path} is busy; in use by ")
    assert name in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert after["counters"]["dropped_evicted"] == before["counters"]["dropped_evicted"]
    assert not after["writing_back"]
    assert set(os.listdir(kv.path)) == names
    assert kv.path.is_mount()


def test_a_process_on_a_copy_of_the_mount_blocks_no_unmount(kv: Mounted, tmp_path: Path) -> None:
    """In another mount namespace it has the same path, and the kernel unmounts here."""
    script = f"cd {kv.path}; touch {tmp_path}/there; read line"
    with subprocess.Popen(apart(script, kv.path), stdin=subprocess.PIPE) as copying:
        wait_for((tmp_path / "there").exists, "it is in the copy")
        command = [*KVFS, "umount", "--now", str(kv.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"{kv.path} is unmounted" in done.stderr
        assert runtime.mount_at(kv.path) is None
        copying.communicate(b"\n")
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")


def test_an_unmount_tells_no_objects_that_an_earlier_save_dropped(mount: Mount) -> None:
    kv = _overfilled(mount)
    wait_for(lambda: not request(kv.path, "write_back")["bytes_left"], "all is saved")
    assert request(kv.path, "write_back")["displaced"] > 0
    arguments = [*KVFS, "umount", "--lazy", str(kv.path)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    told = re.findall("([0-9]+) objects were dropped to save", kv.log.read_text())
    assert len(told) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_properly(kv: Mounted, number: signal.Signals) -> None:
    digests = fill(kv, 4, 8 * MIB)
    os.kill(kv.keeper, number)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    assert runtime.mount_at(kv.path) is None
    kv.mount()
    assert {name: digest(kv.path / name) for name in digests} == digests


def test_a_killed_daemon_loses_nothing_that_was_sealed(kv: Mounted) -> None:
    """Objects in RAM survive the daemon; a file that was being written goes completely."""
    kv.expect_log("did not end properly: its bytes are all there")
    digests = fill(kv, 10, 8 * MIB)
    kv.idle()
    unsealed = os.open(kv.path / "unsealed.bin", os.O_WRONLY | os.O_CREAT)
    unlinked = os.open(kv.path / "unlinked.bin", os.O_WRONLY | os.O_CREAT)
    os.unlink(kv.path / "unlinked.bin")
    rewritten = os.open(kv.path / "0.bin", os.O_WRONLY)
    for fd in (unsealed, unlinked, rewritten):
        assert os.write(fd, b"torn") == 4
    kv.kill()
    for fd in (unsealed, unlinked, rewritten):
        with pytest.raises(OSError, match=r"abort|connected"):
            os.close(fd)

    kv.mount()
    status = kv.idle()
    assert status["tiers"]["ram"]["objects"] > 0, "the memory was taken over"
    del digests["0.bin"]  # opened for writing: torn, so a miss
    assert sorted(os.listdir(kv.path)) == sorted(digests)
    assert {name: digest(kv.path / name) for name in digests} == digests
    assert backing_files(status) == status["objects"] + duplicates(status)


def backing_files(status: dict[str, dict[str, dict[str, str]]]) -> int:
    return sum(
        1
        for tier in status["tiers"].values()
        for path in Path(tier["path"], "objects").rglob("*")
        if path.is_file()
    )


def duplicates(status: dict[str, dict[str, dict[str, int]]]) -> int:
    """Objects with a copy in both tiers."""
    copies = sum(tier["objects"] for tier in status["tiers"].values())
    return copies - int(str(status["objects"]))


def test_reboot_removes_names_of_objects_only_in_ram(kv: Mounted) -> None:
    kv.expect_log("copies are verified before use")
    digests = fill(kv, 12, 24 * MIB)  # more than RAM: some are on NVMe
    status = kv.idle()
    on_nvme = status["tiers"]["nvme"]["objects"]
    assert 0 < on_nvme < 12
    lose_power(kv)
    kv.mount()
    left = sorted(os.listdir(kv.path))
    assert len(left) == on_nvme
    assert {name: digest(kv.path / name) for name in left} == {n: digests[n] for n in left}
    gone = min(set(digests) - set(left))
    with pytest.raises(FileNotFoundError):
        os.stat(kv.path / gone)
    assert write(kv.path / gone, MIB, 7) == digest(kv.path / gone), "the name is free again"


def test_after_a_crash_a_copy_is_trusted_only_if_its_digest_agrees(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    digests = fill(kv, 3, 2 * MIB)
    kv.idle()
    paths = {name: backing(kv, name) for name in digests}
    kv.expect_log("copies are verified before use")
    kv.expect_log("quarantined: its bytes do not match")
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    kv.kill()
    flip(paths["1.bin"], keep_mtime=True)  # what a disk does that lost a write
    catalog = Catalog(nvme / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("boot", "another")
    catalog.close()
    kv.mount()
    assert digest(kv.path / "0.bin") == digests["0.bin"]
    with pytest.raises(FileNotFoundError):
        (kv.path / "1.bin").read_bytes()
    assert sorted(os.listdir(kv.path)) == ["0.bin", "2.bin"]
    kv.idle()
    assert kv.counter("quarantined") == 1
    assert list((nvme / "quarantine").iterdir())


def backing(one: Mounted, name: str) -> Path:
    ino = os.stat(one.path / name).st_ino
    root = Path(one.status()["tiers"]["nvme"]["path"], "objects", f"{ino % 256:02x}")
    (found,) = root.glob(f"{ino:x}.*")
    return found


def flip(path: Path, *, keep_mtime: bool = False) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(status.st_size // 2)
        file.write(bytes([byte[0] ^ 1]))
    if keep_mtime:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_backing_file_is_a_miss_at_open_and_counted(mount: Mount, damage: str) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    digests = fill(kv, 2, 2 * MIB)
    kv.idle()
    path = backing(kv, "0.bin")
    if damage == "flip":
        flip(path)
        kv.expect_log("quarantined: its bytes do not match their digest")
    elif damage == "cut":
        os.truncate(path, MIB)
        kv.expect_log(f"quarantined: it has {MIB} bytes, expected {2 * MIB}")
    else:
        path.unlink()
        kv.expect_log("is gone")
    with pytest.raises(FileNotFoundError):
        (kv.path / "0.bin").open("rb")
    counters = kv.idle()["counters"]
    assert counters["missing" if damage == "remove" else "quarantined"] == 1
    assert counters["opens_unreadable"] == 1
    wait_for(lambda: os.listdir(kv.path) == ["1.bin"], "the name goes with its bytes")
    assert digest(kv.path / "1.bin") == digests["1.bin"]


def test_a_touched_backing_file_with_the_right_bytes_is_served(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=1G")
    digests = fill(kv, 1, 2 * MIB)
    kv.idle()
    os.utime(backing(kv, "0.bin"))
    assert digest(kv.path / "0.bin") == digests["0.bin"]


def test_the_nvme_directory_may_be_mounted_elsewhere(kv: Mounted, mount: Mount) -> None:
    digests = fill(kv, 4, 4 * MIB)
    kv.umount()
    other = mount(kv.options, "elsewhere")
    assert {name: digest(other.path / name) for name in digests} == digests


def test_ram_alone_is_a_file_system_until_umount(mount: Mount) -> None:
    kv = mount("ram=128M")
    digests = fill(kv, 4, 4 * MIB)
    assert {name: digest(kv.path / name) for name in digests} == digests
    assert list(kv.status()["tiers"]) == ["ram"]
    kv.expect_log("did not end properly")
    kv.kill()
    kv.mount()
    assert {name: digest(kv.path / name) for name in digests} == digests
    kv.remount()
    assert os.listdir(kv.path) == []


def test_passthrough_and_served_mounts_read_each_other(kv: Mounted) -> None:
    digests = fill(kv, 4, 4 * MIB)
    kv.remount(f"{kv.options},passthrough=off")
    assert not kv.status()["passthrough"]["on"]
    assert {name: digest(kv.path / name) for name in digests} == digests
    digests["new"] = write(kv.path / "new", 5 * MIB, 1)
    kv.remount(kv.options.replace(",passthrough=off", ",passthrough=on"))
    assert kv.status()["passthrough"]["on"]
    assert {name: digest(kv.path / name) for name in digests} == digests


def test_a_second_kvfs_on_the_same_directory_is_refused(kv: Mounted, tmp_path: Path) -> None:
    elsewhere = tmp_path / "second"
    elsewhere.mkdir()
    reason = refused("mount", str(elsewhere), "-o", f"ram=64M,nvme={tmp_path}/nvme,nvme_size=1G")
    assert f"in use by another kvfs (process {kv.pid}, mounted on {kv.path})" in reason
    assert runtime.mount_at(elsewhere) is None
    (kv.path / "still").write_text("alive")


def test_a_second_mount_on_the_same_mount_point_is_refused(kv: Mounted) -> None:
    assert "already a mount point" in refused("mount", str(kv.path), "-o", "ram=64M")


def test_a_catalog_of_a_newer_format_is_refused(kv: Mounted) -> None:
    fill(kv, 1, MIB)
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    kv.umount()
    catalog = Catalog(nvme / "catalog")
    with catalog.batch() as batch:
        batch.set_fact("format", "99")
    catalog.close()
    objects = sorted(nvme.rglob("objects/*/*"))
    reason = refused("mount", str(kv.path), "-o", f"{kv.options},log={kv.log}")
    assert f"has format 99, this kvfs reads up to {FORMAT}" in reason
    assert sorted(nvme.rglob("objects/*/*")) == objects


def test_mount_t_kvfs_works(tmp_path: Path) -> None:
    """/etc/fstab and mount(8) run /sbin/mount.kvfs, as scripts/install.sh links it."""
    assert shutil.which("mount.kvfs", path="/sbin:/usr/sbin"), "run scripts/install.sh"
    kv = Mounted(tmp_path / "kv", "ram=64M", tmp_path / "kv.log")
    kv.path.mkdir()
    options = f"{kv.options},log={kv.log}"
    try:
        subprocess.run(["mount", "-t", "kvfs", "kvfs", kv.path, "-o", options], check=True)
        kv.keeper = kv.status()["keeper_pid"]
        (kv.path / "a").write_text("b")
        kv.umount()
    finally:
        kv.clean_up()


def test_an_nvme_directory_that_is_not_there_is_made_and_told(mount: Mount, tmp_path: Path) -> None:
    """A wrong path looks like a new mount."""
    mount("ram=32M,nvme={tmp}/nvme,nvme_size=64M").umount()
    for options, said in (
        ("nvme", ""),
        ("nmve", f"nvme={tmp_path}/nmve did not exist: the mount has made it"),
    ):
        where = f"ram=32M,nvme={tmp_path / options},nvme_size=64M,log={tmp_path / 'kv.log'}"
        command = [*KVFS, "mount", str(tmp_path / "kv"), "-o", where]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert said in done.stderr
        assert bool(said) == bool(done.stderr)
        subprocess.run([*KVFS, "umount", tmp_path / "kv"], check=True)


def test_hot_options_change_and_others_are_refused(kv: Mounted) -> None:
    command = [*KVFS, "set", str(kv.path)]
    subprocess.run([*command, "promote_after=5", "reclaimable=50"], check=True)
    assert kv.status()["options"]["promote_after"] == "5"
    done = subprocess.run([*command, "ram=1G"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cannot change while mounted" in done.stderr


def test_without_root_the_daemon_serves_the_bytes() -> None:
    """The daemon runs in a mount namespace of its own, with a /dev/fuse that anyone may open.

    Its only capability is for reading, because the interpreter may be in root's home.
    """
    kvfs = " ".join(KVFS)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)  # noqa: S103 - where fusermount3 may look as nobody, unlike tmp_path
        script = f"""
            set -e
            mknod -m 666 {folder}/fuse c 10 229
            mount --bind {folder}/fuse /dev/fuse
            setpriv --reuid=65534 --regid=65534 --clear-groups \
                --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search \
                env -i PATH="$PATH" HOME=/ XDG_RUNTIME_DIR={folder}/run sh -ec '
                    cd {folder}
                    mkdir kv run
                    ! PATH=/none {kvfs} mount kv -o ram=64M
                    [ -z "$(find /dev/shm -maxdepth 1 -user 65534)" ]
                    {kvfs} mount kv -o ram=64M,nvme={folder}/nvme,nvme_size=256M
                    head -c 10000000 /dev/urandom > expected
                    cp expected kv/object
                    cmp expected kv/object
                    {kvfs} status --json kv
                    {kvfs} umount kv' """
        command = ["unshare", "--mount", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout[done.stdout.index("{") :])
    assert status["passthrough"] == {"on": False, "why": "needs root"}
    assert not status["huge_pages"]["on"]
    assert status["counters"]["opens_served"] > 0


def test_an_umount_that_fails_changes_nothing_for_the_next(kv: Mounted) -> None:
    digests = fill(kv, 6, 8 * MIB)
    inside = os.open(kv.path / "0.bin", os.O_RDONLY)
    try:
        done = subprocess.run(
            [*KVFS, "umount", "--now", str(kv.path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "busy" in done.stderr
    finally:
        os.close(inside)
    digests["after"] = write(kv.path / "after", MIB, 5)
    subprocess.run(["umount", kv.path], check=True)
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
    kv.mount()
    assert {name: digest(kv.path / name) for name in digests} == digests


def test_after_a_remount_the_oldest_go_first(mount: Mount) -> None:
    kv = mount("ram=0,nvme={tmp}/nvme,nvme_size=128M")
    fill(kv, 80, MIB)
    kv.idle()
    kv.remount(kv.options.replace("128M", "64M"))
    kv.idle()
    for number in range(100, 110):
        write(kv.path / f"{number}.bin", MIB, number)
    left = {int(name.partition(".")[0]) for name in os.listdir(kv.path)}
    old = sorted(left - set(range(100, 110)))
    assert set(range(100, 110)) <= left
    assert old == list(range(80 - len(old), 80)), "the youngest of the old are there"
