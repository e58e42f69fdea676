"""The training loop: `train(config, run)` trains the model of a configuration in a run folder."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from block_recurrent import models
from block_recurrent import runtime as rt
from block_recurrent.accounting import check_weights_fit, cost_of, machine_memory
from block_recurrent.checkpoint import INITIAL_STATE, Checkpoint, find_checkpoint
from block_recurrent.data import Corpus, LaneStream, Segment, SegmentStream, Tokenizer
from block_recurrent.data.streams.repeats import Repeats
from block_recurrent.errors import CheckpointError, ConfigError
from block_recurrent.io.progress import Progress, shown_status
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory
from block_recurrent.run_config import RunConfig, check_same_tokenizer
from block_recurrent.runtime import Runtime
from block_recurrent.train.boards import Board, open_boards
from block_recurrent.train.gate_metrics import GateActivations, state_norms
from block_recurrent.train.loss import SegmentsLoss
from block_recurrent.train.optimizer import make_optimizer
from block_recurrent.train.parallel import distribute, prepare_layers
from block_recurrent.train.report import METRICS, Reporter, cut_back
from block_recurrent.train.run_folder import check_resume, locked, open_run, starting_point
from block_recurrent.train.state import Counters, TrainingState
from block_recurrent.train.step import Update, Updater
from block_recurrent.train.validation import SPLIT, Validator

REPEAT_WINDOWS = 8  # how far back planted repeats reach
Evaluate = Callable[[SegmentsLoss, Progress], dict[str, float]]
"""Scores the model in training; `bits_per_token` of its result decides which checkpoint is the best."""


@dataclass(frozen=True)
class Task:
    """What a run trains on."""

    stream: SegmentStream
    """The segments of all lanes, step by step."""
    tokenizer: Tokenizer
    """The tokenizer that is saved with the run."""
    fingerprint: str
    """Hash of everything that determines the data; it must match when a run is resumed."""
    evaluate: Evaluate | None = None
    """Scores the model at each validation; None: there is no validation."""


OpenTask = Callable[[RunConfig, Runtime], Task]


def corpus_task(config: RunConfig, runtime: Runtime) -> Task:
    """The documents of a prepared folder."""
    corpus, segment = Corpus(config.data.path), config.model.segment
    stream = LaneStream(
        corpus, "train", config.train.lanes, segment, config.train.seed, runtime.rank, runtime.world,
        excerpt=config.data.excerpt, repeats=_repeats(config), prefetch=config.data.prefetch,
    )  # fmt: skip
    evaluate = Validator(corpus, config, runtime) if corpus.documents(SPLIT) else None
    return Task(stream, corpus.tokenizer, corpus.fingerprint, evaluate)


def _repeats(config: RunConfig) -> Repeats | None:
    """What the configuration says of repeats; updates are counted in excerpts there."""
    data, train = config.data, config.train
    if not data.repeats:
        return None
    tokens = data.repeat_steps * train.bptt * train.lanes * config.model.segment
    return Repeats(data.repeats, -(-tokens // data.excerpt), REPEAT_WINDOWS * config.model.window)


def train(config: RunConfig, run: Path, resume: str = "auto", open_task: OpenTask = corpus_task) -> bool:
    """Train, or resume training; return whether the last step was reached.

    Args:
        config: the training configuration.
        run: the run folder.
        resume: "auto" resumes if there is a checkpoint; "must", "never", or a checkpoint folder.
        open_task: opens what to train on; default: the prepared data of the configuration.
    """
    check_resume(resume)
    with rt.start(*config.train.place) as runtime, ExitStack() as stack:
        runtime.on_main(lambda: stack.enter_context(locked(run)) if runtime.is_main else None)
        with shown_status(f"opening '{run}'") if runtime.is_main else nullcontext():
            trainer = Trainer(config, runtime, open_task)
            start, notes = runtime.on_main(lambda: starting_point(run, trainer.config, resume, trainer.state.check))
            notes += trainer.start_from(start)
            notes += runtime.on_main(lambda: open_run(run, trainer.config, trainer.task.tokenizer, start))
        first = trainer.counters.step
        if runtime.is_main:
            cut_back(run / METRICS, first, trainer.lacks_validation)
        boards: list[Board] = []
        runtime.on_main(lambda: boards.extend(open_boards(run, trainer.config, first)))
        reporter = Reporter(run if runtime.is_main else None, config.train.steps, first, config.train.log_every, boards)
        with reporter:
            for note in notes:
                reporter.warn(note)
            reporter.say(trainer.headline())
            return trainer.run(run, reporter)


def complete(config: RunConfig, task: Task, runtime: Runtime) -> RunConfig:
    """The configuration, completed with the values that depend on the data and the hardware."""
    if config.model.vocab_size != task.tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, but the data has {task.tokenizer.vocab_size} pieces"
        )
    path = str(Path(config.data.path).resolve()) if config.data.path else ""
    config = config.replace("data", path=path, fingerprint=task.fingerprint, tokenizer=task.tokenizer.sha256)
    return config.replace("train", dtype=str(runtime.dtype).removeprefix("torch."))


def check_memory(config: RunConfig) -> None:
    """Raise an error before anything is allocated, if this machine can't hold it."""
    check_weights_fit(config.model)
    if (memories := config.train.lanes * cost_of(config.model).memory_bytes) > machine_memory():
        has = f"{machine_memory() / 2**30:,.0f} GiB"
        raise ConfigError(
            f"the memories of the lanes alone need {memories / 2**30:,.0f} GiB, but this machine has {has}: lower "
            "--lanes"
        )


