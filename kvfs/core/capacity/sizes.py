"""Expected sizes of new files, learned from earlier files of the same directory.

Contract: `expect` answers bytes, or None if no such file is known. A create is placed before its
size can be known, and under passthrough kvfs cannot divert it afterwards. Memory is bounded. The
sizes are not exact, and need not be: reservations follow the real size while the file grows.
"""

from collections import OrderedDict

REMEMBERED = 4096  # (directory, suffix) pairs, about 0.6 MiB
FORGET = 8  # a single large file counts for so many small ones that follow


class ExpectedSizes:
    """Sizes by directory and suffix, or by suffix alone for a directory not seen before."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, bytes], int] = OrderedDict()

    @staticmethod
    def _suffix(name: bytes) -> bytes:
        return name[name.rfind(b".") + 1 :][-8:] if b"." in name else b""

    def learn(self, parent: int, name: bytes, size: int) -> None:
        suffix = self._suffix(name)
        for key in ((parent, suffix), (0, suffix)):
            before = self._seen.pop(key, size)
            self._seen[key] = max(size, before - (before - size) // FORGET)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def expect(self, parent: int, name: bytes) -> int | None:
        suffix = self._suffix(name)
        found = self._seen.get((parent, suffix))
        if found is None and suffix:  # names without one say nothing beyond their directory
            found = self._seen.get((0, suffix))
        return found
