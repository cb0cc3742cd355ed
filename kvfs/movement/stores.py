"""The client of a bucket, in a worker process: made at the first call, kept for its life.

Contract: `run` is what a worker is sent for whatever is asked of a bucket. It has the client for
that place, with its connections and threads, and boto3 is loaded then and nowhere else in the
daemon's processes. Not for what is asked: `uploading`, `downloading`.
"""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvfs.s3.place import Place
from kvfs.s3.transfer import Terms, Transfers

P = ParamSpec("P")
T = TypeVar("T")

PROBE_TIMEOUT = 3.0  # s; a probe asks for little, and once
CONNECT_TIMEOUT, READ_TIMEOUT, ATTEMPTS = 3.0, 15.0, 3

_kept: dict[tuple[Place, Terms, bool], Transfers] = {}


def run(
    place: Place,
    terms: Terms,
    do: Callable[Concatenate[Transfers, P], T],
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    """Do it with this process's client. Raises what `do` raises."""
    return do(transfers(place, terms), *arguments, **options)


def glance(
    place: Place,
    terms: Terms,
    do: Callable[Concatenate[Transfers, P], T],
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    """As `run`, with the client that does not wait long: whoever asks has a miss otherwise."""
    del terms  # of the probes, whose connections these are
    return do(transfers(place, Terms(), probing=True), *arguments, **options)


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
