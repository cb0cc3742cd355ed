"""What a connector needs of a namespace, and where its engine is told so.

Contract: pure. A `NamespacePath` has only paths that every engine's parser takes as they are, so
that a writer need not know about the rest. Not for whether anything is mounted there.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.units import format_size

GIB = 1 << 30
SHARED = {"eviction": "adaptive"}
# What kvfs's own connectors need where they know the block before each: kvfs.prefix has the names.
PREFIX = {**SHARED, "prefix": "on"}
WHY_PREFIX = {
    "prefix": "a directory is a prefix: what continues it goes before it, so that the longest one "
    "is found in one call"
}
# Of what a namespace may hold, for engines that count themselves: files take whole blocks, and the
# next one is written before an old one goes.
_SHARE = 0.9
_SMALLEST = 64 << 20
# Lists of directories are written with commas, and `fs://` ends at a ? or #.
_REFUSED = frozenset(",?#")


@dataclass(frozen=True, slots=True)
class NamespacePath:
    """The directory of a namespace. `capacity` is in bytes, None where it has no quota."""

    path: str
    capacity: int | None

    @classmethod
    def of(cls, mountpoint: str, namespace: str, capacity: int | None) -> "NamespacePath":
        """Raises ConfigError for a path or a quota that no engine's configuration can say."""
        path = os.path.join(mountpoint, namespace)
        if not os.path.isabs(mountpoint):
            raise ConfigError(f"mount point {mountpoint!r}: expected an absolute path")
        if "/" in namespace or namespace in {"", ".", ".."}:
            raise ConfigError(f"namespace {namespace!r}: expected the name of one directory")
        if not path.isprintable() or path != path.strip() or _REFUSED & set(path):
            raise ConfigError(
                f"path {path!r}: engines' configurations cannot say , ? # or control characters, "
                "nor a space at its end: choose another name"
            )
        if capacity is not None and capacity < _SMALLEST:
            raise ConfigError(
                f"quota_hard={format_size(capacity)} of namespace {namespace!r}: expected at least "
                f"{format_size(_SMALLEST)} for an engine's cache"
            )
        return cls(path, capacity)

    def share(self, otherwise: int) -> int:
        """Bytes that an engine which counts by itself may fill, `otherwise` without a quota."""
        return otherwise if self.capacity is None else int(self.capacity * _SHARE)


class ConnectorProfile(NamedTuple):
    """One way in which an engine keeps its cache in files.

    `write` returns what to paste into the engine's configuration; its comments begin with #. `why`
    has a line for each setting that is not obvious.
    """

    write: Callable[[NamespacePath], str]
    settings: dict[str, str]
    why: Mapping[str, str] = MappingProxyType({})
