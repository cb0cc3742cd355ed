"""Evaluates an access log: rates, sizes and reuse of a cache, and the size that it should have.

Contract: `read` gives the lines that `kvfs/core/namespaces/access_log.py` writes, FILE.1 first;
ConfigError names file, line and reason. `Profile` takes them in order and describes them in plain
values.

An *object* is a key in a namespace. A rename of a file that gets another key moves the object, and
replaces the object of the new key. So an object that was written to a temporary name counts once,
by its final name. If a program exchanges two names, one of the two objects counts from its next
line on only.

The *distance* of a read is the bytes of all different objects that were used since the same object
was used last. An LRU cache of that size would have had the object. `Profile` computes a distance in
O(log n) by a tree of sums (Fenwick, 1994). Source: Mattson, Gecsei, Slutz, Traiger: "Evaluation
techniques for storage hierarchies", IBM Systems Journal 9(2), 1970.

A *hit* is a read from a tier of this machine (`kvfs.rates`). A *miss* is a lookup of a block that
is not there (`kvfs/core/ledger/misses.py`). Not for traces of requests: `trace`.
"""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from kvfs.errors import ConfigError
from kvfs.rates import LOCAL

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)  # of all hits that are possible in the log
PERCENTILES = (50, 90, 99)
PREFIXES = 10
LONGEST = 1 << 20  # bytes of a line: names of 4096 bytes, escaped, are 24 KiB
_OPS = ("read", "write", "rename", "absent", "drop", "lost")
# Texts beside those of each line.
_TEXTS = {"read": ("tier",), "rename": ("old_key", "old_namespace"), "drop": ("why",)}

Access = dict[str, Any]
Object = tuple[str, int]  # namespace and key


def read(path: Path) -> Iterator[Access]:
    """Yield all lines, the oldest first, without one that a crash has cut. Raises ConfigError."""
    older = path.with_name(f"{path.name}.1")
    for file in (older, path) if older.exists() else (path,):
        try:
            with file.open("rb") as lines:
                yield from _lines(file, lines)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _lines(file: Path, lines: IO[bytes]) -> Iterator[Access]:
    for number, line in enumerate(iter(partial(lines.readline, LONGEST + 1), b""), 1):
        if len(line) > LONGEST:
            raise ConfigError(
                f"{file}: line {number} is longer than {LONGEST} bytes: expected an access log"
            )
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == 1:
                raise ConfigError(
                    f"{file}: its first line is no JSON, expected a log that access_log= wrote"
                ) from error
            continue
        try:
            _check(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}: line {number} is no line of an access log: {error}"
            ) from error
        yield record


def _check(record: Any) -> None:  # noqa: ANN401 - JSON
    """Check a record. Raises ValueError, KeyError or TypeError."""
    if record["op"] not in _OPS:
        raise ValueError(f"op {record['op']!r}, expected one of {', '.join(_OPS)}")
    if not math.isfinite(float(record["t"])):
        raise ValueError(f"t {record['t']!r}, expected seconds")
    if record["op"] == "lost":
        int(record["count"])
        return
    for name in ("key", "parent", "path", *_TEXTS.get(record["op"], ())):
        if not isinstance(record[name], str):
            raise TypeError(f"{name} {record[name]!r}, expected a text")
    int(record["key"], 16), int(record["parent"], 16)
    if record["op"] == "rename":
        int(record["old_key"], 16)
    elif record["op"] != "absent" and (type(record["size"]) is not int or record["size"] < 0):
        raise ValueError(f"size {record['size']!r}, expected bytes")


class _Sums:
    """Sums of the values before a place; places are appended."""

    def __init__(self) -> None:
        self._tree = array("q", [0])
        self._all = 0

    def append(self, value: int) -> int:
        """Append a value and return the number of its place, from 1 on."""
        at = len(self._tree)
        below = at - (at & -at)
        self._tree.append(self.before(at - 1) - self.before(below) + value)
        self._all += value
        return at

    def add(self, at: int, value: int) -> None:
        self._all += value
        while at < len(self._tree):
            self._tree[at] += value
            at += at & -at

    def before(self, at: int) -> int:
        """Return the sum up to and including that place."""
        found = 0
        while at:
            found += self._tree[at]
            at &= at - 1
        return found

    def after(self, at: int) -> int:
        return self._all - self.before(at)


