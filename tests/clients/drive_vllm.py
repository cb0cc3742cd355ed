"""Drives the real engine core of vLLM 0.33, with kvfs's connector and ranks that check every byte.

    drive_vllm.py DIR

The engine, its scheduler, and the planning and allocation of its cache are vLLM's own. The
connectors are vLLM's and kvfs's, loaded by vLLM's factory. The ranks have no model. For each token
they keep a number computed from all tokens up to it, the layer, the rank and the place. So a
foreign, moved or missing byte shows. Before each step every rank checks all of its requests' pages.

Each variant answers twice on a namespace of its own below DIR, the second time from the cache.
Memory is so scarce that requests are preempted. Prints one JSON line: for each variant, the second
run's tokens from the cache.

Runs in the clients' own environment (scripts/install-clients.sh), never inside the tests' one.
"""
# ruff: noqa: ANN401, PLC0415  (vLLM's classes have no types here, and are imported after the kernels)

import copy
import functools
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import vllm_cpu

prepare = vllm_cpu.prepare
VOCABULARY, PAGE, TOKENS = 512, 16, 64
LAYERS = ("a", "b", "c")
HEADS, HEAD_DIM = 4, 8
PAGES = 30
PROMPTS, COMMON, ANSWER = 5, 150, 40
MASK = (1 << 15) - 1

VARIANTS: dict[str, dict[str, Any]] = {
    "one rank, heads first": {"layout": "LBHNC"},
    "one rank, tokens first": {"layout": "LBNHC"},
    "one rank, blocks outermost": {"layout": "BLHNC"},
    "pages in parts": {"layout": "LBHNC", "kernel": 4},
    "two ranks": {"layout": "LBNHC", "ranks": 2},
    "two ranks that lose blocks": {"layout": "LBNHC", "ranks": 2, "lose": 1},
    "MLA, one copy for two ranks": {"layout": "LBNHC", "ranks": 2, "mla": True},
}


