"""The task of one client, its answer, and its system calls.

Contract: all calls of a client go through `Calls`, which counts them and remembers the times of
slow ones. A client raises `WrongError` if it sees a result that no file system may show.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

SLOW = 0.005  # s; calls that take longer are told, with when they were
FINDINGS_MAX = 20  # of one client: more of them say nothing new
SLOW_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Task:
    """`role`: fill, work, watch, check or pool. Objects are those of sealed.py."""

    role: str
    folder: str
    client: int
    clients: int
    seed: int
    objects: int
    evict: bool = False  # sealed files may be gone, which is a miss
    nodes: int = 1  # of a pool; client N uses node N % nodes

    @classmethod
    def from_json(cls, text: str) -> "Task":
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class WrongError(Exception):
    """`kind`: lost, for a name that must be there; wrong, for bytes or attributes."""

    def __init__(self, kind: str, path: str, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.kind = kind
        self.path = path
        self.detail = detail


@dataclass(slots=True)
class Finding:
    """An operation that failed, or something seen that is not what was written."""

    kind: str  # failed, lost or wrong
    behaviour: str
    path: str
    detail: str
    at: float  # time.monotonic()


@dataclass(slots=True)
class Answer:
    """All that a client tells at its end."""

    calls: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    slow: list[tuple[float, float, str]] = field(default_factory=list)
    contended: list[int] = field(default_factory=list)  # rounds of O_EXCL that it took part in
    won: list[int] = field(default_factory=list)
    logged: int = 0  # records appended to the shared log
    last: dict[str, int] = field(default_factory=dict)  # the last versions of pooled.py, by name

    @classmethod
    def from_json(cls, text: str) -> "Answer":
        return cls(**json.loads(text))


class Calls:
    """The functions of os, counted and timed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.slow: list[tuple[float, float, str]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*arguments: object, **named: object) -> Any:  # noqa: ANN401 (the function's)
            return self.timed(name, lambda: function(*arguments, **named))

        self.__dict__[name] = call
        return call

    def timed(self, name: str, call: Callable[[], T]) -> T:
        self.counts[name] += 1
        start = time.monotonic()
        try:
            return call()
        finally:
            end = time.monotonic()
            if end - start > SLOW and len(self.slow) < SLOW_MAX:
                self.slow.append((start, end, name))

    def write_all(self, fd: int, data: bytes, path: str, offset: int | None = None) -> None:
        """One write that must take everything."""
        done = self.write(fd, data) if offset is None else self.pwrite(fd, data, offset)
        if done != len(data):
            raise WrongError("failed", path, f"a write of {len(data)} bytes took {done}")

    def read_all(self, path: str) -> bytes:
        fd = self.open(path, os.O_RDONLY)
        try:
            return self.contents(fd)
        finally:
            self.close(fd)

    def contents(self, fd: int) -> bytes:
        """Read the file to its end; its size may change meanwhile."""
        parts, offset = [], 0
        while part := self.pread(fd, 1 << 20, offset):
            parts.append(part)
            offset += len(part)
        return b"".join(parts)


def expect(path: str, what: str, found: object, wanted: object) -> None:
    """Raise WrongError unless two values are equal. Bytes are told by their first difference."""
    if found == wanted:
        return
    if isinstance(found, (bytes, bytearray)) and isinstance(wanted, (bytes, bytearray)):
        pairs = enumerate(zip(found, wanted, strict=False))
        first = next(
            (at for at, (one, other) in pairs if one != other), min(len(found), len(wanted))
        )
        text = f"{len(found)} bytes, expected {len(wanted)}; first different: {first}"
    else:
        text = f"{found!r}, expected {wanted!r}"
    raise WrongError("wrong", path, f"{what}: {text}")