class Profile:
    """A description of all accesses: `add` each one, then `describe`."""

    def __init__(self) -> None:
        self.counts = Counter(dict.fromkeys(_OPS, 0))
        self.bytes: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()
        self.spaces: dict[str, Counter[str]] = {}
        self.seconds: Counter[int] = Counter()  # reads by second
        self.sizes = array("q")
        self.distances = array("q")
        self.waits = array("d")  # s between two uses
        self.begin, self.end = math.inf, -math.inf
        self._sums = _Sums()
        self._last: dict[Object, tuple[int, int, float]] = {}  # place, size, when
        self._parents: dict[Object, Object] = {}
        self._paths: dict[Object, str] = {}
        self._reads: Counter[Object] = Counter()

    def add(self, access: Access) -> None:
        what, when = access["op"], float(access["t"])
        self.begin, self.end = min(self.begin, when), max(self.end, when)
        if what == "lost":
            self.counts["lost"] += access["count"]
            return
        path = access["path"]
        namespace = path.partition("/")[0]
        found = namespace, int(access["key"], 16)
        if what == "rename":
            self._move((access["old_namespace"], int(access["old_key"], 16)), found)
        self._paths[found] = path
        if parent := int(access["parent"], 16):
            self._parents[found] = namespace, parent
        if what == "rename":
            return
        space = self.spaces.setdefault(namespace, Counter())
        if what == "drop":  # a larger cache would have it
            space["dropped"] += 1
            return
        if what == "absent":
            self.counts["absent"] += 1
            space["misses"] += 1
            return
        size = access["size"]
        self.counts[what] += 1
        self.bytes[what] += size
        space[f"{what}s"] += 1
        space[f"{what}_bytes"] += size
        if what == "read":
            self.tiers[access["tier"]] += 1
            space["hits"] += access["tier"] in LOCAL
            self.seconds[int(when)] += 1
            self._reads[found] += 1
        else:
            self.sizes.append(size)
        self._use(found, size, when, reads=what == "read")

    def _move(self, old: Object, new: Object) -> None:
        """Give an object another key. An object that had this key before is gone."""
        self._paths.pop(old, None)
        self._parents.pop(old, None)
        if reads := self._reads.pop(old, 0):
            self._reads[new] += reads
        moved = self._last.pop(old, None)
        if moved is None:
            return
        if replaced := self._last.get(new):
            place, size, _ = replaced
            self._sums.add(place, -size)
        self._last[new] = moved

    def _use(self, used: Object, size: int, when: float, *, reads: bool) -> None:
        last = self._last.get(used)
        if last is not None:
            place, before, then = last
            if reads:
                self.distances.append(self._sums.after(place) + size)
                self.waits.append(when - then)
            self._sums.add(place, -before)
        self._last[used] = self._sums.append(size), size, when

    def describe(self) -> dict[str, Any]:
        """Return everything in plain values: bytes, seconds, shares from 0 to 1."""
        seconds = max(0.0, self.end - self.begin) if self.counts.total() else 0.0
        rate = 1 / seconds if seconds else 0.0
        reads, writes = self.counts["read"], self.counts["write"]
        return {
            "seconds": round(seconds, 3),
            "reads": reads,
            "writes": writes,
            "misses": self.counts["absent"],
            "lost_lines": self.counts["lost"],
            "hit_ratio": _share(
                sum(self.tiers[tier] for tier in LOCAL), reads + self.counts["absent"]
            ),
            "reads_per_s": reads * rate,
            "most_reads_in_a_second": max(self.seconds.values(), default=0),
            "read_bytes_per_s": self.bytes["read"] * rate,
            "writes_per_s": writes * rate,
            "write_bytes_per_s": self.bytes["write"] * rate,
            "objects": len(self._last),
            "object_bytes": sum(size for _, size, _ in self._last.values()),
            "written_sizes": _percentiles(self.sizes),
            "read_from": {tier: _share(count, reads) for tier, count in self.tiers.most_common()},
            "namespaces": {name: _space(space) for name, space in sorted(self.spaces.items())},
            "reused": _share(len(self.distances), reads),
            "reuse_distance_bytes": _percentiles(self.distances),
            "reuse_after_s": _percentiles(self.waits),
            "prefixes": self._busiest(),
            "sizes_for": self._sizes_for(),
        }

    def _busiest(self) -> list[dict[str, Any]]:
        """Return the busiest prompts by their first block if that is known, else directories."""
        reads: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for read_one, count in self._reads.items():
            path = self._prefix(read_one)
            reads[path] += count
            blocks[path] += 1
        return [
            {"path": path, "reads": count, "objects": blocks[path]}
            for path, count in reads.most_common(PREFIXES)
        ]

    def _prefix(self, block: Object) -> str:
        first, seen = block, {block}
        while (parent := self._parents.get(first)) is not None and parent not in seen:
            seen.add(parent)
            first = parent
        if first == block and block not in self._parents:
            return self._paths[block].rpartition("/")[0]
        return self._paths.get(first, f"block {first[1]:x}")

    def _sizes_for(self) -> list[dict[str, Any]]:
        """Return the sizes of an LRU cache for shares of the repeated reads."""
        ordered = sorted(self.distances)
        return [
            {"share": share, "bytes": ordered[max(0, math.ceil(share * len(ordered)) - 1)]}
            for share in (SHARES if ordered else ())
        ]


def _space(counts: Counter[str]) -> dict[str, Any]:
    names = ("reads", "misses", "writes", "read_bytes", "write_bytes", "dropped")
    found = {name: counts[name] for name in names}
    return found | {"hit_ratio": _share(counts["hits"], found["reads"] + found["misses"])}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _percentiles(values: "array[int] | array[float]") -> dict[str, float]:
    """Return percentiles by nearest rank; {} for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{at}": math.ceil(at / 100 * len(ordered)) for at in PERCENTILES}
    return {name: ordered[rank - 1] for name, rank in ranks.items()} | {"max": ordered[-1]}
