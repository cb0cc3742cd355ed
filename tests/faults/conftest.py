"""An NVMe directory that can be made to fail, and daemons with little patience."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.disks import Faults, faulty

HERE = Path(__file__).parent


def with_site(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let daemons begin with the sitecustomize.py of this directory here."""
    paths = [str(HERE / name), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    with_site(monkeypatch, "impatient")


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Faults]:
    """Faults for the objects on NVMe; the catalog beside them works on."""
    with faulty(tmp_path / "nvme/objects", tmp_path / "work") as found:
        yield found
