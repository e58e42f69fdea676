"""The sections of a run's configuration, validated on creation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from block_recurrent.config import LARGEST, ModelConfig, check_size
from block_recurrent.errors import ConfigError, did_you_mean
from block_recurrent.io.door import COUNT_LIMIT, seal_toml

VERSION = 2
"""Format version of config.toml. Files before version 2 have no version and no hash."""
OPTIMIZERS = ("adafactor", "adamw", "muon")
SCHEDULES = ("inverse-sqrt", "cosine", "linear", "constant", "wsd")
ENDING_SCHEDULES = ("cosine", "linear", "wsd")
DTYPES = ("auto", "float32", "bfloat16")
PARALLEL = ("ddp", "fsdp")
TUNE = ("all", "state")


class Section:
    """A section of the configuration: a frozen dataclass whose values have the types of its fields."""

    section = ""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, item.name, _typed(type(self), item.name, getattr(self, item.name)))
        self.check()

    def check(self) -> None:
        """Rules beyond types."""

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Raise an error that names the value and the rule, unless it holds."""
        if not holds:
            raise ConfigError(f"{self.section}.{name} is {getattr(self, name)!r}: {rule}")

    def at_least(self, least: float, *names: str) -> None:
        for name in names:
            self.require(name, getattr(self, name) >= least, f"it must be at least {least}")

    def one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        self.require(name, value in choices, f"it must be one of {', '.join(choices)}{did_you_mean(value, choices)}")


def _typed(section: type[Section], name: str, value: Any) -> Any:
    """The value of a field, if it has the field's type; else an error that names both."""
    wanted = str(section.__annotations__[name])
    kinds: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string"}
    if wanted == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    rule = ""
    if not isinstance(value, kinds[wanted]) or (wanted != "bool" and isinstance(value, bool)):
        rule = f"it must be {words[wanted]}"
    elif isinstance(value, int) and abs(value) >= COUNT_LIMIT:
        rule = f"it must be less than {COUNT_LIMIT}"
    elif isinstance(value, float) and not math.isfinite(value):
        rule = "it must be finite"
    elif isinstance(value, float) and abs(value) > LARGEST:
        rule = f"it must be at most {LARGEST:g}, without its sign"
    elif isinstance(value, str) and value.encode("utf-8", "replace").decode() != value:
        rule = "it must be UTF-8: rename the folder"
    elif isinstance(value, str) and "\0" in value:
        rule = "no name contains a zero byte"
    if rule:
        raise ConfigError(f"{section.section}.{name} is {value!r}: {rule}")
    return value


@dataclass(frozen=True)
class DataConfig(Section):
    """The training data."""

    section = "data"
    path: str = ""
    """A folder made by `brt data prepare`."""
    fingerprint: str = ""
    """Hash of its documents and tokenizer; set by the run."""
    tokenizer: str = ""
    """SHA-256 of its tokenizer; set by the run."""
    excerpt: int = 0
    """Length in tokens of the excerpts that training documents are read in, in random order, each with an empty memory
    at its start; a multiple of model.segment. 0: whole documents."""
    repeats: float = 0.0
    """Share of the excerpts into which repeats are planted: passages that occur again, up to eight windows later."""
    repeat_steps: int = 0
    """Number of updates after which no more are planted; 0: always."""
    prefetch: int = 2
    """Number of steps to prefetch."""

    def check(self) -> None:
        self.at_least(0, "excerpt", "repeats", "repeat_steps", "prefetch")
        self.require("repeats", self.repeats <= 1, "it must be at most 1")
        self.require(
            "repeats", not self.repeats or self.excerpt > 0, "repeats are planted into excerpts: set data.excerpt"
        )


