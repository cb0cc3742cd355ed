import mmap
import os
import random
from pathlib import Path

from tests.harness import Mounted, wait_for
from tests.semantics.syscalls import opened

M = 1 << 20


def test_open_again(here: Path, shared: Mounted) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    data = os.urandom(M)
    (here / "a").write_bytes(data)
    descriptors = []
    try:
        for _ in range(60):
            flags = dice.choice((os.O_RDONLY, os.O_RDWR, os.O_RDONLY | os.O_DIRECT))
            descriptors.append(os.open(here / "a", flags))
            buffer = mmap.mmap(-1, M)
            assert os.preadv(dice.choice(descriptors), [buffer], 0) == M
            assert buffer[:] == data
            if dice.random() < 0.4:
                os.close(descriptors.pop(dice.randrange(len(descriptors))))
        assert shared.status()["open_handles"] >= len(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    wait_for(lambda: not shared.status()["open_handles"], "all handles are released")


def test_writer_joins(here: Path) -> None:
    (here / "a").write_bytes(b"0" * M)
    with opened(here / "a", os.O_RDONLY) as reader, mmap.mmap(reader, M, prot=1) as mapped:
        for round_, flags in enumerate((os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND)):
            with opened(here / "a", flags) as writer:
                size = os.fstat(reader).st_size
                mark = b"%d" % round_
                assert os.pwrite(writer, mark * 10, size) == 10
                assert os.pread(reader, 20, size) == mark * 10
                assert os.fstat(reader).st_size == size + 10
                if not flags & os.O_APPEND:
                    os.pwrite(writer, mark * 5, 100)
                    assert mapped[100:105] == os.pread(reader, 5, 100) == mark * 5
                with opened(here / "a", os.O_RDONLY) as late:
                    assert os.pread(late, 20, size) == mark * 10
        assert os.fstat(reader).st_size == M + 30
    assert (here / "a").read_bytes()[M:] == b"0" * 10 + b"1" * 10 + b"2" * 10


def test_truncate_while_read(here: Path) -> None:
    (here / "a").write_bytes(b"x" * M)
    with opened(here / "a", os.O_RDONLY) as reader:
        assert len(os.pread(reader, M, 0)) == M
        for size in (5000, 100, 0, 300):
            os.truncate(here / "a", size)
            assert os.fstat(reader).st_size == size
            assert len(os.pread(reader, M, 0)) == size
        assert os.pread(reader, M, 0) == bytes(300)


def test_mapping_left(here: Path) -> None:
    (here / "a").write_bytes(b"one" * M)
    with opened(here / "a", os.O_RDONLY) as descriptor:
        mapped = mmap.mmap(descriptor, 3 * M, prot=mmap.PROT_READ)
    with opened(here / "a", os.O_RDWR) as descriptor:
        assert os.pread(descriptor, 6, 0) == b"oneone"
        os.pwrite(descriptor, b"two", 0)
        assert mapped[:6] == b"twoone"
    assert (here / "a").read_bytes()[:6] == b"twoone"
    os.unlink(here / "a")
    (here / "a").write_bytes(b"new")
    assert mapped[:6] == b"twoone"
    assert mapped[-3:] == b"one"
    mapped.close()
    assert (here / "a").read_bytes() == b"new"


def test_duplicates(here: Path, shared: Mounted) -> None:
    first = os.open(here / "a", os.O_CREAT | os.O_WRONLY)
    second = os.dup(first)
    os.write(first, b"first ")
    os.close(first)
    assert shared.status()["writers"] == 1
    child = os.fork()
    if not child:
        os.write(second, b"child ")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert shared.status()["writers"] == 1
    os.write(second, b"second")
    assert (here / "a").read_bytes() == b"first child second"
    os.close(second)
    wait_for(lambda: not shared.status()["writers"], "nobody writes any more")
    assert (here / "a").read_bytes() == b"first child second"
    assert os.stat(here / "a").st_size == 18


def test_kernel_or_daemon_serves_bytes_by_passthrough(here: Path, shared: Mounted) -> None:
    on = shared.status()["passthrough"]["on"]
    assert on == ("passthrough=off" not in shared.options)
    before = shared.status()["counters"]
    (here / "a").write_bytes(b"content")
    wait_for(lambda: not shared.status()["open_handles"], "the writer's handle is released")
    (here / "a").read_bytes()
    after = shared.status()["counters"]
    grown = {name: after[name] - before[name] for name in ("opens_passthrough", "opens_served")}
    assert grown == (
        {"opens_passthrough": 2, "opens_served": 0}
        if on
        else {"opens_passthrough": 0, "opens_served": 2}
    )
