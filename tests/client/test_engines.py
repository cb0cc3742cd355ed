"""kvfs.connectors without the engine installed."""

import importlib
import sys

import pytest


def test_vllm_is_missing_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "kvfs.connectors.vllm", raising=False)
    with pytest.raises(ImportError, match=r"kvfs\.connectors\.vllm needs vLLM"):
        importlib.import_module("kvfs.connectors.vllm")


def test_configurations_may_use_the_former_name() -> None:
    found = importlib.import_module("kvfs.engines.scheduling")
    assert found.__file__ == importlib.import_module("kvfs.connectors.scheduling").__file__
