"""A TreeFlash checkpoint without its AR head, in the plain DFlash layout."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

_AR_PREFIX = "ar_approximation."
_BACKBONE_PREFIX = "model."


def local_checkpoint(model: str) -> Path:
    """Folder of a checkpoint given by path or Hugging Face name (fetched if need be)."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))


def write_headless(source: Path, destination: Path) -> Path:
    """Write the DFlash backbone of a TreeFlash checkpoint.

    The result drafts the marginal tree under ``method: "treeflash"`` and runs unchanged
    under vLLM's own ``method: "dflash"``: the same backbone weights, without the ``model.``
    prefix, the AR head and ``treeflash_config``.

    Args:
        source: folder with ``config.json`` and safetensors weights, in either layout.
        destination: folder to create.

    Returns:
        ``destination``.
    """
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"no safetensors weights in the draft checkpoint '{source}'")
    weights = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if not name.startswith(_AR_PREFIX):
                    weights[name.removeprefix(_BACKBONE_PREFIX)] = tensors.get_tensor(name)

    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    for key in ("treeflash_config", "auto_map"):
        config.pop(key, None)
    destination.mkdir(parents=True, exist_ok=True)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    return destination
