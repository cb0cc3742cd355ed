"""Tables in documents say what the code says."""

import re
from pathlib import Path

import pytest

from kvfs import profiles
from kvfs.parsing import rows as described
from kvfs.settings import Settings
from kvfs.templates import Templates

TESTS = Path(__file__).parents[1]
NAMESPACES = TESTS.parent / "docs" / "namespaces.md"
SECURITY = TESTS.parent / "docs" / "security.md"


def rows(heading: str) -> list[str]:
    """The rows of the first table below a heading."""
    text = NAMESPACES.read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert table is not None, heading
    return table[0].splitlines()[2:]


def test_every_setting_is_in_the_table() -> None:
    told = [tuple(cell.strip(" `") for cell in row.split("|")[1:4]) for row in rows("Settings")]
    assert told == [(row.name, row.unit, row.default) for row in described(Settings)]


def test_every_connector_is_in_the_table() -> None:
    settings = {
        name: ", ".join(f"`{key}={text}`" for key, text in profiles.settings(name).items())
        for name in profiles.NAMES
    }
    assert rows("For each connector") == [
        f"| `{name}` | {told} |" for name, told in settings.items()
    ]


@pytest.mark.parametrize(
    ("connector", "path", "gib"),
    [
        ("lmcache-fs", "lmcache", 500),
        ("lmcache-local-disk", "disk", 200),
        ("sglang-file", "sglang", 200),
    ],
)
def test_documented_configurations_are_the_printed_ones(
    connector: str, path: str, gib: int
) -> None:
    printed = profiles.configuration(connector, "/mnt/kv", path, gib << 30)
    assert f"\n{printed.rstrip()}\n" in NAMESPACES.read_text()


def test_the_example_of_templates_is_one(tmp_path: Path) -> None:
    text = NAMESPACES.read_text()
    example = text.partition("```toml\n")[2].partition("```")[0]
    file = tmp_path / "namespaces.toml"
    file.write_text(example)
    told = Templates.read(file).for_name("vllm-8b")
    assert told is not None
    assert (told.quota_hard, told.ttl) == (500 << 30, 7 * 86400)


def test_security_promises_name_existing_tests() -> None:
    """`unit/test_x.py::test_y`, and `::test_z` for another one of the same file."""
    text = SECURITY.read_text()
    file = ""
    found = re.findall(r"`(?:([a-z0-9_]+/test_[a-z0-9_]+\.py))?(?:::(test_[a-z0-9_]+))?`", text)
    named = [(path, name) for path, name in found if path or name]
    assert len(named) > 20
    for path, name in named:
        file = path or file
        source = (TESTS / file).read_text()
        assert not name or f"\ndef {name}(" in source, f"{file}::{name}"
