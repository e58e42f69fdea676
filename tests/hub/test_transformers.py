"""transformers, for real: an exported folder loads, writes what a session writes, and is never silently wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

from block_recurrent import Session
from block_recurrent.cli.main import main
from block_recurrent.data import Tokenizer
from block_recurrent.errors import USAGE, BlockRecurrentError, InputError, MemoryMismatchError
from block_recurrent.hub import register
from block_recurrent.hub.cache import BlockRecurrentCache
from block_recurrent.presets import SYSTEMS

register()  # pytest may have imported our package before theirs

# A penalty makes greedy text of an untrained model wander instead of repeating one token.
GREEDY = {"do_sample": False, "repetition_penalty": 8.0, "suppress_tokens": [256]}
PROMPTS = ["It was the best of times", "x", "Call me Ishmael. " * 4]


@pytest.fixture
def loaded(exported: Callable[..., Path]) -> Callable[..., tuple[Any, Any]]:
    """`loaded(system)`: model and tokenizer of an exported folder, as a user loads them."""

    def load(system: str = "rec-fixed-skip", tokenizer: Tokenizer | None = None) -> tuple[Any, Any]:
        folder = exported(system, tokenizer)
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    return load


def by_session(model: Any, tokenizer: Any, prompt: str, tokens: int = 20) -> list[int]:
    session = Session(model.model, tokenizer.tokenizer)
    session.read(prompt)
    return list(session.write_all(tokens, temperature=0, repetition_penalty=8.0, end_at_mark=False).tokens)


def new_tokens(output: torch.Tensor, inputs: dict[str, torch.Tensor], mark: int) -> list[list[int]]:
    """What was generated in each row, up to its end."""
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(mark)] if mark in row else row for row in rows]


@pytest.mark.parametrize("system", SYSTEMS)
def test_greedy_text_is_that_of_a_session(system: str, loaded: Callable) -> None:
    model, tokenizer = loaded(system)
    inputs = tokenizer(PROMPTS[2], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, **GREEDY)
    expected = by_session(model, tokenizer, PROMPTS[2])
    assert len(set(expected)) > 3
    assert new_tokens(output, inputs, 256)[0] == expected


@pytest.mark.parametrize("system", ["rec-lstm-dual", "feedback-fixed-skip", "memorizing", "xl-2w"])
def test_left_padded_batches_give_each_what_it_gets_alone(system: str, loaded: Callable) -> None:
    model, tokenizer = loaded(system)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1].sum() == 2, "a short text, padded"
    together = new_tokens(model.generate(**batch, max_new_tokens=15, **GREEDY), batch, 256)
    without_mask = model.generate(batch["input_ids"], max_new_tokens=15, **GREEDY)
    for row, prompt in enumerate(PROMPTS):
        alone = tokenizer(prompt, return_tensors="pt")
        expected = new_tokens(model.generate(**alone, max_new_tokens=15, **GREEDY), alone, 256)[0]
        assert together[row] == expected
        assert new_tokens(without_mask, batch, 256)[row] == expected, "padding is marks, and a mark starts a document"


def test_forward_gives_the_models_logits_and_zeros_at_padding(loaded: Callable) -> None:
    model, tokenizer = loaded("rec-fixed-single")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model(**batch)
        last = model(**batch, logits_to_keep=1)
        three = model(**batch, logits_to_keep=3)
        for row in range(3):
            real = batch["attention_mask"][row].bool()
            expected, memory = model.model(batch["input_ids"][row][real][None])
            assert torch.allclose(output.logits[row, real], expected[0], atol=1e-5)
            assert (output.logits[row, ~real] == 0).all()
            assert torch.allclose(last.logits[row], expected[0, -1:], atol=1e-5)
            kept = min(3, int(real.sum()))
            assert torch.allclose(three.logits[row, -kept:], expected[0, -kept:], atol=1e-5)
            for outputs in (output, last, three):
                assert outputs.past_key_values.memory.select([row]).equals(memory, 1e-5)


def test_right_padding_is_fine_for_losses_and_refused_for_writing(loaded: Callable) -> None:
    model, tokenizer = loaded()
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = model(**batch, labels=labels).loss
        sums, count = 0.0, 0
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            sums += model.model.loss(ids[:, :-1], ids[:, 1:]).sum.item()
            count += ids.shape[1] - 1
    assert loss.item() == pytest.approx(sums / count, rel=1e-5)
    with pytest.raises(InputError, match="pad on the left"):
        model.generate(**batch, max_new_tokens=3)


def test_two_documents_in_one_row_do_not_see_each_other(loaded: Callable) -> None:
    model, tokenizer = loaded("rec-lstm-skip")
    first, second = (tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS[:2])
    with torch.no_grad():
        both = model(torch.cat([first, second], dim=1)).logits
        apart = [model(ids).logits for ids in (first, second)]
    assert torch.allclose(both, torch.cat(apart, dim=1), atol=1e-5)


@pytest.mark.parametrize("system", ["rec-fixed-skip", "feedback-lstm-single", "memorizing"])
def test_generation_continues_a_book_that_was_read_in_chunks(system: str, loaded: Callable) -> None:
    model, tokenizer = loaded(system)
    book = "The sea was calm, and the captain slept. " * 20
    ids = tokenizer(book, return_tensors="pt")["input_ids"]
    whole = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
    memory = None
    for chunk in ids[:, :-5].split([1, 100, 37, ids.shape[1] - 143], dim=1):
        memory = model.read(chunk, memory)
    assert memory.tokens_read == [ids.shape[1] - 5]
    assert memory.get_seq_length() == 0
    for _ in range(2):
        carried = model.generate(ids[:, -5:], past_key_values=memory, max_new_tokens=20, do_sample=False)
        assert carried[0, 5:].tolist() == whole, "and the memory can be used again"
    plain = model.generate(ids[:, -5:], past_key_values=memory.memory, max_new_tokens=20, do_sample=False)
    assert plain[0, 5:].tolist() == whole
    outputs = model.generate(
        ids[:, -5:], past_key_values=memory, max_new_tokens=7, do_sample=False, return_dict_in_generate=True
    )
    rest = model.generate(
        outputs.sequences[:, -1:], past_key_values=outputs.past_key_values, max_new_tokens=13, do_sample=False
    )
    assert [*outputs.sequences[0, 5:].tolist(), *rest[0, 1:].tolist()] == whole


def test_a_memory_with_beams_samples_and_several_prompts(loaded: Callable) -> None:
    model, tokenizer = loaded()
    ids = tokenizer("The sea was calm. " * 9, return_tensors="pt")["input_ids"]
    memory = model.read(ids[:, :-4])
    expected = model.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    found = model.generate(ids[:, -4:], past_key_values=memory, num_beams=3, max_new_tokens=8, do_sample=False)[0, 4:]
    assert torch.equal(found, expected)
    samples = model.generate(
        ids[:, -4:], past_key_values=memory, num_return_sequences=3, do_sample=True, max_new_tokens=8
    )
    assert samples.shape[0] == 3
    other = torch.cat([ids[:, -4:], ids[:, :4] % 256], dim=0)
    both = model.generate(other, past_key_values=memory, max_new_tokens=8, do_sample=False)
    alone = model.generate(ids[:, -4:], past_key_values=memory, max_new_tokens=8, do_sample=False)
    assert torch.equal(both[0], alone[0])


@pytest.mark.parametrize("use_cache", [True, False])
def test_without_a_cache_it_is_slower_and_the_same(use_cache: bool, loaded: Callable) -> None:
    model, tokenizer = loaded()
    inputs = tokenizer(PROMPTS[0], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, use_cache=use_cache, do_sample=False)
    session = Session(model.model, tokenizer.tokenizer)
    session.read(PROMPTS[0])
    assert new_tokens(output, inputs, 256)[0] == list(session.write_all(12, temperature=0).tokens)


def test_what_is_not_supported_is_refused(loaded: Callable) -> None:
    model, tokenizer = loaded()
    inputs = tokenizer("Hello there", return_tensors="pt")
    ids = inputs["input_ids"]
    memory = model.read(ids)
    with pytest.raises(InputError, match="begins with the document mark 256"):
        model.generate(**inputs, past_key_values=memory, max_new_tokens=3)
    with pytest.raises(InputError, match="begins with the document mark 256"):
        model(ids, past_key_values=memory)
    with pytest.raises(InputError, match="give at least the last token"):
        model.generate(past_key_values=memory, max_new_tokens=3)
    with pytest.raises(InputError, match="input_ids is empty"):
        model.generate(ids[:, :0], max_new_tokens=3)
    with pytest.raises(InputError, match="does not support inputs_embeds"):
        model(inputs_embeds=torch.zeros(1, 2, 48))
    with pytest.raises(InputError, match="not supported"):
        model(ids, output_attentions=True)
    with pytest.raises(InputError, match="not supported"):
        model(ids, output_hidden_states=True)
    with pytest.raises(InputError, match="whole number"):
        model(ids, logits_to_keep=torch.tensor([1]))
    with pytest.raises(InputError, match="zeros between ones"):
        model(ids, attention_mask=torch.tensor([[1, 0] * 6]))
    with pytest.raises(InputError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(1, 3))
    with pytest.raises(InputError, match="past_key_values is a tuple"):
        model(ids, past_key_values=())
    with pytest.raises(MemoryMismatchError, match="2 lanes, tokens has 3"):
        model(torch.ones(3, 2, dtype=torch.int64), past_key_values=memory.repeat(2))
    with pytest.raises(ValueError, match=r"[Aa]ssist"):
        model.generate(**inputs, assistant_model=model, max_new_tokens=3)
    assert issubclass(InputError, ValueError)


def test_another_models_memory_is_refused(exported: Callable, tmp_path: Path) -> None:
    one = AutoModelForCausalLM.from_pretrained(exported("rec-fixed-skip"))
    other = AutoModelForCausalLM.from_pretrained(exported("rec-fixed-dual"))
    memory = one.read(torch.tensor([[256, 5, 6]]))
    with pytest.raises(MemoryMismatchError):
        other(torch.tensor([[7]]), past_key_values=memory)
    memory.save(tmp_path / "a.memory")
    again = BlockRecurrentCache.load(tmp_path / "a.memory")
    a, b = (one(torch.tensor([[7]]), past_key_values=x).logits for x in (memory, again))
    assert torch.equal(a, b)


def test_pipeline_and_streamer(loaded: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loaded()
    written = pipeline("text-generation", model=model, tokenizer=tokenizer)
    one = written("Hello", max_new_tokens=6, do_sample=False)[0]["generated_text"]
    assert one.startswith("Hello")
    several = written(["Hello", "A longer prompt"], max_new_tokens=6, do_sample=False, batch_size=2)
    assert several[0][0]["generated_text"] == one
    capsys.readouterr()
    inputs = tokenizer("Hello", return_tensors="pt")
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    model.generate(**inputs, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out.startswith("Hello")


@pytest.mark.parametrize("vocabulary", ["byte_tokenizer", "subwords"])
def test_the_tokenizer_comes_along(
    vocabulary: str, loaded: Callable, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    ours: Tokenizer = request.getfixturevalue(vocabulary)
    _, theirs = loaded("slide", ours)
    texts = ["the white whale", "", "  two  spaces\n\nand 日本 🐳\r\n", "a <|document|> in the text", " leading"]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == [ours.eos_token_id, *ours.encode(text).tolist()]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids[1:]
        assert theirs.decode(ids, skip_special_tokens=True) == text
        assert theirs.decode(ids) == "<|document|>" + text
        assert theirs.convert_tokens_to_ids(theirs.convert_ids_to_tokens(ids)) == ids
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == ours.eos_token_id
    assert len(theirs) == ours.vocab_size
    batch = theirs(texts[:2], padding=True)
    assert batch["attention_mask"][1][-1] == 1
    assert batch["attention_mask"][1][0] == 0
    theirs.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert again(texts[2])["input_ids"] == theirs(texts[2])["input_ids"]


def test_saving_again_keeps_every_number(loaded: Callable, tmp_path: Path) -> None:
    model, _ = loaded("rec-lstm-single")
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.model.fingerprint() == model.model.fingerprint()
    assert again.config.model_config() == model.config.model_config()
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert set(model.config.model_config().to_dict()) <= set(written), "every field is in the file"


def test_an_unknown_model_key_is_an_error() -> None:
    from block_recurrent.hub.configuration import BlockRecurrentConfig

    with pytest.raises(BlockRecurrentError, match="window"):
        BlockRecurrentConfig(window=-3)
    assert BlockRecurrentConfig(hidden_size=64, num_hidden_layers=2).d_model == 64


ORDERS = {
    "ours first": "import block_recurrent.hub; from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; "
    "block_recurrent.hub.register()",
    "theirs first": "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T; import block_recurrent",
    "remote code": "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T",
}


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("order", ORDERS)
def test_it_loads_in_a_new_process(order: str, exported: Callable, tmp_path: Path) -> None:
    trust = ", trust_remote_code=True" if order == "remote code" else ""
    code = (
        f"{ORDERS[order]}\nfolder = {str(exported('slide'))!r}\n"
        f"m, t = (X.from_pretrained(folder{trust}) for X in (A, T))\n"
        "print(type(m).__module__, m.generate(**t('a', return_tensors='pt'), max_new_tokens=2).shape)"
    )
    done = in_new_process(code, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert "block_recurrent.hub.modeling torch.Size([1, 4])" in done.stdout


def test_without_the_package_the_message_is_clear(exported: Callable, tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['block_recurrent'] = None  # as if it were not installed\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(exported('slide'))!r}, trust_remote_code=True)"
    )
    done = in_new_process(code, HF_HOME=str(tmp_path / "home"))
    assert done.returncode != 0
    assert "pip install 'block-recurrent[hf]'" in done.stderr


def test_the_command(
    make_reader: Callable, make_run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(make_reader())
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    assert "step 7" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "block_recurrent_hf.py"} <= {
        path.name for path in (tmp_path / "hf").iterdir()
    }
    for code, arguments, message in (
        (USAGE, [str(run), str(tmp_path / "hf")], "exists: choose another folder"),
        (USAGE, [str(run)], "give one output"),
        (USAGE, [str(tmp_path / "nothing"), str(tmp_path / "b")], "is not a run"),
    ):
        assert main(["export", *arguments]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    assert main(["export", str(run), "--out", str(tmp_path / "weights.safetensors")]) == 0
    assert (tmp_path / "weights.safetensors").is_file()


def test_generating_never_has_dropout(loaded: Callable) -> None:
    model, tokenizer = loaded("rec-fixed-skip")
    inputs = tokenizer(["Call me Ishmael. " * 9], return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8, **GREEDY)
    model.train()
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, **GREEDY), expected)
    assert model.model.training, "the mode is the user's own"


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_long_book_is_continued_as_a_session_continues_it(system: str, loaded: Callable) -> None:
    model, tokenizer = loaded(system)
    ids = torch.randint(256, (1, 100_000), generator=torch.Generator().manual_seed(0))
    session = Session(model.model, tokenizer.tokenizer)
    session.read(ids[0])
    options = {"temperature": 0, "repetition_penalty": 1.0}
    expected = list(session.fork().write_all(100, **options).tokens)
    whole = torch.cat([torch.tensor([[256]]), ids], dim=1)
    one_piece = model.generate(whole, max_new_tokens=100, do_sample=False)[0, whole.shape[1] :]
    memory, start, random = None, 0, torch.Generator().manual_seed(1)
    while start < 99_990:
        end = min(start + int(torch.randint(1, 5000, (), generator=random)), 99_990)
        memory = model.read(whole[:, start:end], memory)
        start = end
    pieces = model.generate(whole[:, start:], past_key_values=memory, max_new_tokens=100, do_sample=False)
    assert one_piece.tolist()[: len(expected)] == expected
    assert pieces[0, whole.shape[1] - start :].tolist() == one_piece.tolist()
