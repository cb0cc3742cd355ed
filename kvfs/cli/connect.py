"""`kvfs connect`: the two ways in which an engine can use a namespace, and the text for each.

Contract: the command changes nothing. With --file or --native, stdout has only the text to paste.
Not for making a namespace: `kvfs ns create --for`.
"""

import json

import click

from kvfs import profiles
from kvfs.cli import completion, json_option
from kvfs.cli.ns import Named, configuration, expect_own, namespace_argument, say_misfits
from kvfs.cli.screen import screen, table
from kvfs.errors import ConfigError
from kvfs.settings import Settings

WAYS = {"files": "by files", "native": "natively"}


@click.command(epilog="Engines: " + ", ".join(profiles.ENGINES))
@click.argument("engine", metavar="ENGINE", shell_complete=completion.words(profiles.ENGINES))
@namespace_argument
@click.option(
    "--file",
    "way",
    flag_value="files",
    help="Print only the configuration for the engine's own file connector.",
)
@click.option(
    "--native",
    "way",
    flag_value="native",
    help="Print only the configuration for kvfs's connector.",
)
@json_option
def command(engine: str, namespace: Named, way: str | None, *, as_json: bool) -> None:
    """Print how ENGINE can use NAMESPACE."""
    chosen = profiles.engine(engine)
    names = {one: name for one in WAYS if (name := getattr(chosen, one)) is not None}
    if way is not None and way not in names:
        raise ConfigError(f"engine {engine} cannot use a namespace {WAYS[way]}: {chosen.lacks}")
    found = namespace.ask("ns_show")
    expect_own(namespace, found)
    settings = Settings.parse(found["settings"])
    texts = {one: configuration(namespace, name, settings) for one, name in names.items()}
    wanted = [way] if way else list(names)
    if as_json:
        ways = {
            one: {
                "connector": names[one],
                "settings": profiles.settings(names[one]),
                "misfits": profiles.misfits(names[one], found["settings"]),
                "configuration": texts[one] + "\n",
            }
            for one in wanted
        }
        data = {
            "engine": engine,
            "namespace": str(namespace.mountpoint / namespace.name),
            "ways": ways,
            "lacks": chosen.lacks or None,
            "gives": [gives._asdict() for gives in chosen.gives],
        }
        click.echo(json.dumps(data, indent=2))
        return
    if way is not None:
        click.echo(texts[way])
        say_misfits(namespace, names[way], found["settings"])
        return
    for one, text in texts.items():
        click.echo(f"# {engine} {WAYS[one]}: {names[one]}\n{text}\n")
        say_misfits(namespace, names[one], found["settings"])
    if chosen.lacks:
        click.echo(f"# {chosen.lacks}.")
    if chosen.gives:
        columns = ("", *WAYS.values())
        screen().print(table(columns, chosen.gives, fold=columns))
    if chosen.others:
        click.echo(f"Other ways by files: kvfs ns create --for {', '.join(chosen.others)}")
