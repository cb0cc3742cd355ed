"""The tokens of the last drops of top-level directories, as far as this node knows them.

Contract: synchronous. A token is the time of a drop, by the clock of its node. The catalog has one
fact by name: the last drop that the directory of this name comes after. It is the one that the
index had when the directory was made, or that of a drop that was carried out here. If the index was
not asked then, the fact is the time at which the directory was made. So no directory has the token
of an earlier one. The drops of this node that the index has not learned of are a fact as well.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.catalog import Batch, Catalog
from kvfs.s3.keys import escape

NONE = "-"  # in place of a token: the name was never dropped
_MADE = "~"  # before the time at which a directory was made
_UNTOLD = "pool-drops-untold"  # a fact of the catalog: tokens by name, as JSON


class DropTokens:
    """The tokens that one mount knows."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.untold: dict[str, str] = json.loads(catalog.fact(_UNTOLD) or "{}")
        self._next: dict[str, str] = {}  # of directories that are made now

    def known(self, name: str) -> str | None:
        """The token of a name; None for a directory from before the pool."""
        return self._read(name)[0] or None

    def note(self, name: str, token: str) -> None:
        """Note that a directory comes after a drop; an empty token: after none."""
        with self.catalog.batch() as batch:
            batch.set_fact(_fact(name), _text(token))

    def is_compared(self, name: str) -> bool:
        """Whether the directory of a name was compared with the index."""
        known = self.known(name)
        return known is not None and not known.startswith(_MADE)

    def precedes(self, name: str, token: str) -> bool:
        """Whether the directory of a name comes before a drop. False for one without a fact."""
        known = self.known(name)
        if known is not None and known.startswith(_MADE):
            return known.removeprefix(_MADE) < token
        return known is not None and bool(token) and known != token

    def hides(self, name: str, mtime_ns: int) -> bool:
        """Whether an object is from before the last drop of the directory above it.

        The index has such an object as long as its node has not followed.
        """
        _, until = self._read(name)
        return bool(until) and mtime_ns <= int(until, 16)

    # Drops of this node

    def drop(self, name: str, batch: Batch) -> None:
        """Note that a batch drops a namespace for all nodes."""
        untold = {**self.untold, name: _now()}
        batch.set_fact(_UNTOLD, json.dumps(untold))
        batch.then(lambda: setattr(self, "untold", untold))

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest drop of this node that the index does not know; 0 without."""
        times = [int(token, 16) for token in self.untold.values()]
        return max(0.0, (time.time_ns() - min(times)) / 1e9) if times else 0.0

    def told(self, name: str, token: str) -> None:
        """Note that the index knows a drop of this node."""
        if self.untold.get(name) == token:
            untold = {other: known for other, known in self.untold.items() if other != name}
            with self.catalog.batch() as batch:
                batch.set_fact(_UNTOLD, json.dumps(untold))
            self.untold = untold

    # Directories that are made here

    @contextmanager
    def of_next(self, name: str, token: str | None) -> Iterator[None]:
        """Give a token to a directory that is made here; None: the index was not asked."""
        if token is not None:
            self._next[name] = _text(token)
        try:
            yield
        finally:
            self._next.pop(name, None)

    def made(self, name: bytes, batch: Batch) -> None:
        """Note that a batch gives a name at the top to another directory."""
        text = name.decode("utf-8", "surrogateescape")
        batch.set_fact(_fact(text), self._next.pop(text, "") or f"{_MADE}{_now()}")

    def _read(self, name: str) -> tuple[str, str]:
        token, _, until = (self.catalog.fact(_fact(name)) or "").partition(" ")
        return token, until


def key_of(name: str) -> str:
    """The name of a namespace as the index has it."""
    return escape(name.encode("utf-8", "surrogateescape"))


def _text(token: str) -> str:
    """The fact of a token. A drop from the future hides what there is now, and nothing later."""
    return f"{token} {min(token, _now())}" if token else NONE


def _now() -> str:
    return f"{time.time_ns():016x}"


def _fact(name: str) -> str:
    return f"pool-dropped:{key_of(name)}"
