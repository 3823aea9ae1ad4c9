"""vllm-treeflash: tree speculative decoding (TreeFlash) for stock vLLM."""

__version__ = "0.1.0"
