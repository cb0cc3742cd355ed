"""The credentials of an index, from a file or from the environment."""

import os
from pathlib import Path

import pytest

from kvfs.errors import ConfigError
from kvfs.pool.credentials import PASSWORD, USER, Credentials, read


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"secret", Credentials("", "secret")),
        (b"secret\n", Credentials("", "secret")),
        (b"me\nsecret\n", Credentials("me", "secret")),
        (b"me\n with spaces ", Credentials("me", " with spaces ")),
        ("ich\ngeheim\u00fc\n".encode(), Credentials("ich", "geheim\u00fc")),
    ],
)
def test_file_has_a_password_or_a_user_and_a_password(
    tmp_path: Path, content: bytes, found: Credentials
) -> None:
    assert read(written(tmp_path / "file", content), {PASSWORD: "other"}) == found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\nsecret\n",
        b"me\n\n",
        b"a\nb\nc\n",
        b"me\r\nsecret\r\n",
        b"a\x00b",
        b"secret\xff",
        b"secret" * (1 << 18),
    ],
)
def test_other_content_is_refused_and_not_repeated(tmp_path: Path, content: bytes) -> None:
    file = written(tmp_path / "file", content)
    with pytest.raises(ConfigError, match="expected a password, or a line with a user") as refused:
        read(file, {})
    assert str(file) in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "file", b"secret", mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 0600"):
        read(file, {})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none", {})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="expected a file"):
        read(tmp_path / "pipe", {})
    (tmp_path / "link").symlink_to(written(tmp_path / "file", b"secret"))
    with pytest.raises(ConfigError, match="expected a file"):
        read(tmp_path / "link", {})


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "file", b"secret")
    os.chown(file, 1234, -1)
    with pytest.raises(ConfigError, match="belongs to uid 1234"):
        read(file, {})


def test_environment_has_them_without_a_file() -> None:
    assert read(None, {}) == Credentials()
    assert read(None, {PASSWORD: "secret"}) == Credentials("", "secret")
    assert read(None, {USER: "me", PASSWORD: "secret"}) == Credentials("me", "secret")
    with pytest.raises(ConfigError, match="KVFS_POOL_USER is set without KVFS_POOL_PASSWORD"):
        read(None, {USER: "me"})


def test_text_of_credentials_has_no_password() -> None:
    assert "secret" not in f"{Credentials('me', 'secret')} {Credentials('me', 'secret')!r}"
