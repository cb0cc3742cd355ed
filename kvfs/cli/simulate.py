"""`kvfs simulate`: the hit ratios of a cache, or of several nodes, for a request trace.

Contract: `simulate` computes the hit ratio of a cache of some size under some policies, and needs
no mount. With --nodes it compares several nodes with one cache of their total size. It refuses
wrong input before the first simulation begins. It reads the trace first, because a size as a share
of the trace's blocks is known only then.
"""

from collections.abc import Sequence
from typing import Any

import click

from kvfs.cli import completion, give, json_option
from kvfs.cli.screen import progress, screen, table
from kvfs.cli.traces import (
    ROUTING_HELP,
    SEED,
    block_tokens_option,
    load,
    seed_option,
    trace_argument,
)
from kvfs.errors import ConfigError
from kvfs.simulation import curves, sweep
from kvfs.simulation.pool import COPIES, SEPARATE, Nodes, check_room
from kvfs.simulation.routing import ROUTINGS
from kvfs.simulation.sweep import POLICIES, Capacity, Case, parse_block_size
from kvfs.simulation.trace import Hits, Trace

DEFAULT_POLICY = "adaptive"
MOST_NODES = 1000  # one bit for each, in the nodes of a block
TOKEN_BYTES = 128 << 10  # of Llama-3.1-8B in bf16

Results = dict[Case, Hits]


@click.command
@trace_argument
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    required=True,
    metavar="SIZE",
    help=(
        "Size of the cache: a share of the trace's unique blocks (5%), blocks (20000), "
        "or bytes (64G, divided by --block-size) (repeatable)."
    ),
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.words(POLICIES),
    help=f"What goes first, by default {DEFAULT_POLICY}. May be given several times. "
    "One of: " + ", ".join(POLICIES) + ".",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MOST_NODES),
    metavar="N",
    help="Compare N nodes with one cache of their total size: separate caches and a pool. The "
    "capacity is divided evenly among the nodes.",
)
@click.option(
    "--routing",
    "routings",
    multiple=True,
    type=click.Choice(ROUTINGS),
    metavar="HOW",
    help=f"{ROUTING_HELP} May be given several times. Default: {ROUTINGS[0]}.",
)
@click.option(
    "--copies",
    multiple=True,
    type=click.Choice(COPIES),
    metavar="RULE",
    help="What a node of the pool evicts first: keep-all (the policy alone chooses), drop (copies "
    "of other nodes' blocks go first). May be given several times. Default: both.",
)
@seed_option
@block_tokens_option
@click.option(
    "--block-size",
    metavar="BYTES",
    help="Bytes of a block. The default is Llama-3.1-8B in bf16: 128 KiB a token "
    "(32 layers x 8 KV heads x 128 x 2 bytes, keys and values), so 64M for 512 tokens.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after N requests.")
