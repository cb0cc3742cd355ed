"""Mounts whose NVMe directory can be made to fail, with little patience."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.faults.disks import Faults, faulty
from tests.harness import Mounted

IMPATIENT = Path(__file__).with_name("impatient")
OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=500M,promote_after=0,entry_timeout=0"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(IMPATIENT), str(IMPATIENT.parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    """What can be done to the objects on NVMe; the catalog beside them goes on."""
    with faulty(tmp_path / "nvme/objects", tmp_path / "work") as found:
        yield found


@pytest.fixture(params=["passthrough=auto", "passthrough=off"])
def kv(request: pytest.FixtureRequest, faults: Faults, mount: Mount) -> Iterator[Mounted]:
    one = mount(f"{OPTIONS},{request.param}")
    yield one
    faults.set()  # the fixtures below wait for it to come to rest
