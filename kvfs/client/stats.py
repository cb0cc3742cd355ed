"""Counters of a cache since it was opened; any thread may raise and read them.

Not for the content and hits of a namespace, which the mount knows (`kvfs status`).
"""

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Stats:
    """Blocks loaded, saved and prefetched; and the failures, which no call raises.

    - blocks_absent: given to load, and not loaded, because they or one before them were not cached.
    - load_errors, save_errors: OSErrors of single blocks.
    - blocks_present: given to save, and cached already.
    - blocks_unsaved: given to save, and not cached for an error of this block or of one before it.
    """

    blocks_loaded: int = 0
    blocks_prefetched: int = 0
    blocks_absent: int = 0
    load_errors: int = 0
    blocks_saved: int = 0
    blocks_present: int = 0
    blocks_unsaved: int = 0
    save_errors: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        """Return all counters of one moment."""
        with self._lock:
            names = [one.name for one in fields(self) if not one.name.startswith("_")]
            return {name: getattr(self, name) for name in names}
