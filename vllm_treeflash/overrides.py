"""Run-time overrides of private vLLM symbols, for what has no public extension point.

Each wraps the original, acts only when the engine's method is treeflash, and is recorded
as a unified diff in ``patches/`` (``tests/unit/test_patches.py`` checks the context against
the installed vLLM). Applying them twice is the same as once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_treeflash.config import METHOD, TreeFlashSpeculativeConfig, from_user_dict

logger = init_logger(__name__)


def apply() -> None:
    """Install the overrides in this process."""
    _override(EngineArgs, "create_speculative_config", _create_speculative_config)
    _override(SamplingParams, "_validate_spec_decode", _validate_spec_decode)


def apply_in_worker() -> None:
    """Install the overrides that only a TreeFlash worker process needs."""
    from vllm.v1.worker import gpu_model_runner

    _override(gpu_model_runner, "build_logitsprocs", _build_logitsprocs)


def _override(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    if getattr(original, "_treeflash_override", False):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    wrapper._treeflash_override = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    logger.debug("treeflash: overriding %s.%s", owner.__name__, name)


def _create_speculative_config(
    original: Callable[..., SpeculativeConfig | None],
    self: EngineArgs,
    target_model_config: Any,
    target_parallel_config: Any,
) -> SpeculativeConfig | None:
    """``method: "treeflash"`` in the user's dict or ``--spec-method`` (patch 0001).

    ``SpeculativeConfig.method`` is a ``Literal`` and its config forbids unknown keys, so
    the user's dict has to be read before vLLM does.
    """
    user = {k.replace("-", "_"): v for k, v in (self.speculative_config or {}).items()}
    method = user.get("method") or self.spec_method
    if method != METHOD:
        if foreign := sorted(k for k in user if k.startswith("treeflash_")):
            raise ValueError(
                f"treeflash: {', '.join(foreign)} in the speculative config needs "
                f"\"method\": \"{METHOD}\"; the method is {method!r}."
            )
        return original(self, target_model_config, target_parallel_config)
    flags = {
        "method": ("--spec-method", self.spec_method),
        "model": ("--spec-model", self.spec_model),
        "num_speculative_tokens": ("--spec-tokens", self.spec_tokens),
    }
    for key, (flag, value) in flags.items():
        if value is not None:
            if key in user:
                raise ValueError(
                    f"{flag} and --speculative-config['{key}'] are mutually exclusive"
                )
            user[key] = value

    from vllm_treeflash.runner.selection import select_runner

    speculative_config = from_user_dict(user, target_model_config, target_parallel_config)
    select_runner(self, target_model_config, target_parallel_config)
    return speculative_config


def _validate_spec_decode(
    original: Callable[..., None],
    self: SamplingParams,
    speculative_config: SpeculativeConfig | None,
) -> None:
    """Let ``min_p`` and ``logit_bias`` through (patch 0002).

    vLLM's rejection sampler cannot honour them; tree verification samples every node with
    vLLM's ordinary sampler, and a request with ``logit_bias`` decodes without drafts.
    """
    if not isinstance(speculative_config, TreeFlashSpeculativeConfig):
        original(self, speculative_config)


def _build_logitsprocs(
    original: Callable[..., Any], vllm_config: VllmConfig, *args: Any, **kwargs: Any
) -> Any:
    """Load every logits processor, as without speculation (patch 0003).

    With a speculative config vLLM loads only ``min_tokens`` and refuses custom ones.
    """
    if isinstance(vllm_config.speculative_config, TreeFlashSpeculativeConfig):
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
    return original(vllm_config, *args, **kwargs)
