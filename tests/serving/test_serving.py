"""``vllm serve`` with a draft tree per step, seen through the ``openai`` client.

The server is a subprocess on the loopback interface with the SmolLM2 pair, float32. What it
answers greedily must be what a plain engine answers, however it is asked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.engines import make_llm
from vllm_treeflash import smollm2

MODEL = "smollm2"
NUM_NODES = 11
DEPTH = 7  # of the shipped drafter: block size 8
MAX_TOKENS = 24
START_SECONDS = 300
ANSWER_SECONDS = 120

COMPLETION_PROMPT = "The days of the week are Monday, Tuesday,"


def chat_prompts() -> list[str]:
    """Eight prompts of different data sets and lengths."""
    prompts = smollm2.eval_prompts()
    return [prompts[name][i] for name in ("gsm8k", "math500", "mbpp", "mtbench") for i in (0, 1)]


def serve_command(port: int, speculative_config: dict[str, Any]) -> list[str]:
    """The ``vllm serve`` command line of these tests."""
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--max-num-seqs": "8",
        "--speculative-config": json.dumps(speculative_config),
    }
    # The script of this interpreter's environment, whatever PATH says.
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(smollm2.target_path())]
    return [*command, "--enforce-eager", *(part for item in options.items() for part in item)]


def serve_environment() -> dict[str, str]:
    """Ours without what the in-process engine tests need and a server does not."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(log: Path, speculative_config: dict[str, Any]) -> Iterator[str]:
    """A ready server; yields its base URL and ends its processes on the way out."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command(port, speculative_config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=serve_environment(),
            start_new_session=True,  # its engine and worker processes can be ended with it
        )
    try:
        wait_until_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):  # when all of them ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return when ``/health`` answers; fail with the log's end when it never does."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start; its log ends with\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    """Greedy answers of an engine without speculation, by prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    prompts = chat_prompts()
    with make_llm(
        model=str(smollm2.target_path()), max_model_len=1024, skip_tokenizer_init=False
    ) as llm:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(messages, params, use_tqdm=False)
        outputs += llm.generate([COMPLETION_PROMPT], params, use_tqdm=False)
    return {
        prompt: output.outputs[0].text
        for prompt, output in zip([*prompts, COMPLETION_PROMPT], outputs)
    }


@pytest.fixture(scope="module")
def server(plain: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a TreeFlash server. After ``plain``: one engine at a time."""
    config = {
        "method": "treeflash",
        "model": str(smollm2.drafter_path()),
        "num_speculative_tokens": NUM_NODES,
    }
    with running_server(tmp_path_factory.mktemp("serve") / "log", config) as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="unused", timeout=ANSWER_SECONDS, max_retries=0)


def chat(client: OpenAI, prompt: str, **options: Any) -> Any:
    """A greedy chat request."""
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        **{"temperature": 0.0, "max_tokens": MAX_TOKENS, **options},
    )


def streamed_chat(client: OpenAI, prompt: str, **options: Any) -> list[str]:
    """The text deltas of a streamed greedy chat request."""
    chunks = chat(client, prompt, stream=True, **options)
    return [c.choices[0].delta.content or "" for c in chunks if c.choices]


def metrics(server: str) -> dict[str, float]:
    """vLLM's counters and gauges by name, or ``name[position]`` for per-position ones."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=10) as response:
        text = response.read().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                position = sample.labels.get("position")
                key = sample.name if position is None else f"{sample.name}[{position}]"
                values[key] = sample.value
    return values


def test_chat_equals_plain(client: OpenAI, plain: dict[str, str]) -> None:
    for prompt in chat_prompts()[:2]:
        choice = chat(client, prompt).choices[0]
        assert choice.message.content == plain[prompt]
        assert choice.finish_reason == "length"


def test_completion_equals_plain(client: OpenAI, plain: dict[str, str]) -> None:
    options = {
        "model": MODEL,
        "prompt": COMPLETION_PROMPT,
        "temperature": 0.0,
        "max_tokens": MAX_TOKENS,
    }
    completion = client.completions.create(**options)
    assert completion.choices[0].text == plain[COMPLETION_PROMPT]
    assert completion.usage.completion_tokens == MAX_TOKENS
    deltas = [c.choices[0].text for c in client.completions.create(stream=True, **options)]
    assert "".join(deltas) == plain[COMPLETION_PROMPT]


def test_streamed_deltas_lose_nothing(client: OpenAI, plain: dict[str, str]) -> None:
    """Deltas of several accepted tokens add up to the text that is not streamed."""
    prompt = chat_prompts()[0]
    deltas = [d for d in streamed_chat(client, prompt) if d]
    assert "".join(deltas) == plain[prompt]
    assert len(deltas) < MAX_TOKENS, "no delta held more than one token"


def test_stop_string_inside_an_accepted_path(client: OpenAI, plain: dict[str, str]) -> None:
    prompt = chat_prompts()[0]
    text = plain[prompt]
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    expected = text[: text.index(stop)]
    assert chat(client, prompt, stop=[stop]).choices[0].message.content == expected
    assert "".join(streamed_chat(client, prompt, stop=[stop])) == expected


def test_eight_concurrent_streams(client: OpenAI, plain: dict[str, str]) -> None:
    prompts = chat_prompts()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: "".join(streamed_chat(client, prompt)), prompts)
        assert dict(zip(prompts, answers)) == {prompt: plain[prompt] for prompt in prompts}


