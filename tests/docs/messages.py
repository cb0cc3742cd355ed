"""Every message of kvfs that reaches a person, read from its source and that of its scripts.

Contract: `reaching_people` gives each template with a place where it is raised, logged or printed;
`…` stands in it for what is put in. Which errors are meant is said by class, in `_is_shown`; of the
log it is what is a warning or worse. Not for what stands behind the colon of such a template: the
reason, which is often the kernel's or the store's.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GAP = "…"

# Errors that the command line prints before it exits with 2 (ConfigError), 1 or 8 (fsck).
_PRINTED = {
    "BadParameter",
    "ClickException",
    "ConfigError",
    "ControlError",
    "CheckFailed",
    "DaemonFailed",
    "KvfsError",
    "ReplayError",
}
# Of a bucket as a whole: `kvfs status` shows them beside the tier, with nothing around them.
_OF_THE_BUCKET = {"OutageError", "RefusedError"}
# Here the user of a command reads any domain error.
_BEHIND_COMMANDS = {
    "kvfs/core/jobs/tree_jobs.py",
    "kvfs/core/jobs/warm.py",
    "kvfs/core/admin/lifecycle.py",
    "kvfs/daemon/inspection.py",
    "kvfs/fsck.py",
    "kvfs/s3/nodes.py",
}

# Shell scripts that people run, and what refuses in each.
_SCRIPTS = {
    "mount/mount.kvfs": "refuse",
    "scripts/install.sh": "fail",
    "scripts/build-deb.sh": "fail",
    "scripts/build-image.sh": "fail",
    "scripts/build-wheel.sh": "fail",
    "scripts/up.sh": "fail",
}

_LOGGED = {"warning", "error", "critical", "exception"}
_CONVERSION = re.compile(r"%[-+#0-9.]*[a-z]")
_WORD = re.compile(r"[a-z]{2}")  # a text without words is a frame for other messages

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def reaching_people() -> dict[str, str]:
    """Where each template is, once."""
    sources = {path: ast.parse(path.read_text()) for path in sorted(ROOT.glob("kvfs/**/*.py"))}
    above = _classes_above(sources.values())
    found: dict[str, str] = {}
    for path, tree in sources.items():
        name = str(path.relative_to(ROOT))
        for function in (node for node in ast.walk(tree) if isinstance(node, _Function)):
            assigned = _assigned(function)
            for node in ast.walk(function):
                for told in _told(node, name, above):
                    for text in _templates(told, assigned):
                        if _WORD.search(text):
                            found.setdefault(text, f"{name}:{told.lineno}")
    for name, word in _SCRIPTS.items():
        for text in _refusals((ROOT / name).read_text(), word):
            found.setdefault(text, name)
    return found


def _refusals(source: str, word: str) -> list[str]:
    """Return the messages that a shell script prints with this word, which ends the script."""
    source = re.sub(r'" \\\n\s*"', " ", source)  # one text in two lines
    source = re.sub(r"\$\([^()]*\)|\$\{[^}]*\}|\$\w+", GAP, source)
    return re.findall(rf'\b{word} "([^"]+)"', source)


def literals() -> set[str]:
    """Every text in the source, as a template."""
    trees = (ast.parse(path.read_text()) for path in ROOT.glob("kvfs/**/*.py"))
    return {text for tree in trees for node in ast.walk(tree) if (text := _text(node))}


def _told(node: ast.AST, path: str, above: Mapping[str, set[str]]) -> Iterator[ast.expr]:
    """The expressions of messages that a node gives to people."""
    if isinstance(node, ast.Dict):  # an answer on a socket, which the command raises
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in {"error", "failed"}:
                yield value
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    if name.startswith("log.") and last in {*_LOGGED, "log"}:  # its level may be a warning's
        yield from _logged(node.args[last == "log" :])
    elif name == "click.echo" and "err=True" in map(ast.unparse, node.keywords):
        yield node.args[0]
    elif last == "pause" or _is_shown(last, path, above):  # `CircuitBreaker.pause` logs
        yield from node.args[:1]
    yield from (word.value for word in node.keywords if word.arg == "error")  # to the keeper


def _is_shown(name: str, path: str, above: Mapping[str, set[str]]) -> bool:
    """Whether people see the message of an error of this class by itself.

    They do not see these:

    - errors that a program gets as an errno (NotFoundError, TierError...): the document has a table
    - ValueError: it is raised anew, behind the name and the value that it is about
    - errors of movers and stores about one object: they are the reason in a line of the log
    - TypeError and the like: these are defects, and come with a traceback
    """
    classes = {name} | above.get(name, set())
    if path in _BEHIND_COMMANDS and "KvfsError" in classes:
        return True
    return name in _PRINTED or bool(classes & (_PRINTED - {"KvfsError"} | _OF_THE_BUCKET))


def _logged(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    """The template, and what it begins with, which may be a message that was made before."""
    yield arguments[0]
    if _text(arguments[0]).startswith(GAP):
        yield from arguments[1:2]


def _classes_above(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """The names of all classes above each class of kvfs."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    for _ in range(5):  # deeper than any of them
        for above in found.values():
            above.update(*(found.get(name, ()) for name in above.copy()))
    return found


def _assigned(function: _Function) -> dict[str, list[ast.expr]]:
    """Return the values that each local name may stand for."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _templates(told: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    if isinstance(told, ast.IfExp):
        yield from _templates(told.body, assigned)
        yield from _templates(told.orelse, assigned)
    elif isinstance(told, ast.Name):
        yield from (text for value in assigned.get(told.id, []) if (text := _text(value)))
    elif text := _text(told):
        yield text


def _text(node: ast.AST) -> str:
    """A template; "" for what is no text."""
    text = ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = _CONVERSION.sub(GAP, node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
        text = "".join(map(str, parts))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        text = (left or GAP) + (right or GAP) if left or right else ""
    return re.sub(f"{GAP}+", GAP, text)
