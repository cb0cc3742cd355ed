"""Opens that are answered beside the daemon's loop: what they answer, count, and leave behind."""

import errno
import json
import mmap
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.control import request
from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

SIZE = 300_000
TIERS = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"
OPTIONS = f"{TIERS},fast_open=on"
OFF = f"{TIERS},fast_open=off"


def fast(kv: Mounted) -> int:
    return kv.counter("opens_fast")


def in_table(kv: Mounted) -> int:
    found: int = kv.status()["fast_open"]["objects"]
    return found


def written(path: Path, content: bytes | None = None) -> bytes:
    content = os.urandom(SIZE) if content is None else content
    if not path.exists():  # the first file of a kind may begin on NVMe, the second does not
        first = path.with_name("first")
        first.write_bytes(bytes(SIZE))
        first.unlink()
    path.write_bytes(content)
    return content


def settled(kv: Mounted, objects: int = 1) -> None:
    """Wait until the kernel has released all files, and so many objects are in the table."""
    wait_for(lambda: in_table(kv) == objects and not kv.status()["open_handles"], "all are closed")


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    found = mount(OPTIONS)
    wait_for(lambda: found.status()["fast_open"]["on"], "opens are fast")
    return found


def test_open_of_object_in_ram_does_not_enter_the_loop(kv: Mounted) -> None:
    content = written(kv.path / "a")
    settled(kv)
    before = kv.status()
    for _ in range(10):
        assert (kv.path / "a").read_bytes() == content
    assert fast(kv) == 10
    settled(kv)
    after = kv.status()
    opened = after["counters"]["opens_passthrough"] - before["counters"]["opens_passthrough"]
    assert opened == 10
    assert after["tiers"]["ram"]["hits"] == before["tiers"]["ram"]["hits"] + 10
    assert sum(after["latencies"]["open"]["ram"]["counts"]) == 10


def test_read_moves_the_time_of_access(kv: Mounted) -> None:
    path = kv.path / "a"
    written(path)
    settled(kv)
    os.utime(path, ns=(10**18, 15 * 10**17))
    settled(kv)
    before = path.stat()
    path.read_bytes()
    after = path.stat()
    assert after.st_atime_ns > before.st_mtime_ns
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    settled(kv)
    assert fast(kv) == 1
    kv.remount()
    assert path.stat().st_atime_ns == after.st_atime_ns


