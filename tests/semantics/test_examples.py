import errno
import fcntl
import mmap
import os
from pathlib import Path

from tests.semantics.syscalls import fallocate, opened, refused

M = 1 << 20


def test_written_in_place(here: Path) -> None:
    """
    1. A creates `k` and writes half of it.
    2. B looks for `k`: it is there, with half the size; B opens it and reads that half.
    3. A writes the other half and closes `k`.
    4. B reads on, with the descriptor it has, and gets the other half.

    So who must not see half an object writes it under another name and renames it.
    """
    with opened(here / "k", os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as a:
        os.write(a, b"1" * M)
        assert os.stat(here / "k").st_size == M
        b = os.open(here / "k", os.O_RDONLY)
        assert os.read(b, 2 * M) == b"1" * M
        os.write(a, b"2" * M)
    assert os.read(b, 2 * M) == b"2" * M
    os.close(b)


def test_published(here: Path) -> None:
    """
    1. A creates `k.tmp`, writes 8 MiB and closes it.
    2. B looks for `k`: ENOENT, a miss.
    3. A renames `k.tmp` to `k`.
    4. B opens `k` and reads 8 MiB.
    5. A writes `k.tmp` anew and renames it over `k`.
    6. B reads from its descriptor what it read before. C opens `k` and reads the new bytes.
    """
    (here / "k.tmp").write_bytes(b"1" * 8 * M)
    assert not (here / "k").exists()
    os.rename(here / "k.tmp", here / "k")
    with opened(here / "k", os.O_RDONLY) as b:
        assert os.read(b, 9 * M) == b"1" * 8 * M
        (here / "k.tmp").write_bytes(b"2" * 8 * M)
        os.rename(here / "k.tmp", here / "k")
        assert os.pread(b, 9 * M, 0) == b"1" * 8 * M
        assert (here / "k").read_bytes() == b"2" * 8 * M


def test_one_name_two_writers(here: Path) -> None:
    """
    1. A creates `k.tmp` with `O_TRUNC` and writes it.
    2. B opens the same `k.tmp` with `O_TRUNC`: one inode, emptied for A as well.
    3. A, done, renames `k.tmp` to `k`: what C reads is what B has written so far.
    4. B writes the rest, into what is now called `k`, and closes it.
    5. B renames `k.tmp` to `k`: ENOENT. `k` is whole, and is B's.

    Writers that may meet need temporary names of their own; kvfs does what POSIX says.
    """
    a = os.open(here / "k.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(a, b"aaaa")
    b = os.open(here / "k.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.write(b, b"bb")
    os.close(a)
    os.rename(here / "k.tmp", here / "k")
    assert (here / "k").read_bytes() == b"bb"
    os.write(b, b"bb")
    os.close(b)
    with refused(errno.ENOENT):
        os.rename(here / "k.tmp", here / "k")
    assert (here / "k").read_bytes() == b"bbbb"


def test_published_directory(here: Path) -> None:
    """
    1. A makes the directory `h.tmp`, two files in it and a link to `../parent`, and calls `fsync`.
    2. A renames `h.tmp` to `h`: the whole group appears at once.
    3. B has made the same group in `g.tmp` and renames it to `h`: ENOTEMPTY. A's group stays.
    """
    for name in ("h.tmp", "g.tmp"):
        os.mkdir(here / name)
        for part in ("data", "tokens"):
            with opened(here / name / part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o777) as file:
                os.write(file, name.encode())
                os.fsync(file)
        os.symlink("../parent", here / name / "parent")
    os.rename(here / "h.tmp", here / "h")
    assert sorted(os.listdir(here / "h")) == ["data", "parent", "tokens"]
    with refused(errno.ENOTEMPTY):
        os.rename(here / "g.tmp", here / "h")
    assert (here / "h" / "data").read_bytes() == b"h.tmp"


def test_evictor(here: Path) -> None:
    """
    1. A opens `k` and reads the first half.
    2. An evictor, sorting by `st_atime`, unlinks `k`.
    3. A reads the second half: it is all there.
    4. B opens `k`: ENOENT, a miss. B computes the object and writes it anew.
    5. A closes its descriptor: the old bytes are freed. `k` is B's.
    """
    (here / "k").write_bytes(b"1" * M + b"2" * M)
    with opened(here / "k", os.O_RDONLY) as a:
        assert os.read(a, M) == b"1" * M
        os.unlink(here / "k")
        assert os.read(a, M) == b"2" * M
        with refused(errno.ENOENT):
            os.open(here / "k", os.O_RDONLY)
        (here / "k").write_bytes(b"3" * M)
    assert (here / "k").read_bytes() == b"3" * M


def test_scratch_file(here: Path) -> None:
    """
    1. A creates a scratch file with `O_EXCL`, mode 0600, and asks for its space: `fallocate` is
       EOPNOTSUPP, so it calls `ftruncate`.
    2. A unlinks the file and keeps the descriptor.
    3. A writes and reads slots of it, in any order, with `O_DIRECT`.
    4. A ends, in whatever way: the space is free.
    """
    slot = mmap.mmap(-1, M)
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
    with opened(here / "scratch", flags, 0o600) as a:
        with refused(errno.EOPNOTSUPP):
            fallocate(a, 0, 64 * M)
        os.ftruncate(a, 64 * M)
        os.unlink(here / "scratch")
        fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_DIRECT)
        for number in (7, 3, 60, 0):
            slot[:] = bytes([number]) * M
            assert os.pwritev(a, [slot], number * M) == M
        for number in (60, 0, 3, 7):
            assert os.preadv(a, [slot], number * M) == M
            assert slot[:] == bytes([number]) * M
        assert os.listdir(here) == []


def test_preallocated(here: Path) -> None:
    """
    1. A creates `.tmp1` with mode 0600, sets its final size with `ftruncate`, and writes a header.
    2. B stats `.tmp1`: its size is final, its content is not.
    3. A writes the rest and renames `.tmp1` to `k`.
    4. B maps `k`, `MAP_PRIVATE`, and reads all of it.
    """
    with opened(here / ".tmp1", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600) as a:
        os.ftruncate(a, M + 88)
        os.write(a, b"h" * 88)
        assert os.stat(here / ".tmp1").st_size == M + 88
        os.write(a, b"d" * M)
        os.rename(here / ".tmp1", here / "k")
    with (
        opened(here / "k", os.O_RDONLY) as b,
        mmap.mmap(b, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == b"h" * 88 + b"d" * M
