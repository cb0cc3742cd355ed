"""Arguments of `kvfs simulate` and `kvfs replay`: the trace, and the way to the nodes of a pool.

Contract: both commands read a trace in the same way, and send each request to the same node.
"""

import itertools

import click
from rich.progress import Progress, TaskID

from kvfs.cli import completion
from kvfs.simulation.trace import BLOCK_TOKENS, Trace, read

SEED = 1

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
ROUTING_HELP = (
    "How requests reach the nodes: random (any node), sticky (a session stays at its node), prefix "
    "(the node that got the longest part of the prompt before)."
)
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), help=f"Of random and sticky routing. Default: {SEED}."
)


def load(bar: Progress, task: TaskID, trace: str, block_tokens: int, limit: int | None) -> Trace:
    """Read the trace, or its first `limit` requests. Raises ConfigError."""
    requests = itertools.islice(read(trace, block_tokens), limit)
    return Trace(bar.track(requests, total=limit, task_id=task), trace)
