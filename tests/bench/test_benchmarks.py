"""Benchmarks run and say what they promise; how fast anything is, no test asserts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from block_recurrent.bench import harness, write
from block_recurrent.bench.contenders import FullAttentionStep, OurStep, Setting, import_extra
from block_recurrent.bench.harness import best_seconds, peak_bytes_of
from block_recurrent.bench.steptime import TrainingStep
from block_recurrent.cli.main import main
from block_recurrent.ops import cpp, triton
from block_recurrent.presets import preset
from block_recurrent.run_config import OptimizerConfig


def rows_of(path: Path) -> list[dict]:
    result = json.loads(path.read_text())
    assert set(result) == {"rows", "machine", "versions", "command"}
    assert result["versions"]["torch"]
    return result["rows"]


def test_steptime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench steptime --size micro --systems rec-fixed-skip --repeats 1 --vocab-size 50 --no-peak --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["system"] == "rec-fixed-skip"
    assert row["paper"] == 0.99
    assert row["seconds"] > 0
    assert 0 < row["limit_share"] < 2
    assert "limit_share" in capsys.readouterr().out


def test_steptime_of_a_changed_model(tmp_path: Path) -> None:
    command = "bench steptime --size micro --systems rec-fixed-skip --repeats 1 --vocab-size 50 --no-peak --lanes 2"
    changes = ["--set", "model.window=4", "--set", "model.num_states=3"]
    assert main([*command.split(), *changes, "--json", str(tmp_path / "a.json")]) == 0
    assert main([*command.split(), "--json", str(tmp_path / "b.json")]) == 0
    changed, plain = (
        json.loads((tmp_path / name).read_text())["rows"][0]["flop_ratio"] for name in ("a.json", "b.json")
    )
    assert changed != plain


@pytest.mark.skipif(cpp.LIBRARY is None, reason="this installation has no kernels (brt doctor)")
def test_kernels(tmp_path: Path) -> None:
    command = "bench kernels --size micro --repeats 1 --vocab-size 50 --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    rows = rows_of(tmp_path / "x.json")
    assert [row["what"] for row in rows] == ["attention", "norm", "cross-entropy", "search", "step"]
    assert all(row["speedup"] > 0 for row in rows)


@pytest.mark.parametrize(("setting", "told"), [("train.lanes=3", "'train'"), ("model.windw=3", "window")])
def test_steptime_takes_settings_of_the_model_only(setting: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steptime", "--size", "micro", "--set", setting]) == 2
    assert told in capsys.readouterr().err


def test_systems_that_are_only_timed_share_weights() -> None:
    configs = [preset(system, "micro", vocab_size=50) for system in ("slide-plus", "rec-fixed-skip")]
    common: dict = {}
    sliding, recurrent = (TrainingStep(config, lanes=1, common=common) for config in configs)
    assert sliding.model.embedding.weight.data_ptr() == recurrent.model.embedding.weight.data_ptr()
    assert sum(weight.numel() for weight in common.values()) < 1.8 * sum(p.numel() for p in sliding.model.parameters())
    for step in (sliding, recurrent, sliding, recurrent):
        step()
    updated = TrainingStep(configs[0], lanes=1, optimizer=OptimizerConfig(), common=common)
    assert updated.model.embedding.weight.data_ptr() != sliding.model.embedding.weight.data_ptr()


def test_steptime_needs_a_lane(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steptime", "--size", "micro", "--lanes", "0"]) == 2
    assert "--lanes is 0" in capsys.readouterr().err


def test_steptime_refuses_an_unknown_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steptime", "--systems", "rec-fixed-skp"]) == 2
    assert "did you mean 'rec-fixed-skip'?" in capsys.readouterr().err


def test_length(tmp_path: Path) -> None:
    command = "bench length --size micro --tokens 20000 --segment 128 --repeats 1 --vocab-size 50 --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    rows = rows_of(tmp_path / "x.json")
    assert [row["tokens"] for row in rows if row["what"] == "scoring"] == [10_000, 20_000]
    assert [row["tokens"] for row in rows if row["what"] == "training"] == [64, 128]


@pytest.mark.parametrize("contender", [OurStep, FullAttentionStep])
def test_contenders_learn(contender: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is a training step: the loss on the same tokens falls."""
    for name, value in {"WIDTH": 32, "DEPTH": 6, "HEADS": 2, "HEAD_SIZE": 16}.items():
        monkeypatch.setattr(f"block_recurrent.bench.contenders.{name}", value)
    step = contender(Setting(window=16, segment=64))
    first = step.loss().item()
    for _ in range(10):
        step()
    assert step.loss().item() < first


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    best = best_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert set(best) == {"a", "b"}


def test_whoever_had_to_fetch_much_memory_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(harness, "resident_bytes", lambda: 2**30 * ("b" in calls))
    best_seconds({name: partial(calls.append, name) for name in "abc"}, rounds=2)
    assert calls == ["a", "b", "b", "c", "c", "b", "a"]


def _take(megabytes: int) -> None:
    bytearray(megabytes * 2**20)[:: 2**12] = b"x" * (megabytes * 2**8)


@pytest.mark.slow
def test_peak_memory_is_that_of_the_work() -> None:
    assert 180 * 2**20 < peak_bytes_of(_take, 200) < 260 * 2**20


def test_overhead(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number}, again and again. " * 50)
    assert main(["data", "prepare", str(tmp_path / "texts"), "--out", str(tmp_path / "data")]) == 0
    command = ["bench", "overhead", "--data", str(tmp_path / "data"), "--size", "micro", "--repeats", "2", "--json"]
    assert main([*command, str(tmp_path / "x.json")]) == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["ratio"] > 0
    assert row["pairs"] == 2


