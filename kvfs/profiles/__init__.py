"""Profiles of connectors by name: a namespace's settings, and the text to paste into an engine.

Contract: pure. `settings` gives a namespace's settings as `kvfs ns create` takes them, only those
that the connector needs: quotas, weights and limits stay the user's. `configuration` prints for
people and parses in its own language: YAML, a shell's commands or Python, with comments. Not for
reading file names (`kvfs.layouts`).
"""

import difflib
from collections.abc import Mapping

from kvfs.errors import ConfigError
from kvfs.profiles.connectors import PROFILES
from kvfs.profiles.engines import ENGINES, Engine, Gives
from kvfs.profiles.profile import ConnectorProfile, NamespacePath

__all__ = [
    "ENGINES",
    "NAMES",
    "PROFILES",
    "Engine",
    "Gives",
    "configuration",
    "engine",
    "misfits",
    "settings",
]

NAMES = tuple(sorted(PROFILES))


def _profile(name: str) -> ConnectorProfile:
    try:
        return PROFILES[name]
    except KeyError:
        near = difflib.get_close_matches(name, NAMES, n=1)
        cure = f"did you mean {near[0]}?" if near else "expected one of " + ", ".join(NAMES)
        raise ConfigError(f"unknown connector {name!r}: {cure}") from None


def engine(name: str) -> Engine:
    """Return the ways of an engine. Raises ConfigError."""
    try:
        return ENGINES[name]
    except KeyError:
        raise ConfigError(
            f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}"
        ) from None


def settings(name: str) -> dict[str, str]:
    """Return the namespace settings for a connector, as text. Raises ConfigError."""
    return dict(_profile(name).settings)


def configuration(
    name: str,
    mountpoint: str,
    namespace: str,
    capacity_bytes: int | None,
    mount_bytes: int | None = None,
) -> str:
    """Return the engine's configuration, with the reasons of the settings above it.

    `capacity_bytes` is the namespace's hard quota, `mount_bytes` the size of the mount, if they are
    known. Engines that count by themselves get less. Raises ConfigError for an unknown connector,
    and for a path that an engine could not read.
    """
    profile = _profile(name)
    place = NamespacePath.of(mountpoint, namespace, capacity_bytes, mount_bytes)
    reasons = [
        f"# {setting}={profile.settings[setting]}: {why}\n" for setting, why in profile.why.items()
    ]
    return "".join(reasons) + profile.write(place)


def misfits(name: str, told: Mapping[str, str]) -> dict[str, str]:
    """Return the needs of the connector that a namespace's settings miss: value by setting.

    `told` are the namespace's settings as text. Raises ConfigError for an unknown connector.
    """
    needed = {"prefix": "off", **settings(name)}
    return {key: value for key, value in needed.items() if told.get(key, "off") != value}
