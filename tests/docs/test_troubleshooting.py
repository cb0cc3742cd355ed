"""docs/troubleshooting.md and the code say the same: each message is there, and none besides.

A row for a new message is one line: `| `the message` | what it means | what to do |`, with … for
what the code puts in. Messages that mean the same share a row, with <br> between them.
"""

import errno
import re
from collections.abc import Iterator

import pytest

from kvfs.fuse.errnos import ERRNO
from tests.docs.messages import ROOT, literals, reaching_people

DOCUMENT = ROOT / "docs" / "troubleshooting.md"


def _rows(heading: str) -> Iterator[str]:
    """The first cells of all tables whose first column has this heading."""
    within = False
    for line in DOCUMENT.read_text().splitlines():
        first = line.removeprefix("| ").partition(" | ")[0] if line.startswith("| ") else ""
        if within and first:
            yield first
        within = line.startswith("|") and (within or first == heading)


def _quoted(heading: str) -> set[str]:
    """What stands in backticks there: two of them around a text that has some itself."""
    return {found[1] for row in _rows(heading) for found in re.findall(r"(`+)(.+?)\1(?!`)", row)}


def test_every_message_is_in_the_document() -> None:
    quoted = _quoted("message")
    missing = [
        f"| `{text}` | | |    <- {where}"
        for text, where in sorted(reaching_people().items(), key=lambda item: item[1])
        if text not in quoted
    ]
    assert not missing, f"{DOCUMENT.name} lacks rows for\n" + "\n".join(missing)


def test_every_message_in_the_document_is_one() -> None:
    strange = sorted(_quoted("message") - reaching_people().keys())
    assert not strange, f"nothing in kvfs says this of {DOCUMENT.name}:\n" + "\n".join(strange)


@pytest.mark.parametrize("command", ["status", "evict"])
def test_what_a_command_says_is_in_the_code(command: str) -> None:
    told = _quoted(f"`kvfs {command}` says")
    assert told, "the table is gone"
    strange = sorted(told - literals())
    assert not strange, f"nothing in kvfs says this of {DOCUMENT.name}:\n" + "\n".join(strange)


def test_every_errno_is_in_the_document() -> None:
    told = {getattr(errno, name, 0) for row in _rows("errno") for name in row.split(", ")}
    missing = [errno.errorcode[code] for code in ERRNO.values() if code not in told]
    assert not missing, f"{DOCUMENT.name} lacks rows for {missing}"
