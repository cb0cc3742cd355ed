"""Addresses of nodes, IP:PORT: of this one from an option, of others from their leases.

Contract: pure. `parse` takes any text of any length, and returns an address to which a node can
connect, or None. An IPv6 address is in brackets, and has no zone: a zone means another link on each
machine.
"""

import ipaddress
import re
from typing import TypeAlias

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_ADDRESS = re.compile(r"(?P<host>[0-9.]{1,15}|\[[0-9A-Fa-f:.]{1,45}\]):(?P<port>[0-9]{1,5})")
_EVERYBODY = ipaddress.IPv4Address("255.255.255.255")


def parse(text: str) -> tuple[IP, int] | None:
    """Return the IP and the port of a text; None if no node can have them."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return None
    try:
        ip = ipaddress.ip_address(found["host"].strip("[]"))
    except ValueError:
        return None
    port = int(found["port"])
    wrong = ip.is_unspecified or ip.is_multicast or ip == _EVERYBODY
    return None if wrong or not 0 < port < 1 << 16 else (ip, port)
