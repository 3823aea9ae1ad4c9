"""vLLM's scheduler with the settings in which a tree differs from a chain."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from vllm_treeflash.config import TreeFlashSpeculativeConfig
from vllm_treeflash.runner.selection import check_token_budget


class TreeFlashScheduler(Scheduler):
    """Schedules nodes as vLLM schedules draft tokens: it only ever counts them.

    Differences from ``Scheduler``:

    - KV slots are reserved for the drafter's block, not for as many tokens as nodes: a
      committed path is never longer than the tree is deep;
    - a request that has no tree yet is not padded to ``1 + num_speculative_tokens`` rows of
      placeholder tokens, which only a CUDA graph of uniform length profits from;
    - trees share the token budget of a step, so that many running requests all advance and
      prefills get their part. Trees are cut to their most likely nodes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative_config = self.vllm_config.speculative_config
        assert isinstance(speculative_config, TreeFlashSpeculativeConfig)
        check_token_budget(self.num_spec_tokens, self.scheduler_config.max_num_batched_tokens)
        # The query block is the bonus token and `block_depth` masks behind it.
        self.num_lookahead_tokens = 1 + speculative_config.block_depth
        if self.dynamic_sd_lookup is None:  # type: ignore[has-type]
            # A schedule that always says "all of them" turns the padding off.
            sizes = self.scheduler_config.max_num_seqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * sizes

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        nodes = self._nodes_per_request()
        for tokens in draft_token_ids.draft_token_ids:
            del tokens[nodes:]
        super().update_draft_token_ids(draft_token_ids)

    def _nodes_per_request(self) -> int:
        """Draft nodes that each running request may have in the next step."""
        rows = self.max_num_scheduled_tokens
        if self.waiting or any(request.is_prefill_chunk for request in self.running):
            rows //= 2  # a tree is an extra, a prompt is not
        return max(0, rows // max(1, len(self.running)) - 1)
