"""Texts for other people's eyes: what could be a secret or a file's name is masked.

Contract: `Masks.text` keeps of each line what is known to be harmless (words, numbers, times, names
of kvfs's modules and tiers, paths given as `safe`) and puts MASK for everything else: what is
quoted, what has a shape that names and keys have, and the words given as `names`. A plain word that
is a file's name and was not given is not told from another word. `Masks.value` does the same to
plain values, by the fields that have names. Not for what must be kept word for word.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "<masked>"
SECRET_LEAST = 6  # characters; what is shorter is in many words
# Fields of a status whose texts are names of objects, namespaces or models, or come from users.
NAMED = {"name", "path", "model", "fingerprint", "files", "key", "problem", "note"}
_QUOTED = re.compile(r"""b?'[^'\n]*'|b?"[^"\n]*\"""")
_AFTER = re.compile(r"\b((?:namespace|attribute|key)s?) (?!\d+\b)[^\s,:;]+")
_WORD = re.compile(
    r"""[(\[{<]*(
      [A-Za-z][A-Za-z'-]{0,23}                # a word; a longer one may be a token
    | [A-Za-z]+(_[a-z]+)+                     # a setting, a counter
    | [-+]?\d+([.,:/-]\d+)*(%|[A-Za-z]{1,3})? # a number, a size, a time, an address
    | \d{4}-\d\d-\d\dT[\d:.]+Z?
    | kvfs(\.[a-z_0-9]+)+                     # a module
    | [a-z_0-9]+=[-\w.]{0,15}                 # an option
    | [a-z]+(\+[a-z0-9]+)+                   # tiers
    )[)\]}>,.:;!?%]*""",
    re.VERBOSE,
)
_SOURCE = re.compile(r'File "[^"\n]*/(kvfs/[a-z_0-9/]+\.py)"')  # of a traceback
_USER = re.compile(r"(?<=://)[^/\s@]+@")  # and password, in a URL
_SECRET = re.compile(r"(?i)(secret|password|passwd|token|credential|signature|access.?key)")


def scrub(text: str, environment: Mapping[str, str]) -> str:
    """Without what variables hold that are secrets by their name, and passwords in URLs."""
    secrets = [
        value
        for name, value in environment.items()
        if _SECRET.search(name) and len(value) >= SECRET_LEAST
    ]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _USER.sub(f"{MASK}@", text)


class Masks:
    """names: words that are masked wherever they stand; safe: paths that may stay."""

    def __init__(self, names: Iterable[str] = (), safe: Iterable[str] = ()) -> None:
        words = sorted({name for name in names if name}, key=len, reverse=True)
        whole = (rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
        self._names = re.compile("|".join(whole) or r"(?!)")
        self._safe = sorted({path for path in safe if path}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Line by line."""
        return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        line = _SOURCE.sub(r"File \1", line)
        line = _QUOTED.sub(MASK, line)
        line = _AFTER.sub(rf"\1 {MASK}", line)
        line = self._names.sub(MASK, line)
        return re.sub(r"\S+", self._word, line)

    def _word(self, found: re.Match[str]) -> str:
        word = found[0]
        bare = word.strip("()[]{}<>,.:;")
        if word.strip("()[],.:;") == MASK or _WORD.fullmatch(word) or bare in self._safe:
            return word
        if re.fullmatch(r"kvfs/[a-z_0-9/]+\.py,?", word):
            return word
        for path in self._safe:  # a tier's own file: objects/II/INODE.VERSION
            if re.fullmatch(rf"{re.escape(path)}/(objects|quarantine)/[0-9a-f/.]+", bare):
                return word
        return MASK if re.search(r"\w", word) else word

    def value(self, value: Any, field: str = "") -> Any:  # noqa: ANN401 - JSON
        """A copy in which the texts of fields that have names are masked, and all with secrets."""
        if isinstance(value, dict):
            return {name: self.value(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, field) for one in value]
        if isinstance(value, str) and value:
            if _SECRET.search(field) or (field in NAMED and value not in {*self._safe, "."}):
                return MASK
            return value if field in _AS_IT_IS or value in self._safe else self._line(value)
        return value


# Fields whose texts are kvfs's own.
_AS_IT_IS = {"version", "mountpoint", "state", "kind", "level", "source", "eviction", "engine"}
