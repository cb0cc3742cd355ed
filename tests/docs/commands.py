"""Commands in documents: what is shown, and a machine of their own that they are run on.

A fenced block marked `sh` is run as it stands. One marked `console` has commands behind `$ ` and
what they print below each; `...` stands for any text there. A comment `<!-- run: COMMAND -->` runs
what the reader has done already. All of one document is one shell, in the order of the document.
Not for what is written in other blocks: those show files and output.
"""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.systemd import Systemd

ROOT = Path(__file__).parents[2]
ENTER = Path(__file__).with_name("enter.sh")
MACHINE = Path(__file__).with_name("machine.sh")
SECONDS = 240
_BLOCK = re.compile(
    r"^```(?P<language>\S*)\n(?P<text>.*?)^```$|^<!-- run: (?P<hidden>.*?) -->$",
    flags=re.MULTILINE | re.DOTALL,
)
# Its reader's mount holds the quotas of a document, which this one does not.
SMALL = re.compile(r"^kvfs: namespace \S+: quota_hard=\S+ is more than .*\n", re.MULTILINE)
# Sizes of a large machine, and what this one has for them; and the run that this is a part of.
INSTEAD = {"ram=64G": "ram=64M", "scripts/test.sh ": "test -x scripts/test.sh "}


class Command(NamedTuple):
    """In `line` of its document; `printed` is None if nothing is said of it."""

    line: int
    text: str
    printed: str | None = None


def commands(document: str) -> list[Command]:
    """In the order of the document."""
    found = []
    for block in _BLOCK.finditer(document):
        line = document.count("\n", 0, block.start()) + 1
        if block["hidden"]:
            found.append(Command(line, block["hidden"]))
        elif block["language"] == "sh":
            found.append(Command(line + 1, block["text"].rstrip("\n")))
        elif block["language"] == "console":
            found += _session(line + 1, block["text"])
    return found


def _session(line: int, text: str) -> list[Command]:
    """Commands behind `$ `, with lines that end in a backslash continued."""
    found: list[Command] = []
    for shown in text.splitlines():
        if shown.startswith("$ "):
            found.append(Command(line, shown[2:], ""))
        elif found and found[-1].text.endswith("\\"):
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{shown}")
        else:
            assert found, f"line {line}: a console block begins with a command behind '$ '"
            last = found[-1]
            found[-1] = last._replace(printed=f"{last.printed}{shown}\n")
        line += 1
    return found


def run(name: str, shown: list[Command], folder: Path) -> list[str]:
    """Run them on a new machine; what went wrong, in a form for people."""
    lines = [f"cd {ROOT}", f"source {MACHINE} {folder}"]
    for command in shown:
        text = command.text
        for there, here in INSTEAD.items():
            text = text.replace(there, here)
        lines.append(f"at='{name}:{command.line}'; echo \"== $at\"")
        if command.printed is None:
            lines.append(text)
        else:
            lines.append(f"{{ {text}\n}} >{folder}/{command.line} 2>&1")
    script = folder / "commands.sh"
    script.write_text("\n".join([*lines, "echo == end"]) + "\n")
    services = any("systemctl " in command.text for command in shown)
    code, printed = (_beside_services if services else _alone)(script, folder)
    if code:
        return [f"exit code {code}\n{printed[-4000:]}{_last(folder)}"]
    return [wrong for command in shown for wrong in _compare(name, command, folder)]


def _alone(script: Path, folder: Path) -> tuple[int, str]:
    """Its own mounts, processes and loopback: nothing is left behind, and all ports are free."""
    isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--net")
    return _finish(*isolated, ENTER, folder, "bash", script)


def _beside_services(script: Path, folder: Path) -> tuple[int, str]:
    """On a machine with systemd; its network is this one's."""
    at = folder / "systemd"
    at.mkdir()
    machine = Systemd(at)
    try:
        return _finish("nsenter", f"--target={machine.pid}", "--all", "bash", script)
    finally:
        machine.end()


def _finish(*command: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        check=False,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout


def _last(folder: Path) -> str:
    """Return the output of the last command that ran, if it was to be compared."""
    printed = [path for path in folder.iterdir() if path.name.isdigit()]
    newest = max(printed, key=lambda path: path.stat().st_mtime_ns, default=None)
    return "" if newest is None else newest.read_text(errors="backslashreplace")[-2000:]


def _compare(name: str, command: Command, folder: Path) -> list[str]:
    if command.printed is None:
        return []
    printed = (folder / str(command.line)).read_text(errors="backslashreplace")
    printed = SMALL.sub("", printed)
    pattern = ".*".join(map(re.escape, command.printed.strip().split("...")))
    if re.fullmatch(pattern, printed.strip(), flags=re.DOTALL):
        return []
    return [f"{name}:{command.line}: {command.text}\nshown:\n{command.printed}\nfound:\n{printed}"]
