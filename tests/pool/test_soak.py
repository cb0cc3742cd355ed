"""Clients on three nodes verify all they see, while nodes and the index are broken.

The longer run, with four nodes and stops of 30 s, is scripts/bench/pool_soak.py.
"""

import random
from pathlib import Path

import pytest

from scripts.bench.pool_soak import KINDS, PoolSoak, pool
from scripts.bench.workload.task import Task
from tests.pool.servers import let_nginx_pass

NODES, CLIENTS, OBJECTS, SECONDS, STOP_S = 3, 3, 300, 12.0, 2.0


@pytest.mark.slow
def test_no_client_sees_a_wrong_byte(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    let_nginx_pass(tmp_path)
    task = Task("pool", "", 0, CLIENTS, seed, OBJECTS, evict=True, nodes=NODES)
    with pool(tmp_path, NODES) as (nodes, index):
        soak = PoolSoak(nodes, index, task, STOP_S)
        events = soak.rng.sample(KINDS, 4)
        print(events)
        outcome = soak.run(SECONDS, events)
        counters = [node.mounted.status()["pool"]["counters"] for node in nodes]
    assert not outcome.findings
    assert outcome.operations > 100 * CLIENTS
    assert sum(one["fetched"] for one in counters) > 0
