#!/usr/bin/env bash
# An OpenAI-compatible server with TreeFlash on 127.0.0.1.
#
#   examples/serve.sh                     SmolLM2-135M-Instruct and the shipped drafter
#   examples/serve.sh TARGET DRAFTER      any supported pair, names or paths
#
# PORT (8000) and further `vllm serve` options (after the two names) are passed on.
set -euo pipefail

if (($# >= 2)); then
    target=$1 drafter=$2
    shift 2
else
    target=$(python -m vllm_treeflash.smollm2)
    drafter=$(python -c 'from vllm_treeflash import smollm2; print(smollm2.drafter_path())')
fi

export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} # GiB

exec vllm serve "$target" \
    --served-model-name treeflash-example \
    --host 127.0.0.1 \
    --port "${PORT:-8000}" \
    --dtype float32 \
    --max-model-len 2048 \
    --max-num-seqs 8 \
    --enforce-eager \
    --speculative-config "{\"method\": \"treeflash\", \"model\": \"$drafter\", \"num_speculative_tokens\": 11}" \
    "$@"
