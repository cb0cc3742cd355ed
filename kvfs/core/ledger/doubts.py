"""Copies that a check found wrong but was not to change. The list survives a daemon's death.

Contract: `save` writes the list of doubted copies (`VerifiedTimes.doubt`) beside the catalog, and
`load` doubts them again. The next `save` leaves out copies that are gone. `load` refuses a file
that kvfs has not written, since it would not know which copies are doubted. Both wait for a disk.
Not for the fate of a doubted copy: the next open compares it (`copies`).
"""

import json
from pathlib import Path
from typing import Any

from kvfs import own_files
from kvfs.core.ledger.records import Records
from kvfs.errors import CatalogError

MOST = 10_000  # copies; `own_files` reads 1 MiB
_EXPECTED = "a list of copies that kvfs fsck has found wrong"
_CURE = "remove it, mount, and run kvfs fsck --hashes once more"


def load(records: Records) -> None:
    """Doubt the copies of the list again. Raises ConfigError."""
    path = _path(records)
    table = own_files.read_table(path, _EXPECTED, _CURE)
    if table is None:
        return
    copies = table.get("copies")
    if not isinstance(copies, list) or not all(map(_is_copy, copies)):
        raise own_files.wrong(path, json.dumps(table), _EXPECTED, _CURE)
    for ino, version, tier in copies:
        records.verified.doubt(ino, version, tier)


def listed(records: Records) -> list[tuple[int, int, str]]:
    """The copies that `save` is to write."""
    doubted = sorted(records.verified.doubted)
    return [copy for copy in doubted if _is_there(records, *copy)][:MOST]


def save(records: Records, copies: list[tuple[int, int, str]]) -> None:
    """Write the list, or remove it if there are no copies. Raises OSError."""
    path = _path(records)
    if copies:
        own_files.write(path, json.dumps({"copies": copies}))
    else:
        path.unlink(missing_ok=True)


def _path(records: Records) -> Path:
    return records.catalog.path.with_name("doubted")


def _is_copy(found: Any) -> bool:  # noqa: ANN401 (JSON)
    if not isinstance(found, list) or list(map(type, found)) != [int, int, str]:
        return False
    return all(0 <= number < 1 << 64 for number in found[:2])


def _is_there(records: Records, ino: int, version: int, tier: str) -> bool:
    try:
        inode = records.table.inode(ino)
    except CatalogError:  # it may be there
        return True
    if inode is None or inode.version != version:
        return False
    return tier in {holder.name for holder in records.tiers.holders(inode)}
