"""Every command that a document shows is run as it stands there, as root, on a machine for it."""

import re
from pathlib import Path

import pytest

from tests.docs import commands

DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in commands.ROOT.glob("docs/*.md"))]
# A line that a reader could copy into a shell.
COMMAND = re.compile(r"\s*(\$ |kvfs |\.venv/|scripts/|mount |curl |systemctl |apt-get |helm |pip )")


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documented_commands_print_the_documented_output(name: str, tmp_path: Path) -> None:
    shown = commands.commands((commands.ROOT / name).read_text())
    if shown:
        wrong = commands.run(name, shown, tmp_path)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_no_command_hides_in_another_block(name: str) -> None:
    """Each line that looks like a command is in a block that the tests run."""
    text = (commands.ROOT / name).read_text()
    rest = re.sub(r"^```(sh|console)\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    inside = "\n".join(re.findall(r"^```.*?^```$", rest, flags=re.MULTILINE | re.DOTALL))
    indented = re.findall(r"^    .*$", rest, flags=re.MULTILINE)
    hidden = [line for line in (*inside.splitlines(), *indented) if COMMAND.match(line)]
    assert not hidden, f"mark the block sh or console: {hidden}"


def test_a_block_becomes_commands() -> None:
    text = "# T\n<!-- run: a -->\n```sh\nb\nc\n```\n```console\n$ d \\\n  e\nf\n$ g\n```"
    assert commands.commands(text) == [
        (2, "a", None),
        (4, "b\nc", None),
        (8, "d \\\n  e", "f\n"),
        (11, "g", ""),
    ]
