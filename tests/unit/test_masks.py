"""Masking of texts before other people see them: secrets go, all else stays."""

import pytest

from kvfs.cli.bundle import Masks, scrub

MASKS = Masks(["alice", "a.b"], ["/mnt/kv", "/data/kvfs", "s3://b/p/"])


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-22 06:00:56,123 ERROR kvfs.core.objects.copies: its bytes do not match a digest",
        "nvme tier: /data/kvfs/objects/0a/12.3 is quarantined",
        "s3://b/p/: no answer in 30 s, a name is a miss",
        "/mnt/kv: took over 3 handles of 2 objects, 0 of them being written",
        "No such file or directory (errno=2), 12.5% of 64K",
        "an unlinked object (inode 17) is to be uploaded once more: 503",
    ],
)
def test_harmless_text_is_not_masked(line: str) -> None:
    assert MASKS.text(line) == line


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "the bucket's names for foo.kv are not entered",
            "the bucket's names for <masked> are not entered",
        ),
        ("namespace bob: no quota", "namespace <masked>: no quota"),
        ("'llama/x' is uploaded once more: 503", "<masked> is uploaded once more: 503"),
        ("alice's a.b", "<masked> <masked>"),
        ("x: '/data/kvfs/x y'", "x: <masked>"),
        ("/mnt/kv/x.data and /data/kvfs/catalog/x", "<masked> and <masked>"),
        (
            '  File "/home/me/kvfs/core/x.py", line 1, in open',
            "  File kvfs/core/x.py, line 1, in open",
        ),
        ("key 5eed1f00d5eed", "key <masked>"),
        ("Signature=AbC/dEf+0123456789abcdef", "<masked>"),
    ],
)
def test_secrets_are_masked(line: str, shown: str) -> None:
    assert MASKS.text(line) == shown


def test_values_are_masked_by_their_fields() -> None:
    value = {
        "name": "x",
        "ok": True,
        "n": 3,
        "l": [{"path": "a/b", "state": "down: a.b"}],
        "why": "is a.b",
    }
    assert MASKS.value(value) == {
        "name": "<masked>",
        "ok": True,
        "n": 3,
        "l": [{"path": "<masked>", "state": "down: a.b"}],
        "why": "is <masked>",
    }
    assert MASKS.value({"path": "/data/kvfs", "name": "."}) == {"path": "/data/kvfs", "name": "."}
    assert MASKS.value({"session_token": "word"}) == {"session_token": "<masked>"}


def test_secrets_of_the_environment_are_nowhere() -> None:
    environment = {"A_SECRET": "abcdefg", "PW_TOKEN": "abc", "HOME": "/root"}
    text = "abcdefg abc /root https://me:pw@host/ s3://k:s@b"
    expected = "<masked> abc /root https://<masked>@host/ s3://<masked>@b"
    assert scrub(text, environment) == expected
