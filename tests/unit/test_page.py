"""The page's server, and its history, without a mount or a browser."""

import json
import math
import random
import socket
import string
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvfs.clock import Clock
from kvfs.errors import ControlError, KvfsError
from kvfs.rates import Look
from kvfs.web import history as history_module
from kvfs.web.history import COLUMNS, History, Ring
from kvfs.web.page import (
    EACH,
    FILES,
    HEADERS,
    LONGEST,
    PATHS,
    BusyError,
    Questions,
    Sources,
    handler,
)
from kvfs.web.serving import Handler, WebServer
from tests.harness import PATIENCE
from tests.unit.test_rates import namespace, pool, status

HOST = "127.0.0.1:1"
HOSTILE = "<script>alert(1)</script>"


class Answers(Questions):
    """Without a daemon."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: KvfsError | None = None

    def ranking(self, order: str) -> dict[str, Any] | None:
        found: list[dict[str, Any]] = [{"path": f"{order}/{HOSTILE}"}]
        return {"order": order, "age_s": 0, "objects": found}

    def events(self) -> list[dict[str, Any]] | None:
        return [{"time": 1.0, "kind": "takeover"}]

    def object(self, path: str) -> dict[str, Any]:
        self.asked.append(path)
        if self.error is not None:
            raise self.error
        return {"path": path}


def test_events_of_the_page_have_no_paths_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"time": 2.0, "kind": "tier", "name": "nvme tier /a/secret", "why": "'/a secret/b': gone"},
        *({"time": 3.0, "kind": "summary", "dropped": n} for n in range(30)),
    ]
    monkeypatch.setattr("kvfs.web.page.ask_daemon", lambda *_, **__: {"events": events})
    shown = Questions(Path("/mnt/kv")).events()
    assert shown is not None
    assert [one["dropped"] for one in shown] == list(range(29, 9, -1))
    del events[1:]
    shown = Questions(Path("/mnt/kv")).events()
    assert shown == [{"time": 2.0, "kind": "tier", "name": "nvme tier …", "why": "'…': gone"}]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("namespace keep: writers get ENOSPC", "namespace keep: writers get ENOSPC"),
        ("'small/b' is cut off at 1 MiB/s", "'small/b' is cut off at 1 MiB/s"),
        ("/mnt/kv: took over", "/mnt/kv: took over"),
        ("/mnt/kv/a b is pinned", "/mnt/kv/a b is pinned"),
        ("/mnt/kvs: gone", "…: gone"),
        ("nvme=/data/kvfs, /data/x; (/run/y)", "nvme=…, …; (…)"),
        ("the bucket s3://secret/prefix/: no answer", "the bucket …: no answer"),
        ('"http://s3.secret:9000/x?y": refused', '"…": refused'),
    ],
)
def test_warnings_have_their_text_but_no_place(
    monkeypatch: pytest.MonkeyPatch, text: str, wanted: str
) -> None:
    event = {"time": 1.0, "kind": "log", "level": "WARNING", "source": "x", "text": text}
    monkeypatch.setattr("kvfs.web.page.ask_daemon", lambda *_, **__: {"events": [event]})
    assert Questions(Path("/mnt/kv")).events() == [event | {"text": wanted}]


def full_status(**counters: int) -> dict[str, Any]:
    found = status(namespace("a", 100, **counters))
    for tier in found["tiers"].values():
        tier |= {"reserved_bytes": 0, "state_s": 1.0, "path": "/secret", "why": "a secret"}
    for space in found["namespaces"]:
        space |= {"problem": "", "settings": space["settings"] | {"secret": "secret"}}
    found["pool"] = pool() | {"place": "redis://secret/kv", "address": "secret", "node": "secret"}
    return found | {"objects": 3, "census_done": True, "options": {"s3_profile": "secret"}}


@contextmanager
def served(kind: type[Handler]) -> Iterator[Callable[..., bytes]]:
    """`ask(request)` gives all that is answered to these bytes."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = WebServer(listening, kind)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def ask(request: bytes, *, end: bool = True) -> bytes:
        with socket.create_connection(listening.getsockname(), PATIENCE) as connection:
            try:
                connection.sendall(request)
                if end:
                    connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as stream:
                    return stream.read()
            except ConnectionError:  # it has read enough of what makes no sense
                return b""

    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def page(answers: Answers) -> Iterator[Callable[..., bytes]]:
    """`page(request)` gives all that is answered to these bytes."""
    history = History()
    for number in range(3):
        look = Look(5.0 * number, full_status(read_ram=number * 10))
        history.add(1000.0 + 5 * number, look)
    with served(handler(Sources(history, answers), private=True)) as ask:
        yield ask


