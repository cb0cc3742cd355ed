"""Runs the real vLLM 0.33 on a CPU, with kvfs's connector on a directory, or without.

    run_vllm.py DIR [--plain] [--config FILE] [--vanish N] [--pages N]

A Llama of four layers with seeded weights answers eight prompts, greedily. Seven begin with the
same 300 tokens, and one is a single token. Then it continues two of its answers. Engine, scheduler,
worker and model are vLLM's own. The kernels for CPUs, which vLLM's wheel lacks, are those of
vllm_cpu.py.

- --plain: without the connector.
- --config: the output of `kvfs connect vllm DIR --native`.
- --vanish N: when a load begins, all but N of its blocks are gone.
- --pages: this many pages of memory, so that requests are preempted.

Prints one JSON line: the tokens and their log probabilities, how many tokens each request had from
the cache, how often one was preempted, and the connector's statistics.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401, PLC0415  (vLLM's classes have no types here, and are imported after the kernels)

import argparse
import json
import os
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import vllm_cpu

prepare = vllm_cpu.prepare
VOCABULARY, PAGE = 512, 32
COMMON, ANSWER = 300, 40
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 32
PAGE_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * PAGE * 4
SEED = 7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=lambda text: Path(text).absolute())
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--vanish", type=int)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--config", type=Path)
    return parser.parse_args()


def model(directory: Path) -> str:
    """A model with weights, in files as vLLM reads them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not directory.exists():
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=2048,
            initializer_range=0.2,  # answers that depend on all of a prompt
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def connecting(config: Path) -> dict[str, Any]:
    """The JSON that follows --kv-transfer-config, for small blocks."""
    words = shlex.split(config.read_text().replace("\\\n", " "), comments=True)
    found: dict[str, Any] = json.loads(words[words.index("--kv-transfer-config") + 1])
    found["kv_connector_extra_config"] |= {"model": "tiny-llama", "block_tokens": 64}
    return found


def engine(options: argparse.Namespace) -> Any:
    from vllm import LLM

    told = {} if options.plain else {"kv_transfer_config": connecting(options.config)}
    return LLM(
        model(Path.home() / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        max_model_len=512,
        max_num_batched_tokens=512,  # prompts are computed in pieces
        block_size=PAGE,
        kv_cache_memory_bytes=options.pages * PAGE_BYTES,
        # Requests must not find each other's pages; what is loaded comes from the cache.
        enable_prefix_caching=False,
        disable_log_stats=True,
        **told,
    )


def prompts() -> list[list[int]]:
    drawn = random.Random(SEED)
    common = [drawn.randrange(VOCABULARY) for _ in range(COMMON)]
    different = [[drawn.randrange(VOCABULARY) for _ in range(20 + at)] for at in range(7)]
    return [*(common + own for own in different), [3]]


def vanishing(keep: int) -> list[int]:
    """Let all but `keep` blocks of each load be gone; the list gets how many there were."""
    from kvfs.connectors import paged

    load, asked = paged.Mover.load, []

    def without(self: Any, wanted: Any) -> None:
        chain = (wanted.parent, *wanted.keys)
        asked.append(len(wanted.keys))
        for parent, key in zip(chain[keep:-1], chain[keep + 1 :], strict=True):
            (Path(self._cache.path) / parent.hex() / key.hex()).unlink(missing_ok=True)
        load(self, wanted)

    paged.Mover.load = without
    return asked


def main() -> None:
    options = arguments()
    vllm_cpu.install()
    torch.set_num_threads(1)
    asked = vanishing(options.vanish) if options.vanish is not None else []
    from vllm import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    vllm_cpu.yield_between_steps()
    preempt, preempted = Scheduler._preempt_request, []

    def counting(self: Any, request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *rest, **named)

    Scheduler._preempt_request = counting
    made = engine(options)
    wanted = SamplingParams(temperature=0, max_tokens=ANSWER, logprobs=0, detokenize=False)

    def answers(asked: list[list[int]]) -> list[Any]:
        return made.generate(
            [{"prompt_token_ids": prompt} for prompt in asked], wanted, use_tqdm=False
        )

    first = answers(prompts())
    again = answers(
        [[*one.prompt_token_ids, *one.outputs[0].token_ids, 5, 6, 7] for one in first[:2]]
    )
    every = [*first, *again]
    core = made.llm_engine.engine_core.engine_core
    connector = core.scheduler.get_kv_connector()
    assert (connector is None) == options.plain
    stats, kind = {}, ""
    if connector is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        kind = type(connector).__mro__[1].__name__
        worker = get_kv_transfer_group()
        worker._mover._saver.submit(int).result()  # what was given to be saved is
        stats = worker._cache.stats.as_dict() | {"unsaved": worker._mover.unsaved}
    print(
        json.dumps(
            {
                "ok": True,
                "tokens": [list(one.outputs[0].token_ids) for one in every],
                "logprobs": [
                    [next(iter(step.values())).logprob for step in one.outputs[0].logprobs]
                    for one in every
                ],
                "cached": [one.num_cached_tokens for one in every],
                "preempted": len(preempted),
                "asked": asked,
                "base": kind,
                "stats": stats,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads do not end by themselves
