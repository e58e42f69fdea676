"""`DocumentMemory` as a value: making, moving, choosing, comparing; and as a file."""

from __future__ import annotations

import copy
import gc
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from block_recurrent import BlockRecurrentLM, DocumentMemory, preset
from block_recurrent.errors import FileFormatError, InputError, MemoryMismatchError
from block_recurrent.model import memory_file

FAMILIES = ("slide", "rec-lstm-dual", "feedback-fixed-skip", "memorizing")


@pytest.fixture(params=FAMILIES)
def model(request, make_model) -> BlockRecurrentLM:
    return make_model(request.param)


@pytest.fixture
def memory(model, tokens) -> DocumentMemory:
    """Three lanes in the middle of a block, two blocks and more behind them; lane 2 has read less."""
    return model(tokens(3, 11), lengths=torch.tensor([11, 11, 6]))[1].detach()


def same(one, other):
    """Bit for bit."""
    return one.equals(other, tolerance=0.0)


# --- the value ---


def test_an_empty_memory_is_what_none_means(model, tokens):
    empty = DocumentMemory.empty(model.config, 2, dtype=torch.float64)
    logits, memory = model(tokens(2, 6), empty)
    expected, expected_memory = model(tokens(2, 6))
    assert empty.tokens_read.tolist() == [0, 0]
    assert empty.lanes == 2
    assert torch.equal(logits, expected)
    assert same(memory, expected_memory)


def test_tokens_read_counts_each_lane(model, memory, tokens):
    assert memory.tokens_read.tolist() == [11, 11, 6]
    _, after = model(tokens(3, 4), memory, torch.tensor([False, True, False]), torch.tensor([4, 2, 0]))
    assert after.tokens_read.tolist() == [15, 2, 6]


def test_detach_cuts_the_graph_and_nothing_else(model, tokens):
    _, memory = model(tokens(2, 6))
    cut = memory.detach()
    assert memory.layers[0].keys.requires_grad
    for layer in cut.layers:
        assert not any(x.requires_grad for x in layer.named_tensors().values())
    assert same(cut, memory)
    assert cut.tokens_read.tolist() == memory.tokens_read.tolist()


def test_to_changes_the_precision_and_back(model, memory):
    single = memory.to(dtype=torch.float32)
    assert single.dtype == torch.float32
    assert single.nbytes * 2 == memory.nbytes
    assert 0 < memory.difference(single) < 1e-6
    assert same(single.to(dtype=torch.float64).to(dtype=torch.float32), single)
    with pytest.raises(MemoryMismatchError, match=r"torch.float32 on cpu, the model torch.float64.*memory\.to"):
        model(torch.zeros(3, 1, dtype=torch.int64), single)


def test_select_takes_lanes_in_order_and_may_repeat_them(model, memory, tokens):
    chosen = memory.select([2, 0, 2])
    assert chosen.tokens_read.tolist() == [6, 11, 6]
    text = tokens(3, 7, seed=1)
    logits, _ = model(text, chosen)
    for lane, original in enumerate([2, 0, 2]):
        alone, _ = model(text[lane : lane + 1], memory.select([original]))
        torch.testing.assert_close(logits[lane], alone[0], atol=1e-9, rtol=0)
    assert same(memory.select(torch.tensor([0, 1, 2])), memory)


@pytest.mark.parametrize("lanes", [[], [3], [-1], [0, 7], [True, False, True], [0.5]])
def test_lanes_that_are_not_there_can_not_be_selected(memory, lanes):
    with pytest.raises(InputError, match=r"can't be selected: give at least one, each from 0 to 2"):
        memory.select(lanes)


def test_cat_joins_lanes(memory):
    assert same(DocumentMemory.cat([memory.select([0]), memory.select([1, 2])]), memory)
    assert same(DocumentMemory.cat([memory]), memory)


def test_cat_takes_a_fresh_lane_beside_one_that_has_read(model, memory, tokens):
    fresh = DocumentMemory.empty(model.config, 1, dtype=torch.float64)
    joined = DocumentMemory.cat([fresh, memory])
    assert joined.tokens_read.tolist() == [0, 11, 11, 6]
    logits, _ = model(tokens(4, 5), joined)
    torch.testing.assert_close(logits[:1], model(tokens(4, 5)[:1])[0], atol=1e-9, rtol=0)


