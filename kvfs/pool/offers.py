"""Offers between the nodes of a pool: objects that a node is asked to take over.

    POOL:h:NODE    set with an expiry: the keys of objects that a node with room is to fetch

Contract: methods are calls to the index, and raise IndexDownError. An offer is a hint: the node
that gets it trusts nothing but the key, and may drop it. A set has MOST keys, and ends OFFER_S
after the last offer. Each script takes only commands that a user of the index has anyway.
"""

from collections.abc import Sequence

from kvfs.pool.index import LONG, Index

MOST = 64  # offers that wait at a node, of all other nodes
OFFER_S = 5  # s

# Add keys while there is room for them. ARGV: MOST, OFFER_S, then the keys.
OFFER = """
local room = tonumber(ARGV[1]) - #redis.call('SMEMBERS', KEYS[1])
for at = 3, math.min(#ARGV, room + 2) do redis.call('SADD', KEYS[1], ARGV[at]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 'here'
"""

# Take some keys. ARGV: how many.
TAKE = """
local found = redis.call('SMEMBERS', KEYS[1])
local taken = {}
for at = 1, math.min(#found, tonumber(ARGV[1])) do
  taken[at] = found[at]
  redis.call('SREM', KEYS[1], found[at])
end
return taken
"""


class Offers:
    """The offers of one pool."""

    def __init__(self, index: Index) -> None:
        self.index = index

    async def offer(self, node: str, keys: Sequence[str]) -> None:
        """Offer objects to a node. Those for which its set has no room are left out."""
        name = self._of(node)
        await self.index.ask([(name, ("EVAL", OFFER, 1, name, MOST, OFFER_S, *keys))], LONG)

    async def take(self, node: str, most: int) -> list[str]:
        """Take some of the objects that are offered to a node."""
        name = self._of(node)
        (reply,) = await self.index.ask([(name, ("EVAL", TAKE, 1, name, most))], LONG)
        words = reply if isinstance(reply, list) else []
        return [word.decode("utf-8", "replace") for word in words if isinstance(word, bytes)]

    def _of(self, node: str) -> str:
        return f"{self.index.pool}h:{node}"
