"""Which failures of movers' jobs count: not those of objects that have changed meanwhile."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvfs.core.dispatcher import Dispatcher
from kvfs.errors import CatalogError


@pytest.mark.parametrize(
    ("about", "counts"),
    [
        ([], True),
        ([(1, 1)], True),
        ([(1, 1), (2, 1)], True),
        ([(1, 0)], False),
        ([(3, 1)], False),
        ([(3, 1), (1, 1)], False),  # its file is missing: one of a batch was dropped
    ],
)
def test_failure_counts_if_all_objects_are_as_they_were(
    about: list[tuple[int, int]], *, counts: bool
) -> None:
    current = {1: 1, 2: 1}
    transfers = SimpleNamespace(still_current=lambda ino, version: current.get(ino) == version)
    dispatcher = cast("Any", SimpleNamespace(transfers=transfers))
    assert Dispatcher.concerns(dispatcher, about) is counts


def test_failure_counts_if_the_catalog_fails() -> None:
    def fails(ino: int, version: int) -> None:
        raise CatalogError(f"inode {ino}, version {version}")

    transfers = SimpleNamespace(still_current=fails)
    assert Dispatcher.concerns(cast("Any", SimpleNamespace(transfers=transfers)), [(1, 1)])