def test_cat_refuses_nothing_other_shapes_and_other_models(make_model, memory, model, tokens):
    with pytest.raises(InputError, match="at least one memory"):
        DocumentMemory.cat([])
    with pytest.raises(MemoryMismatchError, match="mlp_dim 14 against 15"):
        DocumentMemory.cat([memory, DocumentMemory.empty(model.config.replace(mlp_dim=15), 1)])
    other = BlockRecurrentLM(model.config).double()
    with pytest.raises(MemoryMismatchError, match="made by different models"):
        DocumentMemory.cat([memory, other(tokens(1, 3))[1]])


def test_nbytes_counts_every_number_and_does_not_grow(model, memory, tokens):
    def held(x: DocumentMemory) -> int:
        return sum(t.numel() * t.element_size() for layer in x.layers for t in layer.named_tensors().values())

    assert memory.nbytes == held(memory)
    assert memory.nbytes == DocumentMemory.empty(model.config, 3, dtype=torch.float64).nbytes
    after = model(tokens(3, 50), memory)[1]
    assert after.nbytes == memory.nbytes
    assert [x.shape for layer in after.layers for x in layer.named_tensors().values()] == [
        x.shape for layer in memory.layers for x in layer.named_tensors().values()
    ]


def test_equality_is_within_a_tolerance(model, memory):
    for index, layer in enumerate(memory.layers):
        for name in layer.named_tensors():
            if name.startswith("recall"):
                continue
            moved = copy.copy(layer)
            object.__setattr__(moved, name, getattr(layer, name) + 1e-3)
            other = copy.copy(memory)
            object.__setattr__(other, "layers", (*memory.layers[:index], moved, *memory.layers[index + 1 :]))
            assert other.difference(memory) == pytest.approx(1e-3)
            assert other.equals(memory, 2e-3)
            assert not other.equals(memory, 0.5e-3)


def test_memories_of_other_texts_lengths_or_lanes_differ(model, memory, tokens):
    assert memory.difference(memory) == 0
    other = model(tokens(3, 11, seed=5), lengths=torch.tensor([11, 11, 6]))[1]
    assert 1e-3 < memory.difference(other) < float("inf")
    further = model(tokens(3, 1), memory)[1]
    assert memory.difference(further) == float("inf")
    assert not memory.equals(memory.select([0, 1]), tolerance=1e9)
    with pytest.raises(MemoryMismatchError, match="another shape"):
        memory.equals(DocumentMemory.empty(model.config.replace(mlp_dim=15), 3))


def test_numbers_that_are_not_numbers_are_not_equal(model, memory, tokens):
    broken = memory.to()
    broken.layers[0].keys[0, 0, -1, 0] = float("nan")
    assert broken.difference(broken) == float("inf")


def test_recalled_entries_count_in_equality(make_model, tokens):
    """Texts that differ only in their first block, after many others: only the recall can tell."""
    model = make_model("memorizing", num_layers=1, memory_layers=(1,))
    text = tokens(1, 12)
    other = text.clone()
    other[0, 2] = (other[0, 2] + 1) % 23
    one, two = model(text)[1], model(other)[1]
    assert torch.equal(one.layers[0].keys, two.layers[0].keys)
    assert one.difference(two) > 1e-3


def test_restart_forgets_the_marked_lanes(model, memory):
    after = memory.restart([False, True, False])
    assert after.tokens_read.tolist() == [11, 0, 6]
    assert after.fresh == [False, True, False]
    assert same(after.select([0, 2]), memory.select([0, 2]))
    assert same(memory.restart([False] * 3), memory)


# --- whose memory it is ---


def test_another_models_memory_is_refused(model, memory):
    torch.manual_seed(99)
    other = BlockRecurrentLM(model.config).double()
    with pytest.raises(MemoryMismatchError, match=r"belongs to another model.*only with the weights that made it"):
        other(torch.zeros(3, 1, dtype=torch.int64), memory)


def test_a_copy_of_the_model_may_use_its_memory(model, memory, tokens):
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens(3, 4), memory)[0], model(tokens(3, 4), memory)[0])


