"""A trace replayed on the nodes of a pool has the hits that the simulator predicts."""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvfs.control import request
from kvfs.simulation.pool import Nodes, simulate
from kvfs.simulation.replay import SMALLEST_BLOCK, replay
from kvfs.simulation.routing import route
from kvfs.simulation.trace import Prompt, Trace, read
from tests.conftest import Mount
from tests.conversations import write
from tests.harness import Mounted, wait_for
from tests.pool.servers import free_port, let_nginx_pass, server

SEED = 4
NODES = 3
ROOM = 480  # blocks of all nodes
WITHIN = 0.01


@pytest.fixture
def nodes(tmp_path: Path, mount: Mount) -> Iterator[list[Mounted]]:
    """The nodes of a pool. Each has a namespace with room for its part of the blocks."""
    let_nginx_pass(tmp_path)
    port = free_port()
    with server(tmp_path / "redis", port):
        pool = f"ram=64M,pool=redis://127.0.0.1:{port}/kv"
        made = [
            mount(f"{pool},pool_address=127.0.0.1:{free_port()}", f"node{number}")
            for number in range(NODES)
        ]
        settings = {"quota_objects": str(ROOM // NODES), "eviction": "lru", "prefetch": "off"}
        for kv in made:
            kv.allow_log("the pool's index is down|the pool learns later of changes")
            request(kv.path, "ns_create", name="blocks", settings=settings, uid=0, gid=0)
        yield made


class Run:
    """Requests for a replay, each after all nodes have announced what they stored before.

    A busy machine may answer a question to the index too late. The node then asks nothing for a
    second, as is documented. `blind` are the tokens of the requests during which that happened.
    """

    def __init__(self, trace: Trace, nodes: list[Mounted]) -> None:
        self.trace = trace
        self.nodes = nodes
        self.blind = 0
        self._names = map(str, itertools.count())

    def __iter__(self) -> Iterator[Prompt]:
        failures = self._failures()
        for prompt in self.trace:
            wait_for(lambda: all(map(self._is_settled, self.nodes)), "all is announced")
            yield prompt
            before, failures = failures, self._failures()
            if failures > before:
                self.blind += prompt.tokens
                for kv in self.nodes:
                    wait_for(partial(self._asks, kv), "it asks the index again")
                failures = self._failures()

    @staticmethod
    def _is_settled(kv: Mounted) -> bool:
        status = kv.status()
        pool, objects = status["pool"], status["tiers"]["ram"]["objects"]
        return pool["index"]["up"] and not pool["lag_s"] and pool["objects"] == objects

    def _asks(self, kv: Mounted) -> bool:
        before = kv.status()["pool"]["counters"]
        (kv.path / next(self._names)).exists()
        after = kv.status()["pool"]["counters"]
        return bool(
            after["lookups"] > before["lookups"] and after["failures"] == before["failures"]
        )

    def _failures(self) -> int:
        return sum(kv.status()["pool"]["counters"]["failures"] for kv in self.nodes)


def test_hits_of_a_pool_are_the_simulated_ones(nodes: list[Mounted], tmp_path: Path) -> None:
    """Within 1 point, and the share of the tokens for which the index answered too late."""
    file = tmp_path / "trace.jsonl"
    write(file, random.Random(SEED), requests=400, talks=64)
    trace = Trace(read(str(file)), str(file))
    expected = simulate(trace, "lru", ROOM, Nodes(NODES, "random", SEED, "drop"))
    assert expected.peer_ratio > 0.2
    run = Run(trace, nodes)
    folders = [kv.path / "blocks" for kv in nodes]
    found = replay(run, folders, SMALLEST_BLOCK, routes=route(trace, "random", NODES, SEED))
    blind = run.blind / trace.tokens
    print(f"seed {SEED}: {found}, simulated {expected}, {blind:.3f} while the index was late")
    assert found.refused == 0
    assert abs(found.hits.token_ratio - expected.token_ratio) <= WITHIN + blind
    assert abs(found.hits.object_ratio - expected.object_ratio) <= WITHIN + blind
