"""The facts that a file's name has about its block of KV cache, and the group of the file.

Contract: a *group* is all files of one block: ranks, layers, pools, a data file and its
description. Half a group is a miss, so it lives and dies together. Two files are of one group
exactly if their `group` is equal. `group` begins with the layout and the directory: connectors
leave out of their names the difference between two configurations, and people use directories for
that. `key` is the same for programs: 63 bits of XXH3 and never 0, which stands for "not known". In
10**7 groups two have the same key with a probability of 5e-6; they then leave together, which is a
miss.
"""

import re
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

# `save_file` of safetensors 0.8 writes this name beside the final one, and renames it before it
# closes the file. Earlier versions write the final name.
SAFETENSORS_TMP = re.compile(rb"\.tmp[0-9A-Za-z]{6}")
_POSITIVE = (1 << 63) - 1

Directory = tuple[bytes, ...]  # names of directories, from the namespace down; () is itself
Kind = tuple[str | int, ...]  # files of one kind have similar sizes


class Block(NamedTuple):
    """One file of a block. `str` is "" and `int` is None where the name does not say it.

    - `model`: as the name has it, where the connector's own escapes cannot be undone.
    - `shard`: the layer, group or pool within a rank.
    - `temporary`: the file waits to be renamed.
    - `element_size`: the bytes of a number, where the name has a dtype of 16 bits or more.
    - `number` and `parent_number`: keys for programs where names are digests already; 0: they are
      made of groups.
    - `kind`: the layout, and the facts by which sizes differ, such as the model. It has only facts
      that a final name and the temporary name before it both tell, so both have one kind.
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
    kind: Kind = ()

    @property
    def key(self) -> int:
        return self.number or key(self.group)

    @property
    def parent_key(self) -> int:
        """Return the key of the block before this one; 0 if the name does not say it."""
        return self.parent_number or (key(self.parent_group) if self.parent_group else 0)


class Life(NamedTuple):
    """The allowed moves of a layout's files, unless the namespace says otherwise.

    Without `droppable` they may move between tiers, but only their owner unlinks them. With `pool`
    a file has the room of many blocks, or is one of many slots: a process makes it at its start,
    and has it open as long as it runs.
    """

    droppable: bool
    why: str
    pool: bool = False


MISS = Life(droppable=True, why="a file that is gone is a miss")


def text(name: bytes) -> str:
    """Return the name for people; names need not be UTF-8."""
    return name.decode("utf-8", "surrogateescape")


def group(layout: bytes, directory: Directory, block: bytes) -> bytes:
    """Return the identity of a group, readable in a log."""
    return b"%b:%b/%b" % (layout, b"/".join(directory), block)


def block(
    engine: str,
    layout: str,
    directory: Directory,
    whole: bytes,
    *,
    kind: Kind | None = None,
    **facts: Any,  # noqa: ANN401
) -> Block:
    """Return one file of the group `whole` in a directory; facts: fields of `Block`.

    kind: None stands for the layout and the model.
    """
    if kind is None:
        kind = layout, facts.get("model", "")
    return Block(engine, layout, group(layout.encode(), directory, whole), kind=kind, **facts)


def key(identity: bytes) -> int:
    """Return 63 bits that stand for a group: the low ones of its XXH3-64, 1 instead of 0."""
    return (xxh3_64_intdigest(identity) & _POSITIVE) or 1


def key_of(parent: int, name: bytes) -> int:
    """Return the key of a file that no layout recognises: a group of its own.

    `parent` is the inode number of its directory. It is hashed with the name, and is no seed: for
    short names, XXH3 only mixes a seed in by XOR, so two such files would often have one key.
    """
    return key(parent.to_bytes(8, "little") + name)
