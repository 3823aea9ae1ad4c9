"""Two-stage transition tables (TreeFlash, EMNLP Findings 2026, "Two-stage tree").

Stage 1 takes the top-``M`` tokens of every slot's marginal distribution: the possible
*previous* tokens of the next slot. Stage 2 asks the AR approximation for the top-``K``
continuations of every (slot, previous token) state. All states of a step are evaluated in
one batch; logits exist only in chunks of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Upper bound of the bytes of logits alive at once (float32 logits and the temporaries of
#: softmax and top-k), whatever the batch and the vocabulary.
MAX_LOGITS_BYTES = 64 * 1024 * 1024
# A chunk exists as model-dtype logits, as float32 logits and as log-probabilities.
_COPIES_OF_A_CHUNK = 3


@dataclass(frozen=True)
class TransitionTables:
    """What may follow what in the block.

    Attributes:
        tokens: int64 ``[B, depth, M, K]``; ``[b, d, m, k]`` is the k-th best token at depth
            ``d + 1`` given that the previous token is state ``m`` of depth ``d``.
        log_probs: float32, same shape; log-softmax of the logits over the draft temperature.
        next_state: int64, same shape; the state of the next depth this continuation leads
            to, ``-1`` for a leaf. Only state 0 of depth 0 (the root) is used.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    next_state: torch.Tensor


def topk_log_probs(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    k: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-``k`` log-probabilities of every row, with the logits in bounded memory.

    Args:
        hidden: ``[rows, hidden_size]``, ready for the language-model head.
        compute_logits: maps ``[r, hidden_size]`` to ``[r, vocab_size]``.
        vocab_size: columns of the logits, to size the chunks.
        k: continuations per row, at most ``vocab_size``.
        temperature: divides the logits before the softmax.

    Returns:
        ``(log_probs float32 [rows, k], tokens int64 [rows, k])``, best first.
    """
    rows = max(1, MAX_LOGITS_BYTES // (4 * vocab_size * _COPIES_OF_A_CHUNK))
    values, indices = [], []
    for chunk in hidden.split(rows):
        logits = compute_logits(chunk).float()
        if temperature != 1.0:
            logits = logits / temperature
        top, index = logits.log_softmax(dim=-1).topk(k, dim=-1)
        values.append(top)
        indices.append(index)
    return torch.cat(values), torch.cat(indices)


def marginal_tables(
    hidden: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    top_k: int,
    temperature: float,
) -> TransitionTables:
    """Tables of a drafter without an AR head: one state per slot (marginal tree).

    Args:
        hidden: ``[B, depth, hidden_size]``, normed block output of slots ``1 … depth``.
        compute_logits, vocab_size, temperature: see :func:`topk_log_probs`.
        top_k: continuations per slot.
    """
    batch, depth, width = hidden.shape
    log_probs, tokens = topk_log_probs(
        hidden.reshape(-1, width), compute_logits, vocab_size, top_k, temperature
    )
    shape = (batch, depth, 1, top_k)
    next_state = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    next_state[:, -1] = -1
    return TransitionTables(tokens.view(shape), log_probs.view(shape), next_state)


def ar_tables(
    hidden: torch.Tensor,
    root_token_ids: torch.Tensor,
    normalize: Callable[[torch.Tensor], torch.Tensor],
    refine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    top_m: int,
    top_k: int,
    temperature: float,
) -> TransitionTables:
    """Tables of a drafter with an AR head.

    Args:
        hidden: ``[B, depth, hidden_size]``, block output of slots ``1 … depth`` *before*
            the final norm.
        root_token_ids: int ``[B]``, the previous token of slot 1.
        normalize: the backbone's final norm.
        refine: maps ``(hidden [R, hidden_size], previous token [R])`` to what the
            language-model head reads for that state, ``[R, hidden_size]``.
        compute_logits, vocab_size, temperature: see :func:`topk_log_probs`.
        top_m: previous tokens (states) per slot.
        top_k: continuations per state.
    """
    batch, depth, width = hidden.shape
    device = hidden.device
    root = root_token_ids.to(torch.int64)
    # Stage 1: slot d's candidates are the states of slot d + 1.
    previous = torch.empty(batch, 0, top_m, dtype=torch.int64, device=device)
    if depth > 1:
        marginal = normalize(hidden[:, :-1].reshape(-1, width))
        _, candidates = topk_log_probs(marginal, compute_logits, vocab_size, top_m)
        previous = candidates.view(batch, depth - 1, top_m)

    # Stage 2: one row for slot 1 (its previous token is the root), M rows for the others.
    per_request = 1 + (depth - 1) * top_m
    slot_rows = torch.arange(1, depth, device=device).repeat_interleave(top_m)
    slots = torch.cat((slot_rows.new_zeros(1), slot_rows))
    states = hidden.index_select(1, slots).reshape(-1, width)
    previous_tokens = torch.cat((root.view(batch, 1), previous.flatten(1)), dim=1).flatten()
    log_probs, tokens = topk_log_probs(
        refine(states, previous_tokens), compute_logits, vocab_size, top_k, temperature
    )
    log_probs = log_probs.view(batch, per_request, top_k)
    tokens = tokens.view(batch, per_request, top_k)

    shape = (batch, depth, top_m, top_k)
    table_log_probs = log_probs.new_full(shape, float("-inf"))
    table_tokens = tokens.new_zeros(shape)
    table_log_probs[:, 0, 0], table_tokens[:, 0, 0] = log_probs[:, 0], tokens[:, 0]
    table_log_probs[:, 1:] = log_probs[:, 1:].view(batch, depth - 1, top_m, top_k)
    table_tokens[:, 1:] = tokens[:, 1:].view(batch, depth - 1, top_m, top_k)

    next_state = tokens.new_full(shape, -1)
    if depth > 1:
        # [B, depth-1, M, K, M]: does continuation k of state m lead to state j?
        leads_to = table_tokens[:, :-1].unsqueeze(4) == previous[:, :, None, None, :]
        found, state = leads_to.max(dim=-1)
        next_state[:, :-1] = state.where(found, -1)
    return TransitionTables(table_tokens, table_log_probs, next_state)


def follow_marginal_chain(tables: TransitionTables) -> TransitionTables:
    """Chain mode: the rank-0 continuation of state 0 at every slot, in a row.

    DFlash's single path, AR-corrected when the tables come from an AR head; as tables, so
    that chain and tree share selection, verification and commit.
    """
    next_state = torch.zeros_like(tables.next_state[:, :, :1, :1])
    next_state[:, -1] = -1
    return TransitionTables(tables.tokens[:, :, :1, :1], tables.log_probs[:, :, :1, :1], next_state)
