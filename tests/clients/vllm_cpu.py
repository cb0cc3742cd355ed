"""vLLM's kernels for CPUs, which the released wheel lacks, in torch.

The wheel of PyPI is CUDA's. With VLLM_TARGET_DEVICE=cpu all of its Python runs on a CPU: engine,
scheduler, worker, model runner, models. `install` gives it the six operators of C++ that a Llama
calls there; with `custom_ops: ["none"]` vLLM does the rest in torch itself.
"""
# ruff: noqa: ANN401, PLC0415  (vLLM's classes have no types here, and are imported after the kernels)

import os
import time
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling one function of the sampler takes longer than all runs
}


def install() -> None:
    """Install the kernels; call this before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    operators = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None  # noqa: ARG005
    operators.get_scheduler_metadata = lambda *arguments: torch.zeros(1)  # noqa: ARG005
    operators.compute_slot_mapping_kernel_impl = _slots
    operators.cpu_attn_reshape_and_cache = _keep
    operators.cpu_attention_with_kv_cache = _attend
    operators.greedy_argmax = lambda logits: logits.argmax(-1)


def prepare() -> None:
    """Import modules that take long and start nothing."""
    install()
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # A class by its name has vLLM import itself in another process, to look at the class there.
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


def yield_between_steps() -> None:
    """Yield between steps, as an engine in a process of its own does (EngineCoreProc).

    An engine in its caller's process does not: its empty steps leave the interpreter to no other
    thread.
    """
    from vllm.v1.engine.core import EngineCore

    post = EngineCore.post_step

    def post_step(self: Any, model_executed: bool) -> None:  # noqa: FBT001  (as vLLM calls it)
        post(self, model_executed)
        if not model_executed and self.scheduler.has_requests():
            time.sleep(0.001)

    EngineCore.post_step = post_step


def _slots(
    starts: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    size: int,
) -> None:
    for request, (begin, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        at = positions[begin:end]
        slots[begin:end] = pages[request][at // size].long() * size + at % size


def _keep(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *_: object,
) -> None:
    size = keys.shape[2]
    wanted = slots >= 0
    at = slots[wanted]
    keys[at // size, :, at % size] = key[: len(slots)][wanted]
    values[at // size, :, at % size] = value[: len(slots)][wanted]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    causal: bool,  # noqa: FBT001  (as vLLM calls it)
    slopes: object,
    window: int,
    pages: torch.Tensor,
    softcap: float,
    *_: object,
) -> None:
    assert causal and slopes is None and not softcap, "a Llama needs none of these"  # noqa: PT018
    assert window in (-1, (-1, -1)), window
    group = query.shape[1] // keys.shape[1]
    for request, length in enumerate(lengths.tolist()):
        begin, end = int(starts[request]), int(starts[request + 1])
        own = pages[request][: -(-length // keys.shape[2])].long()
        seen = torch.arange(length)[None] <= torch.arange(length - end + begin, length)[:, None]
        output[begin:end] = (
            torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1),
                *(
                    pool[own].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
                    for pool in (keys, values)
                ),
                attn_mask=seen,
                scale=scale,
            )
            .transpose(0, 1)
            .reshape(output[begin:end].shape)
        )
