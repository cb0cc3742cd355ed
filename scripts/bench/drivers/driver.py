"""The common part of all drivers: content, the clock, and the order of a turn."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: no two numbers below 2**64 give the same words


class WrongBytesError(Exception):
    """An object has other bytes than were put, or is missing."""


class Content:
    """The bytes of numbered objects of one size, in words of 8 bytes that all differ by number."""

    def __init__(self, bytes_each: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = (bytes_each // 8,)
        self._base = torch.randint(-(1 << 62), 1 << 62, words, generator=generator)
        self._wanted = torch.empty_like(self._base)

    def fill(self, out: torch.Tensor, number: int) -> None:
        """Write the content of an object into contiguous memory."""
        torch.add(self._base, _offset(number), out=_words(out))

    def check(self, found: torch.Tensor, number: int) -> None:
        """Raise WrongBytesError if contiguous memory has any other content; then overwrite it."""
        torch.add(self._base, _offset(number), out=self._wanted)
        if not torch.equal(_words(found), self._wanted):
            raise WrongBytesError(f"object {number} has wrong bytes")
        found.zero_()  # the next object must not be taken from here


def _offset(number: int) -> int:
    value = number * STEP & ((1 << 64) - 1)
    return value - (1 << 64) if value >> 63 else value


def _words(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(torch.uint8).flatten().view(torch.int64)


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


class Driver(ABC):
    """One connector. `turn` is all that the benchmark calls."""

    @abstractmethod
    def turn(self, folder: Path, numbers: range) -> dict[str, list[float]]:
        """Return the seconds of all calls by phase. Raises WrongBytesError."""


class Connector(Driver):
    """A connector that puts and gets objects. `put` and `get` return seconds."""

    def turn(self, folder: Path, numbers: range) -> dict[str, list[float]]:
        self.start(folder)
        try:
            put = self.put(numbers)
            return {"put": put, "get": self.get(numbers)}
        finally:
            self.stop()

    @abstractmethod
    def start(self, folder: Path) -> None:
        """Make the connector, with an empty index, on a fresh directory."""

    @abstractmethod
    def put(self, numbers: range) -> list[float]: ...

    @abstractmethod
    def get(self, numbers: range) -> list[float]: ...

    def stop(self) -> None:
        """Forget the connector; the benchmark removes the directory."""
