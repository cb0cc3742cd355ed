"""The object that describes a prefix: its format, and whether one kvfs has it to itself.

Contract: `claim` changes no existing object. If two nodes claim a new prefix at once, both see the
first one's object if the store publishes once, else the last one's. Not for the meaning of the
objects.
"""

import json
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.s3.errors import NoObjectError, ObjectExistsError
from kvfs.s3.facts import FORMAT
from kvfs.s3.keys import Keys
from kvfs.s3.transfer import StoreTransfers

_LIMIT = 4096  # bytes


class Marker(NamedTuple):
    """owner: the identity of the only kvfs that may use the prefix; "" if any may."""

    format: int
    owner: str


def claim(transfers: StoreTransfers, keys: Keys, identity: str, *, exclusive: bool) -> Marker:
    """As `look`, but describe the prefix if no object does."""
    found = look(transfers, keys, identity, exclusive=exclusive)
    if found is not None:
        return found
    fresh = Marker(FORMAT, identity if exclusive else "")
    key, _ = _where(transfers, keys)
    try:
        transfers.put(key, json.dumps(fresh._asdict()).encode(), {}, once=True)
    except ObjectExistsError:
        return look(transfers, keys, identity, exclusive=exclusive) or fresh
    return fresh


def look(transfers: StoreTransfers, keys: Keys, identity: str, *, exclusive: bool) -> Marker | None:
    """Return the description of the prefix, None if there is none. `identity` is this kvfs's.

    Raises ConfigError if the format is newer, if the prefix belongs to another kvfs, or if others
    may use a prefix that is to be `exclusive`. Also raises the errors of `StoreTransfers`.
    """
    _, where = _where(transfers, keys)
    found = read(transfers, keys)
    if found is None:
        return None
    if found.owner not in {"", identity}:
        raise ConfigError(
            f"{where}: the prefix belongs to kvfs {found.owner} alone, this kvfs is {identity}; "
            "give another prefix, or delete this object if the other kvfs is gone for good"
        )
    if exclusive and not found.owner:
        raise ConfigError(
            f"{where}: the prefix is shared with other nodes; give another one, or s3_exclusive=off"
        )
    return found


def _where(transfers: StoreTransfers, keys: Keys) -> tuple[str, str]:
    """The object's key, and its name for messages."""
    key = f"{keys.own}format.json"
    return key, f"{transfers.store.name}/{key}"


def read(transfers: StoreTransfers, keys: Keys) -> Marker | None:
    """Return the description of a prefix; None if there is none."""
    key, where = _where(transfers, keys)
    try:
        text = transfers.read(key, _LIMIT)
    except NoObjectError:
        return None
    try:
        told = json.loads(text)
        found = Marker(told["format"], told["owner"])
    except (ValueError, TypeError, KeyError, RecursionError):
        found = Marker(0, "")
    if type(found.format) is not int or found.format < 1 or not isinstance(found.owner, str):
        raise ConfigError(f"{where}: kvfs did not write this object; give another prefix")
    if found.format > FORMAT:
        raise ConfigError(
            f"{where}: the prefix has format {found.format}, this kvfs knows {FORMAT}; mount it "
            "with a newer kvfs, or give another prefix"
        )
    return found
