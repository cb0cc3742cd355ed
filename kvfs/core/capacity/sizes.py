"""Expected sizes of new files, learned from earlier files of the same namespace and kind.

Contract: a create is placed before its size can be known, and under passthrough kvfs cannot divert
it afterwards. So `ExpectedSizes.expect` answers bytes, or None if it knows no file of that kind.
The kind of a block is its layout's (`Block.kind`). So a model file of 10 GB does not change the
expectation for blocks with the same extension. Of a name that no layout knows, `kind_of` takes the
extension, or the directory if the name has none: such names say nothing beyond their directory.

Memory is bounded. The sizes are not exact, and need not be: reservations follow the real size while
the file grows. A new daemon knows no sizes.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvfs.layouts import LIVES, Block, Kind

REMEMBERED = 2048  # kinds, about 1 MiB if each has a model with a name of 255 bytes
FORGET = 8  # a single large file counts for so many small ones that follow
UNKNOWN_SIZE = 64 << 20  # bytes reserved for a file of unknown size; a guess, not measured

_TEMPORARY = (b"tmp", b"temp", b"part", b"incomplete")  # beginnings of temporary extensions


class Expectation(NamedTuple):
    """The kind of a new file, and the bytes that it will take.

    - `size`: None if no file of its kind is known.
    - `block`: a layout knows the name as that of one block, and not of a pool of blocks.
    """

    kind: Kind
    size: int | None = None
    block: bool = False

    @property
    def guess(self) -> int:
        """Bytes of RAM that a block may take if no file of its kind is known; 0 for others."""
        return UNKNOWN_SIZE if self.block and self.size is None else 0


class ExpectedSizes:
    """Sizes by namespace and kind. Growth is believed at once, shrinking slowly."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, Kind], int] = OrderedDict()

    def learn(self, namespace: int, kind: Kind, size: int) -> None:
        """namespace: the inode number of its directory."""
        before = self._seen.pop((namespace, kind), size)
        self._seen[namespace, kind] = max(size, before - (before - size) // FORGET)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def expect(self, namespace: int, kind: Kind) -> int | None:
        return self._seen.get((namespace, kind))


def kind_of(block: Block | None, directory: int, name: bytes) -> Kind:
    """Return the kind of a file, from its block or else from its name.

    block: the block for which a layout takes the name; None: no layout knows it.
    directory: the inode number of its directory.
    """
    if block is not None:
        return block.kind
    extension = _extension(name)
    return ("", extension.decode()) if extension else ("", directory)


def is_one_block(block: Block | None) -> bool:
    """Whether a file is one block, and not a pool of blocks, nor unknown to all layouts."""
    return block is not None and not LIVES[block.layout].pool


def _extension(name: bytes) -> bytes:
    """Return the extension of a name, as far as it is the same for all such files.

    Programs write NAME.tmp12345, NAME.12345.tmp or NAME.aB3xYz, and rename it to NAME. So parts are
    passed over that say "temporary", or that are not letters of one case.
    """
    for part in reversed(name.lstrip(b".").split(b".")[1:]):
        if part.isalpha() and (part.islower() or part.isupper()):
            extension = part.lower()
            if not extension.startswith(_TEMPORARY):
                return extension
    return b""
