"""A real mount with a real bucket: a scan of a directory downloads no whole objects."""

import ast
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.s3.test_mounted import all_uploaded, attribute, keys, s3_of
from tests.s3.valve import Valve

MIB = 1 << 20
HEADER = 4096
FILES = 40
SEED = 29
BODY = random.Random(SEED).randbytes(MIB - 8)

# Answers each line with what it comes to, or with the number of what has failed.
PROGRAM = """
import mmap, os, sys
for line in sys.stdin:
    try:
        print(repr(("found", eval(line))), flush=True)
    except OSError as error:
        print(repr(("failed", error.errno)), flush=True)
"""


def content(number: int) -> bytes:
    return b"%08d" % number + BODY


class Process:
    """A process that lists and reads on a test's request."""

    def __init__(self, stack: ExitStack) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PROGRAM]
        self._run = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        )
        stack.callback(self._run.terminate)

    def ask(self, expression: str) -> object:
        assert self._run.stdin is not None
        assert self._run.stdout is not None
        print(expression, file=self._run.stdin, flush=True)
        how, what = ast.literal_eval(self._run.stdout.readline())
        if how == "failed":
            raise OSError(what, os.strerror(what))
        found: object = what
        return found

    def names(self, folder: Path) -> list[str]:
        found = self.ask(f"sorted(os.listdir({str(folder)!r}))")
        assert isinstance(found, list)
        return found

    def open(self, path: Path) -> int:
        found = self.ask(f"os.open({str(path)!r}, os.O_RDONLY)")
        assert isinstance(found, int)
        return found

    def close(self, fd: int) -> None:
        self.ask(f"os.close({fd})")

    def read(self, fd: int, length: int, start: int = 0) -> bytes:
        found = self.ask(f"os.pread({fd}, {length}, {start})")
        assert isinstance(found, bytes)
        return found

    def whole(self, fd: int, piece: int = HEADER) -> bytes:
        """Read from the beginning, as a program that does not know the size."""
        found = self.ask(f"b''.join(iter(lambda: os.read({fd}, {piece}), b''))")
        assert isinstance(found, bytes)
        return found


Start = Callable[[], Process]
Made = Callable[..., tuple[Mounted, list[Path]]]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda: Process(stack)


@pytest.fixture
def valve(s3: Server) -> Iterator[Valve]:
    found = Valve(s3.endpoint)
    yield found
    found.close()


@pytest.fixture
def made(valve: Valve, bucket: str, mount: Mount) -> Made:
    """`made(files)` mounts, with this many objects of 1 MiB that only the bucket has."""

    def make(files: int = 1, options: str = "ram=256M") -> tuple[Mounted, list[Path]]:
        kv = mount(
            f"{options},nvme={{tmp}}/nvme,s3=s3://{bucket}/p,s3_endpoint={valve.endpoint},"
            "s3_region=us-east-1,s3_delay=0.1"
        )
        space = kv.path / "n"
        space.mkdir()
        os.setxattr(space, "user.kvfs.prefetch", b"off")  # what comes is counted
        paths = [space / f"block{number:03}.bin" for number in range(files)]
        for number, path in enumerate(paths):
            path.write_bytes(content(number))
        all_uploaded(kv)
        os.setxattr(space, "user.kvfs.quota_hard", b"4K")  # so that none of them may stay
        wait_for(lambda: {attribute(path, "tier") for path in paths} == {"s3"}, "they are spilled")
        os.setxattr(space, "user.kvfs.quota_hard", b"0")
        kv.idle()
        return kv, paths

    return make


def fetched(kv: Mounted) -> tuple[int, int]:
    """The numbers of downloaded headers and whole objects."""
    found = s3_of(kv)
    return found["headers"], found["downloads"]


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_scanner_of_a_directory_fetches_headers_only(
    made: Made, valve: Valve, start: Start, passthrough: str
) -> None:
    kv, paths = made(FILES, f"ram=256M,passthrough={passthrough}")
    scanner = start()
    before = valve.brought
    assert scanner.names(paths[0].parent) == [path.name for path in paths]
    for number, path in enumerate(paths):
        fd = scanner.open(path)
        assert scanner.read(fd, HEADER) == content(number)[:HEADER]
        scanner.close(fd)
    assert valve.brought - before < FILES * 4 * HEADER
    assert fetched(kv) == (FILES, 0)
    assert s3_of(kv)["download_bytes"] == 0
    assert {attribute(path, "tier") for path in paths} == {"s3"}
    kv.check_gauges()

    fd = scanner.open(paths[7])
    assert scanner.whole(fd) == content(7)
    scanner.close(fd)
    assert fetched(kv) == (FILES + 1, 1)
    assert attribute(paths[7], "tier") != "s3"
    fd = scanner.open(paths[8])
    assert scanner.read(fd, HEADER) == content(8)[:HEADER]
    scanner.close(fd)
    assert fetched(kv) == (FILES + 2, 1), "it goes on"

    other, opens = start(), kv.counter("opens_passthrough")
    fd = other.open(paths[9])
    assert fetched(kv) == (FILES + 2, 2), "it has listed nothing"
    assert kv.counter("opens_passthrough") - opens == kv.status()["passthrough"]["on"]
    assert other.whole(fd) == content(9)
    other.close(fd)
    kv.idle()
    kv.check_gauges()
    kv.check_accounts()


