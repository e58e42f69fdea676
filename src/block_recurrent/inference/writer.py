"""Generation of one sequence: choosing tokens, decoding and ending. Several can share the model's calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from block_recurrent.data import Tokenizer
from block_recurrent.inference.sampling import Choice, Chooser, Sampling, check_finite, choose
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_stream import TextStream
from block_recurrent.model.memory import DocumentMemory

MARK, STOP, LENGTH = "mark", "stop", "length"


@dataclass(frozen=True)
class WrittenToken:
    """A generated token; the last one may be the document mark, which is not part of the text."""

    token: int
    log_prob: float  # natural logarithm of its probability under the model, regardless of sampling options
    text: str  # the text that is complete with it: whole characters, possibly none


@dataclass(frozen=True)
class Written:
    """The result of a generation."""

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended: str | None  # why: "mark" (the document ended), "stop" (a stop string), "length"; None if it was interrupted


class Writer:
    """A sequence being generated. `state` advances with each token and is always consistent."""

    def __init__(self, tokenizer: Tokenizer, state: SessionState, sampling: Sampling, max_tokens: int) -> None:
        self.state = state
        self.ended: str | None = None
        self._tokenizer = tokenizer
        self.chooser = Chooser(sampling, tokenizer.eos_token_id)
        self._stream = TextStream(tokenizer, state.recent, sampling.stop)
        self._left = max_tokens

    def accept(self, choice: Choice, memory: DocumentMemory) -> WrittenToken:
        """The next token, already chosen.

        The document mark ends the generation and is not fed: the state stays before its last token, so that the
        session can continue as if there had been no mark.
        """
        check_finite(choice.log_prob)
        if choice.token == self._tokenizer.eos_token_id:
            self.ended = MARK
            return WrittenToken(choice.token, choice.log_prob, self._stream.finish())
        raw = self._tokenizer.token_bytes(choice.token, begin=not self.state.recent)
        self.state = self.state.after(memory, [choice.token], raw)
        text = self._stream.push(choice.token)
        self._left -= 1
        if self._stream.stopped:
            self.ended = STOP
        elif self._left == 0:
            self.ended = LENGTH
            text += self._stream.finish()
        return WrittenToken(choice.token, choice.log_prob, text)


def chosen(writers: Sequence[Writer], logits: Tensor) -> list[Choice]:
    """The next token of each writer, from the logits (B, V) after its pending token; to be accepted by it."""
    return choose([writer.chooser for writer in writers], logits, [writer.state.recent for writer in writers])
