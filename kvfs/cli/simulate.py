"""`kvfs simulate`: what hit ratio would a cache of this size have, under these policies?

No mount is needed. Everything is refused before the first simulation begins; reading the trace is
part of that, as only then a share of its blocks is known.
"""

import itertools
import json

import click
from rich.table import Table

from kvfs.cli import json_option
from kvfs.cli.screen import progress, screen
from kvfs.cli.traces import block_tokens_option, trace_argument
from kvfs.errors import ConfigError
from kvfs.simulation import curves, sweep
from kvfs.simulation.sweep import POLICIES, Capacity, Case, parse_block_size
from kvfs.simulation.trace import Hits, Trace, read

DEFAULT_POLICY = "adaptive"
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
    help="How large the cache is: a share of the trace's unique blocks (5%), a number of blocks "
    "(20000), or bytes (64G, divided by --block-size). May be given several times.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help=f"What goes first, by default {DEFAULT_POLICY}. May be given several times. "
    "One of: " + ", ".join(POLICIES) + ".",
)
@block_tokens_option
@click.option(
    "--block-size",
    metavar="BYTES",
    help="Bytes of a block. The default is Llama-3.1-8B in bf16: 128 KiB a token "
    "(32 layers x 8 KV heads x 128 x 2 bytes, keys and values), so 64M for 512 tokens.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Take the first so many requests only.")
@json_option
@click.option("--plot", metavar="FILE.png", help="Draw the curves, and the bound, to this file.")
def command(
    *,
    trace: str,
    capacities: tuple[str, ...],
    policies: tuple[str, ...],
    block_tokens: int,
    block_size: str | None,
    limit: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Simulate caches of some capacities and policies on a request TRACE.

    TRACE is JSON lines in the format of Mooncake (timestamp, input_length, output_length, and
    hash_ids of blocks of --block-tokens), plain or compressed with xz or gzip, or - for standard
    input. A last block that is partly filled may have a hash id or none. Tokens count as hits up
    to the first missing block of a prompt, objects wherever they are found. The table and the
    plot have Belady's bound as well, which no policy can exceed; the JSON has the policies only,
    with ratios from 0 to 1.
    """
    chosen = list(dict.fromkeys(policies or [DEFAULT_POLICY]))
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"policy {name}: expected one of {', '.join(POLICIES)}")
    size = TOKEN_BYTES * block_tokens if block_size is None else parse_block_size(block_size)
    wanted = [Capacity.parse(text, size) for text in capacities]
    if plot is not None:
        curves.check(plot)
    with progress() as bar:
        task = bar.add_task("reading requests", total=limit)
        requests = itertools.islice(read(trace, block_tokens), limit)
        loaded = Trace(bar.track(requests, total=limit, task_id=task), trace)
        sizes = {one.text: one.blocks(loaded.unique) for one in wanted}
        names = chosen if as_json and plot is None else [*chosen, None]
        cases = list(dict.fromkeys(Case(name, sizes[text]) for text in sizes for name in names))
        bar.update(task, description="simulating", completed=0, total=len(loaded) * len(cases))
        results = dict(
            zip(cases, sweep.run(loaded, cases, lambda n: bar.advance(task, n)), strict=True)
        )
    if as_json:
        click.echo(json.dumps(_rows(results, sizes, chosen), indent=2))
    else:
        _show(results, loaded, sizes, chosen)
    if plot is not None:
        _plot(plot, results, loaded, chosen)


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


def _show(results: Results, trace: Trace, sizes: dict[str, int], policies: list[str]) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("capacity", "blocks"):
        table.add_column(name, justify="right")
    table.add_column("policy")
    for name in ("tokens hit %", "bound", "objects hit %", "bound"):
        table.add_column(name, justify="right")
    for text, blocks in sizes.items():
        most = results[Case(None, blocks)]
        for name in policies:
            hits = results[Case(name, blocks)]
            ratios = (hits.token_ratio, most.token_ratio, hits.object_ratio, most.object_ratio)
            table.add_row(text, str(blocks), name, *(f"{100 * ratio:.2f}" for ratio in ratios))
    console = screen()
    console.print(
        f"{len(trace)} requests, {trace.tokens} tokens, {trace.lookups} blocks looked up, "
        f"{trace.unique} unique",
        table,
        sep="\n",
    )


def _plot(path: str, results: Results, trace: Trace, policies: list[str]) -> None:
    def curve(policy: str | None) -> list[tuple[int, float]]:
        return [(case.capacity, r.token_ratio) for case, r in results.items() if case[0] == policy]

    title = f"{len(trace)} requests, {trace.tokens} tokens"
    curves.draw(path, title, trace.unique, {name: curve(name) for name in policies}, curve(None))
