"""The needs of a connector, and the place of its engine's configuration.

Contract: pure. A `NamespacePath` has only paths that every engine's parser takes unchanged, so that
a writer of a profile can ignore the others. Not for whether a file system is mounted there.
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
# The needs of kvfs's own connectors that know the block before each: kvfs.prefix has the names.
PREFIX = {**SHARED, "prefix": "on"}
WHY_PREFIX = {
    "prefix": "a directory stands for the start of prompts; kvfs drops the blocks that continue it "
    "first, so one call finds the longest prefix"
}
# A share of the namespace's capacity, for engines that count by themselves: files take whole
# blocks, and the next block is written before an old one goes.
_SHARE = 0.9
_SMALLEST = 64 << 20
# Lists of directories are written with commas, and `fs://` ends at a ? or #.
_REFUSED = frozenset(",?#")


@dataclass(frozen=True, slots=True)
class NamespacePath:
    """The directory of a namespace. `capacity` is in bytes, None where it has no quota.

    `room` is the capacity, else the size of the mount if it is known.
    """

    path: str
    capacity: int | None
    room: int | None

    @classmethod
    def of(
        cls, mountpoint: str, namespace: str, capacity: int | None, mount: int | None = None
    ) -> "NamespacePath":
        """Return the path. ConfigError: no engine's configuration can express the path or quota."""
        path = os.path.join(mountpoint, namespace)
        if not os.path.isabs(mountpoint):
            raise ConfigError(f"mount point {mountpoint!r}: expected an absolute path")
        if "/" in namespace or namespace in {"", ".", ".."}:
            raise ConfigError(f"namespace {namespace!r}: expected the name of one directory")
        if not path.isprintable() or path != path.strip() or _REFUSED & set(path):
            raise ConfigError(
                f"path {path!r}: expected no , ? # or control character, and no space at the end, "
                "which engines cannot read: choose another name"
            )
        if capacity is not None and capacity < _SMALLEST:
            raise ConfigError(
                f"quota_hard={format_size(capacity)} of namespace {namespace!r}: expected at least "
                f"{format_size(_SMALLEST)} for an engine's cache"
            )
        return cls(path, capacity, mount if capacity is None else capacity)

    def share(self, otherwise: int) -> int:
        """Return the bytes that a self-counting engine may fill; `otherwise`: not known."""
        return otherwise if self.room is None else int(self.room * _SHARE)


class ConnectorProfile(NamedTuple):
    """One way in which an engine keeps its cache in files.

    `write` returns the text to paste into the engine's configuration; its comments begin with #.
    `why` has a line for each setting that is not obvious.
    """

    write: Callable[[NamespacePath], str]
    settings: dict[str, str]
    why: Mapping[str, str] = MappingProxyType({})
