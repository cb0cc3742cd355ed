"""A real mount on a real store, with a proxy between them that lies, refuses and loses answers."""

import errno
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.s3.proxy import Answer, Hangup, Proxy, Request, error
from tests.s3.rig import bytes_in, narrow, says_no_secret, send_away
from tests.s3.test_mounted import all_uploaded, attribute, s3_of, unfinished

MIB = 1 << 20
_dice = random.Random(11)
SMALL, OTHER, LARGE = (_dice.randbytes(size) for size in (200_000, 200_000, 66 * MIB))


class Fronted(NamedTuple):
    kv: Mounted
    proxy: Proxy
    server: Server
    bucket: str

    def there(self) -> dict[str, bytes]:
        return bytes_in(self.server, self.bucket)


Front = Callable[..., Fronted]


@pytest.fixture
def proxy(s3: Server) -> Iterator[Proxy]:
    one = Proxy(s3.port)
    one.start()
    yield one
    one.stop()


@pytest.fixture
def front(s3: Server, bucket: str, proxy: Proxy, mount: Mount) -> Iterator[Front]:
    """`front(options)` mounts with a proxy before the server, which is there until the unmount."""
    made: list[Mounted] = []

    def make(options: str = "s3_wait=20") -> Fronted:
        kv = mount(
            "ram=128M,nvme={tmp}/nvme,nvme_size=512M,log_level=debug,s3_delay=0.1,"
            f"s3=s3://{bucket}/p,s3_endpoint={proxy.endpoint},s3_region=us-east-1,{options}"
        )
        made.append(kv)
        return Fronted(kv, proxy, s3, bucket)

    yield make
    for kv in made:
        says_no_secret(kv, s3.credentials["AWS_SECRET_ACCESS_KEY"])
        says_no_secret(kv, s3.credentials["AWS_ACCESS_KEY_ID"])


def refuse(answer: Answer, *verbs: str) -> Callable[[Request], Answer | None]:
    """Answer requests of these verbs, or of all, with this, before the server gets them."""
    return lambda request: answer if not verbs or request.verb in verbs else None


