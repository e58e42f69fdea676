"""`brt doctor` and `brt completion`."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from block_recurrent.cli.main import COMMANDS, main
from block_recurrent.presets import SYSTEMS


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert all(key == key.lower() and " " not in key for section in facts.values() for key in section)
    assert set(facts) == {"versions", "machine", "choices", "kernels", "speed", "extras"}
    assert facts["choices"]["dtype_auto"] in ("float32", "bfloat16")
    assert facts["machine"]["threads_of_torch"] >= 1
    assert facts["choices"]["kernels_in_c"].startswith(("in use", "missing"))
    assert "GFLOP/s" in next(iter(facts["speed"].values()))
    assert main(["doctor"]) == 0
    assert "versions:\n" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["brt", "pre"], ["presets"]),
        (["brt", "data", "pre"], ["prepare"]),
        (["brt", "train", "--sys"], ["--system"]),
        (["brt", "train", "--system", "memo"], ["memorizing"]),
        (["brt", "train", "--size", "ti"], ["tiny"]),
        (["brt", "write", "runs/first", "--temp"], ["--temperature"]),
        (["brt", "bench", "steptime", "--rep"], ["--repeats"]),
        (["brt", "data", "prepare", "books", "--tok"], ["--tokenizer"]),
    ],
)
def test_completion_in_bash(typed: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = " ".join(f"'{word}'" for word in typed)
    script = f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _brt; echo ${{COMPREPLY[@]}}"
    program = capsys.readouterr().out + script
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert all(name in printed for name in SYSTEMS), "the values of --system"
