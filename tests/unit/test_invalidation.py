"""Telling the kernel, from a thread of its own."""

import threading

import pytest

from kvfs.fuse import invalidation
from kvfs.fuse.invalidation import Invalidation


def test_everything_is_sent_in_order_and_failures_stop_nothing() -> None:
    sent: list[tuple[int, bytes]] = []

    def send(parent: int, name: bytes) -> None:
        sent.append((parent, name))
        if parent == 1:
            raise FileNotFoundError
        if parent == 2:
            raise OSError(107, "the mount is gone")

    told = Invalidation(send)
    told.start()
    wanted = [(number % 4, b"%d" % number) for number in range(50)]
    for parent, name in wanted:
        told.gone(parent, name, 99)
    told.stop()
    assert sent == wanted
    assert told.lost == 0


def test_it_never_blocks_and_counts_what_did_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invalidation, "QUEUE_MAX", 4)
    entered, leave = threading.Event(), threading.Event()

    def send(_parent: int, _name: bytes) -> None:
        entered.set()
        assert leave.wait(60)

    told = Invalidation(send)
    told.start()
    told.gone(1, b"first", 1)
    assert entered.wait(60)
    for number in range(10):
        told.gone(1, b"%d" % number, number)
    assert told.lost == 6
    leave.set()
    told.stop()


def test_it_runs_in_a_thread_of_its_own() -> None:
    threads = set[int]()
    told = Invalidation(lambda _parent, _name: threads.add(threading.get_ident()))
    told.start()
    told.gone(1, b"a", 1)
    told.stop()
    assert threads
    assert threading.get_ident() not in threads


def test_stopping_what_never_started_is_fine() -> None:
    told = Invalidation(lambda _parent, _name: None)
    told.gone(1, b"a", 1)
    told.stop()
