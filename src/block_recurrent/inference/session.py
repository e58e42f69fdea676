"""`Session`: reads and continues one document, at constant cost per token.

    session = Session(model, tokenizer)
    session.read("Call me Ishmael.")
    for piece in session.write(200, temperature=0.8):
        print(piece, end="")

Reads whole segments and generates token by token, both with an `Engine`; reading in any pieces, or reading,
generating and reading again, is equivalent to reading everything at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from block_recurrent.data import Tokenizer
from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import InputError
from block_recurrent.inference.engine import Engine, engine_of
from block_recurrent.inference.sampling import Sampling, check_max_tokens
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_input import settled, tokens_of
from block_recurrent.inference.writer import Writer, Written, WrittenToken, chosen
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

Tokens = Sequence[int] | np.ndarray | torch.Tensor
TEXT_AT_ONCE = 1 << 20  # characters or tokens per call


@dataclass(frozen=True)
class Scored:
    """The score of a text."""

    bits: float  # sum of negative log2 probabilities of its tokens
    tokens: int
    bytes: int  # of the text as UTF-8


class Session:
    """A document in progress, with the memory of everything read and generated so far."""

    def __init__(
        self,
        model: BlockRecurrentLM | Engine,
        tokenizer: Tokenizer,
        *,
        name: str | None = None,
        state: SessionState | None = None,
    ) -> None:
        """Start a session.

        Args:
            model: a model, whose current weights are copied to an `Engine`, or an `Engine` to share between sessions.
            tokenizer: the model's tokenizer.
            name: the name of the model in memory files and errors.
            state: the state of another session to start from.
        """
        self.engine = engine_of(model)
        if tokenizer.vocab_size != self.engine.config.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} pieces with the document mark, the model "
                f"{self.engine.config.vocab_size}: they must be equal"
            )
        self.tokenizer, self.name = tokenizer, name
        self.state = SessionState(self.engine.empty(), tokenizer.eos_token_id) if state is None else state

    @property
    def memory(self) -> DocumentMemory:
        """The memory of all tokens but the last, which is fed when more follows."""
        return self.state.memory

    @property
    def position(self) -> int:
        """Number of tokens read and generated, without text that is held back."""
        return self.state.position

    def fork(self) -> Session:
        """An independent session at the same position. This copies nothing: the memory is a value."""
        return Session(self.engine, self.tokenizer, name=self.name, state=self.state)

    def read(self, text: str | Tokens) -> int:
        """Read text or tokens; return the number of tokens.

        Text may come in pieces: the end of a piece is held back while its tokens may still change (see `flush`). Tokens
        must not include the document mark.
        """
        if isinstance(text, str):
            # In pieces: tokens take many times more memory than text.
            return sum(self._read_text(text[i : i + TEXT_AT_ONCE]) for i in range(0, len(text), TEXT_AT_ONCE))
        tokens = self.checked(text)
        count = self.flush() + len(tokens)
        for piece in (tokens[i : i + TEXT_AT_ONCE] for i in range(0, len(tokens), TEXT_AT_ONCE)):
            self._read_tokens(piece, self.tokenizer.decode_bytes(piece, begin=self.position == 0))
        return count

    def flush(self) -> int:
        """Read the end of text that was held back, as if no more followed; generating does this automatically."""
        held = self.state.held
        if not held:
            return 0
        self.state = replace(self.state, held=b"")
        return self._read_bytes(held)

    def write(self, max_tokens: int = 256, sampling: Sampling | None = None, **options: Any) -> Iterator[str]:
        """Generate text, and yield it piece by piece, as soon as it is available.

        Generation ends at the document mark, at a stop string, or after `max_tokens`. The session advances with every
        token, so the iterator can be dropped at any time.

        Args:
            max_tokens: the maximum number of tokens.
            sampling: the sampling options, or
            **options: the same as keywords, such as `temperature=0.8`: the fields of `Sampling`.
        """
        sampling = _sampling(sampling, options)
        check_max_tokens(max_tokens)
        if sampling.beams > 1:
            return self._write_best(max_tokens, sampling)
        return (written.text for written in self.write_tokens(max_tokens, sampling) if written.text)

    def write_tokens(
        self, max_tokens: int = 256, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[WrittenToken]:
        """Like `write`, but yield every token with its log-probability."""
        sampling = _sampling(sampling, options)
        check_max_tokens(max_tokens)
        if sampling.beams > 1:
            raise InputError("beam search can't yield single tokens: use write or write_all")
        return self._tokens(sampling, max_tokens)

    def write_all(self, max_tokens: int = 256, sampling: Sampling | None = None, **options: Any) -> Written:
        """Generate, and return everything at once: text, tokens, log-probabilities, and why it ended."""
        sampling = _sampling(sampling, options)
        check_max_tokens(max_tokens)
        from block_recurrent.inference.batch import write_together

        return write_together([self], max_tokens, sampling)[0]

    def loss_of(self, text: str | Tokens) -> float:
        """The negative log2 probability of a continuation, in bits. The session does not change."""
        return self.score(text).bits

    def score(self, text: str | Tokens) -> Scored:
        """Like `loss_of`, with the number of tokens and bytes."""
        other = self.fork()
        other.flush()
        if isinstance(text, str):
            raw = to_utf8(text)
            tokens = tokens_of(self.tokenizer, raw, other.position == 0)
        else:
            tokens = self.checked(text)
            raw = self.tokenizer.decode_bytes(tokens, begin=other.position == 0)
        if len(tokens) == 0:
            return Scored(0.0, 0, len(raw))
        nats = self.engine.score([other.state.fed(tokens)], [tokens], other.state.memory).nats[0]
        return Scored(nats.sum(dtype=np.float64) / math.log(2), len(tokens), len(raw))

    def save(self, path: str | Path) -> None:
        """Save to a memory file, from which the session can be resumed. Its size does not depend on the length read."""
        from block_recurrent.inference.session_file import save_session

        save_session(self, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, model: BlockRecurrentLM | Engine, tokenizer: Tokenizer, *, name: str | None = None
    ) -> Session:
        """Load the session of a memory file, which must belong to the same model and tokenizer."""
        from block_recurrent.inference.session_file import load_session

        return load_session(Path(path), model, tokenizer, name)

    def _tokens(self, sampling: Sampling, max_tokens: int) -> Iterator[WrittenToken]:
        self.flush()
        writer = Writer(self.tokenizer, self.state, sampling, max_tokens)
        writing = self.engine.writing([self.state], [sampling], self.tokenizer.eos_token_id)
        while writer.ended is None:
            if writing is not None:
                [choice] = writing.step()
                memory = writing.memory(0)
            else:
                logits, memory = self.engine.decode([writer.state.pending], writer.state.memory)
                [choice] = chosen([writer], logits)
            written = writer.accept(choice, memory)
            self.state = writer.state
            yield written

    def _write_best(self, max_tokens: int, sampling: Sampling) -> Iterator[str]:
        written = self.write_all(max_tokens, sampling)
        if written.text:
            yield written.text

    def _read_text(self, text: str) -> int:
        buffer = self.state.held + to_utf8(text)
        ready = settled(self.tokenizer, buffer)
        count = self._read_bytes(buffer[:ready])
        self.state = replace(self.state, held=buffer[ready:])
        return count

    def _read_bytes(self, raw: bytes) -> int:
        tokens = tokens_of(self.tokenizer, raw, at_beginning=self.position == 0)
        self._read_tokens(tokens, raw)
        return len(tokens)

    def _read_tokens(self, tokens: np.ndarray, text: bytes) -> None:
        if len(tokens) == 0:
            return
        _, memory = self.engine.prefill([self.state.fed(tokens)], self.state.memory)
        self.state = self.state.after(memory, tokens, text)

    def checked(self, tokens: Tokens) -> np.ndarray:
        """Check tokens and return them as an array."""
        if isinstance(tokens, (bytes, bytearray)):
            raise InputError("the text is bytes: decode it to str first, or give tokens")
        if isinstance(tokens, torch.Tensor):
            tokens = tokens.detach().cpu().numpy()
        array = self.tokenizer.check(tokens)
        if (array == self.tokenizer.eos_token_id).any():
            raise InputError(
                f"the tokens contain the document mark {self.tokenizer.eos_token_id}, which a session adds "
                "automatically; start a new Session for a new document"
            )
        return array


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    if sampling is None:
        return Sampling.of(**options)
    if options:
        raise InputError(f"both a Sampling and options ({', '.join(options)}) were given: give one of them")
    return sampling
