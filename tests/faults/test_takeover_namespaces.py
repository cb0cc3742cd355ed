"""Daemons die while they walk over a dropped namespace, or while a file waits for its name."""

import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvfs.control import request, request_keeper
from kvfs.errors import ConfigError, ControlError
from kvfs.keeper.keeper import SHORT_LIFE
from tests.harness import Mounted, alive, wait_for
from tests.mount.test_fsck import found

pytestmark = pytest.mark.slow

SEED = 11
BYTES = random.Random(SEED).randbytes(300_000)
FILES = 300  # in three directories: some twenty steps of a walk


def ready(kv: Mounted) -> None:
    """Wait, because the keeper stops replacing daemons that die as soon as they serve."""
    wait_for(lambda: request_keeper(kv.path, "status")["standby_loaded"], "the standby is loaded")
    wait_for(lambda: kv.status()["uptime_s"] > 2 * SHORT_LIFE, "the daemon has lived")


def fill(space: Path, files: int = FILES) -> None:
    space.mkdir()
    os.setxattr(space, "user.kvfs.quota_hard", b"1G")
    for number in range(files):
        below = space / f"{number % 3}"
        below.mkdir(exist_ok=True)
        (below / f"{number}").write_bytes(b"%d" % number * 100)
    os.link(space / "0/0", space / "0/again")
    (space / "open").write_bytes(BYTES)


def all_dropped(kv: Mounted) -> None:
    wait_for(lambda: not kv.status()["dropped"], "nothing of what was dropped is left")


def drop(kv: Mounted, name: str) -> bool:
    """Drop a namespace; whether the answering daemon found it dropped by one that died."""
    ino = os.stat(kv.path / name).st_ino
    answer = request(kv.path, "ns_drop", name=name)
    assert answer["dropped"] in ({ino, 0} if answer["before"] else {ino})
    return bool(answer["before"])


def check_sound(kv: Mounted) -> None:
    kv.check_gauges()
    kv.check_accounts()
    assert found(kv.path, "--hashes")[:2] == (0, [])


@pytest.mark.parametrize("passing", [1, 2, 3, 8, 15, 22])
def test_a_walk_goes_on_where_a_death_has_cut_it_short(kv: Mounted, passing: int) -> None:
    """A file of the namespace is open; it stays unchanged until it is closed."""
    kv.allow_log("was killed by SIGKILL")
    fill(kv.path / "n")
    (kv.path / "kept").write_bytes(BYTES)
    held = os.open(kv.path / "n/open", os.O_RDONLY)
    inside = os.open(kv.path / "n/0", os.O_RDONLY | os.O_DIRECTORY)
    ready(kv)
    before = kv.status()["takeovers"]
    kv.idle()  # what it commits next is asked for
    request(kv.path, "arm", faults=f"catalog.committed=kill@{passing}")
    assert drop(kv, "n") is (passing == 1)
    assert os.listdir(kv.path) == ["kept"]
    with pytest.raises(FileNotFoundError):
        os.stat("0", dir_fd=inside)
    wait_for(lambda: kv.status()["takeovers"] > before, "it died in the middle")
    all_dropped(kv)
    with pytest.raises(FileNotFoundError):
        os.stat("0", dir_fd=inside)
    assert os.pread(held, 1 << 20, 0) == BYTES
    assert os.fstat(held).st_nlink == 0
    assert found(kv.path)[:2] == (0, [])
    spaces = {space["name"]: space for space in kv.idle()["namespaces"]}
    assert spaces.keys() == {"."}
    os.close(held)
    os.close(inside)
    wait_for(lambda: not kv.status()["open_handles"], "they are closed")
    kv.idle()
    (space,) = kv.status()["namespaces"]
    assert (space["objects"], kv.status()["objects"]) == (1, 1)
    check_sound(kv)


@pytest.mark.parametrize("there", [False, True], ids=["new", "plain"])
def test_a_namespace_that_was_made_by_a_daemon_that_died_is_made(
    kv: Mounted, *, there: bool
) -> None:
    """The answer is lost and the next daemon is asked again. A new request is refused as usual."""
    kv.allow_log("was killed by SIGKILL")
    if there:
        (kv.path / "n").mkdir()
    ready(kv)
    before = kv.status()["takeovers"]
    kv.idle()  # what it commits next is asked for
    request(kv.path, "arm", faults="catalog.committed=kill@1")
    asked: dict[str, Any] = {"name": "n", "settings": {"weight": "7"}, "uid": 0, "gid": 0}
    made = request(kv.path, "ns_create", **asked)
    assert (made["own"], made["settings"]["weight"]) == (True, "7")
    assert kv.status()["takeovers"] == before + 1
    with pytest.raises(ConfigError, match="namespace n exists: change it with kvfs ns set"):
        request(kv.path, "ns_create", **asked)
    check_sound(kv)


