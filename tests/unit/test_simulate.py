"""The simulator: ratios computed by hand, the bound, and the command line."""

import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kvfs.cli import main
from kvfs.errors import ConfigError, KvfsError
from kvfs.simulation import sweep
from kvfs.simulation.sweep import POLICIES, Capacity, Case, bound, parse_block_size, simulate
from kvfs.simulation.trace import Hits, Prompt, Trace

# The blocks of the first prompt, of 512, 512 and 76 tokens, come back in the second (its first
# two) and in the last.
EXAMPLE = [(1100, [1, 2, 3]), (1024, [1, 2]), (600, [4, 5]), (1100, [1, 2, 3])]
TOKENS = 1100 + 1024 + 600 + 1100


def trace_of(prompts: Iterable[tuple[int, list[int]]]) -> Trace:
    return Trace((Prompt(0, tokens, keys) for tokens, keys in prompts), "example")


def lines(prompts: Iterable[tuple[int, list[int]]]) -> str:
    return "".join(
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids}) + "\n"
        for n, ids in prompts
    )


@pytest.fixture
def example(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines(EXAMPLE))
    return str(path)


@pytest.mark.parametrize(
    ("capacity", "tokens", "objects"),
    [
        (2, 512, 1),  # 3 drops 2, as 1 has a child; 2 drops 3, without its parent; 4 and 5 both
        (3, 1536, 3),  # 4 drops 3, and 5 drops 2: 1 is left of the prompt
        (4, 2048, 4),  # 5 drops 3
        (5, 2124, 5),
    ],
)
def test_least_recently_used_leaf_first_by_hand(capacity: int, tokens: int, objects: int) -> None:
    assert simulate(trace_of(EXAMPLE), "lru", capacity) == Hits(TOKENS, tokens, 10, objects)


@pytest.mark.parametrize(
    ("capacity", "tokens", "objects"),
    [
        (1, 1024, 2),  # 1, twice
        (2, 2048, 4),  # 1 and 2, twice
        (3, 2124, 5),  # nothing of the third prompt is worth keeping
        (9, 2124, 5),
    ],
)
def test_the_bound_by_hand(capacity: int, tokens: int, objects: int) -> None:
    assert bound(trace_of(EXAMPLE), capacity) == Hits(TOKENS, tokens, 10, objects)


def test_tokens_count_up_to_the_first_missing_block_only() -> None:
    prompts = [(1024, [1, 2]), (512, [3]), (1536, [4, 2, 3])]
    assert simulate(trace_of(prompts), "lru", 9) == Hits(3072, 0, 6, 2)


def test_tokens_without_a_hash_never_hit() -> None:
    """Those are the last 22 of the first and the last prompt; the second has a hash for them."""
    prompts = [(150, [1, 2]), (150, [1, 2, 3]), (150, [1, 2])]
    trace = Trace((Prompt(0, tokens, keys, 64) for tokens, keys in prompts), "example")
    expected = Hits(450, 256, 7, 4)
    assert simulate(trace, "lru", 9) == expected
    assert bound(trace, 9) == expected


