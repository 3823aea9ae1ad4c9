"""An unsupported vLLM is told so once and stays untouched."""

from __future__ import annotations

from typing import Any

import pytest
import vllm

from vllm_treeflash import compatibility, overrides, plugin


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def warning_once(message: str, *args: Any) -> None:
        said.append(message % args)

    monkeypatch.setattr(compatibility.logger, "warning_once", warning_once)
    return said


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_supported(version: str, warnings: list[str]) -> None:
    assert compatibility.vllm_is_supported(version)
    assert not warnings


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.3.2", "dev", ""])
def test_unsupported(version: str, warnings: list[str]) -> None:
    assert not compatibility.vllm_is_supported(version)
    (message,) = warnings
    assert f"this is {version}." in message
    assert "0.32 and 0.33" in message and "inactive" in message


def test_installed_vllm_is_supported() -> None:
    assert compatibility.vllm_is_supported()


def test_plugin_stays_inactive(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    from vllm.model_executor.models import ModelRegistry

    def touched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an unsupported vLLM was changed")

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(overrides, "apply", touched)
    monkeypatch.setattr(ModelRegistry, "register_model", touched)
    plugin.register()
    assert len(warnings) == 1 and "0.99.0" in warnings[0]