@json_option
@click.option(
    "--plot",
    metavar="FILE.png",
    help="Draw the curves and the bound to this file.",
    shell_complete=completion.files,
)
def command(
    *,
    trace: str,
    capacities: tuple[str, ...],
    policies: tuple[str, ...],
    nodes: int | None,
    routings: tuple[str, ...],
    copies: tuple[str, ...],
    seed: int | None,
    block_tokens: int,
    block_size: str | None,
    limit: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Compute hit ratios of capacities on a request TRACE.

    TRACE has JSON lines in the format of Mooncake: timestamp, input_length, output_length, and
    hash_ids of blocks of --block-tokens. It may be compressed with xz or gzip; - is standard input.
    The last block of a prompt may be partly filled, with a hash id or without.

    Tokens count as hits up to the first missing block of a prompt. Objects count wherever they are
    found. Table and plot also show Belady's bound, which no policy exceeds. --json has the policies
    only, with ratios from 0 to 1.

    With --nodes, a row is one cache, the separate caches of all nodes, or their pool. There is no
    bound. A miss in a pool is a block that no node has.
    """
    chosen = list(dict.fromkeys(policies or [DEFAULT_POLICY]))
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"policy {name}: expected one of {', '.join(POLICIES)}")
    size = TOKEN_BYTES * block_tokens if block_size is None else parse_block_size(block_size)
    wanted = [Capacity.parse(text, size) for text in capacities]
    if plot is not None:
        curves.check(plot)
    setups = _setups(nodes, routings, copies, seed)
    if nodes is not None and plot is not None:
        raise ConfigError("--plot draws the curves of one cache: leave out --plot or --nodes")
    with progress() as bar:
        task = bar.add_task("reading requests", total=limit)
        loaded = load(bar, task, trace, block_tokens, limit)
        sizes = {one.text: one.blocks(loaded.unique) for one in wanted}
        if nodes is not None:
            check_room(min(sizes.values()), nodes)
        bound = [] if nodes is not None or (as_json and plot is None) else [Case(None, 0)]
        kinds = [Case(name, 0, setup) for name in chosen for setup in (None, *setups)] + bound
        cases = list(
            dict.fromkeys(kind._replace(capacity=sizes[text]) for text in sizes for kind in kinds)
        )
        bar.update(task, description="simulating", completed=0, total=len(loaded) * len(cases))
        results = dict(
            zip(cases, sweep.run(loaded, cases, lambda n: bar.advance(task, n)), strict=True)
        )
    if nodes is not None:
        rows = [_row(case, results[case], nodes) for case in cases]
        give(rows, lambda _: _show_nodes(results, loaded, sizes, setups), as_json=as_json)
        return
    give(
        _rows(results, sizes, chosen),
        lambda _: _show(results, loaded, sizes, chosen),
        as_json=as_json,
    )
    if plot is not None:
        _plot(plot, results, loaded, chosen)


def _setups(
    nodes: int | None, routings: Sequence[str], copies: Sequence[str], seed: int | None
) -> list[Nodes]:
    """Return the nodes to compare with one cache; none without --nodes. Raises ConfigError."""
    if nodes is None:
        given = {"routing": routings, "copies": copies, "seed": () if seed is None else (seed,)}
        for name, values in given.items():
            if values:
                raise ConfigError(f"--{name} {values[0]}: expected --nodes beside it")
        return []
    kinds = [SEPARATE, *dict.fromkeys(copies or COPIES)]
    return [
        Nodes(nodes, routing, SEED if seed is None else seed, kind)
        for routing in dict.fromkeys(routings or ROUTINGS[:1])
        for kind in kinds
    ]


def _rows(
    results: Results, sizes: dict[str, int], policies: list[str]
) -> list[dict[str, str | int | float]]:
    return [
        {
            "policy": name,
            "capacity_blocks": blocks,
            "token_hit_ratio": results[Case(name, blocks)].token_ratio,
            "object_hit_ratio": results[Case(name, blocks)].object_ratio,
        }
        for blocks in sizes.values()
        for name in policies
    ]


def _row(case: Case, hits: Hits, number: int) -> dict[str, Any]:
    """Return one row of the JSON with --nodes."""
    nodes = case.nodes
    pooled = nodes is not None and nodes.copies != SEPARATE
    return {
        "policy": case.policy,
        "capacity_blocks": case.capacity,
        "cache": "pool" if pooled else "one" if nodes is None else SEPARATE,
        "nodes": 1 if nodes is None else number,
        "routing": None if nodes is None else nodes.routing,
        "seed": None if nodes is None else nodes.seed,
        "copies": nodes.copies if nodes is not None and pooled else None,
        "token_hit_ratio": hits.token_ratio,
        "object_hit_ratio": hits.object_ratio,
        "peer_hit_ratio": hits.peer_ratio,
    }


def _show_nodes(results: Results, trace: Trace, sizes: dict[str, int], setups: list[Nodes]) -> None:
    texts = {blocks: text for text, blocks in reversed(sizes.items())}
    columns = ("capacity", "blocks", "policy", "routing", "cache", "tokens hit %", "difference")
    rows = []
    for case, hits in results.items():
        one = results[case._replace(nodes=None)]
        words = ("-", "one cache")
        if case.nodes is not None:
            alone = case.nodes.copies == SEPARATE
            words = case.nodes.routing, SEPARATE if alone else f"pool, {case.nodes.copies}"
        ratios = (
            f"{100 * hits.token_ratio:.2f}",
            f"{100 * (hits.token_ratio - one.token_ratio):+.2f}",
            f"{100 * hits.object_ratio:.2f}",
            f"{100 * hits.peer_ratio:.2f}",
        )
        rows.append((texts[case.capacity], str(case.capacity), case.policy or "", *words, *ratios))
    screen().print(
        _requests(trace),
        f"{setups[0].number} nodes, seed {setups[0].seed}",
        table(
            (*columns, "objects hit %", "from peers %"), rows, left=("policy", "routing", "cache")
        ),
        sep="\n",
    )


def _requests(trace: Trace) -> str:
    return (
        f"{len(trace)} requests, {trace.tokens} tokens, {trace.lookups} blocks looked up, "
        f"{trace.unique} unique"
    )


def _show(results: Results, trace: Trace, sizes: dict[str, int], policies: list[str]) -> None:
    columns = ("capacity", "blocks", "policy", "tokens hit %", "bound", "objects hit %", "bound")
    rows = []
    for text, blocks in sizes.items():
        most = results[Case(None, blocks)]
        for name in policies:
            hits = results[Case(name, blocks)]
            ratios = (hits.token_ratio, most.token_ratio, hits.object_ratio, most.object_ratio)
            rows.append((text, str(blocks), name, *(f"{100 * ratio:.2f}" for ratio in ratios)))
    screen().print(
        _requests(trace),
        table(columns, rows, left=("policy",)),
        sep="\n",
    )


def _plot(path: str, results: Results, trace: Trace, policies: list[str]) -> None:
    def curve(policy: str | None) -> list[tuple[int, float]]:
        return [(case.capacity, r.token_ratio) for case, r in results.items() if case[0] == policy]

    title = f"{len(trace)} requests, {trace.tokens} tokens"
    curves.draw(path, title, trace.unique, {name: curve(name) for name in policies}, curve(None))
