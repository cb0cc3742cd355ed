"""One mount of each kind for all of these tests; each test has a directory of its own in it.

`here` is that directory. A test with `here` runs once for each way in which kvfs reads and writes
bytes: by the kernel or by the daemon, in RAM or on NVMe.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Mounted

KINDS = {
    "kernel": "ram=256M,nvme={tmp}/nvme,nvme_size=2G",
    "kernel-nvme": "ram=0,nvme={tmp}/nvme,nvme_size=2G",
    "daemon": "ram=256M,nvme={tmp}/nvme,nvme_size=2G,passthrough=off",
    "daemon-nvme": "ram=0,nvme={tmp}/nvme,nvme_size=2G,passthrough=off",
}
CHOSEN = os.environ.get("KVFS_TEST_MOUNTS", "").split() or list(KINDS)


@pytest.fixture(scope="session", params=CHOSEN)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mounted]:
    folder = tmp_path_factory.mktemp(request.param)
    options = KINDS[request.param].replace("{tmp}", str(folder))
    mounted = Mounted(folder / "kv", f"{options},allow_other", folder / "kv.log")
    mounted.path.mkdir()
    try:
        mounted.mount()
        yield mounted
        mounted.umount("--now")
        mounted.check_log()
    finally:
        mounted.clean_up()


@pytest.fixture
def here(shared: Mounted, request: pytest.FixtureRequest) -> Iterator[Path]:
    directory = shared.path / request.function.__name__
    directory.mkdir()
    yield directory
    shutil.rmtree(directory, onerror=_unless_gone)
    shared.check_gauges()


def _unless_gone(_call: object, _path: str, raised: tuple[object, BaseException, object]) -> None:
    """Pass by a file that its namespace's quota dropped in the meantime."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]