@pytest.mark.parametrize("use", [os.readv, mmap.mmap, os.sendfile], ids=lambda use: use.__name__)
def test_any_access_moves_the_time_of_access(kv: Mounted, use: object) -> None:
    """The kernel asks for the time after an access, though no message tells it of the open."""
    path = kv.path / "a"
    content = written(path)
    settled(kv)
    os.utime(path, ns=(10**18, 15 * 10**17))
    settled(kv)
    before = path.stat()
    reader = os.open(path, os.O_RDONLY)
    if use is os.readv:
        os.readv(reader, [bytearray(len(content))])
    elif use is mmap.mmap:
        with mmap.mmap(reader, 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == content
    else:
        with tempfile.TemporaryFile() as out:
            os.sendfile(out.fileno(), reader, 0, len(content))
    assert path.stat().st_atime_ns > before.st_mtime_ns
    os.close(reader)
    assert fast(kv) == 1


def test_access_log_begins_with_its_setting(kv: Mounted, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    for name in ("before", "after"):
        written(kv.path / name)
    settled(kv, 2)
    change = partial(subprocess.run, check=True)
    (kv.path / "before").read_bytes()
    change([*KVFS, "set", kv.path, f"access_log={log}"])
    (kv.path / "after").read_bytes()
    settled(kv, 0)
    change([*KVFS, "set", kv.path, "access_log=none"])
    assert [json.loads(line)["path"] for line in log.read_text().splitlines()] == ["./after"]


def test_handles_survive_a_change_of_their_object(kv: Mounted) -> None:
    path = kv.path / "a"
    old = written(path)
    settled(kv)
    reader = os.open(path, os.O_RDONLY)
    assert fast(kv) == 1
    os.fsync(reader)  # needs the loop, with a handle that the loop has never seen
    os.chmod(path, 0o600)
    assert stat.S_IMODE(os.fstat(reader).st_mode) == 0o600
    os.rename(path, kv.path / "b")
    new = written(path)
    os.replace(path, kv.path / "b")
    assert os.pread(reader, SIZE, 0) == old
    assert os.fstat(reader).st_nlink == 0
    os.close(reader)
    assert (kv.path / "b").read_bytes() == new
    settled(kv)


def test_writer_while_fast_handles_are_open(kv: Mounted) -> None:
    path = kv.path / "a"
    old = written(path)
    settled(kv)
    readers = [os.open(path, os.O_RDONLY) for _ in range(3)]
    assert fast(kv) == 3
    assert kv.status()["open_handles"] == 3
    with path.open("r+b") as file:
        file.write(b"new")
        file.flush()
        assert os.pread(readers[0], 3, 0) == b"new"
    assert [os.pread(one, SIZE, 0) for one in readers] == [b"new" + old[3:]] * 3
    for one in readers:
        os.close(one)
    settled(kv)
    assert path.read_bytes() == b"new" + old[3:]


def test_map_outlives_its_object(kv: Mounted) -> None:
    path = kv.path / "a"
    content = written(path)
    settled(kv)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        file.close()
        path.unlink()
        assert mapped[:] == content
    kv.idle()
    assert in_table(kv) == 0


@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_handles_survive_the_daemon(kv: Mounted, how: str) -> None:
    content = written(kv.path / "a")
    settled(kv)
    readers = [os.open(kv.path / "a", os.O_RDONLY) for _ in range(3)]
    assert fast(kv) == 3
    os.close(readers.pop())
    if how == "kill":
        kv.kill_daemon()
    else:
        before = kv.pid
        subprocess.run([*KVFS, "upgrade", str(kv.path)], check=True)
        wait_for(lambda: kv.pid != before, "another daemon serves")
    assert kv.status()["open_handles"] == 2
    readers.append(os.open(kv.path / "a", os.O_RDONLY))
    for one in readers:
        assert os.pread(one, SIZE, 0) == content
        os.close(one)
    wait_for(lambda: kv.status()["fast_open"]["on"], "opens are fast again")
    settled(kv)
    assert fast(kv) == 0
    assert (kv.path / "a").read_bytes() == content
    assert fast(kv) == 1


def test_opens_are_fast_by_default(mount: Mount) -> None:
    kv = mount(TIERS)
    content = written(kv.path / "a")
    wait_for(lambda: kv.status()["fast_open"]["objects"] == 1, "it is in the table")
    assert (kv.path / "a").read_bytes() == content
    assert kv.status()["counters"]["opens_fast"] == 1


def test_opens_are_not_fast_if_turned_off(mount: Mount) -> None:
    kv = mount(OFF)
    content = written(kv.path / "a")
    for _ in range(3):
        assert (kv.path / "a").read_bytes() == content
    status = kv.status()
    assert status["fast_open"] == {
        "on": False,
        "why": "turned off by fast_open=off",
        "objects": 0,
    }
    assert status["counters"]["opens_fast"] == 0


def test_passthrough_off_says_why(mount: Mount) -> None:
    kv = mount(f"{OPTIONS},passthrough=off")
    found = kv.status()["fast_open"]
    assert not found["on"]
    assert "passthrough=off" in found["why"]


def test_status_says_what_makes_each_open_wait(kv: Mounted, tmp_path: Path) -> None:
    wait_for(lambda: kv.status()["fast_open"]["on"], "opens are fast")
    name = kv.path / "limited"
    limits: tuple[tuple[list[str | Path], list[str | Path], str], ...] = (
        (
            ["set", kv.path, f"access_log={tmp_path / 'log'}"],
            ["set", kv.path, "access_log=none"],
            "access_log= notes each open",
        ),
        (
            ["set", kv.path, "bandwidth=1G"],
            ["set", kv.path, "bandwidth=0"],
            "bandwidth= limits each open",
        ),
        (
            ["ns", "create", name, "read_iops=1000"],
            ["ns", "set", name, "read_iops=0"],
            "namespace limited has a rate limit, which the loop keeps",
        ),
    )
    for begin, end, why in limits:
        subprocess.run([*KVFS, *begin], check=True)
        found = kv.status()["fast_open"]
        assert (found["on"], found["why"]) == (False, why)
        subprocess.run([*KVFS, *end], check=True)
        assert kv.status()["fast_open"] == {"on": True, "why": "", "objects": 0}


# Each state of an object, and what an open and a stat then say: the same with and without.

Step = Callable[[Mounted, Path], Any]


def _rewrite(_kv: Mounted, path: Path) -> None:
    written(path, b"second" * 1000)


def _append(_kv: Mounted, path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _truncate(_kv: Mounted, path: Path) -> None:
    os.truncate(path, 1000)


def _grow(_kv: Mounted, path: Path) -> None:
    os.truncate(path, SIZE + 100_000)


def _empty(_kv: Mounted, path: Path) -> None:
    os.truncate(path, 0)


def _chmod(_kv: Mounted, path: Path) -> None:
    path.chmod(0o4755)


def _chown(_kv: Mounted, path: Path) -> None:
    os.chown(path, 1234, 4321)


def _utime(_kv: Mounted, path: Path) -> None:
    os.utime(path, ns=(10**18, 2 * 10**18))


def _link(_kv: Mounted, path: Path) -> None:
    os.link(path, path.with_name("second"))


def _rename(_kv: Mounted, path: Path) -> None:
    os.rename(path, path.with_name("second"))


def _other_namespace(kv: Mounted, path: Path) -> None:
    (kv.path / "elsewhere").mkdir()
    os.rename(path, kv.path / "elsewhere" / "a")


def _unlink(_kv: Mounted, path: Path) -> None:
    path.unlink()


def _evict(_kv: Mounted, path: Path) -> None:
    subprocess.run([*KVFS, "evict", str(path)], check=False, capture_output=True)


def _drop(_kv: Mounted, path: Path) -> None:
    subprocess.run([*KVFS, "evict", "--drop", str(path)], check=False, capture_output=True)


def _drop_namespace(kv: Mounted, _path: Path) -> None:
    request(kv.path, "ns_drop", name="ns")


def _expire(kv: Mounted, path: Path) -> None:
    os.utime(path, ns=(10**18, 10**18))
    os.setxattr(path.parent, "user.kvfs.ttl", b"1h")
    if not kv.status()["open_handles"]:  # else it lives until the last program closes it
        wait_for(lambda: not path.exists(), "its lifetime is over")


def _damage(kv: Mounted, _path: Path) -> None:
    """Change the copy in RAM behind kvfs: its size is another one."""
    root = Path(kv.status()["tiers"]["ram"]["path"])
    (copy,) = [one for one in root.glob("objects/*/*") if one.stat().st_size == SIZE]
    kv.allow_log(".")
    with copy.open("ab") as file:
        file.write(b"x")


def _overwrite_same_size(kv: Mounted, _path: Path) -> None:
    root = Path(kv.status()["tiers"]["ram"]["path"])
    (copy,) = [one for one in root.glob("objects/*/*") if one.stat().st_size == SIZE]
    kv.allow_log(".")
    with copy.open("r+b") as file:
        file.write(b"other bytes")


STEPS: list[Step] = [
    *(_rewrite, _append, _truncate, _grow, _empty, _chmod, _chown, _utime, _link, _rename),
    *(_other_namespace, _unlink, _evict, _drop, _drop_namespace, _expire, _damage),
    _overwrite_same_size,
]


def _answers(path: Path) -> list[object]:
    """The bytes and the attributes that two opens give, or their errors."""
    found: list[object] = []
    for _ in range(2):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            found.append(errno.errorcode[error.errno or 0])
            continue
        try:
            told = os.fstat(descriptor)
            content = os.pread(descriptor, 2 * SIZE, 0)
        except OSError as error:
            found.append(errno.errorcode[error.errno or 0])
        else:
            found.append(content)
            found.append((told.st_mode, told.st_nlink, told.st_uid, told.st_gid, told.st_size))
            found.append((told.st_blocks, told.st_blksize))
        finally:
            os.close(descriptor)
    return found


@pytest.mark.parametrize("open_meanwhile", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.strip("_"))
def test_answers_are_those_of_the_loop(emptied: Mount, step: Step, *, open_meanwhile: bool) -> None:
    content, told = bytes(range(256)) * (SIZE // 256 + 1), []
    for options in (OPTIONS, OFF):
        kv = emptied(options)
        path = kv.path / "ns" / "a"
        path.parent.mkdir()
        written(path, content[:SIZE])
        kv.idle()
        if options == OPTIONS:
            wait_for(partial(in_table, kv), "it is in the table")
        before = fast(kv)
        answers = _answers(path)
        assert fast(kv) - before == (2 if options == OPTIONS else 0)
        wait_for(lambda: not kv.status()["open_handles"], "its readers are released")  # noqa: B023
        names = (path, path.with_name("second"), kv.path / "elsewhere" / "a")
        with path.open("rb") if open_meanwhile else nullcontext() as reader:
            step(kv, path)
            for name in names:
                answers += _answers(name)
            if reader is not None:
                held = os.fstat(reader.fileno())
                found = os.pread(reader.fileno(), SIZE, 0)
                answers += [held.st_size, held.st_nlink, found]
        for name in names:
            answers += _answers(name)
        told.append(answers)
    assert told[0] == told[1]


def test_thread_may_read_the_first_request_after_a_takeover(kv: Mounted) -> None:
    """No request was under way when the daemon died: the next one's thread is the first to read."""
    content = written(kv.path / "a")
    settled(kv)
    for _ in range(4):
        kv.kill_daemon()
        wait_for(lambda: kv.status()["fast_open"]["on"], "opens are fast again")
        assert (kv.path / "a").read_bytes() == content


def test_rewritten_files_leave_no_backing_id(kv: Mounted) -> None:
    """A backing id that nobody closes keeps its file in use, and the file looks mapped for ever."""
    for _ in range(100):
        path = kv.path / "d" / "a"
        path.parent.mkdir()
        for change in (
            path.touch,
            partial(path.write_bytes, b"content"),
            partial(os.truncate, path, 3),
        ):
            change()
            path.stat()
            os.utime(path, ns=(1, 1))
        path.rename(path.with_name("b"))
        assert path.with_name("b").read_bytes() == b"con"
        path.with_name("b").unlink()
        path.parent.rmdir()
        wait_for(lambda: not kv.idle()["objects"], "the file is gone", seconds=10)
        kv.check_gauges()
