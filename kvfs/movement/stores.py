"""The client of a bucket in a worker process, and checks that the bucket is usable and answers.

Contract: the daemon sends `run_all` to a worker for every call about the bucket. The worker makes
the client of that bucket at its first call, and keeps it, with its connections and threads, until
the worker ends. The daemon's own process never loads boto3. `python -m kvfs.movement.stores` is
`check` for a mount that has no workers yet; it reads a question as JSON and writes the answer as
JSON. `check` raises ConfigError for a problem that a human must solve, and StoreError for a problem
that may end by itself. Not for objects: `uploading`, `downloading`, `looking`.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from typing import Any, NamedTuple

from kvfs.errors import ConfigError, KvfsError
from kvfs.s3.errors import RefusedError
from kvfs.s3.keys import Keys
from kvfs.s3.marker import claim, look
from kvfs.s3.place import BucketPlace
from kvfs.s3.probe import probe
from kvfs.s3.transfer import StoreTransfers, Terms

PROBE_TIMEOUT = 3.0  # s; a probe asks for little, and once
CONNECT_TIMEOUT, READ_TIMEOUT, ATTEMPTS = 3.0, 15.0, 3

_kept: dict[tuple[BucketPlace, Terms, bool], StoreTransfers] = {}  # the clients
# Transfers that no job of this process uses now: a job needs one of its own.
_free: dict[tuple[BucketPlace, Terms], list[StoreTransfers]] = {}


class StoreCall(NamedTuple):
    """A function to call with a `StoreTransfers` and these arguments."""

    do: Callable[..., Any]
    arguments: tuple[object, ...]
    options: Mapping[str, object] = {}


def run_all(place: BucketPlace, terms: Terms, jobs: Sequence[StoreCall]) -> list[Any]:
    """Run the jobs at once, with this process's client; return each result, or its Exception."""
    if len(jobs) == 1:
        return [_run(place, terms, jobs[0])]
    return list(_threads().map(partial(_run, place, terms), jobs))


def _run(place: BucketPlace, terms: Terms, job: StoreCall) -> Any:  # noqa: ANN401 (a job may return anything)
    free = _free.setdefault((place, terms), [])
    mine = free.pop() if free else StoreTransfers(transfers(place, terms).store, terms)
    try:
        return job.do(mine, *job.arguments, **job.options)
    except Exception as error:  # noqa: BLE001 (raised where the job is waited for)
        return error
    finally:
        free.append(mine)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="calls")


def start_client(place: BucketPlace, terms: Terms, seconds: float) -> None:
    """Make this process's client. Takes `seconds`, so that other workers start too."""
    began = time.monotonic()
    transfers(place, terms)
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def glance(place: BucketPlace, job: StoreCall) -> Any:  # noqa: ANN401 (a job may return anything)
    """Run a job with the client of short timeouts: a program waits, and a late answer is a miss."""
    return job.do(transfers(place, Terms(), probing=True), *job.arguments, **job.options)


def transfers(place: BucketPlace, terms: Terms, *, probing: bool = False) -> StoreTransfers:
    """This process's client of a bucket. `probing`: a client with short timeouts, and one try."""
    key = (place, terms, probing)
    if key not in _kept:
        from kvfs.s3.boto import BotoStore  # noqa: PLC0415 (it takes 0.3 s and 30 MB)

        store = BotoStore(
            place,
            attempts=1 if probing else ATTEMPTS,
            connect_timeout=PROBE_TIMEOUT if probing else CONNECT_TIMEOUT,
            read_timeout=PROBE_TIMEOUT if probing else READ_TIMEOUT,
        )
        _kept[key] = StoreTransfers(store, terms)
    return _kept[key]


def check(place: BucketPlace, identity: str, exclusive: bool) -> Terms:  # noqa: FBT001 (sent to a worker)
    """Try every request that kvfs needs, and claim the prefix; return what the store honours."""
    keys = Keys(place.prefix)
    plain = transfers(place, Terms())
    ours = partial(look, plain, keys, identity, exclusive=exclusive)
    terms = probe(plain.store, keys, plain.terms, look=ours)
    claim(transfers(place, terms), keys, identity, exclusive=exclusive)
    return terms


def alive(place: BucketPlace) -> bool:
    """Whether the store answers within a few seconds. Raises the reason if it does not."""
    transfers(place, Terms(), probing=True).store.list(place.prefix, limit=1)
    return True


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        place = BucketPlace(**question["place"])
        return {"terms": asdict(check(place, question["identity"], question["exclusive"]))}
    except (ConfigError, RefusedError) as error:  # for example a missing profile
        return {"refused": str(error)}
    except KvfsError as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    json.dump(_answer(json.load(sys.stdin)), sys.stdout)
