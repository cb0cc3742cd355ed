"""Client processes that verify all they see, while their daemon is killed.

The longer run, with 10^5 objects and hundreds of kills, is scripts/bench/soak.py.
"""

import random

import pytest

from scripts.bench.soak import Soak, allowed_in_log
from scripts.bench.workload.task import Task
from tests.conftest import Mount

CLIENTS, OBJECTS, SECONDS = 8, 400, 8.0
EVENTS = ["daemon", "daemon", "movers", "standby", "daemon", "daemon"]  # when, the seed says


@pytest.mark.slow
@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_no_client_notices_that_the_daemon_dies(mount: Mount, passthrough: str) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    kv = mount(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=4G,passthrough={passthrough}")
    for pattern in allowed_in_log(EVENTS, evict=False):
        kv.allow_log(pattern)
    task = Task("", str(kv.path), 0, CLIENTS, seed, OBJECTS)
    outcome = Soak(kv.path, kv.status, task, SECONDS).run(EVENTS, int)
    print(outcome.events)
    assert not outcome.findings
    assert not outcome.disagreements
    assert outcome.operations > 100 * CLIENTS
    assert kv.idle()["counters"]["dropped"] == 0
    assert kv.status()["takeovers"] == EVENTS.count("daemon")
