"""Words of a command line that several commands take."""

from collections.abc import Iterable

from kvfs.errors import ConfigError


def assignments(words: Iterable[str], what: str) -> dict[str, str]:
    """Return the texts of NAME=VALUE words by name; `what` they are: options, settings.

    Raises ConfigError for a word of another form, and for a name that is given twice.
    """
    texts: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: expected NAME=VALUE")
        if name in texts:
            raise ConfigError(f"{what} {name} is given twice")
        texts[name] = text
    return texts
