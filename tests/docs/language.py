"""The sentences of documents and docstrings, and the rules for them.

Contract: `of_document` and `of_module` give the sentences of a file, each with its line. A cell of
a table and an item of a list are sentences of their own. Code blocks and comments are left out;
inline code counts as one word. Not for headings, which are no sentences.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONG = 30  # words

# The subject of a sentence is a named thing.
NAMELESS = re.compile(
    r"(?:who|whoever|whose|whatever|what|that which)\b(?!-)(?!.*\?$)", re.IGNORECASE
)

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*(?:[A-Z0-9]|kvfs\b))")
_WORD = re.compile(r"[A-Za-z0-9]")


class Sentence(NamedTuple):
    """`line` is the one in which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """How many of them there are."""
        return sum(bool(_WORD.search(word)) for word in self.text.split())

    @property
    def is_counted(self) -> bool:
        """Whether it is one for a share of sentences: a figure in a cell is none."""
        return self.words >= 5

    @property
    def is_nameless(self) -> bool:
        """Whether it begins with a pronoun in place of a named thing."""
        return NAMELESS.match(self.text.lstrip("*_\"'( ")) is not None


def of_document(text: str) -> Iterator[Sentence]:
    """Of Markdown."""
    for pattern in (_FENCE, _COMMENT):
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    yield from _sentences(text, 1)


def of_module(source: str) -> Iterator[Sentence]:
    """Of all docstrings in a Python module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield from _sentences(docstring, node.body[0].lineno)


def _sentences(text: str, line: int) -> Iterator[Sentence]:
    for block in re.split(r"(\n\s*\n)", text):
        for at, part in _parts(block):
            plain = _CODE.sub("Code", _LINK.sub(r"\1", part))
            for found in _END.split(" ".join(plain.split())):
                if _WORD.search(found):
                    yield Sentence(line + at, found)
        line += block.count("\n")


def _parts(block: str) -> Iterator[tuple[int, str]]:
    """Cells, items and paragraphs, each with the lines before it."""
    lines = block.splitlines()
    held: list[str] = []
    start = 0
    for at, one in enumerate(lines):
        is_row, is_item = one.lstrip().startswith("|"), _ITEM.match(one) is not None
        if is_row or is_item or one.startswith("#"):
            if held:
                yield start, "\n".join(held)
            held, start = [], at
        if is_row:
            if not re.fullmatch(r"[|:\- ]+", one):
                yield from ((at, cell) for cell in re.split(r"(?<!\\)\|", one) if cell.strip())
        elif not one.startswith("#"):
            if not held:
                start = at
            held.append(_ITEM.sub("", one) if is_item else one)
    if held:
        yield start, "\n".join(held)


def read(path: Path) -> list[Sentence]:
    """The sentences of a document or module."""
    text = path.read_text()
    return list(of_document(text) if path.suffix == ".md" else of_module(text))
