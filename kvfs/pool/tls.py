"""TLS of a pool: the contexts for connections to other nodes, and to the index.

Contract: a context is made from the folder of `pool_tls`, which has ca.pem, cert.pem and key.pem.
ConfigError names the folder if one of them is missing, or cannot be read. It reads files: call it
where waiting is allowed.
"""

import ssl
from functools import cache
from pathlib import Path

from kvfs.errors import ConfigError
from kvfs.pool.place import PoolPlace


@cache
def of_nodes(folder: Path) -> ssl.SSLContext:
    """Return a context that knows only the pool's own authority, and shows our certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nodes are addresses; the pool's authority vouches for them
    _load(context, folder)
    return context


def of_index(place: PoolPlace, folder: Path | None) -> ssl.SSLContext | None:
    """Return a context for an index by rediss, None for one by redis.

    It knows the authorities of this machine, and with a folder the pool's as well. The certificate
    of the index must have the name or the address that the option `pool` gives.
    """
    if not place.tls:
        return None
    context = ssl.create_default_context()
    if folder is not None:
        _load(context, folder)
    return context


def _load(context: ssl.SSLContext, folder: Path) -> None:
    try:
        context.load_verify_locations(folder / "ca.pem")
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except OSError as error:
        raise ConfigError(
            f"pool_tls={folder}: {error}: expected ca.pem, cert.pem and key.pem in it"
        ) from None
