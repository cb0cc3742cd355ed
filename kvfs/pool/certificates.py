"""The certificates of a node: ca.pem, cert.pem and key.pem in the directory of `pool_tls=`.

Contract: each function reads the files when it is called, and raises ConfigError with the directory
and the cure. The authority in ca.pem is the pool's own: it vouches for each node, so a certificate
needs no name. The certificate of the index needs the name by which the index is asked.
"""

import errno
import ssl
import stat
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvfs.errors import ConfigError

FILES = ("ca.pem", "cert.pem", "key.pem")
State: TypeAlias = tuple[tuple[int, ...], ...]


class Validity(NamedTuple):
    """When a certificate is valid: from and until, in s since 1970."""

    since: float
    until: float


def state(folder: Path) -> State:
    """Return what each renewal of the files changes. A file that is missing counts as empty."""
    return tuple(state_of(folder / name) for name in FILES)


def state_of(file: Path) -> tuple[int, ...]:
    """Return what each change of a file or its mode changes, also of the file behind a link."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


def of_peers(folder: Path) -> ssl.SSLContext:
    """Return a context that knows only the pool's own authority, and shows our certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # nodes are addresses
    _load(context, folder)
    return context


def of_index(folder: Path | None) -> ssl.SSLContext:
    """Return a context for the index: it knows the machine's authorities, and the pool's."""
    context = ssl.create_default_context()
    if folder is not None:
        _load(context, folder)
    return context


def expect_match(folder: Path) -> Validity:
    """Check that a node with these files accepts itself: a handshake in memory.

    Returns when its certificate is valid, or ends with the last authority.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    _load(server, folder)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = of_peers(folder)
    client = context.wrap_bio(to_client, to_server)
    ends = [client, server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        while ends:
            ends = [end for end in ends if not _is_done(end)]
    except ssl.SSLError as error:
        raise ConfigError(
            f"pool_tls={folder}: {error}: expected a cert.pem that ca.pem has signed, and that is "
            "valid now"
        ) from None
    found = client.getpeercert() or {}
    until = _time(found["notAfter"])
    authorities = [_time(one["notAfter"]) for one in context.get_ca_certs()]
    return Validity(_time(found["notBefore"]), min(until, max(authorities, default=until)))


def _time(text: object) -> float:
    """Return a time of `SSLSocket.getpeercert` in s since 1970."""
    return float(ssl.cert_time_to_seconds(str(text)))


def _is_done(end: ssl.SSLObject) -> bool:
    """Take a step of a handshake, and return whether that was the last. Raises SSLError."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _load(context: ssl.SSLContext, folder: Path) -> None:
    for name in FILES:
        try:
            if not stat.S_ISREG((folder / name).stat().st_mode):  # a pipe would never be read
                raise FileNotFoundError(errno.ENOENT, "it is no file")
            (folder / name).open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"pool_tls={folder}: {name}: {error.strerror}: expected ca.pem, cert.pem and "
                "key.pem in it"
            ) from None
    ca, cert, key = (folder / name for name in FILES)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(
            f"pool_tls={folder}: {error}: expected certificates of an authority in ca.pem"
        ) from None
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"pool_tls={folder}: key.pem is not the key of cert.pem: write both of one "
                "certificate"
            ) from None
        raise ConfigError(
            f"pool_tls={folder}: {error}: expected a certificate in cert.pem, and its key without "
            "a password in key.pem"
        ) from None
