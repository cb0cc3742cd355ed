"""The simulator with several nodes: ratios computed by hand, ways of requests, the command line."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvfs.cli import main
from kvfs.simulation import sweep
from kvfs.simulation.pool import COPIES, SEPARATE, Nodes, simulate
from kvfs.simulation.routing import ROUTINGS, route
from kvfs.simulation.sweep import POLICIES, Case
from kvfs.simulation.trace import Hits, Prompt, Trace
from tests.conversations import conversations
from tests.unit.test_simulate import EXAMPLE, chained, lines, trace_of, unchained

KINDS = (SEPARATE, *COPIES)


def large(seed: int = 4, *, requests: int = 600) -> Trace:
    """Conversations whose turns repeat all before them."""
    rows = conversations(random.Random(seed), requests=requests, talks=200)
    return Trace((Prompt(0, 512 * len(keys), keys) for keys in rows), "conversations")


# Requests reach the nodes


@pytest.mark.parametrize("routing", ROUTINGS)
def test_route_is_the_same_each_time(routing: str) -> None:
    trace = large()
    chosen = route(trace, routing, 4, 7)
    assert chosen == route(trace, routing, 4, 7)
    assert len(chosen) == len(trace)
    assert set(chosen) == {0, 1, 2, 3}
    assert route(trace, routing, 1, 7) == [0] * len(trace)


@pytest.mark.parametrize("routing", ["random", "sticky"])
def test_another_seed_is_another_route(routing: str) -> None:
    assert route(large(), routing, 4, 1) != route(large(), routing, 4, 2)


def test_session_stays_at_its_node() -> None:
    """All prompts begin with block 1; the block behind it is the session's."""
    prompts = [[1, 2 + number % 5, 100 + number] for number in range(50)]
    prompts += [[1], [1]]
    trace = trace_of((512 * len(keys), keys) for keys in prompts)
    chosen = route(trace, "sticky", 4, 3)
    pairs = list(zip(prompts, chosen, strict=True))
    homes = {keys[-1] if keys == [1] else keys[1]: node for keys, node in pairs}
    assert all(homes[keys[1]] == node for keys, node in pairs[:50])
    assert chosen[50] == chosen[51]
    assert len(set(homes.values())) > 1


def test_longest_prefix_leads_to_its_node() -> None:
    prompts = [
        [1, 2, 3],  # node 0: no node has requests
        [4, 5, 6],  # node 1: the fewest
        [1, 2, 7, 8],  # half is at node 0
        [4, 9, 10],  # less than half is at node 1, which has the fewest requests
        [1, 2, 3, 11],  # most is at node 0
        [1, 12, 13],  # less than half: node 1 has fewer requests
    ]
    trace = trace_of((512 * len(keys), keys) for keys in prompts)
    assert route(trace, "prefix", 2, 1) == [0, 1, 0, 1, 0, 1]


# Hits


def test_pool_by_hand() -> None:
    """Node 0 gets the requests 0, 2 and 3, node 1 the others; each has room for two blocks."""
    trace = trace_of([(1024, [1, 2]), (1024, [1, 2]), (512, [3]), (1024, [1, 2])])
    seed = next(one for one in range(99) if route(trace, "random", 2, one) == [0, 1, 0, 0])
    found = {kind: simulate(trace, "lru", 4, Nodes(2, "random", seed, kind)) for kind in KINDS}
    total = 3 * 1024 + 512
    # 3 drops 2 at node 0, which has 1 still. Then 2 comes from node 1.
    assert found["keep-all"] == Hits(total, 2048, 7, 4, 3)
    assert found["drop"] == Hits(total, 2048, 7, 4, 3)
    assert found[SEPARATE] == Hits(total, 512, 7, 1)


def test_copies_go_before_the_own_blocks() -> None:
    """Node 1 has room for two. It copies 1 of node 0, and then stores 3 and 4."""
    prompts = [(512, [1]), (512, [3]), (512, [1]), (512, [4]), (512, [3])]
    trace = trace_of(prompts)
    seed = next(one for one in range(99) if route(trace, "random", 2, one) == [0, 1, 1, 1, 1])
    assert simulate(trace, "lru", 4, Nodes(2, "random", seed, "keep-all")).object_hits == 1
    assert simulate(trace, "lru", 4, Nodes(2, "random", seed, "drop")).object_hits == 2


@given(st.one_of(chained(), unchained()), st.sampled_from(POLICIES), st.integers(1, 8))
def test_one_node_is_one_cache(
    prompts: list[tuple[int, list[int]]], policy: str, capacity: int
) -> None:
    trace = trace_of(prompts)
    one = sweep.simulate(trace, policy, capacity)
    for kind in KINDS:
        assert simulate(trace, policy, capacity, Nodes(1, "random", 1, kind)) == one


