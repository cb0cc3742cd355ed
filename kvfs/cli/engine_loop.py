"""The calls of an engine, part of `kvfs bench`: open, fstat, read and close, with work between.

Contract: between two files the process does `Work`, as an engine does between two blocks. Without
work the daemon's code stays in the processors' caches, and an open takes a third of the time that
an engine sees. Each file has been opened once before: the figures are of objects that are resident
and known. Every byte that was read is compared, outside of the measured time. A verdict in plain
words says what an engine gets in comparison, and what to change if that is little.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvfs.errors import KvfsError

BYTES = 8 << 20  # of a file: 64 tokens of an 8B model
FILES = 16
CALLS = ("open", "fstat", "read", "close")
COPIED = 64 << 20
HASHED = 8 << 20
THREADS_MOST = 32
# Below this part of the other directory's speed, or above this time, the verdict gives cures.
FAST = 0.8
OPEN_S = 300e-6  # of open and fstat together; 130 to 250 us with fast opens, 450 to 700 without


class Work:
    """Work as of an engine between two blocks: all processors compute, then memory is copied.

    Hashing on every processor and a copy of 64 MiB make an open and its fstat as slow as a matrix
    product and 4 MiB of random numbers of torch do: 535 and 102 us, and 570 and 96 us. A copy alone
    makes them 294 and 85 us, and no work 218 and 70 us (2 CPUs, no fast opens). Importing torch
    would take longer than the measurement, and the daemon's environment need not have it.
    """

    def __init__(self) -> None:
        self._count = min(THREADS_MOST, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._count)
        self._hashed = os.urandom(HASHED)
        self._from, self._to = (memoryview(bytearray(COPIED)) for _ in range(2))
        self.run()  # the first touch of this memory

    def run(self) -> None:
        hashes = [self._threads.submit(hashlib.sha256, self._hashed) for _ in range(self._count)]
        for one in hashes:
            one.result()
        self._to[:] = self._from

    def close(self) -> None:
        self._threads.shutdown()


@dataclass
class Loop:
    """The files on one side, and the seconds of all calls after the first turn."""

    folder: Path
    files: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})

    def __post_init__(self) -> None:
        self._paths = [self.folder / f"engine-{number}" for number in range(self.files)]
        self._data = os.urandom(BYTES)
        self._buffer = bytearray(BYTES)

    def write(self) -> None:
        for path in self._paths:
            with path.open("wb", buffering=0) as file:
                written = file.write(self._data)
            if written != BYTES:
                raise KvfsError(
                    f"{path}: {written} bytes were written, expected {BYTES}: make room there"
                )
        self._read(lambda: None, {call: [] for call in CALLS})

    def turn(self, work: Work) -> None:
        self._read(work.run, self.seconds)

    def _read(self, work: Callable[[], None], seconds: dict[str, list[float]]) -> None:
        for path in self._paths:
            work()
            times = [time.perf_counter()]
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                times.append(time.perf_counter())
                os.fstat(descriptor)
                times.append(time.perf_counter())
                os.readv(descriptor, [self._buffer])
                times.append(time.perf_counter())
            finally:
                os.close(descriptor)
            times.append(time.perf_counter())
            for call, begin, end in zip(CALLS, times[:-1], times[1:], strict=True):
                seconds[call].append(end - begin)
            if self._buffer != self._data:
                raise KvfsError(f"{path}: the bytes differ from those that were written: report it")

    def unlink(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def figures(self) -> dict[str, float]:
        """Return medians and 99th percentiles; `entry`: open and fstat of one file together."""
        entry = [
            sum(pair) for pair in zip(self.seconds["open"], self.seconds["fstat"], strict=True)
        ]
        found = {}
        for name, seconds in {**self.seconds, "open_and_fstat": entry}.items():
            found[f"{name}_p50_s"] = median(seconds)
            found[f"{name}_p99_s"] = sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]
        return found


def measured(mine: Path, other: Path, room: int, turns: int) -> dict[str, Any]:
    """Return the figures of both sides, measured in turns. Raises KvfsError, OSError."""
    loops = [Loop(folder, max(1, min(FILES, room // BYTES))) for folder in (mine, other)]
    work = Work()
    try:
        for loop in loops:
            loop.write()
        for _ in range(turns):
            for loop in loops:
                loop.turn(work)
    finally:
        work.close()
        for loop in loops:
            loop.unlink()
    one, two = (loop.figures() for loop in loops)
    whole = [sum(side[f"{call}_p50_s"] for call in CALLS) for side in (one, two)]
    return {
        "bytes": BYTES,
        "files": loops[0].files,
        "mount": one,
        "beside": two,
        "speed": whole[1] / whole[0],
    }


def verdict(engine: dict[str, Any], against: str) -> str:
    """Return what an engine gets, in one sentence."""
    mine, other = engine["mount"], engine["beside"]
    opens = [
        f"{side['open_and_fstat_p50_s'] * 1e6:.0f} us (99 %: "
        f"{side['open_and_fstat_p99_s'] * 1e6:.0f} us)"
        for side in (mine, other)
    ]
    reads = [f"{side['read_p50_s'] * 1e6:.0f} us" for side in (mine, other)]
    return (
        f"Loads get {engine['speed']:.1f} of the speed of {against}: open and fstat take "
        f"{opens[0]}, there {opens[1]}; a read of 8 MiB takes {reads[0]}, there {reads[1]}."
    )


def cures(engine: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """Return what makes an engine slow here, each with its cure; none if it is fast."""
    tiers = status["tiers"]
    found = []
    if engine["speed"] < FAST or engine["mount"]["open_and_fstat_p50_s"] > OPEN_S:
        load, processors = os.getloadavg()[0], len(os.sched_getaffinity(0))
        found += [
            f"{name} is off: {status[name]['why']}"
            for name in ("passthrough", "huge_pages", "fast_open")
            if name in status and not status[name]["on"]  # an earlier daemon has no fast_open
        ]
        if "ram" not in tiers:
            found.append("objects are on NVMe: mount with ram=SIZE")
        if load > processors:
            found.append(
                f"the load is {load:.1f} on {processors} processors: measure again when other "
                "programs rest, or give the daemon more CPU"
            )
        if not found:
            found.append("nothing is off: see 'It is slow' in docs/troubleshooting.md")
    hits = {name: tiers[name]["hits"] for name in ("ram", "nvme") if name in tiers}
    if len(hits) > 1 and hits["nvme"] > hits["ram"]:
        found.append(
            f"of the opens so far, {hits['nvme']} were of objects on NVMe and {hits['ram']} in "
            "RAM: give more ram="
        )
    return found
