"""The real server dies: acknowledged objects are there, the others are whole or absent."""

import os
import random

import pytest
import xxhash

from kvfs.s3.boto import BotoStore
from kvfs.s3.errors import NoObjectError, OutageError
from kvfs.s3.store import PART_MIN
from kvfs.s3.transfer import StoreTransfers, Terms
from scripts.s3_server import Server
from tests.s3.faulty import FaultyStore

DATA = random.Random(7).randbytes(3 * PART_MIN + 1)
DIGEST = xxhash.xxh3_128_digest(DATA)
TERMS = Terms(single=1 << 20, part=PART_MIN, parallel=2, once_complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["put_part", "complete"])
def test_the_server_is_killed_during_an_upload(s3: Server, bucket: str, verb: str) -> None:
    patient = BotoStore(s3.place(bucket))
    patient.put("acknowledged", b"bytes", {}, once=True)
    begun: list[str] = []

    def kill(called: str) -> None:
        if called == verb and one.calls[verb] == 0:
            s3.kill("rgw", "osd")

    one = FaultyStore(BotoStore(s3.place(bucket), attempts=1, read_timeout=1.0), pause=kill)
    fd = os.memfd_create("object")
    os.pwrite(fd, DATA, 0)

    def upload(transfers: StoreTransfers) -> str:
        return transfers.upload(
            "key", fd, len(DATA), {}, digest=DIGEST, once=True, begun=begun.append
        )

    try:
        with pytest.raises(OutageError):
            upload(StoreTransfers(one, TERMS))
    finally:
        s3.start()
    assert patient.head("acknowledged").size == 5
    with pytest.raises(NoObjectError):
        patient.head("key")
    # Its id was told, so whoever comes after can find it and abort it.
    [left] = patient.uploads("")
    assert left.upload_id == begun[0]
    patient.abort(left.key, left.upload_id)
    transfers = StoreTransfers(patient, TERMS)
    etag = upload(transfers)
    os.ftruncate(fd, 0)
    transfers.download("key", fd, len(DATA), etag=etag, digest=DIGEST)
    assert os.pread(fd, len(DATA), 0) == DATA
    assert list(patient.uploads("")) == []
    os.close(fd)
