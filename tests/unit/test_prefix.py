"""Keys and paths of prefixes: a second implementation, the vectors, and what is no input."""

import json
import random
import re
import struct
from array import array
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvfs import matching, prefix
from kvfs.prefix import Fingerprint, block_keys
from tests.unit import prefix_reference as reference

Wrong: TypeAlias = Any  # no type allows this
VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("prefix_vectors.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "prefix-paths.md"
ROOT = bytes(range(16))
TOKENS = st.integers(0, prefix.TOKEN_MAX)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LLAMA = VECTORS["fingerprints"][0]


def fingerprint(**changed: Wrong) -> Fingerprint:
    return Fingerprint(**{**LLAMA["fields"], **changed})


def of_vector(tokens: list[int] | dict[str, int]) -> list[int]:
    if isinstance(tokens, list):
        return tokens
    return [i * tokens["factor"] % (1 << 31) for i in range(tokens["count"])]


# The vectors, by both.


@pytest.mark.parametrize("vector", VECTORS["xxh3_128"], ids=lambda vector: str(vector["length"]))
def test_vector_of_the_hash(vector: dict[str, Any]) -> None:
    data = bytes(i % 251 for i in range(vector["length"]))
    assert reference.digest(data).hex() == vector["digest"]


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=lambda vector: vector["root"][:8])
def test_vector_of_a_fingerprint(vector: dict[str, Any]) -> None:
    found = Fingerprint(**vector["fields"])
    assert asdict(found) == vector["fields"]
    assert str(found) == vector["text"]
    assert found.root.hex() == vector["root"] == reference.root(vector["text"]).hex()


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["block_tokens"])
def test_vector_of_a_chain(vector: dict[str, Any]) -> None:
    start, tokens = bytes.fromhex(vector["root"]), of_vector(vector["tokens"])
    for made_by in (block_keys, reference.keys):
        keys = made_by(start, tokens, vector["block_tokens"])
        assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS["paths"], ids=lambda vector: vector["shard"])
def test_vector_of_a_path(vector: dict[str, Any]) -> None:
    parent, key = bytes.fromhex(vector["parent"]), bytes.fromhex(vector["key"])
    assert prefix.path(parent, key, vector["shard"]) == vector["path"]


@pytest.mark.parametrize("vector", VECTORS["names"], ids=lambda vector: vector["name"][32:])
def test_vector_of_a_name(vector: dict[str, Any]) -> None:
    key, shard, temporary = bytes.fromhex(vector["key"]), vector["shard"], vector["temporary"]
    assert prefix.parse(vector["name"]) == (key, shard, temporary)
    if not temporary:
        assert prefix.name(key, shard) == vector["name"]


@pytest.mark.parametrize("name", VECTORS["no_names"], ids=lambda name: repr(name[32:]))
def test_malformed_name_is_parsed_as_none(name: str) -> None:
    assert prefix.parse(name) is None


@pytest.mark.parametrize("vector", VECTORS["match"]["requests"], ids=lambda one: str(one["flags"]))
def test_vector_of_a_question(vector: dict[str, Any]) -> None:
    shards = ",".join(vector["shards"]).encode()
    keys = [bytes.fromhex(key) for key in vector["keys"]]
    head = struct.pack("<4sIII", b"KVM1", vector["flags"], len(keys), len(shards))
    packed = head + shards + bytes.fromhex(vector["parent"]) + b"".join(keys)
    assert packed.hex() == vector["bytes"]


@pytest.mark.parametrize("vector", VECTORS["match"]["answers"], ids=lambda one: str(one["flags"]))
def test_vector_of_an_answer(vector: dict[str, Any]) -> None:
    data, count = bytes.fromhex(vector["bytes"]), vector["matched"]
    magic, *figures = struct.unpack_from("<4sIQQQ", data)
    assert magic == b"KVM1"
    assert figures == [count, vector["ram"], vector["nvme"], vector["bucket"]]
    details = data[struct.calcsize("<4sIQQQ") :]
    assert list(details[:count]) == vector.get("tiers", [])
    assert list(struct.unpack(f"<{len(details[count:]) // 8}Q", details[count:])) == vector.get(
        "sizes", []
    )


