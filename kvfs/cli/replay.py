"""`kvfs replay`: a request trace played on mounts.

Contract: `replay` shows whether a mount, or several mounts of a pool, reach the simulator's result.
It plays a trace with small files in a directory of its own, as a program that knows nothing of
kvfs.
"""

import math
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvfs.cli import (
    Refusal,
    give,
    is_kvfs,
    json_option,
    mountpoint_argument,
    unreachable,
    with_notes,
)
from kvfs.cli.screen import progress
from kvfs.cli.traces import block_tokens_option, load, trace_argument
from kvfs.errors import ConfigError
from kvfs.simulation.replay import SMALLEST_BLOCK, directory, replay
from kvfs.simulation.sweep import parse_block_size


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
    type=click.FloatRange(min=0, min_open=True),
    help="Keep the pace of the trace, N times faster. Default: no pauses.",
)
@click.option("--keep", is_flag=True, help="Keep the directory and its files at the end.")
@json_option
def command(
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
        loaded = load(bar, task, trace, block_tokens, limit)
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