def test_process_that_reads_whole_files_is_no_scanner(made: Made, start: Start) -> None:
    kv, paths = made(6)
    reader = start()
    reader.names(paths[0].parent)
    for number, path in enumerate(paths):
        fd = reader.open(path)
        assert reader.whole(fd, MIB) == content(number)
        reader.close(fd)
    assert s3_of(kv)["headers"] == 1
    kv.check_gauges()


def test_two_that_scan_and_one_that_does_not(made: Made, start: Start) -> None:
    kv, [path] = made()
    scanners = [start(), start()]
    fds = []
    for scanner in scanners:
        scanner.names(path.parent)
        fds.append(scanner.open(path))
        assert scanner.read(fds[-1], HEADER) == content(0)[:HEADER]
    assert fetched(kv) == (1, 0)
    other = start()
    fd = other.open(path)
    assert other.whole(fd) == content(0)
    for scanner, one in zip(scanners, fds, strict=True):
        assert scanner.whole(one) == content(0)
        scanner.close(one)
    other.close(fd)
    assert fetched(kv) == (1, 1)
    kv.check_gauges()
    kv.check_accounts()


@pytest.mark.parametrize("flags", ["MAP_SHARED", "MAP_PRIVATE"])
def test_scanned_file_can_be_mapped(made: Made, start: Start, flags: str) -> None:
    kv, [path] = made()
    scanner = start()
    scanner.names(path.parent)
    fd = scanner.open(path)
    assert scanner.read(fd, HEADER) == content(0)[:HEADER]
    mapping = f"mmap.mmap({fd}, 0, mmap.{flags}, mmap.PROT_READ)"
    assert scanner.ask(f"globals().update(mapped={mapping})") is None
    scanner.close(fd)
    assert scanner.ask("mapped[:]") == content(0)
    assert scanner.ask("mapped.close()") is None
    assert path.read_bytes() == content(0)
    kv.check_gauges()


@pytest.mark.parametrize("rest", [False, True])
def test_scanned_file_unlinked_meanwhile_is_read_to_its_end(
    made: Made, start: Start, s3: Server, bucket: str, *, rest: bool
) -> None:
    kv, [path] = made()
    scanner = start()
    scanner.names(path.parent)
    fd = scanner.open(path)
    path.unlink()
    wait_for(lambda: s3_of(kv)["to_delete"] == 1, "it is to be deleted")
    assert scanner.read(fd, HEADER) == content(0)[:HEADER]
    assert list(keys(s3, bucket)) == ["n@1/block000.bin"]
    if rest:
        assert scanner.whole(fd) == content(0)
    scanner.close(fd)
    wait_for(lambda: not keys(s3, bucket), "it is deleted")
    kv.check_gauges()
    kv.check_accounts()


def test_another_daemon_has_the_rest_come(made: Made, start: Start) -> None:
    kv, paths = made(3)
    scanner = start()
    scanner.names(paths[0].parent)
    fds = [scanner.open(path) for path in paths]
    assert fetched(kv) == (3, 0)
    kv.kill_daemon()
    assert scanner.read(fds[0], HEADER) == content(0)[:HEADER]
    assert scanner.read(fds[1], HEADER, MIB - HEADER) == content(1)[-HEADER:]
    assert scanner.whole(fds[0]) == content(0)
    kv.kill_daemon()
    assert scanner.whole(fds[1]) == content(1)
    for fd in fds:
        scanner.close(fd)
    assert attribute(paths[2], "tier") == "s3", "nobody has read it"
    kv.idle()
    kv.check_gauges()
    kv.check_accounts()


def test_a_header_that_was_damaged_is_given_to_nobody(
    made: Made, valve: Valve, start: Start
) -> None:
    kv, [path] = made()
    kv.expect_log("is lost")
    kv.allow_log("once more|stays in the bucket")
    scanner = start()
    scanner.names(path.parent)
    valve.damage = (BODY[100:200], BODY[200:300])
    with pytest.raises(FileNotFoundError):
        scanner.open(path)
    assert s3_of(kv)["headers"] == 0
    kv.check_gauges()
    kv.check_accounts()
