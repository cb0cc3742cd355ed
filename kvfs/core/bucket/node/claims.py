"""What a node has in a bucket, as far as others must know it: its namespaces, and exceptions.

Contract: `spaces` is what its record says (`kvfs.s3.nodes`). An object is in the bucket at a key of
its namespace, but for what has another name now and is yet to be copied there: `strays` are the
keys of those, and all that do not tell whose they are. Not for writing records: `announcement`.
"""

from dataclasses import asdict
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Catalog, audit, keys
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.s3.keys import Keys, Space
from kvfs.tiers import Bucket

STEP = 128  # marks between two turns of the loop
STEPS = 100  # in one answer


def spaces(namespaces: Namespaces) -> frozenset[Space]:
    """Return the namespaces, but for the mount's own, with their versions."""
    return frozenset(
        Space(name.encode("utf-8", "surrogateescape"), one.settings.version)
        for one in namespaces
        if one.ino != ROOT_INO and (name := namespaces.name(one.ino))
    )


def strays(
    catalog: Catalog, bucket_keys: Keys, has: frozenset[Space], after: int
) -> tuple[list[str], int]:
    """Look at STEP marks behind an inode: the keys that are strays, and where to go on; 0: done.

    A mark that makes no sense is for fsck.
    """
    marks = catalog.marks(keys.STORED, after=after, limit=STEP)
    found = []
    for _, value in marks:
        stored = audit.stored(value)
        if stored is None:
            continue
        name = bucket_keys.parse(stored.key)
        own = name is not None and not name.namespace
        if name is None or not (own or Space(name.namespace, name.version) in has):
            found.append(stored.key)
    return found, marks[-1][0] if len(marks) == STEP else 0


async def describe(
    namespaces: Namespaces, bucket: Bucket, identity: str, notes: str, after: int
) -> dict[str, Any]:
    """Return what `kvfs gc` asks for, with some of the strays: behind inode `after`."""
    has = spaces(namespaces)
    found: list[str] = []
    for _ in range(STEPS):
        more, after = strays(namespaces.catalog, bucket.keys, has, after)
        found += more
        if not after:
            break
        await trio.lowlevel.checkpoint()
    return {
        "place": asdict(bucket.place),
        "identity": identity,
        "notes": notes,
        "namespaces": sorted(map(str, has)),
        "strays": found,
        "after": after,
    }
