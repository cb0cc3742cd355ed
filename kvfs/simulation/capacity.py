"""Capacities as people give them: a share of a trace's blocks, a number of blocks, or bytes."""

import re
from fractions import Fraction
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.units import parse_size

_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)%")
_BLOCKS = re.compile(r"[0-9]{1,15}")


def parse_block_size(text: str) -> int:
    """Return the bytes of a block; ConfigError if that is none."""
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"block size {text}: expected {error}") from error
    if not size:
        raise ConfigError(f"block size {text}: expected more than 0 bytes")
    return size


class Capacity(NamedTuple):
    """A capacity as it was given: a share of the blocks of whatever trace, or a number of them."""

    text: str
    share: Fraction | None
    number: int

    @classmethod
    def parse(cls, text: str, block_size: int) -> "Capacity":
        """Read 5%, 20000 (blocks) or 64G (bytes, divided by `block_size`), or raise ConfigError."""
        share, number = None, 0
        if found := _SHARE.fullmatch(text):
            share = Fraction(found[1]) / 100
        elif _BLOCKS.fullmatch(text):
            number = int(text)
        else:
            try:
                number = parse_size(text) // block_size
            except ValueError as error:
                raise ConfigError(
                    f"capacity {text}: expected a share of the trace's blocks such as 5%, "
                    f"a number of blocks such as 20000, or {error}"
                ) from error
        if not share and not number:
            unit = "" if _BLOCKS.fullmatch(text) or share == 0 else f" of {block_size} bytes"
            raise ConfigError(f"capacity {text}: expected at least one block{unit}")
        return cls(text, share, number)

    def blocks(self, unique: int) -> int:
        """Return it in blocks, rounded down, or raise ConfigError if it is not even one."""
        blocks = self.number if self.share is None else int(self.share * unique)
        if not blocks:
            raise ConfigError(f"capacity {self.text} of {unique} unique blocks: less than one")
        return blocks
