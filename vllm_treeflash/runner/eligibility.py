"""Which requests are drafted for.

Tree verification samples each node with vLLM's own sampler, so everything that depends only
on a node's own logits is exact: temperature, top-k, top-p, min-p, seeds. What depends on
the *tokens before* a node, or is reported per token, would have to follow each path; such a
request gets no drafts and decodes plainly, in the same batch, with stock semantics.
"""

from __future__ import annotations

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams

logger = init_logger(__name__)

#: Options that drafts do not touch: how a node is sampled from its own logits, how many
#: sequences there are, when to stop, how text is returned. Anything else must be unset.
_NODE_LOCAL = frozenset(
    (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("stop", "stop_token_ids", "ignore_eos", "max_tokens", "repetition_detection"),
        *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
        *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
        *("output_text_buffer_length", "skip_reading_prefix_cache"),
        # For custom logits processors, with which nobody is drafted for, and KV connectors.
        "extra_args",
        # Of an engine that is started without it (the method refuses watermark_config).
        "watermarking",
    )
)
_DEFAULTS = SamplingParams()


def path_dependent_option(params: SamplingParams) -> str | None:
    """The first option of a request that keeps it from being drafted for.

    ``min_tokens`` is not among them: the runner lifts it once the tokens are there.

    Args:
        params: of the request.

    Returns:
        The option's name, or ``None`` when the request can be drafted for. An option this
        release does not know counts as path-dependent unless it is at its default.
    """
    for option in params.__struct_fields__:
        if option.startswith("_") or option in _NODE_LOCAL or option == "min_tokens":
            continue
        value = getattr(params, option)
        if value != getattr(_DEFAULTS, option) and value not in (None, [], {}):
            return option
    return None


def log_plain_decoding(option: str) -> None:
    """Say once per option why some requests decode without drafts."""
    logger.info_once(
        "treeflash: requests with '%s' are decoded without drafts (their outputs are exact).",
        option,
    )
