"""What a mover asks a bucket: whether it can be used, and whether it answers.

Contract: runs in a worker process; `python -m kvfs.movement.asking` is the same for a mount that
has no workers yet, which reads a question as JSON and writes the answer as JSON. Raises ConfigError
for what a human must change, StoreError for what may pass. Not for objects.
"""

import json
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from kvfs.errors import ConfigError, KvfsError
from kvfs.movement import stores
from kvfs.s3.errors import RefusedError
from kvfs.s3.keys import Keys
from kvfs.s3.marker import claim, look
from kvfs.s3.nodes import Node, publish
from kvfs.s3.place import Place
from kvfs.s3.probe import probe
from kvfs.s3.transfer import Terms, Transfers


def check(place: Place, identity: str, exclusive: bool) -> Terms:  # noqa: FBT001 (sent to a worker)
    """Try what kvfs needs of a bucket, and claim the prefix; what its store honours."""
    keys = Keys(place.prefix)
    plain = stores.transfers(place, Terms())
    ours = partial(look, plain, keys, identity, exclusive=exclusive)
    terms = probe(plain.store, keys, plain.terms, look=ours)
    claim(stores.transfers(place, terms), keys, identity, exclusive=exclusive)
    return terms


def alive(place: Place) -> bool:
    """Whether it answers, within a few seconds; raises why not."""
    stores.transfers(place, Terms(), probing=True).store.list(place.prefix, limit=1)
    return True


def announce(transfers: Transfers, prefix: str, node: Node, keep: bool) -> Node:  # noqa: FBT001 (sent to a worker)
    """Say what this node has; see `nodes.publish`."""
    return publish(transfers, Keys(prefix), node, keep=keep)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        place = Place(**question["place"])
        return {"terms": asdict(check(place, question["identity"], question["exclusive"]))}
    except (ConfigError, RefusedError) as error:  # that there is no such profile is found early
        return {"refused": str(error)}
    except KvfsError as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    json.dump(_answer(json.load(sys.stdin)), sys.stdout)
