"""The sections of a run's configuration, checked when made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from block_recurrent.config import ModelConfig
from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.io.door import seal_toml

VERSION = 2
"""Of config.toml. Files before version 2 have no version and no seal."""
OPTIMIZERS = ("adafactor", "adamw", "muon")
SCHEDULES = ("inverse-sqrt", "cosine", "linear", "constant", "wsd")
ENDING_SCHEDULES = ("cosine", "linear", "wsd")
DTYPES = ("auto", "float32", "bfloat16")
PARALLEL = ("ddp", "fsdp")
TUNE = ("all", "state")


class Section:
    """A part of the configuration: a frozen dataclass whose values have the types that its fields say."""

    section = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, item.name, self._typed(item.name, str(item.type), getattr(self, item.name)))
        self.check()

    def check(self) -> None:
        """Rules beyond types."""

    def _typed(self, name: str, wanted: str, value: Any) -> Any:
        if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        kinds = {"int": int, "float": float, "bool": bool, "str": str}
        words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
        fits = isinstance(value, kinds[wanted]) and (wanted == "bool" or not isinstance(value, bool))
        self.require(name, fits, f"it must be {words[wanted]}")
        self.require(name, wanted != "float" or math.isfinite(value), "it must be a number that is finite")
        is_unicode = wanted != "str" or value.encode("utf-8", "replace").decode() == value
        self.require(name, is_unicode, "it must be UTF-8: rename the folder")
        return value

    def require(self, name: str, holds: bool, rule: str) -> None:
        """An error that names the value and the rule, unless it holds."""
        if not holds:
            raise ConfigError(f"{self.section}.{name} is {getattr(self, name)!r}: {rule}")

    def at_least(self, least: float, *names: str) -> None:
        for name in names:
            self.require(name, getattr(self, name) >= least, f"it must be at least {least}")

    def one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        self.require(name, value in choices, f"it must be one of {', '.join(choices)}{did_you_mean(value, choices)}")


@dataclass(frozen=True)
class DataConfig(Section):
    """Where the documents come from."""

    section = "data"
    path: str = ""
    """A folder made by `brt data prepare`."""
    fingerprint: str = ""
    """Hash of its documents and tokenizer; filled in by the run."""
    tokenizer: str = ""
    """SHA-256 of its tokenizer; filled in by the run."""
    excerpt: int = 0
    """Tokens of the excerpts that training documents are read in, in random order, each with an empty memory at its
    start; a multiple of model.segment. 0 is whole documents."""
    prefetch: int = 2
    """Steps that are built ahead."""

    def check(self) -> None:
        self.at_least(0, "excerpt", "prefetch")


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long, on how many lanes, and how the work is done."""

    section = "train"
    steps: int = 500_000
    """Updates of the weights."""
    lanes: int = 32
    """B: documents read side by side, over all processes."""
    seed: int = 0
    """Of the weights, of dropout and of the documents' order."""
    bptt: int = 1
    """Segments that gradients flow through; one update per so many segments."""
    accumulate: int = 1
    """Groups of lanes that are worked on one after the other, to save memory; the update is the same."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 is no clipping (Adafactor clips every update by itself)."""
    dtype: str = "auto"
    """Of the computation: float32 or bfloat16; auto is bfloat16 on a GPU that has it. Weights are always float32."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is the GPU where there is one."""
    deterministic: bool = True
    """Whether a GPU gives the same bits each time, which some operations are slower for. A CPU always does."""
    tf32: bool = False
    """Whether a GPU may round the factors of float32 products to 10 bits (TF32): faster. bfloat16 is not affected."""
    compile: bool = False
    """Whether layers go through torch.compile: it takes a minute at the start."""
    checkpoint_activations: bool = False
    """Whether layers are computed again in the backward pass instead of kept: less memory, a third more time."""
    parallel: str = "ddp"
    """With more than one process: ddp (each has all weights) or fsdp (weights are sharded)."""
    keep_gathered: bool = True
    """With fsdp: whether weights that were gathered stay until the update, and are gathered once for it. If not, layers
    are gathered again in every forward and backward pass: less memory, more traffic."""
    tensorboard: bool = True
    """Whether metrics also go to tensorboard/, where TensorBoard is installed."""
    wandb: str = ""
    """A project at Weights & Biases that metrics also go to; empty is none."""
    wandb_offline: bool = False
    """Whether they only go to files in wandb/, for `wandb sync`."""
    save_every: int = 1000
    """Steps between checkpoints; 0 is only at the end."""
    keep: int = 3
    """Newest checkpoints that stay; the best on validation stays too."""
    log_every: int = 10
    """Steps between lines of the log; metrics.jsonl has every step."""
    init_from: str = ""
    """A run, a checkpoint or a model in the box whose weights are taken at the start."""
    tune: str = "all"
    """What learns: all weights, or state: only the initial state of the recurrent layers."""

    @property
    def place(self) -> tuple[str, str, bool, bool]:
        """What `runtime.start` wants to know."""
        return self.device, self.dtype, self.deterministic, self.tf32

    def check(self) -> None:
        self.at_least(1, "steps", "lanes", "bptt", "accumulate", "keep", "log_every")
        self.at_least(0, "seed", "clip", "save_every")
        self.one_of("dtype", DTYPES)
        self.one_of("parallel", PARALLEL)
        self.one_of("tune", TUNE)
        self.require(
            "lanes", self.lanes % self.accumulate == 0, f"it must be a multiple of accumulate {self.accumulate}"
        )


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """What turns gradients into updates (SPEC section 8)."""

    section = "optimizer"
    name: str = "adafactor"
    """adafactor (the paper's), adamw, or muon (which updates the maps of the layers, with AdamW for all else)."""
    momentum: float = 0.9
    """Of Adafactor; 0 is none."""
    beta1: float = 0.9
    """Of AdamW: the average of gradients."""
    beta2: float = 0.95
    """Of AdamW: the average of squared gradients."""
    epsilon: float = 1e-8
    """Of AdamW: added to the root of that average."""
    weight_decay: float = 0.0
    """Of AdamW, on matrices; Adafactor has none."""
    embedding_rate: float = 1.0
    """Of AdamW and Muon: times the learning rate, for the embeddings and the states' identities. Their entries start at
    about 1, those of a map at 1 / sqrt(d_model): steps that suit the maps are small for them."""
    gate_rate: float = 1.0
    """Of AdamW and Muon: times the learning rate, for the biases of gates, which decide how long the state lasts."""
    scale_rate: float = 1.0
    """Of AdamW and Muon: times the learning rate, for the scales of attention, which decide how sharp it is."""

    def check(self) -> None:
        self.one_of("name", OPTIMIZERS)
        for name in ("momentum", "beta1", "beta2"):
            self.require(name, 0 <= getattr(self, name) < 1, "it must be from 0 up to, but not including, 1")
        self.at_least(0, "epsilon", "weight_decay", "embedding_rate", "gate_rate", "scale_rate")
        unused = self.weight_decay and self.name == "adafactor"
        self.require("weight_decay", not unused, "Adafactor has none here; use optimizer.name=adamw, or 0")
        for name in ("embedding_rate", "gate_rate", "scale_rate"):
            unused = getattr(self, name) != 1 and self.name == "adafactor"
            self.require(name, not unused, "Adafactor has one rate for all; use optimizer.name=adamw, or 1")


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """The learning rate at each update (SPEC section 8)."""

    section = "schedule"
    kind: str = "inverse-sqrt"
    """inverse-sqrt, cosine, linear, constant or wsd (constant, then linear at the end); all with warm-up."""
    learning_rate: float = 1.0
    """inverse-sqrt: this over the root of the step; the others: the first value."""
    final_learning_rate: float = 0.0
    """cosine, linear and wsd: the last value."""
    warmup: int = 1000
    """Updates over which the rate rises from nothing."""
    decay_steps: int = 0
    """cosine and linear: updates until the last value is reached; unset: train.steps. wsd: the last updates, over which
    the rate falls; unset: a fifth."""

    def check(self) -> None:
        self.one_of("kind", SCHEDULES)
        self.at_least(0, "learning_rate", "final_learning_rate", "warmup", "decay_steps")
        if self.kind in ENDING_SCHEDULES:
            self.at_least(1, "decay_steps")