@dataclass(frozen=True)
class TrainConfig(Section):
    """Duration, batch size and execution of training."""

    section = "train"
    steps: int = 500_000
    """Number of updates."""
    lanes: int = 32
    """B: the batch size, as the number of documents read in parallel, over all processes."""
    seed: int = 0
    """Random seed of weights, dropout and the order of documents."""
    bptt: int = 1
    """Number of segments that gradients flow through, and that an update consists of."""
    accumulate: int = 1
    """Number of groups of lanes to accumulate gradients over, to save memory; the update is the same."""
    clip: float = 0.0
    """Maximum norm of the gradient; 0 disables clipping (Adafactor clips every update itself)."""
    dtype: str = "auto"
    """Dtype of the computation: float32 or bfloat16; auto is bfloat16 on GPUs that support it. Weights stay float32."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    deterministic: bool = True
    """Whether results on a GPU are reproducible bit for bit, at some cost in speed. On a CPU they always are."""
    tf32: bool = False
    """Whether a GPU may use TF32 for float32 products: faster, with 10 bits of mantissa. Does not affect bfloat16."""
    compile: bool = False
    """Whether to use torch.compile on the layers: it takes a minute at the start."""
    checkpoint_activations: bool = False
    """Whether to recompute activations in the backward pass instead of storing them: less memory, a third more time."""
    parallel: str = "ddp"
    """With more than one process: ddp (each has all weights) or fsdp (weights are sharded)."""
    keep_gathered: bool = True
    """With fsdp: whether weights that were gathered stay until the update, and are gathered once for it. If not, layers
    are gathered again in every forward and backward pass: less memory, more traffic."""
    tensorboard: bool = True
    """Whether to log metrics to tensorboard/, if TensorBoard is installed."""
    wandb: str = ""
    """A project at Weights & Biases to log metrics to; empty: none."""
    wandb_offline: bool = False
    """Whether to log only to files in wandb/, for `wandb sync`."""
    save_every: int = 1000
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Number of newest checkpoints to keep; the best on validation is kept too."""
    log_every: int = 10
    """Steps between lines of the log; metrics.jsonl has every step."""
    init_from: str = ""
    """A run, a checkpoint or a bundled model to load the initial weights from."""
    tune: str = "all"
    """What to train: all weights, or state, only the initial state of the recurrent layers."""

    @property
    def place(self) -> tuple[str, str, bool, bool]:
        """The arguments of `runtime.start`."""
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
    """The optimizer."""

    section = "optimizer"
    name: str = "adafactor"
    """adafactor (the paper's), adamw, or muon (for the linear maps of the layers, with AdamW for everything else)."""
    momentum: float = 0.9
    """Adafactor: momentum; 0: none."""
    beta1: float = 0.9
    """AdamW: decay of the average of gradients."""
    beta2: float = 0.95
    """AdamW: decay of the average of squared gradients."""
    epsilon: float = 1e-8
    """AdamW: added to the root of that average."""
    weight_decay: float = 0.0
    """AdamW: weight decay of matrices; Adafactor has none."""
    embedding_rate: float = 1.0
    """AdamW and Muon: factor on the learning rate of the embeddings and the states' identities. Their entries start at
    about 1, those of a linear map at 1 / sqrt(d_model): steps that suit the maps are small for them."""
    gate_rate: float = 1.0
    """AdamW and Muon: factor on the learning rate of gate biases, which decide how long the state lasts."""
    scale_rate: float = 1.0
    """AdamW and Muon: factor on the learning rate of attention scales, which decide how sharp attention is."""

    def check(self) -> None:
        self.one_of("name", OPTIMIZERS)
        for name in ("momentum", "beta1", "beta2"):
            self.require(name, 0 <= getattr(self, name) < 1, "it must be at least 0 and less than 1")
        self.at_least(0, "epsilon", "weight_decay", "embedding_rate", "gate_rate", "scale_rate")
        unused = self.weight_decay and self.name == "adafactor"
        self.require("weight_decay", not unused, "Adafactor has no weight decay here; use optimizer.name=adamw, or 0")
        for name in ("embedding_rate", "gate_rate", "scale_rate"):
            unused = getattr(self, name) != 1 and self.name == "adafactor"
            self.require(name, not unused, "Adafactor has a single learning rate; use optimizer.name=adamw, or 1")


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """The learning rate at each update."""

    section = "schedule"
    kind: str = "inverse-sqrt"
    """inverse-sqrt, cosine, linear, constant or wsd (constant, then linear at the end); all with warm-up."""
    learning_rate: float = 1.0
    """inverse-sqrt: divided by the root of the step; the others: the initial value."""
    final_learning_rate: float = 0.0
    """cosine, linear and wsd: the final value."""
    warmup: int = 1000
    """Number of updates over which the rate rises from zero."""
    decay_steps: int = 0
    """cosine and linear: updates until the final value is reached; unset: train.steps. wsd: the last updates, in which
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
    """Steps between validations; 0: only at the end."""
    tokens: int = 262_144
    """Number of tokens to score each time, always the same ones; 0: the whole split."""
    lanes: int = 0
    """Number of documents scored in parallel; 0: as in training, or the number of documents if it is smaller."""
    state_warning: float = 0.001
    """Warn if carrying the recurrent state saves fewer bits per token than this; 0: never."""

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
        """Plain values by section, without unset ones."""
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
        """As text with a hash; the inverse of `read_toml` and `from_dict`."""
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
    """Raise an error unless every section and key is known, and every value has its type.

    Other values are derived from those that are given, so types are checked before a section is made.
    """
    for name, value in values.items():
        if name in ("system", "size") and not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}: it must be text")
        if name in ("system", "size", "version"):
            continue
        if name not in SECTIONS:
            raise ConfigError(
                f"unknown section '{name}'{did_you_mean(name, SECTIONS)}; sections: {', '.join(SECTIONS)}"
            )
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{name}' is {value!r}: it must be a section with keys")
        known = [item.name for item in dataclasses.fields(SECTIONS[name])]
        for key in value:
            if key not in known:
                raise ConfigError(f"unknown key '{name}.{key}'{did_you_mean(key, known)}; its keys: {', '.join(known)}")
            if name == "model":
                check_size(key, value[key])
            else:
                _typed(SECTIONS[name], key, value[key])