def test_eval(tmp_path: Path) -> None:
    command = "bench eval --size micro --systems rec-fixed-skip,slide --vocab-size 50 --lanes 2 --repeats 2 --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    rows = rows_of(tmp_path / "x.json")
    assert [row["system"] for row in rows] == ["rec-fixed-skip", "slide"]
    assert all(row["ratio"] > 0 and row["pairs"] == 2 for row in rows)


def test_versions(tmp_path: Path) -> None:
    command = ["bench", "versions", "src", "--size", "micro", "--systems", "slide", "--repeats", "2", "--json"]
    assert main([*command, str(tmp_path / "x.json")]) == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["pairs"] == 2
    assert row["relative"] > 0


def test_versions_that_cannot_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "versions", str(tmp_path)]) == 2
    assert f"'{tmp_path}' has no package 'block_recurrent'" in capfd.readouterr().err
    (tmp_path / "block_recurrent").mkdir()
    (tmp_path / "block_recurrent" / "__init__.py").touch()
    assert main(["bench", "versions", str(tmp_path), "--systems", "slide", "--size", "micro"]) == 2
    assert f"the version in '{tmp_path}' cannot run this step: ModuleNotFoundError" in capfd.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench eval --size micro --vocab-size 50 --lanes 1 --repeats 1 --json"
    assert main([*command.split(), str(tmp_path)]) == 2
    assert f"'{tmp_path}' can't be written: it is a directory" in capsys.readouterr().err


def test_a_table_as_markdown(tmp_path: Path) -> None:
    command = "bench steptime --size micro --systems slide --repeats 1 --vocab-size 50 --no-peak --markdown"
    assert main([*command.split(), str(tmp_path / "x.md")]) == 0
    text = (tmp_path / "x.md").read_text()
    assert "| slide |" in text
    assert "torch" in text


def test_a_missing_package_is_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(write.NEEDED, "peer", "a_package_that_nobody_has")
    monkeypatch.setitem(write.PARTS, "limit", lambda args: pytest.fail("began before it looked"))
    assert main(["bench", "write", "--parts", "limit,peer"]) == 2
    assert "a-package-that-nobody-has needs the optional extra 'peers'" in capsys.readouterr().err


def test_a_package_that_lacks_something_itself_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_broken_package.py").write_text("import another_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="another_that_nobody_has"):
        import_extra("a_broken_package", "peers")


@pytest.mark.skipif(not triton.INSTALLED, reason="triton is not installed (Linux only)")
def test_triton_kernels_fit_into_registers(tmp_path: Path) -> None:
    """In a process of its own: in this one, triton interprets."""
    command = [sys.executable, "-m", "block_recurrent", "bench", "triton", "--head-sizes", "128"]
    command += ["--widths", "1024", "--dtypes", "bfloat16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    subprocess.run([*command, "--json", str(tmp_path / "x.json")], env=environment, check=True, capture_output=True)
    rows = rows_of(tmp_path / "x.json")
    kernels = ("forward", "queries_backward", "keys_backward")
    kernels += ("rms", "rms_backward", "add_dropout", "heads", "heads_backward")
    assert [(row["kernel"], row["architecture"]) for row in rows] == [*product(kernels, ("sm_80", "sm_90"))]
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["registers"] <= 255
        assert row["shared"] <= 163 * 1024


def test_the_interpreter_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "triton"]) == 2
    assert "triton" in capsys.readouterr().err.lower()


def test_serve(tmp_path: Path) -> None:
    """Requests of all kinds: every text is the one that it is alone."""
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    command = "bench serve --parts mixed --requests 100 --clients 6 --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    (row,) = rows_of(tmp_path / "x.json")
    assert row["clients"] == 6
    assert " texts compared, 0 differ; " in row["note"]
    assert ", 0 wrong answers; " in row["note"]


def test_first_tokens_are_those_of_memories_that_were_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    monkeypatch.setattr("block_recurrent.bench.serve._wide", lambda: preset("rec-fixed-skip", "micro", 257))
    command = "bench serve --parts first --far 3001 --rounds 1 --json"
    assert main([*command.split(), str(tmp_path / "x.json")]) == 0
    near, far = rows_of(tmp_path / "x.json")
    assert (near["what"], far["what"]) == ("1,000 tokens", "3,001 tokens")
    assert far["ratio"] == pytest.approx(far["value"] / near["value"], rel=1e-2)


def test_the_outside_line_predicts_each_token_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from block_recurrent.bench.outside import bits_of_tokens

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, **sizes)).eval()
    ids = torch.randint(31, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
        nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        assert bits_of_tokens(model, ids, 64) == pytest.approx(nats.sum().item() / 0.6931471805599453, rel=1e-4)
        # Cut to 20: the last token sees from 10 to 19 tokens before it, whole windows of 20 otherwise.
        cut = bits_of_tokens(model, ids[:30], 20)
        first = bits_of_tokens(model, ids[:20], 20)
        tail = model(torch.tensor([ids[10:30]])).logits[0, 9:-1]
        rest = torch.nn.functional.cross_entropy(tail, torch.tensor(ids[20:30]), reduction="sum").item()
    assert cut - first == pytest.approx(rest / 0.6931471805599453, rel=1e-4)
    (tmp_path / "a.txt").write_text("a text")
    assert main(["bench", "outside", "--text", str(tmp_path / "a.txt"), "--gguf", str(tmp_path / "no.gguf")]) == 2
    line = capsys.readouterr().err
    assert "no.gguf" in line or "pip install gguf" in line