@st.composite
def chained(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Prompts over a small tree of prefixes, the last block partly filled or not."""
    texts = draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=9))
    keys: dict[str, int] = {}
    prompts = []
    for text in texts:
        prefixes = [text[: depth + 1] for depth in range(len(text))]
        ids = [keys.setdefault(prefix, len(keys) + 1) for prefix in prefixes]
        prompts.append((512 * len(ids) - draw(st.sampled_from([0, 1, 500])), ids))
    return prompts


@st.composite
def unchained(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Prompts as no engine has them: blocks in any order, and repeated."""
    ids = st.lists(st.integers(1, 6), min_size=1, max_size=5)
    return [(512 * len(one) - 100, one) for one in draw(st.lists(ids, min_size=1, max_size=9))]


@given(st.one_of(chained(), unchained()), st.integers(1, 8))
def test_no_policy_exceeds_the_bound(prompts: list[tuple[int, list[int]]], capacity: int) -> None:
    trace = trace_of(prompts)
    most = bound(trace, capacity)
    for policy in POLICIES:
        hits = simulate(trace, policy, capacity)
        assert hits.token_hits <= most.token_hits, policy
        assert hits.object_hits <= most.object_hits, policy


def _best(prompts: list[tuple[int, list[int]]], capacity: int) -> tuple[int, int]:
    """The most object hits, and the most tokens, of all choices of what to hold."""
    last: dict[int, int] = {}
    intervals = []
    for number, (tokens, keys) in enumerate(prompts):
        for depth, key in enumerate(keys):
            if key in last:
                intervals.append((last[key], number, min(512, tokens - 512 * depth)))
            last[key] = number
    objects = tokens = 0
    for size in range(len(intervals) + 1):
        for chosen in itertools.combinations(intervals, size):
            held = [sum(a <= gap < b for a, b, _ in chosen) for gap in range(len(prompts))]
            if max(held) <= capacity:
                objects = size
                tokens = max(tokens, sum(weight for _, _, weight in chosen))
    return objects, tokens


@given(chained().filter(lambda prompts: sum(len(ids) for _, ids in prompts) <= 13))
def test_bound_is_that_of_the_best_choice_of_objects(
    prompts: list[tuple[int, list[int]]],
) -> None:
    for capacity in (1, 2, 3):
        objects, tokens = _best(prompts, capacity)
        most = bound(trace_of(prompts), capacity)
        assert most.object_hits == objects
        assert most.token_hits >= tokens


@given(st.one_of(chained(), unchained()))
def test_a_cache_for_everything_misses_each_block_once(
    prompts: list[tuple[int, list[int]]],
) -> None:
    trace = trace_of(prompts)
    seen: set[int] = set()
    tokens = 0
    for length, keys in prompts:
        known = [key in seen or key in keys[:depth] for depth, key in enumerate(keys)]
        tokens += min(512 * [*known, False].index(False), length)
        seen.update(keys)
    for policy in POLICIES:
        hits = simulate(trace, policy, trace.unique)
        assert hits.object_hits == trace.lookups - trace.unique, policy
        assert hits.token_hits == tokens, policy
    assert bound(trace, trace.unique).object_hits == trace.lookups - trace.unique


def test_progress_is_heard_of_once_for_each_request() -> None:
    for run in (lambda hear: simulate(trace_of(EXAMPLE), "lru", 3, hear), _bound_heard):
        heard: list[int] = []
        run(heard.append)
        assert sum(heard) == len(EXAMPLE)


def _bound_heard(hear: Callable[[int], None]) -> Hits:
    return bound(trace_of(EXAMPLE), 3, hear)


@pytest.mark.slow
def test_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(EXAMPLE)
    cases = [Case("lru", 3), Case(None, 3), Case("lru", 5)]
    heard: list[int] = []
    alone = list(sweep.run(trace, cases, heard.append))
    assert sum(heard) == 12
    monkeypatch.setattr(sweep, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert list(sweep.run(trace, cases, heard.append)) == alone
    assert sum(heard) == 24


def test_a_process_that_dies_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenProcessPool("abrupt")

    monkeypatch.setattr(sweep, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(ProcessPoolExecutor, "map", broken)
    with pytest.raises(KvfsError, match="was killed"):
        list(sweep.run(trace_of(EXAMPLE), [Case("lru", 3), Case(None, 3)], lambda _: None))


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("5%", 50), ("0.1%", 1), ("0.19%", 1), ("100%", 1000), ("7", 7), ("1M", 16), ("130K", 2)],
)
def test_capacities(text: str, blocks: int) -> None:
    assert Capacity.parse(text, 64 << 10).blocks(1000) == blocks


@pytest.mark.parametrize(
    "text", ["", "0", "0%", "0.0%", "-5%", "-5", "5 %", "%", "1e3", "nan%", "1K", "9Z", "0G", "∞"]
)
def test_malformed_capacity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^capacity {text}: expected"):
        Capacity.parse(text, 64 << 10)


def test_a_share_of_less_than_a_block() -> None:
    with pytest.raises(ConfigError, match=r"capacity 0.05% of 1000 unique blocks: expected a"):
        Capacity.parse("0.05%", 1).blocks(1000)


def test_block_sizes() -> None:
    assert parse_block_size("64M") == 64 << 20
    for text in ("0", "-1", "64X", ""):
        with pytest.raises(ConfigError, match=f"^block size {text}: expected"):
            parse_block_size(text)


# the command


def kvfs(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments], prog_name="kvfs", input=given)


