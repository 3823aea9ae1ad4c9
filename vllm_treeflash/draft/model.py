"""The drafter: vLLM's DFlash model plus the AR-approximation layer.

Differences from ``vllm.model_executor.models.qwen3_dflash``:

- the backbone returns its hidden states *before* the final norm, which the AR layer adds to;
- a SwiGLU layer conditioned on the previous token (``treeflash_config.ar_approximation``);
- the context keys of every draft layer are normed with that layer's own weight on CPU;
- both checkpoint layouts load: TreeFlash (``model.`` prefix) and plain DFlash (none).
"""

# No `from __future__ import annotations`: vLLM reads forward()'s annotations to find the
# dynamic dimensions for torch.compile.
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

#: Of the AR layer's own norm, whatever ``rms_norm_eps`` says (published checkpoints).
AR_NORM_EPS = 1e-6
_AR_PREFIX = "ar_approximation."


@support_torch_compile
class TreeFlashModel(DFlashQwen3Model):
    """DFlash backbone whose output is not yet normed."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        input_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Block forward: ``[tokens]`` ids and positions to ``[tokens, hidden_size]``."""
        if input_embeds is None:
            input_embeds = self.embed_input_ids(input_ids)
        hidden_states: torch.Tensor = input_embeds
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden_states, residual = layer(
                positions=positions, hidden_states=hidden_states, residual=residual
            )
        assert residual is not None
        return hidden_states + residual

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Each layer's ``k_norm``, ``[layers, tokens, kv_heads, head_size]`` to the same.

        vLLM calls one kernel with the stacked ``[layers, head_size]`` weights; its CPU
        kernel (0.32) reads only the first row and norms every layer with layer 0's weight.
        """
        if not current_platform.is_cpu():
            return super()._normalize_context_k(all_k)
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class ARApproximation(nn.Module):
    """SwiGLU repair of a slot's hidden state given the token before it (paper section 3)."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps=AR_NORM_EPS, dtype=dtype)
        self.ug = ReplicatedLinear(
            2 * hidden_size,
            2 * intermediate_size,
            bias=True,
            params_dtype=dtype,
            return_bias=False,
        )
        self.d = ReplicatedLinear(
            intermediate_size, hidden_size, bias=False, params_dtype=dtype, return_bias=False
        )

    def forward(self, normed_hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """What to add to the un-normed hidden state.

        Args:
            normed_hidden: ``[R, hidden_size]``, the slot's state after the final norm.
            embedding: ``[R, hidden_size]``, target embedding of the previous token.
        """
        x = torch.cat((self.norm(embedding), normed_hidden), dim=-1)
        up, gate = self.ug(x).chunk(2, dim=-1)
        return self.d(F.silu(gate) * up)


class TreeFlashDraftModel(DFlashQwen3ForCausalLM):
    """TreeFlash drafter; embedding and language-model head are the target's."""

    model_cls = TreeFlashModel
    # vLLM's proposer shares the target's modules when these stay false.
    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.ar_approximation: ARApproximation | None = None
        if (self.config.treeflash_config or {}).get("ar_approximation"):
            self.ar_approximation = ARApproximation(
                self.config.hidden_size,
                self.config.intermediate_size,
                vllm_config.model_config.dtype,
            )

    def refine(self, hidden: torch.Tensor, previous_token_ids: torch.Tensor) -> torch.Tensor:
        """AR-corrected state for the language-model head.

        Args:
            hidden: ``[R, hidden_size]``, block output before the final norm.
            previous_token_ids: int64 ``[R]``, the assumed token of the slot before.

        Returns:
            ``norm(hidden + AR(previous token, norm(hidden)))``, ``[R, hidden_size]``.
        """
        assert self.ar_approximation is not None
        embedding = self.embed_input_ids(previous_token_ids)
        return self.normalize(hidden + self.ar_approximation(self.normalize(hidden), embedding))

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """The backbone's final norm, ``[R, hidden_size]`` to the same."""
        # Out of place: vLLM's fused kernels may write to their input's storage.
        return self.model.norm(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load either layout; a missing, unknown or misshapen weight is an error.

        Raises:
            ValueError: naming the weights.
        """
        checkpoint = f"the draft checkpoint '{self.draft_model_config.model}'"
        # A quantised checkpoint has scales, packed names and shapes of its own.
        strict = self.model.quant_config is None
        backbone: list[tuple[str, torch.Tensor]] = []
        expected = self._expected_weights()
        seen = set()
        for name, weight in weights:
            name = name.removeprefix("model.")
            if name.startswith(("embed_tokens.", "lm_head.")):
                raise ValueError(
                    f"treeflash: {checkpoint} carries {name}; a TreeFlash or DFlash drafter "
                    "shares the target's embedding and lm_head and must not bring its own."
                )
            if strict and name not in expected:
                ar_head = (self.config.treeflash_config or {}).get("ar_approximation")
                raise ValueError(
                    f"treeflash: unexpected weight {name} in {checkpoint}; its config "
                    f"describes {self.config.num_hidden_layers} layers and "
                    f"ar_approximation={ar_head!r}."
                )
            if strict and tuple(weight.shape) != expected[name]:
                raise ValueError(
                    f"treeflash: {name} of {checkpoint} has shape {tuple(weight.shape)}; its "
                    f"config implies {expected[name]}."
                )
            seen.add(name)
            if name.startswith(_AR_PREFIX):
                parameter = self.get_parameter(name)
                default_weight_loader(parameter, weight)
            else:
                backbone.append((name, weight))
        if strict and (missing := sorted(expected.keys() - seen)):
            raise ValueError(
                f"treeflash: {checkpoint} does not match its config: it lacks "
                f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''} "
                f"({len(missing)} in all)."
            )
        super().load_weights(backbone)

    def _expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight that the config implies, by its DFlash name."""
        config, hidden = self.config, self.config.hidden_size
        head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
        query, key = config.num_attention_heads * head, config.num_key_value_heads * head
        inner = config.intermediate_size
        per_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if getattr(config, "attention_bias", False):
            for name, width in zip("qkvo", (query, key, key, hidden), strict=True):
                per_layer[f"self_attn.{name}_proj.bias"] = (width,)
        features = len(config.dflash_config["target_layer_ids"]) * hidden
        shapes = {"fc.weight": (hidden, features), "hidden_norm.weight": (hidden,)}
        shapes["norm.weight"] = (hidden,)
        for layer in range(config.num_hidden_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
        if self.ar_approximation is not None:
            for name, parameter in self.ar_approximation.named_parameters():
                shapes[_AR_PREFIX + name] = tuple(parameter.shape)
        return shapes
