"""docs/troubleshooting.md and docs/messages/ know each message and each errno, and none besides.

A row for a new message is one line: | `some words of it` | what it means | what to do |. The words
are the message's name: they stand in it in this order, with … for anything between. So a message
may be reworded around them. Messages that mean the same share a row, with <br> between the names.
"""

import errno
import re
from collections.abc import Iterator

import pytest

from kvfs.fuse.errnos import ERRNO
from tests.docs.messages import GAP, ROOT, literals, reaching_people

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
PAGES = [DOCUMENT, *sorted((ROOT / "docs" / "messages").glob("*.md"))]


def _rows(heading: str) -> Iterator[str]:
    """The first cells of all tables whose first column has this heading."""
    within = False
    for line in (line for page in PAGES for line in [*page.read_text().splitlines(), ""]):
        first = line.removeprefix("| ").partition(" | ")[0] if line.startswith("| ") else ""
        if within and first:
            yield first
        within = line.startswith("|") and (within or first == heading)


def _quoted(heading: str) -> set[str]:
    """Return the texts in backticks there: double ones around a text that has some itself."""
    return {found[1] for row in _rows(heading) for found in re.findall(r"(`+)(.+?)\1(?!`)", row)}


def _names(name: str, message: str) -> bool:
    """Whether the name is this message's. A name of fewer than three words must be all of it."""
    if len(re.findall(r"[A-Za-z]{2,}", name)) < 3:
        return name == message
    words = ".*".join(map(re.escape, name.strip(GAP).split(GAP)))
    return re.search(words, message) is not None


def test_every_message_has_a_row() -> None:
    names = _quoted("message")
    missing = [
        f"| `{text}` | | |    <- {where}"
        for text, where in sorted(reaching_people().items(), key=lambda item: item[1])
        if not any(_names(name, text) for name in names)
    ]
    assert not missing, f"{DOCUMENT.name} lacks rows for\n" + "\n".join(missing)


def test_every_row_is_of_a_message() -> None:
    messages = reaching_people()
    strange = [
        name for name in _quoted("message") if not any(_names(name, one) for one in messages)
    ]
    assert not strange, f"nothing in kvfs says this of {DOCUMENT.name}:\n" + "\n".join(strange)


@pytest.mark.parametrize("command", ["status", "evict"])
def test_documented_messages_of_commands_are_in_the_code(command: str) -> None:
    told = _quoted(f"`kvfs {command}` says")
    assert told, "the table is gone"
    texts = literals()
    strange = sorted(name for name in told if not any(_names(name, one) for one in texts))
    assert not strange, f"nothing in kvfs says this of {DOCUMENT.name}:\n" + "\n".join(strange)


def test_every_errno_is_in_the_document() -> None:
    told = {getattr(errno, name, 0) for row in _rows("errno") for name in row.split(", ")}
    missing = [errno.errorcode[code] for code in ERRNO.values() if code not in told]
    assert not missing, f"{DOCUMENT.name} lacks rows for {missing}"
