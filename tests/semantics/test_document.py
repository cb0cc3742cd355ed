"""SEMANTICS.md and these tests say the same: each paragraph has its test, and the reverse.

What a disk must fail for is shown in tests/faults, what needs a bucket in tests/s3; tests without a
docstring may be there as well.
"""

import ast
import re
from collections import Counter
from pathlib import Path

from kvfs.core.ledger.ledger import COUNTERS

HERE = Path(__file__).parent
FAULTS = HERE.parent / "faults"
BUCKET = [
    HERE.parent / "s3" / f"test_{name}.py"
    for name in (
        *("mounted", "outage", "lies", "refusals", "door", "gc", "fsck", "warm", "two_nodes"),
        "stream",
        "scan",
    )
]
DOCUMENT = HERE.parent.parent / "SEMANTICS.md"
# Sections that explain and promise nothing. So does what stands before the first section.
REFERENCE = {"Tenets", "What is not promised", "Limits", "What `kvfs status` counts"}


def _blocks(text: str) -> list[str]:
    """
    The paragraphs of a text, each in one line: no headings and no tables.
    """
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [block for block in blocks if block and block[0] not in "#|"]


def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _tests() -> dict[str, list[str]]:
    """
    The paragraphs of each test's docstring.
    """
    found = {}
    for path in sorted([*HERE.glob("test_*.py"), *FAULTS.glob("test_*disks.py"), *BUCKET]):
        if path != Path(__file__):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    found[f"{path.name}::{node.name}"] = _blocks(ast.get_docstring(node) or "")
    return found


def test_each_paragraph_has_its_test() -> None:
    shown = {block for blocks in _tests().values() for block in blocks}
    promised = {
        block
        for title, text in _sections().items()
        if title not in REFERENCE
        for block in _blocks(text)
    }
    assert promised - shown == set(), "no test has this docstring"


def test_each_test_has_its_paragraph() -> None:
    promised = Counter(_blocks(DOCUMENT.read_text()))
    for test, blocks in _tests().items():
        here = (HERE / test.partition("::")[0]).exists()
        assert blocks or not here, f"{test} does not say what"
        for block in blocks:
            assert promised[block] == 1, f"{test}: not once in {DOCUMENT.name}: {block}"


def test_sections_that_promise_nothing_are_there() -> None:
    assert set(_sections()) >= REFERENCE


def test_each_counter_is_explained() -> None:
    explained = re.findall(
        r"^\| `([a-z_]+)` \|", _sections()["What `kvfs status` counts"], flags=re.MULTILINE
    )
    assert set(explained) >= {*COUNTERS, "dropped_evicted", "dropped_lost", "dropped_unfinished"}
