"""The example of docs/client.md, run as it is written there."""

import re
from pathlib import Path
from typing import Any

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_example(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 20
    assert example.count("/mnt/kv/llama") == 1
    # 8 MiB a block would be too much for what is shown.
    smaller = example.replace("/mnt/kv/llama", str(tmp_path / "llama")).replace(
        '"layer": 32', '"layer": 2'
    )
    names: dict[str, Any] = {}
    exec(compile(smaller, str(DOCUMENT), "exec"), names)  # noqa: S102
    computed = []

    def compute(tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        count = len(tokens) // 64
        computed.append((len(before), count))
        start = float(before[-1].flatten()[0]) + 1 if len(before) else 0.0
        numbers = torch.arange(start, start + count).view(count, *[1] * len(names["spec"].shape))
        return numbers.expand(count, *names["spec"].shape)

    with names["cache"]:
        first = names["prefill"](list(range(330)), compute)
        again = names["prefill"](list(range(330)), compute)
        longer = names["prefill"](list(range(650)), compute)
    assert computed == [(0, 5), (5, 0), (5, 5)]
    assert torch.equal(first, again)
    assert torch.equal(longer[:5], first)
    assert [float(block.flatten()[0]) for block in longer] == list(range(10))
