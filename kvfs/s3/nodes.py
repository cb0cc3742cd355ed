"""The record of each node below the prefix: `.kvfs/nodes/IDENTITY.json` (docs/format.md).

Contract: nodes share a prefix, and each has a catalog of its own. A key is useful as long as some
node has its namespace in its version. `publish` writes the namespaces that a node has. The record
also keeps former versions as long as the bucket has objects of them. So such objects can be told
from those of a kvfs without a record. `Nodes.look` reads all records; the store's clock gives the
age of a record. Not for judging keys: `garbage`.
"""

import json
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvfs.s3.errors import MetadataError, NoObjectError
from kvfs.s3.facts import FORMAT
from kvfs.s3.keys import Keys, Space
from kvfs.s3.store import Entry, pages
from kvfs.s3.transfer import StoreTransfers

LOOKED_FOR = 64  # namespaces that are checked for remaining objects at one time
_LIMIT = 16 << 20  # bytes
_TEXTS = ("identity", "host", "mountpoint")
_IDENTITY = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class Node:
    """`has`: its namespaces, except the mount's own. `had`: the newest versions that it let go.

    refreshed: when its record was written, by the store's clock; 0 before that.
    """

    identity: str
    host: str
    mountpoint: str
    has: frozenset[Space]
    had: frozenset[Space] = frozenset()
    refreshed: float = 0.0

    def to_json(self) -> str:
        """Return the content of its record. The time in it is for people."""
        return json.dumps(
            {
                "format": FORMAT,
                "identity": self.identity,
                "host": self.host,
                "mountpoint": self.mountpoint,
                "refreshed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "namespaces": sorted(map(str, self.has)),
                "had": sorted(map(str, self.had)),
            }
        )


def key_of(keys: Keys, identity: str) -> str:
    """Return the key of a node's record."""
    return f"{keys.nodes}{identity}.json"


def identity_of(keys: Keys, key: str) -> str:
    """Return the identity of the node whose record has this key; "" if it is no record."""
    identity = key.removeprefix(keys.nodes).removesuffix(".json")
    return identity if _IDENTITY.fullmatch(identity) and key == key_of(keys, identity) else ""


def newest(spaces: Iterable[Space]) -> frozenset[Space]:
    """Return the newest version of each namespace."""
    found: dict[bytes, int] = {}
    for space in spaces:
        found[space.namespace] = max(space.version, found.get(space.namespace, -1))
    return frozenset(Space(*item) for item in found.items())


def publish(transfers: StoreTransfers, keys: Keys, node: Node, *, keep: bool = False) -> Node:
    """Write which namespaces a node has now; return the node as recorded.

    keep: the node still has all namespaces of its last record, too. Raises MetadataError if the
    present record is not of this format, and the errors of `StoreTransfers`.
    """
    key = key_of(keys, node.identity)
    try:
        before = _read(transfers, keys, key, 0.0)
    except NoObjectError:
        has, had = node.has, node.had
    else:
        has = node.has | before.has if keep else node.has
        had = _left(transfers, keys, newest([*node.had, *before.had, *(before.has - has)]))
    written = Node(node.identity, node.host, node.mountpoint, has, had)
    transfers.put(key, written.to_json().encode(), {}, once=False)
    return written


def _left(transfers: StoreTransfers, keys: Keys, had: frozenset[Space]) -> frozenset[Space]:
    """Return the namespaces that may still have objects. Each call checks a few of them.

    An object whose name is too long for a key may be of any namespace.
    """
    if not had or transfers.store.list(keys.long, limit=1).entries:
        return had
    looked_for = random.sample(sorted(had), min(LOOKED_FOR, len(had)))
    return had - {space for space in looked_for if not _is_left(transfers, keys, space)}


def _is_left(transfers: StoreTransfers, keys: Keys, space: Space) -> bool:
    """Whether the bucket has an object of this version or an older one."""
    page = transfers.store.list(keys.versions(space.namespace), delimiter="/")
    found = [keys.parse_folder(folder) for folder in page.folders]
    return bool(page.after) or any(one and one.version <= space.version for one in found)


@dataclass(slots=True)
class Nodes:
    """All nodes. Reads only records that changed. `unread`: why some records are unreadable."""

    transfers: StoreTransfers
    keys: Keys
    unread: dict[str, str] = field(default_factory=dict)  # by identity, or key
    _seen: dict[str, tuple[Entry, Node]] = field(default_factory=dict)

    def look(self) -> list[Node]:
        """Return the present nodes. Raises the errors of `StoreTransfers`."""
        self.unread.clear()
        found = {}
        listed = pages(self.transfers.store, self.keys.nodes)
        for entry in (entry for page in listed for entry in page.entries):
            identity = identity_of(self.keys, entry.key)
            known = self._seen.get(entry.key)
            if known is not None and known[0] == entry:
                found[entry.key] = known
                continue
            try:
                node = _read(self.transfers, self.keys, entry.key, entry.modified)
            except NoObjectError:
                continue
            except MetadataError as error:
                self.unread[identity or entry.key] = str(error)
            else:
                found[entry.key] = (entry, node)
        self._seen = found
        return [node for _, node in found.values()]


def _read(transfers: StoreTransfers, keys: Keys, key: str, refreshed: float) -> Node:
    where = f"{transfers.store.name}/{key}"
    cure = "use a newer kvfs, or delete this object if its node is gone for good"
    try:
        told = json.loads(transfers.read(key, _LIMIT))
        if type(told["format"]) is not int or told["format"] != FORMAT:
            raise MetadataError(f"{where}: has format {told['format']!r}, expected 1; {cure}")
        identity, host, mountpoint = (str(told[name]) for name in _TEXTS)
        has, had = (_spaces(told[name]) for name in ("namespaces", "had"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MetadataError(f"{where}: is no record of a node ({error!r}); {cure}") from error
    if identity != identity_of(keys, key):
        raise MetadataError(f"{where}: is of node {identity!r}, but its key names another; {cure}")
    return Node(identity, host, mountpoint, has, had, refreshed)


def _spaces(told: object) -> frozenset[Space]:
    if not isinstance(told, list):
        raise TypeError(f"{told!r} is no list")
    found = [Space.parse(text) for text in told]
    if None in found:
        raise ValueError(f"{told[found.index(None)]!r} is no namespace with its version")
    return frozenset(space for space in found if space is not None)
