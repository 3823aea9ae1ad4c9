"""``vllm-treeflash demo``: the same prompts with plain vLLM and with TreeFlash.

Two real engines run one after the other, float32 and greedy, one prompt at a time. Greedy
decoding is deterministic, so the token ids of both must be the same; the demo checks that
and reports the acceptance length and the speed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from vllm_treeflash import smollm2

#: Data set and index of each prompt shown.
_PROMPTS = (("gsm8k", 0), ("gsm8k", 4), ("humaneval", 0), ("mbpp", 0), ("mtbench", 0))
_WARM_UP = "Count from one to ten."
_NUM_DRAFTS = "vllm:spec_decode_num_drafts"
_NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass
class Run:
    """What one engine did with the prompts.

    Attributes:
        texts: the answer to each prompt.
        token_ids: of each answer.
        seconds: wall time of all prompts together, warm-up excluded.
        acceptance_length: mean tokens committed per verified tree, the bonus token included;
            ``None`` without speculation.
    """

    texts: list[str]
    token_ids: list[list[int]]
    seconds: float
    acceptance_length: float | None

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time, prefill included."""
        return self.num_tokens / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=11,
        metavar="N",
        help="draft nodes per tree (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=96,
        metavar="N",
        help="longest answer in tokens (default: %(default)s)",
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own log")


def run(args: argparse.Namespace) -> int:
    """Run the demo; exit status 0 when both engines gave the same tokens."""
    _set_environment(args.verbose)
    target = str(smollm2.target_path())
    all_prompts = smollm2.eval_prompts()
    prompts = [all_prompts[name][index] for name, index in _PROMPTS]
    print(f"Target: {smollm2.TARGET_LABEL}, float32, greedy, one prompt at a time")
    print(f"Drafter: shipped, {args.num_speculative_tokens} draft nodes per tree")

    plain = _run_engine("plain vLLM", target, prompts, args.max_tokens, None)
    speculative_config = {
        "method": "treeflash",
        "model": str(smollm2.drafter_path()),
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    tree = _run_engine("TreeFlash", target, prompts, args.max_tokens, speculative_config)
    same = [ours == theirs for ours, theirs in zip(tree.token_ids, plain.token_ids)]
    _show_answers(prompts, plain, tree, same)
    _show_figures(plain, tree, same)
    return 0 if all(same) else 1


def _set_environment(verbose: bool) -> None:
    """What must be set before vLLM is imported; what the user has set stays."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The engine in this process: it starts in half the time.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    if not verbose:
        # What torch says on stderr, and vLLM before it has set up its log.
        logging.getLogger("vllm").setLevel(logging.ERROR)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        warnings.filterwarnings("ignore", category=FutureWarning)


def _run_engine(
    name: str,
    target: str,
    prompts: list[str],
    max_tokens: int,
    speculative_config: dict[str, Any] | None,
) -> Run:
    """Start an engine, answer the prompts one by one, and stop it."""
    _say(f"Starting {name} (up to a minute)")
    start = time.perf_counter()
    # Imported here: it takes many seconds, and the environment is set only now.
    from vllm import LLM, SamplingParams

    llm = LLM(
        target,
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=1,
        # Compiling the model for the CPU takes minutes the first time, more than it saves here.
        enforce_eager=True,
        # Counts the drafts; off by default in offline use.
        disable_log_stats=False,
        speculative_config=speculative_config,
    )
    try:
        _say(f"{name} is ready after {time.perf_counter() - start:.0f} s")
        _answer(llm, _WARM_UP, SamplingParams(temperature=0.0, max_tokens=16))
        before = _counters(llm)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        answers, seconds = [], 0.0
        for prompt in tqdm(prompts, desc=name, unit="prompt"):
            start = time.perf_counter()
            answers.append(_answer(llm, prompt, params))
            seconds += time.perf_counter() - start
        acceptance_length = _acceptance_length(before, _counters(llm))
    finally:
        # Also ends the engine's processes before the next engine measures anything.
        llm.llm_engine.engine_core.shutdown()
    return Run(
        [a.text for a in answers], [list(a.token_ids) for a in answers], seconds, acceptance_length
    )


def _answer(llm: Any, prompt: str, params: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0]


def _counters(llm: Any) -> tuple[int, int]:
    """Verified trees and accepted draft tokens so far, from vLLM's own metrics."""
    values = {metric.name: metric for metric in llm.get_metrics()}
    if _NUM_DRAFTS not in values:
        return 0, 0
    return values[_NUM_DRAFTS].value, values[_NUM_ACCEPTED].value


def _acceptance_length(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    drafts, accepted = after[0] - before[0], after[1] - before[1]
    return 1 + accepted / drafts if drafts else None


def _show_answers(prompts: list[str], plain: Run, tree: Run, same: list[bool]) -> None:
    for (name, _), prompt, ours, theirs, equal in zip(
        _PROMPTS, prompts, tree.texts, plain.texts, same
    ):
        question = textwrap.shorten(prompt, 150, placeholder=" ...")
        print(f"\n[{name}] {question}\n{textwrap.indent(ours.strip(), '  ')}")
        if equal:
            print("  -> tokens identical to plain vLLM")
        else:
            print(f"  -> tokens DIFFER; plain vLLM:\n{textwrap.indent(theirs.strip(), '  ')}")


def _show_figures(plain: Run, tree: Run, same: list[bool]) -> None:
    ratio = tree.tokens_per_second / plain.tokens_per_second
    print()
    print(f"{'':18}{'plain vLLM':>12}{'TreeFlash':>12}")
    print(f"{'output tokens':18}{plain.num_tokens:>12}{tree.num_tokens:>12}")
    print(f"{'tokens/s':18}{plain.tokens_per_second:>12.1f}{tree.tokens_per_second:>12.1f}")
    if tree.acceptance_length is not None:
        print(f"{'acceptance length':18}{1.0:>12.2f}{tree.acceptance_length:>12.2f}")
    print(f"tokens identical: {'yes' if all(same) else 'NO'} ({sum(same)} of {len(same)} answers)")
    print(f"speed ratio to plain vLLM: {ratio:.2f}x")
    if ratio < 1.0:
        print(
            "Below 1 here: on a CPU, verifying a tree of rows and drafting it cost more than the "
            "accepted tokens of this small, briefly trained drafter save."
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
