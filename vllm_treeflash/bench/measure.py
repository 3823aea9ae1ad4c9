"""From records of requests and steps to the benchmark's figures. Pure functions.

Units: seconds, tokens, tokens per second; shares are fractions of a step's time.

- **Block efficiency** (tau): tokens committed per target forward that verified drafts,
  ``1 + accepted / drafts``, the mean acceptance length of vLLM's metrics and log line. A last
  step counts what it verified, also when ``max_tokens`` cut it short.
- **Decode** figures leave prefill out for every configuration alike: the step in which all
  prompts of a batch are computed (they are queued together, so there is one) is not a decode
  step, and the first token of each request, which it yields, not a decoded token.
- **t_v**, **t_d**: seconds per decode step in the target's forward (hidden states and logits of
  all nodes) and in the drafter (context K/V, block forward, transition tables). **t1** is the
  whole decode step of plain vLLM at the same batch size.
- **Bound**: decode tokens/s if a step took only ``t_v + t_d``, so tokens per step divided by
  ``t_v + t_d``. Tokens per step are those the user got, over the requests of a step; tokens cut
  off at ``max_tokens`` count neither in the bound nor in the speed.
- **Overhead**: the share of a decode step outside ``t_v + t_d``: sampling, walk, commit,
  selection, and what plain vLLM does in a step too (scheduler, input preparation, messages
  between processes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

VERIFY_PHASES = ("verify",)
DRAFT_PHASES = ("draft", "tables")
#: Order in which shares are shown; "other" is what no phase covers.
SHARES = ("verify", "draft", "tables", "select", "sample", "commit", "other")


@dataclass(frozen=True)
class Step:
    """One step of an engine, from its start to the start of the next."""

    seconds: float
    requests: int
    """How many requests took part."""
    prefill: bool
    """Whether it computed prompt tokens of any request."""
    phases: dict[str, float]
    """Seconds by phase."""


@dataclass(frozen=True)
class Request:
    """One finished request."""

    prompt_set: str
    prompt: int
    """Index within the set."""
    token_ids: list[int]
    finish_reason: str | None
    accepted: list[int]
    """Accepted drafts of each step that verified drafts."""
    drafted: int
    """Draft tokens verified in all."""


@dataclass(frozen=True)
class Batch:
    """Requests that ran together on one engine."""

    configuration: str
    batch_size: int
    repeat: int
    group: int
    """Configurations of a group took turns, batch by batch."""
    seconds: float
    """From the release of the queued requests to the last output, prefill included."""
    requests: list[Request]
    steps: list[Step]

    @property
    def decode_steps(self) -> list[Step]:
        return [step for step in self.steps if not step.prefill]


def block_efficiency(requests: Iterable[Request]) -> float | None:
    """Tokens committed per verifying forward, ``None`` without any."""
    lengths = [1 + accepted for request in requests for accepted in request.accepted]
    return sum(lengths) / len(lengths) if lengths else None


def block_efficiency_by_set(batches: Sequence[Batch]) -> dict[str, float | None]:
    """Of each prompt set, in order of appearance."""
    requests = [request for batch in batches for request in batch.requests]
    sets = dict.fromkeys(request.prompt_set for request in requests)
    return {name: block_efficiency(r for r in requests if r.prompt_set == name) for name in sets}


def accepted_per_depth(requests: Iterable[Request]) -> list[float]:
    """Share of verifying steps whose accepted path reaches depth 1, 2, …

    vLLM's ``spec_decode_num_accepted_tokens_per_pos`` over ``num_drafts``.
    """
    steps = [accepted for request in requests for accepted in request.accepted]
    return [
        sum(accepted >= depth for accepted in steps) / len(steps)
        for depth in range(1, max(steps, default=0) + 1)
    ]


def tokens_per_forward(batches: Iterable[Batch]) -> float | None:
    """Decoded tokens the user got, per request and decode step; 1 for plain vLLM."""
    tokens = forwards = 0
    for batch in batches:
        tokens += _decoded_tokens(batch)
        forwards += sum(step.requests for step in batch.decode_steps)
    return tokens / forwards if forwards else None


def _decoded_tokens(batch: Batch) -> int:
    """All but the first token of each request, which the prefill step yields."""
    return sum(max(len(request.token_ids) - 1, 0) for request in batch.requests)


@dataclass(frozen=True)
class Figures:
    """What a configuration reached at one batch size. See the module for the terms."""

    block_efficiency: float | None
    block_efficiency_by_set: dict[str, float | None]
    tokens_per_forward: float | None
    accepted_per_depth: list[float]
    tokens_per_second: float
    """Output tokens over wall time, prefill included."""
    decode_tokens_per_second: float | None
    ratio_to_plain: float | None
    """Of ``tokens_per_second``."""
    decode_ratio_to_plain: float | None
    step_seconds: float | None
    """Mean decode step; t1 for plain vLLM."""
    verify_seconds: float | None
    draft_seconds: float | None
    """``None`` where the drafter is not ours to time (vLLM's own methods)."""
    bound_tokens_per_second: float | None
    share_of_bound: float | None
    overhead_share: float | None
    shares: dict[str, float]
    """By phase, of the decode steps' time; sums to 1."""
    output_tokens: int
    decode_steps: int
    prefill_steps: int
    batches: int
    different_from_plain: int | None
    """Requests whose tokens differ from plain vLLM's; ``None`` if not compared."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    batches: Sequence[Batch], plain: Sequence[Batch] | None, *, compare_tokens: bool
) -> Figures:
    """Figures of one configuration at one batch size.

    Args:
        batches: its batches, at least one.
        plain: plain vLLM's batches of the same requests in the same groups, if it ran.
        compare_tokens: whether equal tokens are to be expected (greedy decoding).
    """
    requests = [request for batch in batches for request in batch.requests]
    steps = [step for batch in batches for step in batch.decode_steps]
    phases = {
        name: sum(step.phases[name] for step in steps)
        for name in SHARES
        if steps and name in steps[0].phases
    }
    total = sum(step.seconds for step in steps)
    per_second = tokens_per_second(batches)
    decode_per_second = decode_tokens_per_second(batches)

    verify = draft = bound = None
    if steps:
        verify = sum(phases[name] for name in VERIFY_PHASES) / len(steps)
    if steps and all(name in phases for name in DRAFT_PHASES):
        draft = sum(phases[name] for name in DRAFT_PHASES) / len(steps)
    if verify is not None and draft is not None:
        tokens_per_step = sum(_decoded_tokens(batch) for batch in batches) / len(steps)
        bound = tokens_per_step / (verify + draft)

    def of_bound() -> float | None:
        return decode_per_second / bound if decode_per_second and bound else None

    return Figures(
        block_efficiency=block_efficiency(requests),
        block_efficiency_by_set=block_efficiency_by_set(batches),
        tokens_per_forward=tokens_per_forward(batches),
        accepted_per_depth=accepted_per_depth(requests),
        tokens_per_second=per_second,
        decode_tokens_per_second=decode_per_second,
        ratio_to_plain=_ratio(per_second, tokens_per_second(plain) if plain else None),
        decode_ratio_to_plain=_ratio(
            decode_per_second, decode_tokens_per_second(plain) if plain else None
        ),
        step_seconds=total / len(steps) if steps else None,
        verify_seconds=verify,
        draft_seconds=draft,
        bound_tokens_per_second=bound,
        share_of_bound=of_bound(),
        overhead_share=None if (share := of_bound()) is None else 1 - share,
        shares=_shares(phases, total),
        output_tokens=sum(len(request.token_ids) for request in requests),
        decode_steps=len(steps),
        prefill_steps=sum(len(batch.steps) - len(batch.decode_steps) for batch in batches),
        batches=len(batches),
        different_from_plain=(
            _count_different(batches, plain) if plain and compare_tokens else None
        ),
    )


def tokens_per_second(batches: Sequence[Batch]) -> float:
    """Output tokens over wall time, prefill included."""
    tokens = sum(len(request.token_ids) for batch in batches for request in batch.requests)
    return tokens / sum(batch.seconds for batch in batches)


def decode_tokens_per_second(batches: Sequence[Batch]) -> float | None:
    """Decoded tokens over the time of the decode steps."""
    seconds = sum(step.seconds for batch in batches for step in batch.decode_steps)
    return sum(_decoded_tokens(batch) for batch in batches) / seconds if seconds else None


def _shares(phases: dict[str, float], total: float) -> dict[str, float]:
    if not total:
        return {}
    shares = {name: seconds / total for name, seconds in phases.items()}
    return shares | {"other": 1 - sum(shares.values())}


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _count_different(batches: Sequence[Batch], plain: Sequence[Batch]) -> int:
    """Requests whose tokens are not those of plain vLLM for the same prompt in the same round."""

    def by_prompt(batches: Sequence[Batch]) -> dict[tuple[str, int, int, int], list[int]]:
        return {
            (request.prompt_set, request.prompt, batch.repeat, batch.group): request.token_ids
            for batch in batches
            for request in batch.requests
        }

    expected = by_prompt(plain)
    return sum(tokens != expected[key] for key, tokens in by_prompt(batches).items())
