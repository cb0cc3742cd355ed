"""The cache of a real transformer becomes smaller, and comes back as it was."""

import os
from pathlib import Path

import pytest

from kvfs.compression.files import compress, decompress
from tests.connectors.conftest import Client

pytestmark = pytest.mark.clients

DRIVER = "make_kv.py"
LAYERS = 4
SMALLER = 1.25


def compressed(content: bytes, folder: Path, element_size: int | None) -> tuple[str, bytes]:
    """The codec and the stored bytes, which were verified to restore the content."""
    (folder / "content").write_bytes(content)
    names = ("content", "stored", "back")
    source, destination, back = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in names)
    try:
        os.truncate(destination, 0)
        found = compress(source, destination, len(content), element_size)
        assert found is not None
        decompress(found.codec, destination, back, len(content), found.stored_size)
    finally:
        for fd in (source, destination, back):
            os.close(fd)
    assert (folder / "back").read_bytes() == content
    return found.codec, (folder / "stored").read_bytes()


@pytest.mark.slow
def test_bf16_is_a_quarter_smaller(client: Client, tmp_path: Path) -> None:
    """This holds for keys and values of every layer.

    The first layer's values alone would not show it: they depend only on the token, so they repeat
    with it.
    """
    made = client(DRIVER, tmp_path / "kv", "--layers", str(LAYERS))
    print("seed", made["seed"])
    content = (tmp_path / "kv").read_bytes()
    assert len(content) == made["bytes"]

    codec, stored = compressed(content, tmp_path, None)
    assert codec == "blosc-zstd-s2/1"
    assert len(content) >= SMALLER * len(stored)
    part = len(content) // LAYERS // 2
    for number in range(2 * LAYERS):
        keys_or_values = content[number * part : (number + 1) * part]
        alone = compressed(keys_or_values, tmp_path, 2)[1]
        assert len(keys_or_values) >= SMALLER * len(alone), number


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "element_size"), [("fp16", 2), ("fp32", 4), ("fp8", 1)])
def test_other_numbers_become_smaller_too(
    client: Client, tmp_path: Path, dtype: str, element_size: int
) -> None:
    client(DRIVER, tmp_path / "kv", "--dtype", dtype, "--tokens", "1024")
    content = (tmp_path / "kv").read_bytes()
    found = compressed(content, tmp_path, None)[1]
    known = compressed(content, tmp_path, element_size)[1]
    assert len(content) > 1.15 * len(known)
    assert len(found) <= 1.02 * len(known)  # the sample has chosen as well as who knows
