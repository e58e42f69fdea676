"""Beam search, as in transformers: see `generate(num_beams=...)` there.

At every step the `2 * beams` best continuations of all running beams are considered. Those that end (document mark,
stop string, length) are kept as finished if they are among the first `beams`; the best others are the next beams.
Sums of log-probabilities are compared after division by length ** length_penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from block_recurrent.inference.sampling import REMEMBERED_TOKENS, Sampling, penalized
from block_recurrent.inference.session import Session
from block_recurrent.inference.text_stream import TextStream
from block_recurrent.inference.writer import LENGTH, MARK, STOP, Written
from block_recurrent.model.memory import DocumentMemory


@dataclass(frozen=True)
class Beam:
    """An unfinished hypothesis."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    score: float = 0.0  # sum of log-probabilities, including penalties
    lane: int = 0  # of the memory before its last token


@dataclass(frozen=True)
class Finished:
    """A finished hypothesis."""

    beam: Beam
    score: float  # divided by length
    ended: str
    memory: DocumentMemory  # of all its tokens but the last


def search(session: Session, max_tokens: int, sampling: Sampling) -> list[Written]:
    """The best texts, best first; the session continues from the first one."""
    session.flush()
    finished: list[Finished] = []
    beams, memory = [Beam()], session.memory
    for step in range(1, max_tokens + 1):
        pending = [beam.tokens[-1] if beam.tokens else session.state.pending for beam in beams]
        logits, after = session.engine.decode(pending, memory)
        running: list[Beam] = []
        for rank, beam in enumerate(_continuations(session, beams, logits, sampling)):
            ended = _ending(session, beam, sampling, at_end=step == max_tokens)
            if ended is None:
                running.append(beam)
            elif rank < sampling.beams:
                before = memory if ended == MARK else after
                score = beam.score / step**sampling.length_penalty
                finished.append(Finished(beam, score, ended, before.select([beam.lane])))
        finished = sorted(finished, key=lambda one: -one.score)[: sampling.beams]
        beams = running[: sampling.beams]
        if not beams or _nothing_better(finished, beams[0], step, sampling):
            break
        memory = after.select([beam.lane for beam in beams])
        beams = [replace(beam, lane=lane) for lane, beam in enumerate(beams)]
    written = [_written(session, one, sampling) for one in finished]
    _go_on(session, finished[0])
    return written


def _continuations(session: Session, beams: list[Beam], logits: Tensor, sampling: Sampling) -> list[Beam]:
    """The best continuations of all beams by one token, best first: twice the number of beams."""
    plain = logits.to("cpu", torch.float64).log_softmax(-1)
    scores = plain.clone()
    for lane, beam in enumerate(beams):
        recent = (*session.state.recent, *beam.tokens)[-REMEMBERED_TOKENS:]
        scores[lane] = beam.score + penalized(plain[lane], recent, sampling.repetition_penalty)
    if not sampling.end_at_mark:
        scores[:, session.tokenizer.eos_token_id] = -torch.inf
    best = scores.flatten().topk(min(2 * sampling.beams, scores.numel()))
    found = []
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        lane, token = divmod(index, plain.shape[1])
        old = beams[lane]
        found.append(Beam((*old.tokens, token), (*old.log_probs, float(plain[lane, token])), score, lane))
    return found


def _ending(session: Session, beam: Beam, sampling: Sampling, at_end: bool) -> str | None:
    """Why this beam ends, or None."""
    if beam.tokens[-1] == session.tokenizer.eos_token_id:
        return MARK
    if sampling.stop and _text(session, beam, sampling)[1]:
        return STOP
    return LENGTH if at_end else None


def _nothing_better(finished: list[Finished], best: Beam, step: int, sampling: Sampling) -> bool:
    """Whether no running beam can be expected to beat the worst of a full set of finished ones."""
    return len(finished) == sampling.beams and best.score / step**sampling.length_penalty <= finished[-1].score


def _text(session: Session, beam: Beam, sampling: Sampling) -> tuple[str, bool]:
    """The beam's text, and whether a stop string ends it."""
    stream = TextStream(session.tokenizer, session.state.recent, sampling.stop)
    text = "".join(stream.push(token) for token in beam.tokens)
    return text if stream.stopped else text + stream.finish(), stream.stopped


def _written(session: Session, one: Finished, sampling: Sampling) -> Written:
    count = len(one.beam.tokens) - (one.ended == MARK)
    text, _ = _text(session, one.beam, sampling)
    return Written(text, one.beam.tokens[:count], one.beam.log_probs[:count], one.ended)


def _go_on(session: Session, one: Finished) -> None:
    """Move the session to the end of a text that was found."""
    tokens = [token for token in one.beam.tokens if token != session.tokenizer.eos_token_id]
    if tokens:
        raw = session.tokenizer.decode_bytes(tokens, begin=session.position == 0)
        session.state = session.state.after(one.memory, tokens, raw)
