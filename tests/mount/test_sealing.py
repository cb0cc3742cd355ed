"""Writes after an early close are not lost, even if a program looks in between."""

import os

from tests.harness import Mounted


def test_a_duplicate_closed_early_and_a_look_lose_nothing(either: Mounted) -> None:
    for name in ("first", "second"):  # on NVMe, then in RAM
        path = either.path / f"{name}.kv"
        fd = os.open(path, os.O_CREAT | os.O_RDWR)
        os.write(fd, b"a" * 1000)
        os.close(os.dup(fd))
        os.write(fd, b"b" * 1000)
        assert os.stat(path).st_size == 2000
        os.close(fd)
        assert path.read_bytes() == b"a" * 1000 + b"b" * 1000
    either.remount()
    assert (either.path / "first.kv").stat().st_size == 2000
    assert (either.path / "second.kv").read_bytes() == b"a" * 1000 + b"b" * 1000


def test_a_second_writer_between_flush_and_close_is_sealed_too(either: Mounted) -> None:
    path = either.path / "a.kv"
    one = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(one, b"one")
    os.close(os.dup(one))
    two = os.open(path, os.O_RDWR | os.O_APPEND)
    os.write(two, b"two")
    os.stat(path)
    os.close(one)
    os.write(two, b"three")
    os.stat(path)
    os.close(two)
    assert path.read_bytes() == b"onetwothree"
    either.remount()
    assert path.read_bytes() == b"onetwothree"


def test_a_time_set_after_an_early_close_is_kept(either: Mounted) -> None:
    path = either.path / "a.kv"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(fd, b"one")
    os.close(os.dup(fd))
    os.utime(fd, ns=(5_000, 7_000))
    os.stat(path)
    os.close(fd)
    assert path.read_bytes() == b"one"
    assert path.stat().st_mtime_ns == 7_000
    either.remount()
    assert path.read_bytes() == b"one"