def test_the_page_shows_the_vectors() -> None:
    """Each of its long hexadecimals is one, and what it says of each is there."""
    page = PAGE.read_text()
    first, chain = LLAMA, VECTORS["chains"][0]
    rows = [f"| {i} | `{key}` |" for i, key in enumerate(chain["keys"])]
    rows += [f"| {one['length']} | `{one['digest']}` |" for one in VECTORS["xxh3_128"][:4]]
    rows += [f"`{one['path']}`" for one in VECTORS["paths"]]
    for text in (
        first["text"],
        first["root"],
        *rows,
        *(one["text"] for one in VECTORS["fingerprints"]),
    ):
        assert text in page
    assert f"[{', '.join(map(str, chain['tokens']))}]" in page
    request = VECTORS["match"]["requests"][0]["bytes"]
    answer = VECTORS["match"]["answers"][1]["bytes"]
    shown = re.sub(r"\s", "", page)
    assert request in shown
    assert answer in shown
    known = json.dumps(VECTORS)
    for text in re.findall(r"[0-9a-f]{32,}", page):
        assert text in known


# Both implementations, anything that is right.


@given(st.binary(max_size=1300))
def test_the_hash_is_the_same_in_both(data: bytes) -> None:
    assert reference.digest(data) == xxh3_128_digest(data)


