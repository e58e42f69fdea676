"""8-bit weights: close to the model, one function for reading and writing, and a model of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from block_recurrent import Session
from block_recurrent.data import Tokenizer
from block_recurrent.errors import ConfigError
from block_recurrent.generate.int8 import FEW_ROWS, Int8Linear, quantize
from block_recurrent.presets import SYSTEMS


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_loss_is_close(system: str, make_reader: Callable) -> None:
    model = make_reader(system)
    tokens = torch.randint(257, (2, 150), generator=torch.Generator().manual_seed(1))
    small = quantize(model)
    with torch.no_grad():
        exact, rounded = (m.loss(tokens[:, :-1], tokens[:, 1:]) for m in (model, small))
        logits, _ = small(tokens[:, :-1])
    assert rounded.sum.item() == pytest.approx(exact.sum.item(), rel=5e-3)
    assert rounded.sum.item() != exact.sum.item()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert torch.allclose(rounded.per_token.flatten(), expected, atol=1e-5)


def test_every_row_has_its_scale() -> None:
    weight = torch.randn(40, 30) * torch.logspace(-4, 4, 40)[:, None]
    weight[7] = 0
    small = Int8Linear(weight)
    back = small.weight[:, :30].float() * small.scale.float()[:, None]
    largest = weight.abs().amax(1)
    # Half a step of rounding; the scale, in bfloat16, may be up to 1/256 too small for the largest entry.
    assert ((back - weight).abs().amax(1) <= largest * (0.5 / 127 + 1 / 256)).all()


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1, 200])
@pytest.mark.parametrize(("width", "out"), [(48, 96), (10, 7), (33, 129)])
def test_few_and_many_rows_give_the_same_numbers(rows: int, width: int, out: int) -> None:
    small = Int8Linear(torch.randn(out, width))
    x = torch.randn(1, rows, width)
    exact = x.bfloat16().double() @ (small.weight[:, :width].double() * small.scale.double()[:, None]).T
    # Sums are float32, and the outcome is rounded to bfloat16.
    assert torch.allclose(small(x).double(), exact, rtol=2**-8, atol=1e-4)


def test_it_is_another_model_with_memories_of_its_own(make_reader: Callable, byte_tokenizer: Tokenizer) -> None:
    model, other = make_reader(seed=0), make_reader(seed=1)
    before = model.fingerprint()
    small = quantize(model)
    assert model.fingerprint() == before
    assert len({before, small.fingerprint(), quantize(other).fingerprint()}) == 3
    assert quantize(model).fingerprint() == small.fingerprint()
    session = Session(small, byte_tokenizer)
    session.read("Hello")
    assert len(session.write_all(40, end_at_mark=False).tokens) == 40


def test_only_float32_on_a_cpu_can_be_quantized(make_reader: Callable) -> None:
    with pytest.raises(ConfigError, match="float64"):
        quantize(make_reader().double())


def test_the_weights_are_a_quarter_as_large(make_reader: Callable) -> None:
    model = make_reader("slide")
    small = quantize(model)
    bytes_of = {
        m: sum(p.numel() * p.element_size() for name, p in m.named_parameters() if "layers" in name)
        for m in (model, small)
    }
    assert bytes_of[small] < 0.35 * bytes_of[model]


def test_brt_eval_shows_its_loss(
    make_reader: Callable, make_run: Callable, byte_tokenizer: Tokenizer, text: Callable, tmp_path: Path
) -> None:
    import json

    from block_recurrent.cli.main import main
    from block_recurrent.data.prepare import PrepareSettings, prepare

    (tmp_path / "books" / "test").mkdir(parents=True)
    (tmp_path / "books" / "test" / "a.txt").write_bytes(text(80).encode())
    prepare(PrepareSettings((str(tmp_path / "books"),)), byte_tokenizer, tmp_path / "prepared")
    model = make_reader()
    run, scores = make_run(model), tmp_path / "scores.json"
    found = []
    for flags in ([], ["--int8"]):
        assert main(["eval", str(run), "--data", str(tmp_path / "prepared"), "--json", str(scores), *flags]) == 0
        found.append(json.loads(scores.read_text())["bits_per_token"])
    small = Session(quantize(model), byte_tokenizer).score(text(80))
    assert found[1] == pytest.approx(small.bits / small.tokens, rel=1e-3)
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=1e-2)
