"""A client of the real S3 server."""

from collections.abc import Iterator

import pytest

from kvfs.s3.boto import BotoStore
from scripts.s3_server import Server


@pytest.fixture
def boto(s3: Server, bucket: str) -> Iterator[BotoStore]:
    store = BotoStore(s3.place(bucket))
    yield store
    store.close()
