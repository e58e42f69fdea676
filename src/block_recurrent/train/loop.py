"""The training loop: `train(config, run)` from a configuration to a trained model in a folder."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from block_recurrent import runtime as rt
from block_recurrent.checkpoint import Checkpoint, find_checkpoint, prune
from block_recurrent.data import Corpus, LaneStream
from block_recurrent.errors import CheckpointError, ConfigError
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig
from block_recurrent.runtime import Runtime
from block_recurrent.train.folder import locked, open_run
from block_recurrent.train.optimizer import make_optimizer
from block_recurrent.train.parallel import distribute, prepare_layers
from block_recurrent.train.report import METRICS, Reporter, cut_back
from block_recurrent.train.snapshot import Progress, Snapshot
from block_recurrent.train.step import Updater
from block_recurrent.train.validation import SPLIT, Validator
from block_recurrent.train.watch import GateWatch, state_norms


def train(config: RunConfig, run: Path, resume: str = "auto") -> bool:
    """Train, or go on training, in the folder `run`. Returns whether the last step was reached."""
    with rt.start(config.train.device, config.train.dtype) as runtime, ExitStack() as stack:
        runtime.on_main(lambda: stack.enter_context(locked(run)) if runtime.is_main else None)
        corpus = Corpus(config.data.path)
        config = settle(config, corpus, runtime)
        start, notes = runtime.on_main(lambda: open_run(run, config, corpus.tokenizer, resume))
        trainer = Trainer(config, corpus, runtime)
        notes += trainer.start_from(start)
        first = trainer.progress.step
        if runtime.is_main:
            cut_back(run / METRICS, first)
        reporter = Reporter(run if runtime.is_main else None, config.train.steps, first, config.train.log_every)
        with reporter:
            for note in notes:
                reporter.warn(note)
            reporter.say(trainer.headline())
            return trainer.run(run, reporter)


def settle(config: RunConfig, corpus: Corpus, runtime: Runtime) -> RunConfig:
    """The configuration with everything filled in that depends on the data and on where it runs."""
    if config.model.vocab_size != corpus.vocab_size:
        raise ConfigError(f"model.vocab_size is {config.model.vocab_size}, but the data has {corpus.vocab_size} pieces")
    groups = runtime.world * config.train.accumulate
    if config.train.lanes % groups:
        raise ConfigError(
            f"train.lanes is {config.train.lanes}: it must be a multiple of processes times train.accumulate, "
            f"{runtime.world} x {config.train.accumulate}; try {max(1, config.train.lanes // groups) * groups}"
        )
    config = config.replace("data", path=str(Path(config.data.path).resolve()), fingerprint=corpus.fingerprint)
    return config.replace("train", dtype=str(runtime.dtype).removeprefix("torch."))


class Trainer:
    """A model in training: its weights, optimizer, memories and data, all at one step."""

    def __init__(self, config: RunConfig, corpus: Corpus, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        lanes = config.train.lanes
        rt.seed(config.train.seed)  # the same weights on every process
        model = BlockRecurrentLM(config.model).to(runtime.device)
        self.gates = GateWatch(model)
        prepare_layers(model, config.train)
        self.module = distribute(model, config.train, runtime.world)
        optimizer = make_optimizer(model, config.optimizer)
        groups = config.train.accumulate
        per_group = lanes // runtime.world // groups
        memories = [DocumentMemory.empty(config.model, per_group, runtime.device) for _ in range(groups)]
        self.snapshot = Snapshot(runtime, model, optimizer, memories)
        self.updater = Updater(config, runtime, model, self.module, optimizer)
        self.stream = LaneStream(
            corpus, "train", lanes, config.model.segment, config.train.seed, runtime.rank, runtime.world,
            prefetch=config.data.prefetch,
        )  # fmt: skip
        has_validation = bool(corpus.documents(SPLIT))
        self.validator = Validator(corpus, config, runtime, self.module) if has_validation else None
        rt.seed(config.train.seed, runtime.rank + 1)  # dropout: other numbers on every process
        self.module.train()

    @property
    def progress(self) -> Progress:
        return self.snapshot.progress

    def start_from(self, checkpoint: Checkpoint | None) -> list[str]:
        """Go on from a checkpoint, or take the weights that the configuration names. Returns what to tell the user."""
        if checkpoint is not None:
            notes = self.snapshot.load(checkpoint.path, self.config.train.seed)
            self.stream.load_state_dict(self.progress.cursor)
            return notes
        if self.config.train.init_from:
            source = Path(self.config.train.init_from)
            found, notes = find_checkpoint(source, source if (source / "manifest.json").is_file() else "last")
            if found is None:
                raise CheckpointError(f"--init-from {source}: there is no checkpoint in it")
            self.snapshot.load_weights(found.path)
            return notes
        return []

    def headline(self) -> str:
        """What the run is, in a line."""
        config, train = self.config, self.config.train
        params = sum(p.numel() for p in self.snapshot.model.parameters())
        done = f"goes on after step {self.progress.step}" if self.progress.step else "starts"
        missing = "" if self.validator else "; the data has no validation split, so there is no validation"
        return (
            f"{config.system} {config.size} {done} of {train.steps}: {params:,} parameters, {train.lanes} lanes of "
            f"{config.model.segment} tokens, {self.runtime.device.type} {train.dtype}{missing}"
        )

    def run(self, run: Path, reporter: Reporter) -> bool:
        """Train to the last step, or until asked to stop. Returns whether the last step was reached."""
        with self.stream, stop_on_signal() as asked:
            while self.progress.step < self.config.train.steps:
                stop = self.one_step(reporter, asked.is_set()) or (self.runtime.world == 1 and asked.is_set())
                is_last = self.progress.step == self.config.train.steps
                bits, is_best = self.validate(reporter, is_last)
                if stop or is_last or is_best or _due(self.progress.step, self.config.train.save_every):
                    path = self.snapshot.save(run, bits)
                    if self.runtime.is_main:
                        prune(run, self.config.train.keep)
                if stop and not is_last:
                    reporter.say(f"stopped after step {self.progress.step}; everything is saved in '{path}'")
                    return False
        reporter.say(f"step {self.progress.step} of {self.config.train.steps} is reached; the run is in '{run}'")
        return True

    def one_step(self, reporter: Reporter, stop: bool) -> bool:
        """One update and its line of metrics; returns whether any process was asked to stop."""
        began = time.perf_counter()
        segments = [next(self.stream) for _ in range(self.config.train.bptt)]
        waited = time.perf_counter() - began
        step = self.progress.step + 1
        update, self.snapshot.memories = self.updater.update(step, segments, self.snapshot.memories, stop)
        self.progress.step = step
        self.progress.tokens_seen += update.text_tokens
        self.progress.cursor = segments[-1].cursor
        watched = self.gates.take() | state_norms(self.snapshot.memories)
        values = torch.stack(list(watched.values())).tolist() if watched else []
        seconds = time.perf_counter() - began
        reporter.metrics(
            {
                "split": "train",
                "step": step,
                "tokens": update.text_tokens,
                "bits_per_token": update.bits_per_token,
                "tokens_seen": self.progress.tokens_seen,
                "learning_rate": update.learning_rate,
                "gradient_norm": update.gradient_norm,
                "tokens_per_second": update.text_tokens / seconds,
                "data_wait": waited / seconds,
                **dict(zip(watched, values, strict=True)),
            }
        )
        return update.stop

    def validate(self, reporter: Reporter, is_last: bool) -> tuple[float | None, bool]:
        """Validation where it is due: bits per token, and whether they are the best so far."""
        if self.validator is None or not (is_last or _due(self.progress.step, self.config.eval.every)):
            return None, False
        result = self.validator.run()
        record = {"split": SPLIT, "step": self.progress.step, **result._asdict()}
        reporter.metrics({k: v for k, v in record.items() if v is not None})
        limit = self.config.eval.state_warning
        if (
            result.state_gain is not None
            and result.state_gain < limit
            and self.progress.step >= self.config.schedule.warmup
        ):
            reporter.warn(
                f"step {self.progress.step}: the recurrent state is being ignored: carrying it saves "
                f"{result.state_gain:.5f} bits per token, less than eval.state_warning {limit}"
            )
        is_best = self.progress.best_bits is None or result.bits_per_token < self.progress.best_bits
        if is_best:
            self.progress.best_bits = result.bits_per_token
        return result.bits_per_token, is_best


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that the step under way can be finished and saved.

    A second Ctrl-C stops at once.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
