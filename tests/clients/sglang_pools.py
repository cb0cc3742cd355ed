"""SGLang's own host pools and storage controller on a machine without a GPU and its libraries.

Importing sglang needs triton, CUDA and about a hundred packages. The tests need only a few modules
of its wheel: the storage interface, the factory for backends, the host pools and the controllers.
They are imported unchanged. For all their other imports there are stand-ins, which say that there
is no accelerator. The code under test calls nothing else of them.
"""
# ruff: noqa: ANN401  (SGLang's classes have no types here)

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Below sglang; their packages are imported as empty ones.
REAL = {
    "srt.environ",
    "srt.managers.cache_controller",
    "srt.mem_cache.hicache_storage",
    "srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "srt.mem_cache.pool_host",
    "srt.mem_cache.storage.backend_factory",
}
PACKAGES = {
    *("", "srt", "srt.managers", "srt.mem_cache", "srt.mem_cache.hybrid_cache"),
    "srt.mem_cache.storage",
}


class _Nothing:
    """A stand-in for a missing name: always false, and a decorator that changes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else None

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of sglang that are not REAL, and packages that are not installed."""

    absent = ("sglang", "sgl_kernel", "triton", "orjson", "msgspec")

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        package, _, below = name.partition(".")
        if package not in self.absent or self._is_real(below):
            return None
        if package != "sglang" and importlib.machinery.PathFinder.find_spec(package):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    @staticmethod
    def _is_real(below: str) -> bool:
        return any(below == one or below.startswith(f"{one}.") for one in REAL)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def load() -> SimpleNamespace:
    """Return SGLang's modules `storage` and `controller`, and its classes."""
    found = importlib.machinery.PathFinder.find_spec("sglang")
    assert found is not None, "sglang is not installed"
    assert found.origin is not None
    root = Path(found.origin).parent
    for package in PACKAGES:
        module = _StandIn(".".join(filter(None, ("sglang", package))))
        module.__path__ = [str(root.joinpath(*filter(None, package.split("."))))]
        sys.modules[module.__name__] = module
    sys.meta_path.insert(0, _Finder())
    get = importlib.import_module
    sys.modules["sglang.srt.mem_cache.storage"].StorageBackendFactory = (  # type: ignore[attr-defined]
        factory := get("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
    )
    controller = get("sglang.srt.managers.cache_controller")
    controller.get_storage_hash_str = page_hashes
    return SimpleNamespace(
        storage=get("sglang.srt.mem_cache.hicache_storage"),
        factory=factory,
        controller=controller,
        hybrid=get(
            "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
        ).HybridCacheController,
        mha=get("sglang.srt.mem_cache.pool_host.mha").MHATokenToKVPoolHost,
        mla=get("sglang.srt.mem_cache.pool_host.mla").MLATokenToKVPoolHost,
    )


def page_hashes(tokens: list[int], prior: str | None = None, page_size: int = 1) -> list[str]:
    """As sglang.srt.mem_cache.utils.get_hash_str, whose native part has to be compiled."""
    hashes: list[str] = []
    for start in range(0, len(tokens), page_size):
        digest = hashlib.sha256(bytes.fromhex(hashes[-1] if hashes else prior or ""))
        for token in tokens[start : start + page_size]:
            digest.update(token.to_bytes(4, "little"))
        hashes.append(digest.hexdigest())
    return hashes
