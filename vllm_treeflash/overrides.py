"""Run-time overrides of private vLLM symbols, for what has no public extension point.

Each wraps the original, acts only when the engine's method is treeflash, and is recorded
as a unified diff in ``patches/`` (``tests/unit/test_patches.py`` checks the context against
the installed vLLM). Applying them twice is the same as once.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

from vllm_treeflash.config import METHOD, TreeFlashSpeculativeConfig, from_user_dict

logger = init_logger(__name__)


@dataclass(frozen=True)
class Override:
    """One replaced symbol.

    Attributes:
        patch: number of its diff in ``patches/``.
        module: where the symbol is looked up at run time.
        name: of the symbol, dotted inside the module.
        replacement: takes the original first, then the original's arguments.
        worker_only: installed by a TreeFlash worker, not by every process.
    """

    patch: str
    module: str
    name: str
    replacement: Callable[..., Any]
    worker_only: bool = False

    def install(self) -> None:
        owner = importlib.import_module(self.module)
        *path, name = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original, replacement = getattr(owner, name), self.replacement
        if getattr(original, "_treeflash_override", False):
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        wrapper._treeflash_override = True  # type: ignore[attr-defined]
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)
        logger.debug("treeflash: overriding %s.%s", self.module, self.name)


def apply() -> None:
    """Install the overrides that every process needs."""
    for override in OVERRIDES:
        if not override.worker_only:
            override.install()


def apply_in_worker() -> None:
    """Install the overrides that only a TreeFlash worker process needs."""
    for override in OVERRIDES:
        override.install()


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
    from vllm_treeflash.runner.selection import (
        SCHEDULER,
        check_runner,
        check_token_budget,
        select_runner,
    )

    if self.scheduler_cls == SCHEDULER:
        self.scheduler_cls = None  # ours, from an earlier config of the same EngineArgs
    user = {k.replace("-", "_"): v for k, v in (self.speculative_config or {}).items()}
    method = user.get("method") or self.spec_method
    if method != METHOD:
        if foreign := sorted(k for k in user if k.startswith("treeflash_")):
            raise ValueError(
                f"treeflash: {', '.join(foreign)} in the speculative config needs "
                f'"method": "{METHOD}"; the method is {method!r}.'
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
                raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
            user[key] = value

    check_runner(self, target_model_config, target_parallel_config)
    speculative_config = from_user_dict(user, target_model_config, target_parallel_config)
    if self.max_num_batched_tokens is not None:  # else the scheduler checks vLLM's default
        check_token_budget(speculative_config.num_speculative_tokens, self.max_num_batched_tokens)
    select_runner(self, target_parallel_config)
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


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Offer ``--spec-method treeflash`` on the command line (patch 0004).

    vLLM takes the choices from the ``Literal`` of ``SpeculativeConfig.method``.
    """
    parser = original(parser)
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [METHOD, *action.choices]
    return parser


def _v2_unsupported_features(
    original: Callable[[VllmConfig], list[str]], self: VllmConfig
) -> list[str]:
    """Keep a TreeFlash engine on the V1 runner where V2 is the default (patch 0005).

    That is a CPU with Triton for CPUs installed. vLLM says so in its log.
    """
    unsupported = original(self)
    if isinstance(self.speculative_config, TreeFlashSpeculativeConfig):
        unsupported.append(f"speculative method '{METHOD}'")
    return unsupported


OVERRIDES = (
    Override(
        patch="0001",
        module="vllm.engine.arg_utils",
        name="EngineArgs.create_speculative_config",
        replacement=_create_speculative_config,
    ),
    Override(
        patch="0002",
        module="vllm.sampling_params",
        name="SamplingParams._validate_spec_decode",
        replacement=_validate_spec_decode,
    ),
    Override(
        patch="0003",
        module="vllm.v1.worker.gpu_model_runner",
        name="build_logitsprocs",
        replacement=_build_logitsprocs,
        worker_only=True,
    ),
    Override(
        patch="0004",
        module="vllm.engine.arg_utils",
        name="EngineArgs.add_cli_args",
        replacement=_add_cli_args,
    ),
    Override(
        patch="0005",
        module="vllm.config.vllm",
        name="VllmConfig._get_v2_model_runner_unsupported_features",
        replacement=_v2_unsupported_features,
    ),
)
