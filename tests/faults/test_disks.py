"""Disks below the NVMe tier that fail, are full, or do not answer, and come back.

No test here asserts a speed. A call that must not wait for a disk gets ten times as long as the
daemon's own limit; a call that waited for the disk would wait for ever.
"""

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.conftest import Mount
from tests.faults.disks import Faults, disk, frozen
from tests.harness import Mounted, alive, wait_for

pytestmark = pytest.mark.usefixtures("impatient")

T = TypeVar("T")
OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=500M,promote_after=0,entry_timeout=0"
# Of those who are impatient here, on a machine that has no time for movers: the job comes again.
HASTY = "nothing is changed: a mover has no answer after 5 s"
MIB = 1 << 20
BOUND = 10.0  # s, where the daemon under test has 1
CHANGES = ("create", "write", "unlink", "rename", "setattr", "fsync", "mkdir")
SILENT = {"*": {"hang": 1.0}}
SICK = {"*": {"errno": float(errno.EIO)}}


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def kv(request: pytest.FixtureRequest, faults: Faults, mount: Mount) -> Iterator[Mounted]:
    one = mount(f"{OPTIONS},{request.param}")
    one.allow_log(HASTY)
    yield one
    faults.set()  # the fixtures below wait for it to come to rest


class Client:
    """A thread that does one thing, and may have to wait for it."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.found: list[object] = []
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], object]) -> None:
        try:
            self.found.append(action())
        except OSError as error:
            self.found.append(error)

    def waits(self) -> bool:
        return self._thread.is_alive()

    def answer(self, seconds: float = BOUND) -> object:
        self._thread.join(seconds)
        assert self.found, f"no answer within {seconds:.0f} s"
        return self.found[0]


def bounded(action: Callable[[], T]) -> object:
    """The result or exception of `action`, if it ends within BOUND."""
    return Client(action).answer()


def state(kv: Mounted) -> str:
    found: str = kv.status()["tiers"]["nvme"]["state"]
    return found


def becomes(kv: Mounted, wanted: str) -> None:
    wait_for(lambda: state(kv) == wanted, f"NVMe becomes {wanted}: {kv.status()['tiers']['nvme']}")


def two_places(kv: Mounted) -> tuple[Path, Path]:
    """A file that only NVMe has, and one that only RAM has."""
    on_nvme, in_ram = kv.path / "on-nvme", kv.path / "in-ram"
    on_nvme.write_bytes(b"n" * MIB)  # nothing is known of such files
    kv.idle()
    in_ram.write_bytes(b"r" * MIB)
    tiers = kv.idle()["tiers"]
    assert (tiers["nvme"]["objects"], tiers["ram"]["objects"]) == (1, 1)
    return on_nvme, in_ram


def everything_else_answers(kv: Mounted, in_ram: Path) -> None:
    """Do all operations that need no NVMe."""
    assert bounded(in_ram.read_bytes) == b"r" * MIB
    fresh, other = kv.path / "fresh", kv.path / "other"
    assert bounded(lambda: fresh.write_bytes(b"f" * MIB)) == MIB
    assert bounded(fresh.read_bytes) == b"f" * MIB
    assert bounded(lambda: fresh.rename(other)) == other
    assert bounded(lambda: sorted(os.listdir(kv.path))) == ["in-ram", "on-nvme", "other"]
    assert bounded(lambda: (kv.path / "on-nvme").stat().st_size) == MIB
    assert bounded((kv.path / "directory").mkdir) is None
    assert bounded((kv.path / "directory").rmdir) is None
    assert bounded(lambda: in_ram.chmod(0o600)) is None
    assert bounded(other.unlink) is None


def test_a_disk_that_does_not_answer_is_down_and_comes_back(kv: Mounted, faults: Faults) -> None:
    on_nvme, in_ram = two_places(kv)
    kv.expect_log("nvme tier .* is down, nothing new goes there: .* no answer after")
    faults.set(SILENT)
    clients = [Client(on_nvme.read_bytes) for _ in range(200)]  # more than pyfuse3 serves at once
    everything_else_answers(kv, in_ram)
    assert {type(client.answer()) for client in clients} == {FileNotFoundError}
    assert state(kv) == "down"
    everything_else_answers(kv, in_ram)
    assert isinstance(bounded(on_nvme.read_bytes), FileNotFoundError)
    assert "no answer" in kv.status()["tiers"]["nvme"]["why"]

    faults.set()
    becomes(kv, "healthy")
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert kv.status()["tiers"]["nvme"]["why"] == ""
    log = kv.log.read_text()
    assert (log.count("is down"), log.count("answers again")) == (1, 1)


def test_a_disk_that_fails_is_down_and_comes_back(kv: Mounted, faults: Faults) -> None:
    on_nvme, in_ram = two_places(kv)
    kv.expect_log("nvme tier: open of .*/objects/.* failed: EIO .* is not logged")
    kv.expect_log("nvme tier .* is down, nothing new goes there: .*EIO")
    kv.allow_log("more of the same kind is not logged")
    faults.set(SICK)
    assert isinstance(bounded(on_nvme.read_bytes), FileNotFoundError)
    becomes(kv, "down")
    everything_else_answers(kv, in_ram)
    for _ in range(100):
        assert isinstance(bounded(on_nvme.read_bytes), FileNotFoundError)
    assert kv.status()["tiers"]["nvme"]["state_s"] >= 0

    faults.set()
    becomes(kv, "healthy")
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert kv.log.read_text().count(": open of ") == 1


def test_a_disk_that_takes_no_writes_is_read(kv: Mounted, faults: Faults) -> None:
    on_nvme, in_ram = two_places(kv)
    kv.allow_log("more of the same kind is not logged")
    kv.expect_log("is down, nothing new goes there: .*EROFS")
    faults.set({change: {"errno": float(errno.EROFS)} for change in CHANGES})
    assert bounded(lambda: (kv.path / "new.suffix").write_bytes(b"new")) == 3  # RAM takes it
    becomes(kv, "down")
    os.unlink(kv.path / "new.suffix")
    everything_else_answers(kv, in_ram)
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert bounded(on_nvme.unlink) is None  # the file itself goes when the disk takes that
    faults.set()
    becomes(kv, "healthy")


def test_a_disk_that_is_full_is_not_ill(kv: Mounted, faults: Faults) -> None:
    on_nvme, in_ram = two_places(kv)
    kv.allow_log("ENOSPC")
    kv.allow_log("No space left")
    faults.set({name: {"errno": float(errno.ENOSPC)} for name in ("create", "write", "setattr")})
    everything_else_answers(kv, in_ram)
    files = [kv.path / f"{number}.new" for number in range(3)]
    for file in files:
        with suppress(OSError):  # of its size nothing is known: it may be begun on NVMe
            file.write_bytes(b"f" * MIB)
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    assert state(kv) == "healthy"
    faults.set()
    assert bounded(lambda: (kv.path / "later").write_bytes(b"l" * MIB)) == MIB


def test_ram_gives_up_its_oldest_while_nvme_is_down(kv: Mounted, faults: Faults) -> None:
    _, in_ram = two_places(kv)
    old = [kv.path / f"old-{number}" for number in range(20)]
    for number, file in enumerate(old):
        file.write_bytes(bytes([number + 1]) * 4 * MIB)
    assert kv.idle()["tiers"]["nvme"]["objects"] > 1
    kv.expect_log("is down, nothing new goes there")
    kv.allow_log("no answer after|nothing is changed")
    faults.set(SILENT)
    becomes(kv, "down")
    new = [kv.path / f"new-{number}" for number in range(20)]
    for number, file in enumerate(new):
        assert bounded(partial(file.write_bytes, bytes([number + 1]) * 4 * MIB)) == 4 * MIB
    assert bounded(new[-1].read_bytes) == bytes([20]) * 4 * MIB
    assert isinstance(bounded(in_ram.read_bytes), bytes | FileNotFoundError)
    there = set(os.listdir(kv.path))
    faults.set()
    becomes(kv, "healthy")
    for number, file in enumerate(old):
        if file.name in there:
            assert bounded(file.read_bytes) == bytes([number + 1]) * 4 * MIB
    assert len(there) > 10


def test_calls_on_open_files_end(faults: Faults, mount: Mount) -> None:
    kv = mount(f"{OPTIONS},passthrough=off")
    kv.allow_log(HASTY)
    on_nvme, in_ram = two_places(kv)
    kv.expect_log("is down, nothing new goes there: .* no answer after")
    kv.allow_log("more of the same kind is not logged")
    fd = os.open(on_nvme, os.O_RDWR)
    calls: list[Callable[[], object]] = [
        lambda: os.pread(fd, 4096, 0),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 1),
        lambda: os.fsync(fd),
    ]
    rules = {name: {"hang": 1.0} for name in ("read", "write", "setattr", "fsync")}
    for call in calls:
        faults.set(rules)
        answer = bounded(call)
        # The page cache below may have what is read, and take what is written.
        assert not isinstance(answer, OSError) or answer.errno == errno.EIO
        assert bounded(in_ram.read_bytes) == b"r" * MIB
        faults.set()
        becomes(kv, "healthy")
    os.close(fd)
    assert bounded(on_nvme.stat)


def test_late_answers_of_a_disk_leave_no_descriptor_and_no_file(
    kv: Mounted, faults: Faults
) -> None:
    on_nvme, _ = two_places(kv)
    descriptors = Path(f"/proc/{kv.pid}/fd")
    kv.expect_log("is down, nothing new goes there")
    before = len(list(descriptors.iterdir()))
    faults.set({name: {"hang": 1.0} for name in ("create", "open", "rename")})
    clients = [Client(partial((kv.path / f"{n}.{n}").write_bytes, b"new")) for n in range(10)]
    clients += [Client(on_nvme.read_bytes) for _ in range(10)]
    clients.append(Client(lambda: on_nvme.open("r+b").close()))
    for client in clients:
        client.answer(2 * BOUND)
    faults.set()
    becomes(kv, "healthy")
    wait_for(lambda: len(list(descriptors.iterdir())) <= before, "late descriptors are closed")
    assert bounded(on_nvme.read_bytes) == b"n" * MIB
    kv.check_accounts()


def test_movers_do_not_wait_without_end(kv: Mounted, faults: Faults) -> None:
    two_places(kv)
    kv.expect_log("is down, nothing new goes there")
    kv.allow_log("nothing is changed|a mover|more of the same kind|could not")
    faults.set({name: {"hang": 1.0} for name in ("write", "fsync", "create")})
    for number in range(14):
        (kv.path / f"more-{number}").write_bytes(bytes([number + 1]) * 4 * MIB)
    becomes(kv, "down")
    wait_for(lambda: kv.counter("job_failures"), "a copy is given up")
    faults.set()
    becomes(kv, "healthy")
    wait_for(lambda: kv.counter("demoted"), "objects are copied again")
    for number in range(14):
        assert bounded((kv.path / f"more-{number}").read_bytes) == bytes([number + 1]) * 4 * MIB


def test_the_catalogs_disk_does_not_take_writes(mount: Mount, tmp_path: Path) -> None:
    """Times of access of fast opens come up to a second late: they would be such a write."""
    with disk(tmp_path / "nvme", tmp_path / "image", 700 * MIB) as made:
        kv = mount(f"{OPTIONS},fast_open=off")
        kv.allow_log(HASTY)
        on_nvme, in_ram = two_places(kv)
        assert on_nvme.read_bytes() + in_ram.read_bytes()  # their times of access are new
        kv.expect_log("is down, nothing new goes there: .* no answer after")
        with on_nvme.open("rb") as slow, in_ram.open("rb") as fast, frozen(made.directory):
            becomes(kv, "down")
            assert bounded(in_ram.read_bytes) == b"r" * MIB
            assert bounded(lambda: sorted(os.listdir(kv.path))) == ["in-ram", "on-nvme"]
            assert bounded((kv.path / "none").exists) is False
            making = Client((kv.path / "made").mkdir)
            assert bounded(lambda: os.pread(slow.fileno(), 3, 0)) == b"nnn"
            assert bounded(lambda: os.pread(fast.fileno(), 3, 0)) == b"rrr"
            assert making.waits()
        assert making.answer(60) is None
        becomes(kv, "healthy")
        assert bounded(on_nvme.read_bytes) == b"n" * MIB
        assert (kv.path / "made").is_dir()
        kv.check_gauges()
        kv.check_accounts()
        kv.umount()


@pytest.mark.parametrize("rule", [SILENT, SICK], ids=["silent", "sick"])
def test_unmount_gives_up_objects_that_it_cannot_write_back(
    kv: Mounted, faults: Faults, rule: dict[str, dict[str, float]]
) -> None:
    two_places(kv)
    kv.expect_log(r"\d+ objects \(\d+ bytes\) could not be written back")
    kv.expect_log("is down, nothing new goes there")
    kv.allow_log("more of the same kind is not logged|nothing is changed")
    faults.set(rule)
    becomes(kv, "down")
    subprocess.run(["umount", kv.path], check=True, timeout=60)
    wait_for(lambda: "could not be written back" in kv.log.read_text(), "it is given up")
    faults.set()
    wait_for(lambda: not alive(kv.keeper), "the keeper ends")