def get(path: str, host: str = HOST) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def code(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body(answer: bytes) -> Any:  # noqa: ANN401 - JSON
    return json.loads(answer.partition(b"\r\n\r\n")[2])


def test_files_and_answers_have_restrictive_headers(
    page: Callable[..., bytes],
) -> None:
    for path in (*FILES, *PATHS, "/nowhere"):
        answer = page(get(f"{path}?path=x" if path == "/api/object" else path))
        assert code(answer) == (404 if path == "/nowhere" else 200), path
        head = answer.partition(b"\r\n\r\n")[0].decode()
        assert all(f"{name}: {value}" in head for name, value in HEADERS.items())
    text = "".join(page(get(path)).partition(b"\r\n\r\n")[2].decode() for path in FILES)
    elsewhere = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert "://" not in elsewhere
    assert "innerHTML" not in text


def test_current_figures_have_no_secret(page: Callable[..., bytes]) -> None:
    found = body(page(get("/api/now")))
    assert found["up"]
    assert found["tiers"]["s3"]["dirty_objects"] == 7
    (space,) = found["namespaces"]
    assert (space["name"], space["now"], space["opens"]) == ("a", 1.0, 2.0)
    assert (space["writing"], space["eviction"]) == (0, "adaptive")
    assert (found["tiers"]["ram"]["reserved_bytes"], found["tiers"]["ram"]["taken"]) == (0, 0.25)
    assert found["detached"] is False
    assert (found["pool"]["nodes"], found["pool"]["up"], found["pool"]["served"]) == (3, False, 0)
    assert "secret" not in json.dumps(found)


def test_history_is_given_from_a_time_on(page: Callable[..., bytes]) -> None:
    found = body(page(get("/api/history?span=hour&after=0")))
    assert found["times"] == [1000.0, 1005.0, 1010.0]
    assert found["series"]["used ram"] == [250.0, 250.0, 250.0]
    assert found["series"]["ratio"] == [None, 1.0, 1.0]
    assert not [name for name in found["series"] if name.startswith("namespace")]
    later = body(page(get("/api/history?after=1005&namespace=a")))
    assert later["times"] == [1010.0]
    assert later["series"]["namespace opens a"] == [2.0]
    assert body(page(get("/api/history?namespace=none")))["series"] == {}


def test_a_path_may_have_any_bytes(page: Callable[..., bytes], answers: Answers) -> None:
    assert code(page(get("/api/object?path=a%2F%ff%3Cscript%3E"))) == 200
    assert answers.asked == ["a/\udcff<script>"]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ControlError(f"there is no {HOSTILE}"), 404),
        (BusyError("busy"), 429),
        (KvfsError("x"), 404),
    ],
)
def test_refusal_of_the_daemon_is_a_status_code_without_text(
    page: Callable[..., bytes], answers: Answers, error: KvfsError, wanted: int
) -> None:
    answers.error = error
    answer = page(get("/api/object?path=x"))
    assert code(answer) == wanted
    assert HOSTILE.encode() not in answer


def test_a_daemon_that_is_away_is_another_code(
    page: Callable[..., bytes], answers: Answers
) -> None:
    answers.error = ControlError("no daemon answers")
    answers.error.__cause__ = ConnectionRefusedError()
    assert code(page(get("/api/object?path=x"))) == 503


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        *((host, 200) for host in ("localhost", "localhost:8080", "127.0.0.1", "[::1]:80")),
        *((host, 421) for host in ("evil.example", "localhost.evil.example:80", "1.2.3", "::1")),
        *((host, 421) for host in ("127.0.0.1.evil.example", "[::1", "kvfs", "127.0.0.1:port")),
    ],
)
def test_a_name_that_leads_here_is_not_answered(
    page: Callable[..., bytes], host: str, wanted: int
) -> None:
    assert code(page(get("/api/now", host))) == wanted


