"""Tiny random targets of every supported family, with drafters that fit them.

A vocabulary of 24 tokens and trees of 16 continuations make even a random drafter guess
right now and then, so that verification, commit and compaction are exercised for real.
24 is no multiple of vLLM's vocabulary padding (64): padded rows exist in every model here.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 24
HIDDEN = 64
LAYERS = 5
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    # Large enough that greedy decoding does not fall into a loop at once.
    "initializer_range": 0.3,
}
_SLIDING = ["full_attention" if i % 2 else "sliding_attention" for i in range(LAYERS)]
TARGETS: dict[str, PretrainedConfig] = {
    "qwen3_tied": Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**{**_COMMON, "num_attention_heads": 2}, tie_word_embeddings=False),
    "llama_untied": LlamaConfig(**_COMMON, head_dim=32, tie_word_embeddings=False),
    "llama_sliding": LlamaConfig(
        **_COMMON,
        head_dim=32,
        tie_word_embeddings=True,
        sliding_window=24,
        layer_types=_SLIDING,
    ),
}


def make_target(name: str, folder: Path) -> str:
    """Write the target ``name`` with random weights; returns its path."""
    torch.manual_seed(sorted(TARGETS).index(name))
    path = folder / name
    model = AutoModelForCausalLM.from_config(TARGETS[name], dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        key: value
        for key in ("layer_types", "sliding_window")
        if (value := getattr(TARGETS[name], key, None)) is not None
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def make_drafter(folder: Path, ar_head: bool = True, block_size: int = 8) -> str:
    """Write a random drafter: TreeFlash layout with the AR head, plain DFlash without."""
    torch.manual_seed(100)
    layers, heads, kv_heads, head_dim, inner = 2, 4, 2, 32, 128
    layer_ids = [0, 2, 4]
    config = {
        "architectures": ["TreeFlashDraftModel" if ar_head else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": layer_ids},
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if ar_head:
        config["treeflash_config"] = {"ar_approximation": "swiglu", "candidate_tokens": 16}

    def linear(out: int, inp: int) -> torch.Tensor:
        return torch.randn(out, inp) / inp**0.5

    weights = {
        "fc.weight": linear(HIDDEN, HIDDEN * len(layer_ids)),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for i in range(layers):
        weights |= {
            f"layers.{i}.self_attn.q_proj.weight": linear(heads * head_dim, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": linear(kv_heads * head_dim, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": linear(kv_heads * head_dim, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": linear(HIDDEN, heads * head_dim),
            f"layers.{i}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"layers.{i}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"layers.{i}.mlp.gate_proj.weight": linear(inner, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": linear(inner, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": linear(HIDDEN, inner),
            f"layers.{i}.input_layernorm.weight": torch.ones(HIDDEN),
            f"layers.{i}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    if ar_head:
        weights = {f"model.{name}": weight for name, weight in weights.items()}
        weights |= {
            "ar_approximation.ug.weight": linear(2 * inner, 2 * HIDDEN),
            "ar_approximation.ug.bias": torch.randn(2 * inner) * 0.1,
            "ar_approximation.d.weight": linear(HIDDEN, inner),
            "ar_approximation.norm.weight": torch.ones(HIDDEN),
        }
    path = folder / f"drafter_{'treeflash' if ar_head else 'dflash'}_{block_size}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return str(path)
