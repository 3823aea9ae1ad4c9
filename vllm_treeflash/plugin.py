"""The entry point that vLLM calls in every of its processes."""

from __future__ import annotations


def register() -> None:
    """Make ``method: "treeflash"`` known to vLLM (``vllm.general_plugins``).

    May run several times per process. vLLM does not catch exceptions of plugins, so an
    unsupported vLLM is left untouched with one message in the log.
    """
    from vllm_treeflash.compatibility import vllm_is_supported

    if not vllm_is_supported():
        return

    from vllm.model_executor.models import ModelRegistry

    from vllm_treeflash import overrides
    from vllm_treeflash.config import DRAFT_ARCHITECTURE

    # Lazy: the model module is imported only by an engine that loads the drafter. The
    # published architecture name must resolve too, before the config is renamed.
    for architecture in (DRAFT_ARCHITECTURE, "TreeFlashDraftModel"):
        ModelRegistry.register_model(architecture, "vllm_treeflash.draft.model:TreeFlashDraftModel")
    overrides.apply()
