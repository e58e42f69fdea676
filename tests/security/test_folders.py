"""Runs, checkpoints and prepared data that were changed, planted or poisoned."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from block_recurrent.checkpoint import find_checkpoint, list_checkpoints, load_run, save_run, set_aside, verify
from block_recurrent.checkpoint.folders import _RULES, FORMAT
from block_recurrent.checkpoint.sharded import SHARDED, read_sharded_weights
from block_recurrent.cli.main import main
from block_recurrent.data import Corpus, LaneStream
from block_recurrent.errors import BlockRecurrentError, CheckpointError, ConfigError, FileFormatError
from block_recurrent.inference.session_file import read_memory_file
from block_recurrent.io import door
from block_recurrent.io.tensors import read_tensors
from block_recurrent.run_config import RunConfig, TrainConfig, read_toml
from block_recurrent.train.report import cut_back, read_metrics
from block_recurrent.train.state import check_resumable
from tests.security.made import RUN, SUBWORDS, flip, reseal, train_arguments


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("brt: error: ")]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    return lines[0]


class _RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_code_planted_beside_a_checkpoint_is_refused_and_not_run(files, tmp_path, capsys):
    newest = list_checkpoints(files / RUN)[-1]
    (newest / SHARDED).mkdir()
    (newest / SHARDED / ".metadata").write_bytes(pickle.dumps(_RunsCode(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"does not list sharded/\.metadata"):
        verify(newest)
    assert main(train_arguments(files, RUN, 3)) == 0, "the checkpoint before is used"
    assert "does not list sharded/.metadata" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_an_index_that_names_code_is_refused_even_where_it_is_listed(files, tmp_path):
    newest = list_checkpoints(files / RUN)[-1]
    (newest / SHARDED).mkdir()
    (newest / SHARDED / ".metadata").write_bytes(pickle.dumps(_RunsCode(tmp_path / "ran")))
    (newest / "model.safetensors").unlink()
    reseal(newest)
    verify(newest)
    with pytest.raises(FileFormatError, match="which is not allowed in an index of tensors"):
        read_sharded_weights(newest)
    assert main(["score", str(files / RUN), str(files / "text.txt")]) == 0, "the checkpoint before is used"
    assert not (tmp_path / "ran").exists()


def test_every_bit_of_a_manifest_counts(files):
    newest = list_checkpoints(files / RUN)[-1]
    path = newest / "manifest.json"
    for position in range(path.stat().st_size):
        for bit in range(8):
            flip(path, position, 1 << bit)
            with pytest.raises(FileFormatError):
                door.read_manifest(path, FORMAT, {1: _RULES, 2: _RULES})
            flip(path, position, 1 << bit)
    verify(newest)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_number_that_no_float_holds_is_refused(name, files, capsys):
    newest = list_checkpoints(files / RUN)[-1]
    values = json.loads((newest / name).read_text())
    values["validation_bits" if name == "manifest.json" else "best_bits"] = 10**400
    values.pop("sha256", None)
    text = json.dumps(values)
    (newest / name).write_text(door.seal_json(text) if name == "manifest.json" else text)
    if name == "state.json":
        reseal(newest)
    assert main(train_arguments(files, RUN, 3)) == 0
    error = capsys.readouterr().err
    assert "has an invalid" in error
    assert "using step 1 instead" in error


def test_a_damaged_manifest_does_not_stop_a_command_that_has_another_checkpoint(files, capsys):
    newest = list_checkpoints(files / RUN)[-1]
    path = newest / "manifest.json"
    path.write_text(path.read_text().replace('"version"', '"wersion"'))
    assert main(["score", str(files / RUN), str(files / "text.txt")]) == 0
    assert "using step 1 instead" in capsys.readouterr().err
    assert main(train_arguments(files, RUN, 3)) == 0


@pytest.mark.parametrize("name", ["optimizer.safetensors", "memory-00000-of-00001.safetensors", "model.safetensors"])
def test_a_poisoned_checkpoint_is_passed_over(files, name, capsys):
    newest = list_checkpoints(files / RUN)[-1]
    tensors = load_file(newest / name)
    first = next(key for key, x in tensors.items() if x.is_floating_point())
    tensors[first] = tensors[first] * torch.nan
    save_file(tensors, newest / name)
    reseal(newest)
    with pytest.raises(CheckpointError, match="not finite"):
        check_resumable(newest)
    assert main(train_arguments(files, RUN, 3)) == 0
    assert "not finite; using step 1 instead" in capsys.readouterr().err


PARTS = ("state", "model", "optimizer", "memory-00000-of-00001", "random-00000-of-00001")


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_without_a_part_is_passed_over(files, part, capsys):
    name = f"{part}.{'json' if part == 'state' else 'safetensors'}"
    *_, before, newest = list_checkpoints(files / RUN)
    (newest / name).unlink()
    reseal(newest)
    assert main(train_arguments(files, RUN, 3)) == 0
    reason = f"step-00000002' can't be resumed: it has no {name}"
    assert f"{reason}; using step 1 instead" in capsys.readouterr().err
    for path in list_checkpoints(files / RUN):
        if path != before:
            shutil.rmtree(path)
    (before / name).unlink()
    reseal(before)
    assert main(train_arguments(files, RUN, 3)) == 1
    reason = reason.replace("step-00000002", "step-00000001")
    assert f"no checkpoint of '{files / RUN}' can be used: checkpoint" in (error := one_line(capsys))
    assert error.endswith(reason)


@pytest.mark.parametrize("part", PARTS[1:])
def test_a_checkpoint_with_a_part_of_another_kind_is_passed_over(part, files, capsys):
    """With hashes that fit: of another model, or another file of tensors."""
    newest = list_checkpoints(files / RUN)[-1]
    other = list_checkpoints(files / "memorizing")[-1] / f"{part}.safetensors"
    shutil.copy(files / "tuned.state" if part.startswith("random") else other, newest / f"{part}.safetensors")
    reseal(newest)
    assert main(train_arguments(files, RUN, 3)) == 0
    assert "using step 1 instead" in capsys.readouterr().err
    assert main([*train_arguments(files, RUN, 3), "--resume", str(newest.with_name("unused-step-00000002"))]) == 1
    one_line(capsys)


def test_a_checkpoint_that_is_not_used_is_kept(tmp_path):
    for number in range(3):
        (tmp_path / "step-00000001").mkdir()
        (tmp_path / "step-00000001" / "mine").write_text(str(number))
        set_aside(tmp_path / "step-00000001", "unused")
    assert sorted(path.read_text() for path in tmp_path.glob("unused-*/mine")) == ["0", "1", "2"]


def test_a_file_or_a_link_under_a_temporary_name_stops_no_save(files):
    mine = files / "mine"
    mine.mkdir()
    (mine / "x").write_text("mine")
    (files / RUN / "checkpoints" / ".step-00000003.part").symlink_to(mine)
    (files / RUN / "checkpoints" / ".step-00000004.part").write_text("")
    assert main(train_arguments(files, RUN, 4)) == 0
    assert (mine / "x").read_text() == "mine"


def test_a_file_in_place_of_the_checkpoints_is_found_before_training(files, capsys):
    (files / RUN / "checkpoints").rename(files / "away")
    (files / RUN / "checkpoints").write_text("mine")
    before = (files / RUN / "metrics.jsonl").read_bytes()
    assert main(train_arguments(files, RUN, 3)) == 1
    assert "contains a file named 'checkpoints'" in one_line(capsys)
    assert (files / RUN / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("what", ["optimizer", "memory", "weights"])
def test_nothing_that_is_not_finite_becomes_a_checkpoint(files, what, monkeypatch, capsys):
    from block_recurrent.train.loop import Trainer

    one_step = Trainer.one_step

    def poisoned(self, reporter, stop):
        done = one_step(self, reporter, stop)
        snapshot = self.state
        if what == "optimizer":
            next(iter(snapshot.optimizer.state.values()))["momentum"].fill_(torch.inf)
        elif what == "memory":
            snapshot.memories[0].layers[0].keys.fill_(torch.nan)
        else:
            next(snapshot.model.parameters()).data.fill_(torch.nan)
        return done

    monkeypatch.setattr(Trainer, "one_step", poisoned)
    monkeypatch.setattr(Trainer, "_evaluates", lambda self, is_last: False)
    before = [path.name for path in list_checkpoints(files / RUN)]
    assert main(train_arguments(files, RUN, 4)) == 1
    error = one_line(capsys)  # of the save, which a thread does, or of the next step
    assert "not finite" in error or "is nan" in error
    assert [path.name for path in list_checkpoints(files / RUN)] == before


def test_there_is_a_checkpoint_before_the_first_validation(files, monkeypatch, capsys):
    from block_recurrent.train.validation import Validator

    def crash(self, module, progress):
        raise CheckpointError("validation crashed")

    shutil.rmtree(files / RUN)
    monkeypatch.setattr(Validator, "__call__", crash)
    arguments = [*train_arguments(files, RUN), "--set", "train.save_every=0", "--set", "eval.every=1"]
    assert main(arguments) == 1
    found, _ = find_checkpoint(files / RUN)
    assert found is not None
    assert found.step == 1
    monkeypatch.undo()
    assert main(arguments) == 0
    assert [(line["step"], line["split"]) for line in read_metrics(files / RUN)] == _LINES


_LINES = [(1, "train"), (1, "validation"), (2, "train"), (2, "validation")]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_run_killed_at_a_validation_makes_it_again(files, step, is_written, monkeypatch):
    """Between the checkpoint before it and the one after it, with and without the line of metrics."""
    from block_recurrent.train.state import TrainingState

    save = TrainingState.save

    def killed(self, run, bits, keep):
        if self.counters.step == step and is_written == (bits is not None):
            if not is_written:
                save(self, run, bits, keep)
            raise CheckpointError("killed")
        return save(self, run, bits, keep)

    shutil.rmtree(files / RUN)
    arguments = [*train_arguments(files, RUN), "--set", "train.save_every=0", "--set", "eval.every=1"]
    assert main([*arguments, "--steps", "1"] if step == 2 else ["presets"]) == 0  # resumed, it saves before validating
    monkeypatch.setattr(TrainingState, "save", killed)
    assert main(arguments) == 1
    monkeypatch.undo()
    assert main(arguments) == 0
    assert [(line["step"], line["split"]) for line in read_metrics(files / RUN)] == _LINES
    found, _ = find_checkpoint(files / RUN, "best")
    assert found is not None
    assert found.validation_bits == min(line["bits_per_token"] for line in read_metrics(files / RUN)[1::2])


def test_an_edited_configuration_is_found_and_named(files, capsys):
    path = files / RUN / "config.toml"
    path.write_text(path.read_text().replace("learning_rate = 1.0", "learning_rate = 2.0"))
    for arguments in (["score", str(files / RUN), str(files / "text.txt")], ["train", "--out", str(files / RUN)]):
        assert main(arguments) == 2
        assert "config.toml' was edited after it was written" in one_line(capsys)
    assert main(train_arguments(files, RUN, 3)) == 2
    copy = files / "copy.toml"
    shutil.copy(path, copy)
    assert main(["train", "--config", str(copy), "--out", str(files / "another"), "--steps", "1"]) == 0


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_tokenizer_is_found(files, place, capsys):
    run, path = files / SUBWORDS, files / SUBWORDS / "tokenizer.model"
    whole = path.read_bytes()
    flip(path, int(place * len(whole)), 1)
    for arguments in (
        ["score", str(run), str(files / "text.txt")],
        ["write", str(run), "--tokens", "3"],
        ["export", str(run), "--out", str(files / "model.safetensors")],
    ):
        assert main(arguments) == 1
        assert "the tokenizer of" in one_line(capsys)
    assert main(["train", "--out", str(run), "--steps", "3"]) == 0
    assert path.read_bytes() == whole, "training writes the one of its data, whose hash it has checked"


@pytest.mark.parametrize("name", ["box", SUBWORDS, f"{SUBWORDS}/checkpoints/step-00000002"])
def test_no_data_is_prepared_with_a_flipped_tokenizer(name, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    prepare = ["data", "prepare", "books", "--tokenizer", name, "--out"]
    assert main([*prepare, "first"]) == 0
    path = Path(name.partition("/")[0], "tokenizer.model")
    flip(path, path.stat().st_size - 1, 1)
    assert main([*prepare, "second"]) == 1
    assert "the tokenizer of" in one_line(capsys)
    assert not Path("second").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "config.toml"])
def test_nothing_is_written_through_a_link_of_a_run(name, files, capsys):
    mine = files / "mine"
    (files / RUN / name).rename(mine)
    (files / RUN / name).symlink_to(mine)
    before = mine.read_bytes()
    assert main(train_arguments(files, RUN, 3)) == 1
    assert f"contains '{name}', which is not a regular file" in one_line(capsys)
    assert mine.read_bytes() == before


@pytest.mark.parametrize("change", [{"step": 7}, {"facts": {"world": 0}}, {"facts": {"world": 10**15}}])
def test_a_state_of_another_step_or_of_no_number_of_processes(change, files, capsys):
    for path in list_checkpoints(files / RUN):
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(state | change))
        reseal(path)
    assert main(train_arguments(files, RUN, 3)) == 1
    assert "can't be resumed" in one_line(capsys)


def test_a_random_state_that_is_none_is_refused(files, capsys):
    for path in list_checkpoints(files / RUN):
        save_file({"cpu": torch.zeros(3)}, path / "random-00000-of-00001.safetensors")
        reseal(path)
    assert main(train_arguments(files, RUN, 3)) == 1
    assert "can't be resumed: its random state is not one of torch's" in one_line(capsys)


def test_white_space_of_another_kind_in_a_header_is_found(files):
    path = files / f"{RUN}.memory"
    tensors, _ = read_tensors(path)
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:end].rstrip(b" ") + b" " * 8
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])
    assert read_tensors(path)[0].keys() == tensors.keys()
    flip(path, 8 + len(header) - 1, ord(" ") ^ ord("\t"))
    with pytest.raises(FileFormatError, match="its header was changed"):
        read_memory_file(path)


def test_a_token_outside_the_vocabulary_is_named_with_its_file_and_document(files, capsys):
    manifest = json.loads((files / "pieces" / "manifest.json").read_text())
    del manifest["sha256"]
    path = files / "pieces" / "test.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 60_000
    tokens.tofile(path)
    first = next(document for document in manifest["documents"] if document["split"] == "test")
    mine = tokens[first["offset"] : first["offset"] + first["tokens"]]
    first["tokens_sha256"] = hashlib.sha256(mine.tobytes()).hexdigest()
    (files / "pieces" / "manifest.json").write_text(door.seal_json(json.dumps(manifest)))
    assert main(["eval", str(files / SUBWORDS), "--data", str(files / "pieces")]) == 1
    assert f"test.bin' is damaged: the tokens of '{first['name']}'" in one_line(capsys)


def test_a_run_resumes_by_its_folder_alone(files, capsys):
    assert main(["train", "--out", str(files / RUN), "--steps", "3"]) == 0
    assert list_checkpoints(files / RUN)[-1].name == "step-00000003"
    assert main(["train", "--out", str(files / RUN), "--steps", "1"]) == 0
    assert "nothing to do: the run is at step 3, and --steps is 1" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["data/\N{GRINNING FACE}", 'a "quoted" \\ path', "x\x7fy\ttab"])
def test_any_path_can_be_written_and_read_again(path, tmp_path):
    config = RunConfig.from_dict({"data": {"path": path}, "model": {"window": 8, "segment": 16}})
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert RunConfig.from_dict(read_toml(tmp_path / "config.toml", sealed=True)) == config


def test_a_path_that_is_not_utf8_is_refused_before_training(files, capsys):
    odd = files / os.fsdecode(b"\xff")
    shutil.copytree(files / "data", odd)
    assert main([*train_arguments(files, RUN, 1), "--data", str(odd), "--out", str(files / "new")]) == 2
    assert "UTF-8" in one_line(capsys)
    assert main([*train_arguments(files, RUN, 1), "--out", str(odd / "run")]) == 1
    assert "is not UTF-8" in one_line(capsys)
    assert not (odd / "run").exists()


@pytest.mark.parametrize("setting", ["schedule.learning_rate=inf", "train.clip=inf", "schedule.learning_rate=nan"])
def test_a_number_that_is_not_finite_is_no_setting(files, setting, capsys):
    assert main([*train_arguments(files, RUN, 3), "--out", str(files / "new"), "--set", setting]) == 2
    assert setting.partition("=")[0] in one_line(capsys)
    assert not (files / "new").exists()


def test_what_can_not_be_written_is_refused():
    with pytest.raises(ConfigError, match="finite"):
        TrainConfig(clip=float("inf"))
    with pytest.raises(ConfigError, match="zero byte"):
        RunConfig.from_dict({"data": {"path": "a\0b"}})
    with pytest.raises(ConfigError, match="UTF-8"):
        RunConfig.from_dict({"data": {"path": "\udcff"}})


def test_a_folder_of_other_files_is_no_run(files, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    arguments = [*train_arguments(files, RUN), "--out", str(tmp_path / "mine")]
    assert main(arguments) == 1
    assert "contains 'thesis.txt' and is not a run folder" in one_line(capsys)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("options", [["--resume", "never"], ["--config", "my.toml"]])
def test_the_configuration_of_another_program_is_kept(files, options, monkeypatch, capsys):
    monkeypatch.chdir(files)
    Path("my.toml").write_text('system = "slide"\nsize = "micro"\n')
    for name in ("config.toml", "tokenizer.model", "metrics.jsonl"):
        Path("mine").mkdir(exist_ok=True)
        Path("mine", name).write_text("[server]\nport = 80\n")
        assert main([*train_arguments(Path(), "slide"), "--out", "mine", *options]) == 1
        assert "is not a run folder" in one_line(capsys)
        assert Path("mine", name).read_text() == "[server]\nport = 80\n"
        Path("mine", name).unlink()


@pytest.mark.parametrize("options", [["--init-from", "box"], ["--config", "box/config.toml"], ["--resume", "never"]])
def test_a_packed_model_is_no_run_to_train_in(options, files, monkeypatch, capsys):
    """Its config.toml is that of a run."""
    monkeypatch.chdir(files)
    before = {path: path.read_bytes() for path in Path("box").iterdir()}
    arguments = ["train", "--data", "pieces", "--out", "box", "--steps", "1", *options]
    arguments += ["--system", RUN, "--size", "micro"] if "never" in options else []
    assert main(arguments) == 1
    assert "--out 'box' contains 'README.md' and is not a run folder" in one_line(capsys)
    assert {path: path.read_bytes() for path in Path("box").iterdir()} == before


def test_a_copy_of_a_configuration_is_kept(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    Path("mine").mkdir()
    Path("mine/config.toml").write_text(Path(RUN, "config.toml").read_text().replace("seed = 0", "seed = 1"))
    before = Path("mine/config.toml").read_bytes()
    assert main(["train", "--config", "mine/config.toml", "--out", "mine", "--steps", "1"]) == 1
    assert "is not a run folder" in one_line(capsys)
    assert Path("mine/config.toml").read_bytes() == before


def test_a_run_that_was_killed_before_it_had_a_configuration_can_start(files, capsys):
    (files / "new").mkdir()
    (files / "new" / ".config.toml.0123.part").write_text("sys")
    assert main([*train_arguments(files, RUN, 1), "--out", str(files / "new")]) == 0


def test_a_saved_run_does_not_replace_a_tokenizer(files, tmp_path):
    (tmp_path / "tokenizer.model").write_text("mine")
    with pytest.raises(CheckpointError, match="already contains a run"):
        save_run(load_run(files / RUN).model, "bytes", tmp_path)
    assert (tmp_path / "tokenizer.model").read_text() == "mine"


def test_a_damaged_line_of_metrics_costs_no_other(tmp_path):
    lines = [b'{"step": 1}\n', b'{"st\xffp": 2}\n', b'{"step": 3}\n', b'{"step": 4}\n', b'{"step"']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    cut_back(tmp_path / "metrics.jsonl", 3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:3])
    with pytest.raises(FileFormatError, match="can't be read"):
        read_metrics(tmp_path)


def test_a_pipe_is_no_manifest(files, capsys):
    for path, arguments in {
        files / "data" / "manifest.json": ["data", "info", str(files / "data")],
        files / "pieces" / "tokenizer.model": ["data", "verify", str(files / "pieces")],
        list_checkpoints(files / SUBWORDS)[-1] / "manifest.json": [
            "score",
            str(files / SUBWORDS),
            str(files / "text.txt"),
        ],
    }.items():
        path.unlink()
        os.mkfifo(path)
        assert main(arguments) in (1, 2)
        assert "is not a regular file" in one_line(capsys)


def test_a_model_that_no_machine_holds_leaves_nothing_behind(files, tmp_path, capsys):
    arguments = [*train_arguments(files, RUN), "--out", str(tmp_path / "huge"), "--set", "model.d_model=100000000"]
    assert main(arguments) == 2
    assert "the weights alone need" in one_line(capsys)
    assert not (tmp_path / "huge").exists()


def test_no_run_changes_where_it_started(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    before = Path(RUN, "config.toml").read_bytes()
    for source in (RUN, str(files / RUN), f"{RUN}/checkpoints/step-00000001", "./box", SUBWORDS):
        tokens = ["--data", "data" if RUN in source else "pieces"]
        assert main(["train", "--out", RUN, "--init-from", source, *tokens]) in (1, 2)
        assert Path(RUN, "config.toml").read_bytes() == before
        one_line(capsys)
    shutil.copytree(RUN, "twin")
    assert main(["train", "--out", RUN, "--init-from", "twin", "--steps", "3"]) == 2
    assert f"'{RUN}' did not start from 'twin': omit --init-from to resume the run" in one_line(capsys)
    assert main(["train", "--out", "third", "--data", "data", "--init-from", RUN, "--steps", "1"]) == 0
    assert main(["train", "--out", "third", "--init-from", f"./{RUN}", "--steps", "2"]) == 0, "the same run"
    assert RunConfig.from_dict(read_toml("third/config.toml")).train.init_from == RUN
    shutil.rmtree("third/checkpoints")
    before = Path("third/config.toml").read_bytes()
    assert main(["train", "--out", "third", "--init-from", "third"]) == 2
    assert "'third' did not start from 'third'" in capsys.readouterr().err
    assert Path("third/config.toml").read_bytes() == before


@pytest.mark.parametrize("mask", [1, 0x80])
def test_a_flipped_token_is_found_by_training_and_scoring(files, mask, capsys):
    for split, arguments in {
        "train": train_arguments(files, RUN, 4),
        "test": ["eval", str(files / RUN), "--data", str(files / "data")],
    }.items():
        for document in Corpus(files / "data").documents(split):
            flip(files / "data" / f"{split}.bin", 2 * document.offset + 100, mask)
        assert main(arguments) == 1
        error = one_line(capsys)
        assert f"{split}.bin' is damaged: the tokens of '{split}/" in error


def test_a_stream_reads_each_token_file_once_for_its_hash(files, monkeypatch):
    from block_recurrent.data.corpus import corpus as module

    calls = []
    whole = module._is_whole

    def counted(document, *args):
        calls.append(document.name)
        return whole(document, *args)

    monkeypatch.setattr(module, "_is_whole", counted)
    corpus = Corpus(files / "data")
    for _ in range(2):
        list(LaneStream(corpus, "train", 2, 64, one_pass=True))
    assert sorted(calls) == [f"train/{number}.txt" for number in range(4)]


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_a_small_folder_gets_every_split_or_a_warning(count, tmp_path, capsys):
    books = tmp_path / "books"
    books.mkdir()
    for number in range(count):
        (books / f"book-{number}.txt").write_text(f"text {number}\n" * 20)
    assert main(["data", "prepare", str(books), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    corpus = Corpus(tmp_path / "out")
    for split in ("train", "validation", "test"):
        assert corpus.documents(split) or f"warning: split '{split}' has no documents" in said
    if count >= 3:
        assert "warning" not in said


def test_a_name_with_half_a_character_is_prepared(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"name": "half \\ud83d", "text": "one"}\n{"name": "b", "text": "two"}\n')
    assert main(["data", "prepare", str(tmp_path / "records.jsonl"), "--out", str(tmp_path / "out")]) == 0
    assert len(Corpus(tmp_path / "out").manifest["documents"]) == 2


def test_a_pipe_is_no_source(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["data", "prepare", str(tmp_path / "pipe"), "--out", str(tmp_path / "out")]) == 2
    assert "is not a regular file" in one_line(capsys)
    with pytest.raises(BlockRecurrentError):
        read_memory_file(tmp_path / "pipe")


def test_exported_files_can_be_read_by_all_and_have_a_card(files):
    assert {path.stat().st_mode & 0o777 for path in (files / "hf").iterdir()} == {0o644}
    card = (files / "hf" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert RUN in card


def test_an_export_that_the_disk_does_not_hold(files, monkeypatch, capsys):
    from safetensors import SafetensorError

    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM

    def full(self, folder):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(BlockRecurrentForCausalLM, "save_pretrained", full)
    assert main(["export", str(files / RUN), str(files / "new")]) == 1
    assert "No space left on device" in one_line(capsys)
    assert not (files / "new").exists()


@pytest.mark.parametrize("poisoned", [True, False])
def test_an_export_without_a_weight_or_with_one_that_is_not_finite_is_not_loaded(poisoned, files):
    from block_recurrent.hub.manifest import NAME, write_export_manifest
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM

    path = files / "hf" / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.hidden.weight"
    weights[name] *= torch.nan
    if not poisoned:
        del weights[name]
    save_file(weights, path, {"format": "pt"})
    (files / "hf" / NAME).unlink()
    write_export_manifest(files / "hf")
    with pytest.raises(FileFormatError, match=f"'{name}' (has values that are not finite|is missing)"):
        BlockRecurrentForCausalLM.from_pretrained(files / "hf")


def test_a_changed_export_is_not_loaded(files):
    from block_recurrent.hub.modeling import BlockRecurrentForCausalLM

    folder = files / "hf"
    with open(folder / "README.md", "a") as card:
        card.write("Trained on two sentences.")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("")
    with pytest.warns(UserWarning, match=r"README\.md, was changed after the export"):
        BlockRecurrentForCausalLM.from_pretrained(folder)
    planted = folder / "adapter_config.json"
    planted.write_text("{}")
    with pytest.raises(FileFormatError, match=r"does not list adapter_config\.json"):
        BlockRecurrentForCausalLM.from_pretrained(folder)
    planted.unlink()
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1, 1)
    with pytest.raises(FileFormatError, match=r"model\.safetensors is missing, or its hash differs"):
        BlockRecurrentForCausalLM.from_pretrained(folder)
