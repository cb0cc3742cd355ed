"""boto3's reading of answers that no honest server gives, and of a server that dies."""

import gc
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvfs.s3.boto import BotoStore
from kvfs.s3.direct import PATIENCE
from kvfs.s3.errors import (
    NoObjectError,
    NoUploadError,
    ObjectExistsError,
    OutageError,
    RefusedError,
    StoreError,
    StoreFullError,
    ThrottledError,
    WrongBytesError,
)
from kvfs.s3.failures import failure_of
from kvfs.s3.place import BucketPlace
from kvfs.s3.store import is_listed

Answer = Callable[[BaseHTTPRequestHandler], None]


class Liar:
    """An HTTP server that gives the same answer to every request."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _: None
        self.asked: list[str] = []
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                liar.asked.append(f"{self.command} {self.path}")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.close_connection = True
                liar.answer(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = respond  # noqa: N815 (its names)

            def log_message(self, *_: object) -> None:
                """Log nothing to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.place = BucketPlace("bucket", "", endpoint, "us-east-1")
        self.store = BotoStore(self.place, attempts=1, read_timeout=0.5)

    def close(self) -> None:
        self.store.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def one_liar() -> Iterator[Liar]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        one = Liar()
        yield one
        one.close()


@pytest.fixture
def liar(one_liar: Liar) -> Liar:
    one_liar.asked.clear()
    return one_liar


def says(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), text)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def fails(status: int, code: str) -> Answer:
    body = f"<Error><Code>{code}</Code><Message>AKIA-SECRET</Message></Error>"
    return says(status, body.encode())


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", ThrottledError),
        (503, "ServiceUnavailable", ThrottledError),
        (429, "", ThrottledError),
        (409, "ConditionalRequestConflict", ThrottledError),
        (500, "InternalError", OutageError),
        (502, "", OutageError),
        (400, "RequestTimeout", OutageError),
        (501, "NotImplemented", RefusedError),
        (403, "AccessDenied", RefusedError),
        (403, "RequestTimeTooSkewed", RefusedError),
        (301, "PermanentRedirect", OutageError),  # to itself, again and again
        (400, "InvalidArgument", RefusedError),
        (403, "QuotaExceeded", StoreFullError),
        (507, "", StoreFullError),
        (400, "BadDigest", WrongBytesError),
        (400, "XAmzContentSHA256Mismatch", WrongBytesError),
        (404, "NoSuchKey", NoObjectError),
        (412, "PreconditionFailed", ObjectExistsError),
    ],
)
def test_each_failure_is_told_apart(
    liar: Liar, status: int, code: str, expected: type[StoreError]
) -> None:
    liar.answer = fails(status, code)
    with pytest.raises(expected) as caught:
        liar.store.put("key", b"data", {}, once=True)
    assert type(caught.value) is expected
    assert str(caught.value).startswith("bucket/key: ")
    assert not {"AKIA-SECRET", "an-id", "a-secret"} & set(str(caught.value).split())


@pytest.mark.parametrize(
    "body", [b"", b"<Error><Code/></Error>", b"<html>not found</html>", b"no such page"]
)
def test_404_of_another_server_than_a_store_is_an_outage(liar: Liar, body: bytes) -> None:
    """The 404 of a HEAD has no body and tells nothing; a listing tells."""
    liar.answer = says(404, body)
    for ask in (
        lambda: list(liar.store.get("key", 0, 10)),
        lambda: liar.store.list("key"),
        lambda: liar.store.put("key", b"data", {}, once=True),
        lambda: is_listed(liar.store, "key"),
    ):
        with pytest.raises(OutageError, match="404 without a code"):
            ask()
    liar.answer = says(404, b"")
    with pytest.raises(NoObjectError):
        liar.store.head("key")


def test_codes_without_a_status_are_told_apart() -> None:
    """Such codes come in the answer to a delete of many."""
    assert isinstance(failure_of("AccessDenied", 0, "key"), RefusedError)
    assert isinstance(failure_of("InternalError", 0, "key"), OutageError)
    assert isinstance(failure_of("PermanentRedirect", 301, "key"), RefusedError)
    assert isinstance(failure_of("SlowDown", 0, "key"), ThrottledError)
    assert isinstance(failure_of("NoSuchUpload", 0, "key", missing=NoUploadError), NoUploadError)


