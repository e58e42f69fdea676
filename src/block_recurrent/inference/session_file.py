"""Memory files of sessions: the memory, with the rest of the session in the header.

The header has the model and tokenizer (by hash and by name), the token to feed next, the text held
back, the last tokens (for the repetition penalty), the number of tokens read, and a hash of the text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from block_recurrent.data import Tokenizer
from block_recurrent.errors import FileFormatError, MemoryMismatchError
from block_recurrent.inference.engine import Engine
from block_recurrent.inference.sampling import REMEMBERED_TOKENS
from block_recurrent.inference.session import Session
from block_recurrent.inference.session_state import SessionState
from block_recurrent.inference.text_hash import TextHash
from block_recurrent.io.door import Rule, check_schema, is_count, is_hash, is_text, is_utf8
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory_file import FORMAT, load_memory_with_extra, save_memory

BEGINNING = 256
"""Number of bytes in which to look for the format name."""
SHORT = 12
"""Digits of a hash in messages."""


@dataclass(frozen=True)
class MemoryFile:
    """A memory file, loaded and verified, but not yet matched with a model."""

    path: Path
    state: SessionState
    model_name: str
    model_hash: str
    tokenizer_hash: str
    notes: dict[str, Any]
    """Additional plain values saved with it, such as its trail."""

    @property
    def tokens(self) -> int:
        """Number of tokens read and generated."""
        return self.state.position

    @property
    def text_hash(self) -> str:
        """Hash of all text so far, including text held back."""
        return self.state.text.update(self.state.held).hexdigest()


def save_session(session: Session, path: Path, notes: dict[str, Any] | None = None) -> None:
    """Save the session to a memory file; never replaces a file of another kind."""
    check_target(path)
    state = session.state
    model_hash = session.engine.fingerprint()
    extra = {
        "model_name": name_of(session),
        "tokenizer": session.tokenizer.sha256,
        "pending": state.pending,
        "recent": list(state.recent),
        "held": state.held.hex(),
        "text": state.text.to_dict(),
        "text_hash": state.text.update(state.held).hexdigest(),
        "notes": notes or {},
    }
    save_memory(replace(state.memory, maker=None, fingerprint=model_hash), path, extra)


def read_memory_file(path: str | Path) -> MemoryFile:
    """Load and verify the memory file of a session."""
    path = Path(path)
    memory, extra = load_memory_with_extra(path)
    if memory.lanes != 1:
        raise FileFormatError(f"'{path}' is a memory of {memory.lanes} lanes: a session has one")
    try:
        check_schema(extra, _rules(memory.config.vocab_size), "its header")
        state = SessionState(
            memory=memory,
            pending=extra["pending"],
            recent=tuple(extra["recent"]),
            held=bytes.fromhex(extra["held"]),
            text=TextHash.from_dict(extra["text"]),
        )
        names = extra["model_name"], str(memory.fingerprint), extra["tokenizer"]
        file = MemoryFile(path, state, *names, notes=dict(extra.get("notes", {})))
        if file.text_hash != extra["text_hash"]:
            raise ValueError("the hash of the text")
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"'{path}' is a memory, but not of a session: its header lacks or misstates {error}; "
            "create it with 'brt read' or Session.save"
        ) from None
    return file


def _rules(vocab_size: int) -> dict[str, Rule]:
    """The schema of the header of a session's memory."""

    def is_token(value: Any) -> bool:
        return is_count(value) and value < vocab_size

    return {
        "model_name": is_text,
        "tokenizer": is_hash,
        "pending": is_token,
        "recent": lambda x: isinstance(x, list) and len(x) <= REMEMBERED_TOKENS and all(map(is_token, x)),
        "held": is_text,
        "text": lambda x: isinstance(x, dict),
        "text_hash": is_hash,
        "notes?": lambda x: isinstance(x, dict),
    }


def load_session(path: Path, model: BlockRecurrentLM | Engine, tokenizer: Tokenizer, name: str | None) -> Session:
    """The session of a memory file, after checking that it was made with this model and tokenizer."""
    file = read_memory_file(path)
    session = Session(model, tokenizer, name=name)
    _refuse_other_model(file, session)
    if file.tokenizer_hash != tokenizer.sha256:
        raise MemoryMismatchError(
            f"memory file '{path}' was made with tokenizer {file.tokenizer_hash[:SHORT]}, this one is "
            f"{tokenizer.sha256[:SHORT]}: a memory can be used only with the tokenizer that made it"
        )
    session.state = replace(file.state, memory=file.state.memory.to(session.memory.device, session.memory.dtype))
    return session


def _refuse_other_model(file: MemoryFile, session: Session) -> None:
    mine = session.engine.fingerprint()
    if file.model_hash == mine:
        return
    theirs = f"'{file.model_name}' (weights {file.model_hash[:SHORT]})"
    ours = f"'{name_of(session)}' (weights {mine[:SHORT]})"
    raise MemoryMismatchError(
        f"memory file '{file.path}' belongs to model {theirs}, not to {ours}: "
        "a memory can be used only with the weights that made it; read the text again with this model"
    )


def name_of(session: Session) -> str:
    """The name of the session's model, or a description of it."""
    if session.name:
        return session.name
    config = session.engine.config
    kind = "recurrent" if config.recurrent_layers else "memorizing" if config.memory_layers else "sliding window"
    return f"{kind}, {config.num_layers} layers of width {config.d_model}"


def check_target(path: Path) -> None:
    """Raise an error if a memory can't be written there, or would replace a file of another kind, such as a book."""
    if not is_utf8(path):
        raise FileFormatError(f"the memory can't be written to '{path}': its name is not UTF-8: choose another")
    if not path.parent.is_dir():
        raise FileFormatError(f"the memory can't be written to '{path}': there is no folder '{path.parent}'")
    if not os.access(path.parent, os.W_OK):
        raise FileFormatError(f"the memory can't be written to '{path}': directory '{path.parent}' is not writable")
    if not path.exists():
        return
    if not path.is_file():
        raise FileFormatError(f"the memory can't be written to '{path}': it is not a regular file")
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    if FORMAT.encode() not in beginning:
        raise FileFormatError(f"'{path}' exists and is not a memory file: choose another name")


def describe(file: MemoryFile) -> dict[str, Any]:
    """A readable summary of a memory file."""
    config = file.state.memory.config
    position, window = file.tokens, config.window
    return {
        "model": file.model_name,
        "model_hash": file.model_hash[:SHORT],
        "tokenizer_hash": file.tokenizer_hash[:SHORT],
        "text_hash": file.text_hash,
        "text_bytes": file.state.text.length + len(file.state.held),
        "tokens": position,
        "held_back_bytes": len(file.state.held),
        "open_block": f"{int(file.state.memory.tokens_read[0]) % window} of {window} tokens",
        "memory_bytes": file.state.memory.nbytes,
        "file_bytes": file.path.stat().st_size,
    }
