"""An NVMe directory that can be made to fail, and daemons with little patience."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disks import Faults, faulty

IMPATIENT = Path(__file__).with_name("impatient")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(IMPATIENT), str(IMPATIENT.parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    """What can be done to the objects on NVMe; the catalog beside them goes on."""
    with faulty(tmp_path / "nvme/objects", tmp_path / "work") as found:
        yield found
