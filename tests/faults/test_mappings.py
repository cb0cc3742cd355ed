"""A mapping without a descriptor still maps the file, whatever kvfs does meanwhile.

Under passthrough the kernel does not tell of mappings: kvfs must find them itself.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.control import request as ask
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import libc

SIZE, MIB = 8192, 1 << 20
KINDS = {
    "ram": "ram=64M,nvme={tmp}/nvme,nvme_size=1G",
    "nvme": "ram=0,nvme={tmp}/nvme,nvme_size=1G",
    "daemon": "ram=64M,nvme={tmp}/nvme,nvme_size=1G,passthrough=off",
}


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest, mount: Mount) -> Mounted:
    return mount(KINDS[request.param])


class Mapped:
    """A shared mapping, without a descriptor."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        self.address: int = libc.mmap(
            None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, 1, descriptor, 0
        )
        os.close(descriptor)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def read(self, size: int) -> bytes:
        return ctypes.string_at(self.address, size)

    def close(self) -> None:
        libc.munmap(self.address, SIZE)


@pytest.fixture
def file(kv: Mounted) -> Path:
    (kv.path / "first.kv").write_bytes(bytes(SIZE))  # the next one may be in RAM
    kv.idle()
    (kv.path / "a.kv").write_bytes(b"0" * SIZE)
    kv.idle()
    return kv.path / "a.kv"


@pytest.fixture
def mapped(file: Path) -> Iterator[Mapped]:
    found = Mapped(file)
    yield found
    found.close()


def press(kv: Mounted) -> None:
    """Move all files out of RAM that may leave it."""
    wait_for(lambda: not ask(kv.path, "write_back")["objects_left"], "all is written back")
    for number in range(8):
        (kv.path / f"pressure{number}").write_bytes(bytes(6 * MIB))
    for number in range(8):
        (kv.path / f"pressure{number}").unlink(missing_ok=True)


def check(kv: Mounted, file: Path, mapped: Mapped) -> None:
    """Check that writes by either way are read by the other."""
    mapped.write(b"by mapping")
    assert file.read_bytes() == b"by mapping" + b"0" * (SIZE - 10)
    with file.open("r+b") as stream:
        stream.write(b"by writing")
    assert mapped.read(10) == b"by writing"
    wait_for(lambda: kv.status()["writers"] == 1, "the mapping is a writer")


def test_the_object_moves_only_when_it_is_unmapped(kv: Mounted, file: Path, mapped: Mapped) -> None:
    press(kv)
    check(kv, file, mapped)
    press(kv)
    check(kv, file, mapped)
    mapped.write(b"the last")
    mapped.close()
    kv.idle()
    press(kv)
    assert file.read_bytes()[:8] == b"the last"
    kv.remount()
    assert file.read_bytes()[:8] == b"the last"
    mapped.address = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | 0x20, -1, 0)


def test_a_takeover_does_not_end_the_writing(kv: Mounted, file: Path, mapped: Mapped) -> None:
    wait_for(lambda: kv.status()["writers"] == 1, "the mapping is a writer")
    mapped.write(b"before")
    kv.kill_daemon()
    press(kv)
    check(kv, file, mapped)


def test_truncating_open_empties_the_mapping(file: Path, mapped: Mapped) -> None:
    mapped.write(b"before")
    file.write_bytes(b"1" * SIZE)
    assert mapped.read(6) == b"111111"
    check_written = b"2" * 10
    mapped.write(check_written)
    assert file.read_bytes()[:10] == check_written


def test_an_unlinked_file_lives_in_its_mapping(kv: Mounted, file: Path, mapped: Mapped) -> None:
    file.unlink()
    press(kv)
    mapped.write(b"after")
    assert mapped.read(6) == b"after0"
    mapped.close()
    wait_for(lambda: kv.status()["objects"] == 1, "its space comes back")
    mapped.address = libc.mmap(None, SIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | 0x20, -1, 0)


def test_a_writer_that_a_takeover_found_ends_with_its_close(kv: Mounted, file: Path) -> None:
    """The kernel then has its backing file twice; this must not look like a mapping."""
    with file.open("r+b", buffering=0) as stream:
        kv.kill_daemon()
        stream.write(b"after")
        assert kv.status()["writers"] == 1
    kv.idle()
    assert file.read_bytes()[:5] == b"after"


def test_a_writer_that_met_a_reader_ends_with_its_close(kv: Mounted, file: Path) -> None:
    with file.open("rb", buffering=0) as reader:
        writer = file.open("r+b", buffering=0)
        assert reader.read(1) == b"0"
    with writer:
        writer.write(b"after")
    kv.idle()
    assert file.read_bytes()[:5] == b"after"
