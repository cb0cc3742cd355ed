"""The what-if hit ratios of a node count the opens that other nodes serve as the measured ones."""

import re
import subprocess
from typing import Any

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.test_two_nodes import announced, make_namespace, node, read

NEAR = 0.02  # of an estimate: older accesses have less weight in it
ROOM = 20  # objects
OWN = 15  # used in turn, more than LRU would keep beside the copies of the other node's objects
OTHERS = 40
ROUNDS = 240


def space_of(kv: Mounted) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in kv.status()["namespaces"] if one["name"] == "ns")
    return found


def test_estimate_agrees_when_another_node_serves_half_of_the_opens(
    pool: str, mount: Mount
) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    b.allow_log("the pool's index is down|the pool learns later of changes")
    make_namespace(a)
    make_namespace(b, eviction="lru", quota_objects=str(ROOM), prefetch="off")
    for number in range(OTHERS):
        (a.path / "ns" / f"a{number}").write_bytes(b"of a")
    for number in range(OWN):
        (b.path / "ns" / f"b{number}").write_bytes(b"of b")
    wait_for(lambda: announced(a) == OTHERS, "they are announced")
    for number in range(ROUNDS):
        assert read(b.path / "ns" / f"b{number % OWN}") == b"of b", "copies of a's objects go first"
        read(b.path / "ns" / f"a{number % OTHERS}")  # None if the index takes long: a miss

    def counted() -> int:
        counters = space_of(b)["counters"]
        return sum(
            counters.get(name, 0) for name in ("read_ram", "read_nvme", "read_pool", "misses")
        )

    wait_for(lambda: counted() >= 2 * ROUNDS, "all opens are counted")
    space = space_of(b)
    counters, ratios = space["counters"], space["hit_ratio_at"]
    assert counters["read_pool"] > ROUNDS / 2
    measured = (counters.get("read_ram", 0) + counters.get("read_nvme", 0)) / counted()
    assert measured == pytest.approx(0.5, abs=NEAR)
    assert ratios["1"] == pytest.approx(measured, abs=NEAR)
    assert ratios["4"] > 0.6, "there is room for all"
    with_nodes = measured + counters["read_pool"] / counted()
    shown = subprocess.check_output([*KVFS, "ns", "show", str(b.path / "ns")], text=True)
    (told,) = re.findall(r"estimated at 1 x .*, with other nodes ([0-9.]+)%", shown)
    assert float(told) / 100 == pytest.approx(with_nodes, abs=NEAR)
