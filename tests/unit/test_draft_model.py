"""The drafter against plain torch, where vLLM's own CPU path is wrong or untested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vllm_treeflash.draft.model import TreeFlashModel


def test_every_draft_layer_norms_its_context_keys_with_its_own_weight() -> None:
    torch.manual_seed(0)
    layers, tokens, heads, size, eps = 3, 5, 2, 32, 1e-6
    keys = torch.randn(layers, tokens, heads, size)
    weights = torch.rand(layers, size) + 0.5  # unequal: a shared weight would show
    model: Any = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=eps)
    normed = TreeFlashModel._normalize_context_k(model, keys)
    inverse = keys.double().pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
    expected = keys.double() * inverse * weights.double()[:, None, None]
    # One float32 norm of 32 terms against float64.
    torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5)
