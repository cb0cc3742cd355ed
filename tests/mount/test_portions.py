"""Portions of users of `.match`: no user can take so much that others get nothing."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfs import matching
from kvfs.core.lending.read_leases import LEASES_MAX
from kvfs.leasing import BLOCKS_MAX
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.leases import Borrower
from tests.semantics.syscalls import NOBODY
from tests.semantics.test_prefixes import BLOCK, ROOT, chain, namespace, write

HANDLES_MAX, PENDING_MAX = 4096, 64 << 20  # as docs/security.md says
PART = 1 << 19  # bytes of a question that are written
QUESTION = matching.HEADER.pack(matching.MAGIC, 0, matching.KEYS_MAX, 0).ljust(PART, b"\0")


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    return mount("ram=256M,allow_other")


@contextmanager
def as_user(uid: int, directory: Path, call: Callable[[], object]) -> Iterator[object]:
    """The result of a call by this user, in a process that keeps its descriptors meanwhile."""
    (told, tell), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(go)
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            os.chdir(directory)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(tell, json.dumps(call()).encode())
            os.close(tell)
            os.read(wait, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(wait)
    try:
        with open(told, "rb") as file:
            yield json.loads(file.read())
    finally:
        os.close(go)
        os.waitpid(child, 0)


def descriptors() -> tuple[int, int]:
    """How many descriptors could be opened, and the errno of the next one."""
    for number in range(2 * HANDLES_MAX):
        try:
            os.open(".match", os.O_RDWR)
        except OSError as error:
            return number, error.errno or 0
    return 2 * HANDLES_MAX, 0


def questions() -> tuple[int, int]:
    """How many bytes of questions could be written, and the errno of the next ones."""
    for number in range(2 * PENDING_MAX // PART):
        try:
            assert os.pwrite(os.open(".match", os.O_RDWR), QUESTION, 0) == PART
        except OSError as error:
            return number * PART, error.errno or 0
    return 2 * PENDING_MAX, 0


def test_user_gets_half_of_the_descriptors_at_most(kv: Mounted) -> None:
    space = namespace(kv)
    kv.expect_log(
        r"\.match: uid 65534 has 2048 of 4096 descriptors of \.match: one user may have half"
    )
    half = HANDLES_MAX // 2
    with (
        as_user(NOBODY, space, descriptors) as first,
        as_user(0, space, descriptors) as root,
        as_user(1234, space, descriptors) as last,
    ):
        assert first == [half, errno.EDQUOT]
        assert root == [half // 2, errno.EDQUOT]
        assert last == [half // 4, errno.EDQUOT]
    wait_for(lambda: not kv.status()["open_handles"], "they are closed")
    with as_user(1234, space, descriptors) as alone:
        assert alone == [half, errno.EDQUOT]
        kv.kill_daemon()
        with as_user(1234, space, descriptors) as more:
            assert more == [0, errno.EDQUOT], "the next daemon counts what is open"
        with as_user(NOBODY, space, descriptors) as other:
            assert other == [half // 2, errno.EDQUOT]
    kv.allow_log(r"\.match: uid")


def test_user_gets_half_of_the_bytes_of_questions_at_most(kv: Mounted) -> None:
    space = namespace(kv)
    kv.expect_log(r"\.match: uid 65534 has 33554432 of 67108864 bytes of questions")
    half = PENDING_MAX // 2
    for _ in range(2):  # what a process had is given back with its end
        with (
            as_user(NOBODY, space, questions) as first,
            as_user(0, space, questions) as root,
        ):
            assert first == [half, errno.EDQUOT]
            assert root == [half // 2, errno.EDQUOT]


def test_user_gets_half_of_the_leases_at_most(kv: Mounted) -> None:
    space, keys = namespace(kv), chain(BLOCKS_MAX)
    write(space, keys)
    kv.idle()

    def borrowed() -> int:
        client, found = Borrower("."), 0
        while True:
            lent, _ = client.borrow(ROOT, keys, BLOCK)
            for descriptor in lent:
                os.close(descriptor)
            found += len(lent)
            if len(lent) < BLOCKS_MAX:
                return found

    half = LEASES_MAX // 2
    with as_user(NOBODY, space, borrowed) as first, as_user(0, space, borrowed) as root:
        assert (first, root) == (half, half // 2)
    wait_for(lambda: not kv.status()["open_handles"], "they are given back")
    with as_user(1234, space, borrowed) as alone:
        assert alone == half