def test_json_has_the_policies_and_nothing_else(example: str) -> None:
    sizes = ("--capacity", "60%", "--capacity", "5", "--capacity", "320M")
    result = kvfs(example, *sizes, "--policy", "lru", "--policy", "lru", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    best = {
        "policy": "lru",
        "capacity_blocks": 5,
        "token_hit_ratio": 2124 / TOKENS,
        "object_hit_ratio": 0.5,
    }
    small = {"capacity_blocks": 3, "token_hit_ratio": 1536 / TOKENS, "object_hit_ratio": 0.3}
    assert rows == [best | small, best, best]


def test_the_table_has_the_bound_beside_each_ratio(example: str) -> None:
    result = kvfs(example, "--capacity", "3", "--policy", "lru")
    assert result.exit_code == 0, result.output
    found = result.stdout.splitlines()
    assert found[0].split(", ") == [
        "4 requests",
        f"{TOKENS} tokens",
        "10 blocks looked up",
        "5 unique",
    ]
    assert found[-1].split() == ["3", "3", "lru", "40.17", "55.54", "30.00", "50.00"]


def test_without_a_policy_it_is_the_adaptive_one() -> None:
    result = kvfs("-", "--capacity", "3", "--json", given=lines(EXAMPLE))
    assert [row["policy"] for row in json.loads(result.stdout)] == ["adaptive"]


def test_the_first_requests_only(example: str) -> None:
    result = kvfs(example, "--capacity", "100%", "--policy", "lru", "--limit", "2", "--json")
    [row] = json.loads(result.stdout)
    assert row["capacity_blocks"] == 3
    assert row["token_hit_ratio"] == 1024 / 2124


SMALL = [(150, [1, 2]), (130, [1, 2, 3]), (64, [1])]  # blocks of 64 tokens, by either rule


def test_blocks_of_fewer_tokens() -> None:
    arguments = ("-", "--capacity", "100%", "--policy", "lru", "--block-tokens", "64", "--json")
    result = kvfs(*arguments, given=lines(SMALL))
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert row["capacity_blocks"] == 3
    assert row["token_hit_ratio"] == (128 + 64) / 344
    assert row["object_hit_ratio"] == 3 / 6


@pytest.mark.parametrize(
    ("arguments", "blocks"),
    [([], 3), (["--block-tokens", "512"], 3), (["--block-size", "32M"], 6)],
)
def test_bytes_of_a_block_of_512_tokens(example: str, arguments: list[str], blocks: int) -> None:
    result = kvfs(example, "--capacity", "192M", *arguments, "--policy", "lru", "--json")
    assert json.loads(result.stdout)[0]["capacity_blocks"] == blocks


@pytest.mark.parametrize(
    ("arguments", "blocks"),
    [([], 2), (["--block-size", "4M"], 4)],  # 8 MiB: 128 KiB a token
)
def test_bytes_of_a_block_follow_from_its_tokens(arguments: list[str], blocks: int) -> None:
    common = ("-", "--block-tokens", "64", "--capacity", "16M", "--policy", "lru", "--json")
    result = kvfs(*common, *arguments, given=lines(SMALL))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["capacity_blocks"] == blocks


def test_a_wrong_block_size_is_one_line_that_names_the_right_one() -> None:
    result = kvfs("-", "--capacity", "3", given=lines([(20064, list(range(313)))]))
    assert result.exit_code == 2
    assert result.stderr == (
        "kvfs: standard input: line 1: 313 hash_ids for input_length 20064: expected 39 or 40 "
        "for blocks of 512 tokens; --block-tokens 64 fits all lines so far\n"
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_curves_are_a_png(example: str, tmp_path: Path, *, as_json: bool) -> None:
    picture = tmp_path / "curves.png"
    sizes = ("--capacity", "3", "--capacity", "100%")
    result = kvfs(example, *sizes, "--plot", str(picture), *["--json"] * as_json)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument"),
        (["{trace}"], "Missing option '--capacity'"),
        (["{trace}", "--capacity", "3", "--policy", "mru"], "policy mru: expected one of "),
        (["{trace}", "--capacity", "3", "--capacity", "0"], "capacity 0: expected"),
        (["{trace}", "--capacity", "-3"], "capacity -3: expected"),
        (["{trace}", "--capacity", "lots"], "capacity lots: expected a share"),
        (["{trace}", "--capacity", "1%"], "capacity 1% of 5 unique blocks: expected a block"),
        (["{trace}", "--capacity", "1G", "--block-size", "0"], "block size 0: expected"),
        (["{trace}", "--capacity", "3", "--block-tokens", "0"], "'--block-tokens': 0 is not in"),
        (["{trace}", "--capacity", "3", "--block-tokens", "1K"], "'--block-tokens': '1K' is not"),
        (["{trace}", "--capacity", "3", "--block-tokens", "64"], "line 1: 3 hash_ids for input"),
        (["{trace}", "--capacity", "1M"], "expected at least one block of 67108864 bytes"),
        (["{trace}", "--capacity", "3", "--plot", "{tmp}/a.svg"], "ends in .png"),
        (["{trace}", "--capacity", "3", "--plot", "{tmp}/no/a.png"], "not a writable directory"),
        (["{trace}", "--capacity", "3", "--plot", "{tmp}/dir.png"], "dir.png is a directory"),
        (["{tmp}/none", "--capacity", "3"], "none: cannot be read: No such file"),
        (["{tmp}/empty", "--capacity", "3"], "empty: the trace is empty"),
        (["{tmp}/bad", "--capacity", "3"], "bad: line 5: not JSON"),
    ],
)
def test_bad_input_is_one_line(
    example: str, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "bad").write_text(lines(EXAMPLE) + "{\n")
    (tmp_path / "dir.png").mkdir()
    result = kvfs(*(text.format(trace=example, tmp=tmp_path) for text in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvfs: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_a_plot_without_matplotlib_names_the_extra(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = kvfs(example, "--capacity", "3", "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 2
    assert "pip install 'kvfs[plot]'" in result.stderr


def test_a_plot_that_cannot_be_written(example: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("/dev/full")
    result = kvfs(example, "--capacity", "3", "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == 1
    assert result.stderr == f"kvfs: --plot {tmp_path}/a.png: No space left on device\n"


def test_help_says_where_the_bound_is() -> None:
    text = " ".join(kvfs("--help").stdout.split())
    assert "Belady's bound" in text
    assert "128 KiB a token" in text
    assert "64 in traces of kv-cache-tester, 16 in vLLM's" in text
    assert all(name in text for name in POLICIES)