def test_a_memory_whose_model_is_gone_is_refused(make_model, tokens):
    model = make_model("rec-fixed-skip")
    memory, config = model(tokens(1, 3))[1].detach(), model.config
    del model
    gc.collect()
    other = BlockRecurrentLM(config).double()
    with pytest.raises(MemoryMismatchError, match="the model that made this memory was deleted"):
        other(tokens(1, 3), memory)
    with pytest.raises(MemoryMismatchError, match="the model that made this memory was deleted"):
        DocumentMemory.cat([memory, other(tokens(1, 3))[1]])


def test_the_model_in_training_may_use_its_memory(model, memory, tokens):
    """Weights move from step to step; the memory of the step before is still the model's own."""
    with torch.no_grad():
        model.embedding.weight.add_(0.01)
    model(tokens(3, 4), memory)


# --- the file ---


@pytest.fixture
def path(memory, tmp_path):
    memory.save(tmp_path / "book.memory")
    return tmp_path / "book.memory"


def test_a_file_gives_back_every_bit(memory, path):
    loaded = DocumentMemory.load(path)
    assert same(loaded, memory)
    assert loaded.config == memory.config
    assert loaded.dtype == memory.dtype
    assert loaded.tokens_read.tolist() == memory.tokens_read.tolist()
    assert os.listdir(path.parent) == ["book.memory"]


def test_a_loaded_memory_reads_on_exactly_like_the_one_saved(model, memory, path, tokens):
    text = tokens(3, 30, seed=2)
    logits, after = model(text, DocumentMemory.load(path))
    expected, expected_after = model(text, memory)
    assert torch.equal(logits, expected)
    assert same(after, expected_after)


def test_a_loaded_memory_can_be_saved_again(memory, path):
    DocumentMemory.load(path).save(path)
    assert same(DocumentMemory.load(path), memory)


def test_an_empty_memory_can_be_saved(model, tmp_path, tokens):
    DocumentMemory.empty(model.config, 2, dtype=torch.float64).save(tmp_path / "empty")
    loaded = DocumentMemory.load(tmp_path / "empty")
    assert torch.equal(model(tokens(2, 5), loaded)[0], model(tokens(2, 5))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_precisions_round_trip(model, memory, tmp_path, dtype):
    memory.to(dtype=dtype).save(tmp_path / "m")
    assert same(DocumentMemory.load(tmp_path / "m"), memory.to(dtype=dtype))


def test_the_size_of_the_file_does_not_depend_on_the_text(model, memory, path, tokens, tmp_path):
    model(tokens(3, 1000), memory)[1].save(tmp_path / "long.memory")
    assert (tmp_path / "long.memory").stat().st_size == path.stat().st_size


def test_other_weights_refuse_a_loaded_memory(model, path):
    torch.manual_seed(99)
    other = BlockRecurrentLM(model.config).double()
    with pytest.raises(MemoryMismatchError, match="belongs to another model"):
        other(torch.zeros(3, 1, dtype=torch.int64), DocumentMemory.load(path))


def test_one_changed_weight_refuses_a_loaded_memory(model, path):
    with torch.no_grad():
        model.layers[0].mlp.output.weight[0, 0] += 1e-6
    with pytest.raises(MemoryMismatchError, match="belongs to another model"):
        model(torch.zeros(3, 1, dtype=torch.int64), DocumentMemory.load(path))


def test_another_shape_refuses_a_loaded_memory(model, path):
    other = BlockRecurrentLM(model.config.replace(mlp_dim=15)).double()
    with pytest.raises(MemoryMismatchError, match=r"another shape than this one: mlp_dim 14 against 15"):
        other(torch.zeros(3, 1, dtype=torch.int64), DocumentMemory.load(path))


def test_segment_and_dropout_are_no_part_of_the_shape(model, memory, path, tokens):
    other = BlockRecurrentLM(model.config.replace(segment=model.config.window * 9, dropout=0.3)).double().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(3, 4), DocumentMemory.load(path))[0], model(tokens(3, 4), memory)[0])