class Rank:
    """A worker, as vLLM sees it."""

    variant: dict[str, Any]

    def __init__(self, config: Any, rank: int) -> None:
        self.config = copy.copy(config)
        self.config.parallel_config = copy.copy(config.parallel_config)
        self.config.parallel_config.rank = rank
        self.rank = 0 if self.variant.get("mla") else rank  # whose numbers it keeps
        self.tokens: dict[str, list[int]] = {}
        self.sums: dict[str, list[int]] = {}
        self.pages: dict[str, list[int]] = {}
        self.checked = 0

    def get_kv_cache_spec(self) -> dict[str, Any]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

        ranks = self.variant.get("ranks", 1)
        if self.variant.get("mla"):
            kind = MLAAttentionSpec
            shape = {"num_kv_heads": 1, "head_size": 24, "max_tp_shards": 1}
        else:
            kind = FullAttentionSpec
            shape = {"num_kv_heads": HEADS // ranks, "head_size": HEAD_DIM, "max_tp_shards": HEADS}
        return {name: kind(block_size=PAGE, dtype=torch.bfloat16, **shape) for name in LAYERS}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [self.variant["layout"]]

    def determine_available_memory(self) -> int:
        return PAGES * sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())

    def initialize_from_config(self, configs: list[Any]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.kv_cache_interface import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        planned = configs[self.config.parallel_config.rank]
        self.part = self.variant.get("kernel", PAGE)
        self.caches = allocate_kv_cache(
            planned, torch.device("cpu"), KVCacheLayout[self.variant["layout"]], [self.part]
        )
        self.connector = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, planned
        )
        self.connector.register_kv_caches(self.caches)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any]:
        rank = self.config.parallel_config.rank
        return {(0, rank): self.connector.get_handshake_metadata()}

    def execute_model(self, output: Any) -> Any:
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self._take(output)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(output) as moved,
        ):
            sampled = self._compute(output)
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=moved,
        )

    def shutdown(self) -> None:
        self.connector.shutdown()

    def _take(self, output: Any) -> None:
        """Add the new tokens and pages of the requests."""
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.sums[new.req_id] = []
            self.pages[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.pages[name] = []
            self.pages[name] += pages[0] if pages else []

    def _compute(self, output: Any) -> dict[str, list[int]]:
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():
            begin, tokens, sums = before[name], self.tokens[name], self.sums[name]
            while len(sums) < len(tokens):
                token = tokens[len(sums)].to_bytes(4, "little")
                sums.append(zlib.crc32(token, sums[-1] if sums else 1))
            self._check(name, begin)
            self._write(name, begin, begin + count)
            sampled[name] = []
            if begin + count == len(tokens):
                sampled[name] = [sums[-1] % VOCABULARY]
                tokens += sampled[name]
        return sampled

    def _check(self, name: str, end: int) -> None:
        for layer in LAYERS:
            kept, wanted = self._kept(name, layer, 0, end)
            found = self._cache(layer)[kept]
            if not torch.equal(found, wanted):
                wrong = (found != wanted).flatten(1).any(1).nonzero().flatten().tolist()
                raise AssertionError(f"rank {self.rank}, {name}, layer {layer}: tokens {wrong}")
        self.checked += end

    def _write(self, name: str, begin: int, end: int) -> None:
        for layer in LAYERS:
            kept, wanted = self._kept(name, layer, begin, end)
            self._cache(layer)[kept] = wanted

    def _cache(self, layer: str) -> torch.Tensor:
        """The cache of a layer, by part of a page and token there: heads and numbers."""
        return self.caches[layer].permute(0, 2, 1, 3).view(torch.int16)

    def _kept(self, name: str, layer: str, begin: int, end: int) -> tuple[Any, torch.Tensor]:
        _, heads, _, content = self.caches[layer].shape
        at = torch.arange(begin, end)
        pages = torch.tensor(self.pages[name], dtype=torch.long)[at // PAGE]
        slots = pages * PAGE + at % PAGE
        place = torch.arange(heads * content).view(heads, content)
        sums = torch.tensor(self.sums[name][begin:end], dtype=torch.long)[:, None, None]
        wanted = sums + place + 4099 * LAYERS.index(layer) + 8111 * self.rank
        return (slots // self.part, slots % self.part), (wanted & MASK).to(torch.int16)


def executor() -> type:
    from vllm.v1.executor.abstract import Executor

    class Ranks(Executor):
        """All ranks of an engine in its own process."""

        def _init_executor(self) -> None:
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            class Layer:
                get_attn_backend = staticmethod(lambda: CPUAttentionBackend)

            context = self.vllm_config.compilation_config.static_forward_context
            context.update({name: Layer() for name in LAYERS})
            count = self.vllm_config.parallel_config.tensor_parallel_size
            self.ranks = [Rank(self.vllm_config, rank) for rank in range(count)]

        supported_tasks = ("generate",)

        def collective_rpc(
            self,
            method: Any,
            timeout: float | None = None,  # noqa: ARG002
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
            non_block: bool = False,  # noqa: FBT001, FBT002  (as vLLM calls it)
        ) -> Any:
            assert not non_block, method
            calls = [getattr(rank, method, None) for rank in self.ranks]
            return [call(*args, **(kwargs or {})) if call else None for call in calls]

        def execute_model(self, output: Any, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
            from concurrent.futures import Future

            found = self.kv_output_aggregator.aggregate(
                self.collective_rpc("execute_model", args=(output,))
            )
            if not non_block:
                return found
            future: Future[Any] = Future()
            future.set_result(found)
            return future

        def compile_or_warm_up_model(self) -> None:
            """There is nothing to compile."""

        def check_health(self) -> None:
            """They are here."""

        def shutdown(self) -> None:
            for rank in self.ranks:
                rank.shutdown()

    return Ranks


def losing(keep: int) -> None:
    """Let all but `keep` blocks of each load of one rank be gone when it begins."""
    from kvfs.connectors import paged

    load = paged.Mover.load

    def without(self: Any, wanted: Any) -> None:
        chain = (wanted.parent, *wanted.keys)
        if Rank.variant.get("lose") and self._cache.shard == "1":
            for parent, key in zip(chain[keep:-1], chain[keep + 1 :], strict=True):
                path = Path(self._cache.path) / parent.hex() / f"{key.hex()}.1"
                path.unlink(missing_ok=True)
        load(self, wanted)

    paged.Mover.load = without


def prompts() -> list[list[int]]:
    drawn = random.Random(11)
    common = [drawn.randrange(VOCABULARY) for _ in range(COMMON)]
    return [
        common + [drawn.randrange(VOCABULARY) for _ in range(30 + 7 * at)] for at in range(PROMPTS)
    ]


@functools.cache
def model() -> str:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=512,
        architectures=["LlamaForCausalLM"],
    )
    directory = Path.home() / "no-model"
    config.save_pretrained(directory)
    return str(directory)


def engine(path: Path, **told: Any) -> Any:
    from vllm import LLM

    transfer = {
        "kv_connector": "KvfsConnector",
        "kv_connector_module_path": "kvfs.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": str(path), "block_tokens": TOKENS},
    }
    transfer["kv_connector_extra_config"] |= told.pop("extra", {})
    return LLM(
        model(),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=320,
        max_num_batched_tokens=128,
        block_size=PAGE,
        tensor_parallel_size=Rank.variant.get("ranks", 1),
        distributed_executor_backend=executor(),
        kv_transfer_config=transfer | told.pop("transfer", {}),
        disable_log_stats=True,
        **({"enable_prefix_caching": False} | told),
    )


def answers(made: Any, asked: list[Any]) -> list[Any]:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=ANSWER, detokenize=False)
    return made.generate(asked, wanted, use_tqdm=False)


def variant(path: Path, preempted: list[str]) -> dict[str, Any]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    made = engine(path)
    core = made.llm_engine.engine_core.engine_core
    ranks = core.model_executor.ranks
    found: dict[str, Any] = {}
    tokens: list[list[int]] = []
    for run in ("first", "second"):
        preempted.clear()
        every = answers(made, asked)
        own = [list(one.outputs[0].token_ids) for one in every]
        tokens = tokens or own
        assert own == tokens, run
        for rank in ranks:
            rank.connector._mover._saver.submit(int).result()  # what was given to be saved is
        found[run] = {
            "cached": [one.num_cached_tokens for one in every],
            "checked": [rank.checked for rank in ranks],
            "preempted": len(preempted),
            "stats": [rank.connector._cache.stats.as_dict() for rank in ranks],
        }
    salted = answers(made, [asked[0] | {"cache_salt": "of one customer"}])[0]
    assert list(salted.outputs[0].token_ids) == tokens[0]
    found["salted"] = salted.num_cached_tokens
    core.shutdown()
    return found


def local_hits(path: Path) -> list[int]:
    """vLLM's own prefix cache has some tokens; the rest is loaded, from within a block on."""
    made = engine(path, enable_prefix_caching=True)
    first, longer = prompts()[0], prompts()[1]
    cached = [
        answers(made, [{"prompt_token_ids": asked}])[0].num_cached_tokens
        for asked in (first[:100], longer, first)
    ]
    made.llm_engine.engine_core.engine_core.shutdown()
    return cached


def refusals(path: Path) -> list[str]:
    """The error of each configuration that kvfs cannot serve; "" for none."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    said = []

    def refused(**told: Any) -> None:
        try:
            engine(path, **told)
        except Exception as error:  # noqa: BLE001  (its kind and its words are the result)
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")

    refused(transfer={"kv_load_failure_policy": "fail"})
    refused(extra={"block_tokens": 24})
    refused(extra={"paht": "x"})
    refused(extra={"model": "another"})
    refused(hf_overrides=lambda config: config)
    full = Rank.get_kv_cache_spec
    Rank.get_kv_cache_spec = lambda _: {
        name: SlidingWindowSpec(
            block_size=PAGE,
            num_kv_heads=HEADS,
            head_size=HEAD_DIM,
            dtype=torch.bfloat16,
            sliding_window=64,
        )
        for name in LAYERS
    }
    refused()
    Rank.get_kv_cache_spec = full
    return said


def main() -> None:
    directory = Path(sys.argv[1])
    vllm_cpu.install()
    torch.set_num_threads(1)
    from vllm.v1.core.sched.scheduler import Scheduler

    vllm_cpu.yield_between_steps()
    preempt, preempted = Scheduler._preempt_request, []

    def counting(self: Any, request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *rest, **named)

    Scheduler._preempt_request = counting
    losing(1)
    found: dict[str, Any] = {"ok": True, "variants": {}}
    for at, (name, chosen) in enumerate(VARIANTS.items()):
        begun = time.monotonic()
        Rank.variant = chosen
        found["variants"][name] = variant(directory / f"v{at}", preempted)
        print(name, round(time.monotonic() - begun, 1), file=sys.stderr)
    Rank.variant = next(iter(VARIANTS.values()))
    found["local"] = local_hits(directory / "v0")
    found["refused"] = refusals(directory / "v0")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads do not end by themselves
