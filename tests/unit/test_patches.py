"""``patches/`` fits the installed vLLM and names exactly the overrides that are installed."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import vllm

from vllm_treeflash.overrides import OVERRIDES, apply

PATCHES = Path(__file__).parents[2] / "patches"
FILES = sorted(PATCHES.glob("*.patch"))
SITE_PACKAGES = Path(vllm.__file__).parents[1]


def test_every_override_has_its_patch_and_no_patch_is_left_over() -> None:
    documented = {}
    for file in FILES:
        (symbol,) = re.findall(r"^Override: (\S+)$", file.read_text(), flags=re.MULTILINE)
        documented[file.name[:4]] = symbol
    assert documented == {o.patch: f"{o.module}:{o.name}" for o in OVERRIDES}


def test_readme_lists_every_patch() -> None:
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\)", (PATCHES / "README.md").read_text(), re.M)
    assert listed == [(file.name[:4], file.name) for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_patch_applies_to_the_installed_vllm(file: Path, tmp_path: Path) -> None:
    header, _, diff = file.read_text().partition("\n---\n")
    assert re.match(r"Subject: .+\n\n.{80,}\n\nOverride: ", header, flags=re.DOTALL)
    (source,) = re.findall(r"^\+\+\+ b/(\S+)$", diff, flags=re.MULTILINE)
    copy = tmp_path / source
    copy.parent.mkdir(parents=True)
    shutil.copyfile(SITE_PACKAGES / source, copy)
    before = copy.read_text()
    # git apply accepts moved lines, but not a single changed line of context.
    result = subprocess.run(
        ["git", "apply", "--whitespace=nowarn", str(file)],
        cwd=tmp_path,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"vLLM {vllm.__version__} changed around it: {result.stderr}"
    after = copy.read_text()
    assert after != before and "treeflash" in after
    compile(after, source, "exec")


def test_a_changed_context_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: any line of context that changes breaks it."""
    file = FILES[0]
    (source,) = re.findall(r"^\+\+\+ b/(\S+)$", file.read_text(), flags=re.MULTILINE)
    context = "        if self.speculative_config is None:\n            return None\n"
    copy = tmp_path / source
    copy.parent.mkdir(parents=True)
    text = (SITE_PACKAGES / source).read_text()
    assert text.count(context) == 1
    copy.write_text(text.replace(context, context.replace("None:", "False:")))
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            ["git", "apply", str(file)],
            cwd=tmp_path,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
            capture_output=True,
            check=True,
        )


def test_installing_twice_is_installing_once() -> None:
    apply()
    before = [_symbol(o.module, o.name) for o in OVERRIDES if not o.worker_only]
    apply()
    after = [_symbol(o.module, o.name) for o in OVERRIDES if not o.worker_only]
    assert before == after
    # One layer around vLLM's own function, however often the plugin was loaded.
    assert not any(hasattr(f.__wrapped__, "_treeflash_override") for f in after)


def _symbol(module: str, name: str) -> object:
    owner = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner
