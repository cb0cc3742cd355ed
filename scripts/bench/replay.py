"""Does a mount find what the simulator says that it would?

    .venv/bin/python -m scripts.bench.replay TRACE [--requests 1500] [--capacity 5%] [--json FILE]

TRACE and --block-tokens are as `kvfs simulate` takes them. For each policy and capacity, `kvfs
simulate` gives the number of blocks and their hit ratios. `kvfs replay` plays the same requests,
with small files, in a namespace of a separate mount. The namespace has a hard quota of as many
objects, and the same policy. Memory has room for all objects, so that the quota alone decides which
go.

--both-tiers gives memory room for a quarter of them only, so that three quarters are on NVMe.

--whole-mount makes the mount itself the cache: no namespace, no memory, and NVMe with room for that
many blocks. It is slower, as each file is made on the disk, and has the mount's own policy, which
--policy must name.

The bar: token and object hit ratios within half a point of the simulator's.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvfs.simulation.trace import BLOCK_TOKENS
from scripts.bench.mounted import KVFS, Failed, Mounted, kvfs, scratch
from scripts.bench.report import Report, note

NAMESPACE = "replayed"
WITHIN = 0.5  # points
SLACK = 256 << 20  # bytes of memory beyond the blocks: a part is always kept free
SMALLEST = 16 << 20  # bytes: no tier is smaller
RATIOS = {"token_hit_ratio": "tokens", "object_hit_ratio": "objects"}


def ask(*arguments: str) -> Any:  # noqa: ANN401 - JSON
    """Run a command for its JSON; its progress shows meanwhile."""
    done = subprocess.run([*KVFS, *arguments, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise Failed(f"kvfs {' '.join(arguments)} exited {done.returncode}")
    return json.loads(done.stdout)


def create(mounted: Mounted, objects: int, policy: str) -> None:
    """Make the namespace: an empty directory with a quota and a policy."""
    settings = [f"quota_objects={objects}", f"eviction={policy}"]
    command = [*KVFS, "ns", "create", str(mounted.path / NAMESPACE), *settings]
    if subprocess.run(command, check=False).returncode:
        raise Failed(f"{' '.join(command[len(KVFS) :])} failed")


def replayed(
    asked: Sequence[str], blocks: int, policy: str, *, size: int, cache: str, nvme: Path
) -> dict[str, Any]:
    """Play the trace, `asked` as for the simulator, on a mount of its own."""
    with scratch() as folder, scratch(nvme) as disk:
        whole = cache == "mount"
        options = {
            "mount": f"ram=0,nvme={disk}/kvfs,nvme_size={blocks * size}",
            "memory": f"ram={2 * blocks * size + SLACK}",
            "tiers": f"ram={max(SMALLEST, blocks * size // 4)},"
            f"nvme={disk}/kvfs,nvme_size={2 * blocks * size + SLACK}",
        }[cache]
        with kvfs(folder / "kv", options) as mounted:
            more = ["--block-size", str(size)]
            if not whole:
                create(mounted, blocks, policy)
                more += ["--namespace", NAMESPACE]
            found: dict[str, Any] = ask("replay", *asked, str(mounted.path), *more)
            return found


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", default=1500, show_default=True)
@click.option("--capacity", "capacities", multiple=True, default=("5%", "10%"), show_default=True)
@click.option("--policy", "policies", multiple=True, default=("adaptive", "lru"), show_default=True)
@click.option("--block-tokens", default=BLOCK_TOKENS, show_default=True, help="of the trace")
@click.option("--block-size", "size", default=4096, show_default=True, help="bytes of a file")
@click.option("--both-tiers", "cache", flag_value="tiers")
@click.option("--whole-mount", "cache", flag_value="mount")
@click.option("--nvme", type=click.Path(exists=True, path_type=Path), default=Path("/var/tmp"))  # noqa: S108 (a fresh folder)
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path))
def main(
    *,
    trace: Path,
    requests: int,
    capacities: tuple[str, ...],
    policies: tuple[str, ...],
    block_tokens: int,
    size: int,
    cache: str | None,
    nvme: Path,
    output: Path | None,
) -> None:
    """Compare `kvfs replay` with `kvfs simulate`."""
    cache = cache or "memory"
    report = Report("replay", trace=trace.name, requests=requests, block_size=size, cache=cache)
    chosen = [f"--capacity={one}" for one in capacities] + [f"--policy={one}" for one in policies]
    asked = [str(trace), "--limit", str(requests), "--block-tokens", str(block_tokens)]
    rows = ask("simulate", *asked, *chosen)
    for row in rows:
        blocks, policy = int(row["capacity_blocks"]), str(row["policy"])
        note(f"{policy}, {blocks} blocks")
        found = replayed(asked, blocks, policy, size=size, cache=cache, nvme=nvme)
        row["replayed"] = found
        row["points"] = {ratio: 100 * abs(found[ratio] - row[ratio]) for ratio in RATIOS}
        row["holds"] = max(row["points"].values()) <= WITHIN
    report.document["results"] = rows
    cells = []
    for row in rows:
        found = row["replayed"]
        cells.append(
            [
                row["policy"],
                str(row["capacity_blocks"]),
                *(f"{100 * of[ratio]:.2f}" for ratio in RATIOS for of in (row, found)),
                "yes" if row["holds"] else "NO",
                str(found["refused"]),
                f"{found['seconds']:.0f}",
            ]
        )
    columns = [f"{name} %, {who}" for name in RATIOS.values() for who in ("simulated", "replayed")]
    report.table(
        "Hit ratios, simulated and replayed",
        ["policy", "blocks", *columns, f"within {WITHIN}", "refused", "seconds"],
        cells,
    )
    report.write(output)


if __name__ == "__main__":
    main()
