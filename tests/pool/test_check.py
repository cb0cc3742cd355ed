"""Checks of a node's part in a pool before its mount."""

import pytest

from kvfs.pool.check import own_address, with_port
from kvfs.pool.place import PoolPlace


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.5", "10.0.0.5:7373"),
        ("10.0.0.5:80", "10.0.0.5:80"),
        ("fd00::5", "[fd00::5]:7373"),  # as Kubernetes gives the address of a pod
        ("[fd00::5]", "[fd00::5]:7373"),
        ("[fd00::5]:80", "[fd00::5]:80"),
        ("node", "node"),
        ("[fe80::1%lo]:80", "[fe80::1%lo]:80"),
        ("fe80::1%lo", "fe80::1%lo"),
    ],
)
def test_address_gets_a_port(given: str, expected: str) -> None:
    assert with_port(given, 7373) == expected


def test_own_address_is_that_towards_the_index() -> None:
    assert own_address(PoolPlace.parse("redis://127.0.0.1:1/kv")) == "127.0.0.1"
