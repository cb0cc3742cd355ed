"""Weights of a model in a namespace: saved, sent to the bucket, warmed, and loaded by mmap.

    python examples/model_loading.py /mnt/kv            # a mount of kvfs; any directory will do

A Llama with seeded random weights stands for the model: nothing is downloaded. transformers saves
it as safetensors; they leave every tier for the bucket, if the mount has one; `kvfs warm` brings
them back, as one does on a node before its engine starts; safetensors maps them, and each tensor is
compared with what was saved. Printed is how long each step took. Exits with 1 if a tensor differs.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

KVFS = (sys.executable, "-m", "kvfs")
# Who loads weights gives way to who reads KV blocks: docs/namespaces.md.
SETTINGS = ("priority=bulk",)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a mount of kvfs, or any directory")
    parser.add_argument("--namespace", default="models", help="of the weights; made if need be")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="64MB", help="size of a file")
    options = parser.parse_args()
    if not options.directory.is_dir():
        parser.error(f"{options.directory}: expected a directory that is there")
    return options


def build(options: argparse.Namespace) -> Any:  # noqa: ANN401 (transformers' own types say less)
    """Return the model, with weights that its seed makes."""
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
    )
    torch.manual_seed(options.seed)
    from_config: Any = AutoModelForCausalLM.from_config
    return from_config(config, dtype=getattr(torch, options.dtype))


def kvfs(*arguments: object) -> str:
    """Run a command of kvfs; what it prints."""
    command = [*KVFS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[2:])}: {done.stderr or done.stdout}")
    return done.stdout


def mount_of(directory: Path) -> Path | None:
    """Return where kvfs is mounted, if `directory` is on it: its root has control files."""
    for path in (directory.resolve(), *directory.resolve().parents):
        if path.is_mount():
            return path if (path / ".kvfs").is_dir() else None
    return None


@contextmanager
def timed(what: str, size: int = 0) -> Iterator[None]:
    """Print how long something took; for `size` bytes at which rate."""
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    rate = f"  {size / seconds / 1e9:6.2f} GB/s" if size else ""
    print(f"{what:34}{seconds:9.4f} s{rate}", flush=True)


def mapped(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, over mappings of these: nothing is read."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    return found


def main() -> None:
    """Save, evict, warm, load, compare."""
    options = arguments()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    mount = mount_of(options.directory)
    namespace = options.directory / options.namespace
    if mount is None:
        print(f"{options.directory}: no kvfs here, so that nothing is evicted and warmed")
        namespace.mkdir(exist_ok=True)
    elif not namespace.exists():
        kvfs("ns", "create", namespace, *SETTINGS)
    model = build(options)
    weights = model.state_dict()
    size = sum(tensor.nbytes for tensor in weights.values())
    folder = namespace / f"llama-{options.hidden}x{options.layers}-{options.seed}"
    with timed("save_pretrained", size):
        model.save_pretrained(folder, max_shard_size=options.shard)
    files = list(folder.glob("*.safetensors"))
    print(f"{folder}: {size:,} bytes of weights in {len(files)} files")
    if mount is not None:
        if "s3" in json.loads(kvfs("status", mount, "--json"))["tiers"]:
            with timed("kvfs flush --wait", size):
                kvfs("flush", mount, "--wait")
            with timed("kvfs evict --to s3"):
                kvfs("evict", folder, "--to", "s3")
        else:
            print("the mount has no bucket: the weights stay where they are")
        with timed("kvfs warm", size):
            kvfs("warm", folder)
    with timed("mapped by safetensors"):
        loaded = mapped(folder)
    with timed("compared, which reads all", size):
        different = [name for name in weights if not torch.equal(weights[name], loaded[name])]
    if different or loaded.keys() != weights.keys():
        sys.exit(f"tensors differ: {different or loaded.keys() ^ weights.keys()}")
    print(f"all {len(loaded)} tensors are equal")
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    with timed("from_pretrained, which maps"):
        again = from_pretrained(folder, dtype=getattr(torch, options.dtype))
    same = all(torch.equal(again.state_dict()[name], weights[name]) for name in weights)
    if not same:
        sys.exit("from_pretrained has loaded other weights")


if __name__ == "__main__":
    main()
