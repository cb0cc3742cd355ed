"""Which sessions of a catalog there were, and which of them a power loss makes suspect.

A session is one mount. This module changes nothing: the daemon begins the next session.
"""

import re
from typing import NamedTuple

from kvfs import mounts, runtime
from kvfs.catalog import Catalog
from kvfs.errors import ConfigError

NUMBER = re.compile(r"[0-9]{1,19}")


class Past(NamedTuple):
    """The sessions so far. `low` to `high` are suspect; 1 to 0 for none.

    Bytes of a suspect session on NVMe need a digest to be trusted.
    """

    last: int
    ended: int  # the last that ended properly
    same_mount: bool  # its file system is mounted since
    low: int
    high: int


def past_sessions(catalog: Catalog) -> Past:
    """Read the sessions of a catalog. Raises ConfigError for facts that make no sense.

    If the machine went down or the file system was unmounted since, all sessions after the last
    one that ended properly are suspect. An error may have shut the file system down before the
    unmount. Bytes of suspect sessions may not have reached the disk, even if the file system has
    no complaint.
    """
    try:
        last = int(catalog.fact("session") or 0)
        ended = int(catalog.fact("clean") or 0)
        low, high = map(int, (catalog.fact("suspect") or "1 0").split())
    except ValueError as error:
        raise ConfigError(
            f"catalog {catalog.path}: its facts about sessions are invalid ({error}): "
            "run kvfs fsck --repair on the NVMe directory"
        ) from error
    same_mount = catalog.fact("boot") == mounted_as(catalog)
    if ended < last and not same_mount:
        low, high = low if low <= high else ended + 1, last
    return Past(last, ended, same_mount, low, high)


def ram_epoch(catalog: Catalog) -> int:
    """The epoch of the RAM tier that the catalog knows, 0 for none. Raises ConfigError."""
    found = catalog.fact("ram_epoch") or "0"
    if not NUMBER.fullmatch(found):
        raise ConfigError(
            f"catalog {catalog.path}: its fact ram_epoch is {found[:60]!r}, expected a number: "
            "run kvfs fsck --repair on the NVMe directory"
        )
    return int(found)


def mounted_as(catalog: Catalog) -> str:
    """A name of the present mount of the catalog's file system; no other mount ever had it."""
    return f"{runtime.boot_id()} {mounts.number(catalog.path)}"
