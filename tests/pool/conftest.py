"""The fixture of mounts that share a pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool.servers import free_port, let_nginx_pass, server


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[str]:
    """The options of a pool with a new index; PORT is each node's own."""
    let_nginx_pass(tmp_path)
    port = free_port()
    with server(tmp_path / "redis", port):
        yield f"ram=64M,nvme={{tmp}}/NAME-nvme,nvme_size=256M,pool=redis://127.0.0.1:{port}/kv"
