"""Any bytes as a store's answer: the result, or a StoreError; a mover lives on."""

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import example, given

from kvfs.s3.boto import BotoStore
from kvfs.s3.errors import StoreError
from kvfs.s3.place import BucketPlace
from tests.unit.fuzz import fuzzed, spoiled_bytes

LIST = (
    '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated><Contents>'
    "<Key>p/k</Key><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>x</ETag><Size>1</Size></Contents>"
    "<CommonPrefixes><Prefix>p/d/</Prefix></CommonPrefixes></ListBucketResult>"
)
HEAD = (
    'HTTP/1.1 {} OK\r\nConnection: close\r\nETag: "x"\r\nContent-Length: {}\r\n'
    "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\n"
    "Content-Range: bytes 0-0/1\r\nx-amz-meta-kvfs-format: 1\r\n\r\n{}"
)
LISTED, GOT, FOUND = (
    HEAD.format(200, len(LIST), LIST),
    HEAD.format(206, 1, "x"),
    HEAD.format(200, 1, ""),
)
ENTITIES = "".join(
    f"<!ENTITY e{n} '{f'&e{n - 1};' * 10 if n else 'aaaaaaaaaa'}'>" for n in range(9)
)
BOMB = LIST.replace("<ListB", f"<!DOCTYPE l [{ENTITIES}]><ListB", 1).replace("p/k", "&e8;")


class Liar:
    """A server that gives the same answer to every request."""

    def __init__(self) -> None:
        self.answer = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(1 << 16)):
                    asked += more
                if not asked:
                    return
                try:
                    connection.sendall(self.answer)
                except OSError:  # what had come was enough
                    continue

    def close(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port)):
            pass  # without a word
        self._thread.join()
        self._listening.close()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    one = Liar()
    yield one
    one.close()


@pytest.fixture(scope="module")
def store(liar: Liar) -> Iterator[BotoStore]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "nobodys")
        place = BucketPlace("bucket", endpoint=f"http://127.0.0.1:{liar.port}", region="us-east-1")
        one = BotoStore(place, attempts=1, read_timeout=5.0)
        yield one
        one.close()


@fuzzed
@given(spoiled_bytes([LISTED, GOT, FOUND, LIST]))
@example(LISTED.encode())
@example(GOT.encode())
@example(LISTED.replace("2026-01-01T00", "garbage").encode())
@example(LISTED.replace("2026-01-01T00:00:00Z", "9" * 20).encode())
@example(LISTED.replace("<Size>1", "<Size>x").encode())
@example(LISTED.replace("<Size>1", "<Size>" + "9" * 5000).encode())
@example(GOT.replace("Length: 1", "Length: " + "9" * 5000).encode())
@example(GOT.replace("0-0/1", "0-0/" + "9" * 5000).encode())
@example(FOUND.replace("2026", "99999").encode())
@example(FOUND.replace("2026", "9" * 20).encode())
@example(HEAD.format(200, len(BOMB), BOMB).encode())
def test_any_answer(liar: Liar, store: BotoStore, answer: bytes) -> None:
    liar.answer = answer
    for ask in (
        lambda: store.list("p/"),
        lambda: store.head("p/k"),
        lambda: store.peek("p/k", 1, etag="x"),
        lambda: b"".join(store.get("p/k", 0, 1, etag="x")),
        lambda: store.put("p/k", b"x", {}, once=True),
        lambda: store.delete_many(["p/k"]),
        lambda: list(store.uploads("p/")),
        store.clock,
    ):
        try:
            ask()
        except StoreError:
            continue


def test_correct_answers_are_parsed(liar: Liar, store: BotoStore) -> None:
    liar.answer = LISTED.encode()
    assert [one.key for one in store.list("p/").entries] == ["p/k"]
    liar.answer = GOT.encode()
    assert store.peek("p/k", 1, etag="x")[1] == b"x"
