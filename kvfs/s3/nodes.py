"""What each node says of itself below the prefix: `.kvfs/nodes/IDENTITY.json` (docs/format.md).

Contract: nodes share a prefix, each with a catalog of its own; a key is of use as long as some node
has its namespace in its version. `publish` writes what a node has. It keeps what that once had as
long as something is left of it, so that it can be told from what a kvfs without a record has
written. `Nodes.look` reads all records; the age of one is by the store's clock. Not for judging
keys: `garbage`.
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
from kvfs.s3.transfer import Transfers

LOOKED_FOR = 64  # namespaces of which it is asked at a time whether anything is left
_LIMIT = 16 << 20  # bytes
_TEXTS = ("identity", "host", "mountpoint")
_IDENTITY = re.compile(r"[A-Za-z0-9-]{1,64}")


@dataclass(frozen=True, slots=True)
class Node:
    """`has`: its namespaces, but for the mount's own. `had`: the newest versions it let go.

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
    """Return whose record has this key; "" if it is none."""
    identity = key.removeprefix(keys.nodes).removesuffix(".json")
    return identity if _IDENTITY.fullmatch(identity) and key == key_of(keys, identity) else ""


def newest(spaces: Iterable[Space]) -> frozenset[Space]:
    """Return the newest version of each namespace."""
    found: dict[bytes, int] = {}
    for space in spaces:
        found[space.namespace] = max(space.version, found.get(space.namespace, -1))
    return frozenset(Space(*item) for item in found.items())


def publish(transfers: Transfers, keys: Keys, node: Node, *, keep: bool = False) -> Node:
    """Write what a node has now; return what its record says.

    keep: it still has what its record says that it had, too.
    Raises MetadataError if what is there is no record of this format, and what `Transfers` raises.
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


def _left(transfers: Transfers, keys: Keys, had: frozenset[Space]) -> frozenset[Space]:
    """Return those of which there may be something, looking for a few of them.

    What has a name too long for a key may be of any of them.
    """
    if not had or transfers.store.list(keys.long, limit=1).entries:
        return had
    looked_for = random.sample(sorted(had), min(LOOKED_FOR, len(had)))
    return had - {space for space in looked_for if not _is_left(transfers, keys, space)}


def _is_left(transfers: Transfers, keys: Keys, space: Space) -> bool:
    """Whether there is anything of a version that is no newer."""
    page = transfers.store.list(keys.versions(space.namespace), delimiter="/")
    found = [keys.parse_folder(folder) for folder in page.folders]
    return bool(page.after) or any(one and one.version <= space.version for one in found)


@dataclass(slots=True)
class Nodes:
    """Reads records again only when they were written anew. `unread`: why some make no sense."""

    transfers: Transfers
    keys: Keys
    unread: dict[str, str] = field(default_factory=dict)  # by identity, or key
    _seen: dict[str, tuple[Entry, Node]] = field(default_factory=dict)

    def look(self) -> list[Node]:
        """Return those that there are now. Raises what `Transfers` raises."""
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


def _read(transfers: Transfers, keys: Keys, key: str, refreshed: float) -> Node:
    where = f"{transfers.store.name}/{key}"
    cure = "read it with a newer kvfs, or delete that object if its node is gone for good"
    try:
        told = json.loads(transfers.read(key, _LIMIT))
        if type(told["format"]) is not int or told["format"] != FORMAT:
            raise MetadataError(f"{where}: has format {told['format']!r}, expected 1; {cure}")
        identity, host, mountpoint = (str(told[name]) for name in _TEXTS)
        has, had = (_spaces(told[name]) for name in ("namespaces", "had"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MetadataError(f"{where}: is no record of a node ({error!r}); {cure}") from error
    if identity != identity_of(keys, key):
        raise MetadataError(f"{where}: is of node {identity!r}, not what its key says; {cure}")
    return Node(identity, host, mountpoint, has, had, refreshed)


def _spaces(told: object) -> frozenset[Space]:
    if not isinstance(told, list):
        raise TypeError(f"{told!r} is no list")
    found = [Space.parse(text) for text in told]
    if None in found:
        raise ValueError(f"{told[found.index(None)]!r} is no namespace with its version")
    return frozenset(space for space in found if space is not None)
