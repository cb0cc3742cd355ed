import errno
import mmap
import os
import random
import shutil
from pathlib import Path

from tests.semantics.syscalls import FALLOC_FL_KEEP_SIZE, fallocate, opened, refused

M = 1 << 20
G = 1 << 30


def test_random_offsets(here: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    model = bytearray()
    flags = os.O_CREAT | os.O_RDWR
    with opened(here / "a", flags) as writer, opened(here / "a", os.O_RDONLY) as reader:
        for _ in range(150):
            offset, length = dice.randrange(3 * M), dice.randrange(200_000)
            kind = dice.randrange(5)
            if kind == 0:
                model.extend(bytes(max(0, offset - len(model))))
                del model[offset:]
                os.ftruncate(writer, offset)
            elif kind <= 2 and length:
                data = dice.randbytes(length)
                model.extend(bytes(max(0, offset + length - len(model))))
                model[offset : offset + length] = data
                half = length // 2
                assert os.pwritev(writer, [data[:half], data[half:]], offset) == length
            else:
                assert os.pread(reader, length, offset) == model[offset : offset + length]
            assert os.fstat(reader).st_size == len(model)
    assert (here / "a").read_bytes() == model


def test_sparse(here: Path) -> None:
    flags = os.O_CREAT | os.O_RDWR
    with opened(here / "a", flags) as descriptor, opened(here / "a", os.O_RDONLY) as reader:
        os.ftruncate(descriptor, 100 * G)
        os.pwrite(descriptor, b"middle", 50 * G)
        found = os.stat(here / "a")
        assert found.st_size == 100 * G
        assert found.st_blocks * 512 <= 4 * M
        assert os.pread(reader, 8, 50 * G - 1) == b"\0middle\0"
        assert os.pread(reader, 8, 100 * G - 2) == b"\0\0"
        assert os.pread(reader, 8, 100 * G) == b""
        os.unlink(here / "a")  # while it is open: reading 100 GiB of zeros for a digest takes long


def test_truncate(here: Path) -> None:
    (here / "a").write_bytes(b"abcdef")
    os.truncate(here / "a", 3)
    os.truncate(here / "a", 5)
    assert (here / "a").read_bytes() == b"abc\0\0"
    with opened(here / "a", os.O_RDWR) as descriptor:
        os.ftruncate(descriptor, M)
        os.truncate(here / "a", 2)
        assert os.fstat(descriptor).st_size == 2
        os.ftruncate(descriptor, 4)
        assert os.pread(descriptor, 9, 0) == b"ab\0\0"
    os.truncate(here / "a", 0)
    assert os.stat(here / "a").st_size == 0
    with refused(errno.EISDIR):
        os.truncate(here, 0)


def test_too_large(here: Path) -> None:
    (here / "a").write_bytes(b"abc")
    with refused(errno.EFBIG):
        os.truncate(here / "a", (1 << 63) - 1)
    assert (here / "a").read_bytes() == b"abc"


def test_map_private(here: Path) -> None:
    data = os.urandom(M + 5)
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDONLY) as descriptor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        both = mmap.PROT_READ | mmap.PROT_WRITE
        with mmap.mmap(descriptor, len(data), flags=flags, prot=both) as mapped:
            assert mapped[:] == data
            mapped[:4] = b"mine"
    assert (here / "a").read_bytes() == data


def test_map_shared(here: Path) -> None:
    with opened(here / "a", os.O_CREAT | os.O_RDWR) as descriptor:
        os.ftruncate(descriptor, M)
        mapped = mmap.mmap(descriptor, M)
        os.utime(descriptor, ns=(1, 1))
    mapped[:5] = b"first"
    assert (here / "a").stat().st_mtime_ns >= 1
    mapped.flush()
    assert (here / "a").read_bytes()[:6] == b"first\0"
    mapped[M - 4 :] = b"last"
    mapped.close()
    assert (here / "a").read_bytes() == b"first".ljust(M - 4, b"\0") + b"last"


def test_fsync(here: Path) -> None:
    with opened(here / "a", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, b"x" * M)
        os.fsync(descriptor)
        os.fdatasync(descriptor)
    with opened(here / "a", os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
    with opened(here, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
        os.fdatasync(descriptor)


def test_fallocate(here: Path) -> None:
    with opened(here / "a", os.O_CREAT | os.O_RDWR) as descriptor:
        for mode in (0, FALLOC_FL_KEEP_SIZE):
            with refused(errno.EOPNOTSUPP):
                fallocate(descriptor, mode, M)
        os.posix_fallocate(descriptor, 0, M)
    assert (here / "a").read_bytes() == bytes(M)


def test_copies(here: Path) -> None:
    data = os.urandom(3 * M)
    (here / "a").write_bytes(data)
    shutil.copyfile(here / "a", here / "sent")
    with (
        opened(here / "a", os.O_RDONLY) as source,
        opened(here / "copied", os.O_CREAT | os.O_WRONLY) as target,
    ):
        assert os.lseek(source, 0, os.SEEK_DATA) == 0
        assert os.lseek(source, 0, os.SEEK_HOLE) == len(data)
        left = len(data)
        while left:
            left -= os.copy_file_range(source, target, left, len(data) - left, len(data) - left)
    assert (here / "sent").read_bytes() == (here / "copied").read_bytes() == data
