"""Where a mount keeps its things, and what the machine offers it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import runtime
from kvfs.errors import ConfigError
from kvfs.mounts import mount, umount

GIB = 1 << 30
NAMES = st.binary(min_size=1, max_size=40).filter(lambda n: not set(n) & {0, ord("/")})
PATHS = st.lists(NAMES.filter(lambda n: n not in {b".", b".."}), max_size=5)


@pytest.fixture
def nobody() -> Iterator[None]:
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "a \\ b"
    path.mkdir()
    mount("none", path, "tmpfs", 0, "size=1M")
    yield path
    umount(path)


# Names


@pytest.mark.parametrize(
    "path", ["/", "/mnt/kv", "/mnt/kv-1", "/.hidden/x y", "//a///b/", "/a:b_c.d"]
)
def test_escape_follows_systemd(path: str) -> None:
    theirs = subprocess.run(
        ["systemd-escape", "--path", "--", path], capture_output=True, text=True, check=True
    )
    assert runtime.escape(Path(path)) == theirs.stdout.rstrip("\n")


@given(PATHS, PATHS)
def test_escape_is_unique_and_short_enough_for_a_socket(one: list[bytes], two: list[bytes]) -> None:
    paths = [Path(os.fsdecode(b"/" + b"/".join(names))) for names in (one, two)]
    names = [runtime.escape(path) for path in paths]
    assert (names[0] == names[1]) == (paths[0] == paths[1])
    assert all(name.isascii() and "/" not in name and len(name) <= 64 for name in names)
    assert all(len(str(runtime.socket_path(path))) <= 107 for path in paths)


def test_root_keeps_its_things_where_the_system_does() -> None:
    mountpoint = Path("/mnt/kv")
    assert runtime.socket_path(mountpoint) == Path("/run/kvfs/mnt-kv/control.sock")
    assert runtime.log_path(mountpoint) == Path("/var/log/kvfs/mnt-kv.log")
    assert runtime.ram_root() == Path("/run/kvfs-ram")


@pytest.mark.usefixtures("nobody")
def test_others_keep_them_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    mountpoint = Path("/mnt/kv")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/65534")
    assert runtime.runtime_dir(mountpoint) == Path("/run/user/65534/kvfs/mnt-kv")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime.log_path(mountpoint) == Path("/tmp/kvfs-65534/mnt-kv/kvfs.log")
    assert runtime.ram_root() == Path("/dev/shm/kvfs-65534")


def test_a_private_directory_is_made_and_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        made = runtime.make_private(tmp_path / "kvfs/mnt-kv")
        assert made.stat().st_mode & 0o777 == 0o700
        assert made.parent.stat().st_mode & 0o777 == 0o700


def test_a_private_directory_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvfs").mkdir()
    os.chown(tmp_path / "kvfs", 65534, 65534)
    with pytest.raises(ConfigError, match="must belong to uid 0"):
        runtime.make_private(tmp_path / "kvfs/mnt-kv")
    os.chown(tmp_path / "kvfs", 0, 0)
    (tmp_path / "kvfs").chmod(0o777)
    with pytest.raises(ConfigError, match="no other user may write"):
        runtime.make_private(tmp_path / "kvfs/mnt-kv")


# Mounts


def test_a_mount_is_found_by_its_path(tmpfs: Path) -> None:
    found = runtime.mount_at(tmpfs)
    assert found is not None
    assert (found.path, found.fstype, found.source) == (str(tmpfs), "tmpfs", "none")
    assert "size=1024k" in found.super_options
    assert runtime.mount_at(tmpfs.parent) is None


def test_of_stacked_mounts_the_topmost_is_found(tmpfs: Path) -> None:
    mount("above", tmpfs, "tmpfs", 0, "size=2M")
    found = runtime.mount_at(tmpfs)
    umount(tmpfs)
    assert found is not None
    assert found.source == "above"


def test_other_mount_than_kvfs_is_refused(tmpfs: Path) -> None:
    with pytest.raises(ConfigError, match="is not a mount point; mounts of kvfs:"):
        runtime.kvfs_mount(tmpfs.parent)
    with pytest.raises(ConfigError, match=r"is a mount of type tmpfs, expected fuse\.kvfs"):
        runtime.kvfs_mount(tmpfs)


def test_a_path_becomes_the_one_that_the_kernel_lists(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "direct").symlink_to(tmpfs)
    monkeypatch.chdir(tmpfs.parent)
    spellings: list[str | Path] = [
        tmpfs,
        f"{tmpfs}/",
        tmpfs.name,
        f"./{tmpfs.name}//",
        "direct",
        "link/direct/.",
    ]
    spellings += [tmp_path / "link" / tmpfs.name, tmp_path / "link/.." / tmp_path.name / tmpfs.name]
    assert {runtime.canonical(spelling) for spelling in spellings} == {tmpfs}
    assert runtime.canonical("/") == Path("/")
    assert runtime.canonical(".") == tmp_path
    assert runtime.canonical(tmp_path / "none") == tmp_path / "none"


def test_the_path_of_a_mount_is_found_without_asking_its_daemon(tmp_path: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    mount("kvfs", tmp_path, runtime.FSTYPE, 0, options)
    try:  # no process reads the device: any stat of the mount would wait for ever
        assert runtime.canonical(tmp_path) == tmp_path
        assert runtime.kvfs_mount(tmp_path).source == "kvfs"
        with pytest.raises(ConfigError, match=f"mounts of kvfs:.*{tmp_path}"):
            runtime.kvfs_mount(Path("/none"))
    finally:
        os.close(device)
        umount(tmp_path)


@pytest.mark.parametrize(("path", "magic"), [("/proc", 0x9FA0), ("/sys", 0x62656572)])
def test_a_file_system_is_known_by_its_magic(path: str, magic: int) -> None:
    assert runtime.filesystem_magic(Path(path)) == magic


def test_the_magic_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        runtime.filesystem_magic(tmp_path / "none")


# Memory


def fake_proc(tmp_path: Path, cgroup: str, mountinfo: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:    8388608 kB\nMemAvailable: 4194304 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mountinfo)
    return proc


def test_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "0::/\n", "1 0 0:1 / /none rw - cgroup2 cgroup rw\n")
    assert runtime.memory(proc) == 8 * GIB
    assert runtime.available_memory(proc) == 4 * GIB


def test_the_lowest_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    tree = tmp_path / "cgroup"
    (tree / "pod/container").mkdir(parents=True)
    (tree / "pod/memory.max").write_text(f"{2 * GIB}\n")
    (tree / "pod/container/memory.max").write_text("max\n")
    mountinfo = f"1 0 0:1 / {tree} rw - cgroup2 cgroup rw\n"
    assert runtime.memory(fake_proc(tmp_path, "0::/pod/container\n", mountinfo)) == 2 * GIB


def test_a_container_sees_its_part_of_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "cgroup"
    tree.mkdir()
    (tree / "memory.max").write_text(f"{3 * GIB}\n")
    mountinfo = f"1 0 0:1 /docker/1 {tree} rw - cgroup2 cgroup rw\n"
    assert runtime.memory(fake_proc(tmp_path, "0::/docker/1\n", mountinfo)) == 3 * GIB


def test_limits_of_version_1_count(tmp_path: Path) -> None:
    tree = tmp_path / "cgroup"
    (tree / "job").mkdir(parents=True)
    (tree / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")  # v1's word for no limit
    (tree / "job/memory.limit_in_bytes").write_text(f"{GIB}\n")
    cgroup = "5:cpu:/\n4:memory:/job\n0::/\n"
    mountinfo = f"1 0 0:1 / {tree} rw - cgroup cgroup rw,memory\n"
    assert runtime.memory(fake_proc(tmp_path, cgroup, mountinfo)) == GIB


def test_this_machine_has_memory() -> None:
    assert 0 < runtime.available_memory() <= runtime.memory()
