"""Interactive generation: type text, and the model continues it. Lines that begin with a slash are commands."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from block_recurrent.errors import BlockRecurrentError, did_you_mean
from block_recurrent.inference.sampling import Sampling
from block_recurrent.inference.session import Session
from block_recurrent.inference.session_state import SessionState

KEPT_STEPS = 32  # number of steps for /undo. Each step keeps a memory, which may take many megabytes.


class Conversation:
    """Branches of a document, and the history for undo."""

    def __init__(
        self,
        session: Session,
        max_tokens: int,
        sampling: Sampling,
        source: TextIO | None = None,
        out: TextIO | None = None,
    ) -> None:
        self.session, self.max_tokens, self.sampling = session, max_tokens, sampling
        self._in, self._out = source or sys.stdin, out or sys.stdout
        if isinstance(self._in, io.TextIOWrapper):  # a byte that is not UTF-8 must not end the conversation
            self._in.reconfigure(errors="replace")
        self._branches: dict[int, SessionState] = {1: session.state}
        self._branch = 1
        self._before: list[SessionState] = []
        self._own: set[Path] = set()  # files saved in this conversation
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/save": (self._save, "/save FILE   save the memory to a file; /save! FILE overwrites"),
            "/save!": (lambda path: self._save(path, replace=True), ""),
            "/load": (self._load, "/load FILE   continue from a memory file of this model"),
            "/fork": (self._fork, "/fork [N]    start a new branch here, or switch to branch N"),
            "/undo": (self._undo, "/undo        undo the last line and the text generated after it"),
            "/where": (self._where, "/where       show the branch, the position and the last text"),
            "/help": (self._help, "/help        show this list"),
            "/quit": (self._help, "/quit        quit, like Ctrl-D; Ctrl-C only stops generating"),
        }

    def run(self) -> int:
        """Run until the input ends or /quit. Errors are printed, and nothing is lost."""
        self._say(f"{self.session.position:,} tokens read. Type text to continue; /help lists the commands.\n")
        while True:
            try:
                self._say("> ")
                line = self._in.readline()
                if not line or line.strip() == "/quit":
                    self._say("\n")
                    return 0
                self.take(line.rstrip("\n"))
            except KeyboardInterrupt:
                self._say("\n")
            except BlockRecurrentError as error:
                self._say(f"{error}\n")

    def take(self, line: str) -> None:
        """One line: a command, or text to read and continue; an empty line just continues."""
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name not in self._commands:
                raise BlockRecurrentError(
                    f"there is no command '{name}'{did_you_mean(name, self._commands)}; see /help"
                )
            self._commands[name][0](rest.strip())
            return
        self._remember()
        if line:
            self.session.read(line)
        # A different seed for each turn: turns must not share random numbers. The position makes it reproducible.
        sampling = replace(self.sampling, seed=self.sampling.seed + self.session.position)
        try:
            for piece in self.session.write(self.max_tokens, sampling):
                self._say(piece)
        finally:
            # Also after Ctrl-C, which stops generating: the text so far is kept.
            self._say("\n")

    def _remember(self) -> None:
        self._before = [*self._before, self.session.state][-KEPT_STEPS:]

    def _save(self, path: str, replace: bool = False) -> None:
        file = _file_of("/save", path)
        if file.exists() and not replace and file.resolve() not in self._own:
            raise BlockRecurrentError(f"'{path}' exists: use /save! {path} to overwrite it, or another name")
        self.session.save(file)
        self._own.add(file.resolve())
        self._say(f"saved to '{path}'\n")

    def _load(self, path: str) -> None:
        file = _file_of("/load", path)
        loaded = Session.load(file, self.session.engine, self.session.tokenizer, name=self.session.name)
        self._remember()
        self.session.state = loaded.state
        self._where("")

    def _fork(self, number: str) -> None:
        self._branches[self._branch] = self.session.state
        if not number:
            self._branch = max(self._branches) + 1
            self._branches[self._branch] = self.session.state
        elif not number.isdecimal() or int(number) not in self._branches:
            raise BlockRecurrentError(
                f"there is no branch '{number}': there are {', '.join(map(str, sorted(self._branches)))}"
            )
        else:
            self._branch = int(number)
        self.session.state, self._before = self._branches[self._branch], []
        self._where("")

    def _undo(self, _: str) -> None:
        if not self._before:
            raise BlockRecurrentError("nothing to undo")
        self.session.state = self._before.pop()
        self._where("")

    def _where(self, _: str) -> None:
        config, tail = self.session.engine.config, self.session.state.recent[-40:]
        text = self.session.tokenizer.decode(list(tail)).replace("\n", " ")
        self._say(
            f"branch {self._branch} of {len(self._branches)}, {self.session.position:,} tokens, "
            f"{self.session.position % config.window} of {config.window} in the current block, after: …{text}\n"
        )

    def _help(self, _: str) -> None:
        self._say("".join(f"{text}\n" for _, text in self._commands.values() if text))

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _file_of(command: str, path: str) -> Path:
    if not path:
        raise BlockRecurrentError(f"{command} needs the name of a file")
    return Path(path)
