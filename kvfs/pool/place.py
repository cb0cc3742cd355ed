"""The place of a pool, as the mount options give it, without a credential.

Contract: `PoolPlace.parse` takes one of these forms, or raises ValueError that says what it
expected. A place is plain data.

    redis://HOST[:PORT]/NAME                     one server
    redis+sentinel://HOST[:PORT],.../SERVICE/NAME    the sentinels, and the service that they watch
    redis+cluster://HOST[:PORT],.../NAME         some servers of a cluster

`rediss` instead of `redis` is TLS. NAME is the pool's: pools with other names may share the index.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

PORT, SENTINEL_PORT = 6379, 26379
HOSTS_MOST = 16
HOST_MOST = 253  # letters of a name in DNS

Kind = Literal["single", "sentinel", "cluster"]

_FORM = re.compile(
    r"redis(?P<tls>s)?(?:\+(?P<kind>sentinel|cluster))?://(?P<hosts>[^/]*)/(?P<rest>.*)"
)
_HOST = re.compile(
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
)
_LABELS = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*\.?")
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,64}")
EXPECTED = (
    "redis://HOST:PORT/NAME, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/NAME or "
    "redis+cluster://HOST:PORT,HOST:PORT/NAME, or the same with rediss for TLS"
)


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """An index and the name of a pool in it. `service`: of the sentinels, else empty."""

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    name: str
    service: str = ""

    @classmethod
    def parse(cls, url: str) -> "PoolPlace":
        """Return the place of a URL; ValueError says what was expected."""
        found = _FORM.fullmatch(url)
        if found is None:
            raise ValueError(EXPECTED)
        if "@" in found["hosts"]:
            raise ValueError(f"{EXPECTED}; give a user and a password by pool_credentials=FILE")
        kind: Kind = found["kind"] or "single"  # type: ignore[assignment]
        service, slash, name = found["rest"].rpartition("/")
        if bool(slash) != (kind == "sentinel") or (slash and not _NAME.fullmatch(service)):
            raise ValueError(EXPECTED)
        if not _NAME.fullmatch(name):
            raise ValueError("a NAME of 1 to 64 letters, digits, _ . and - at the end of the URL")
        default = SENTINEL_PORT if kind == "sentinel" else PORT
        hosts = tuple(_host(text, default) for text in found["hosts"].split(","))
        if len(hosts) > (1 if kind == "single" else HOSTS_MOST):
            raise ValueError(f"one HOST:PORT, or up to {HOSTS_MOST} of sentinels or a cluster")
        return cls(kind, bool(found["tls"]), hosts, name, service)

    def __str__(self) -> str:
        scheme = f"redis{'s' if self.tls else ''}{'' if self.kind == 'single' else f'+{self.kind}'}"
        hosts = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.hosts)
        path = f"{self.service}/{self.name}" if self.service else self.name
        return f"{scheme}://{hosts}/{path}"


def _host(text: str, default: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    port = int(found["port"] or default) if found else 0
    if found is None or not 0 < port < 1 << 16 or not _is_host(found["host"]):
        raise ValueError("HOST:PORT, with a name, an IPv4 address or an [IPv6] address")
    return found["host"].strip("[]"), port


def _is_host(text: str) -> bool:
    if text.startswith("["):
        try:
            ipaddress.IPv6Address(text.strip("[]"))
        except ValueError:
            return False
        return True
    return len(text) <= HOST_MOST and _LABELS.fullmatch(text) is not None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
