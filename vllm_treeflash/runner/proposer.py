"""The V1 drafter: vLLM's DFlash proposer, answering with trees instead of chains."""

from __future__ import annotations

import copy

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_treeflash.config import TreeFlashSpeculativeConfig
from vllm_treeflash.draft.model import TreeFlashDraftModel
from vllm_treeflash.draft.tables import (
    TransitionTables,
    ar_tables,
    follow_marginal_chain,
    marginal_tables,
)


class TreeFlashProposer(DFlashProposer):
    """Context K/V and block forward are vLLM's; tables and selection are TreeFlash's.

    To vLLM's code the block is what it is for DFlash: one bonus token and ``block_depth``
    mask tokens. How many *nodes* come out of it is a separate number.
    """

    model: TreeFlashDraftModel

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: object) -> None:
        config = vllm_config.speculative_config
        assert isinstance(config, TreeFlashSpeculativeConfig)
        # vLLM sizes buffers and query blocks by num_speculative_tokens.
        block_config = copy.copy(vllm_config)
        block_config.speculative_config = copy.copy(config)
        block_config.speculative_config.num_speculative_tokens = config.block_depth
        super().__init__(block_config, device, runner)
        self.treeflash_config = config
        self.block_depth = config.block_depth
        self.max_nodes = 1 + config.num_speculative_tokens
        # Positions the drafter may be asked for; both models' limits bound it.
        self.max_position = min(self.max_model_len, self.draft_model_config.max_model_len)
        if self.max_padded_query_tokens > self.max_num_tokens:
            # vLLM shares this buffer with max_num_batched_tokens; the block needs its own.
            self.input_ids = torch.zeros(
                self.max_padded_query_tokens, dtype=torch.int32, device=device
            )

    @property
    def has_ar_head(self) -> bool:
        return self.model.ar_approximation is not None

    def store_context(
        self,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        common_attn_metadata: CommonAttentionMetadata,
    ) -> CommonAttentionMetadata:
        """Write the drafter's K/V of this step's committed tokens; lay out the query block.

        Args:
            target_positions: int64 ``[committed]``.
            target_hidden_states: ``[committed, F * hidden_size]``, the target's auxiliary
                hidden states in path order.
            next_token_ids: int32 ``[B]``, the newest token of each request.
            common_attn_metadata: delimits the requests in the committed tokens; its
                ``seq_lens`` count committed tokens with K/V.

        Returns:
            Metadata of the query block.
        """
        # Tokens the drafter has no positions for get no K/V and no drafts.
        positions = target_positions.clamp(max=self.max_position - 1)
        features = self.model.combine_hidden_states(target_hidden_states)
        _, _, block_metadata = self.set_inputs_first_pass(
            target_token_ids=target_positions,  # only its length is read
            next_token_ids=next_token_ids,
            target_positions=positions,
            target_hidden_states=features,
            token_indices_to_sample=None,
            cad=common_attn_metadata,
            num_rejected_tokens_gpu=None,
        )
        num_context = target_positions.shape[0]
        context_slots = self._context_slot_mapping_buffer[:num_context]
        context_slots.masked_fill_(target_positions >= self.max_position, PADDING_SLOT_ID)
        self.model.precompute_and_store_context_kv(
            features, self._context_positions_buffer[:num_context], context_slots
        )
        # The block may stick out behind the last position: no slot there, no RoPE entry,
        # and no block table entry for the attention kernel to follow.
        num_queries = block_metadata.num_actual_tokens
        query_positions = self.positions[:num_queries]
        self._slot_mapping_buffer[:num_queries].masked_fill_(
            query_positions >= self.max_position, PADDING_SLOT_ID
        )
        query_positions.clamp_(max=self.max_position - 1)
        block_metadata.seq_lens = block_metadata.seq_lens.clamp(max=self.max_position)
        block_metadata.max_seq_len = min(block_metadata.max_seq_len, self.max_position)
        return block_metadata

    def draft_block(self, block_metadata: CommonAttentionMetadata) -> torch.Tensor:
        """One forward over all query blocks: ``[B, 1 + depth, hidden_size]``, not normed."""
        num_queries = block_metadata.num_actual_tokens
        _, per_layer_metadata = self.build_per_group_and_layer_attn_metadata(block_metadata)
        mode, num_input_tokens, num_tokens_across_dp = self._determine_batch_execution_and_padding(
            num_queries
        )
        with set_forward_context(
            per_layer_metadata,
            self.vllm_config,
            num_tokens=num_input_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(num_input_tokens, block_metadata.slot_mapping),
        ):
            hidden = self.model(
                input_ids=self.input_ids[:num_input_tokens],
                positions=self._get_positions(num_input_tokens),
                inputs_embeds=None,
            )
        return hidden[:num_queries].view(-1, 1 + self.block_depth, self.hidden_size)

    def build_tables(
        self, block_hidden: torch.Tensor, root_token_ids: torch.Tensor
    ) -> TransitionTables:
        """Transition tables of some requests.

        Args:
            block_hidden: ``[B, 1 + depth, hidden_size]`` from :meth:`draft_block`.
            root_token_ids: int ``[B]``.
        """
        config = self.treeflash_config
        hidden = block_hidden[:, 1:]
        chain = config.treeflash_mode == "chain"
        vocab_size = self.model.config.vocab_size
        top_m = 1 if chain else min(config.treeflash_top_m, vocab_size)
        top_k = 1 if chain else min(config.treeflash_top_k, vocab_size)
        temperature = config.treeflash_draft_temperature
        if not self.has_ar_head:
            flat = hidden.reshape(-1, self.hidden_size)
            return marginal_tables(
                self.model.normalize(flat).view(hidden.shape),
                self.model.compute_logits,
                vocab_size,
                top_k,
                temperature,
            )
        tables = ar_tables(
            hidden,
            root_token_ids,
            self.model.normalize,
            self.model.refine,
            self.model.compute_logits,
            vocab_size,
            top_m,
            top_k,
            temperature,
        )
        return follow_marginal_chain(tables) if chain else tables
