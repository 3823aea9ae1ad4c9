"""Transition tables against dense float64 softmaxes, and the memory they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from vllm_treeflash.draft import tables as tables_module
from vllm_treeflash.draft.tables import (
    MAX_LOGITS_BYTES,
    TransitionTables,
    ar_tables,
    follow_marginal_chain,
    marginal_tables,
    topk_log_probs,
)

HIDDEN, VOCAB, DEPTH = 16, 97, 6
#: float32 dot products of 16 terms and a logsumexp of 97, against float64.
TOLERANCE = 2e-5


class Drafter:
    """Random weights of the shapes the tables ask for, in float32 with a float64 twin."""

    def __init__(self, seed: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.head, self.embedding = randn(VOCAB, HIDDEN), randn(VOCAB, HIDDEN)
        self.mix = randn(HIDDEN, HIDDEN) / 4
        self.hidden = randn(batch, DEPTH, HIDDEN)
        self.roots = torch.randint(VOCAB, (batch,), generator=generator, dtype=torch.int32)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (HIDDEN,), eps=1e-6)

    def refine(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        embedding, mix = self.embedding.to(hidden.dtype), self.mix.to(hidden.dtype)
        return self.normalize(hidden + torch.tanh(embedding[previous] @ mix))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.to(hidden.dtype).T

    def tables(self, top_m: int, top_k: int, temperature: float) -> TransitionTables:
        return ar_tables(
            self.hidden,
            self.roots,
            self.normalize,
            self.refine,
            self.logits,
            VOCAB,
            top_m,
            top_k,
            temperature,
        )

    def dense(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-softmax over the vocabulary in float64."""
        return (self.logits(hidden.double()) / temperature).log_softmax(dim=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize(("top_m", "top_k"), [(1, 1), (4, 3), (16, 16), (5, VOCAB), (VOCAB, 4)])
def test_ar_tables(top_m: int, top_k: int, temperature: float) -> None:
    drafter = Drafter(seed=top_m, batch=3)
    tables = drafter.tables(top_m, top_k, temperature)
    assert tables.tokens.shape == (3, DEPTH, top_m, top_k)
    for b in range(3):
        # states[d]: the possible previous tokens of slot d + 1.
        states = [[int(drafter.roots[b])]]
        for d in range(DEPTH - 1):
            marginal = drafter.dense(drafter.normalize(drafter.hidden[b, d].double()), 1.0)
            states.append(marginal.topk(top_m).indices.tolist())
        for d in range(DEPTH):
            for m, previous in enumerate(states[d]):
                hidden = drafter.hidden[b, d].double()
                refined = drafter.refine(hidden[None], torch.tensor([previous]))
                log_probs = drafter.dense(refined[0], temperature)
                best = log_probs.topk(top_k)
                tokens = tables.tokens[b, d, m]
                assert tokens.equal(best.indices)
                assert torch.allclose(
                    tables.log_probs[b, d, m].double(), best.values, rtol=0, atol=TOLERANCE
                )
                following = states[d + 1] if d + 1 < DEPTH else []
                assert tables.next_state[b, d, m].tolist() == [
                    following.index(t) if t in following else -1 for t in tokens.tolist()
                ]
        # Slot 1 has one state, the root.
        assert (tables.log_probs[b, 0, 1:] == float("-inf")).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("top_k", [1, 8, VOCAB])
def test_marginal_tables(top_k: int, temperature: float) -> None:
    drafter = Drafter(seed=top_k, batch=2)
    normed = drafter.normalize(drafter.hidden)
    tables = marginal_tables(normed, drafter.logits, VOCAB, top_k, temperature)
    best = drafter.dense(normed, temperature).topk(top_k)
    assert tables.tokens.squeeze(2).equal(best.indices)
    assert torch.allclose(tables.log_probs.squeeze(2).double(), best.values, rtol=0, atol=TOLERANCE)
    assert (tables.next_state[:, :-1] == 0).all()
    assert (tables.next_state[:, -1] == -1).all()


def test_a_block_of_one_slot() -> None:
    """``block_size`` 2: the root's state alone, and only leaves."""
    drafter = Drafter(seed=1, batch=2)
    drafter.hidden = drafter.hidden[:, :1]
    tables = drafter.tables(4, 5, 1.0)
    refined = drafter.refine(drafter.hidden[:, 0], drafter.roots)
    assert tables.tokens[:, 0, 0].equal(drafter.dense(refined, 1.0).topk(5).indices)
    assert (tables.next_state == -1).all()


def test_chain_follows_the_marginal_top_1() -> None:
    """Chain mode: at every slot the best continuation of the marginal's best token."""
    drafter = Drafter(seed=3, batch=2)
    chain = follow_marginal_chain(drafter.tables(4, 4, 1.0))
    assert chain.tokens.shape == (2, DEPTH, 1, 1)
    for b in range(2):
        previous = int(drafter.roots[b])
        for d in range(DEPTH):
            hidden = drafter.hidden[b, d].double()
            refined = drafter.refine(hidden[None], torch.tensor([previous]))
            best = drafter.dense(refined[0], 1.0).max(dim=-1)
            assert int(chain.tokens[b, d]) == int(best.indices)
            assert float(chain.log_probs[b, d]) == pytest.approx(float(best.values), abs=TOLERANCE)
            assert int(chain.next_state[b, d]) == (0 if d + 1 < DEPTH else -1)
            previous = int(drafter.dense(drafter.normalize(hidden), 1.0).argmax())


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_chunks_do_not_change_the_tables(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(seed=4, batch=3)
    whole = drafter.tables(5, 6, 1.3)
    seen: list[int] = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ drafter.head.T

    monkeypatch.setattr(drafter, "logits", logits)
    copies = tables_module._COPIES_OF_A_CHUNK
    monkeypatch.setattr(tables_module, "MAX_LOGITS_BYTES", 4 * VOCAB * copies * rows)
    chunked = drafter.tables(5, 6, 1.3)
    assert max(seen) == rows
    assert sum(seen) == 3 * (DEPTH - 1) + 3 * (1 + (DEPTH - 1) * 5)
    assert chunked.tokens.equal(whole.tokens) and chunked.next_state.equal(whole.next_state)
    # A matrix product of fewer rows may add up in another order.
    assert torch.allclose(chunked.log_probs, whole.log_probs, rtol=0, atol=TOLERANCE)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes alive at once that ``work`` allocated, inside torch's operators too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    alive = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("batch", "dtype"), [(8, torch.float32), (2, torch.bfloat16)])
def test_memory_stays_within_64_mib(batch: int, dtype: torch.dtype) -> None:
    """V = 152k, M = 16, gamma = 15: all logits at once would be 130 MiB a request."""
    vocab, hidden, depth = 151_936, 8, 15
    head = torch.randn(vocab, hidden).to(dtype).T
    states = torch.randn(batch, depth, hidden).to(dtype)
    one_row = 4 * vocab
    peak = peak_bytes(
        lambda: ar_tables(
            states,
            torch.zeros(batch, dtype=torch.int64),
            normalize=lambda x: x,
            refine=lambda x, previous: x + previous.unsqueeze(1).to(dtype) / vocab,
            compute_logits=lambda x: x @ head,
            vocab_size=vocab,
            top_m=16,
            top_k=16,
            temperature=0.9,
        )
    )
    # The lower bound shows that the logits were seen at all.
    assert one_row < peak <= MAX_LOGITS_BYTES == 64 * 2**20


def test_top_k_of_the_whole_vocabulary_sums_to_one() -> None:
    drafter = Drafter(seed=5, batch=1)
    log_probs, _ = topk_log_probs(drafter.hidden[0], drafter.logits, VOCAB, VOCAB, 0.8)
    assert torch.allclose(log_probs.exp().sum(dim=1), torch.ones(DEPTH), atol=TOLERANCE)
