"""One real S3 server for a whole run of tests."""

import itertools
import os
from collections.abc import Iterator

import boto3  # type: ignore[import-untyped]
import pytest

from kvfs.s3.boto import BotoStore
from scripts.s3_server import Server

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs. Its credentials are in the environment, as people give them."""
    server = Server(tmp_path_factory.mktemp("s3") / "server")
    before = dict(os.environ)
    try:
        server.start()
        os.environ.update(server.credentials)
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.wipe()


@pytest.fixture
def bucket(s3: Server) -> str:
    """A new bucket."""
    name = f"kvfs-test-{next(_NUMBERS)}"
    make_bucket(s3, name)
    return name


def make_bucket(s3: Server, name: str) -> None:
    session = boto3.session.Session()  # the default one keeps the credentials of another server
    session.client("s3", endpoint_url=s3.endpoint).create_bucket(Bucket=name)


@pytest.fixture
def boto(s3: Server, bucket: str) -> Iterator[BotoStore]:
    store = BotoStore(s3.place(bucket))
    yield store
    store.close()
