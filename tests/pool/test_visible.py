"""The commands, counters and metrics of mounts show their pool."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import redis

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for
from tests.pool.test_two_nodes import absent, announced, node, write

MIB = 1 << 20


def run(*arguments: object) -> str:
    command = [*KVFS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def stat(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("stat", path, "--json"))
    return found


def owners(path: Path) -> list[str]:
    """The mount points of the nodes that have a file, the asked one first."""
    return [one["mountpoint"] for one in stat(path)["pool"]["nodes"]]


def index_of(pool: str) -> redis.Redis:
    return redis.Redis(port=int(pool.rpartition(":")[2].partition("/")[0]))


def test_stat_shows_nodes_that_have_a_file(pool: str, mount: Mount) -> None:
    a, b = node(mount, pool, "a"), node(mount, pool, "b")
    write(a, "block", b"x" * MIB)
    assert owners(a.path / "block") == [str(a.path)]
    found = stat(b.path / "block")
    assert (found["tiers"], found["pool"]["remote"], found["pool"]["entry"]) == ({}, True, "same")
    (owner,) = found["pool"]["nodes"]
    assert (owner["mountpoint"], owner["this"]) == (str(a.path), False)
    assert owner["tier"] == next(iter(stat(a.path / "block")["tiers"]))
    assert found["next"] == "nothing is here of it: an open fetches it from another node"
    shown = run("stat", b.path / "block")
    assert "only other nodes have it" in shown
    assert f"{a.path} ({owner['tier']})" in shown
    assert (b.path / "block").read_bytes() == b"x" * MIB
    wait_for(lambda: announced(b) == 1, "the copy is announced")
    assert owners(b.path / "block") == [str(b.path), str(a.path)]
    assert ", this node)" in run("stat", b.path / "block")
    a.umount("--now")
    assert owners(b.path / "block") == [str(b.path)]


def test_stat_says_that_the_index_does_not_answer(pool: str, mount: Mount) -> None:
    a = node(mount, f"{pool},pool_wait=1", "a")
    a.allow_log("the pool's index is down|the pool learns later of changes")
    write(a, "block", b"x")
    pid = index_of(pool).info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = stat(a.path / "block")["pool"]
        assert (found["entry"], found["nodes"]) == ("unknown", [])
        assert "the index does not answer: " in run("stat", a.path / "block")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: owners(a.path / "block") == [str(a.path)], "the index answers again")


def test_stat_of_a_mount_without_a_pool(kv: Mounted) -> None:
    (kv.path / "block").write_bytes(b"x")
    assert stat(kv.path / "block")["pool"] is None
    assert absent(kv.path / "none")
