"""From which length on is a prefix faster loaded than computed? Time to the first token, both ways.

    .venv/bin/python -m scripts.bench.ttft [--quick] [--preset 1b --device cuda] [--json FILE]

The model of examples/chat.py gets a prefix and 32 tokens more. The benchmark mounts kvfs and has
the prefix in the RAM tier; on a machine that cannot mount, `--directory` takes any other place.

*recompute* is one forward pass over all tokens. *load* is the load of the prefix from the mount and
a pass over the 32 tokens. They take turns. *rate* is the rate of the prefix's bytes on their way
into the cache. At the *break-even rate*, loading would take as long as recomputing. Not for engines
that serve many requests at once: there a loaded prefix also leaves the device to other requests.
"""

import contextlib
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from transformers import DynamicCache

from examples import chat
from kvfs.client import PrefixCache
from kvfs.connectors.transformers import load, save, spec_of
from scripts.bench.mounted import kvfs, scratch
from scripts.bench.report import Report, note, number

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SUFFIX = 32  # tokens that both ways compute


class Prompts:
    """One model, and prompts of it that differ from their first block on."""

    def __init__(self, model: Any, prefixes: PrefixCache) -> None:  # noqa: ANN401 (see chat.build)
        self.model = model
        self.prefixes = prefixes

    def of(self, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(length)
        found: list[int] = torch.randint(0, 256, (length,), generator=generator).tolist()
        return found

    def recompute(self, tokens: list[int]) -> tuple[torch.Tensor, DynamicCache]:
        cache = DynamicCache(config=self.model.config)
        return chat.compute(self.model, cache, tokens, [(0, len(tokens))]), cache

    def cached(self, tokens: list[int]) -> torch.Tensor:
        """Raises ValueError where the prefix is not there: the time would be that of another."""
        cache, done = load(self.prefixes, self.model, tokens)
        if done != len(tokens) - SUFFIX:
            raise ValueError(f"{done} tokens are cached, expected {len(tokens) - SUFFIX}")
        return chat.compute(self.model, cache, tokens, [(done, len(tokens))])

    def bytes_of(self, length: int) -> int:
        spec = self.prefixes.spec
        return length // spec.block_tokens * spec.stored_bytes


def seconds(work: Callable[[], object]) -> float:
    """Until the device has done it as well."""
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(prompts: Prompts, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Medians by length, and what follows from them."""
    rows = []
    for length in lengths:
        tokens = prompts.of(length + SUFFIX)
        logits, cache = prompts.recompute(tokens)
        save(prompts.prefixes, cache, tokens[:length])
        del cache
        by = float((prompts.cached(tokens) - logits).abs().max())  # and warm
        works: dict[str, Callable[[], object]] = {
            "recompute": partial(prompts.recompute, tokens),
            "load": partial(prompts.cached, tokens),
            "load alone": partial(load, prompts.prefixes, prompts.model, tokens),
        }
        spent: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds):
            for name, work in works.items():
                spent[name].append(seconds(work))
        recompute, loaded, alone = (statistics.median(times) for times in spent.values())
        size = prompts.bytes_of(length)
        saved = recompute - (loaded - alone)
        rows.append(
            {
                "tokens": length,
                "bytes": size,
                "recompute_s": recompute,
                "load_s": loaded,
                "ratio": loaded / recompute,
                "rate": size / alone,
                "break_even_rate": size / saved if saved > 0 else None,
                "logits_differ_by": by,
                "spent": spent,
            }
        )
        note(f"{length} tokens: {recompute:.3f} s and {loaded:.3f} s")
    return rows


def break_even(rows: list[dict[str, Any]]) -> str:
    """The length from which on loading is faster: between two that were measured, on a line."""
    slower = [row for row in rows if row["ratio"] >= 1]
    if not slower:
        return f"below {rows[0]['tokens']} tokens"
    last = max(slower, key=lambda row: row["tokens"])
    after = [row for row in rows if row["tokens"] > last["tokens"]]
    if not after:
        return f"above {last['tokens']} tokens"
    gaps = [row["load_s"] - row["recompute_s"] for row in (last, after[0])]
    share = gaps[0] / (gaps[0] - gaps[1])
    return f"{last['tokens'] + share * (after[0]['tokens'] - last['tokens']):.0f} tokens"


@contextlib.contextmanager
def place(directory: Path | None, size: int) -> Iterator[tuple[Path, str]]:
    """A directory for a namespace, and what it is."""
    if directory is not None:
        yield directory, str(directory)
        return
    with scratch() as folder, kvfs(folder / "kv", f"ram={(size >> 20) + 256}M") as mounted:
        yield mounted.path, f"a mount of its own, {mounted.options}"


@click.command()
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="A tiny model, two lengths, one round: does it run?")
@click.option("--preset", type=click.Choice(list(chat.PRESETS)), default="small", show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--block", default=64, show_default=True, help="Tokens of a block.")
@click.option("--threads", type=int, default=torch.get_num_threads)
@click.option("--directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    lengths: str,
    rounds: int,
    quick: bool,
    preset: str,
    device: str,
    dtype: str,
    block: int,
    threads: int,
    directory: Path | None,
    output: Path | None,
) -> None:
    """Compare recomputing a prefix with loading it, by its length."""
    if quick:
        lengths, rounds, preset = "128,256", 1, "tiny"
    counts = sorted(int(length) for length in lengths.split(","))
    if any(length < block or length % block for length in counts):
        raise click.BadParameter(f"{lengths}: expected multiples of a block, {block} tokens")
    torch.set_num_threads(threads)
    shape = dict.fromkeys(chat.PRESETS[preset])
    options = Namespace(preset=preset, device=device, dtype=dtype, seed=0, **shape)
    model = chat.build(options)
    spec = spec_of(model, name=f"ttft {preset}", revision="seed 0", block_tokens=block)
    size = sum(counts) // block * spec.stored_bytes
    with place(directory, size) as (path, what):
        report = Report("ttft", preset=preset, device=device, dtype=dtype, threads=threads)
        with PrefixCache(path / "ttft", spec, create=True) as prefixes:
            rows = measure(Prompts(model, prefixes), counts, rounds)
        report.document |= {"place": what, "results": rows, "break_even": break_even(rows)}
        report.table(
            f"time to the first token after a prefix, {what}",
            ["prefix", "MiB", "recompute", "load", "load / recompute", "GB/s", "break-even MB/s"],
            [
                [
                    f"{row['tokens']:,}",
                    number(row["bytes"] / (1 << 20)),
                    f"{row['recompute_s']:.4f}",
                    f"{row['load_s']:.4f}",
                    f"{row['ratio']:.3f}",
                    number(row["rate"] / 1e9),
                    number(row["break_even_rate"] and row["break_even_rate"] / 1e6),
                ]
                for row in rows
            ],
            note=f"break-even: {break_even(rows)}; load at the end {os.getloadavg()[0]:.1f}",
        )
        report.write(output)


if __name__ == "__main__":
    main()
