"""What training reads: segments of lanes, from any stream that can be resumed.

A document of n tokens is read as [mark, t_1 .. t_n] with targets [t_1 .. t_n, mark], the mark being `eos_token_id`. The
mask is True where a target carries training loss. Measures leave the mark out: they count `targets != eos_token_id`.
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
    mask: NDArray[np.bool_]  # (lanes, segment): carries training loss
    starts: NDArray[np.bool_]  # (lanes,): a document begins here
    cursor: Cursor | None = None  # continues after this segment; JSON-serialisable


class SegmentStream:
    """An iterator of segments. For training on documents of your own: `__next__`, `state_dict`, `load_state_dict`.

    A curriculum also sets `observes`: it is told how well the targets were predicted, and may change what comes next.
    """

    observes = False
    last_step: int | None = None
    """The update after which training ends, where the stream decides it; None: `train.steps`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Segment:
        raise NotImplementedError

    def state_dict(self) -> Cursor:
        """Where the stream is: after the last segment it gave. JSON-serialisable."""
        raise NotImplementedError

    def load_state_dict(self, state: Cursor) -> None:
        """Goes to a state of a stream like this one."""
        raise NotImplementedError

    def observe(self, step: int, nats: NDArray[np.float32]) -> dict[str, float]:
        """After update number `step`: the loss of each target of all lanes of all ranks, (lanes, bptt * segment).

        Returns what is to be added to the line of metrics.
        """
        return {}

    def close(self) -> None:
        """Ends what works in the background. The stream may be used again: it goes on after the last segment."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
