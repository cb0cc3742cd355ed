"""Offers between the nodes of a pool: objects that a node is asked to take over.

    POOL:h:NODE    set with an expiry: the keys of objects that a node with room is to fetch

Contract: methods are calls to the index, and raise IndexDownError. An offer is a hint: the node
that gets it trusts nothing but the key, and may drop it. A set has MOST keys, and ends OFFER_S
after the last offer.
"""

from collections.abc import Sequence

from kvfs.pool import scripts
from kvfs.pool.index import LONG, Index

MOST = 64  # offers that wait at a node, of all other nodes
OFFER_S = 5  # s


class Offers:
    """The offers of one pool."""

    def __init__(self, index: Index) -> None:
        self.index = index

    async def offer(self, node: str, keys: Sequence[str]) -> None:
        """Offer objects to a node. Those for which its set has no room are left out."""
        name = self._of(node)
        await self.index.ask([(name, scripts.OFFER.call(name, MOST, OFFER_S, *keys))], LONG)

    async def take(self, node: str, most: int) -> list[str]:
        """Take some of the objects that are offered to a node."""
        name = self._of(node)
        (reply,) = await self.index.ask([(name, scripts.TAKE.call(name, most))], LONG)
        words = reply if isinstance(reply, list) else []
        return [word.decode("utf-8", "replace") for word in words if isinstance(word, bytes)]

    def _of(self, node: str) -> str:
        return f"{self.index.pool}h:{node}"
