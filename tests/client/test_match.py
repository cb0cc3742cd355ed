"""Matching: bisection, and the question to the mount, which a stand-in answers here."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs import prefix
from kvfs.client import PrefixCache, TierBytes
from kvfs.client import match as under_test
from kvfs.client.match import Bisection, Question
from tests.client.prompts import SPEC, TOKENS, blocks_of

KEYS = [bytes([i % 256, i // 256]) * 8 for i in range(4000)]
ROOT = SPEC.root
SIZE = 3


def lay_out(directory: Path, count: int, shards: tuple[str, ...] = ("",)) -> None:
    for parent, key in zip([ROOT, *KEYS], KEYS[:count], strict=False):
        (directory / parent.hex()).mkdir()
        for shard in shards:
            (directory / prefix.path(parent, key, shard)).write_bytes(b"abc")


@pytest.mark.parametrize("cached", [0, 1, 2, 1717, 3999, 4000])
def test_bisection_takes_few_stats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    lay_out(tmp_path, cached)
    asked = []
    real = under_test._is_block

    def counted(path: str, size: int) -> bool:
        asked.append(path)
        return real(path, size)

    monkeypatch.setattr(under_test, "_is_block", counted)
    assert Bisection(str(tmp_path), SIZE).ask(ROOT, KEYS, [""]) == (cached, None)
    assert len(asked) <= 14, "at most 20 are promised"


@pytest.mark.parametrize("count", range(8))
def test_bisection_of_any_length(tmp_path: Path, count: int) -> None:
    for cached in range(count + 1):
        where = tmp_path / str(cached)
        where.mkdir()
        lay_out(where, cached)
        assert Bisection(str(where), SIZE).ask(ROOT, KEYS[:count], [""]).blocks == cached


def test_a_block_is_there_with_all_its_shards(tmp_path: Path) -> None:
    lay_out(tmp_path, 5, ("0", "1"))
    (tmp_path / prefix.path(KEYS[2], KEYS[3], "1")).unlink()
    (tmp_path / prefix.path(KEYS[3], KEYS[4], "1")).unlink()
    bisection = Bisection(str(tmp_path), SIZE)
    assert bisection.ask(ROOT, KEYS, ["0", "1"]).blocks == 3
    assert bisection.ask(ROOT, KEYS, ["0"]).blocks == 5


class Mount:
    """The os module as `kvfs.client.match` sees it on a mount that answers.

    It knows `tiers` and `sizes` of the keys in `cached`, in their order, for any keys.
    """

    def __init__(self, cached: list[bytes], sizes: list[int], tiers: list[int]) -> None:
        self.cached, self.sizes, self.tiers = cached, sizes, tiers
        self.questions: list[dict[str, Any]] = []
        self.descriptors: set[int] = set()
        self.mangle: Callable[[bytes], bytes] = bytes
        self._answer = b""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(os, name)

    def open(self, path: str, flags: int) -> int:
        assert path.endswith("/.match")
        assert flags & os.O_RDWR
        fd = os.open("/dev/null", flags)
        self.descriptors.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.descriptors.remove(fd)
        os.close(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        assert fd in self.descriptors
        assert offset == 0
        assert data[:4] == b"KVM1"
        flags, count, length = struct.unpack("<III", data[4:16])
        shards, rest = data[16 : 16 + length].decode(), data[16 + length :]
        assert len(rest) == 16 * (count + 1)
        keys = [rest[at : at + 16] for at in range(16, len(rest), 16)]
        question = {"flags": flags, "shards": shards, "parent": rest[:16], "keys": keys}
        self.questions.append(question)
        found = [self.cached.index(key) for key in keys if key in self.cached]
        at = [0, 0, 0]
        for one in found:
            at[{1: 0, 2: 1, 3: 0, 4: 2}[self.tiers[one]]] += self.sizes[one]
        assert flags == 1
        self._answer = (
            b"KVM1"
            + struct.pack("<IQQQ", len(found), *at)
            + bytes(self.tiers[one] for one in found)
            + struct.pack(f"<{len(found)}Q", *(self.sizes[one] for one in found))
        )
        return len(data)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        assert fd in self.descriptors
        assert offset == 0
        return self.mangle(self._answer)[:size]


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    one = Mount(KEYS[:6], [SIZE] * 6, [1, 3, 3, 2, 4, 4])
    monkeypatch.setattr(under_test, "os", one)
    yield one
    assert not one.descriptors


@pytest.fixture
def question(mount: Mount) -> Iterator[Question]:
    one = Question("/kv/llama")
    assert len(mount.descriptors) == 1
    yield one
    one.close()


def test_one_question_returns_blocks_and_bytes_of_each_tier(
    mount: Mount, question: Question
) -> None:
    found = question.ask(ROOT, KEYS[:9], [""], SIZE)
    assert found == (6, TierBytes(ram=9, nvme=3, bucket=6))
    assert mount.questions == [{"flags": 1, "shards": "", "parent": ROOT, "keys": KEYS[:9]}]


def test_of_all_shards(mount: Mount, question: Question) -> None:
    mount.sizes = [2 * SIZE] * 6
    found = question.ask(ROOT, KEYS, ["0", "1"], SIZE)
    assert found is not None
    assert found.blocks == 6
    assert mount.questions[0]["shards"] == "0,1"


def test_a_block_of_another_size_ends_it(mount: Mount, question: Question) -> None:
    mount.sizes[4] = SIZE + 1
    assert question.ask(ROOT, KEYS, [""], SIZE) == (4, TierBytes(ram=9, nvme=3, bucket=0))
    assert [len(one["keys"]) for one in mount.questions] == [4000, 4]
    mount.sizes[0] = 0
    assert question.ask(ROOT, KEYS, [""], SIZE) == (0, TierBytes(0, 0, 0))


def test_more_keys_than_a_question_may_have(
    mount: Mount, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "KEYS_MAX", 4)
    found = question.ask(ROOT, KEYS[:20], [""], SIZE)
    assert found == (6, TierBytes(ram=9, nvme=3, bucket=6))
    assert [one["parent"] for one in mount.questions] == [ROOT, KEYS[3]]


@pytest.mark.parametrize(
    "mangle",
    [
        lambda _: b"",
        lambda answer: answer[:-1],
        lambda answer: answer + b"x",
        lambda answer: b"KVM2" + answer[4:],
        lambda answer: answer[:4] + struct.pack("<I", 5) + answer[8:],
        # What a network file system may give back: the question itself.
        lambda _: b"KVM1" + struct.pack("<III", 1, 9, 0) + bytes(16 * 10),
    ],
)
def test_malformed_answer_is_ignored_and_not_asked_for_again(
    mount: Mount,
    question: Question,
    mangle: Any,  # noqa: ANN401
) -> None:
    mount.mangle = mangle
    assert question.ask(ROOT, KEYS[:9], [""], SIZE) is None
    assert question.ask(ROOT, KEYS[:9], [""], SIZE) is None
    assert len(mount.questions) == 1, "nor asked for again"


def test_a_failure_is_asked_by_stat_and_again_later(
    mount: Mount, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "EIO")

    monkeypatch.setattr(mount, "pwrite", fail, raising=False)
    assert question.ask(ROOT, KEYS[:9], [""], SIZE) is None
    monkeypatch.undo()
    monkeypatch.setattr(under_test, "os", mount)
    assert question.ask(ROOT, KEYS[:9], [""], SIZE) is not None


def test_a_directory_without_it_is_asked_by_stat(tmp_path: Path) -> None:
    with PrefixCache(tmp_path, SPEC) as cache:
        cache.save(TOKENS, blocks_of(TOKENS)[:4])
        assert cache.match(TOKENS)[:2] == (4, 16)
        assert cache.match(TOKENS).bytes is None


def test_plain_file_named_match_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".match").write_bytes(b"")
    with PrefixCache(tmp_path, SPEC) as cache:
        cache.save(TOKENS, blocks_of(TOKENS)[:4])
        assert cache.match(TOKENS).blocks == 4


def test_a_descriptor_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mount that is gone the close fails, and frees the number all the same."""
    (tmp_path / ".match").write_bytes(b"")
    closed: list[int] = []

    def fail(fd: int) -> None:
        closed.append(fd)
        raise OSError(107, os.strerror(107))

    question = Question(str(tmp_path))
    real = os.close
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", fail)
        question.close()
        question.close()
        assert question.ask(ROOT, KEYS[:9], [""], SIZE) is None
    assert len(closed) == 1
    real(closed[0])
