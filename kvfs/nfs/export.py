"""The export of a mount and its clients, in the configuration language of both servers. Pure.

Contract: `Export` holds the parsed request; `ganesha` and `line` turn it into the configuration of
a server. The defaults are safe: loopback only, a client's root is nobody, source ports are
privileged. Networks whose root stays root are an option of their own. Raises ConfigError. Not for
processes, nor for files.

A handle must mean the same object as long as that lives, and nothing afterwards. No catalog gives
out an inode number twice (`kvfs.catalog`), so the number is enough for a handle. FSAL_VFS puts the
number of the device before it, which the kernel gives anew to each mount. With `Major64` FSAL_VFS
uses the device's major half instead. That is 0 for all file systems without a device, so handles
survive an unmount. A server of that kind can have one such export only.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from kvfs.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = ("127.0.0.0/8", "::1/128")
NOBODY = 65534
EVERYWHERE = "0.0.0.0"  # noqa: S104 (only on request; the networks of the export bound it)
NFS_PORT, MOUNTD_PORT = 2049, 20048
LONGEST_PREFIX = 99  # bits, the most that nfs-ganesha takes
_MARK = "# kvfs at"  # the first words of a configuration
MOST = (1 << 32) - 2  # of user and group ids; -1 is none
_ODD = re.compile(r'["\\\0-\x1f\x7f]')  # exports(5) cannot quote these


@dataclass(frozen=True, slots=True)
class Export:
    """One export. `fsid` tells file systems apart for clients: it is the identity of the storage.

    Root of the networks `keep_root` stays root. With `act_as`, a user and a group id, all users act
    as these. With `any_port` programs of ordinary users may be clients.
    """

    path: Path
    fsid: UUID
    allow: tuple[Network, ...]
    keep_root: tuple[Network, ...] = ()
    act_as: tuple[int, int] | None = None
    read_only: bool = False
    any_port: bool = False

    def __post_init__(self) -> None:
        if _ODD.search(str(self.path)):
            raise ConfigError(
                f"{str(self.path)!r}: expected a path without quotes, backslashes and control "
                "characters, which NFS servers cannot read"
            )
        if self.act_as is not None and self.keep_root:
            raise ConfigError("--no-root-squash contradicts --all-as: give one of the two")
        for network in self.keep_root:
            if not any(_within(network, allowed) for allowed in self.allow):
                raise ConfigError(
                    f"--no-root-squash {network}: expected a network within those of --allow: "
                    f"{', '.join(map(str, self.allow))}"
                )

    @property
    def private(self) -> bool:
        """Return whether only this machine is let in."""
        return all(network.is_loopback for network in self.allow)

    def line(self) -> str:
        """Return the export for exports(5)."""
        options = ["ro" if self.read_only else "rw", "sync", "no_subtree_check"]
        options += [f"fsid={self.fsid}"]
        options += ["insecure"] * self.any_port
        uid, gid = self.act_as or (NOBODY, NOBODY)
        mapped = [f"anonuid={uid}", f"anongid={gid}"]
        squashed = ["all_squash" if self.act_as else "root_squash", *mapped]
        clients = [(network, ["no_root_squash"]) for network in self.keep_root]
        clients += [(one, squashed) for one in self.allow if one not in self.keep_root]
        told = [f"{network}({','.join(options + squash)})" for network, squash in clients]
        return f'"{self.path}" {" ".join(told)}\n'

    def ganesha(self, server: "NfsServer") -> str:
        """Return the export for ganesha-config(8)."""
        versions = "3, 4" if server.mountd_port else "4"
        uid, gid = self.act_as or (NOBODY, NOBODY)
        squash = "All_Squash" if self.act_as else "Root_Squash"
        clients = [_client(self.keep_root, "No_Root_Squash")] if self.keep_root else []
        clients += [_client(self.allow, squash)]
        # This is the server's own default, and without a network but loopback it cannot be set.
        bind = "" if server.address == EVERYWHERE else f"    Bind_Addr = {server.address};\n"
        access = "RO" if self.read_only else "RW"
        return f"""\
{_MARK} {self.path}, for nfs-ganesha 4 with FSAL_VFS (docs/nfs.md)
NFS_CORE_PARAM {{
    NFS_Port = {server.port};
    MNT_Port = {server.mountd_port};
{bind}    Protocols = {versions};
    Enable_UDP = false;
    Enable_NLM = false;       # no locks for NFSv3: clients mount with nolock
    Enable_RQUOTA = false;
    mount_path_pseudo = true;
    Getattrs_In_Complete_Read = false;  # the end of a file is where reading finds it
    Dbus_Name_Prefix = kvfs_{self.fsid.hex};
}}
NFSV4 {{
    Minor_Versions = 0, 1, 2;
    Only_Numeric_Owners = true;
    Graceless = true;         # there is nothing that a restart could give to somebody else
    RecoveryBackend = fs;
    RecoveryRoot = {_text(server.folder)};
}}
NFS_KRB5 {{
    Active_krb5 = false;
}}
MDCACHE {{
    Dir_Chunk = 0;            # names come and go without this server's knowledge
    FD_LWMark_Percent = 0;    # what it has open is never dropped: it is to close what is not used,
    LRU_Run_Interval = 1;     # and soon
}}
EXPORT {{
    Export_Id = 1;
    Path = {_text(self.path)};
    Pseudo = {_text(self.path)};
    Filesystem_Id = {self.fsid.int >> 64}.{self.fsid.int & (1 << 64) - 1};
    Protocols = {versions};
    Transports = TCP;
    SecType = sys;
    Access_Type = None;       # but for the clients below
    Squash = {squash};
    Anonymous_Uid = {uid};
    Anonymous_Gid = {gid};
    PrivilegedPort = {"false" if self.any_port else "true"};
    Attr_Expiration_Time = 0; # others write here too
    Disable_ACL = true;
    FSAL {{
        Name = VFS;
        fsid_type = Major64;
    }}
{_indented(clients, access)}}}
LOG {{
    Default_Log_Level = EVENT;
}}
"""


@dataclass(frozen=True, slots=True)
class NfsServer:
    """The addresses of a server of its own. `mountd_port` 0: no NFSv3."""

    address: str
    port: int
    mountd_port: int
    folder: Path  # for the server's own files


def is_ours(text: bytes) -> bool:
    """Return whether it is a configuration that `Export` has made, perhaps of another mount."""
    line = rb'"/[^"]*" \S+\(r[ow],sync,no_subtree_check,fsid=[^)]*\)[^\n]*\n'
    return text.startswith(_MARK.encode()) or bool(re.fullmatch(line, text))


def networks(option: str, texts: Iterable[str]) -> tuple[Network, ...]:
    """Return addresses and networks of texts like 10.0.0.0/8, fd00::/8, 192.0.2.7.

    Raises ConfigError.
    """
    found = []
    for text in texts:
        try:
            if "%" in text:  # the zone of an address, which may be any text
                raise ValueError("without a zone")
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigError(
                f"{option} {text}: expected an address or a network such as 10.1.0.0/16 ({error})"
            ) from None
    return tuple(dict.fromkeys(found))


def owner(option: str, text: str) -> tuple[int, int]:
    """Return the numbers of UID:GID. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,10}):(\d{1,10})", text, re.ASCII)
    if found is None or max(int(found[1]), int(found[2])) > MOST:
        raise ConfigError(f"{option} {text}: expected UID:GID in numbers, such as 1000:1000")
    return int(found[1]), int(found[2])


def _within(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]


def _text(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\") + '"'


def _client(allowed: Iterable[Network], squash: str) -> tuple[str, str]:
    return ", ".join(word for network in allowed for word in _words(network)), squash


def _words(network: Network) -> list[str]:
    """Return the network as prefixes of 1 to 99 bits, as ganesha's parser takes them.

    See src/config_parsing/conf_lex.l, CIDR.
    """
    if network.prefixlen == network.max_prefixlen:
        return [str(network.network_address)]
    if network.prefixlen == 0:
        return [str(half) for half in network.subnets()]
    if network.prefixlen > LONGEST_PREFIX:
        raise ConfigError(
            f"--allow {network}: expected a single address or a prefix up to /{LONGEST_PREFIX}, "
            "as nfs-ganesha needs"
        )
    return [str(network)]


def _indented(clients: Iterable[tuple[str, str]], access: str) -> str:
    """Return the blocks of clients; the first block that has a client counts for it."""
    return "".join(
        f"    CLIENT {{\n        Clients = {who};\n        Access_Type = {access};\n"
        f"        Squash = {squash};\n    }}\n"
        for who, squash in clients
    )