def test_client_that_disconnects(client: OpenAI, server: str, plain: dict[str, str]) -> None:
    """Its request is dropped, and those beside and after it are answered as ever."""
    prompts = chat_prompts()
    leaving = chat(client, prompts[3], stream=True, max_tokens=800, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(leaving)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.map(lambda prompt: "".join(streamed_chat(client, prompt)), prompts[:2])
        leaving.close()
        assert list(beside) == [plain[prompt] for prompt in prompts[:2]]
    deadline = time.monotonic() + 30
    while metrics(server)["vllm:num_requests_running"] > 0:
        assert time.monotonic() < deadline, "the dropped request is still running"
        time.sleep(0.2)
    assert chat(client, prompts[3]).choices[0].message.content == plain[prompts[3]]


def test_metrics(client: OpenAI, server: str) -> None:
    prefix = "vllm:spec_decode_num_"
    before = metrics(server)
    usage = chat(client, chat_prompts()[0]).usage
    after = metrics(server)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts = gained[f"{prefix}drafts_total"]
    accepted = gained[f"{prefix}accepted_tokens_total"]
    per_position = [gained[f"{prefix}accepted_tokens_per_pos_total[{i}]"] for i in range(NUM_NODES)]
    assert drafts > 0 and accepted > 0
    assert accepted <= drafts * DEPTH
    assert gained[f"{prefix}draft_tokens_total"] <= drafts * NUM_NODES
    # "Position" of an accepted token is its depth, so nothing lies beyond the drafter's.
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[0] <= drafts
    assert per_position[DEPTH:] == [0.0] * (NUM_NODES - DEPTH)
    assert sum(per_position) == accepted
    # The first token comes from the prefill; each verified tree commits what it accepts and a
    # bonus token; at the end of the request a step may run without a tree.
    committed = 1 + drafts + accepted
    assert usage is not None
    assert committed <= usage.completion_tokens + DEPTH
    assert committed >= usage.completion_tokens - 1


def test_wrong_configuration_ends_the_server() -> None:
    config = {
        "method": "treeflash",
        "model": str(smollm2.drafter_path()),
        "treeflash_topk": 4,
    }
    done = subprocess.run(
        serve_command(free_port(), config),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=serve_environment(),
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    message = "treeflash: unknown key 'treeflash_topk' in the speculative config."
    assert output.count(message) == 1, output[-4000:]
    assert "Did you mean 'treeflash_top_k'?" in output
