"""Tree speculation on vLLM's V1 model runner (CPU).

One step, in the order the methods below are called by ``GPUModelRunner``:

1. ``_prepare_inputs``: look up each request's tree, lay the trees out, move RoPE positions
   from "row" to "depth" (slots are computed before and stay by row);
2. ``_build_attention_metadata``: hand the layout to the tree attention backend;
3. ``_sample``: samples at the nodes, the walk, compaction of the accepted K/V;
4. ``propose_draft_token_ids``: features of the committed rows in path order to the
   drafter, new trees out. vLLM gets the tokens, parents and depths stay here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_treeflash.attention.cpu import (
    TreeCPUAttentionMetadataBuilder,
    cache_views,
    require_maskable,
)
from vllm_treeflash.commit.features import committed_rows
from vllm_treeflash.commit.kv_cache import move_slots, moved_rows
from vllm_treeflash.config import TreeFlashSpeculativeConfig
from vllm_treeflash.draft.selection import select_tree
from vllm_treeflash.runner.eligibility import log_plain_decoding, path_dependent_option
from vllm_treeflash.runner.node_sampling import sample_nodes
from vllm_treeflash.runner.proposer import TreeFlashProposer
from vllm_treeflash.runner.timing import StepTimer
from vllm_treeflash.tree import DraftTree
from vllm_treeflash.verify.acceptance import PLACEHOLDER_TOKEN_ID, AcceptedPaths, accept
from vllm_treeflash.verify.layout import VerifyLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


class TreeFlashModelRunner(CPUModelRunner):
    """V1 CPU model runner that drafts, verifies and commits trees."""

    drafter: TreeFlashProposer

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        assert isinstance(self.speculative_config, TreeFlashSpeculativeConfig)
        self.timer = StepTimer()
        self.drafter = TreeFlashProposer(self.vllm_config, self.device, self)
        # The newest tree of each request, by request id.
        self._trees: dict[str, DraftTree] = {}
        # Why a request is not drafted for, by request id; None for those that are.
        self._plain_options: dict[str, str | None] = {}
        self._layout: VerifyLayout | None = None
        self._paths: AcceptedPaths | None = None
        self._held_generators: dict[int, torch.Generator] = {}
        custom = [
            type(p).__name__
            for p in self.input_batch.logitsprocs.all
            if type(p) not in BUILTIN_LOGITS_PROCESSORS
        ]
        #: A custom processor sees requests, not paths: with one loaded, nobody is drafted for.
        self._custom_processors = ", ".join(custom)

    # --- start-up -------------------------------------------------------------------------

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        draft_layers = self.drafter._draft_attn_layer_names
        #: Per KV cache group, the target's layers: (group index, block size, caches).
        self._target_caches: list[tuple[int, int, list[tuple[torch.Tensor, ...]]]] = []
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for gid, group in enumerate(kv_cache_config.kv_cache_groups):
            names = [name for name in group.layer_names if name not in draft_layers]
            for name in names:
                require_maskable(name, layers[name].impl)
            caches: list[tuple[torch.Tensor, ...]] = [
                cache_views(layers[name].kv_cache) for name in names
            ]
            if caches:
                self._target_caches.append((gid, caches[0][0].shape[-1], caches))

    # --- 1. layout and positions ----------------------------------------------------------

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._layout = self._lay_out_trees(scheduler_output)
        self._paths = None
        if self._layout is not None:
            self.positions[self._layout.rows] = self._layout.positions
        return prepared

    def _lay_out_trees(self, scheduler_output: SchedulerOutput) -> VerifyLayout | None:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if not drafts:
            return None
        requests = sorted(self.input_batch.req_id_to_index[req_id] for req_id in drafts)
        ends = self.query_start_loc.np
        trees, first_row, num_committed = [], [], []
        for index in requests:
            req_id = self.input_batch.req_ids[index]
            tokens = drafts[req_id]
            # The scheduler may have kept only the first nodes: a prefix is a valid tree.
            tree = self._trees[req_id].truncate(1 + len(tokens))
            if tree.draft_token_ids != list(tokens):
                raise RuntimeError(
                    f"treeflash: request {req_id} was scheduled with drafts {tokens}, which are "
                    f"not the first nodes of its tree {tree.draft_token_ids}"
                )
            trees.append(tree)
            first_row.append(int(ends[index + 1]) - len(tree))
            num_committed.append(int(self.seq_lens[index]) - len(tree))
        return VerifyLayout.build(trees, requests, first_row, num_committed, self.device)

    # --- 2. attention ---------------------------------------------------------------------

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        builders = [
            builder
            for groups in self.attn_groups
            for group in groups
            if isinstance(builder := group.get_metadata_builder(), TreeCPUAttentionMetadataBuilder)
        ]
        for builder in builders:
            builder.layout = self._layout
        try:
            return super()._build_attention_metadata(*args, **kwargs)
        finally:
            for builder in builders:
                builder.layout = None

    @torch.inference_mode()
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if self.timer.enabled and self._layout is not None:
            # From the target's forward to the end of execute_model: hidden states, logits.
            self.timer.seconds["verify"] += time.perf_counter() - self._forward_start
            self.timer.steps += 1
        return output

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._forward_start = time.perf_counter()
        return super()._model_forward(*args, **kwargs)

    # --- 3. sample, walk, compact ---------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        # A partial prefill is sampled and thrown away. vLLM then rewinds its generator with
        # set_offset, which CPU generators lack: do not let it advance in the first place.
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        self._held_generators = {i: generators.pop(i) for i in list(generators) if discarded[i]}
        layout = self._layout
        if layout is None:
            return super()._sample(logits, None)
        assert logits is not None and spec_decode_metadata is not None
        metadata = self.input_batch.sampling_metadata
        counts = torch.tensor(spec_decode_metadata.num_draft_tokens) + 1
        first_logit = torch.nn.functional.pad(counts.cumsum(0)[:-1], (1, 0))
        with self.timer.phase("sample"):
            sampled = sample_nodes(self.sampler, logits, layout, first_logit, metadata)
        with self.timer.phase("commit"):
            paths = self._paths = accept(layout, sampled.nodes)
            self._compact(layout, paths)

        width = paths.token_ids.shape[1]
        token_ids = torch.full(
            (self.input_batch.num_reqs, width), PLACEHOLDER_TOKEN_ID, dtype=torch.int32
        )
        if sampled.last is not None:
            token_ids[:, 0] = sampled.last
        token_ids[layout.request_index] = paths.token_ids.int()
        return SamplerOutput(token_ids, _one_row_per_column(sampled.logprobs, width))

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._bookkeeping_sync(*args, **kwargs)
        self.input_batch.generators.update(self._held_generators)
        return output

    def _compact(self, layout: VerifyLayout, paths: AcceptedPaths) -> None:
        source, destination = moved_rows(layout, paths)
        for gid, block_size, caches in self._target_caches:
            slots = self.input_batch.block_table[gid].slot_mapping.gpu
            move_slots(caches, slots[source], slots[destination], block_size)

    # --- 4. draft -------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        """Always: the context K/V of every step is written, limits are per request."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: torch.Tensor | list[list[int]],
        sampling_metadata: SamplingMetadata,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
        common_attn_metadata: CommonAttentionMetadata,
        slot_mappings: Any,
    ) -> list[list[int]]:
        assert isinstance(sampled_token_ids, torch.Tensor) and aux_hidden_states is not None
        drafter = self.drafter
        next_token_ids, _ = drafter.prepare_next_token_ids_padded(
            sampled_token_ids, self.requests, self.input_batch, self.discard_request_mask.gpu
        )
        with self.timer.phase("commit"):
            rows, starts = committed_rows(
                common_attn_metadata.query_start_loc, self._layout, self._paths
            )
            committed = _committed_metadata(common_attn_metadata, starts)
            features = torch.cat([h[rows] for h in aux_hidden_states], dim=-1)
        with self.timer.phase("draft"):
            block_metadata = drafter.store_context(
                target_positions=self.positions[rows],
                target_hidden_states=features,
                next_token_ids=next_token_ids,
                common_attn_metadata=committed,
            )
        num_requests = self.input_batch.num_reqs
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        num_nodes = 1 + scheduler_output.num_spec_tokens_to_schedule
        drafted = self._requests_to_draft_for(sampled_token_ids, committed.seq_lens)
        if not drafted or num_nodes < 2:
            return drafts
        with self.timer.phase("draft"):
            hidden = drafter.draft_block(block_metadata)[drafted]
        roots = next_token_ids[drafted]
        with self.timer.phase("tables"):
            tables = drafter.build_tables(hidden, roots)
        with self.timer.phase("select"):
            trees = select_tree(tables, num_nodes, roots).to_host()
        for index, tree in zip(drafted, trees):
            self._trees[self.input_batch.req_ids[index]] = tree
            drafts[index] = tree.draft_token_ids
        return drafts

    def _requests_to_draft_for(
        self, sampled_token_ids: torch.Tensor, seq_lens: torch.Tensor
    ) -> list[int]:
        """Batch indices of the requests that the next step can verify a tree for."""
        sampled = (sampled_token_ids != PLACEHOLDER_TOKEN_ID).sum(dim=1).tolist()
        drafted = []
        for index, end in enumerate(seq_lens.tolist()):
            request = self.requests[self.input_batch.req_ids[index]]
            params = request.sampling_params
            if self.discard_request_mask.np[index] or params is None:
                continue  # still prefilling
            if end + 1 + self.drafter.block_depth > self.drafter.max_position:
                continue
            num_output_tokens = len(request.output_token_ids) + sampled[index]
            if params.max_tokens is not None and num_output_tokens + 1 >= params.max_tokens:
                continue  # one more token at most: nothing to speculate on
            if params.min_tokens > num_output_tokens:
                log_plain_decoding("min_tokens")
                continue
            if request.req_id not in self._plain_options:
                option = self._custom_processors or path_dependent_option(params)
                self._plain_options[request.req_id] = option
                if option:
                    log_plain_decoding(option)
            if not self._plain_options[request.req_id]:
                drafted.append(index)
        return drafted

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for req_id in scheduler_output.finished_req_ids:
            self._trees.pop(req_id, None)
            self._plain_options.pop(req_id, None)
        return super()._update_states(scheduler_output)


