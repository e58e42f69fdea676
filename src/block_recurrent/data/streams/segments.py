"""Input of training: segments of lanes, from any resumable stream.

A document of n tokens is read as [mark, t_1 .. t_n] with targets [t_1 .. t_n, mark], the mark being `eos_token_id`. The
mask is True where a target contributes to the training loss. Metrics exclude the mark (`targets != eos_token_id`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Cursor = dict[str, Any]


class Segment(NamedTuple):
    """The next tokens of each lane of this rank. A lane is a row of the batch that reads one document at a time."""

    tokens: NDArray[np.int64]  # (lanes, segment)
    targets: NDArray[np.int64]  # (lanes, segment)
    mask: NDArray[np.bool_]  # (lanes, segment): contributes to the training loss
    starts: NDArray[np.bool_]  # (lanes,): a document begins here
    cursor: Cursor | None = None  # resumes after this segment; JSON-serializable


class SegmentStream:
    """An iterator of segments. To train on custom data, implement `__next__`, `state_dict` and `load_state_dict`.

    A curriculum also sets `observes`: it receives the losses of the targets, and may adapt the data that follows.
    """

    observes = False
    last_step: int | None = None
    """The update after which training ends, if the stream decides it; None: `train.steps`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Segment:
        raise NotImplementedError

    def state_dict(self) -> Cursor:
        """The position of the stream, after the last segment it returned. JSON-serializable."""
        raise NotImplementedError

    def load_state_dict(self, state: Cursor) -> None:
        """Restores the state of an equal stream."""
        raise NotImplementedError

    def observe(self, step: int, nats: NDArray[np.float32]) -> dict[str, float]:
        """Called after update `step` with the loss of each target of all lanes of all ranks, (lanes, bptt * segment).

        Returns values to add to the record of metrics.
        """
        return {}

    def close(self) -> None:
        """Ends background threads. The stream can be used again: it continues after the last segment."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
