"""Engines, each with its two ways to use a namespace: by files, and by kvfs's own connector.

Contract: pure; the module names connectors of `kvfs.profiles`, and describes each way in words. The
words hold for the versions that the connectors were checked against; docs/engines.md has the
reasons.
"""

from typing import NamedTuple

_NOTHING = "nothing of kvfs"
_LIBRARY = "kvfs's library (docs/engines.md)"
_CHAIN = "one call for any length"
_LEAVES = "the end of a prompt before its beginning"
_OTHERS = "other keys; a namespace with a fingerprint refuses them"


class Gives(NamedTuple):
    """The benefits of the two ways in one respect."""

    what: str
    files: str
    native: str


class Engine(NamedTuple):
    """An engine. `files` and `native` are connectors, or None with the reason in `lacks`.

    `others` are connectors for other uses of its files.
    """

    files: str | None
    native: str | None
    gives: tuple[Gives, ...]
    others: tuple[str, ...] = ()
    lacks: str = ""


def _native_only_for_libraries(engine: str) -> str:
    return (
        f"{engine} has no interface for native connectors; a program of your own can store tensors "
        "with kvfs.client"
    )


ENGINES = {
    "vllm": Engine(
        files="vllm-fs",
        native="vllm-native",
        others=("vllm-disk", "vllm-example", "vua-vllm"),
        gives=(
            Gives("Python environment", _NOTHING, _LIBRARY),
            Gives("found by", "every process of the same configuration", "every process"),
            Gives("longest prefix", "one call for each block", _CHAIN),
            Gives("dropped first", "any block, because names give no order", _LEAVES),
            Gives("copies of a load", "to host memory, to the device", "the same"),
            Gives("another model or dtype", "separate directories", _OTHERS),
        ),
    ),
    "lmcache": Engine(
        files="lmcache-fs",
        native="lmcache-native",
        others=("lmcache-local-disk", "lmcache-l2-fs", "lmcache-gds"),
        gives=(
            Gives("Python environment", _NOTHING, _LIBRARY),
            Gives("found by", "processes with the same PYTHONHASHSEED", "the same"),
            Gives("longest prefix", "a task and a stat for each chunk", "a stat for each chunk"),
            Gives(
                "dropped first",
                "any chunk, because names give no order",
                "any chunk, because LMCache does not give the order",
            ),
            Gives("copies of a load", "one, into LMCache's memory", "the same, on several threads"),
            Gives("copies of a save", "one, and 28 bytes before it", "one, in whole pages"),
            Gives("two writers of a chunk", "need publish=close", "have separate names"),
            Gives("another model or dtype", "other names", _OTHERS),
        ),
    ),
    "sglang": Engine(
        files="sglang-file",
        native="sglang-native",
        gives=(
            Gives("Python environment", _NOTHING, _LIBRARY),
            Gives("found by", "every process", "every process"),
            Gives("longest prefix", "a stat for each page", _CHAIN),
            Gives("dropped first", "any page, because names give no order", _LEAVES),
            Gives(
                "copies of a load",
                "two, through a page that SGLang zeroes first, one page after the other",
                "one, into SGLang's memory, on several threads",
            ),
            Gives("copies of a save", "two", "one"),
            Gives(
                "another dtype or memory layout",
                "wrong bytes: make a namespace for each",
                _OTHERS,
            ),
        ),
    ),
    "vua": Engine(
        files="vua",
        native=None,
        others=("vua-vllm",),
        gives=(),
        lacks=_native_only_for_libraries("VUA"),
    ),
    "llamacpp": Engine(
        files="llamacpp-slots",
        native=None,
        gives=(),
        lacks=_native_only_for_libraries("llama.cpp"),
    ),
    "transformers": Engine(
        files=None,
        native="transformers-native",
        gives=(),
        lacks="transformers keeps no cache in files",
    ),
}
