"""Which block of a prefix is opened next? The predictions of orders, on recorded traces.

    .venv/bin/python -m scripts.bench.successors TRACE.jsonl.xz...

The traces are Mooncake's: a line a request, with the blocks of its prompt in `hash_ids`. A step is
a block that was there before, the third of its request or a later one: by then two were opened in
order. Blocks are made in the order in which they are first named. Not for whether a prefetch pays.
"""

import json
import lzma
from collections import Counter
from itertools import pairwise
from pathlib import Path

import click

ORDERS = ("made next", "newest successor", "opened after it the last time")


def measure(path: Path) -> tuple[int, Counter[str], Counter[str]]:
    """Steps, and of these how many each order knows an answer to, and the right one."""
    made: list[int] = []
    place: dict[int, int] = {}
    newest: dict[int, int] = {}
    opened: dict[int, int] = {}
    steps, known, right = 0, Counter[str](), Counter[str]()
    with lzma.open(path) as lines:
        for line in lines:
            blocks = json.loads(line)["hash_ids"]
            here = next((n for n, one in enumerate(blocks) if one not in place), len(blocks))
            for before, block in pairwise(blocks[1:here]):
                steps += 1
                after = place[before] + 1
                guesses = (
                    made[after] if after < len(made) else None,
                    newest.get(before),
                    opened.get(before),
                )
                for name, guess in zip(ORDERS, guesses, strict=True):
                    known[name] += guess is not None
                    right[name] += guess == block
            opened.update(pairwise(blocks[:here]))
            newest.update(pairwise(blocks))
            for block in blocks:
                if block not in place:
                    place[block] = len(made)
                    made.append(block)
    return steps, known, right


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(*, traces: tuple[Path, ...]) -> None:
    """Print how often each order is right."""
    for path in traces:
        steps, known, right = measure(path)
        click.echo(f"{path.name}: {steps} steps")
        for name in ORDERS:
            share, sure = known[name] / steps, right[name] / max(1, known[name])
            click.echo(f"  {name}: knows {share:.2%}, is right in {sure:.2%} of those")


if __name__ == "__main__":
    main()
