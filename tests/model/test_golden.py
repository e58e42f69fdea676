"""The authors' numbers: every golden file through our importer, and the program that checks a folder of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from block_recurrent.model.oracle import bucket
from block_recurrent.nn.position import bucket_of

from ..golden import check

GOLDEN = Path(__file__).parents[1] / "golden"

NOT_MODELS = ("adafactor", "t5_buckets")


def model_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.safetensors")) if path.stem not in NOT_MODELS]


def test_there_is_a_golden_file_for_every_kind_of_model():
    names = {path.stem for path in model_files(GOLDEN)}
    gates = {f"rec_{gate}_{kind}" for gate in ("fixed", "lstm") for kind in ("dual", "single", "skip")}
    assert names >= gates | {f"paper_{name}" for name in gates} | {"xl", "slide", "memorizing", "rec_two_layers"}


@pytest.mark.parametrize("path", model_files(GOLDEN), ids=lambda path: path.stem)
def test_logits_states_and_gradients(path):
    errors = check.check(path)
    assert errors is not None
    assert max(errors) <= check.LIMIT, errors


@pytest.mark.parametrize("path", model_files(GOLDEN), ids=lambda path: path.stem)
def test_in_float64_the_rest_is_the_authors_rounding(path):
    errors = check.check(path, torch.float64)
    assert errors is not None
    assert max(errors) <= check.LIMIT, errors


def test_the_shared_golden_files(shared_folder):
    files = model_files(shared_folder / "golden")
    if not files:
        pytest.skip("the shared folder has no golden files")
    for path in files:
        errors = check.check(path)
        assert errors is not None, path.stem
        assert max(errors) <= check.LIMIT, (path.stem, errors)


@pytest.mark.parametrize("name", NOT_MODELS)
def test_files_that_are_not_models_are_passed_over(name):
    assert check.check(GOLDEN / f"{name}.safetensors") is None


def test_position_buckets():
    golden = load_file(GOLDEN / "t5_buckets.safetensors")
    for distance, expected in zip(golden["distance"].tolist(), golden["bucket"].tolist(), strict=True):
        assert bucket_of(distance) == expected, distance
        assert bucket(distance) == expected, distance


# --- the program ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two cases; `change(name, tensor)` spoils one."""
    for name in ("xl", "rec_fixed_skip"):
        (tmp_path / f"{name}.safetensors").write_bytes((GOLDEN / f"{name}.safetensors").read_bytes())
    return tmp_path


def spoil(path: Path, change) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def test_all_good_is_zero(folder, capsys):
    assert check.main(str(folder)) == 0
    out = capsys.readouterr().out
    assert "rec_fixed_skip" in out
    assert "2 cases, 0 failed, limit 2e-05" in out


@pytest.mark.parametrize(
    "name", ["logits/0", "logits/2", "loss/1", "state/1/", "grad/embed/embedding", "grad/transformer"]
)
def test_a_wrong_number_is_one(folder, capsys, name):
    """An error of 1e-4 in any one number of what is compared."""

    def change(tensors):
        found = next(key for key in sorted(tensors) if key.startswith(name))
        step = 1e-4 * (tensors[found].abs().max() if name.startswith("grad") else 1)
        tensors[found].view(-1)[0] += step

    spoil(folder / "rec_fixed_skip.safetensors", change)
    assert check.main(str(folder)) == 1
    assert "2 cases, 1 failed" in capsys.readouterr().out


def test_a_number_that_is_none_is_one(folder):
    spoil(folder / "xl.safetensors", lambda tensors: tensors["logits/1"].view(-1)[3].fill_(float("nan")))
    assert check.main(str(folder)) == 1


def test_a_case_that_can_not_be_built_is_one(folder, capsys):
    spoil(folder / "xl.safetensors", lambda tensors: tensors.pop("param/embed/embedding"))
    assert check.main(str(folder)) == 1
    assert "can't be built: ConfigError: these weights don't match the configuration: missing embed/embedding" in (
        capsys.readouterr().out
    )


def test_a_damaged_file_is_one(folder):
    (folder / "xl.safetensors").write_bytes(b"nothing")
    assert check.main(str(folder)) == 1


def test_an_empty_folder_is_one(tmp_path, capsys):
    assert check.main(str(tmp_path)) == 1
    assert "there is no golden file" in capsys.readouterr().err


def test_a_folder_without_models_is_one(tmp_path):
    (tmp_path / "t5.safetensors").write_bytes((GOLDEN / "t5_buckets.safetensors").read_bytes())
    assert check.main(str(tmp_path)) == 1
