"""Which sessions of a catalog there were, and which of them a power loss makes suspect.

A session is one mount. Nothing is changed here: the daemon begins the next one.
"""

import re
from typing import NamedTuple

from kvfs import mounts, runtime
from kvfs.catalog import Catalog
from kvfs.errors import ConfigError

NUMBER = re.compile(r"[0-9]{1,19}")


class Past(NamedTuple):
    """`low` to `high` are suspect: bytes on NVMe only a digest can vouch for; 1 to 0 for none."""

    last: int
    ended: int  # the last that ended properly
    same_mount: bool  # its file system is mounted since
    low: int
    high: int


def past_sessions(catalog: Catalog) -> Past:
    """Raises ConfigError for facts that make no sense.

    Suspect are those after the last one that ended properly, if the machine went down since, or
    the file system was unmounted: it may have been shut down by an error before. Their bytes may
    not have reached the disk, whatever the file system says.
    """
    try:
        last = int(catalog.fact("session") or 0)
        ended = int(catalog.fact("clean") or 0)
        low, high = map(int, (catalog.fact("suspect") or "1 0").split())
    except ValueError as error:
        raise ConfigError(
            f"catalog {catalog.path}: its facts about sessions make no sense ({error}): "
            "run kvfs fsck --repair on the NVMe directory"
        ) from error
    same_mount = catalog.fact("boot") == mounted_as(catalog)
    if ended < last and not same_mount:
        low, high = low if low <= high else ended + 1, last
    return Past(last, ended, same_mount, low, high)


def ram_epoch(catalog: Catalog) -> int:
    """Which life of the memory the catalog knows, 0 for none. Raises ConfigError."""
    found = catalog.fact("ram_epoch") or "0"
    if not NUMBER.fullmatch(found):
        raise ConfigError(
            f"catalog {catalog.path}: its fact ram_epoch is {found[:60]!r}, expected a number: "
            "run kvfs fsck --repair on the NVMe directory"
        )
    return int(found)


def mounted_as(catalog: Catalog) -> str:
    """Names a mount of the catalog's file system, of all that ever were."""
    return f"{runtime.boot_id()} {mounts.number(catalog.path)}"
