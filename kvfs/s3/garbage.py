"""Which objects below a prefix no live name can mean.

Contract: pure. Any node may look up any key of a namespace in the version that some node has, so
such a key is *live* as long as it is there. Garbage is: objects of versions older than every
node's; objects of namespaces that no node has; and kvfs's own auxiliary objects that no node needs
any more. A key that kvfs did not name is `foreign`, and never garbage. An object at a hash whose
name is lost may still be looked up by that name, so it is `nameless` and stays. A verdict does not
consider age. Not for requests: `collection`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvfs.s3.keys import Keys, ObjectName, Space
from kvfs.s3.nodes import Node, identity_of
from kvfs.s3.store import Entry

KeyKind = Literal["live", "foreign", "nameless", "version", "namespace", "aside", "name", "probe"]
# In the order of deletion: a name goes after its object.
GARBAGE: tuple[KeyKind, ...] = ("version", "namespace", "aside", "probe", "name")


class GarbageVerdict(NamedTuple):
    """The judgement of one object. `space`: its namespace and version, if it has one."""

    kind: KeyKind
    space: Space | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """Facts of the node that collects. Without an identity it has no catalog.

    has: its namespaces. keys: keys of objects in its catalog that have other names now, so that the
    keys do not tell the names. uploads: ids of its present uploads.
    """

    identity: str = ""
    has: frozenset[Space] = frozenset()
    keys: frozenset[str] = frozenset()
    uploads: frozenset[str] = frozenset()


class Rules:
    """The rules by the records of one moment.

    `forgotten`: identities of nodes that do not count.
    """

    def __init__(
        self, keys: Keys, nodes: Iterable[Node], own: Own, forgotten: Collection[str] = ()
    ) -> None:
        self.keys = keys
        self.own = own
        nodes = list(nodes)
        counted = [node for node in nodes if node.identity not in forgotten]
        self._others = [node for node in counted if node.identity != own.identity]
        self._has: dict[bytes, set[int]] = {}
        for space in own.has.union(*(node.has for node in counted)):
            self._has.setdefault(space.namespace, set()).add(space.version)
        self._had: dict[bytes, int] = {}
        gone = [node.has for node in nodes if node.identity in forgotten]
        for space in frozenset[Space]().union(*(node.had for node in nodes), *gone):
            self._had[space.namespace] = max(space.version, self._had.get(space.namespace, 0))

    def of(self, entry: Entry, name: ObjectName | None, hashes: Collection[str]) -> GarbageVerdict:
        """Judge an object; `name` is the name in its record if its key is a hash.

        hashes: of the objects whose keys are hashes, for judging a record of a name.
        """
        keys, key = self.keys, entry.key
        if key in self.own.keys:
            return GarbageVerdict("live")
        if key.startswith(keys.own):
            return GarbageVerdict(self._of_own(key, hashes))
        if not key.startswith(keys.long):
            name = keys.parse(key)
        elif not keys.record_of(key):
            name = None
        elif name is None:
            return GarbageVerdict("nameless")
        return GarbageVerdict("foreign") if name is None else self.of_name(name)

    def of_name(self, name: ObjectName) -> GarbageVerdict:
        """Judge any object of this name."""
        space = Space(name.namespace, name.version)
        if not space.namespace:  # the mount's own namespace, which all nodes have, in one version
            return GarbageVerdict("foreign" if space.version else "live")
        has = self._has.get(space.namespace)
        if has is None:
            return GarbageVerdict("namespace", space)
        return GarbageVerdict("version" if space.version < min(has) else "live", space)

    def _of_own(self, key: str, hashes: Collection[str]) -> KeyKind:
        keys = self.keys
        if key.startswith(keys.aside):
            return "aside"
        if key.startswith(keys.probes):
            return "probe"
        if key.startswith(keys.names):
            hashed = key.removeprefix(keys.names)
            if not keys.record_of(keys.long + hashed):
                return "foreign"
            return "live" if hashed in hashes else "name"
        ours = key == f"{keys.own}format.json" or identity_of(keys, key)
        return "live" if ours else "foreign"

    def explained(self, space: Space) -> bool:
        """Whether, by the records, some node had that version or a newer one, and let it go."""
        return space.version <= self._had.get(space.namespace, -1)

    def unused_elsewhere(self, entry: Entry, age: float) -> bool:
        """Whether no other node can still use an object that was put aside at that time.

        A running node needs moments for that. A node that was not seen since may still use the
        object.
        """
        return all(node.refreshed > entry.modified + age for node in self._others)
