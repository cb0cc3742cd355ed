"""What a file's name says of the block of KV cache in it, and which files are one group.

Contract: a *group* is all files of one block: ranks, layers, pools, a data file and what describes
it. Half a group is a miss, so it lives and dies together. Two files are of one group exactly if
their `group` is equal; it begins with the layout and the directory, because connectors leave out of
their names what tells two configurations apart, and people use directories for that. `key` is the
same for programs: 63 bits of XXH3 and never 0, which stands for "not known". In 10**7 groups two
have the same key with a probability of 5e-6; they then leave together, which is a miss.
"""

from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

_POSITIVE = (1 << 63) - 1

Directory = tuple[bytes, ...]  # names of directories, from the namespace down; () is itself


class Block(NamedTuple):
    """One file. `str` is "" and `int` is None where the name does not say it.

    `model` is as the name has it, where the connector's own escapes cannot be undone. `shard` is
    the layer, group or pool within a rank. `temporary` files wait to be renamed. `element_size` is
    the bytes of a number, where the name has a dtype of 16 bits or more. `number` and
    `parent_number` are keys for programs where names are digests already; 0: they are made of
    groups.
    """

    engine: str
    layout: str
    group: bytes
    parent_group: bytes = b""
    model: str = ""
    rank: int | None = None
    world: int | None = None
    shard: str = ""
    block: str = ""
    parent: str | None = None
    temporary: bool = False
    element_size: int | None = None
    number: int = 0
    parent_number: int = 0

    @property
    def key(self) -> int:
        return self.number or key(self.group)

    @property
    def parent_key(self) -> int:
        """The key of the block before this one in its prompt; 0 if the name does not say it."""
        return self.parent_number or (key(self.parent_group) if self.parent_group else 0)


class Life(NamedTuple):
    """What may happen to the files of a layout unless the namespace says otherwise.

    Without `droppable` they may move between tiers, but only their owner unlinks them.
    """

    droppable: bool
    why: str


MISS = Life(droppable=True, why="a file that is gone is a miss")


def text(name: bytes) -> str:
    """The name for people; names need not be UTF-8."""
    return name.decode("utf-8", "surrogateescape")


def group(layout: bytes, directory: Directory, block: bytes) -> bytes:
    """The identity of a group, readable in a log."""
    return b"%b:%b/%b" % (layout, b"/".join(directory), block)


def block(
    engine: str,
    layout: str,
    directory: Directory,
    whole: bytes,
    **facts: Any,  # noqa: ANN401
) -> Block:
    """One file of the group that is called `whole` in a directory; facts: fields of `Block`."""
    return Block(engine, layout, group(layout.encode(), directory, whole), **facts)


def key(identity: bytes) -> int:
    """Return 63 bits that stand for a group: the low ones of its XXH3-64, 1 instead of 0."""
    return (xxh3_64_intdigest(identity) & _POSITIVE) or 1


def key_of(parent: int, name: bytes) -> int:
    """Return the key of a file that no layout recognises: a group of its own.

    `parent` is the inode number of its directory, the seed of the hash.
    """
    return (xxh3_64_intdigest(name, parent) & _POSITIVE) or 1