@given(
    st.one_of(chained(), unchained()),
    st.sampled_from(POLICIES),
    st.sampled_from(ROUTINGS),
    st.sampled_from(KINDS),
    st.integers(3, 9),
)
def test_counts_are_consistent_and_below_the_bound(
    prompts: list[tuple[int, list[int]]], policy: str, routing: str, kind: str, capacity: int
) -> None:
    trace = trace_of(prompts)
    hits = simulate(trace, policy, capacity, Nodes(3, routing, 1, kind))
    assert (hits.tokens, hits.objects) == (trace.tokens, trace.lookups)
    assert 0 <= hits.peer_hits <= hits.object_hits
    assert hits.object_hits <= sweep.bound(trace, capacity).object_hits
    if kind == SEPARATE:
        assert hits.peer_hits == 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_pool_with_room_for_everything_misses_each_block_once(routing: str) -> None:
    trace = large()
    for kind in COPIES:
        hits = simulate(trace, "lru", 4 * trace.unique, Nodes(4, routing, 1, kind))
        assert hits.object_hits == trace.lookups - trace.unique


def test_pool_that_drops_copies_first_is_nearly_one_cache() -> None:
    """With random routing. Separate caches and a pool that keeps all copies have fewer hits."""
    trace = large(requests=1500)
    capacity = trace.unique // 5
    one = sweep.simulate(trace, "lru", capacity).token_ratio
    alone, keeping, dropping = (
        simulate(trace, "lru", capacity, Nodes(4, "random", 1, kind)).token_ratio
        for kind in (SEPARATE, "keep-all", "drop")
    )
    assert alone < keeping < dropping
    assert dropping > one - 0.02


def test_cases_with_nodes_run_beside_others() -> None:
    trace = trace_of(EXAMPLE)
    setup = Nodes(2, "random", 1, "drop")
    cases = [Case("lru", 4), Case("lru", 4, setup), Case(None, 4)]
    heard: list[int] = []
    found = list(sweep.run(trace, cases, heard.append))
    assert found[0] == sweep.simulate(trace, "lru", 4)
    assert found[1] == simulate(trace, "lru", 4, setup)
    assert sum(heard) == 3 * len(EXAMPLE)


# The command


def kvfs(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], prog_name="kvfs")


@pytest.fixture
def example(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines(EXAMPLE))
    return str(path)


def test_json_has_a_row_for_each_cache(example: str) -> None:
    routings = ("--routing", "random", "--routing", "prefix", "--seed", "9")
    result = kvfs(
        example, "--capacity", "4", "--policy", "lru", "--nodes", "2", *routings, "--json"
    )
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    assert Counter((row["cache"], row["routing"], row["copies"]) for row in rows) == Counter(
        [
            ("one", None, None),
            *(("separate", routing, None) for routing in ("random", "prefix")),
            *(("pool", routing, kind) for routing in ("random", "prefix") for kind in COPIES),
        ]
    )
    assert all((row["policy"], row["capacity_blocks"]) == ("lru", 4) for row in rows)
    assert [(row["nodes"], row["seed"]) for row in rows] == [(1, None)] + [(2, 9)] * 6
    expected = simulate(trace_of(EXAMPLE), "lru", 4, Nodes(2, "random", 9, "drop"))
    [row] = [row for row in rows if (row["routing"], row["copies"]) == ("random", "drop")]
    assert row["token_hit_ratio"] == expected.token_ratio
    assert row["object_hit_ratio"] == expected.object_ratio
    assert row["peer_hit_ratio"] == expected.peer_ratio


def test_table_names_the_seed_and_compares_with_one_cache(example: str) -> None:
    arguments = ("--capacity", "4", "--policy", "lru", "--nodes", "2", "--copies", "drop")
    result = kvfs(example, *arguments)
    assert result.exit_code == 0, result.output
    told = result.stdout.splitlines()
    assert told[1] == "2 nodes, seed 1"
    assert told[3].split()[:7] == ["4", "4", "lru", "-", "one", "cache", "53.56"]
    one = 100 * sweep.simulate(trace_of(EXAMPLE), "lru", 4).token_ratio
    pool = 100 * simulate(trace_of(EXAMPLE), "lru", 4, Nodes(2, "random", 1, "drop")).token_ratio
    difference = f"{pool - one:+.2f}"
    assert told[5].split()[:8] == [
        *("4", "4", "lru", "random", "pool,", "drop"),
        *(f"{pool:.2f}", difference),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "'--nodes': 0 is not in the range"),
        (["--nodes", "1001"], "'--nodes': 1001 is not in the range"),
        (["--nodes", "many"], "'--nodes': 'many' is not a valid"),
        (["--nodes", "5"], "capacity of 4 blocks for 5 nodes: expected a block or more for each"),
        (["--nodes", "2", "--routing", "foo"], "'--routing': 'foo' is not one of"),
        (["--nodes", "2", "--copies", "foo"], "'--copies': 'foo' is not one of"),
        (["--nodes", "2", "--seed", "-1"], "'--seed': -1 is not in the range"),
        (["--routing", "sticky"], "--routing sticky: expected --nodes beside it"),
        (["--copies", "drop"], "--copies drop: expected --nodes beside it"),
        (["--seed", "0"], "--seed 0: expected --nodes beside it"),
        (["--nodes", "2", "--plot", "{tmp}/a.png"], "--plot draws the curves of one cache"),
    ],
)
def test_bad_input_is_one_line(
    example: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    given_ = [text.format(tmp=tmp_path) for text in arguments]
    result = kvfs(example, "--capacity", "4", *given_)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvfs: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
