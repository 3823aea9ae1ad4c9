"""The prompts of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_treeflash.smollm2 import eval_prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt: its set, its index in the set, its text."""

    prompt_set: str
    index: int
    text: str


def load_prompts(choice: Sequence[str], per_set: int) -> list[Prompt]:
    """The first prompts of each set.

    Args:
        choice: a JSON file ``{set: [text, …]}`` or names of shipped sets; empty for all
            shipped sets.
        per_set: how many of each.
    """
    if len(choice) == 1 and choice[0].endswith(".json"):
        sets = json.loads(Path(choice[0]).read_text())
        choice = []
    else:
        sets = eval_prompts()
    if unknown := [name for name in choice if name not in sets]:
        raise ValueError(
            f"unknown prompt set {', '.join(unknown)}; shipped are {', '.join(sets)}, "
            "or name a JSON file"
        )
    return [
        Prompt(name, index, text)
        for name in choice or sets
        for index, text in enumerate(sets[name][:per_set])
    ]


def tokenize(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Token ids, through the chat template where the tokenizer has one."""
    if not getattr(tokenizer, "chat_template", None):
        return [tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    # The template writes the special tokens itself.
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
