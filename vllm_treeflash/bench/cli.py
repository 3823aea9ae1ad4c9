"""``vllm-treeflash bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_treeflash.bench.configurations import (
    MODES,
    PLAIN,
    Configuration,
    build_configurations,
    in_groups,
)
from vllm_treeflash.bench.measure import Batch, Figures, summarise

_WARM_UP_TOKENS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench``."""
    models = parser.add_argument_group("models")
    models.add_argument("--model", help="target; default: SmolLM2-135M-Instruct, fetched once")
    models.add_argument("--draft", help="TreeFlash checkpoint; default: the shipped drafter")
    models.add_argument("--dtype", default="float32", help="default: %(default)s")
    models.add_argument("--max-model-len", type=int, default=2048, help="default: %(default)s")
    models.add_argument(
        "--enforce-eager", action="store_true", help="without torch.compile: starts faster"
    )
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--modes",
        type=_names,
        default=list(MODES),
        help=f"comma-separated, of {','.join(MODES)}; default: all",
    )
    compared.add_argument(
        "--budgets",
        type=_integers,
        default=[16, 64],
        help="tree nodes including the root, comma-separated; default: 16,64",
    )
    compared.add_argument("--top-m", type=int, help="treeflash_top_m of every engine")
    compared.add_argument("--top-k", type=int, help="treeflash_top_k of every engine")
    compared.add_argument("--draft-temperature", type=float, help="treeflash_draft_temperature")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--prompts",
        type=_names,
        default=[],
        help="names of shipped prompt sets, comma-separated, or a JSON file {set: [text, …]}; "
        "default: all shipped sets",
    )
    load.add_argument(
        "--num-prompts", type=int, default=3, help="first prompts of a set; default: %(default)s"
    )
    load.add_argument("--max-tokens", type=int, default=96, help="default: %(default)s")
    load.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s, greedy")
    load.add_argument("--batch-sizes", type=_integers, default=[1, 8], help="default: 1,8")
    load.add_argument("--repeats", type=int, default=1, help="default: %(default)s")
    load.add_argument(
        "--resident",
        type=_resident,
        default=3,
        help="engines alive at a time, about 3.5 GB each with the default pair; plain is one of "
        "them and runs again beside every group of others; default: %(default)s",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="JSON file with every record of the run")
    output.add_argument("--markdown", action="store_true", help="print Markdown tables")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _integers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _names(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of positive numbers, like 16,64")
    return numbers


def _resident(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 2")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that ``args`` describe. Returns the exit status."""
    # Before vLLM is imported. One GiB of KV cache holds 8 requests of the default pair. Each
    # engine would repeat the same warnings; VLLM_LOGGING_LEVEL=WARNING brings them back.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_treeflash.bench.checkpoint import local_checkpoint, write_headless
    from vllm_treeflash.bench.environment import describe_environment
    from vllm_treeflash.bench.table import report

    environment = describe_environment()
    model, draft = _models(args)
    with tempfile.TemporaryDirectory(prefix="vllm-treeflash-bench-") as folder:
        source = local_checkpoint(draft)
        configurations = build_configurations(
            args.modes,
            args.budgets,
            draft=str(source),
            headless_draft=str(write_headless(source, Path(folder) / "headless")),
            block_size=json.loads((source / "config.json").read_text())["block_size"],
            tree_options=_tree_options(args),
        )
        batches, environment["threads"] = _run_all(args, model, configurations)

    figures = _figures(configurations, batches, args)
    print(report(figures, markdown=args.markdown))
    for name, size in figures:
        extra = figures[name, size].prefill_steps - figures[name, size].batches
        if extra > 0:
            print(
                f"warning: {name}, batch {size}: {extra} more prefill steps than batches "
                "(prompts recomputed or not queued in time); decode figures are approximate",
                file=sys.stderr,
            )
    if args.output:
        _write_json(args, environment, model, draft, configurations, figures, batches)
        print(f"\nRecords: {args.output}")
    return 0


def _models(args: argparse.Namespace) -> tuple[str, str]:
    """Target and drafter, the SmolLM2 pair by default."""
    if args.model and not args.draft:
        raise SystemExit("bench: --model needs --draft, a drafter trained for it")
    if args.model:
        return args.model, args.draft
    from vllm_treeflash.smollm2 import drafter_path, target_path

    return str(target_path()), args.draft or str(drafter_path())


def _tree_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {
        "treeflash_top_m": args.top_m,
        "treeflash_top_k": args.top_k,
        "treeflash_draft_temperature": args.draft_temperature,
    }
    return {key: value for key, value in options.items() if value is not None}


def _run_all(
    args: argparse.Namespace, model: str, configurations: list[Configuration]
) -> tuple[list[Batch], dict[str, int]]:
    """Run every batch on every configuration.

    Returns the records, and the CPU threads of each engine.

    Memory rarely holds all engines, so they come in groups. Plain stays and is measured
    with each group: a ratio always compares batches that ran within seconds of each other.
    """
    from tqdm import tqdm
    from vllm import SamplingParams

    from vllm_treeflash.bench.engine import Engine
    from vllm_treeflash.bench.prompts import load_prompts, tokenize

    prompts = load_prompts(args.prompts, args.num_prompts)
    token_ids = tokenize(prompts, _tokenizer(model))
    options = _engine_options(args, configurations, max(map(len, token_ids)))
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    warm_up = SamplingParams(temperature=args.temperature, max_tokens=_WARM_UP_TOKENS)

    def run_batch(engine: Engine, indices: range, sampling: Any, **labels: int) -> Batch:
        return engine.run(
            [prompts[i] for i in indices], [token_ids[i] for i in indices], sampling, **labels
        )

    groups = in_groups(configurations, args.resident)
    batches = []
    engines: dict[str, Engine] = {}
    threads: dict[str, int] = {}
    with tqdm(total=sum(map(len, groups)), unit="engine") as progress:
        try:
            for number, group in enumerate(groups):
                names = [configuration.name for configuration in group]
                for name in engines.keys() - set(names):
                    engines.pop(name).close()
                for configuration in group:
                    if configuration.name in engines:
                        continue
                    progress.set_description(f"starting {configuration.name}")
                    engine = engines[configuration.name] = Engine(configuration, model, options)
                    threads[configuration.name] = engine.threads()
                    for size in args.batch_sizes:
                        first = range(min(size, len(prompts)))
                        run_batch(engine, first, warm_up, batch_size=size, repeat=0, group=number)
                for turn, (size, repeat, indices) in enumerate(_work(args, len(prompts))):
                    # Engine after engine, another one first each time: whatever disturbs the
                    # machine meanwhile meets every configuration.
                    for name in names[turn % len(names) :] + names[: turn % len(names)]:
                        progress.set_description(f"{name}, batch size {size}, no. {turn + 1}")
                        labels = {"batch_size": size, "repeat": repeat, "group": number}
                        batches.append(run_batch(engines[name], indices, sampling, **labels))
                progress.update(len(group))
        finally:
            for engine in engines.values():
                engine.close()
    return batches, threads


def _work(args: argparse.Namespace, num_prompts: int) -> list[tuple[int, int, range]]:
    """Batch size, repeat and prompt indices of every batch; the last of a size may be smaller."""
    return [
        (size, repeat, range(start, min(start + size, num_prompts)))
        for size in args.batch_sizes
        for repeat in range(args.repeats)
        for start in range(0, num_prompts, size)
    ]


def _engine_options(
    args: argparse.Namespace, configurations: list[Configuration], longest_prompt: int
) -> dict[str, Any]:
    """Arguments of ``LLM`` that every configuration gets."""
    largest = max(args.batch_sizes)
    return {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "enforce_eager": args.enforce_eager,
        "max_num_seqs": largest,
        # Room in one step for all prompts of a batch, or all nodes of their trees.
        "max_num_batched_tokens": max(
            2048,
            args.max_model_len,
            largest * longest_prompt,
            largest * max(c.budget for c in configurations),
        ),
    }


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _figures(
    configurations: list[Configuration], batches: list[Batch], args: argparse.Namespace
) -> dict[tuple[str, int], Figures]:
    """By configuration and batch size."""
    figures = {}
    for size in args.batch_sizes:
        for configuration in configurations:
            own = [
                b for b in batches if b.configuration == configuration.name and b.batch_size == size
            ]
            groups = {b.group for b in own}
            plain = [
                b
                for b in batches
                if b.configuration == PLAIN and b.batch_size == size and b.group in groups
            ]
            figures[configuration.name, size] = summarise(
                own, plain, compare_tokens=args.temperature == 0
            )
    return figures


def _write_json(
    args: argparse.Namespace,
    environment: dict[str, Any],
    model: str,
    draft: str,
    configurations: list[Configuration],
    figures: dict[tuple[str, int], Figures],
    batches: list[Batch],
) -> None:
    record = {
        "environment": environment,
        "arguments": {k: v for k, v in vars(args).items() if _is_plain(v)},
        "model": model,
        "draft": draft,
        "configurations": [asdict(c) for c in configurations],
        "figures": [
            {"configuration": name, "batch_size": size, **f.to_json()}
            for (name, size), f in figures.items()
        ],
        "batches": [asdict(batch) for batch in batches],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")


def _is_plain(value: Any) -> bool:
    """Options as the user gave them; not the handler function of a command-line parser."""
    return value is None or isinstance(value, (str, int, float, list))
