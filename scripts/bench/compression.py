"""How much smaller does a KV cache become, and what does that cost a core?

    .venv/bin/python -m scripts.bench.compression [--rounds 7] [--json FILE]

The cache of a small Llama, made by tests/clients/make_kv.py in .venv-clients, in each dtype.
Processor time of one thread, the best of several rounds: the machine is shared. GB/s count the
object's bytes, not the stored ones. *compress* has each frame unpacked again and compared;
*file to file* is all of `kvfs.compression.files.decompress`, into a new file in FOLDER.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvfs.compression.container import FRAME, Frame, frames_in, frames_of, head_size
from kvfs.compression.files import SAMPLE, compress, decompress, sampled
from kvfs.compression.frames import LEVEL, pack, unpack
from scripts.bench.measure import Bar
from scripts.bench.report import Report, note, number

ROOT = Path(__file__).parents[2]
INTERPRETER = ROOT / ".venv-clients" / "bin" / "python"
DRIVER = ROOT / "tests" / "clients" / "make_kv.py"
ELEMENT_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
LEVELS = (1, 2, 3, 4, 5)
LAYERS = 4
GB = 1e9
BARS = (Bar("times smaller", 1.25), Bar("decompression, GB/s a core", 1.0))


def best(rounds: int, job: Callable[[], object]) -> float:
    """Seconds of processor time of the best round."""
    spent = []
    for _ in range(rounds):
        begun = time.thread_time()
        job()
        spent.append(time.thread_time() - begun)
    return min(spent)


def frames(content: bytes) -> list[bytes]:
    """The pieces that are compressed, each for itself."""
    return [content[at * FRAME : (at + 1) * FRAME] for at in range(frames_of(len(content)))]


def by_frame(content: bytes, element_size: int, level: int, rounds: int) -> dict[str, float]:
    """Ratio, and GB/s of `pack` alone: what level and element size change."""
    pieces = frames(content)
    packed = [pack(piece, element_size, level) for piece in pieces]
    spent = best(rounds, lambda: [pack(piece, element_size, level) for piece in pieces])
    return {
        "ratio": len(content) / sum(map(len, packed)),
        "compress_gb_s": len(content) / spent / GB,
    }


def pair(found: dict[str, float]) -> str:
    """A cell of a table."""
    return f"{found['ratio']:.3f}, {found['compress_gb_s']:.2f}"


def unpack_all(data: bytes, listed: list[Frame]) -> None:
    """As a mover does it: one frame after the other, none is kept."""
    for frame in listed:
        unpack(data[frame.position : frame.position + frame.stored], frame)


def whole(path: Path, folder: Path, element_size: int | None, rounds: int) -> dict[str, Any]:
    """One object, from file to file and back."""
    content = path.read_bytes()
    size = len(content)
    source = os.open(path, os.O_RDONLY)
    stored, back = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("stored", "back"))

    def compressed() -> None:
        os.truncate(stored, 0)
        if compress(source, stored, size, element_size) is None:
            raise click.ClickException(f"{path} does not become smaller")

    try:
        spent = best(rounds, compressed)
        data = (folder / "stored").read_bytes()
        listed = list(frames_in(data[: head_size(size)], size, len(data)))
        found = compress(source, stored, size, element_size)
        assert found is not None

        def restored() -> None:
            os.truncate(back, 0)
            decompress(found.codec, stored, back, size, found.stored_size)

        to_file = best(rounds, restored)
        if (folder / "back").read_bytes() != content:
            raise click.ClickException(f"{path} did not come back as it was")
        sampling = best(
            rounds, lambda: sampled(lambda at, count: os.pread(source, count, at), size, None)
        )
    finally:
        for fd in (source, stored, back):
            os.close(fd)
    return {
        "codec": found.codec,
        "bytes": size,
        "ratio": found.ratio,
        "compress_gb_s": size / spent / GB,
        "decompress_gb_s": size / best(rounds, lambda: unpack_all(data, listed)) / GB,
        "file_to_file_gb_s": size / to_file / GB,
        "sampling_ms": sampling * 1e3,
    }


def parts(content: bytes, element_size: int) -> dict[str, float]:
    """The ratio of each layer's keys and values; they lie one behind the other."""
    length = len(content) // LAYERS // 2
    return {
        f"{'KV'[at % 2]}{at // 2}": length
        / sum(len(pack(p, element_size)) for p in frames(content[at * length : (at + 1) * length]))
        for at in range(2 * LAYERS)
    }


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--tokens", default=4096, show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=tempfile.gettempdir(),
    show_default=True,
    help="Where the objects lie in all their forms.",
)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, rounds: int, tokens: int, folder: Path, output: Path | None) -> None:
    """Ratios and rates by dtype, element size and level."""
    if not INTERPRETER.exists():
        raise click.ClickException(f"{INTERPRETER} is missing: run scripts/install-clients.sh")
    report = Report("compression", rounds=rounds, tokens=tokens, folder=str(folder))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for dtype, element_size in ELEMENT_SIZES.items():
            note(f"{dtype}: the model runs")
            path = Path(scratch) / dtype
            command = [str(INTERPRETER), str(DRIVER), str(path), "--dtype", dtype]
            command += ["--layers", str(LAYERS), "--tokens", str(tokens)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            content = path.read_bytes()
            results[dtype] = {
                "whole": whole(path, Path(scratch), None, rounds),
                "parts": parts(content, element_size),
                "element_sizes": {
                    size: by_frame(content, size, LEVEL, rounds) for size in (1, 2, 4)
                },
                "levels": {
                    level: by_frame(content, element_size, level, rounds) for level in LEVELS
                },
            }
    report.document["results"] = results
    rows = [(dtype, found["whole"]) for dtype, found in results.items()]
    report.table(
        "One object",
        ["dtype", "codec", "MiB", "smaller", "compress", "decompress", "file to file", "sample ms"],
        [
            (
                dtype,
                row["codec"],
                number(row["bytes"] / 2**20),
                f"{row['ratio']:.2f}",
                *(number(row[f"{what}_gb_s"]) for what in ("compress", "decompress")),
                number(row["file_to_file_gb_s"]),
                number(row["sampling_ms"]),
            )
            for dtype, row in rows
        ],
        note=f"GB/s of one core; a sample is {SAMPLE >> 10} KiB",
    )
    report.table(
        "Times smaller, by layer",
        ["dtype", *results["bf16"]["parts"]],
        [
            (dtype, *(f"{value:.2f}" for value in found["parts"].values()))
            for dtype, found in results.items()
        ],
        note="K: keys, V: values",
    )
    for title, key in (("element size", "element_sizes"), ("level", "levels")):
        report.table(
            f"Times smaller, and GB/s of compressing, by {title}",
            ["dtype", *map(str, results["bf16"][key])],
            [
                (
                    dtype,
                    *(f"{v['ratio']:.3f}, {v['compress_gb_s']:.2f}" for v in found[key].values()),
                )
                for dtype, found in results.items()
            ],
        )
    bf16 = results["bf16"]
    smaller, fast = BARS
    report.bars(
        [
            smaller.judged(bf16["whole"]["ratio"], "bf16, whole"),
            smaller.judged(min(bf16["parts"].values()), "bf16, worst layer"),
            fast.judged(bf16["whole"]["decompress_gb_s"], "bf16"),
        ]
    )
    report.write(output)


if __name__ == "__main__":
    main()
