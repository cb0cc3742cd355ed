"""Made-up traces: conversations whose turns repeat all that was said before, and add to it."""

import json
import random
from pathlib import Path

LONGEST = 12  # blocks of a conversation that goes on


def conversations(rng: random.Random, *, requests: int = 60, talks: int = 6) -> list[list[int]]:
    """The hash ids of each request. An id is one block of one conversation; the long ones end."""
    said: list[list[int]] = [[] for _ in range(talks)]
    ids = iter(range(1, 1_000_000))
    found = []
    for _ in range(requests):
        blocks = rng.choice(said)
        if len(blocks) > LONGEST:
            blocks.clear()
        blocks += [next(ids) for _ in range(rng.randint(1, 4))]
        found.append(blocks.copy())
    return found


def write(path: Path, rng: random.Random, *, requests: int = 60, talks: int = 6) -> None:
    """Write conversations as a trace. The last block of a prompt is partly filled."""
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": number,
                    "input_length": 512 * len(blocks) - rng.randrange(512),
                    "output_length": 1,
                    "hash_ids": blocks,
                }
            )
            + "\n"
            for number, blocks in enumerate(conversations(rng, requests=requests, talks=talks))
        )
    )
