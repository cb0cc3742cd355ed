"""Every child is waited for: none stays a zombie for as long as its parent lives."""

import os
import sys
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import trio

from kvfs.keeper import process as process_module
from kvfs.keeper.process import Process
from kvfs.movement import movers as movers_module
from kvfs.movement.movers import MoverPool
from tests.harness import wait_for


def children() -> set[str]:
    """Process ids of this process's children, zombies among them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {child for path in lists for child in path.read_text().split()}


def test_a_mover_that_ended_for_want_of_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 10 minutes without a job; the next job may be days away."""
    monkeypatch.setattr(movers_module, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(movers_module, "REAP_PERIOD", 0.05)
    (tmp_path / "a").write_bytes(b"bytes")

    async def case() -> None:
        resource_tracker.ensure_running()  # multiprocessing's own, which stays
        others = children()
        async with MoverPool.open(1, Counter[str]()) as movers:
            source, copy = str(tmp_path / "a"), str(tmp_path / "b")
            await movers.copy(source, copy, 5, sync=False, cold=False)
            assert children() - others, "a worker has done it"
            with trio.fail_after(60):
                while children() - others:  # noqa: ASYNC110 (nothing tells of it)
                    await trio.sleep(0.02)

    trio.run(case)


def test_a_daemon_that_takes_its_time_to_die_is_waited_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "REAP", -1.0)  # no time at all
    made = Process([sys.executable, "-c", "import time; time.sleep(600)"], os.dup(2))
    os.killpg(made.pid, 9)
    made.end()

    def gone() -> bool:
        Process.reap_left()
        return not Path(f"/proc/{made.pid}").exists()

    wait_for(gone, "it is waited for")
    assert made not in Process._left


# The parent waits in the kernel, like a thread that waits for a disk, until its child has opened
# the FIFO and runs the program.
STUCK = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[
    (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""


def test_a_daemon_that_waits_in_the_kernel_is_told_from_one_that_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    hangs = Process([sys.executable, "-c", "import time; time.sleep(600)"], os.dup(2))
    stuck = Process([sys.executable, "-c", STUCK, str(tmp_path / "fifo")], os.dup(2))
    try:
        wait_for(stuck.waits_for_disk, "it waits in the kernel")
        assert not hangs.waits_for_disk()
    finally:
        os.close(os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK))
        stuck.end()
        hangs.end()
