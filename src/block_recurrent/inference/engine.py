"""`Engine`: a snapshot of a model's weights that reads, decodes and scores.

    engine = Engine(model, weights="bfloat16")
    logits, memory = engine.prefill(tokens)
    for _ in range(100):
        logits, memory = engine.decode(logits.argmax(-1), memory)

It computes the same as `model(tokens, memory)`, without dropout and gradients, and any sequence of calls gives
the same result as one. The memory is a value: decoding twice from one memory is a fork. An engine is thread-safe.
Call `refresh` after the weights of the source model have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError, InputError
from block_recurrent.inference.device_decode import DeviceDecoder, DeviceWriting
from block_recurrent.inference.native_decode import NativeDecoder
from block_recurrent.inference.sampling import Sampling
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.snapshot import Snapshot
from block_recurrent.model import checks
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.runtime import Runtime

TOKENS_AT_ONCE = 2048
"""Tokens of a lane per call of the model: enough to be fast, even if segments are short."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODED = 4
"""Up to this number of tokens per lane, decoding one by one is faster than a call of the model."""
Tokens = Tensor | Sequence[ArrayLike]


Method = TypeVar("Method", bound=Callable[..., Any])


def _inference(method: Method) -> Method:
    """A method of an engine in its `precision`."""

    @wraps(method)
    def call(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        with engine.precision():
            return method(engine, *args, **kwargs)

    return cast(Method, call)


class Scored(NamedTuple):
    """Result of `Engine.score`."""

    nats: list[NDArray[np.float32]]
    """For each row, the negative log-probabilities of its targets."""
    memory: DocumentMemory


class Engine:
    """Inference with a model's weights in float32 (unchanged), bfloat16 or int8."""

    def __init__(self, model: BlockRecurrentLM, weights: str = "float32", dtype: torch.dtype = torch.float32) -> None:
        """Take a snapshot of the model's weights.

        Args:
            model: the model; training it further does not affect the engine until `refresh`.
            weights: the precision of the weight matrices: float32 (as they are), bfloat16 or int8.
            dtype: of matrix products and of cached keys and values; the recurrent state has that of the model.
        """
        if not isinstance(model, BlockRecurrentLM):
            raise InputError(
                f"the model is a {type(model).__name__}: it must be a BlockRecurrentLM, such as load_run(name).model"
            )
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}: it must be one of {', '.join(map(str, DTYPES))}")
        self.model, self.weights, self.dtype = model, weights, dtype
        self._on_device: DeviceDecoder | None = None
        self.refresh()

    def refresh(self) -> None:
        """Update the snapshot of the model's weights. Memories made with other weights are rejected from then on."""
        snapshot = Snapshot(self.model, self.weights)
        native = self.dtype == torch.float32 and NativeDecoder.fits(snapshot)
        # In one assignment, for other threads that are using the engine.
        self._now = snapshot, NativeDecoder(snapshot) if native else None

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The context of all computation: without gradients, and with autocast to the dtype of the engine."""
        lower = self.dtype != torch.float32
        with torch.no_grad(), Runtime(self.snapshot.device, self.dtype).autocast() if lower else nullcontext():
            yield

    def writing(
        self, states: Sequence[SessionState], samplings: Sequence[Sampling], eos_token_id: int
    ) -> DeviceWriting | None:
        """A generation that decodes and samples on a GPU, from the state of each lane; None on a CPU.

        samplings: of each lane, equal except for the seed.
        """
        snapshot, decoder = self.snapshot, self._on_device
        if not DeviceDecoder.fits(snapshot):
            return None
        if decoder is None or decoder.snapshot is not snapshot:
            decoder = self._on_device = DeviceDecoder(snapshot, self.precision)
        return DeviceWriting(decoder, states, samplings, eos_token_id)

    @property
    def snapshot(self) -> Snapshot:
        """The weights of this engine."""
        return self._now[0]

    @property
    def config(self) -> ModelConfig:
        return self.snapshot.config

    def fingerprint(self) -> str:
        """Hash of shape and weights; in float32 equal to the model's."""
        return self.snapshot.fingerprint()

    def empty(self, lanes: int = 1) -> DocumentMemory:
        """Create a memory of lanes that have read nothing."""
        snapshot = self.snapshot
        return DocumentMemory.empty(snapshot.config, lanes, snapshot.device, snapshot.dtype)

    @_inference
    def prefill(
        self, tokens: Tokens, memory: DocumentMemory | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, DocumentMemory]:
        """Read many tokens; return the logits (B, V) after the last token of each lane, and the memory.

        Args:
            tokens: (B, N) integers, or one row of any length per lane.
            memory: the memory to continue from; None is an empty one.
            lengths: (B,) integers, the tokens of each lane of a tensor that are not padding, at least one.
        """
        (snapshot, decoder), rows = self._now, self._rows(tokens, lengths)
        if not all(len(row) for row in rows):
            raise InputError("a lane has no tokens: every lane needs at least one to predict what follows it")
        memory = self.empty(len(rows)) if memory is None else memory
        if decoder is not None and len(rows) == 1 and len(rows[0]) <= DECODED:
            for token in rows[0]:
                logits, memory = _decode(snapshot, decoder, torch.tensor([[token]]), memory)
            return logits, memory
        # Compute logits only for the last vectors, unless a subclass may change them.
        run, memory = snapshot.model.hidden if snapshot.is_plain else snapshot.model, snapshot.recognized(memory)
        last: list[Tensor] = [torch.empty(0)] * len(rows)
        for start, end in _chunks(snapshot.config, memory, rows):
            piece, real = _padded(rows, start, end, snapshot.device)
            vectors, memory = run(piece, memory, lengths=real)
            for lane, row in enumerate(rows):
                if start < len(row) <= end:
                    last[lane] = vectors[lane, len(row) - 1 - start]
        ends = torch.stack(last)
        return (snapshot.logits(ends) if snapshot.is_plain else ends).float(), snapshot.signed(memory)

    @_inference
    def decode(
        self, tokens: Tensor | Sequence[int], memory: DocumentMemory | None = None
    ) -> tuple[Tensor, DocumentMemory]:
        """Read one token per lane, (B,); return the logits (B, V) of the next, in float32, and the memory."""
        snapshot, decoder = self._now  # once: another thread may refresh
        column = _column(tokens, snapshot.device)
        return _decode(snapshot, decoder, column, self.empty(len(column)) if memory is None else memory)

    @_inference
    def decode_many(
        self, tokens: Sequence[int], memories: Sequence[DocumentMemory]
    ) -> tuple[Tensor, list[DocumentMemory]]:
        """Like `decode`, for memories of one lane each, at any positions: a batch for this call only.

        With the decode kernel, a lane's logits and memory are bit-for-bit independent of the other lanes.
        """
        if len(tokens) != len(memories):
            raise InputError(f"there are {len(tokens)} tokens for {len(memories)} memories: give one per memory")
        if any(not isinstance(memory, DocumentMemory) or memory.lanes != 1 for memory in memories):
            raise InputError("decode_many takes memories of one lane each: use decode for memories of several lanes")
        snapshot, decoder = self._now
        column = _column(tokens, snapshot.device)
        if memories and decoder is not None and (checked := _checked(snapshot, column, memories)) is not None:
            return decoder.decode(checked, memories)
        logits, after = _decode(snapshot, None, column, DocumentMemory.cat(memories))
        return logits, [after.select([lane]) for lane in range(after.lanes)]

    @_inference
    def score(self, rows: Tokens, targets: Tokens, memory: DocumentMemory | None = None) -> Scored:
        """Read a row per lane, and score its `targets`, one per token."""
        snapshot, inputs, wanted = self.snapshot, self._rows(rows), self._rows(targets)
        if list(map(len, inputs)) != list(map(len, wanted)):
            raise InputError("rows and targets have different lengths: every token needs one target")
        memory = self.empty(len(inputs)) if memory is None else snapshot.recognized(memory)
        nats: list[list[NDArray[np.float32]]] = [[] for _ in inputs]
        for start, end in _chunks(snapshot.config, memory, inputs):
            piece, real = _padded(inputs, start, end, snapshot.device)
            loss = snapshot.model.loss(piece, _padded(wanted, start, end, snapshot.device)[0], memory, lengths=real)
            memory = loss.memory
            per_token = loss.per_token.cpu().numpy()
            for lane, row in enumerate(inputs):
                nats[lane].append(per_token[lane, : max(len(row) - start, 0)])
        return Scored([np.concatenate([[], *parts], dtype=np.float32) for parts in nats], snapshot.signed(memory))

    def _rows(self, tokens: Tokens, lengths: Tensor | None = None) -> list[NDArray[np.int64]]:
        """A row of real tokens per lane."""
        if isinstance(tokens, Tensor):
            checks.check_tokens(tokens, self.config.vocab_size, tokens.device)
            real = checks.lengths_of(lengths, *tokens.shape)
            return [row[:length] for row, length in zip(tokens.long().cpu().numpy(), real, strict=True)]
        if lengths is not None:
            raise InputError("lengths can only be given with a tensor of tokens, not with rows")
        rows = [np.asarray(row) for row in tokens]
        if not rows or any(row.ndim != 1 or (row.size and row.dtype.kind not in "iu") for row in rows):
            raise InputError("tokens must be a tensor (lanes, length) or at least one row of integers")
        return [row.astype(np.int64) for row in rows]


