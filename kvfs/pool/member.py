"""This node as a member of a pool: plain data, that the mount options are read into."""

from dataclasses import dataclass
from pathlib import Path

from kvfs.pool.credentials import Credentials
from kvfs.pool.place import PoolPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """This node as a member of a pool.

    node, incarnation: its identity, and that of its files: a new one if older entries of this node
    in the index mean other files. address: IP:PORT of its nginx. folder: nginx's files. allow:
    networks that may read without a certificate. tls: the folder with the certificates.
    credentials_file: the file that `credentials` were read from, if there is one.
    """

    place: PoolPlace
    credentials: Credentials
    credentials_file: Path | None = None
    node: str
    incarnation: str
    address: str
    folder: Path
    host: str
    machine: str
    mountpoint: str
    allow: tuple[str, ...] = ()
    tls: Path | None = None
