"""A mount that a real nfs-ganesha exports, and clients of it: libnfs, in the tests' own process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.nfs_server import Server, forget
from tests.conftest import Mount
from tests.harness import Mounted

Exported = Callable[..., Server]


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[Exported]:
    """`exported(kv)` starts a server of that mount."""
    servers: list[Server] = []

    def start(kv: Mounted) -> Server:
        server = Server(tmp_path / f"nfs-{kv.path.name}", kv.path)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()
        forget(server.path)


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    """The usual mount, with access for a server."""
    return mount("ram=256M,nvme={tmp}/nvme,nvme_size=2G,allow_other")


@pytest.fixture
def nfs(kv: Mounted, exported: Exported) -> Server:
    return exported(kv)
