"""The configuration of a mount while it is mounted, and the consumers of its hot options.

Contract: each consumer registers a setter for a hot option. The setter gets the value of the mount,
and each later one of `kvfs set`. A change happens as a whole or not at all, one change at a time.
Setters do not fail. An option that a consumer may refuse has no setter. It goes to the only trial
(`observe_first`), before anything else changes.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from kvfs.config import Config
from kvfs.parsing import rows

Setter = Callable[[Any], object]
Trial = Callable[[Config], Awaitable[None]]

HOT = frozenset(row.name for row in rows(Config) if row.hot)


class LiveConfig:
    """The present configuration is `config`; `file` keeps it for the next daemon."""

    def __init__(self, config: Config, file: Path) -> None:
        """file: on a tmpfs, as `change` writes it without waiting for a disk."""
        self.config = config
        self._file = file
        self._setters: dict[str, list[Setter]] = {}
        self._tried: frozenset[str] = frozenset()
        self._trial: Trial | None = None
        self._changing = trio.Lock()

    def observe(self, name: str, setter: Setter) -> None:
        """Call the setter with the option's value, now and at each change."""
        assert name in HOT, name
        self._setters.setdefault(name, []).append(setter)
        setter(getattr(self.config, name))

    def observe_first(self, *names: str, trial: Trial) -> None:
        """Await the trial at each change of these options. It raises ConfigError for a refusal.

        A trial that refuses must change nothing. There is one trial, because a second could refuse
        after the first has changed something.
        """
        assert self._trial is None
        assert set(names) <= HOT, names
        self._tried, self._trial = frozenset(names), trial

    async def change(self, texts: Mapping[str, str]) -> Config:
        """Set hot options, and return the configuration before.

        Raises ConfigError and changes nothing if one is refused.
        """
        async with self._changing:
            config = before = self.config
            for name, text in texts.items():
                config = config.changed(name, text)
            fresh = self._file.with_name(f"{self._file.name}.new")
            fresh.write_text(config.to_json())
            if self._trial is not None and self._tried & texts.keys():
                await self._trial(config)
            fresh.rename(self._file)
            self.config = config
            for name in texts:
                for setter in self._setters.get(name, ()):
                    setter(getattr(config, name))
            return before