def test_every_damaged_byte_is_noticed(make_model, tokens, tmp_path):
    """The header's bytes and some of the numbers, flipped in two ways: never a wrong memory, always our error."""
    model = make_model("memorizing", num_layers=1, memory_layers=(1,), memory_size=4, memory_neighbors=4)
    path = tmp_path / "m"
    model(tokens(1, 6))[1].save(path)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    meaningful = [place for place in range(header) if good[place] != ord(" ")]
    for place in [*meaningful, *range(header, len(good), 7), len(good) - 1]:
        for flip in (1, 0x80):
            damaged = bytearray(good)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            with pytest.raises(FileFormatError, match=r"damaged|version|not a memory file"):
                DocumentMemory.load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_cut_file_is_an_error(path, share):
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * share)])
    with pytest.raises(FileFormatError, match=r"book.memory' can't be read as a memory file: it is damaged, truncated"):
        DocumentMemory.load(path)


def test_a_longer_file_is_an_error(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(FileFormatError, match="damaged"):
        DocumentMemory.load(path)


def test_another_safetensors_file_is_an_error(tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(FileFormatError, match="is a safetensors file, but not a memory file"):
        DocumentMemory.load(tmp_path / "x.safetensors")


def test_a_text_file_a_folder_and_a_missing_file_are_errors(tmp_path):
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times.")
    with pytest.raises(FileFormatError, match=r"book.txt' can't be read as a memory file"):
        DocumentMemory.load(tmp_path / "book.txt")
    with pytest.raises(FileFormatError, match="can't be read as a memory file"):
        DocumentMemory.load(tmp_path)
    with pytest.raises(FileFormatError, match=r"memory file '.*nowhere' does not exist"):
        DocumentMemory.load(tmp_path / "nowhere")


def test_another_version_is_an_error_that_names_both(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "VERSION", 7)
    memory.save(tmp_path / "m")
    monkeypatch.undo()
    with pytest.raises(FileFormatError, match="format version 7; this version supports 1"):
        DocumentMemory.load(tmp_path / "m")


@pytest.mark.parametrize("target", ["missing/folder/m", "."])
def test_a_place_that_can_not_be_written_is_an_error(memory, tmp_path, target):
    with pytest.raises(FileFormatError, match="the memory can't be written to"):
        memory.save(tmp_path / target)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_save_leaves_the_old_file(model, memory, path, tokens, monkeypatch, step):
    def interrupted(*args):
        raise KeyboardInterrupt

    further = model(tokens(3, 9), memory)[1]
    with monkeypatch.context() as patch:
        patch.setattr(os, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            further.save(path)
    assert same(DocumentMemory.load(path), memory)
    assert os.listdir(path.parent) == ["book.memory"]


def test_a_full_disk_leaves_the_old_file(model, memory, path, tokens, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileFormatError, match=r"can't be written to .*: No space left on device"):
            model(tokens(3, 9), memory)[1].save(path)
    assert same(DocumentMemory.load(path), memory)


@pytest.mark.parametrize("name", ["slide", "rec-fixed-skip", "memorizing"])
def test_pickles_and_copies_go_on_as_the_memory_itself(name, tmp_path):
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(name, "micro", vocab_size=30)).eval()
    tokens = torch.randint(0, 30, (2, 50))
    with torch.no_grad():
        _, memory = model(tokens)
        expected, _ = model(tokens, memory)
        torch.save(memory, tmp_path / "memory.pt")
        loaded = torch.load(tmp_path / "memory.pt", weights_only=False)
        for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), loaded):
            assert torch.equal(model(tokens, other)[0], expected)


@pytest.mark.parametrize("name", ["slide", "rec-fixed-skip", "memorizing"])
def test_copies_hold_the_values_alone(name, tmp_path):
    """Also of a memory that has a gradient, or whose tensors are parts of larger ones."""
    torch.manual_seed(0)
    model = BlockRecurrentLM(preset(name, "micro", vocab_size=30)).eval()
    _, memory = model(torch.randint(0, 30, (1, 300)))
    torch.save(memory, tmp_path / "memory.pt")
    loaded = torch.load(tmp_path / "memory.pt", weights_only=False)
    pickled = pickle.dumps(memory)
    for other in (copy.deepcopy(memory), pickle.loads(pickled), loaded):
        assert other.equals(memory)
        assert not any(x.requires_grad for x in other.named_tensors().values())
    assert len(pickled) < memory.nbytes + 10_000


def test_a_short_repr():
    memory = DocumentMemory.empty(preset("rec-fixed-skip", "micro", vocab_size=30), lanes=7)
    assert len(repr(memory)) < 150
    assert "7 lanes" in repr(memory)
