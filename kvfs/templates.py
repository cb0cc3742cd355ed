"""The settings of a new namespace, by its name, from a configuration file.

Contract: the file is TOML with tables `[namespace."PATTERN"]`, patterns as fnmatch(3) has them
(`*`, `?`, `[...]`, case counts). The first table of the file whose pattern matches gives all the
settings; without one they are the defaults. Values are texts, whole numbers or true and false. Any
mistake in the file is a ConfigError that names file, table, field and value. Not for namespaces
that exist: they keep their settings.
"""

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvfs.errors import ConfigError
from kvfs.parsing import hint
from kvfs.settings import MEDIA, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "namespace"


@dataclass(frozen=True, slots=True)
class Templates:
    """Settings by pattern, in the order of the file. `Templates()` has none."""

    by_pattern: tuple[tuple[str, Settings], ...] = ()

    @classmethod
    def read(cls, path: Path, tiers: Collection[str] = MEDIA) -> "Templates":
        """Return the templates of a file, on a mount with these tiers, or raise ConfigError."""
        try:
            document = tomllib.loads(path.read_bytes().decode())
        except OSError as error:
            raise ConfigError(
                f"namespaces={path}: {error.strerror}: give a TOML file that kvfs can read"
            ) from None
        except (ValueError, RecursionError) as error:  # of TOML, with its place, or of UTF-8
            raise ConfigError(f"{path}: {error}") from None
        for name in document:
            if name != TABLE:
                raise ConfigError(f"{path}: unknown table {name!r}; {hint(name, [TABLE])}")
        tables = document.get(TABLE, {})
        if not isinstance(tables, dict):
            raise ConfigError(f'{path}: {TABLE} = {tables!r}: expected tables [{TABLE}."PATTERN"]')
        return cls(
            tuple((name, _settings(path, name, table, tiers)) for name, table in tables.items())
        )

    def for_name(self, name: str) -> Settings | None:
        """Return the settings for a new namespace of this name; None: no pattern is for it."""
        for pattern, settings in self.by_pattern:
            if fnmatchcase(name, pattern):
                return settings
        return None


def _settings(path: Path, pattern: str, table: object, tiers: Collection[str]) -> Settings:
    where = f'{path}: [{TABLE}."{pattern}"]'
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, found {table!r}")
    try:
        _check_pattern(pattern)
        settings = Settings.parse({name: _text(name, value) for name, value in table.items()})
        settings.check_media(tiers)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return settings


def _check_pattern(pattern: str) -> None:
    """Raises ConfigError for a pattern that no directory's name can match."""
    rest = re.sub(r"\[(?=(!?\]?))\1[^]]*\]", "", pattern)  # a ] that comes first is a member
    if pattern in {"", ".", ".."} or "/" in pattern or "[" in rest:
        raise ConfigError(
            "expected a pattern for the names of top-level directories, without a /, and with a ] "
            "for each ["
        )


def _text(name: str, value: object) -> str:
    """Return a TOML value as `Settings.parse` takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and name != "mode":  # 0o600 is 384 there, which could be a mode too
        return str(value)
    if isinstance(value, str):
        return value
    cure = ""
    if isinstance(value, Mapping):
        cure = ": a pattern with a dot needs quotes"
    elif name == "mode":
        cure = ' such as "0600"'
    raise ConfigError(f"setting {name}={value}: expected a text{cure}")
