"""vLLM on a kvfs namespace: a KV connector, for vLLM 0.33.

vLLM loads it by `kv_connector_module_path`; `kvfs connect vllm NAMESPACE` prints the rest. Its
`kv_connector_extra_config` has these options, of which only `path` is needed:

- `path`: the namespace's directory.
- `block_tokens`: of a file; 256, rounded down to whole pages of vLLM, but at least one page.
- `threads` (4): for files.
- `staging_bytes` (2 GiB): of host memory, for blocks that wait to be written.
- `model` and `revision`: parts of the fingerprint.

Contract: best effort. Loads and saves run beside the steps. The connector reports blocks that it
cannot load, and the engine computes them (`kv_load_failure_policy` must be `recompute`). Bytes are
pages as the attention backend has them: that backend, its page and all that changes them are in the
fingerprint. The connector passes by requests whose cache depends on more than their tokens:
`passed_by`. It refuses models whose cache is not one group of equal attention layers at the start:
`_refused`. Not for handing over requests from prefill to decode.
"""

# ruff: noqa: ANN401, ARG002, ARG003 (vLLM's signatures)

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(
        f"kvfs.connectors.vllm needs vLLM 0.33 in its Python environment: {error}"
    ) from error

from kvfs.client import PrefixCache, Spec
from kvfs.connectors.paged import Load, Mover, PagedMemory, Save
from kvfs.connectors.scheduling import EngineRequests

_log = logging.getLogger(__name__)
_BLOCK_TOKENS = 256  # 32 MiB for 128 KiB a token
_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")  # speculative decoding
_OPTIONS = {
    "path": str,
    "block_tokens": int,
    "threads": int,
    "staging_bytes": int,
    "model": str,
    "revision": str,
}


@dataclass
class Moves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to be checked
    """The moves of the workers in one step."""

    loads: list[Load]
    saves: list[Save]


