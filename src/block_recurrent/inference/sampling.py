"""Sampling of the next token. The options have the same meaning and order as in transformers.

Each sequence has its own random number generator, and logits are processed in float64 on the CPU: the text of a seed
does not depend on the rest of the batch.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from block_recurrent.errors import ConfigError, InputError, did_you_mean

ABOVE_0, MOST_NUMBER, MOST_WHOLE = math.ulp(0.0), sys.float_info.max, 2**63 - 1
MOST_POWER = 10  # of a length: a number, however long the text
REMEMBERED_TOKENS = 512
"""Number of tokens that the repetition penalty considers; a session keeps this many of its last tokens."""

MOST_BEAMS = 1024


@dataclass(frozen=True)
class Sampling:
    """Sampling options. The default samples from the model's distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to at least this."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: float = 1.0
    """Penalizes the last tokens (up to 512): divides logits above 0, multiplies those below."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation; they are not part of the output."""
    seed: int = 0
    """The random seed."""
    beams: int = 1
    """More than 1: beam search instead of sampling."""
    length_penalty: float = 1.0
    """For beam search: sums of log-probabilities are divided by the length to this power."""
    end_at_mark: bool = True
    """Whether the document mark (eos) ends the generation; if not, it is never chosen."""

    def __post_init__(self) -> None:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop is {self.stop!r}: it must be a non-empty string, or a list of such strings")
        object.__setattr__(self, "stop", tuple(stop))
        for name, low, high, rule in (
            ("temperature", 0, MOST_NUMBER, "a number of at least 0, where 0 is greedy"),
            ("top_p", ABOVE_0, 1, "a number above 0 and up to 1"),
            ("min_p", 0, 1, "a number from 0 to 1"),
            ("repetition_penalty", ABOVE_0, MOST_NUMBER, "a number above 0, where 1 is none"),
            ("length_penalty", -MOST_POWER, MOST_POWER, f"a number from -{MOST_POWER} to {MOST_POWER}"),
            ("top_k", 0, MOST_WHOLE, "a whole number of at least 0, where 0 is all tokens"),
            ("seed", 0, MOST_WHOLE, "a whole number of at least 0, below 2^63"),
            ("beams", 1, MOST_BEAMS, f"a whole number from 1 (no beam search) to {MOST_BEAMS}"),
        ):
            value, kinds = getattr(self, name), (int,) if high in (MOST_WHOLE, MOST_BEAMS) else (int, float)
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}: it must be {rule}")
        if not isinstance(self.end_at_mark, bool):
            raise ConfigError(f"end_at_mark is {self.end_at_mark!r}: it must be true or false")
        if self.beams > 1 and (self.temperature not in (0, 1) or self.top_k or self.top_p < 1 or self.min_p):
            raise ConfigError(
                f"beams is {self.beams}, and temperature, top_k, top_p or min_p is set: beam search does not sample; "
                "omit those options, or beams"
            )

    @classmethod
    def of(cls, **options: Any) -> Sampling:
        """Create from keywords; an unknown one is an error that names the nearest."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in names:
                raise ConfigError(f"unknown option '{key}'{did_you_mean(key, names)}; options are {', '.join(names)}")
        return cls(**options)


@dataclass(frozen=True)
class Choice:
    """A token and its natural log-probability under the model, before any sampling option."""

    token: int
    log_prob: float


class Chooser:
    """The options of one sequence, and its random numbers."""

    def __init__(self, sampling: Sampling, eos_token_id: int) -> None:
        self.sampling, self.eos_token_id = sampling, eos_token_id
        self._random = torch.Generator().manual_seed(sampling.seed)

        s = sampling
        self.is_plain = not s.top_k and s.top_p == 1 and not s.min_p and s.repetition_penalty == 1
        """Whether logits are only divided by the temperature, and the document mark left out."""

    def draw(self) -> float:
        """The next random number, from 0 to 1."""
        return torch.rand((), generator=self._random, dtype=torch.float64).item()


def choose(choosers: Sequence[Chooser], logits: Tensor, recent: Sequence[Sequence[int]]) -> list[Choice]:
    """The next token of each sequence from its logits (B, V); recent: its last tokens, for the repetition penalty.

    With numpy, and for all sequences at once: small calls take less time. Each row is computed as it would be alone.
    A choice of logits that are not finite has a log-probability that is not.
    """
    plain = logits.detach().to("cpu", torch.float64).numpy()
    with np.errstate(all="ignore"):
        highest = plain.max(-1, keepdims=True)
        log_sums = np.log(np.exp(plain - highest).sum(-1)) + highest[:, 0]
        shaped = (plain - highest) / np.array([[chooser.sampling.temperature or 1] for chooser in choosers])
    for row, chooser, last in zip(range(len(plain)), choosers, recent, strict=True):
        if not chooser.is_plain:
            shaped[row] = shape_logits(torch.from_numpy(plain[row]), last, chooser.sampling, chooser.eos_token_id)
        elif not chooser.sampling.end_at_mark:
            shaped[row, chooser.eos_token_id] = -np.inf
    with np.errstate(all="ignore"):
        cumulative = np.exp(shaped - shaped.max(-1, keepdims=True)).cumsum(-1)
    tokens = shaped.argmax(-1).tolist()
    for row, chooser in enumerate(choosers):
        if chooser.sampling.temperature > 0:
            own, drawn = cumulative[row], chooser.draw() * cumulative[row, -1]
            # side="right": the first entry above the random number, which has a probability above 0.
            tokens[row] = min(int(own.searchsorted(drawn, side="right")), int(own.argmax()))
    return [Choice(token, float(plain[row, token] - log_sums[row])) for row, token in enumerate(tokens)]


def check_finite(result: float) -> None:
    """Raise an error unless what was computed from the logits is finite."""
    if not math.isfinite(result):
        raise InputError("the model's logits are not finite: its weights are damaged or its training has diverged")


def shape_logits(logits: Tensor, recent: Sequence[int] | Tensor, sampling: Sampling, eos_token_id: int) -> Tensor:
    """The processed logits (..., V): penalty, temperature, top-k, top-p and min-p, in this order."""
    logits = penalized(logits, recent, sampling.repetition_penalty)
    if not sampling.end_at_mark:
        logits = logits.clone()
        logits[..., eos_token_id] = -torch.inf
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort()
        # From the least likely up; the most likely token is always kept.
        out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out[..., -1] = False
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    if sampling.min_p > 0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits


def penalized(scores: Tensor, recent: Sequence[int] | Tensor, penalty: float) -> Tensor:
    """Scores (..., V) after the repetition penalty on the tokens in `recent` (..., n); the id V is no token."""
    if penalty == 1 or len(recent) == 0:
        return scores
    seen, scores = torch.as_tensor(recent, device=scores.device), F.pad(scores, (0, 1))
    theirs = scores.gather(-1, seen)
    # A token that occurs several times gets the same value each time.
    return scores.scatter(-1, seen, torch.where(theirs < 0, theirs * penalty, theirs / penalty))[..., :-1]


def check_max_tokens(max_tokens: Any) -> None:
    """Raise an error unless max_tokens is a whole number of at least 1."""
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens!r}: it must be a whole number of at least 1")
