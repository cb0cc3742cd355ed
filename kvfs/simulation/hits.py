"""What counts as a hit, for the simulator and for the replay alike.

Contract: an engine can use a prefix only, so that tokens count up to the first block that is
missing; objects count wherever they are found. Tokens of a last block without a hash are never a
hit: nothing stores them. Ratios are between 0 and 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfs.simulation.trace import Request


class Hits(NamedTuple):
    """What was asked for, and what of it was found."""

    tokens: int = 0
    token_hits: int = 0
    objects: int = 0
    object_hits: int = 0

    @property
    def token_ratio(self) -> float:
        """Tokens in the prefixes that were found, of all tokens of the prompts."""
        return self.token_hits / self.tokens if self.tokens else 0.0

    @property
    def object_ratio(self) -> float:
        """Blocks that were found, of all that were looked up."""
        return self.object_hits / self.objects if self.objects else 0.0

    def and_request(self, request: Request, found: Sequence[bool]) -> "Hits":
        """Return the sum with one more request: whether each of its blocks was found."""
        prefix = next((depth for depth, hit in enumerate(found) if not hit), len(found))
        return Hits(
            self.tokens + request.tokens,
            self.token_hits + request.prefix(prefix),
            self.objects + len(found),
            self.object_hits + sum(found),
        )
