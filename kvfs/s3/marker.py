"""The object that says what a prefix is: which format, and whether one kvfs has it to itself.

Contract: `claim` changes nothing that is there. Of two that claim a new prefix at once, both see
what the first one wrote if the store publishes once, else what the last one did. Not for what the
objects themselves say.
"""

import json
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.s3.errors import NoObjectError, ObjectExistsError
from kvfs.s3.facts import FORMAT
from kvfs.s3.keys import Keys
from kvfs.s3.transfer import Transfers

_LIMIT = 4096  # bytes


class Marker(NamedTuple):
    """owner: the identity of the only kvfs that may use the prefix; "" if any may."""

    format: int
    owner: str


def claim(transfers: Transfers, keys: Keys, identity: str, *, exclusive: bool) -> Marker:
    """As `look`, but write what the prefix is where nothing says so."""
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


def look(transfers: Transfers, keys: Keys, identity: str, *, exclusive: bool) -> Marker | None:
    """Return what the prefix is, if anything says so; it is for the kvfs of this identity.

    Raises ConfigError if it is of a newer format, or is another's, or others may use what is to be
    `exclusive`; and what `Transfers` raises.
    """
    _, where = _where(transfers, keys)
    found = read(transfers, keys)
    if found is None:
        return None
    if found.owner not in {"", identity}:
        raise ConfigError(
            f"{where}: the prefix belongs to kvfs {found.owner} alone, this one is {identity}; "
            "give another prefix, or delete that object if the other one is gone for good"
        )
    if exclusive and not found.owner:
        raise ConfigError(
            f"{where}: the prefix is shared with other nodes; give another one to have it alone"
        )
    return found


def _where(transfers: Transfers, keys: Keys) -> tuple[str, str]:
    """Its key, and what people call it."""
    key = f"{keys.own}format.json"
    return key, f"{transfers.store.name}/{key}"


def read(transfers: Transfers, keys: Keys) -> Marker | None:
    """Return what a prefix says of itself; None if nothing is there.

    Raises ConfigError if it is of a newer format, or none at all, and what `Transfers` raises.
    """
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
        raise ConfigError(f"{where}: is not what kvfs writes there; give another prefix")
    if found.format > FORMAT:
        raise ConfigError(
            f"{where}: the prefix has format {found.format}, this kvfs knows {FORMAT}; mount it "
            "with a newer kvfs, or give another prefix"
        )
    return found
