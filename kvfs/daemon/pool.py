"""The pool of a mount, before it serves: what the options say, checked.

Contract: `prepare` returns this node's membership, or raises ConfigError and changes nothing. A
takeover asks nothing: the pool may be down.
"""

import os
import secrets
import socket
from pathlib import Path

from kvfs import own_files, runtime
from kvfs.config import Config
from kvfs.errors import ConfigError
from kvfs.pool.member import Membership
from kvfs.pool.nginx import EXTRA

PORT = 7373  # of nginx, if pool_address has none


def prepare(config: Config, directory: Path, *, identity: str, takeover: bool) -> Membership | None:
    """Return the membership that the options describe; None without a pool."""
    place = config.pool_place
    if place is None:
        return None
    try:
        from kvfs.pool import check, credentials  # noqa: PLC0415 (it needs the extra)
    except ImportError as error:
        raise ConfigError(f"pool={place}: {error.name} is not installed: {EXTRA}") from None
    noted = directory / "pool"
    address = config.pool_address or check.own_address(place)
    member = Membership(
        place=place,
        credentials=credentials.read(config.pool_credentials, os.environ),
        credentials_file=config.pool_credentials,
        node=identity,
        incarnation=_incarnation(noted, takeover=takeover),
        address=check.with_port(address, PORT),
        folder=directory / "nginx",
        host=socket.gethostname(),
        machine=runtime.machine(),
        mountpoint=str(config.mountpoint),
        allow=config.pool_networks,
        tls=config.pool_tls,
    )
    if not takeover:
        check.expect_usable(member, required=config.pool_required)
        own_files.write(noted, member.incarnation)
    return member


def _incarnation(noted: Path, *, takeover: bool) -> str:
    """A new one for each mount: entries of an earlier one may mean files that are gone."""
    known = own_files.read(noted, "the incarnation of a node", "") if takeover else ""
    return known or secrets.token_hex(8)
