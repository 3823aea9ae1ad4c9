"""The user's ``--speculative-config`` keys, and every rule about them.

``method: "treeflash"`` becomes a :class:`TreeFlashSpeculativeConfig`: vLLM's own
``SpeculativeConfig`` with ``method="dflash"`` inside, which is how vLLM hosts DFlash
derivatives (auxiliary hidden states, context K/V, draft model config, config hash), plus
the ``treeflash_*`` keys as fields. It travels to every process inside ``VllmConfig``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_config
from vllm.utils.torch_utils import is_quantized_kv_cache

logger = init_logger(__name__)

METHOD = "treeflash"
DRAFT_ARCHITECTURE = "DFlashTreeFlashDraftModel"
#: What the config of a published checkpoint calls itself.
CHECKPOINT_ARCHITECTURES = ("TreeFlashDraftModel", "DFlashDraftModel")
#: Published budget (nodes including the root) when the checkpoint names none.
DEFAULT_CANDIDATE_TOKENS = 64
TreeFlashMode = Literal["tree", "chain"]

_OWN_KEYS = ("treeflash_top_m", "treeflash_top_k", "treeflash_draft_temperature", "treeflash_mode")
#: Fields of ``SpeculativeConfig`` that vLLM itself fills in.
_INTERNAL_KEYS = {
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
}
#: Keys of vLLM's other methods, and keys that change how a *chain* is verified or drafted,
#: with the only value they can have here. Silently ignoring them would promise something
#: else than what runs.
_FOREIGN_KEYS = {
    "disable_padded_drafter_batch": False,
    "use_local_argmax_reduction": False,
    "rejection_sample_method": "standard",
    "draft_sample_method": "greedy",
    "synthetic_acceptance_rates": None,
    "synthetic_acceptance_length": None,
    "enable_adaptive_verification": False,
    "use_heterogeneous_vocab": False,
    "parallel_drafting": False,
    "prompt_lookup_max": None,
    "prompt_lookup_min": None,
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
    "dspark_draft_topk": None,
    "index_share_for_mtp_iteration": None,
}


@config(config=ConfigDict(arbitrary_types_allowed=True))
class TreeFlashSpeculativeConfig(SpeculativeConfig):
    """``SpeculativeConfig`` of a TreeFlash engine. Build it with :func:`from_user_dict`."""

    treeflash_top_m: int = Field(default=16, ge=1)
    """States (possible previous tokens) per slot."""
    treeflash_top_k: int = Field(default=16, ge=1)
    """Continuations kept per state."""
    treeflash_draft_temperature: float = Field(default=1.0, gt=0.0)
    """Divides the drafter's logits before the tree is selected."""
    treeflash_mode: TreeFlashMode = "tree"
    """``tree`` (the marginal tree when the checkpoint has no AR head) or ``chain``."""

    @property
    def block_depth(self) -> int:
        """Depth the drafter can reach: its block size minus the root slot."""
        return self.draft_model_config.hf_config.block_size - 1

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """None of the token budget: the drafter's query block has buffers of its own."""
        return 0

    def use_eagle_block_drop(self) -> bool:
        """No: every cached block holds the drafter's K/V of all its tokens.

        vLLM drops the last block of a prefix hit for EAGLE, whose drafter lags one token.
        Here context K/V is written in the step that computes the token.
        """
        return False

    def __post_init__(self) -> None:
        target = self.target_model_config  # type: ignore[has-type]
        # A published checkpoint's auto_map names code that is not needed here. Do not run
        # it, even if the user trusts the target's; vLLM asks the target's config for both.
        self.target_model_config = copy.copy(target)
        self.target_model_config.trust_remote_code = False
        super().__post_init__()
        self.target_model_config = target
        hf_config = self.draft_model_config.hf_config
        complete_draft_config(hf_config, self.draft_model_config.model)
        # Both layouts (TreeFlashDraftModel, DFlashDraftModel) run on one model class.
        hf_config.architectures = [DRAFT_ARCHITECTURE]
        self.update_arch_()

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method='{METHOD}', model='{self.draft_model_config.model}', "
            f"num_spec_tokens={self.num_speculative_tokens}, "
            f"treeflash_mode='{self.treeflash_mode}', treeflash_top_m={self.treeflash_top_m}, "
            f"treeflash_top_k={self.treeflash_top_k}, "
            f"treeflash_draft_temperature={self.treeflash_draft_temperature})"
        )


