"""Leased blocks: their accounts, the limits of their borrowers, and how leases end."""

import errno
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest

from kvfs import leasing, prefix
from kvfs.control import request
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.leases import Borrower
from tests.semantics.syscalls import as_nobody, refused
from tests.semantics.test_prefixes import BLOCK, ROOT, chain, namespace, write


@pytest.fixture
def kv(emptied: Mount) -> Mounted:
    return emptied("ram=256M,allow_other")


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def either(request: pytest.FixtureRequest, emptied: Mount) -> Mounted:
    return emptied(f"ram=256M,{request.param}")


@contextmanager
def borrowing(space: Path) -> Iterator[Borrower]:
    made = Borrower(space)
    try:
        yield made
    finally:
        made.close()


def contents(descriptors: list[int]) -> list[bytes]:
    """Read all descriptors, and close them."""
    found = [os.pread(descriptor, 2 * BLOCK, 0) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return found


def of(keys: list[bytes]) -> list[bytes]:
    return [key * (BLOCK // len(key)) for key in keys]


def files_of(space: Path, keys: list[bytes]) -> list[Path]:
    return [space / prefix.path(above, key) for above, key in pairwise([ROOT, *keys])]


def handles(kv: Mounted) -> int:
    found = kv.status()["open_handles"]
    assert isinstance(found, int)
    return found


def test_leased_block_cannot_be_opened_for_writing(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(3)
    write(space, keys)
    kv.idle()
    with borrowing(space) as client:
        lent, _ = client.borrow(ROOT, keys, BLOCK)
        assert len(lent) == 3
        for name in (f"/proc/self/fd/{lent[0]}", f"/proc/{os.getpid()}/fd/{lent[0]}"):
            for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                with refused(errno.EROFS):
                    os.open(name, flags)
            with refused(errno.EROFS):
                os.truncate(name, 0)
            with refused(errno.EROFS):
                os.chmod(name, 0o600)
        with refused(errno.EBADF):
            os.pwrite(lent[0], b"x", 0)
        with refused(errno.EINVAL):
            os.ftruncate(lent[0], 0)
        with pytest.raises(PermissionError):
            mmap.mmap(lent[0], BLOCK)
        assert contents(lent) == of(keys)


def test_a_lease_of_the_kernels_holds_up_nobody(kv: Mounted) -> None:
    """An open that breaks a lease of fcntl(2) waits for 45 s; the daemon must not wait with it."""
    space, keys = namespace(kv), chain(2)
    write(space, keys)
    kv.idle()
    path = files_of(space, keys)[1]
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # which the kernel asks it back with
    try:
        takeovers = kv.status()["takeovers"]
        with borrowing(space) as client:
            lent, _ = client.borrow(ROOT, keys, BLOCK)
            fcntl.fcntl(lent[1], fcntl.F_SETLEASE, fcntl.F_RDLCK)
            with refused(errno.EBUSY):
                os.open(path, os.O_RDWR)
            assert path.read_bytes() == of(keys)[1], "who only reads is not held up"
            fcntl.fcntl(lent[1], fcntl.F_SETLEASE, fcntl.F_UNLCK)
            assert contents(lent) == of(keys)
        with path.open("r+b") as file:
            assert file.read() == of(keys)[1]
        assert kv.status()["takeovers"] == takeovers
    finally:
        signal.signal(signal.SIGIO, before)


def test_rights_are_those_of_the_names(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(6)
    write(space, keys)
    kv.idle()
    paths = files_of(space, keys)

    def lent() -> int:
        def ask() -> None:
            found, _ = Borrower(".").borrow(ROOT, keys, BLOCK)
            raise OSError(200 + len(found), "to be returned")

        return as_nobody(space, ask) - 200

    assert lent() == 6
    paths[4].chmod(0o600)
    assert lent() == 4
    paths[3].parent.chmod(0o700)
    assert lent() == 3
    os.chown(paths[2], 65534, -1)
    paths[2].chmod(0o044)
    assert lent() == 2, "an owner has the owner's rights alone"
    os.chown(paths[1], 0, 65534)
    paths[1].chmod(0o604)
    assert lent() == 1, "and a group the group's"
    paths[1].chmod(0o640)
    assert lent() == 2
    with borrowing(space) as client:  # root as well: it opens the name
        found, _ = client.borrow(ROOT, keys, BLOCK)
        assert len(contents(found)) == 6


def test_leased_block_stays_as_long_as_the_lease(mount: Mount) -> None:
    kv = mount("ram=16M")
    space, keys = namespace(kv, quota_objects="8", eviction="lru"), chain(4)
    write(space, keys)
    kv.idle()
    paths = files_of(space, keys)
    with borrowing(space) as client:
        lent, leases = client.borrow(ROOT, keys, BLOCK)
        assert handles(kv) == len(leases) == 4
        assert kv.counter("opens_lent") == 4
        for salt in range(1, 20):
            write(space, chain(1, salt=salt))
        assert all(path.exists() for path in paths), "they are in use"
        paths[3].unlink()
        assert contents(lent) == of(keys), "also what has no name any more"
        client.give_back([*leases, *leases, 1, 1 << 63])
        wait_for(lambda: handles(kv) == 0, "and those who wrote have closed theirs")
        for salt in range(20, 40):
            write(space, chain(1, salt=salt))
        assert not any(path.exists() for path in paths)


def test_files_of_the_mount_and_leases(either: Mounted) -> None:
    """Lessees and programs open the same block by name, in any order."""
    space, keys = namespace(either), chain(3)
    write(space, keys)
    either.idle()
    paths = files_of(space, keys)
    with borrowing(space) as client:
        before = paths[0].open("rb")
        lent, leases = client.borrow(ROOT, keys, BLOCK)
        assert [path.read_bytes() for path in paths] == of(keys)
        after = [path.open("rb") for path in paths]
        again, more = client.borrow(ROOT, keys, BLOCK)
        assert contents(again) == of(keys)
        client.give_back(more)
        with paths[1].open("r+b") as writer:  # what is written is seen, as it is by other readers
            writer.write(b"changed")
            writer.flush()
            assert os.pread(lent[1], 7, 0) == b"changed"
            assert after[1].read(7) == b"changed"
            found, _ = client.borrow(ROOT, keys, BLOCK)
            assert len(contents(found)) == 1, "it is being written"
        os.truncate(paths[2], BLOCK // 2)
        assert len(os.pread(lent[2], BLOCK, 0)) == BLOCK // 2
        assert paths[2].stat().st_size == BLOCK // 2
        for descriptor in lent:
            os.close(descriptor)
        client.give_back(leases)
        assert before.read() == of(keys)[0]
        for file in (before, *after):
            file.close()
    assert paths[0].read_bytes() == of(keys)[0]
    assert paths[1].read_bytes() == b"changed" + of(keys)[1][7:]


def test_a_new_block_takes_the_place_of_one_that_is_lent(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(1)
    write(space, keys)
    kv.idle()
    path = space / prefix.path(ROOT, keys[0])
    with borrowing(space) as client:
        old, leases = client.borrow(ROOT, keys, BLOCK)
        write(space, keys)
        wait_for(lambda: not kv.status()["writers"], "it is there")
        assert contents(old) == of(keys)
        new, more = client.borrow(ROOT, keys, BLOCK)
        assert len(new) == 1
        path.unlink()
        client.give_back([*leases, *more])
        assert contents(new) == of(keys)
        assert client.borrow(ROOT, keys, BLOCK) == ([], [])


def test_leases_end_before_the_first_block_that_cannot_be_leased(mount: Mount) -> None:
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=128M")
    space, keys = namespace(kv, media="ram"), chain(5)
    write(space, keys)
    kv.idle()
    wanted = of(keys)
    with borrowing(space) as client:

        def lent(size: int = BLOCK, shard: str = "", parent: bytes = ROOT) -> int:
            found, leases = client.borrow(parent, keys, size, shard)
            assert contents(found) == wanted[: len(found)]
            client.give_back(leases)
            return len(leases)

        assert lent() == 5
        assert lent(size=BLOCK + 1) == lent(shard="0") == lent(parent=keys[0]) == 0
        with (space / prefix.path(keys[2], keys[3])).open("r+b"):
            assert lent() == 3
        os.truncate(space / prefix.path(keys[1], keys[2]), 1)
        assert lent() == 2
        settings = {"media": "nvme"}
        slow = namespace(kv, **settings)
        write(slow, keys)
        kv.idle()
        with borrowing(slow) as other:
            assert other.borrow(ROOT, keys, BLOCK) == ([], [])
            request(kv.path, "ns_set", name=space.name, settings={"read_iops": "1000"})
            assert lent() == 0, "an open may have to wait for its turn"


def test_leases_of_a_dead_process_end(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    write(space, keys)
    kv.idle()
    code = """
import sys
from tests.leases import Borrower
keys = [bytes.fromhex(key) for key in sys.argv[3:]]
client = Borrower(sys.argv[1])
print(len(client.borrow(bytes.fromhex(sys.argv[2]), keys, 4096)[0]), flush=True)
sys.stdin.read()
"""
    names = [key.hex() for key in (ROOT, *keys)]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(space), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "4\n"
        assert handles(kv) == 4
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: handles(kv) == 0, "its leases have ended")


@pytest.mark.parametrize("how", ["killed", "upgraded"])
def test_another_daemon(kv: Mounted, how: str) -> None:
    space, keys = namespace(kv), chain(4)
    write(space, keys)
    kv.idle()
    with borrowing(space) as client:
        lent, leases = client.borrow(ROOT, keys, BLOCK)
        mapped = mmap.mmap(lent[0], BLOCK, access=mmap.ACCESS_READ)
        before = kv.pid
        if how == "killed":
            kv.kill_daemon()
        else:
            command = [sys.executable, "-m", "kvfs", "upgrade", str(kv.path)]
            subprocess.run(command, check=True, capture_output=True)
        wait_for(lambda: kv.pid != before, "another daemon serves")
        with refused(errno.ESTALE):
            client.borrow(ROOT, keys, BLOCK)
        client.give_back(leases)
        client.offer()
        again, more = client.borrow(ROOT, keys, BLOCK)
        assert not set(more) & set(leases)
        assert contents(again) == of(keys)
        assert handles(kv) == 4
        for path in reversed(files_of(space, keys)):
            path.unlink()
        assert contents(lent) == of(keys)
        assert mapped[:] == of(keys)[0]
        mapped.close()


def test_questions_that_are_none(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(2)
    write(space, keys)
    kv.idle()
    client = Borrower(space, offer=False)
    question = leasing.pack_request(leasing.LeaseRequest(ROOT, keys, "", BLOCK))
    with refused(errno.ESTALE):
        client.say(question)
    internet = socket.socket()
    stream, other = socket.socketpair()
    for number in (-1, client.fd, internet.fileno(), stream.fileno(), 1 << 20):
        with refused(errno.EINVAL if number < 0 else errno.EOPNOTSUPP):
            client.say(leasing.pack_socket(number))
    client.offer()
    for bad in (question[:-1], question + b"x", leasing.OPEN, leasing.CLOSE, leasing.SOCKET):
        with refused(errno.EINVAL):
            client.say(bad)
    assert contents(client.borrow(ROOT, keys, BLOCK)[0]) == of(keys)
    assert client.borrow(ROOT, [], BLOCK) == ([], [])
    for one in (internet, stream, other):
        one.close()
    client.close()
    wait_for(lambda: handles(kv) == 0, "the leases have ended with the descriptor")


def test_client_that_reads_no_answer_gets_no_lease(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(8)
    write(space, keys)
    kv.idle()
    question = leasing.pack_request(leasing.LeaseRequest(ROOT, keys, "", BLOCK))
    with borrowing(space) as client:
        told = 0
        with suppress(OSError):
            while True:
                client.say(question)
                told += 1
        assert handles(kv) == 8 * told > 0
        client.ours.close()
        with refused(errno.ESTALE):
            client.say(question)
    wait_for(lambda: handles(kv) == 0, "all have ended")


def test_lease_sets_the_time_of_access(kv: Mounted) -> None:
    """As for an open by name, `st_atime` is the time of the first use after the write."""
    space, keys = namespace(kv), chain(3)
    write(space, keys)
    kv.idle()
    files = files_of(space, keys)
    for file in files:  # else `st_mtime` may be of a clock tick before they were made
        os.utime(file, ns=(1, 2))
        assert file.stat().st_atime_ns == 1
    with borrowing(space) as client:
        lent, _ = client.borrow(ROOT, keys[:2], BLOCK)
        assert contents(lent) == of(keys[:2])
    used = [file.stat().st_atime_ns for file in files]  # the kernel has had older ones
    assert used[0] == used[1] > 2
    assert used[2] == 1
    kv.kill_daemon()
    assert [file.stat().st_atime_ns for file in files] == used


def test_lease_keeps_the_time_of_an_open_by_name(either: Mounted) -> None:
    """`st_atime` shows the time of the open, though the lease sets none."""
    space, keys = namespace(either), chain(2)
    write(space, keys)
    either.idle()
    files = files_of(space, keys)
    for file in files:
        os.utime(file, (1, 2))
        assert file.stat().st_atime == 1
        os.close(os.open(file, os.O_RDONLY))
    with borrowing(space) as client:
        lent, _ = client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
    assert all(file.stat().st_atime > 2 for file in files)


def test_a_namespace_that_is_dropped(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(4)
    write(space, keys)
    kv.idle()
    with borrowing(space) as client:
        lent, leases = client.borrow(ROOT, keys, BLOCK)
        request(kv.path, "ns_drop", name=space.name)
        with refused(errno.ESTALE):
            client.borrow(ROOT, keys, BLOCK)
        assert contents(lent) == of(keys)
        client.give_back(leases)
    wait_for(lambda: not kv.status()["objects"], "all of it has gone")


def test_status_counts_leases(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(1)
    write(space, keys)
    kv.idle()
    with borrowing(space) as client:
        lent, _ = client.borrow(ROOT, keys, BLOCK)
        command = [sys.executable, "-m", "kvfs", "stat", "--json"]
        path = space / prefix.path(ROOT, keys[0])
        shown = subprocess.run([*command, str(path)], check=True, capture_output=True).stdout
        assert json.loads(shown)["open"]["readers"] == 1
        contents(lent)