def _one_row_per_column(logprobs: LogprobsTensors | None, width: int) -> LogprobsTensors | None:
    """Repeat per-request logprobs to the ``[B * width]`` rows that vLLM filters by token.

    Only requests without drafts ask for logprobs, and their token stands in column 0.
    """
    if logprobs is None or width == 1:
        return logprobs
    return LogprobsTensors(
        *(
            getattr(logprobs, name).repeat_interleave(width, dim=0)
            for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
        )
    )


def _committed_metadata(
    metadata: CommonAttentionMetadata, starts: torch.Tensor
) -> CommonAttentionMetadata:
    """The step's metadata without the rejected rows.

    Args:
        metadata: of the verified step, ``seq_lens`` including all tree rows.
        starts: int64 ``[B + 1]``, the committed rows of each request.
    """
    lengths = starts[1:] - starts[:-1]
    scheduled = metadata.query_start_loc[1:] - metadata.query_start_loc[:-1]
    seq_lens = metadata.seq_lens - (scheduled - lengths).int()
    num_committed = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.int(),
        query_start_loc_cpu=starts.int().cpu(),
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens.cpu(),
        num_reqs=metadata.num_reqs,
        num_actual_tokens=num_committed,
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=metadata.block_table_tensor,
        slot_mapping=metadata.slot_mapping[:num_committed],
        causal=True,
    )