@pytest.mark.parametrize("length", [1024, 1025, 1088, 2047, 2048, 2049, 9000])
def test_hash_of_long_data_agrees_with_the_reference(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert reference.digest(data) == xxh3_128_digest(data)


@given(st.binary(min_size=16, max_size=16), st.lists(TOKENS, max_size=40), st.integers(1, 12))
def test_chains_are_the_same_in_both(root: bytes, tokens: list[int], block_tokens: int) -> None:
    assert block_keys(root, tokens, block_tokens) == reference.keys(root, tokens, block_tokens)


@given(TEXTS.filter(bool), TEXTS, TEXTS, st.integers(1, 1 << 40))
def test_fingerprints_are_the_same_in_both(
    model: str, revision: str, adapter: str, shards: int
) -> None:
    found = fingerprint(model=model, revision=revision, adapter=adapter, shards=shards)
    assert str(found).isascii()
    assert json.loads(str(found)) == asdict(found)
    assert found.root == reference.root(str(found))


# The promises of the chain.


@given(st.lists(TOKENS, min_size=1, max_size=30), st.integers(1, 5), st.data())
def test_a_key_stands_for_all_that_comes_before(
    tokens: list[int], block_tokens: int, data: st.DataObject
) -> None:
    keys = block_keys(ROOT, tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    cut = data.draw(st.integers(0, len(tokens)))
    assert block_keys(ROOT, tokens[:cut], block_tokens) == keys[: cut // block_tokens]
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = block_keys(ROOT, [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]], block_tokens)
    same = at // block_tokens
    assert other[:same] == keys[:same]
    assert all(one != two for one, two in zip(other[same:], keys[same:], strict=True))
    for parent, (left, key) in zip([ROOT, *keys], pairwise([ROOT, *keys]), strict=False):
        assert parent == left
        assert prefix.path(parent, key) == f"{parent.hex()}/{key.hex()}"


def test_no_two_models_have_a_key_in_common() -> None:
    changes: list[dict[str, Any]] = [{}]
    for name, value in LLAMA["fields"].items():
        changes.append({name: value + 1 if isinstance(value, int) else value + "x"})
    roots = {fingerprint(**change).root for change in changes}
    assert len(roots) == len(changes) == 10


@given(st.sampled_from(VECTORS["names"]), st.from_regex(r"[0-9A-Za-z_-]{1,32}", fullmatch=True))
def test_name_is_parsed_into_its_parts(vector: dict[str, Any], shard: str) -> None:
    key = bytes.fromhex(vector["key"])
    if shard == "tmp":
        return
    assert prefix.parse(prefix.name(key, shard)) == (key, shard, False)
    assert prefix.parse(f"{prefix.name(key, shard)}.0a.tmp") == (key, shard, True)


# The types of tokens.

KINDS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "array": lambda tokens: array("i", tokens),
    "array of 64 bits": lambda tokens: array("q", tokens),
    "list of numpy's": lambda tokens: list(map(np.int64, tokens)),
    "numpy": np.array,
    **{
        f"numpy {kind}": partial(np.array, dtype=kind)
        for kind in ("<i4", ">i4", ">i8", "uint32", "uint64")
    },
    "numpy with strides": lambda tokens: np.array([tokens, tokens]).T[:, 0],
    "tensor": torch.tensor,
    "tensor int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "tensor with strides": lambda tokens: torch.tensor([tokens, tokens]).T[:, 0],
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_any_sequence(kind: str) -> None:
    tokens = [0, 1, 127, 128, 255, 256, 65535, 1 << 24, prefix.TOKEN_MAX, 7]
    given_, before = KINDS[kind](tokens), KINDS[kind](tokens)
    assert block_keys(ROOT, given_, 2) == reference.keys(ROOT, tokens, 2)
    assert list(given_) == list(before)


def test_no_tokens_make_no_block() -> None:
    for none in ([], (), array("i"), np.array([], int), torch.tensor([], dtype=torch.long), [1, 2]):
        assert block_keys(ROOT, none, 3) == []


def test_true_is_one_as_everywhere_in_python() -> None:
    assert block_keys(ROOT, [True, False], 2) == block_keys(ROOT, [1, 0], 2)


WRONG: list[tuple[Wrong, type[Exception], str]] = [
    ([1, -1], ValueError, r"tokens\[1\]=-1: expected an int from 0 to 2147483647"),
    ([1 << 31], ValueError, r"tokens\[0\]=2147483648: expected"),
    ([3, 1 << 80], ValueError, r"tokens\[1\]=1208925819614629174706176: expected"),
    ([-(1 << 40)], ValueError, r"tokens\[0\]=-1099511627776: expected"),
    ([1, 2.0], TypeError, r"tokens\[1\]=2.0: expected"),
    ([1, None], TypeError, r"tokens\[1\]=None: expected"),
    (["1"], TypeError, r"tokens\[0\]='1': expected"),
    ([[1, 2]], TypeError, r"tokens\[0\]=\[1, 2\]: expected"),
    ("12", TypeError, "tokens='12': expected a sequence of ints"),
    (b"\1\0\0\0", TypeError, "expected a sequence of ints"),
    (bytearray(4), TypeError, "expected a sequence of ints"),
    ({1, 2}, TypeError, "expected a sequence of ints"),
    ({1: 2}, TypeError, "expected a sequence of ints"),
    (None, TypeError, "tokens=None: expected a sequence of ints"),
    (7, TypeError, "tokens=7: expected a sequence of ints"),
    (array("d", [1.0]), TypeError, r"tokens\[0\]=1.0: expected"),
    (np.array([1, -7]), ValueError, r"tokens\[1\]=-7: expected"),
    (np.array([1 << 31]), ValueError, r"tokens\[0\]=2147483648: expected"),
    (np.array([1 << 63], "uint64"), ValueError, r"tokens\[0\]=9223372036854775808: expected"),
    (np.array([1.0]), TypeError, "tokens of float64: expected integers"),
    (np.array([True]), TypeError, "tokens of bool: expected integers"),
    (np.array(["1"]), TypeError, "tokens of <U1: expected integers"),
    (np.array([1, "x"], object), TypeError, "tokens of object: expected integers"),
    (np.array([[1, 2]]), ValueError, r"tokens of shape \(1, 2\): expected one dimension"),
    (np.array(3), ValueError, r"tokens of shape \(\): expected one dimension"),
    (torch.tensor([1, -7]), ValueError, r"tokens\[1\]=-7: expected"),
    (torch.tensor([1 << 40]), ValueError, r"tokens\[0\]=1099511627776: expected"),
    (torch.tensor([1.0]), TypeError, "tokens of float32: expected integers"),
    (torch.tensor([1.0], dtype=torch.bfloat16), TypeError, r"tokens\[0\]=1.0: expected"),
    (torch.tensor([True]), TypeError, "tokens of bool: expected integers"),
    (torch.tensor([[1]]), ValueError, r"tokens of shape \(1, 1\): expected one dimension"),
    (torch.tensor([1], device="meta"), ValueError, "tokens on meta: expected a tensor on the CPU"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), WRONG)
def test_wrong_tokens(tokens: Wrong, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        block_keys(ROOT, tokens, 1)


def test_a_message_does_not_repeat_a_prompt() -> None:
    with pytest.raises(TypeError) as told:
        block_keys(ROOT, "a" * 100_000, 1)  # type: ignore[arg-type]
    assert len(str(told.value)) < 150


@pytest.mark.parametrize(
    ("block_tokens", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError)],
)
def test_wrong_blocks(block_tokens: Wrong, error: type[Exception]) -> None:
    with pytest.raises(error, match="block_tokens="):
        block_keys(ROOT, [1], block_tokens)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (b"", ValueError, "root=: expected 16 bytes, got 0"),
        (bytes(17), ValueError, "expected 16 bytes, got 17"),
        ("0" * 32, TypeError, "expected 16 bytes"),
        (bytearray(16), TypeError, "expected 16 bytes"),
    ],
)
def test_wrong_keys(key: Wrong, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        block_keys(key, [1], 1)
    with pytest.raises(error, match="16 bytes"):
        prefix.path(ROOT, key)
    with pytest.raises(error, match="parent="):
        prefix.path(key, ROOT)


@pytest.mark.parametrize("shard", ["a.b", "a/b", "..", "é", "a" * 33, "a\n", "tmp", " ", ","])
def test_wrong_shards(shard: str) -> None:
    with pytest.raises(ValueError, match="expected up to 32 letters, digits, _ or -, and not tmp"):
        prefix.name(ROOT, shard)
    assert prefix.parse(f"{ROOT.hex()}.{shard}") is None


def test_a_shard_is_text() -> None:
    with pytest.raises(TypeError, match="shard=0: expected a str"):
        prefix.name(ROOT, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": ""}, ValueError, "model=''"),
        ({"model": None}, TypeError, "model=None: expected str"),
        ({"dtype": torch.bfloat16}, TypeError, "dtype=torch.bfloat16: expected str"),
        ({"block_tokens": 0}, ValueError, "block_tokens=0: expected at least 1"),
        ({"block_tokens": True}, TypeError, "block_tokens=True: expected int"),
        ({"shards": 2.0}, TypeError, "shards=2.0: expected int"),
        ({"shards": -1}, ValueError, "shards=-1: expected at least 1"),
    ],
)
def test_wrong_fingerprints(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fingerprint(**changed)


# The parts of kvfs that ask and answer.


@pytest.mark.parametrize("vector", VECTORS["match"]["requests"], ids=lambda one: str(one["flags"]))
def test_the_mount_reads_a_question_as_it_is_specified(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["bytes"])
    found = matching.unpack_request(data)
    keys, parent = [bytes.fromhex(key) for key in vector["keys"]], bytes.fromhex(vector["parent"])
    assert found == (vector["flags"], tuple(vector["shards"] or [""]), parent, b"".join(keys))
    details = bool(vector["flags"])
    assert matching.pack_request(parent, keys, vector["shards"], details=details) == data


@pytest.mark.parametrize("vector", VECTORS["match"]["answers"], ids=lambda one: str(one["flags"]))
def test_the_mount_answers_as_it_is_specified(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["bytes"])
    answer = matching.MatchAnswer(
        vector["matched"],
        vector["ram"],
        vector["nvme"],
        vector["bucket"],
        bytes(vector.get("tiers", [])),
        tuple(vector.get("sizes", [])),
    )
    assert matching.pack_answer(answer) == data
    assert matching.unpack_answer(data) == answer
