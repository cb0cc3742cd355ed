"""The addresses of metrics and the page: values of `metrics` and `web`, and the sockets there.

Contract: addresses are numbers only, so that no name has to be resolved; `localhost` is 127.0.0.1.
A port alone is one of 127.0.0.1. A path is a Unix socket for the user of the mount, and root. Not
for serving.
"""

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from kvfs.errors import ConfigError

LOOPBACK = "127.0.0.1"
PORT_MAX = 65535
BACKLOG = 16  # scrapes that may wait
PATH_MAX = 107  # bytes of the name of a Unix socket
EXPECTED = (
    "PORT (on 127.0.0.1), ADDRESS:PORT such as 10.0.0.1:9095 or [::1]:9095, or the absolute path "
    f"of a socket of at most {PATH_MAX} bytes"
)


class Address(NamedTuple):
    """Either `path`, or a numeric `host` with a `port`."""

    host: str
    port: int
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address that the text means. ValueError says which form was expected."""
        if text.startswith("/"):
            path = os.path.normpath(text)
            if len(os.fsencode(path)) > PATH_MAX or "\0" in path:
                raise ValueError(EXPECTED)
            return cls("", 0, path)
        found = re.fullmatch(
            r"(?:(?:\[([0-9a-fA-F:.]+)\]|([0-9.]+|localhost)):)?([0-9]{1,5})", text
        )
        if found is None or not 1 <= int(found[3]) <= PORT_MAX:
            raise ValueError(EXPECTED)
        host = found[1] or found[2] or LOOPBACK
        host = LOOPBACK if host == "localhost" else host
        try:
            known = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(EXPECTED) from None
        if isinstance(known, ipaddress.IPv6Address) != bool(found[1]):
            raise ValueError(EXPECTED)
        return cls(str(known), int(found[3]))

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        return self.path or f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def private(self) -> bool:
        """Return whether only processes of this machine can connect."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    def overlaps(self, other: "Address") -> bool:
        """Return whether a listener on the other address keeps others from this one."""
        if self == other:
            return True
        return self.port == other.port and (_includes(self, other) or _includes(other, self))

    def listen(self, option: str) -> socket.socket:
        """Listen on the address, for that option. Raises ConfigError if it cannot be had."""
        if self.path:
            self._clear(option)
            family = socket.AF_UNIX
        else:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            if not self.path:  # connections of the daemon before it may not have ended yet
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(self.path or (self.host, self.port))
            if self.path:
                os.chmod(self.path, 0o600)
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"{option}={self} cannot be used: {error.strerror}; choose another address"
            ) from error
        return listening

    def _clear(self, option: str) -> None:
        """Remove the socket that a dead daemon has left at the path, and nothing else.

        Raises ConfigError.
        """
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise ConfigError(
                    f"{option}={self}: the path exists, and is no socket: give another path"
                )
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.setblocking(False)  # noqa: FBT003 (socket's own)
                try:
                    asking.connect(self.path)
                except ConnectionRefusedError:
                    os.unlink(self.path)
                    return
                except BlockingIOError:  # a process listens, and is busy
                    pass
            raise ConfigError(f"{option}={self}: another process listens there; choose another")

    def remove(self) -> None:
        """Remove the name of a socket after the end of the mount."""
        if self.path:
            Path(self.path).unlink(missing_ok=True)


def _includes(everywhere: Address, one: Address) -> bool:
    """Return whether a listener at the first gets connections to the other; `::` has IPv4, too."""
    if everywhere.path or one.path or not ipaddress.ip_address(everywhere.host).is_unspecified:
        return False
    return ":" in everywhere.host or ":" not in one.host


def check_different(wanted: Mapping[str, Address]) -> None:
    """Raise ConfigError if one of these options would keep another from its address."""
    for (option, address), (other, second) in combinations(wanted.items(), 2):
        if address.overlaps(second):
            raise ConfigError(
                f"{option}={address} and {other}={second} are one address: give each its own"
            )


def check_free(wanted: Mapping[str, Address], held: Collection[Address]) -> None:
    """Raises ConfigError unless these options can have their addresses, all at a time.

    It listens on each for a moment, except on those that the present daemon holds and will give up.
    """
    with ExitStack() as taken:
        for option, address in wanted.items():
            if not any(address.overlaps(one) for one in held):
                taken.enter_context(address.listen(option))
                taken.callback(address.remove)


def is_private(listening: socket.socket) -> bool:
    """Return whether only processes of this machine can connect to a socket."""
    if listening.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