@dataclass(frozen=True)
class EvalConfig(Section):
    """Validation during training."""

    section = "eval"
    every: int = 1000
    """Steps between validations; 0 is only at the end."""
    tokens: int = 262_144
    """Tokens that are scored each time, always the same ones; 0 is the whole split."""
    lanes: int = 0
    """Documents scored side by side; 0 is as many as in training, but no more than there are."""
    state_warning: float = 0.001
    """Warn when carrying the recurrent state gains less than so many bits per token; 0 is never."""

    def check(self) -> None:
        self.at_least(0, "every", "tokens", "lanes", "state_warning")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    system: str
    size: str
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by section; unset ones are left out."""
        values = dataclasses.asdict(self) | {"model": self.model.to_dict()}
        return {
            key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
            for key, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; an unknown section or key is an error that names the nearest one."""
        check_keys(values)
        parts = {
            name: SECTIONS[name].from_dict(values.get(name, {}))
            if name == "model"
            else SECTIONS[name](**values.get(name, {}))
            for name in SECTIONS
        }
        return cls(system=values.get("system", ""), size=values.get("size", ""), **parts)

    def replace(self, section: str, **changes: Any) -> RunConfig:
        """A copy with some values of one section changed."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **changes)})

    def to_toml(self) -> str:
        """As text, sealed; `read_toml` and `from_dict` give the same configuration back."""
        import tomli_w

        return seal_toml(tomli_w.dumps({"version": VERSION, **self.to_dict()}))


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "eval": EvalConfig,
}


def check_keys(values: Mapping[str, Any]) -> None:
    """An error that names the nearest key, unless every section and key is known."""
    for name, value in values.items():
        if name in ("system", "size", "version"):
            continue
        if name not in SECTIONS:
            raise ConfigError(
                f"unknown section '{name}'{did_you_mean(name, SECTIONS)}; sections: {', '.join(SECTIONS)}"
            )
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{name}' is {value!r}: it is a section, and holds keys")
        known = [item.name for item in dataclasses.fields(SECTIONS[name])]
        for key in value:
            if key not in known:
                raise ConfigError(f"unknown key '{name}.{key}'{did_you_mean(key, known)}; its keys: {', '.join(known)}")
