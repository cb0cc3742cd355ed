"""`kvfs replay`: does a mount find what the simulator says it would?

Plays a trace with small files in a directory of its own, as a program that knows nothing of kvfs.
"""

import itertools
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvfs import runtime
from kvfs.cli import Refusal, json_option, mountpoint_argument, with_notes
from kvfs.cli.screen import progress
from kvfs.cli.traces import block_tokens_option, trace_argument
from kvfs.errors import ConfigError
from kvfs.simulation.replay import SMALLEST_BLOCK, directory, replay
from kvfs.simulation.sweep import parse_block_size
from kvfs.simulation.trace import Trace, read


@click.command
@trace_argument
@mountpoint_argument
@click.option(
    "--namespace",
    metavar="NAME",
    help="Directory below MOUNTPOINT to use, new or empty; by default a new one, replay-PID.",
)
@block_tokens_option
@click.option(
    "--block-size",
    default="4K",
    show_default=True,
    metavar="BYTES",
    help="Bytes of the file that stands for a block, whatever its tokens; 4K at least.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Play the first so many requests only.")
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="Keep the trace's pace, so many times faster; by default as fast as it goes.",
)
@click.option("--keep", is_flag=True, help="Leave directory and files when done.")
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
    """Play a request TRACE with real files on the kvfs at MOUNTPOINT, and count the hits.

    TRACE is what `kvfs simulate` takes. Each block of a prompt is opened, read and compared with
    what was written; each one that is missing is written and renamed into place. Tokens count as
    hits up to the first missing block of a prompt, objects wherever they are found, as the
    simulator counts. A wrong byte ends it with exit code 1, and so do SIGINT and SIGTERM; what it
    made is removed first. Works on any directory.
    """
    size = parse_block_size(block_size)
    if size < SMALLEST_BLOCK:
        raise ConfigError(f"block size {block_size}: expected {SMALLEST_BLOCK} bytes or more")
    if speed is not None and not math.isfinite(speed):
        raise ConfigError(f"speed {speed}: expected a number above 0")
    if not os.path.isdir(mountpoint):
        raise ConfigError(f"{mountpoint} is not a directory")
    with _interruptible(), progress() as bar:
        task = bar.add_task("reading requests", total=limit)
        requests = itertools.islice(read(trace, block_tokens), limit)
        loaded = Trace(bar.track(requests, total=limit, task_id=task), trace)
        where = namespace if namespace is not None else f"replay-{os.getpid()}"
        with directory(mountpoint, where, keep=keep) as folder:
            bar.update(task, description="replaying", completed=0, total=len(loaded))
            played = replay(
                loaded, folder, size, speed=speed, advance=lambda n: bar.advance(task, n)
            )
    hits = played.hits
    if as_json:
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
        click.echo(json.dumps(rows, indent=2))
        return
    mount = runtime.mount_at(mountpoint)
    if mount is None or mount.fstype != runtime.FSTYPE:
        click.echo(f"note: {mountpoint} is not where a kvfs is mounted", err=True)
    click.echo(
        f"{len(loaded)} requests, {hits.tokens} tokens, {hits.objects} blocks looked up "
        f"in {played.seconds:.1f} s\n"
        f"tokens hit {100 * hits.token_ratio:.2f} %, objects hit {100 * hits.object_ratio:.2f} %\n"
        f"{played.stored} blocks stored, {played.refused} refused for lack of room"
    )


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