def engine_of(model: BlockRecurrentLM | Engine) -> Engine:
    """The engine itself, or a new one with the current weights of the model."""
    return model if isinstance(model, Engine) else Engine(model)


def _decode(
    snapshot: Snapshot, decoder: NativeDecoder | None, column: Tensor, memory: DocumentMemory
) -> tuple[Tensor, DocumentMemory]:
    if decoder is not None and (checked := _checked(snapshot, column, [memory])) is not None:
        logits, [memory] = decoder.decode(checked, [memory])
        return logits, memory
    logits, memory = snapshot.model(column, snapshot.recognized(memory))
    return logits[:, -1].float(), snapshot.signed(memory)


def _checked(snapshot: Snapshot, column: Tensor, memories: Sequence[DocumentMemory]) -> list[int] | None:
    """The tokens for the kernel; None if they are invalid, for which the model then raises an error."""
    tokens, V = column[:, 0].tolist(), snapshot.config.vocab_size
    if not all(isinstance(memory, DocumentMemory) for memory in memories):
        return None
    fit = len(tokens) == sum(m.lanes for m in memories) and all(type(t) is int and 0 <= t < V for t in tokens)
    return tokens if fit else None


def _column(tokens: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """(B,) -> (B, 1)."""
    column = torch.as_tensor(tokens, device=device)
    if column.ndim != 1:
        raise InputError(f"tokens has shape {tuple(column.shape)}: it must be (lanes,), one token per lane")
    return column[:, None]


def tokens_at_once(config: ModelConfig) -> int:
    """Tokens of a lane per call: whole blocks, a segment or more. A text of any length then needs bounded memory."""
    return max(config.segment, TOKENS_AT_ONCE // config.window * config.window)


def _chunks(
    config: ModelConfig, memory: DocumentMemory, rows: Sequence[NDArray[np.int64]]
) -> Iterator[tuple[int, int]]:
    """The ranges of the calls: first up to the end of a block, then whole segments, which need no copies."""
    start, length = 0, max(map(len, rows))
    size = tokens_at_once(config)
    end = -int(memory.tokens_read[0]) % config.window if length > config.window else size
    while start < length:
        end = min(end or size, length)
        yield start, end
        start, end = end, end + size


def _padded(
    rows: Sequence[NDArray[np.int64]], start: int, end: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The columns from start to end, (B, columns), and the number of them in each row; None if rows have all."""
    pieces = [row[start:end] for row in rows]
    lengths = [len(piece) for piece in pieces]
    padded = np.zeros((len(rows), max(lengths)), np.int64)
    for lane, piece in enumerate(pieces):
        padded[lane, : len(piece)] = piece
    return torch.from_numpy(padded).to(device), None if min(lengths) == max(lengths) else torch.tensor(lengths)
