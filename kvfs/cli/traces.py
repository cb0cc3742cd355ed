"""What `kvfs simulate` and `kvfs replay` both say of a request trace."""

import click

from kvfs.simulation.trace import BLOCK_TOKENS

trace_argument = click.argument("trace", metavar="TRACE")
block_tokens_option = click.option(
    "--block-tokens",
    type=click.IntRange(min=1),
    default=BLOCK_TOKENS,
    show_default=True,
    metavar="N",
    help="Tokens of the block behind each hash id: 512 in Mooncake's traces, 64 in traces of "
    "kv-cache-tester, 16 in vLLM's.",
)
