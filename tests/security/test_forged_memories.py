"""Memory files with a valid hash and contents that do not fit their configuration are refused in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from block_recurrent.cli.main import main
from block_recurrent.errors import FileFormatError
from block_recurrent.inference.session_file import read_memory_file
from block_recurrent.inference.trail import FOLDER, collect, places_of
from tests.security.made import forge_memory

REC, MEMORIZING = "rec-fixed-skip", "memorizing"


def _tensor(name, change):
    return lambda header, tensors: tensors.__setitem__(name, change(tensors[name]))


def _header(**values):
    return lambda header, tensors: header.update(values)


def _config(**values):
    return lambda header, tensors: header["config"].update(values)


def _extra(**values):
    return lambda header, tensors: header["extra"].update(values)


FORGED = {
    "keys cut": (REC, _tensor("layers.0.keys", lambda x: x[:, :, :3])),
    "values cut": (REC, _tensor("layers.1.values", lambda x: x[:, :, :-1])),
    "keys of more heads": (REC, _tensor("layers.0.keys", lambda x: torch.cat([x, x], 1))),
    "keys of more lanes": (REC, _tensor("layers.0.keys", lambda x: torch.cat([x, x]))),
    "keys in one dimension": (REC, _tensor("layers.0.keys", torch.flatten)),
    "keys of another type": (REC, _tensor("layers.0.keys", torch.Tensor.double)),
    "keys of integers": (REC, _tensor("layers.0.keys", torch.Tensor.int)),
    "keys not finite": (REC, _tensor("layers.0.keys", lambda x: x / 0)),
    "state cut": (REC, _tensor("layers.1.state", lambda x: x[:, :-1])),
    "state missing": (REC, lambda header, tensors: tensors.pop("layers.1.state")),
    "tensor too many": (REC, lambda header, tensors: tensors.update(more=torch.zeros(3))),
    "memory cut": (MEMORIZING, _tensor("layers.1.recall_keys", lambda x: x[:, :, :5])),
    "window": (REC, _config(window=2**40, segment=2**40)),
    "window zero": (REC, _config(window=0)),
    "heads": (REC, _config(num_heads=2**70)),
    "layers": (REC, _config(num_layers=10**9)),
    "states": (REC, _config(num_states=10**12)),
    "unknown key": (REC, _config(lanes=3)),
    "config is a list": (REC, _header(config=[1])),
    "segment": (MEMORIZING, _config(segment=2**40)),
    "recall_counts empty": (MEMORIZING, _header(recall_counts={})),
    "recall_counts huge": (MEMORIZING, _header(recall_counts={"1": [10**12]}, recall_ends={"1": [10**12]})),
    "recall_counts negative": (MEMORIZING, _header(recall_counts={"1": [-5]})),
    "recall_counts a list": (MEMORIZING, _header(recall_counts={"1": [[3]]})),
    "recall_counts of other lanes": (MEMORIZING, _header(recall_counts={"1": [3, 3]})),
    "recall_counts of another layer": (MEMORIZING, _header(recall_counts={"0": [3]})),
    "recall_ends before counts": (MEMORIZING, _header(recall_ends={"1": [0]})),
    "recall_ends huge": (MEMORIZING, _header(recall_ends={"1": [2**70]})),
    "recall in a model without": (REC, _header(recall_counts={"0": [3]}, recall_ends={"0": [3]})),
    "tokens_read huge": (REC, _header(tokens_read=[2**70])),
    "tokens_read negative": (REC, _header(tokens_read=[-3])),
    "tokens_read a fraction": (REC, _header(tokens_read=[1.5])),
    "tokens_read true": (REC, _header(tokens_read=[True])),
    "tokens_read empty": (REC, _header(tokens_read=[])),
    "tokens_read a text": (REC, _header(tokens_read="255")),
    "fingerprint missing": (REC, lambda header, tensors: header.pop("fingerprint")),
    "fingerprint null": (REC, _header(fingerprint=None)),
    "fingerprint a number": (REC, _header(fingerprint=7)),
    "pending outside": (REC, _extra(pending=257)),
    "pending negative": (REC, _extra(pending=-1)),
    "recent outside": (REC, _extra(recent=[300])),
    "recent too long": (REC, _extra(recent=[1] * 513)),
    "held no hex": (REC, _extra(held="zz")),
    "text length huge": (REC, _extra(text={"chain": "", "tail": "", "length": 2**70})),
    "text length wrong": (REC, _extra(text={"chain": "00" * 32, "tail": "", "length": 5})),
    "text a list": (REC, _extra(text=[])),
    "text_hash wrong": (REC, _extra(text_hash="0" * 64)),
    "model_name a number": (REC, _extra(model_name=3)),
    "extra missing": (REC, lambda header, tensors: header.pop("extra")),
    "header deep": (REC, _header(config={"window": [[[[]]]]})),
}


@pytest.mark.parametrize("case", FORGED)
def test_it_is_refused_in_one_line(case, made, tmp_path, capsys):
    system, change = FORGED[case]
    forged = forge_memory(made / f"{system}.memory", tmp_path / "forged.memory", change)
    with pytest.raises(FileFormatError):
        read_memory_file(forged)
    assert main(["score", str(made / system), str(made / "text.txt"), "--memory", str(forged)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("brt: error: ")
    assert error.count("\n") == 1


def test_an_unchanged_one_is_accepted(made, tmp_path):
    for system in (REC, MEMORIZING):
        forged = forge_memory(made / f"{system}.memory", tmp_path / "same.memory", lambda header, tensors: None)
        assert read_memory_file(forged).tokens == read_memory_file(made / f"{system}.memory").tokens


@pytest.mark.parametrize("trail", [3, [[1]], [["a", "b", None]], [[float("inf"), "b", None]], [[1, "../x", None]]])
def test_a_trail_that_is_none_is_refused_in_one_line(trail, made, tmp_path, capsys):
    change = _extra(notes={"trail": trail})
    forged = forge_memory(made / f"{REC}.memory", tmp_path / "forged.memory", change)
    assert main(["memory", "rewind", str(forged), "--to", "1", "--overwrite"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("brt: error: ")
    assert error.count("\n") == 1


def test_the_checkpoints_of_a_damaged_memory_are_kept(made, tmp_path):
    arguments = ["read", str(made / REC), str(made / "text.txt"), "--trail", "1", "--trail-every", "1"]
    for name in ("a.memory", "b.memory"):
        assert main([*arguments, "--memory", str(tmp_path / name)]) == 0
    (place,) = places_of(tmp_path / "b.memory")
    (tmp_path / "a.memory").write_bytes((tmp_path / "a.memory").read_bytes()[:100])
    collect(tmp_path)
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    (tmp_path / "a.memory").unlink()
    collect(tmp_path)
    assert [path.stem for path in (tmp_path / FOLDER).iterdir()] == [place.id]


def test_a_memory_cut_in_python_is_refused_before_a_kernel_sees_it():
    """In a process of its own: it used to end in a segmentation fault."""
    code = """
from dataclasses import replace
import torch
from block_recurrent import BlockRecurrentLM, preset
model = BlockRecurrentLM(preset("slide", "tiny", vocab_size=64))
x = torch.zeros(1, 64, dtype=torch.int64)
memory = model.loss(x, x).memory
cut = tuple(replace(l, keys=l.keys[:, :, :3], values=l.values[:, :, :3]) for l in memory.layers)
try:
    model.loss(x, x, replace(memory, layers=cut)).sum.backward()
except (ValueError, RuntimeError) as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
