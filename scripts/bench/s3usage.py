"""The cost of moving bytes: their rate, and processor time of each part for a GB.

Contract: parts are processes with all their descendants, found anew at both ends. A process that
ends in between is not counted. Not for the moved bytes themselves.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench.mounted import QUIET_LIMIT_S, Failed

QUIET_S = 0.5  # how long a part must have done next to nothing


class Usage:
    """Measures the cost. `parts`: functions that give the processes of each part."""

    def __init__(self, parts: dict[str, Callable[[], list[int]]]) -> None:
        self.parts = parts

    @contextlib.contextmanager
    def of(self, moved: int) -> Iterator[dict[str, Any]]:
        """Filled at the end: bytes/s, and CPU seconds of each part for 10^9 of these bytes."""
        figures: dict[str, Any] = {}
        before, start = self._spent(), time.perf_counter()
        yield figures
        seconds, after = time.perf_counter() - start, self._spent()
        figures["bytes_s"] = moved / seconds
        figures["cpu_s_GB"] = per_gb(before, after, moved)

    def rest(self, part: str) -> None:
        """Wait until a part does next to nothing. Raises Failed."""
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            before, start = self._spent(), time.monotonic()
            time.sleep(QUIET_S)
            spent = per_gb(before, self._spent(), 10**9)[part]
            if spent <= (time.monotonic() - start) / 5:
                return
            if time.monotonic() > deadline:
                raise Failed(f"{part}: still busy after {QUIET_LIMIT_S:.0f} s")

    def _spent(self) -> dict[str, dict[int, float]]:
        known = processes()
        return {
            name: {pid: known[pid][1] for pid in family(roots(), known)}
            for name, roots in self.parts.items()
        }


def per_gb(
    before: dict[str, dict[int, float]], after: dict[str, dict[int, float]], moved: int
) -> dict[str, float]:
    """CPU seconds of processes, by part; who is new began at 0."""
    return {
        name: sum(spent - before[name].get(pid, 0.0) for pid, spent in found.items()) / moved * 1e9
        for name, found in after.items()
    }


def processes() -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of every process."""
    found = {}
    tick = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                found[int(path.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / tick)
    return found


def family(roots: list[int], known: dict[int, tuple[int, float]]) -> set[int]:
    """They and all their descendants."""
    found = {pid for pid in roots if pid in known}
    more = found
    while more:
        more = {pid for pid, (parent, _) in known.items() if parent in more} - found
        found |= more
    return found