def read_or_miss(path: Path) -> bytes | None:
    """The bytes, or None for ENOENT; no other error is allowed."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


REFUSALS = (  # status, code, verbs, and what the mount says then
    (503, "SlowDown", ("put", "get", "put_part"), "suspect", "SlowDown, HTTP 503"),
    (403, "AccessDenied", ("put", "get", "put_part"), "suspect", "check the credentials"),
    (403, "RequestTimeTooSkewed", (), "down", "set the clock of this machine, or the store's"),
    (404, "", (), "down", "HTTP 404 without a code: the endpoint is no S3 store"),
)


def test_a_store_that_refuses_for_a_while_costs_nothing_but_time(front: Front) -> None:
    kv, proxy, *_ = fronted = front()
    kv.allow_log("record is not in|is tried again|stays in the bucket|s3 tier")
    away = narrow(kv, "n")
    gone = {f"gone{number}": SMALL + bytes([number]) for number in range(len(REFUSALS))}
    send_away(away, gone)
    all_uploaded(kv)
    wanted = {f"n@1/{name}": data for name, data in gone.items()}
    for (status, code, verbs, state, said), name in zip(REFUSALS, gone, strict=True):
        here = kv.path / f"here-{name}"
        proxy.before = refuse(error(status, code), *verbs)
        here.write_bytes(OTHER)
        wait_for(lambda: s3_of(kv)["state"] == state, f"{s3_of(kv)} says {state}")  # noqa: B023 (it is called at once)
        wait_for(lambda: said in s3_of(kv)["why"], f"{s3_of(kv)} says {said}")  # noqa: B023 (it is called at once)
        assert here.read_bytes() == OTHER
        assert read_or_miss(away / name) is None
        assert (away / name).stat().st_size == len(gone[name])
        assert s3_of(kv)["dirty_objects"] == 1
        assert said in kv.log.read_text()
        proxy.honest()
        all_uploaded(kv)
        found = wait_for(lambda: read_or_miss(away / name), "the store answers, and it is read")  # noqa: B023 (it is called at once)
        assert found == gone[name]
        wanted[f"@0/{here.name}"] = OTHER
    wait_for(lambda: s3_of(kv)["state"] == "healthy", "it is well again")
    assert not s3_of(kv)["why"]
    assert wanted.items() <= fronted.there().items()


def test_a_store_that_is_merely_slow_costs_nothing_but_time(
    front: Front, mount: Mount, bucket: str
) -> None:
    # Each request takes a third of a second: nothing is ill, missed or said for that.
    kv, proxy, *_ = fronted = front()
    other = mount(
        f"ram=64M,s3_delay=0.1,s3=s3://{bucket}/p,s3_endpoint={proxy.endpoint},s3_region=us-east-1",
        "other",
    )
    proxy.delay = 0.3
    away = narrow(kv, "n")
    contents = {f"f{number}": SMALL + bytes([number]) for number in range(5)}
    send_away(away, contents)
    assert {name: (away / name).read_bytes() for name in contents} == contents
    (kv.path / "d").mkdir()
    (kv.path / "large").write_bytes(LARGE)
    (kv.path / "d" / "x").write_bytes(SMALL)
    (kv.path / "gone").write_bytes(SMALL)
    all_uploaded(kv)
    (kv.path / "d" / "x").rename(kv.path / "d" / "y")
    (kv.path / "gone").unlink()
    all_uploaded(kv)
    wait_for(lambda: s3_of(kv)["to_delete"] == 0, "all is deleted")
    there = fronted.there()
    assert there["@0/large"] == LARGE
    assert {"@0/d/y", "@0/large"} == {key for key in there if key.startswith("@0/")}
    # What a look-up waits is a second: on a busy machine the next look finds it.
    for name, data in (("d/y", SMALL), ("n/f0", contents["f0"]), ("large", LARGE[:0])):
        wait_for((other.path / name).exists, f"{name} is found")
        if data:
            assert (other.path / name).read_bytes() == data
    wait_for(lambda: "y" in os.listdir(other.path / "d"), "it is listed")
    for one in (kv, other):
        assert s3_of(one)["failures"] == 0
        wait_for(lambda: s3_of(one)["state"] == "healthy", "it is not ill")  # noqa: B023 (it is called at once)


def test_a_store_that_is_full_is_said_so_as_long_as_it_is(front: Front) -> None:
    kv, proxy, *_ = fronted = front("s3_wait=4,s3_dirty=2M")
    kv.allow_log("record is not in|is tried again|s3 tier|is not uploaded")
    kv.expect_log(
        "2097152 bytes wait for their upload, the most that s3_dirty allows: writers wait"
    )
    away = narrow(kv, "n")
    send_away(away, {"gone": SMALL})
    all_uploaded(kv)
    proxy.before = refuse(error(507, "InsufficientStorage"), "put", "begin", "put_part", "complete")
    written: dict[str, bytes] = {}

    def fill() -> None:
        for number in range(20):
            (kv.path / f"f{number}").write_bytes(SMALL + bytes([number]))
            written[f"@0/f{number}"] = SMALL + bytes([number])

    with pytest.raises(OSError, match="No space left") as refused:
        fill()
    assert refused.value.errno == errno.ENOSPC
    assert len(written) * len(SMALL) >= 2 * MIB, "not before the bound"
    with pytest.raises(OSError, match="No space left"):
        (kv.path / "more").write_bytes(SMALL)
    assert "InsufficientStorage, HTTP 507" in s3_of(kv)["why"]
    assert s3_of(kv)["state"] == "suspect", "as long as nothing goes up"
    assert s3_of(kv)["oldest_dirty_s"] >= 3
    assert (away / "gone").read_bytes() == SMALL, "it gives what it has"
    for key, data in written.items():
        assert (kv.path / key.removeprefix("@0/")).read_bytes() == data
    proxy.honest()
    all_uploaded(kv)
    (kv.path / "more").write_bytes(SMALL)
    all_uploaded(kv)
    there = fronted.there()
    assert {key: there[key] for key in written} == written
    assert kv.log.read_text().count("the most that s3_dirty allows") == 1


def test_bytes_that_are_wrong_are_never_read(front: Front) -> None:
    kv, proxy, *_ = fronted = front()
    kv.expect_log("is lost on this node, .* keeps it")
    kv.allow_log("is fetched once more")
    away = narrow(kv, "n")

    def flip(answer: Answer) -> Answer:
        return answer.of(bytes([answer.body[0] ^ 1]) + answer.body[1:])

    def shorter(answer: Answer) -> Answer:
        return answer.of(answer.body[:-1])

    def longer(answer: Answer) -> Answer:
        return answer.of(answer.body + b"x")

    def nothing(answer: Answer) -> Answer:
        return answer.of(b"")

    def whole(answer: Answer) -> Answer:
        headers = {k: v for k, v in answer.headers.items() if k != "Content-Range"}
        return Answer(200, headers, OTHER + OTHER)

    lies = {lie.__name__: lie for lie in (flip, shorter, longer, nothing, whole)}
    send_away(away, dict.fromkeys(lies, SMALL))
    all_uploaded(kv)
    for name, lie in lies.items():
        proxy.after = lambda request, answer, lie=lie: (  # type: ignore[misc]
            lie(answer) if request.verb == "get" else answer
        )
        assert read_or_miss(away / name) is None, name
        wait_for(lambda: not (away / name).exists(), f"{name} is gone")  # noqa: B023 (it is called at once)
    proxy.honest()
    (away / "new").write_bytes(OTHER)
    assert (away / "new").read_bytes() == OTHER
    (away / "flip").write_bytes(OTHER)
    all_uploaded(kv)
    there = fronted.there()
    assert there["n@1/flip"] == OTHER, "it is written anew"
    assert {there[f"n@1/{name}"] for name in lies if name != "flip"} == {SMALL}, "it stays"
    assert read_or_miss(away / "longer") is None
    kv.remount()
    wait_for(lambda: read_or_miss(away / "longer") == SMALL, "what is between is well again")


def test_answer_about_another_object_is_a_miss(front: Front, mount: Mount, bucket: str) -> None:
    kv, proxy, *_ = front()
    names = ("head", "beside", "gone", "other")
    for name in names:
        (kv.path / name).write_bytes(OTHER if name == "other" else SMALL)
    all_uploaded(kv)
    fresh = mount(
        f"ram=64M,s3_recheck=2,s3=s3://{bucket}/p,s3_endpoint={proxy.endpoint},s3_region=us-east-1",
        "fresh",
    )
    fresh.allow_log("is lost on this node, .* keeps it|is fetched once more")
    fresh.allow_log("an object is skipped|s3 tier|stays in the bucket")

    kept_heads: dict[str, Answer] = {}

    def lie(request: Request, answer: Answer) -> Answer:
        name = request.key.rpartition("/")[2]
        if request.verb == "head" and name == "other":
            kept_heads[request.key] = answer
        if request.verb == "head" and name in {"head", "beside"}:
            theirs = kept_heads["p/@0/other"]
            told = {key: text for key, text in theirs.headers.items() if _is_metadata(key)}
            kept = {key: text for key, text in answer.headers.items() if not _is_metadata(key)}
            return theirs if name == "head" else replace(answer, headers=kept | told)
        return error(404, "NoSuchKey") if (request.verb, name) == ("get", "gone") else answer

    proxy.after = lie
    wait_for(lambda: read_or_miss(fresh.path / "other") == OTHER, "what is true is read")
    for name in names[:-1]:
        wait_for((fresh.path / name).exists, "the bucket says that it is there")
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                (fresh.path / name).open("rb")
    proxy.honest()
    for name in ("head", "gone"):
        found = wait_for(lambda: read_or_miss(fresh.path / name), "the bucket says what it has")  # noqa: B023 (it is called at once)
        assert found == SMALL
    assert read_or_miss(fresh.path / "beside") is None, "its bytes were wrong for it"


def _is_metadata(name: str) -> bool:
    return name.lower().startswith("x-amz-meta-")


def test_a_lie_that_is_told_once_costs_nothing(front: Front) -> None:
    kv, proxy, *_ = front()
    kv.allow_log("is fetched once more|stays in the bucket|s3 tier")
    away = narrow(kv, "n")
    contents = {f"f{number}": SMALL + bytes([number]) for number in range(3)} | {"large": LARGE}
    send_away(away, contents)
    all_uploaded(kv)
    told: set[str] = set()

    def once(request: Request, answer: Answer) -> Answer:
        if request.verb != "get" or request.key in told:
            return answer
        told.add(request.key)
        if request.key.endswith("f0"):
            return answer.of(bytes([answer.body[0] ^ 1]) + answer.body[1:])
        if request.key.endswith("f1"):
            raise Hangup
        return Answer(answer.status, answer.headers, answer.body[:1000], len(answer.body))

    proxy.after = once
    for name, data in contents.items():
        assert read_or_miss(away / name) == data, name
    assert len(told) == len(contents)
    send_away(away, {"gone": SMALL})
    all_uploaded(kv)
    proxy.after = lambda request, answer: (
        Answer(answer.status, answer.headers, answer.body[:1000], len(answer.body))
        if request.verb == "get"
        else answer
    )
    assert read_or_miss(away / "gone") is None, "each of them ends early"
    assert (away / "gone").stat().st_size == len(SMALL), "that may pass"
    proxy.honest()
    assert wait_for(lambda: read_or_miss(away / "gone"), "it is read") == SMALL


def test_replaced_object_is_not_served_again(front: Front) -> None:
    kv, proxy, *_ = front()
    kv.expect_log("is lost")
    kv.allow_log("is fetched once more|is listed, but|but it is listed|s3 tier")
    away = narrow(kv, "n")
    kept: dict[str, Answer] = {}

    def keep(request: Request, answer: Answer) -> Answer:
        if request.verb in {"get", "head"}:
            kept.setdefault(f"{request.method} {request.key}", answer)
        return answer

    def replay(request: Request) -> Answer | None:
        return kept.get(f"{request.method} {request.key}")

    def replay_with_new_etag(request: Request) -> Answer | None:
        found = replay(request)
        etag = request.headers.get("If-Match")
        if found is not None and etag is not None:
            found.headers["ETag"] = etag
        return found

    proxy.after = keep
    for name, replayed in (("a", replay), ("b", replay_with_new_etag)):
        send_away(away, {name: SMALL})
        assert (away / name).read_bytes() == SMALL
        (away / name).write_bytes(OTHER)
        (away / f"after-{name}").write_bytes(SMALL)
        wait_for(lambda: attribute(away / name, "tier") == "s3", "it is there only")  # noqa: B023 (it is called at once)
        assert f"GET p/n@1/{name}" in kept
        proxy.before = replayed
        assert read_or_miss(away / name) is None
        proxy.before = lambda _: None


def test_listings_that_are_old_hide_nothing(front: Front) -> None:
    kv, proxy, *_ = front()
    proxy.after = lambda request, answer: (
        answer.of(b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>'
                  b"</ListBucketResult>")
        if request.verb == "list"
        else answer
    )  # fmt: skip
    away = narrow(kv, "n")
    send_away(away, {"gone": SMALL})
    all_uploaded(kv)
    kv.remount()
    assert (away / "gone").read_bytes() == SMALL
    assert "list" in {request.verb for request in proxy.seen}


def test_answers_that_are_lost_store_nothing_twice_and_nothing_less(front: Front) -> None:
    kv, proxy, server, bucket = fronted = front()
    kv.allow_log("record is not in|is tried again|s3 tier|not aborted")
    lost: dict[str, int] = {}

    def lose(request: Request, answer: Answer) -> Answer:
        if request.verb == "list" or lost.get(request.verb, 0) >= 2:
            return answer
        lost[request.verb] = lost.get(request.verb, 0) + 1
        raise Hangup

    proxy.after = lose
    wanted = {f"@0/f{number}": SMALL + bytes([number]) for number in range(3)} | {"@0/l": LARGE}
    for key, data in wanted.items():
        (kv.path / key.removeprefix("@0/")).write_bytes(data)
    (kv.path / "doomed").write_bytes(OTHER)
    all_uploaded(kv)
    assert fronted.there() == wanted | {"@0/doomed": OTHER}
    (kv.path / "doomed").unlink()
    (kv.path / "f0").rename(kv.path / "g0")
    (kv.path / "l").rename(kv.path / "m")
    wanted["@0/g0"], wanted["@0/m"] = wanted.pop("@0/f0"), wanted.pop("@0/l")
    wait_for(lambda: fronted.there() == wanted, f"{fronted.there().keys()} are {wanted.keys()}")
    assert not s3_of(kv)["conflicts"]
    assert lost.keys() >= {"put", "copy", "begin", "put_part", "complete", "head", "delete_many"}
    notes = kv.path.parent / "nvme" / "uploads"
    assert not list(notes.glob("*.json"))
    kv.remount()
    wait_for(lambda: not unfinished(server, bucket) or lost["begin"], "what was noted is aborted")
    for key, data in wanted.items():
        assert (kv.path / key.removeprefix("@0/")).read_bytes() == data


def test_the_stores_own_quota(front: Front, s3: Server, bucket: str) -> None:
    kv, *_ = fronted = front()
    kv.allow_log("record is not in|is tried again|s3 tier|is not uploaded")
    (kv.path / "before").write_bytes(SMALL)
    all_uploaded(kv)

    def quota(*what: str) -> None:
        subprocess.run(
            ["radosgw-admin", "-c", s3.folder / "ceph.conf", "-n", "client.rgw", "quota", *what,
             "--quota-scope=bucket", f"--bucket={bucket}"],
            check=True, capture_output=True,
        )  # fmt: skip

    quota("set", "--max-objects=1")
    quota("enable")
    try:
        (kv.path / "after").write_bytes(OTHER)
        wait_for(lambda: "QuotaExceeded" in s3_of(kv)["why"], "the store says why")
        assert (kv.path / "after").read_bytes() == OTHER
    finally:
        quota("disable")
    all_uploaded(kv)
    assert fronted.there()["@0/after"] == OTHER
