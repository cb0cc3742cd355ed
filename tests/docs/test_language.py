"""Documents and docstrings are in plain English: short sentences, named subjects, known terms."""

import re
from pathlib import Path

import pytest

from tests.docs import language
from tests.docs.messages import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "mount/**/*.md", "examples/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
PACKAGES = ["kvfs", "tests", "scripts"]
LONG_SHARE = 0.02  # of sentences may have more than `language.LONG` words
LINE = 100  # characters of a line, except for rows of tables
CELL = 120  # characters of a cell
README_LINES = 120  # as `wc -l` counts them
# Words and phrases that readers had to decode, and names that are not the field's.
OLD = re.compile(
    r"\b(but for|be it|as ever|none the less|it was given up|limbo|errands?|would-be|whoever"
    r"|nobody's|whosoever|no store any more|residency|at once as)\b",
    flags=re.IGNORECASE,
)


def test_readme_has_at_most_120_lines() -> None:
    """A reader of three minutes reads all of it."""
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES


def test_a_document_is_split_into_sentences() -> None:
    text = (
        "# Who reads this\n\nOne `a. B` is [short](x.md). Who waits, waits.\n\n"
        "| a cell | What is it? |\n|---|---|\n\n- An item\n  of two lines.\n\n"
        "```sh\nWho runs.\n```\n"
    )
    found = list(language.of_document(text))
    assert [(one.line, one.text, one.is_nameless) for one in found] == [
        (3, "One Code is short.", False),
        (3, "Who waits, waits.", True),
        (5, "a cell", False),
        (5, "What is it?", False),
        (8, "An item of two lines.", False),
    ]
    assert found[0].words == 4


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sentences_have_named_subjects_and_are_short(name: str) -> None:
    found = language.read(ROOT / name)
    nameless = [f"{name}:{one.line}: {one.text}" for one in found if one.is_nameless]
    assert not nameless, "\n".join(nameless)
    long = [f"{name}:{one.line}: {one.text}" for one in found if one.words > language.LONG]
    assert len(long) <= LONG_SHARE * sum(one.is_counted for one in found), "\n".join(long)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_words_are_those_of_the_glossary(name: str) -> None:
    text = (ROOT / name).read_text()
    old = [f"{name}:{number}: {line}" for number, line in _lines(text) if OLD.search(line)]
    assert not old, "\n".join(old)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_lines_and_cells_are_short(name: str) -> None:
    wide = []
    for number, line in _lines(_without_code((ROOT / name).read_text())):
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line]
        if any(len(cell.strip()) > (CELL if len(cells) > 1 else LINE) for cell in cells):
            wide.append(f"{name}:{number}: {line}")
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = _without_code((ROOT / name).read_text())
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        if path.startswith(("http:", "https:")):
            continue
        if not page.exists() or (anchor and anchor not in _anchors(page)):
            dead.append(target)
    assert not dead, f"{name}: {dead}"


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_have_named_subjects_and_are_short(package: str) -> None:
    found = [
        (path.relative_to(ROOT), one)
        for path in sorted((ROOT / package).rglob("*.py"))
        for one in language.read(path)
    ]
    nameless = [f"{path}:{one.line}: {one.text}" for path, one in found if one.is_nameless]
    assert not nameless, "\n".join(nameless)
    old = [f"{path}:{one.line}: {one.text}" for path, one in found if OLD.search(one.text)]
    assert not old, "\n".join(old)
    long = [f"{path}:{one.line}: {one.text}" for path, one in found if one.words > language.LONG]
    assert len(long) <= LONG_SHARE * sum(one.is_counted for _, one in found), "\n".join(long)


def _lines(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.splitlines(), start=1))


def _without_code(text: str) -> str:
    return re.sub(
        r"^```.*?^```$|<!--.*?-->",
        lambda found: "\n" * found[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}
