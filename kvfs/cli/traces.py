"""`kvfs simulate` and `kvfs replay`: a request trace, on paper and on a mount.

Contract: `simulate` computes the hit ratio of a cache of some size under some policies, and needs
no mount. It refuses wrong input before the first simulation begins. It reads the trace first,
because a size as a share of the trace's blocks is known only then. `replay` shows whether a mount
reaches the simulator's result. It plays a trace with small files in a directory of its own, as a
program that knows nothing of kvfs.
"""

import itertools
import math
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import Progress, TaskID

from kvfs.cli import (
    FiniteRange,
    Refusal,
    completion,
    give,
    is_kvfs,
    json_option,
    mountpoint_argument,
    unreachable,
    with_notes,
)
from kvfs.cli.screen import progress, screen, table
from kvfs.errors import ConfigError
from kvfs.simulation import curves, sweep
from kvfs.simulation.replay import SMALLEST_BLOCK, directory, replay
from kvfs.simulation.sweep import POLICIES, Capacity, Case, parse_block_size
from kvfs.simulation.trace import BLOCK_TOKENS, Hits, Trace, read

DEFAULT_POLICY = "adaptive"
TOKEN_BYTES = 128 << 10  # of Llama-3.1-8B in bf16

Results = dict[Case, Hits]

trace_argument = click.argument("trace", metavar="TRACE", shell_complete=completion.files)
block_tokens_option = click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=BLOCK_TOKENS,
    show_default=True,
    metavar="N",
    help="Tokens of the block behind each hash id: 512 in Mooncake's traces, 64 in traces of "
    "kv-cache-tester, 16 in vLLM's.",
)


def _loaded(bar: Progress, task: TaskID, trace: str, block_tokens: int, limit: int | None) -> Trace:
    requests = itertools.islice(read(trace, block_tokens), limit)
    return Trace(bar.track(requests, total=limit, task_id=task), trace)


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
def simulate_command(
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
    """Compute hit ratios of capacities on a request TRACE.

    TRACE has JSON lines in the format of Mooncake: timestamp, input_length, output_length, and
    hash_ids of blocks of --block-tokens. It may be compressed with xz or gzip; - is standard input.
    The last block of a prompt may be partly filled, with a hash id or without.

    Tokens count as hits up to the first missing block of a prompt. Objects count wherever they are
    found. Table and plot also show Belady's bound, which no policy exceeds. --json has the policies
    only, with ratios from 0 to 1.
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
        loaded = _loaded(bar, task, trace, block_tokens, limit)
        sizes = {one.text: one.blocks(loaded.unique) for one in wanted}
        names = chosen if as_json and plot is None else [*chosen, None]
        cases = list(dict.fromkeys(Case(name, sizes[text]) for text in sizes for name in names))
        bar.update(task, description="simulating", completed=0, total=len(loaded) * len(cases))
        results = dict(
            zip(cases, sweep.run(loaded, cases, lambda n: bar.advance(task, n)), strict=True)
        )
    rows = _rows(results, sizes, chosen)
    give(rows, lambda _: _show(results, loaded, sizes, chosen), as_json=as_json)
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
    columns = ("capacity", "blocks", "policy", "tokens hit %", "bound", "objects hit %", "bound")
    rows = []
    for text, blocks in sizes.items():
        most = results[Case(None, blocks)]
        for name in policies:
            hits = results[Case(name, blocks)]
            ratios = (hits.token_ratio, most.token_ratio, hits.object_ratio, most.object_ratio)
            rows.append((text, str(blocks), name, *(f"{100 * ratio:.2f}" for ratio in ratios)))
    screen().print(
        f"{len(trace)} requests, {trace.tokens} tokens, {trace.lookups} blocks looked up, "
        f"{trace.unique} unique",
        table(columns, rows, left=("policy",)),
        sep="\n",
    )


def _plot(path: str, results: Results, trace: Trace, policies: list[str]) -> None:
    def curve(policy: str | None) -> list[tuple[int, float]]:
        return [(case.capacity, r.token_ratio) for case, r in results.items() if case[0] == policy]

    title = f"{len(trace)} requests, {trace.tokens} tokens"
    curves.draw(path, title, trace.unique, {name: curve(name) for name in policies}, curve(None))


@click.command
@trace_argument
@mountpoint_argument
@click.option(
    "--namespace",
    metavar="NAME",
    help="New or empty directory below MOUNTPOINT. Default: replay-PID.",
)
@block_tokens_option
@click.option(
    "--block-size",
    default="4K",
    show_default=True,
    metavar="BYTES",
    help="Size of the file for each block, at least 4K.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after N requests.")
@click.option(
    "--speed",
    type=FiniteRange(min=0, min_open=True),
    help="Keep the pace of the trace, N times faster. Default: no pauses.",
)
@click.option("--keep", is_flag=True, help="Keep the directory and its files at the end.")
@json_option
def replay_command(
    *,
    trace: str,
    mountpoint: Path,
    namespace: str | None,
    block_tokens: int,
    block_size: str,
    limit: int | None,
    speed: float | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Play a request TRACE on a mount, and count the hits.

    TRACE is a trace as for `kvfs simulate`. The replay opens, reads and compares each block of a
    prompt. It writes missing blocks and renames them into place. Hits count as in the simulator. A
    wrong byte, SIGINT or SIGTERM ends the replay with exit code 1, after it has removed its files.
    It works on any directory.
    """
    size = parse_block_size(block_size)
    if size < SMALLEST_BLOCK:
        raise ConfigError(f"block size {block_size}: expected {SMALLEST_BLOCK} bytes or more")
    if speed is not None and not math.isfinite(speed):
        raise ConfigError(f"speed {speed}: expected a number above 0")
    try:
        is_directory = stat.S_ISDIR(mountpoint.stat().st_mode)
    except OSError as error:
        raise unreachable(mountpoint, error) from error
    if not is_directory:
        raise ConfigError(f"{mountpoint} is not a directory: give a mount point")
    with _interruptible(), progress() as bar:
        task = bar.add_task("reading requests", total=limit)
        loaded = _loaded(bar, task, trace, block_tokens, limit)
        where = namespace if namespace is not None else f"replay-{os.getpid()}"
        with directory(mountpoint, where, keep=keep) as folder:
            bar.update(task, description="replaying", completed=0, total=len(loaded))
            played = replay(
                loaded, folder, size, speed=speed, advance=lambda n: bar.advance(task, n)
            )
    hits = played.hits
    rows = {
        "namespace": where,
        "requests": len(loaded),
        "tokens": hits.tokens,
        "objects": hits.objects,
        "token_hit_ratio": hits.token_ratio,
        "object_hit_ratio": hits.object_ratio,
        "stored": played.stored,
        "refused": played.refused,
        "seconds": played.seconds,
    }
    if not as_json and not is_kvfs(mountpoint):
        click.echo(f"note: {mountpoint} is not a mount point of kvfs", err=True)
    text = (
        f"{len(loaded)} requests, {hits.tokens} tokens, {hits.objects} blocks looked up "
        f"in {played.seconds:.1f} s\n"
        f"tokens hit {100 * hits.token_ratio:.2f} %, objects hit {100 * hits.object_ratio:.2f} %\n"
        f"{played.stored} blocks stored, {played.refused} refused for lack of room"
    )
    give(rows, lambda _: click.echo(text), as_json=as_json)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the block as SIGINT does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        raise Refusal(with_notes(error, "interrupted")) from error
    finally:
        signal.signal(signal.SIGTERM, before)
