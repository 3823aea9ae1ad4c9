"""Offline generation with a draft tree per step.

python examples/offline.py                      # SmolLM2-135M-Instruct and the shipped drafter
python examples/offline.py TARGET DRAFTER       # any supported pair, names or paths
"""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM, SamplingParams

from vllm_treeflash import smollm2

PROMPTS = [
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three uses of baking soda.",
]


def main() -> None:
    if len(sys.argv) == 3:
        target, drafter = sys.argv[1:]
    else:
        target, drafter = str(smollm2.target_path()), str(smollm2.drafter_path())
    llm = LLM(
        target,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,  # starts faster: nothing is compiled
        disable_log_stats=False,  # for get_metrics() below
        speculative_config={
            "method": "treeflash",
            "model": drafter,
            "num_speculative_tokens": 11,
        },
    )
    # One batch may mix greedy and random requests; each keeps its own distribution.
    params = [
        SamplingParams(temperature=0.0, max_tokens=64),
        SamplingParams(temperature=0.0, max_tokens=64),
        SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64),
    ]
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for output in llm.chat(messages, params):
        print(f"--- {output.outputs[0].finish_reason}\n{output.outputs[0].text.strip()}\n")

    counters = {m.name: m for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
    drafts = counters["vllm:spec_decode_num_drafts"].value
    accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    print(f"acceptance length: {1 + accepted / max(drafts, 1):.2f} over {drafts} trees")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