def from_user_dict(
    user: dict[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> TreeFlashSpeculativeConfig:
    """Turn the user's keys into a validated config.

    Args:
        user: the keys of ``--speculative-config``, ``method`` included.
        target_model_config, target_parallel_config: of the target.

    Raises:
        ValueError: naming the key, its value and what would be right.
    """
    keys = {k: v for k, v in user.items() if k != "method"}
    _check_keys(keys)
    draft_config = _read_draft_config(keys, target_model_config)
    _check_checkpoint(draft_config, keys["model"], target_model_config)
    mode = keys.get("treeflash_mode", "tree")
    depth = draft_config.block_size - 1
    if keys.get("num_speculative_tokens") is None:
        keys["num_speculative_tokens"] = _default_nodes(draft_config, mode)
    nodes = keys["num_speculative_tokens"]
    if mode == "chain" and nodes > depth:
        raise ValueError(
            f"treeflash: num_speculative_tokens={nodes} is longer than a chain can be: the "
            f"drafter's block_size is {depth + 1}, so treeflash_mode='chain' takes 1 to {depth}."
        )
    for entry in keys.get(key := "num_speculative_tokens_per_batch_size") or ():
        if isinstance(entry, (list, tuple)) and len(entry) == 3 and entry[2] > nodes:
            raise ValueError(
                f"treeflash: {key} has {list(entry)}, but {entry[2]} nodes are more than "
                f"num_speculative_tokens={nodes}, the largest tree."
            )
    try:
        return TreeFlashSpeculativeConfig(
            method="dflash",
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            **keys,
        )
    except ValidationError as error:
        # vLLM's own rules about its generic keys, without pydantic's wrapping.
        raise ValueError(f"treeflash: {_readable(error)}") from error


def _readable(error: ValidationError) -> str:
    """The messages of a validation error, each with the key and value it is about."""
    messages = []
    for detail in error.errors():
        message = detail["msg"].removeprefix("Value error, ")
        if key := ".".join(map(str, detail["loc"])):
            message = f"{key}={detail['input']!r}: {message}"
        messages.append(message)
    return "; ".join(messages)


def _check_keys(keys: dict[str, Any]) -> None:
    """Names, types and ranges of what the user wrote."""
    known = {f.name for f in dataclasses.fields(TreeFlashSpeculativeConfig)} - _INTERNAL_KEYS
    for key in keys:
        if key not in known:
            pool = _OWN_KEYS if key.startswith("treeflash") else sorted(known)
            close = difflib.get_close_matches(key, pool, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(
                f"treeflash: unknown key '{key}' in the speculative config.{hint} "
                f"Method-specific keys: {', '.join(_OWN_KEYS)}."
            )
    if not keys.get("model"):
        raise ValueError(
            "treeflash: the speculative config needs 'model', a TreeFlash or DFlash draft "
            "checkpoint (Hugging Face name or path), e.g. 'peerrh/treeflash-qwen3-8b'."
        )
    if not isinstance(keys["model"], str):
        raise ValueError(
            f"treeflash: model={keys['model']!r} must be a string (name or path of a checkpoint)."
        )
    for key in ("num_speculative_tokens", "treeflash_top_m", "treeflash_top_k"):
        value = keys.get(key)
        if key == "num_speculative_tokens" and value is None:
            continue
        if key in keys and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"treeflash: {key}={value!r} must be an integer of at least 1.")
    if (key := "treeflash_draft_temperature") in keys:
        value = keys[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0.0 < value < float("inf"):
            raise ValueError(f"treeflash: {key}={value!r} must be a finite number above 0.")
        keys[key] = float(value)
    if (key := "treeflash_mode") in keys and keys[key] not in get_args(TreeFlashMode):
        raise ValueError(
            f"treeflash: {key}={keys[key]!r} must be one of {', '.join(get_args(TreeFlashMode))}."
        )
    if (key := "kv_cache_dtype") in keys and is_quantized_kv_cache(keys[key] or "auto"):
        raise ValueError(f"treeflash: {key}={keys[key]!r} is not supported yet; use 'auto'.")
    for key, only in _FOREIGN_KEYS.items():
        if key in keys and keys[key] != only:
            raise ValueError(
                f"treeflash: {key}={keys[key]!r} does not apply to trees, which are drafted "
                f"and verified in another way; leave it out (or at {only!r})."
            )


def _read_draft_config(keys: dict[str, Any], target: ModelConfig) -> Any:
    """The draft checkpoint's Hugging Face config, completed with the method's defaults."""
    model = keys["model"]
    try:
        draft = get_config(
            model,
            trust_remote_code=False,
            revision=keys.get("revision"),
            code_revision=keys.get("code_revision"),
            config_format=target.config_format,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"treeflash: model={model!r} is not a draft checkpoint that can be read: it must be "
            "the path of a directory with a config.json, or a Hugging Face name (offline: in "
            f"the local cache). {str(error).splitlines()[0]}"
        ) from error
    complete_draft_config(draft, model)
    return draft


def complete_draft_config(draft: Any, model: str) -> None:
    """Fill what a checkpoint may leave out, in place.

    Args:
        draft: Hugging Face config of a TreeFlash or plain DFlash checkpoint.
        model: its name, for messages.

    Raises:
        ValueError: a needed entry is missing or malformed.
    """
    block_size = getattr(draft, "block_size", None)
    dflash = getattr(draft, "dflash_config", None)
    if not isinstance(block_size, int) or block_size < 2 or not isinstance(dflash, dict):
        raise ValueError(
            f"treeflash: '{model}' is not a TreeFlash or DFlash draft checkpoint: its "
            f"config.json needs block_size (an integer of at least 2, found {block_size!r}) and "
            f"dflash_config (found {dflash!r})."
        )
    if not isinstance(dflash.get("mask_token_id"), int):
        raise ValueError(
            f"treeflash: dflash_config of '{model}' needs mask_token_id, an integer token id; "
            f"found {dflash.get('mask_token_id')!r}."
        )
    if dflash.get("target_layer_ids") is None:
        dflash["target_layer_ids"] = default_target_layer_ids(
            draft.num_hidden_layers, getattr(draft, "num_target_layers", None), model
        )
    ids = dflash["target_layer_ids"]
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise ValueError(
            f"treeflash: dflash_config.target_layer_ids={ids!r} of '{model}' must be a list of "
            "target layer numbers."
        )
    treeflash = getattr(draft, "treeflash_config", None) or {}
    if not isinstance(treeflash, dict):
        raise ValueError(
            f"treeflash: treeflash_config={treeflash!r} of '{model}' must be a JSON object, or "
            "left out (no AR head)."
        )
    candidates = treeflash.get("candidate_tokens")
    if candidates is not None and (not isinstance(candidates, int) or candidates < 2):
        raise ValueError(
            f"treeflash: treeflash_config.candidate_tokens={candidates!r} of '{model}' must be an "
            "integer of at least 2 (it counts the root)."
        )
    if (ar := treeflash.get("ar_approximation")) not in (None, "swiglu"):
        raise ValueError(
            f"treeflash: treeflash_config.ar_approximation={ar!r} of '{model}' is not "
            "supported; expected 'swiglu' or null (no AR head)."
        )
    draft.treeflash_config = treeflash


def default_target_layer_ids(num_layers: int, num_target_layers: Any, model: str) -> list[int]:
    """Which target layers a checkpoint reads when its config does not say.

    One draft layer reads the middle; ``L`` layers read ``L`` rounded even steps from 1 to
    ``num_target_layers - 3`` (published checkpoints).
    """
    if not isinstance(num_target_layers, int):
        raise ValueError(
            f"treeflash: config.json of '{model}' has neither dflash_config.target_layer_ids nor "
            f"num_target_layers (found {num_target_layers!r}); one of them is needed."
        )
    if num_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (num_layers - 1)) for i in range(num_layers)]


def _check_checkpoint(draft: Any, model: str, target: ModelConfig) -> None:
    """Everything in which the drafter must fit the target."""
    if not set(draft.architectures or ()) & set(CHECKPOINT_ARCHITECTURES):
        raise ValueError(
            f"treeflash: '{model}' is a checkpoint of {draft.architectures}; supported are "
            f"{' and '.join(CHECKPOINT_ARCHITECTURES)}."
        )
    target_text = target.hf_text_config
    layers = target.get_total_num_hidden_layers()
    ids = draft.dflash_config["target_layer_ids"]
    if not all(0 <= i < layers for i in ids):
        raise ValueError(
            f"treeflash: '{model}' reads target layers {ids}, but the target "
            f"'{target.model}' has layers 0 to {layers - 1}."
        )
    trained_on = getattr(draft, "num_target_layers", None)
    if trained_on is not None and trained_on != layers:
        raise ValueError(
            f"treeflash: '{model}' was trained for a target of {trained_on} layers; the target "
            f"'{target.model}' has {layers}."
        )
    pairs = {
        "hidden_size": (draft.hidden_size, target.get_hidden_size()),
        "vocab_size": (draft.vocab_size, target_text.vocab_size),
    }
    for name, (of_draft, of_target) in pairs.items():
        if of_draft != of_target:
            raise ValueError(
                f"treeflash: {name} of the drafter '{model}' is {of_draft}, of the target "
                f"'{target.model}' {of_target}; they must be equal, because the drafter uses "
                "the target's embedding and lm_head."
            )
    mask_token_id = draft.dflash_config["mask_token_id"]
    if not 0 <= mask_token_id < target_text.vocab_size:
        raise ValueError(
            f"treeflash: mask_token_id={mask_token_id} of '{model}' lies outside the target's "
            f"vocabulary of {target_text.vocab_size} tokens."
        )
    heads, kv_heads = draft.num_attention_heads, draft.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(
            f"treeflash: '{model}' has num_attention_heads={heads}, which is not a multiple of "
            f"num_key_value_heads={kv_heads}."
        )


def _default_nodes(draft: Any, mode: str) -> int:
    """``num_speculative_tokens`` when the user gives none (a budget counts the root)."""
    if mode == "chain":
        return draft.block_size - 1
    return int(draft.treeflash_config.get("candidate_tokens") or DEFAULT_CANDIDATE_TOKENS) - 1
