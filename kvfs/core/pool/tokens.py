"""The tokens of the last drops of top-level directories, as far as this node knows them.

Contract: synchronous. The catalog has one token by name: the last drop that the directory of this
name comes after. It is the one that the index had when the directory was made, or that of a drop
that was carried out here. `known` is None if the index was not asked then. So no directory has the
token of an earlier one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvfs.catalog import Batch, Catalog
from kvfs.s3.keys import escape

NONE = "-"  # in place of a token: the name was never dropped


class DropTokens:
    """The tokens that one mount knows."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._next: dict[str, str] = {}  # of directories that are made now

    def known(self, name: str) -> str | None:
        """The token of a name; None if the directory was made without one."""
        return self.catalog.fact(_fact(name)) or None

    def note(self, name: str, token: str) -> None:
        """Note that a directory comes after a drop; an empty token: after none."""
        with self.catalog.batch() as batch:
            batch.set_fact(_fact(name), token or NONE)

    @contextmanager
    def of_next(self, name: str, token: str | None) -> Iterator[None]:
        """Give a token to a directory that is made here; None: the index was not asked."""
        if token is not None:
            self._next[name] = token or NONE
        try:
            yield
        finally:
            self._next.pop(name, None)

    def made(self, name: bytes, batch: Batch) -> None:
        """Note that a batch gives a name at the top to another directory."""
        text = name.decode("utf-8", "surrogateescape")
        batch.set_fact(_fact(text), self._next.pop(text, ""))


def key_of(name: str) -> str:
    """The name of a namespace as the index has it."""
    return escape(name.encode("utf-8", "surrogateescape"))


def _fact(name: str) -> str:
    return f"pool-dropped:{key_of(name)}"
