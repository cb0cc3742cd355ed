"""What does it cost to read a file's name?

    .venv/bin/python -m scripts.bench.layouts [--json FILE]

The benchmark times `recognise` and the two keys, for one name of each layout. The time is the best
of several rounds in processor time, because other work of the machine only makes it worse. A seal
may cost 3 us more by it. Only names quoted as in URLs, LMCache's for GDS, cost more.
"""

import time
from pathlib import Path

import click

from kvfs.layouts import Directory, key_of, recognise
from scripts.bench.report import Report

HASH = "a3" * 32
VLLM = (b"meta-llama_Llama-3.1-8B_0123456789ab_r0", b"a3a", b"3a_g0")
NAMES: tuple[tuple[Directory, str], ...] = (
    ((), "meta-llama-Llama-3.1-8B@1@0@1234567890abcdef0000@bfloat16.pt"),
    ((), f"meta-llama-SEP-Llama-3.1-8B@8@3@{HASH}@bfloat16.data"),
    ((), f"meta-llama-SEP-Llama-3.1-8B@0x08030803@0@{HASH}.data"),
    ((b"12", b"34"), "org%2FLlama-3.1-8B%401%400%4012ab%40bfloat16.kvcache.safetensors"),
    (VLLM, f"{HASH}.bin"),
    (VLLM, f"{HASH}.bin_4611686018427387904.tmp"),
    ((HASH[:32].encode(),), "model.layers.0.self_attn.attn.safetensors"),
    ((), f"{HASH}_meta-llama-Llama-3.1-8B_0_1.bin"),
    ((HASH[:40].encode(),), "_data.safetensors"),
    ((HASH[:32].encode(),), f"{HASH[8:40]}.1"),
    ((), "slot7.bin"),
    ((), "notes.txt"),
)


def microseconds(directory: Directory, name: bytes, rounds: int, count: int) -> float:
    """Return the whole cost of one name."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(count):
            block = recognise(directory, name)
            if block is None:
                key_of(1, name)
            else:
                _ = block.key, block.parent_key
        best = min(best, time.process_time() - start)
    return best / count * 1e6


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--count", default=5000, show_default=True, help="Names in a round.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, rounds: int, count: int, output: Path | None) -> None:
    """Cost of a name in microseconds, by layout."""
    report = Report("layouts", rounds=rounds, count=count)
    rows = []
    for directory, name in NAMES:
        block = recognise(directory, name.encode())
        layout = block.layout if block else "not known"
        rows.append((layout, name, microseconds(directory, name.encode(), rounds, count)))
    report.document["results"] = [
        {"layout": layout, "name": name, "microseconds": spent} for layout, name, spent in rows
    ]
    report.table(
        "Reading a name",
        ["layout", "name", "us"],
        [(layout, name[:40], f"{spent:.2f}") for layout, name, spent in rows],
    )
    report.write(output)


if __name__ == "__main__":
    main()
