"""The worker that vLLM's ``worker_cls`` points at."""

from __future__ import annotations

import torch
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_treeflash import overrides


class TreeFlashCPUWorker(CPUWorker):
    """vLLM's CPU worker with tree attention registered and the TreeFlash model runner."""

    def init_device(self) -> None:
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_treeflash.attention.cpu.TreeCPUAttentionBackend",
        )
        # An earlier engine of this process may have resolved CPU_ATTN already.
        selector._cached_get_attn_backend.cache_clear()
        overrides.apply_in_worker()
        super().init_device()
        from vllm_treeflash.runner.v1 import TreeFlashModelRunner

        self.model_runner = TreeFlashModelRunner(self.vllm_config, torch.device("cpu"))

    def start_step_timing(self) -> None:
        """For ``LLM.collective_rpc``: start timing the phases of every step with a tree."""
        self.model_runner.timer.start()

    def stop_step_timing(self) -> dict[str, float]:
        """For ``LLM.collective_rpc``: see :class:`vllm_treeflash.runner.timing.StepTimer`."""
        return self.model_runner.timer.stop()
