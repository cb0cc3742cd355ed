"""Each paragraph of SEMANTICS.md names the tests that show it, and each test here is named.

A paragraph ends with comments like `<!-- semantics/test_life.py::test_sealed -->`. Wording is free.
Tests below tests/faults are for promises that need a failing disk, those below tests/s3 for
promises that need a bucket.
"""

import ast
import re
from pathlib import Path

from kvfs.core.ledger.ledger import COUNTERS

HERE = Path(__file__).parent
TESTS = HERE.parent
DOCUMENT = TESTS.parent / "SEMANTICS.md"
# Sections that explain and promise nothing. So does what stands before the first section.
REFERENCE = {"Tenets", "What is not promised", "Limits", "What `kvfs status` counts"}
NAMED = re.compile(r"^<!-- ([a-z0-9]+/test_\w+\.py::test_\w+) -->$", flags=re.MULTILINE)


def _paragraphs(text: str) -> list[str]:
    """Paragraphs, without headings and tables."""
    blocks = (block.strip() for block in re.split(r"\n\s*\n", text))
    return [block for block in blocks if block and block[0] not in "#|"]


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _tests(path: Path) -> set[str]:
    return {
        f"{path.parent.name}/{path.name}::{node.name}"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_paragraph_names_its_test() -> None:
    without = [
        f"{title}: {paragraph}"
        for title, text in _sections().items()
        if title not in REFERENCE
        for paragraph in _paragraphs(text)
        if not NAMED.search(paragraph)
    ]
    assert not without, f"{DOCUMENT.name} names no test of\n" + "\n".join(without)


def test_each_name_is_a_test() -> None:
    named = set(NAMED.findall(DOCUMENT.read_text()))
    paths = {name.partition("::")[0] for name in named}
    there = set().union(*(_tests(TESTS / path) for path in paths))
    assert named <= there, f"{DOCUMENT.name} names {sorted(named - there)}"


def test_each_test_is_named() -> None:
    named = set(NAMED.findall(DOCUMENT.read_text()))
    files = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    there = set().union(*map(_tests, files))
    assert there <= named, f"{DOCUMENT.name} does not name {sorted(there - named)}"


def test_sections_that_promise_nothing_are_there() -> None:
    assert set(_sections()) >= REFERENCE


def test_each_counter_is_explained() -> None:
    explained = re.findall(
        r"^\| `([a-z_]+)` \|", _sections()["What `kvfs status` counts"], flags=re.MULTILINE
    )
    assert set(explained) >= set(COUNTERS)