def check_lanes(config: RunConfig, runtime: Runtime) -> None:
    groups = runtime.world * config.train.accumulate
    if config.train.lanes % groups:
        raise ConfigError(
            f"train.lanes is {config.train.lanes}: it must be a multiple of processes times train.accumulate, "
            f"{runtime.world} x {config.train.accumulate}; try {max(1, config.train.lanes // groups) * groups}"
        )


def freeze_all_but_initial_states(model: BlockRecurrentLM) -> None:
    """State tuning: train only the initial state of documents."""
    if not model.config.recurrent_layers:
        raise ConfigError(
            "train.tune is 'state', but this model has no recurrent state: choose a rec- or feedback- system"
        )
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith(INITIAL_STATE))


class Trainer:
    """A model in training: its weights, optimizer, memories and data, all at one step."""

    def __init__(self, config: RunConfig, runtime: Runtime, open_task: OpenTask = corpus_task) -> None:
        check_lanes(config, runtime)
        check_memory(config)
        self.runtime, self.task = runtime, open_task(config, runtime)
        self.config = config = complete(config, self.task, runtime)
        self.stream = self.task.stream
        rt.seed(config.train.seed)  # the same weights on every process
        model = BlockRecurrentLM(config.model).to(runtime.device)
        if config.train.tune == "state":
            freeze_all_but_initial_states(model)
        self.gates = GateActivations(model)
        prepare_layers(model, config.train)
        self.module = SegmentsLoss(model).train()
        distributed = distribute(self.module, config.train, runtime)
        optimizer = make_optimizer(model, config.optimizer)
        groups = config.train.accumulate
        per_group = config.train.lanes // runtime.world // groups
        # Caches have the dtype that calls give them, so that layers are compiled once.
        memories = [
            DocumentMemory.empty(config.model, per_group, runtime.device, cache_dtype=runtime.dtype)
            for _ in range(groups)
        ]
        self.state = TrainingState(runtime, model, optimizer, memories)
        self.updater = Updater(config, runtime, model, distributed, optimizer, self._watched)
        self._evaluated = self.lacks_validation = False
        rt.seed(config.train.seed, runtime.rank + 1)  # dropout: different random numbers on every process

    @property
    def counters(self) -> Counters:
        return self.state.counters

    @property
    def last_step(self) -> int:
        return self.stream.last_step or self.config.train.steps

    def start_from(self, checkpoint: Checkpoint | None) -> list[str]:
        """Resume from a checkpoint, or load the weights that the configuration names. Returns notes for the user."""
        if checkpoint is not None:
            notes = self.state.load(checkpoint.path, self.config.train.seed)
            self.stream.load_state_dict(self.counters.cursor)
            # It was saved before the validation of its step, which did not end.
            is_due = self._evaluates(self.counters.step == self.last_step)
            self.lacks_validation = is_due and checkpoint.validation_bits is None
            return notes
        if self.config.train.init_from:
            source, which, told = models.locate(self.config.train.init_from)
            found, notes = find_checkpoint(source, which)
            if found is None:
                raise CheckpointError(f"--init-from {source}: it has no checkpoint")
            check_same_tokenizer(self.config.train.init_from, self.task.tokenizer.sha256, self.config.data.path)
            self.state.load_weights(found.path)
            return told + notes
        return []

    def headline(self) -> str:
        """A one-line description of the run."""
        config, train = self.config, self.config.train
        params = sum(p.numel() for p in self.state.model.parameters())
        step, steps = self.counters.step, f"{train.steps:,} steps"
        begin = f"resuming after step {step} of {steps}" if step else f"starting: {steps}"
        missing = "" if self.task.evaluate else "; no validation, since the data has no validation split"
        return (
            f"{config.system} {config.size}, {begin}, {params:,} parameters, {train.lanes} lanes of "
            f"{config.model.segment} tokens, {self.runtime.device.type} {train.dtype}{missing}"
        )

    def run(self, run: Path, reporter: Reporter) -> bool:
        """Train to the last step, or until asked to stop. Returns whether the last step was reached."""
        if self.counters.step >= self.last_step and not self.lacks_validation:
            reporter.say(f"nothing to do: the run is at step {self.counters.step}, and --steps is {self.last_step}")
            return True
        keep = self.config.train.keep
        with self.stream, stop_on_signal() as asked, self.state.saving():
            while self.counters.step < self.last_step or self.lacks_validation:
                stop = False
                if not self.lacks_validation:
                    stop = self.one_step(reporter, asked.is_set()) or (self.runtime.world == 1 and asked.is_set())
                is_last = self.counters.step >= self.last_step
                if self._evaluates(is_last) and not (self._evaluated or self.lacks_validation):
                    self.state.save(run, None, keep)  # in case the first validation fails
                bits, is_best = self.evaluate(reporter, is_last)
                if stop or is_last or is_best or _due(self.counters.step, self.config.train.save_every):
                    path = self.state.save(run, bits, keep)
                if stop and not is_last:
                    self.state.wait_for_save()
                    reporter.say(f"stopped after step {self.counters.step}; saved to '{path}'")
                    return False
            self.state.wait_for_save()
        reporter.say(f"done: {self.counters.step} steps; the run is in '{run}'")
        return True

    def next_segments(self) -> list[Segment]:
        return [next(self.stream) for _ in range(self.config.train.bptt)]

    def update(self, step: int, segments: list[Segment], stop: bool = False) -> Update:
        """Run update number `step`, and advance the memories of the lanes."""
        memories = self.state.memories
        update, self.state.memories = self.updater.update(step, self.last_step, segments, memories, stop)
        return update

    def _watched(self, memories: list[DocumentMemory]) -> dict[str, Tensor]:
        return self.gates.take() | state_norms(memories)

    def one_step(self, reporter: Reporter, stop: bool) -> bool:
        """Run one update and log its metrics; returns whether any process was asked to stop."""
        began = time.perf_counter()
        step, segments = self.counters.step + 1, self.next_segments()
        waited = time.perf_counter() - began
        update = self.update(step, segments, stop)
        seen = {}
        if self.stream.observes:
            seen = self.stream.observe(step, np.concatenate(self.runtime.gather(update.nats)))
        self.counters.step = step
        self.counters.tokens_seen += update.text_tokens
        self.counters.cursor = self.stream.state_dict()
        seconds = time.perf_counter() - began
        reporter.metrics(
            {
                "split": "train",
                "step": step,
                "tokens": update.text_tokens,
                "bits_per_token": update.bits_per_token,
                "tokens_seen": self.counters.tokens_seen,
                "learning_rate": update.learning_rate,
                "gradient_norm": update.gradient_norm,
                "tokens_per_second": update.text_tokens / seconds,
                "data_wait": waited / seconds,
                **update.watched,
                **seen,
            }
        )
        return update.stop

    def _evaluates(self, is_last: bool) -> bool:
        return self.task.evaluate is not None and (is_last or _due(self.counters.step, self.config.eval.every))

    def evaluate(self, reporter: Reporter, is_last: bool) -> tuple[float | None, bool]:
        """Validate if it is due: bits per token, and whether they are the best so far."""
        step, evaluate = self.counters.step, self.task.evaluate
        if evaluate is None or not self._evaluates(is_last):
            return None, False
        reporter.status("validating")
        result = evaluate(self.module, lambda done, whole: reporter.status(f"validating: {done:,} of {whole:,} tokens"))
        self._evaluated, self.lacks_validation = True, False
        reporter.metrics({"split": SPLIT, "step": step, **result})
        gain, limit = result.get("state_gain"), self.config.eval.state_warning
        if gain is not None and gain < limit and step >= self.config.schedule.warmup:
            reporter.warn(
                f"step {step}: the model makes no use of the recurrent state: it saves {gain:.5f} bits per token, less "
                f"than eval.state_warning {limit}; this is normal early in training"
            )
        bits = result["bits_per_token"]
        is_best = self.counters.best_bits is None or bits < self.counters.best_bits
        if is_best:
            self.counters.best_bits = bits
        return bits, is_best


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that the current step can be finished and saved.

    A second Ctrl-C stops immediately.
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
