"""Tree attention for vLLM's CPU backend, registered over ``CPU_ATTN``.

Without trees in the batch this *is* ``CPU_ATTN``. With trees, requests that bring none
(prefill chunks, plain decodes) still go through vLLM's kernel as a sub-batch, and each tree
runs masked ``scaled_dot_product_attention`` over its gathered context and its own rows:
vLLM's kernel takes no mask. For 64 rows it is also the faster of the two.

Cache layout: per block and KV head the ``vec`` kernels keep the keys transposed
(``[head_size, block_size]``) followed by the values (``[block_size, head_size]``).
:func:`check_cache_layout` proves that on the installed build before anything relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_treeflash.attention.reference import tree_mask
from vllm_treeflash.config import TreeFlashSpeculativeConfig
from vllm_treeflash.verify.layout import VerifyLayout


def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a ``CPU_ATTN`` cache by meaning.

    Args:
        kv_cache: ``[blocks, kv_heads, block_size, 2 * head_size]``.

    Returns:
        ``(keys, values)``, both ``[blocks, kv_heads, head_size, block_size]`` with the
        offset in the block last. Writing to them writes to the cache.
    """
    blocks, heads, block_size, width = kv_cache.shape
    halves = kv_cache.view(blocks, heads, 2, block_size * width // 2)
    keys = halves[:, :, 0].view(blocks, heads, width // 2, block_size)
    values = halves[:, :, 1].view(blocks, heads, block_size, width // 2)
    return keys, values.transpose(2, 3)


def check_cache_layout(dtype: torch.dtype, block_size: int, head_size: int, isa: str) -> None:
    """Write a block through vLLM's kernel and read it back through :func:`cache_views`.

    Raises:
        NotImplementedError: the build lays its cache out differently, so that trees
            cannot be verified on this CPU.
    """
    heads = 2
    cache = torch.zeros(2, heads, block_size, 2 * head_size, dtype=dtype)
    key, value = torch.randn(2, block_size, heads, head_size).to(dtype)
    key_cache, value_cache = cache.view(2, heads, 2 * block_size, head_size).chunk(2, dim=2)
    slots = torch.arange(block_size, 2 * block_size)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    keys, values = cache_views(cache)
    written = (key.permute(1, 2, 0), value.permute(1, 2, 0))
    if not (torch.equal(keys[1], written[0]) and torch.equal(values[1], written[1])):
        raise NotImplementedError(
            f"treeflash: the CPU attention kernel '{isa}' (dtype={dtype}, "
            f"block_size={block_size}, head_size={head_size}) keeps its KV cache in a layout "
            "that tree attention cannot read. Use a block_size and head_size divisible by 32."
        )


@dataclass
class _TreeSpan:
    """One tree of the batch."""

    first_row: int
    num_rows: int
    num_committed: int
    blocks: torch.Tensor  # int64, block table of the request, trimmed to its length
    depths: torch.Tensor  # int64 [num_rows]
    ancestors: torch.Tensor  # bool [num_rows, num_rows]
    #: Additive masks by sliding window (-1: full attention), shared by a step's layers.
    bias: dict[int, torch.Tensor] = field(default_factory=dict)

    def attention_bias(self, window: int, dtype: torch.dtype) -> torch.Tensor:
        if window not in self.bias:
            allowed = tree_mask(
                self.num_committed, self.depths, self.ancestors, window if window > 0 else None
            )
            bias = torch.zeros(allowed.shape, dtype=dtype)
            self.bias[window] = bias.masked_fill_(~allowed, float("-inf"))
        return self.bias[window]


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    """``CPU_ATTN`` metadata of a step with trees.

    The inherited fields describe the whole batch; ``plain`` describes the sub-batch of the
    requests without drafts, whose rows are ``plain_rows``.
    """

    spans: list[_TreeSpan] = field(default_factory=list)
    plain: CPUAttentionMetadata | None = None
    plain_rows: torch.Tensor | None = None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata for whatever trees the runner has laid out for this step."""

    #: Set by the runner around the build of one step's metadata.
    layout: VerifyLayout | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.vllm_config.speculative_config, TreeFlashSpeculativeConfig):
            return  # another engine in this process: plain CPU_ATTN
        if self.isa == "amx":  # type: ignore[has-type]
            # AMX packs its keys in tiles; the vector kernels serve every x86 build.
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)
        check_cache_layout(self.dtype, self.block_size, self.head_dim, self.isa)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        layout = self.layout
        if layout is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        cm = common_attn_metadata
        metadata = TreeCPUAttentionMetadata(
            num_actual_tokens=cm.num_actual_tokens,
            max_query_len=cm.max_query_len,
            query_start_loc=cm.query_start_loc,
            max_seq_len=cm.max_seq_len,
            seq_lens=cm.seq_lens,
            block_table=cm.block_table_tensor,
            slot_mapping=cm.slot_mapping,
            scheduler_metadata=None,
            causal=True,
            spans=self._spans(layout, cm.block_table_tensor),
        )
        is_plain = torch.ones(cm.num_reqs, dtype=torch.bool)
        is_plain[layout.request_index] = False
        if is_plain.any():
            requests = is_plain.nonzero().squeeze(1)
            starts = cm.query_start_loc.long()
            lengths = (starts[1:] - starts[:-1])[requests]
            new_starts = F.pad(lengths.cumsum(0), (1, 0))
            rows = torch.arange(int(new_starts[-1]))
            rows += (starts[requests] - new_starts[:-1]).repeat_interleave(lengths)
            seq_lens = cm.seq_lens[requests]
            sub_batch = replace(
                cm,
                num_reqs=len(requests),
                num_actual_tokens=len(rows),
                max_query_len=int(lengths.max()),
                max_seq_len=int(seq_lens.max()),
                query_start_loc=new_starts.int(),
                query_start_loc_cpu=new_starts.int(),
                seq_lens=seq_lens,
                block_table_tensor=cm.block_table_tensor[requests],
                slot_mapping=cm.slot_mapping[rows],
            )
            metadata.plain = super().build(common_prefix_len, sub_batch, fast_build)
            metadata.plain_rows = rows
        return metadata

    def _spans(self, layout: VerifyLayout, block_table: torch.Tensor) -> list[_TreeSpan]:
        spans = []
        columns = zip(
            layout.request_index.tolist(),
            layout.first_row.tolist(),
            layout.num_rows.tolist(),
            layout.num_committed.tolist(),
        )
        for i, (request, first_row, num_rows, num_committed) in enumerate(columns):
            num_blocks = -(-(num_committed + num_rows) // self.block_size)
            spans.append(
                _TreeSpan(
                    first_row=first_row,
                    num_rows=num_rows,
                    num_committed=num_committed,
                    blocks=block_table[request, :num_blocks].long(),
                    depths=layout.depths[i, :num_rows],
                    ancestors=layout.ancestors[i, :num_rows, :num_rows],
                )
            )
        return spans


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """``CPU_ATTN`` plus masked attention for the rows that belong to trees."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, TreeCPUAttentionMetadata):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if attn_metadata.plain is not None:
            rows = attn_metadata.plain_rows
            plain_output = output[rows]
            super().forward(
                layer,
                query[rows],
                key[rows],
                value[rows],
                kv_cache,
                attn_metadata.plain,
                plain_output,
                output_scale,
                output_block_scale,
            )
            output[rows] = plain_output
        keys, values = cache_views(kv_cache)
        for span in attn_metadata.spans:
            tree = slice(span.first_row, span.first_row + span.num_rows)
            output[tree] = self._attend(query[tree], keys, values, span).view_as(output[tree])
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: _TreeSpan
    ) -> torch.Tensor:
        """Masked attention of one tree: ``[R, heads, head_size]`` in and out."""
        _, heads, head_size, block_size = keys.shape
        # Blocks that slid out of the window may have been freed: leave them alone.
        skip = 0
        if self.sliding_window > 0:
            skip = max(0, span.num_committed + 1 - self.sliding_window) // block_size
        blocks = span.blocks[skip:]
        length = span.num_committed + span.num_rows - skip * block_size

        def gather(cache: torch.Tensor) -> torch.Tensor:
            # [blocks, heads, head_size, block_size] -> [1, heads, length, head_size]
            tokens = cache[blocks].permute(1, 0, 3, 2)
            return tokens.reshape(1, heads, -1, head_size)[:, :, :length]

        bias = span.attention_bias(self.sliding_window, query.dtype)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            gather(keys),
            gather(values),
            attn_mask=bias[:, skip * block_size :],
            scale=self.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Keeps the name ``CPU_ATTN``: it is that backend wherever there is no tree."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder


def require_maskable(name: str, impl: object) -> None:
    """Refuse attention features that tree attention does not implement.

    Args:
        name: of the layer, for the message.
        impl: its attention implementation.

    Raises:
        NotImplementedError: naming the layer and the feature.
    """
    if not isinstance(impl, TreeCPUAttentionImpl):
        raise NotImplementedError(
            f"treeflash: layer {name} uses {type(impl).__name__}; tree attention on CPU "
            "needs the CPU_ATTN backend."
        )
    unsupported = {
        "ALiBi slopes": impl.alibi_slopes is not None,
        "attention sinks": impl.sinks is not None,
        f"a logits soft cap ({impl.logits_soft_cap})": bool(impl.logits_soft_cap),
        f"a quantised KV cache ({impl.kv_cache_dtype})": impl.is_fp8_kv_cache,
    }
    for feature, present in unsupported.items():
        if present:
            raise NotImplementedError(
                f"treeflash: layer {name} has {feature}, which tree attention does not support."
            )