def test_why_each_of_many_was_not_deleted(liar: Liar) -> None:
    one = b"<Error><Key>a</Key><Code>AccessDenied</Code></Error>"
    two = b"<Error><Key>b</Key><Code>InternalError</Code></Error>"
    liar.answer = says(200, b"<DeleteResult>" + one + two + b"</DeleteResult>")
    found = liar.store.delete_many(["a", "b", "c"])
    assert {key: type(error) for key, error in found.items()} == {
        "a": RefusedError,
        "b": OutageError,
    }


def piece(body: bytes, told: str, **headers: str) -> Answer:
    return says(206, body, ETag='"x"', Content_Range=told, **headers)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (says(200, b"0123456789", ETag='"x"'), WrongBytesError),  # all of it
        (piece(b"0123456789", "bytes 0-9/10"), WrongBytesError),
        (piece(b"234", "bytes 1-3/10"), WrongBytesError),
        (piece(b"23", "bytes 2-4/10", Content_Length="3"), OutageError),  # and the line is cut
        (says(206, b"234", Content_Range="bytes 2-4/10"), StoreError),  # nobody knows of what
        (says(200, b"<html>", Content_Type="text/html"), StoreError),
    ],
    ids=["whole", "longer", "elsewhere", "truncated", "no ETag", "a captive portal"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wrong_ranges(liar: Liar, answer: Answer, expected: type[StoreError]) -> None:
    liar.answer = answer
    with pytest.raises(expected):
        b"".join(liar.store.get("key", 2, 3, etag="x"))
    gc.collect()  # urllib3 leaves the socket of a response that was cut to the collector


def test_a_get_is_the_clients_where_that_is_given_more(liar: Liar) -> None:
    """Without the client, requests to a store that redirects would always be refused."""
    right = piece(b"234", "bytes 2-4/10")

    def to_the_client_only(handler: BaseHTTPRequestHandler) -> None:
        of_the_client = "amz-sdk-request" in handler.headers
        (right if of_the_client else fails(403, "AccessDenied"))(handler)

    def requests() -> int:
        liar.asked.clear()
        assert b"".join(one.get("a key/\u00e9+~", 2, 3, etag="x")) == b"234"
        assert set(liar.asked) == {"GET /bucket/a%20key/%C3%A9%2B~"}
        return len(liar.asked)

    one = BotoStore(liar.place, attempts=1)
    liar.answer = right
    assert requests() == 1
    liar.answer = to_the_client_only
    assert [requests() for _ in range(PATIENCE)] == [2] * PATIENCE
    liar.answer = right
    assert requests() == 1
    liar.answer = to_the_client_only
    assert requests() == 1, "it is not tried without the client any more"
    one.close()


@pytest.mark.parametrize("answer", [says(200), says(200, b"<html><p>"), says(200, b"{}")])
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.put("key", b"", {}, once=True),
        lambda store: store.head("key"),
        lambda store: store.begin("key", {}),
        lambda store: store.list("key"),
        lambda store: list(store.uploads("key")),
    ],
    ids=["put", "head", "begin", "list", "uploads"],
)
def test_answers_that_make_no_sense(
    liar: Liar, answer: Answer, ask: Callable[[BotoStore], object]
) -> None:
    liar.answer = answer
    try:
        found = ask(liar.store)
    except StoreError:
        return
    assert found in ([], ([], [], ""))


def test_silence_is_an_outage(liar: Liar) -> None:
    silent = threading.Event()
    liar.answer = lambda _: (silent.wait(), None)[1]
    with pytest.raises(OutageError, match="ReadTimeoutError"):
        liar.store.head("key")
    silent.set()


def test_a_request_is_tried_again_and_not_for_ever(liar: Liar) -> None:
    patient = BotoStore(liar.place, attempts=2)
    liar.answer = fails(503, "SlowDown")
    with pytest.raises(ThrottledError):
        patient.head("key")
    assert len(liar.asked) == 2
    patient.close()


def test_credentials_are_not_logged(
    liar: Liar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    caplog.set_level("DEBUG")
    one = BotoStore(liar.place, attempts=1)
    liar.answer = fails(403, "AccessDenied")
    with pytest.raises(RefusedError):
        one.put("key", b"data", {}, once=True)
    one.close()
    assert not [text for text in ("an-id", "a-secret", "a-token") if text in caplog.text]
    assert "botocore" not in caplog.text
