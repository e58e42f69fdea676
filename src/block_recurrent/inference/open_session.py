"""Opens a session of a run, for every command that reads or generates."""

from __future__ import annotations

from pathlib import Path

from block_recurrent.checkpoint import load_run, load_state
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.session import Session
from block_recurrent.runtime import pick_device, pick_dtype


def session_of_run(
    run: str,
    checkpoint: str = "last",
    device: str = "auto",
    weights: str = "float32",
    memory: str | Path | None = None,
    state: str | Path | None = None,
    dtype: str = "auto",
) -> tuple[Session, tuple[str, ...]]:
    """A session of the run's model, new or from a memory file; and notes for the user.

    state: a file of tuned initial states to start documents from. dtype: float32, bfloat16 or auto.
    """
    place = pick_device(device)
    computed_in = pick_dtype(dtype, place)
    loaded = load_run(run, checkpoint, place)
    if state is not None:
        load_state(loaded.model, state)
    engine = Engine(loaded.model, weights, computed_in)
    name = f"{run}, step {loaded.checkpoint.step}{'' if weights == 'float32' else f', {weights}'}"
    name += f", state {Path(state).name}" if state else ""
    if memory is None:
        return Session(engine, loaded.tokenizer, name=name), loaded.notes
    return Session.load(memory, engine, loaded.tokenizer, name=name), loaded.notes
