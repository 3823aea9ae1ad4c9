"""Adapters to vLLM's runners: the only modules that import ``vllm.v1.worker``."""
