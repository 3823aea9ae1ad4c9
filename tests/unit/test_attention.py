"""Tree attention on vLLM's CPU cache, through vLLM's own layer, builder and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from tests.engines import TARGET
from tests.unit.trees import ancestors_of, random_tree
from vllm_treeflash.attention.cpu import TreeCPUAttentionBackend, cache_views
from vllm_treeflash.attention.reference import dense_attention, tree_mask
from vllm_treeflash.commit.kv_cache import move_slots, moved_rows
from vllm_treeflash.tree import DraftTree
from vllm_treeflash.verify.acceptance import accept
from vllm_treeflash.verify.layout import VerifyLayout

CPU = torch.device("cpu")
BLOCK_SIZE = 32
HEAD_SIZE = 64
SCALE = HEAD_SIZE**-0.5
LAYER = "layers.0.attn"
#: Against float64 on the same inputs, outputs of about unit size. float32: sums of a few
#: hundred products, and the kernel's polynomial exp (seen: 1.3e-6). bf16: the output and the
#: probabilities are rounded to 8 bits, 2**-8 each of values up to 4 (seen: 1.55e-2).
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


@dataclass
class Request:
    """One request of a step: what its cache holds, and what it asks for now."""

    num_committed: int
    #: The draft tree, or ``None`` for ``num_rows`` ordinary tokens.
    tree: DraftTree | None = None
    num_rows: int = 0

    def __post_init__(self) -> None:
        if self.tree is not None:
            self.num_rows = len(self.tree)

    @property
    def length(self) -> int:
        return self.num_committed + self.num_rows

    def sees(self, row: int, window: int | None) -> list[int]:
        """The cached tokens (by slot order) that one row may attend to, by the definition."""
        n = self.num_committed
        if self.tree is None:
            position, own = n + row, [(n + r, n + r) for r in range(row + 1)]
        else:
            depths = self.tree.depths
            position = n + int(depths[row])
            ancestors = ancestors_of(self.tree.parents.tolist(), row)
            own = [(n + node, n + int(depths[node])) for node in ancestors]
        keys = [(j, j) for j in range(n)] + own
        return [
            index
            for index, key_position in keys
            if window is None or position - key_position < window
        ]


class Step:
    """A step of several requests over one layer with a scattered paged cache."""

    def __init__(
        self,
        requests: Sequence[Request],
        backend: Any = TreeCPUAttentionBackend,
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        kv_heads: int = 2,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.requests, self.window = list(requests), window
        self.config = _vllm_config(str(dtype).removeprefix("torch."))
        self.config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(self.config):
            self.layer = Attention(
                heads,
                HEAD_SIZE,
                SCALE,
                kv_heads,
                cache_config=self.config.cache_config,
                per_layer_sliding_window=window,
                prefix=LAYER,
                attn_backend=backend,
            )
            spec = self.layer.get_kv_cache_spec(self.config)
            self.builder = backend.get_builder_cls()(spec, [LAYER], self.config, CPU)

        counts = [-(-request.length // BLOCK_SIZE) for request in self.requests]
        # Block 0 is vLLM's null block; the others are handed out in random order.
        pool = 1 + torch.randperm(sum(counts), generator=generator)
        self.block_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        taken = 0
        for i, count in enumerate(counts):
            self.block_table[i, :count] = pool[taken : taken + count]
            taken += count
        # Whatever is not written by a request is garbage that nobody may read.
        self.cache = torch.full((taken + 1, kv_heads, BLOCK_SIZE, 2 * HEAD_SIZE), 1e3, dtype=dtype)
        self.query = randn(sum(r.num_rows for r in self.requests), heads, HEAD_SIZE)
        self.keys = [randn(r.length, kv_heads, HEAD_SIZE) for r in self.requests]
        self.values = [randn(r.length, kv_heads, HEAD_SIZE) for r in self.requests]
        for i, request in enumerate(self.requests):
            n = request.num_committed
            self.write(self.keys[i][:n], self.values[i][:n], self.slots(i)[:n])

    def slots(self, index: int) -> torch.Tensor:
        """Slot of every token of a request, in the order of its positions."""
        position = torch.arange(self.requests[index].length)
        blocks = self.block_table[index].long()[position // BLOCK_SIZE]
        return blocks * BLOCK_SIZE + position % BLOCK_SIZE

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        self.layer.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    @property
    def starts(self) -> list[int]:
        return np.cumsum([0] + [r.num_rows for r in self.requests]).tolist()

    def new(self, per_request: list[torch.Tensor]) -> torch.Tensor:
        """The part of per-request tensors that this step computes, as one batch."""
        return torch.cat(
            [x[r.num_committed :] for x, r in zip(per_request, self.requests, strict=True)]
        )

    def layout(self) -> VerifyLayout | None:
        trees = [(i, r.tree) for i, r in enumerate(self.requests) if r.tree is not None]
        if not trees:
            return None
        return VerifyLayout.build(
            [tree for _, tree in trees],
            [i for i, _ in trees],
            [self.starts[i] for i, _ in trees],
            [self.requests[i].num_committed for i, _ in trees],
            CPU,
        )

    def run(self) -> torch.Tensor:
        """``[rows, heads, head_size]`` from the implementation under test."""
        starts = torch.tensor(self.starts, dtype=torch.int32)
        seq_lens = torch.tensor([r.length for r in self.requests], dtype=torch.int32)
        slot_mapping = self.new([self.slots(i) for i in range(len(self.requests))])
        metadata = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(self.requests),
            num_actual_tokens=self.starts[-1],
            max_query_len=max(r.num_rows for r in self.requests),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.block_table,
            slot_mapping=slot_mapping,
            causal=True,
        )
        self.builder.layout = self.layout()
        built = self.builder.build(0, metadata)
        key, value = self.new(self.keys), self.new(self.values)
        self.write(key, value, slot_mapping)
        output = torch.zeros_like(self.query)
        self.layer.impl.forward(
            self.layer, self.query, key, value, self.cache, built, output=output
        )
        return output

    def oracle(self) -> torch.Tensor:
        """The same in float64, row by row, from the contiguous keys and values."""
        group = self.query.shape[1] // self.keys[0].shape[1]
        rows = []
        for i, request in enumerate(self.requests):
            key = self.keys[i].double().repeat_interleave(group, dim=1)
            value = self.values[i].double().repeat_interleave(group, dim=1)
            for row in range(request.num_rows):
                seen = request.sees(row, self.window)
                query = self.query[self.starts[i] + row].double()
                scores = torch.einsum("hd,lhd->hl", query, key[seen]) * SCALE
                rows.append(torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), value[seen]))
        return torch.stack(rows)


_CONFIGS: dict[str, VllmConfig] = {}


def _vllm_config(dtype: str) -> VllmConfig:
    if dtype not in _CONFIGS:
        _CONFIGS[dtype] = EngineArgs(
            model=TARGET,
            dtype=dtype,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            skip_tokenizer_init=True,
            enforce_eager=True,
        ).create_engine_config()
    return _CONFIGS[dtype]


def mixed_batch(seed: int) -> list[Request]:
    """Prefills, chunks, decodes and trees; contexts end on, before and after a block."""
    rng = np.random.default_rng(seed)
    requests = [
        Request(0, num_rows=33),  # a whole prompt
        Request(40, num_rows=70),  # a chunk of one
        Request(63, num_rows=1),  # plain decodes
        Request(64, num_rows=1),
        Request(0, random_tree(rng, 9)),
        Request(31, random_tree(rng, 1)),
        Request(31, random_tree(rng, 2)),
        Request(32, random_tree(rng, 17)),
        Request(95, random_tree(rng, 64)),
        Request(127, random_tree(rng, 128, vocab=400)),
    ]
    rng.shuffle(requests)  # type: ignore[arg-type]
    return requests


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(output).all()
    difference = (output.double() - expected).abs().max().item()
    assert difference <= TOLERANCE[output.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 4, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3)])
def test_mixed_batch_equals_the_dense_oracle(
    dtype: torch.dtype, window: int | None, heads: int, kv_heads: int
) -> None:
    step = Step(mixed_batch(heads), dtype=dtype, heads=heads, kv_heads=kv_heads, window=window)
    assert_close(step.run(), step.oracle())


@pytest.mark.parametrize("num_committed", [0, 1, 30, 31, 32, 33, 63, 64, 100])
def test_a_tree_across_block_boundaries(num_committed: int) -> None:
    rng = np.random.default_rng(num_committed)
    step = Step([Request(num_committed, random_tree(rng, 40))], seed=num_committed)
    assert_close(step.run(), step.oracle())


def test_trees_only() -> None:
    rng = np.random.default_rng(5)
    step = Step([Request(20 * i, random_tree(rng, 1 + 7 * i)) for i in range(5)])
    assert_close(step.run(), step.oracle())


@pytest.mark.parametrize("window", [None, 48])
def test_a_batch_without_trees_is_stock_vllm(window: int | None) -> None:
    requests = [r for r in mixed_batch(1) if r.tree is None]
    ours = Step(requests, window=window).run()
    stock = Step(requests, window=window, backend=CPUAttentionBackend).run()
    assert ours.equal(stock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_is_stock_vllm(dtype: torch.dtype) -> None:
    """A tree without branches is an ordinary run of tokens; stock kernels agree."""
    chain = DraftTree(np.arange(20), np.arange(-1, 19), np.arange(20))
    ours = Step([Request(50, chain), Request(9, num_rows=1)], dtype=dtype).run()
    stock = Step(
        [Request(50, num_rows=20), Request(9, num_rows=1)],
        dtype=dtype,
        backend=CPUAttentionBackend,
    ).run()
    assert_close(ours, stock.double())


def test_blocks_that_slid_out_of_the_window_are_not_read() -> None:
    """vLLM frees them for other requests and points the table at the null block."""
    window, rng = 40, np.random.default_rng(3)
    step = Step([Request(150, random_tree(rng, 30)), Request(80, num_rows=1)], window=window)
    for i, request in enumerate(step.requests):
        freed = max(0, request.num_committed - window + 1) // BLOCK_SIZE
        assert freed > 0
        step.cache[step.block_table[i, :freed].long()] = 1e3
        step.block_table[i, :freed] = 0
    assert_close(step.run(), step.oracle())


@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_reference_mask_and_attention(window: int | None) -> None:
    """The package's own dense reference, against the definition."""
    tree = random_tree(np.random.default_rng(8), 24)
    step = Step([Request(37, tree)], window=window)
    layout = step.layout()
    assert layout is not None
    mask = tree_mask(37, layout.depths[0], layout.ancestors[0], window)
    for row in range(24):
        assert mask[row].nonzero().squeeze(1).tolist() == sorted(step.requests[0].sees(row, window))
    dense = dense_attention(step.query.double(), step.keys[0], step.values[0], mask, SCALE)
    # Both in float64.
    assert torch.allclose(dense, step.oracle(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compaction_equals_writing_the_accepted_keys_again(dtype: torch.dtype) -> None:
    """Moving slots in the real cache gives what vLLM's own cache write would have given."""
    rng = np.random.default_rng(11)
    requests = [Request(n, random_tree(rng, 40, max_depth=7)) for n in (0, 29, 60, 95)]
    step = Step([Request(5, num_rows=3), *requests], dtype=dtype)
    step.run()
    layout = step.layout()
    assert layout is not None
    # The samples follow the path to the deepest node.
    sampled = torch.full_like(layout.tokens, 10**6)
    for t, request in enumerate(requests):
        assert request.tree is not None
        parents = request.tree.parents.tolist()
        for node in ancestors_of(parents, int(request.tree.depths.argmax()))[:-1]:
            sampled[t, parents[node]] = int(request.tree.tokens[node])
    paths = accept(layout, sampled)
    assert (paths.lengths > 4).all()

    moved = step.cache.clone()
    slots = step.new([step.slots(i) for i in range(len(step.requests))])
    source, destination = moved_rows(layout, paths)
    assert source.numel() > 8
    move_slots([cache_views(moved)], slots[source], slots[destination], BLOCK_SIZE)

    for t, request in enumerate(requests):
        n = request.num_committed
        path = paths.nodes[t, : int(paths.lengths[t])]
        accepted = n + torch.arange(len(path))
        step.write(
            step.keys[1 + t][n + path], step.values[1 + t][n + path], step.slots(1 + t)[accepted]
        )
    assert moved.equal(step.cache)