def test_head_is_the_same_without_a_body(page: Callable[..., bytes]) -> None:
    head = page(get("/page.css").replace(b"GET", b"HEAD"))
    assert code(head) == 200
    assert head.endswith(b"\r\n\r\n")
    length = len(page(get("/page.css")).partition(b"\r\n\r\n")[2])
    assert f"\r\nContent-Length: {length}\r\n".encode() in head


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (b"GET\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1 more\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/x.y\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + 200 * b"X: y\r\n" + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + 70000 * b"x" + b"\r\n\r\n", 431),
        (b"GET /" + 70000 * b"x" + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 414),
        (get("/api/object?path=%zz"), 400),
        (get("/api/object?path=%"), 400),
        (get("/%zz"), 400),
        (get("/api/object?path=a%00b"), 400),
        (get("/api/object"), 400),
        (get("/api/object?path=a&path=b"), 400),
        (get("/api/object?path=a&x=b"), 400),
        (get("/api/now?" + HOSTILE), 400),
        (get("/api/history?span=year"), 400),
        (get("/api/history?after=never"), 400),
        (get("/api/history?after=nan"), 400),
        (get("/api/history?after=inf"), 400),
        (get("/api/objects?order=best"), 400),
        (get("/" + HOSTILE), 404),
        (get("/../page.py"), 404),
        (get("/static/page.js"), 404),
        (get("http://evil.example/"), 404),
        *(
            (f"{method} / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(), 405)
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "BREW")
        ),
    ],
)
def test_malformed_request_is_refused_and_not_echoed(
    page: Callable[..., bytes], request_: bytes, wanted: int
) -> None:
    answer = page(request_)
    assert code(answer) == wanted
    assert b"script>" not in answer
    assert b"nosniff" in answer
    assert code(page(get("/"))) == 200


def test_noise_of_any_kind_ends_nothing(page: Callable[..., bytes]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    good = get("/api/object?path=a%2Fb")
    for _ in range(300):
        noise = bytearray(good)
        for _ in range(chance.randrange(1, 8)):
            at = chance.randrange(len(noise))
            what = chance.choice((b"", b"\r\n", b"%", b"\0", chance.randbytes(3), b" ", b"?&="))
            noise[at : at + chance.randrange(4)] = what
        answer = page(bytes(noise))
        assert not answer or code(answer) in {200, 400, 404, 405, 414, 421, 431, 505}, noise
    assert code(page(good)) == 200


# History


def test_ring_keeps_its_length_and_forgets_old_names() -> None:
    ring = Ring(3)
    for number in range(5):
        ring.put(float(number), {"a": number, **({"b": 9.0} if number == 1 else {})})
    found = ring.since(0.0)
    assert found["times"] == [2.0, 3.0, 4.0]
    assert found["series"] == {"a": [2.0, 3.0, 4.0]}
    ring.put(5.0, {"c": math.pi})
    assert ring.since(4.0)["series"] == {"a": [None], "c": [3.14159]}


def test_there_are_so_many_series_at_most_and_new_ones_have_room_again() -> None:
    ring = Ring(2)
    ring.put(0.0, {f"{number}": 1.0 for number in range(COLUMNS + 10)})
    assert len(ring.names()) == COLUMNS
    ring.put(1.0, {"late": 1.0})
    assert "late" not in ring.names()
    ring.put(2.0, {})
    ring.put(3.0, {"late": 1.0})
    assert ring.names() == ["late"]


def test_a_minute_is_the_mean_of_its_samples_and_silence_is_none() -> None:
    history = History()
    for number in range(history_module.MINUTE):
        look = Look(5.0 * number, full_status(read_ram=10 * number)) if number % 2 else None
        history.add(5.0 * number, look)
    assert history.last() == (look, None)
    day = history.since("day", 0.0)
    assert day["times"] == [55.0]
    assert day["series"]["used ram"] == [250.0]
    assert history.since("hour", 0.0)["series"]["used ram"][:2] == [250.0, None]
    with pytest.raises(KeyError):
        history.since("year", 0.0)


# Questions


def test_single_objects_are_asked_for_so_often_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    slept: list[float] = []

    def request(_mountpoint: Path, _patience: float, _verb: str, *, path: str) -> dict[str, Any]:
        asked.append(path)
        return {}

    monkeypatch.setattr("kvfs.web.page.request_within", request)
    questions = Questions(tmp_path, Clock(lambda: 100.0, slept.append))
    most = int(EACH * LONGEST) + 1
    for name in string.ascii_letters[:most]:
        questions.object(f"{tmp_path}/{name}")
    with pytest.raises(BusyError):
        questions.object("one more")
    assert asked == list(string.ascii_letters[:most])
    assert max(slept) == pytest.approx(LONGEST)
