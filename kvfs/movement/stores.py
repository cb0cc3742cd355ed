"""The client of a bucket, in a worker process: made at the first call, kept for its life.

Contract: `run_all` is what a worker is sent for whatever is asked of a bucket. It has the client
for that place, with its connections and threads; boto3 is loaded nowhere in the daemon's own
process. Not for what is asked: `uploading`, `downloading`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

from kvfs.s3.place import Place
from kvfs.s3.transfer import Terms, Transfers

PROBE_TIMEOUT = 3.0  # s; a probe asks for little, and once
CONNECT_TIMEOUT, READ_TIMEOUT, ATTEMPTS = 3.0, 15.0, 3

_kept: dict[tuple[Place, Terms, bool], Transfers] = {}
_free: dict[tuple[Place, Terms], list[Transfers]] = {}


class Job(NamedTuple):
    """What to call with a `Transfers` and these arguments."""

    do: Callable[..., Any]
    arguments: tuple[object, ...]


def run_all(place: Place, terms: Terms, jobs: Sequence[Job]) -> list[Any]:
    """Do them at once, with this process's client; what each returned, or the Exception."""
    if len(jobs) == 1:
        return [_run(place, terms, jobs[0])]
    return list(_threads().map(partial(_run, place, terms), jobs))


def _run(place: Place, terms: Terms, job: Job) -> Any:  # noqa: ANN401 (whatever jobs return)
    free = _free.setdefault((place, terms), [])
    mine = free.pop() if free else Transfers(transfers(place, terms).store, terms)
    try:
        return job.do(mine, *job.arguments)
    except Exception as error:  # noqa: BLE001 (it is raised where the job is waited for)
        return error
    finally:
        free.append(mine)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="calls")


def ready(place: Place, terms: Terms, seconds: float) -> None:
    """Have this process's client made, and be busy so long that others are asked as well."""
    began = time.monotonic()
    transfers(place, terms)
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def glance(place: Place, do: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Do it with the client that does not wait long: whoever asks has a miss otherwise."""
    return do(transfers(place, Terms(), probing=True), *arguments)


def transfers(place: Place, terms: Terms, *, probing: bool = False) -> Transfers:
    """This process's client of a place. `probing`: one that does not wait long."""
    key = (place, terms, probing)
    if key not in _kept:
        from kvfs.s3.boto import BotoStore  # noqa: PLC0415 (it takes 0.3 s and 30 MB)

        store = BotoStore(
            place,
            attempts=1 if probing else ATTEMPTS,
            connect_timeout=PROBE_TIMEOUT if probing else CONNECT_TIMEOUT,
            read_timeout=PROBE_TIMEOUT if probing else READ_TIMEOUT,
        )
        _kept[key] = Transfers(store, terms)
    return _kept[key]