@dataclass
class Described(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's spec, from the memory that it really has: arguments of `Spec`."""

    spec: dict[str, Any]


def passed_by(request: Any) -> str:
    """Return why a request is neither loaded nor saved; "" if it is cached."""
    reasons = {
        "has a LoRA": request.lora_request,
        "has images, audio or video": request.mm_features,
        "has embeddings for tokens": request.prompt_embeds is not None,
        "has a cache salt": request.cache_salt,
        "is a stream, whose tokens may change": request.resumable,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


class KvfsConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One connector for the scheduler and one for each worker, as vLLM makes them.

    Raises ValueError and TypeError for a setup that it cannot serve, OSError if there is no
    directory, SpecMismatchError if that is another model's: all before the first request.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._told = _options(self._kv_transfer_config.kv_connector_extra_config)
        if reason := _refused(vllm_config, kv_cache_config):
            raise ValueError(f"{type(self).__name__}: {reason}")
        (group,) = kv_cache_config.kv_cache_groups
        self._layers = list(group.layer_names)
        self._page = group.kv_cache_spec.block_size
        self._cache: PrefixCache | None = None
        self._spec: dict[str, Any] | None = None
        self._requests: EngineRequests | None = None
        self._mover: Mover | None = None
        self._missing: set[int] = set()
        self._logged: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not saved is a miss

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False  # the wake-up may bring other weights, and other memory

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        memory = PagedMemory(
            [kv_caches[name] for name in self._layers], self._kv_cache_config.num_blocks
        )
        if memory.page_tokens != self._page or memory.device.type not in {"cpu", "cuda"}:
            raise ValueError(
                f"{type(self).__name__}: pages of {memory.page_tokens} tokens on {memory.device}: "
                f"expected {self._page} on cpu or cuda"
            )
        parallel = self._vllm_config.parallel_config
        replicas = self._kv_cache_config.kv_tp_replicas
        rank = parallel.rank % parallel.tensor_parallel_size
        tokens = self._told.get("block_tokens", max(1, _BLOCK_TOKENS // self._page) * self._page)
        if tokens % self._page:
            raise ValueError(f"block_tokens={tokens}: expected a multiple of {self._page}")
        model = self._vllm_config.model_config
        self._spec = {
            "model": self._told.get("model", model.model),
            "revision": f"{self._told.get('revision', model.revision) or 'main'} {self._variant()}",
            "dtype": str(memory.dtype).removeprefix("torch."),
            "axes": memory.axes(tokens),
            "shards": parallel.tensor_parallel_size // replicas,
        }
        self._cache = self._open(Spec(**self._spec), rank // replicas)
        self._mover = Mover(
            self._cache,
            memory,
            staging_bytes=self._told.get("staging_bytes", 2 << 30),
            saves=rank % replicas == 0,
        )

    def get_handshake_metadata(self) -> Described | None:
        return None if self._spec is None else Described(self._spec)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._moves().loads:
            self._moving().load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request is computed before its pages are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all layers are read after the step."""

    def wait_for_save(self) -> None:
        for save in self._moves().saves:
            self._moving().save(save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        loaded, missing = self._moving().loaded()
        self._missing |= missing
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing

    # In the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Described]) -> None:
        described = [one.spec for _, one in sorted(metadata.items())]
        if any(one != described[0] for one in described):
            raise ValueError(f"{type(self).__name__}: expected one spec of all, got {described}")
        if self._requests is None:
            self._cache = self._open(Spec(**described[0]), None)
            self._requests = EngineRequests(
                self._cache,
                self._page,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        requests = self._cached(request)
        count = 0 if requests is None else requests.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self._requests is not None:
            (pages,) = blocks.get_block_ids()
            self._requests.allocated(request, pages, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        if self._requests is None:
            return Moves([], [])
        state = scheduler_output.kv_connector_block_state

        def pages_of(name: str) -> list[int] | None:
            found = state.get_block_ids(name)
            return None if found is None else found[0]

        return Moves(*self._requests.plan(scheduler_output.num_scheduled_tokens, pages_of))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        if self._requests is not None:
            self._requests.finished(request.request_id)
        return False, None  # the pages to save have been read

    def reset_cache(self) -> bool:
        _log.error(
            "%s is not reset: other engines may use it. If the weights of the model have changed, "
            "start this engine with a namespace of another revision",
            self._told["path"],
        )
        return False

    # In both

    def shutdown(self) -> None:
        if self._mover is not None:
            self._mover.close()
        if self._cache is not None:
            self._cache.close()
            _log.info("%s: %s", self._cache.path, self._cache.stats)
        self._mover = self._cache = self._requests = None

    def _open(self, spec: Spec, shard: int | None) -> PrefixCache:
        return PrefixCache(
            self._told["path"],
            spec,
            shard=shard if spec.shards > 1 else None,
            threads=self._told.get("threads", 4),
            create=True,
        )

    def _moves(self) -> Moves:
        moves = self._get_connector_metadata()
        assert isinstance(moves, Moves)
        return moves

    def _moving(self) -> Mover:
        assert self._mover is not None, "register_kv_caches comes first"
        return self._mover

    def _cached(self, request: Any) -> EngineRequests | None:
        """Return the account of a request; None if it is passed by."""
        if self._requests is None:
            return None
        reason = passed_by(request)
        if not reason:
            return self._requests if self._requests.add(request) else None
        if reason not in self._logged:
            self._logged.add(reason)
            _log.info(
                "request %s is not cached, nor are others of its kind: it %s",
                request.request_id,
                reason,
            )
        return None

    def _variant(self) -> str:
        """Return all that changes bytes beside the model, the dtype and the shape."""
        config = self._vllm_config
        model = config.model_config
        modules = config.compilation_config.static_forward_context
        backends = {
            f"{modules[name].get_attn_backend().get_name()}{getattr(modules[name], 'isa', '')}"
            for name in self._layers
        }
        rope = json.dumps(
            getattr(model.hf_text_config, "rope_parameters", None), sort_keys=True, default=str
        )
        facts = {
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(config.cache_config.cache_dtype),
            "hf_overrides": model.hf_overrides,
            "rope": rope,
            # Two kinds of positions depend on the greatest length of a request.
            "length": model.max_model_len if "longrope" in rope or "dynamic" in rope else 0,
            "dummy": config.load_config.load_format == "dummy",
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        version = ".".join(vllm.__version__.split(".")[:2])
        return f"vllm-{version} {'+'.join(sorted(backends))}/{self._page} {digest.hexdigest()[:12]}"


def _options(told: dict[str, Any]) -> dict[str, Any]:
    """Return the checked options. Raises TypeError and ValueError."""
    for name, value in told.items():
        if name not in _OPTIONS:
            raise ValueError(
                f"kv_connector_extra_config: {name!r}: expected one of {', '.join(_OPTIONS)}"
            )
        if type(value) is not _OPTIONS[name]:
            wanted = _OPTIONS[name].__name__
            raise TypeError(f"kv_connector_extra_config: {name}={value!r}: expected {wanted}")
        if value in ("", 0) or (isinstance(value, int) and value < 0):
            raise ValueError(
                f"kv_connector_extra_config: {name}={value!r}: expected a greater number"
            )
    if "path" not in told:
        raise ValueError(
            "kv_connector_extra_config: path is missing: expected the directory of a kvfs namespace"
        )
    return dict(told)


def _refused(config: Any, cache: Any) -> str:
    """Return why an engine cannot be served; "" if it can."""
    groups = cache.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups]
    if len(specs) != 1 or type(specs[0]) not in (FullAttentionSpec, MLAAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        return (
            f"the cache of this model is of {kinds}: expected one group of layers, of full "
            "attention or MLA; state-space, sparse and encoder layers are not supported"
        )
    if specs[0].tokens_per_state != 1 or specs[0].non_causal:
        return (
            "layers that keep less than one state for a token, or see tokens after it, are not "
            "supported"
        )
    speculative = config.speculative_config
    drafts = speculative is not None and speculative.method not in _WITHOUT_CACHE
    if drafts or groups[0].is_eagle_group or specs[0].is_draft:
        return (
            "a draft model's cache depends on tokens after a block: expected no speculative "
            f"decoding, or one of {', '.join(_WITHOUT_CACHE)}"
        )
    parallel = config.parallel_config
    others = (
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
    )
    if max(others) > 1:
        return "expected tensor and data parallelism only, no pipeline or context parallelism"
    if callable(config.model_config.hf_overrides):
        return "hf_overrides is a function: expected a dict, which the fingerprint can have"
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return (
            "kv_load_failure_policy='fail': expected 'recompute' in --kv-transfer-config, because "
            "a block may be dropped between its match and its load"
        )
    return ""