def die_at(kv: Mounted, faults: str, act: Callable[[], object]) -> None:
    """End the whole mount, as with a container; the daemon dies at this very place."""
    kv.expect_log("did not end properly: its bytes are all there")
    kv.allow_log(f"the keeper of {kv.path} is dead")
    daemon = kv.pid
    os.kill(kv.keeper, signal.SIGKILL)
    wait_for(lambda: not alive(kv.keeper), "the keeper is gone")
    kv.idle()  # what it commits next is asked for
    request(kv.path, "arm", faults=faults)
    with suppress(ControlError, OSError):
        act()
    wait_for(lambda: not alive(daemon), f"the daemon dies at {faults}")
    subprocess.run(["umount", "-l", kv.path], check=True)


@pytest.mark.parametrize("passing", [1, 2, 9, 20])
def test_the_next_mount_goes_on_with_a_walk(kv: Mounted, passing: int) -> None:
    """The remains of the death are no damage for fsck, and fsck does not end the walk.

    The exception is a file whose record went in the last commit: the next mount would delete it.
    """
    fill(kv.path / "n")
    (kv.path / "kept").write_bytes(BYTES)
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    die_at(kv, f"catalog.committed=kill@{passing}", lambda: drop(kv, "n"))
    for options in ((), ("--repair", "--hashes"), ("--hashes",)):
        kinds = {kind for kind, _ in found(nvme, *options)[1]}
        assert kinds <= {"leftover"}
    assert not kinds
    kv.mount()
    assert os.listdir(kv.path) == ["kept"]
    all_dropped(kv)
    assert kv.idle()["objects"] == 1
    check_sound(kv)


def test_directory_that_left_a_dropped_namespace_is_kept(kv: Mounted) -> None:
    """A directory leaves a namespace that is dropped right after; a death comes between."""
    kv.allow_log("was killed by SIGKILL")
    fill(kv.path / "n")
    (kv.path / "m").mkdir()
    os.setxattr(kv.path / "m", "user.kvfs.weight", b"7")
    ready(kv)
    before = kv.status()["takeovers"]
    request(kv.path, "arm", faults="catalog.committed=kill@4")
    (kv.path / "n/1").rename(kv.path / "m/1")
    drop(kv, "n")
    wait_for(lambda: kv.status()["takeovers"] > before, "it died in the middle")
    all_dropped(kv)
    moved = kv.path / "m/1"
    assert sorted(os.listdir(moved)) == sorted(str(number) for number in range(1, FILES, 3))
    assert (moved / "4").read_bytes() == b"4" * 100
    spaces = {space["name"]: space["objects"] for space in kv.idle()["namespaces"]}
    assert spaces == {".": 0, "m": FILES // 3}
    check_sound(kv)


# Waiting for a name


def waiting(kv: Mounted) -> int:
    """A writer, half-way through, in a namespace that publishes at close."""
    space = kv.path / "n"
    space.mkdir()
    os.setxattr(space, "user.kvfs.publish", b"close")
    descriptor = os.open(space / "a", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, BYTES[:1000])
    assert os.listdir(space) == []
    return descriptor


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_file_gets_its_name_from_the_daemon_that_took_over(
    kv: Mounted, number: signal.Signals
) -> None:
    descriptor = waiting(kv)
    kv.kill_daemon(number)
    assert os.listdir(kv.path / "n") == []
    assert found(kv.path)[:2] == (0, [])
    os.write(descriptor, BYTES[1000:])
    os.close(descriptor)
    wait_for(lambda: not kv.status()["open_handles"], "it is closed")
    assert os.listdir(kv.path / "n") == ["a"]
    assert (kv.path / "n/a").read_bytes() == BYTES
    check_sound(kv)


def test_file_of_a_dropped_namespace_gets_no_name(kv: Mounted) -> None:
    """A file created inside gets no name either, and a death between changes nothing."""
    descriptor = waiting(kv)
    ready(kv)
    drop(kv, "n")
    kv.kill_daemon()
    all_dropped(kv)
    os.write(descriptor, BYTES[1000:])
    assert os.pread(descriptor, 1 << 20, 0) == BYTES
    os.close(descriptor)
    wait_for(lambda: not kv.status()["open_handles"], "it is closed")
    assert os.listdir(kv.path) == []
    assert kv.idle()["objects"] == 0
    check_sound(kv)


def test_a_file_that_waits_for_its_name_goes_with_the_mount(kv: Mounted) -> None:
    nvme = Path(kv.status()["tiers"]["nvme"]["path"])
    descriptor = waiting(kv)
    daemon = kv.keeper
    kv.expect_log("did not end properly: its bytes are all there")
    kv.kill()
    assert not alive(daemon)
    with pytest.raises(OSError, match=r"abort|connected"):
        os.close(descriptor)
    code, findings, notes = found(nvme, "--repair", "--hashes")
    assert (code, findings, notes["unfinished"]) == (0, [], 1)
    kv.mount()
    assert os.listdir(kv.path / "n") == []
    assert kv.idle()["objects"] == 0
    check_sound(kv)
