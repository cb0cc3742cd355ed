"""Checks of a pool before a mount: index, address, nginx. They block.

Contract: each function raises ConfigError with the value, what was expected and the cure, and
changes nothing. An index that does not answer is an IndexDownError. Not for a mounted kvfs, whose
loop must not block.
"""

import errno
import ipaddress
import os
import socket

import trio

from kvfs.errors import ConfigError
from kvfs.pool import addresses, certificates, nginx
from kvfs.pool.addresses import IP
from kvfs.pool.connection import NO_HOST, USE_PLAIN, USE_TLS
from kvfs.pool.errors import IndexDownError, IndexRefusedError
from kvfs.pool.index import Index
from kvfs.pool.member import Membership
from kvfs.pool.place import PoolPlace
from kvfs.pool.servers import NO_MASTER, Servers

ANSWER_S = 5.0  # s for an index to answer
TRY_S = 0.05  # s between two questions meanwhile


def expect_usable(member: Membership, *, required: bool) -> None:
    """Check this node's part and the index.

    Raises ConfigError, also for an index that kvfs cannot use, and IndexDownError if the index is
    required and does not answer.
    """
    nginx.installed()
    nginx.account()
    if member.tls is not None:
        certificates.expect_match(member.tls)
    ip, port = _address(member)
    if member.tls is None and not member.allow and not ip.is_loopback:
        raise ConfigError(
            f"pool_address={member.address}: all of its network could read the objects; give "
            "pool_allow=NETWORK or pool_tls=DIRECTORY"
        )
    _expect_address(member, ip, port)
    failures: list[Exception] = []
    trio.run(_ask, member, failures)
    for error in failures:
        if required or not isinstance(error, IndexDownError):
            raise error


async def _ask(member: Membership, failures: list[Exception]) -> None:
    servers = Servers.of_member(member)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(servers.run)
        try:
            await _expect_index(member, Index(servers))
        except (ConfigError, IndexDownError) as error:
            failures.append(error)
        nursery.cancel_scope.cancel()


async def _expect_index(member: Membership, index: Index) -> None:
    """Wait for the index, and check it. Raises ConfigError, IndexDownError."""
    until = trio.current_time() + ANSWER_S
    while True:
        try:
            await index.expect_usable()
            break
        except IndexRefusedError as error:
            why = _bare(error, member.place)
            raise ConfigError(f"pool={member.place}: kvfs cannot use this index: {why}") from None
        except IndexDownError as error:
            if trio.current_time() > until:
                why = _bare(error, member.place)
                raise IndexDownError(
                    f"pool={member.place}: {why}; {_cure(why)}or mount without it by "
                    "pool_required=off"
                ) from None
            await trio.sleep(TRY_S)
    (lease,) = await index.leases([member.node])
    if lease is not None and (lease.machine, lease.mountpoint) != (
        member.machine,
        member.mountpoint,
    ):
        raise ConfigError(
            f"pool={member.place}: the live node {lease.name} has the identity of this NVMe "
            "directory: it uses the directory, or the directory was copied; give an empty one to "
            "nvme="
        )


def _bare(error: IndexDownError, place: PoolPlace) -> str:
    """Return the text of an error without the place at its begin."""
    host, port = place.hosts[0]
    text = str(error).removeprefix("pool=").removeprefix(f"{place}: ")
    return text.removeprefix(f"index {host}:{port}: ") if place.kind == "single" else text


def _cure(why: str) -> str:
    """Return what mends an index that does not answer, if `why` does not say it."""
    if NO_HOST in why:
        return "correct the host in pool=, "
    if NO_MASTER in why:
        return "correct the service in pool=, "
    return "" if USE_PLAIN in why or USE_TLS in why else "start the index, "


def _address(member: Membership) -> tuple[IP, int]:
    """Return the address at which others read from here. Raises ConfigError."""
    found = addresses.parse(member.address)
    if found is None:
        raise ConfigError(
            f"pool_address={member.address}: expected IP or IP:PORT, as 10.0.0.5:7373, with "
            "no wildcard, multicast address or zone"
        )
    return found


def _expect_address(member: Membership, ip: IP, port: int) -> None:
    family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET  # noqa: PLR2004
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trying.bind((str(ip), port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and nginx.Nginx(member.folder).pids:
                return  # the server of a killed daemon has it, and is taken over or ended
            raise ConfigError(
                f"pool_address={member.address}: {os.strerror(error.errno or 0)}; expected an "
                "address of this machine, with a free port"
            ) from None


def with_port(address: str, port: int) -> str:
    """Return IP:PORT for an IP, and any other text as it is."""
    try:
        ip = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return address
    if "%" in address:  # a zone, that only this machine knows
        return address
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"  # noqa: PLR2004


def own_address(place: PoolPlace) -> str:
    """Return the address of this machine that reaches the index."""
    host, there = place.hosts[0]
    try:
        family, *_, to = socket.getaddrinfo(host, there, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as trying:
            trying.connect(to)  # sends nothing
            found: str = trying.getsockname()[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"pool={place}: the host {host!r} has no address: {error}; correct the host in pool="
        ) from None
    except OSError as error:
        raise ConfigError(
            f"pool={place}: {host} cannot be reached: {error}; give pool_address=IP:PORT"
        ) from None
    return found
