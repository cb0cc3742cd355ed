"""`kvfs replay`: a request trace played on mounts.

Contract: `replay` shows whether a mount, or several mounts of a pool, reach the simulator's result.
It plays a trace with small files in a directory of its own, as a program that knows nothing of
kvfs.
"""

import math
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from kvfs.cli import (
    FiniteRange,
    Refusal,
    give,
    is_kvfs,
    json_option,
    mountpoints_argument,
    unreachable,
    with_notes,
)
from kvfs.cli.screen import progress
from kvfs.cli.traces import (
    ROUTING_HELP,
    SEED,
    block_tokens_option,
    load,
    seed_option,
    trace_argument,
)
from kvfs.errors import ConfigError
from kvfs.simulation.replay import SMALLEST_BLOCK, directory, replay
from kvfs.simulation.routing import ROUTINGS, route
from kvfs.simulation.sweep import parse_block_size


@click.command
@trace_argument
@mountpoints_argument
@click.option(
    "--namespace",
    metavar="NAME",
    help="New or empty directory below each MOUNTPOINT. Default: replay-PID.",
)
@click.option(
    "--routing",
    type=click.Choice(ROUTINGS),
    metavar="HOW",
    help=f"{ROUTING_HELP} Default: {ROUTINGS[0]}.",
)
@seed_option
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
def command(
    *,
    trace: str,
    mountpoints: tuple[Path, ...],
    namespace: str | None,
    routing: str | None,
    seed: int | None,
    block_tokens: int,
    block_size: str,
    limit: int | None,
    speed: float | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Play a request TRACE on a mount, or on mounts of a pool, and count the hits.

    TRACE is a trace as for `kvfs simulate`. The replay opens, reads and compares each block of a
    prompt. It writes missing blocks and renames them into place. Hits count as in the simulator. A
    wrong byte, SIGINT or SIGTERM ends the replay with exit code 1, after it has removed its files.
    It works on any directory.

    Each of several mounts gets the requests of one node of `kvfs simulate --nodes`, with the same
    --routing and --seed.
    """
    size = parse_block_size(block_size)
    if size < SMALLEST_BLOCK:
        raise ConfigError(f"block size {block_size}: expected {SMALLEST_BLOCK} bytes or more")
    if speed is not None and not math.isfinite(speed):
        raise ConfigError(f"speed {speed}: expected a number above 0")
    for path in mountpoints:
        _check_directory(path)
    _check_different(mountpoints)
    several = len(mountpoints) > 1
    if not several and (routing is not None or seed is not None):
        raise ConfigError("--routing and --seed: expected several mount points")
    how, drawn = routing or ROUTINGS[0], SEED if seed is None else seed
    with _interruptible(), progress() as bar, ExitStack() as stack:
        task = bar.add_task("reading requests", total=limit)
        loaded = load(bar, task, trace, block_tokens, limit)
        routes = route(loaded, how, len(mountpoints), drawn) if several else None
        where = namespace if namespace is not None else f"replay-{os.getpid()}"
        folders = [stack.enter_context(directory(one, where, keep=keep)) for one in mountpoints]
        bar.update(task, description="replaying", completed=0, total=len(loaded))
        played = replay(
            loaded,
            folders,
            size,
            routes=routes,
            speed=speed,
            advance=lambda n: bar.advance(task, n),
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
    if several:
        rows |= {"nodes": len(mountpoints), "routing": how, "seed": drawn}
    for path in mountpoints:
        if not as_json and not is_kvfs(path):
            click.echo(f"note: {path} is not a mount point of kvfs", err=True)
    text = (
        f"{len(loaded)} requests, {hits.tokens} tokens, {hits.objects} blocks looked up "
        f"in {played.seconds:.1f} s\n"
        f"tokens hit {100 * hits.token_ratio:.2f} %, objects hit {100 * hits.object_ratio:.2f} %\n"
        f"{played.stored} blocks stored, {played.refused} refused for lack of room"
    )
    if several:
        text += f"\n{len(mountpoints)} nodes, {how} routing, seed {drawn}"
    give(rows, lambda _: click.echo(text), as_json=as_json)


def _check_directory(path: Path) -> None:
    """Raise ConfigError, or ControlError for a mount whose daemon is dead."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        raise unreachable(path, error) from error
    if not is_directory:
        raise ConfigError(f"{path} is not a directory: give a mount point")


def _check_different(paths: Sequence[Path]) -> None:
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"{path} is given twice: give each mount point once")


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
