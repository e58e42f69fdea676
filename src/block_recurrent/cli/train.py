"""`brt train`: train a model on prepared data."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

from block_recurrent.cli.output import size
from block_recurrent.errors import INTERRUPTED, ConfigError, MissingExtraError
from block_recurrent.io.progress import shown_status
from block_recurrent.presets import SIZES, SYSTEMS
from block_recurrent.run_config import (
    DTYPES,
    PARALLEL,
    SECTIONS,
    RunConfig,
    check_keys,
    check_same_tokenizer,
    fine_tuning_values,
    merge,
    parse_settings,
    read_toml,
    resolve,
)

_BY_PRESET = ("train.steps", "train.lanes", "train.save_every", "eval.every", "eval.tokens", "schedule.learning_rate")

# Flags that set a key of the configuration: flag -> (section.key, type, help).
_SHORT: dict[str, tuple[str, type, str]] = {
    "--steps": ("train.steps", int, "number of updates in total"),
    "--lanes": ("train.lanes", int, "batch size: documents read in parallel, over all processes"),
    "--seed": ("train.seed", int, "random seed of weights, dropout and the order of documents"),
    "--bptt": ("train.bptt", int, "number of segments that gradients flow through"),
    "--accumulate": ("train.accumulate", int, "number of groups of lanes to accumulate gradients over"),
    "--lr": ("schedule.learning_rate", float, "learning rate"),
    "--clip": ("train.clip", float, "maximum norm of the gradient; 0 disables clipping"),
    "--save-every": ("train.save_every", int, "steps between checkpoints"),
    "--keep": ("train.keep", int, "number of newest checkpoints to keep"),
    "--eval-every": ("eval.every", int, "steps between validations"),
    "--eval-tokens": ("eval.tokens", int, "number of tokens per validation"),
    "--device": ("train.device", str, "auto, cpu, cuda, cuda:1, ..."),
    "--init-from": (
        "train.init_from",
        str,
        "a run, a checkpoint or a model name (see 'brt models') to load the weights from; without --system and --size, "
        "its architecture and a recipe for fine-tuning are used",
    ),
    "--tune": (
        "train.tune",
        str,
        "what to train: all parameters (all), or only the initial state (state), which is saved to a separate file",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help=f"model architecture: {', '.join(SYSTEMS)}")
    parser.add_argument("--size", help=f"model size: {', '.join(SIZES)}")
    parser.add_argument("--data", help="a folder made by 'brt data prepare'")
    parser.add_argument("--out", help="run folder; 'brt train --out RUN' resumes an existing run")
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file, such as the config.toml of a run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting (repeatable)"
    )
    parser.add_argument("--resume", default="auto", help="auto, never, must, or a checkpoint folder")
    parser.add_argument(
        "--dry-run", action="store_true", help="print configuration and cost, run one step, write nothing"
    )
    for flag, (key, kind, text) in _SHORT.items():
        parser.add_argument(
            flag, type=kind, metavar=kind.__name__.upper(), help=f"{text} ({key}; default: {_default(key)})"
        )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the computation; auto: bfloat16 on GPUs that have it, else float32 (train.dtype; default: auto)",
    )
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="under torchrun: replicate (ddp) or shard (fsdp) the model (train.parallel; default: ddp)",
    )
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="bitwise reproducible results on a GPU; on a CPU they always are (train.deterministic; default: on)",
    )
    parser.add_argument(
        "--tf32",
        action=argparse.BooleanOptionalAction,
        help="use TF32 for float32 matrix products on GPUs (train.tf32; default: off)",
    )
    parser.add_argument(
        "--compile", action="store_true", default=None, help="compile the layers with torch.compile (train.compile)"
    )
    parser.add_argument(
        "--checkpoint-activations",
        action="store_true",
        default=None,
        help="recompute activations in the backward pass: less memory, more time (train.checkpoint_activations)",
    )
    parser.add_argument(
        "--tensorboard",
        action=argparse.BooleanOptionalAction,
        help="log metrics to TensorBoard (train.tensorboard; default: if it is installed)",
    )
    parser.add_argument(
        "--wandb", nargs="?", const="block-recurrent", metavar="PROJECT", help="log metrics to wandb (train.wandb)"
    )
    parser.add_argument(
        "--wandb-offline",
        action="store_true",
        default=None,
        help="only write files for 'wandb sync' (train.wandb_offline)",
    )


def _default(key: str) -> str:
    section, _, name = key.partition(".")
    if key in _BY_PRESET:
        return "depends on system and size"
    return str(getattr(SECTIONS[section], name)) or "none"


def run(args: argparse.Namespace) -> int:
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("--tensorboard", "tensorboard")
    config = resolve_config(args)
    if args.dry_run:
        from block_recurrent.train.dry_run import dry_run

        dry_run(config)
        return 0
    if not args.out:
        raise ConfigError("--out is missing: name the run folder")
    with shown_status("loading torch"):
        from block_recurrent.runtime import is_launched
        from block_recurrent.train.loop import train

    try:
        finished = train(config, Path(args.out), args.resume)
    except KeyboardInterrupt:
        print(f"to resume from the last checkpoint: {_command()}", file=sys.stderr)
        raise
    if not finished:
        print(f"to resume: {_command()}", file=sys.stderr)
        return INTERRUPTED
    if config.train.init_from and not is_launched():
        _show_gain(config, Path(args.out))
    return 0


def _show_gain(config: RunConfig, run: Path) -> None:
    """Print the gain of fine-tuning and, if only the state was tuned, the file of the state."""
    from block_recurrent.train.fine_tuning import describe_gain, measure_gain, write_tuned_state

    if config.train.tune == "state":
        path = write_tuned_state(run)
        print(
            f"the tuned state is in '{path}' ({size(path.stat().st_size)}): "
            f"brt write {config.train.init_from} --state {path}"
        )
    print(describe_gain(measure_gain(config, run)))


def resolve_config(args: argparse.Namespace) -> RunConfig:
    """Default < preset < file < flags. Errors are found without importing torch.

    An existing run uses its own configuration instead of the preset, which may have changed since.
    """
    flags = _flags(args)
    file = read_toml(args.config) if args.config else _of_the_run(args, flags)
    check_keys(file)
    given = merge(file, flags)
    check_keys(given)
    source, path = given.get("train", {}).get("init_from"), given.get("data", {}).get("path")
    if source and not (given.get("system") or given.get("size")):
        given = merge(fine_tuning_values(source, given), given)
    for name in ("system", "size"):
        if not given.get(name):
            raise ConfigError(f"--{name} is missing; 'brt presets' lists the choices")
    if not path:
        raise ConfigError("--data is missing: name a folder made by 'brt data prepare'")
    from block_recurrent.data import Corpus

    corpus = Corpus(path)
    if source:
        check_same_tokenizer(source, corpus.tokenizer.sha256, path)
    return resolve(given, corpus.vocab_size)


def _of_the_run(args: argparse.Namespace, flags: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run to resume; empty if there is none, or if it has another system."""
    own = Path(args.out or "", "config.toml")
    if not args.out or args.resume == "never" or not own.is_file():
        return {}
    values = RunConfig.from_dict(read_toml(own, sealed=True)).to_dict()
    return values if all(flags.get(name, values[name]) == values[name] for name in ("system", "size")) else {}


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    short = {flag: key for flag, (key, _, _) in _SHORT.items()} | {
        "--data": "data.path",
        "--dtype": "train.dtype",
        "--parallel": "train.parallel",
        "--deterministic": "train.deterministic",
        "--tf32": "train.tf32",
        "--compile": "train.compile",
        "--checkpoint-activations": "train.checkpoint_activations",
        "--tensorboard": "train.tensorboard",
        "--wandb": "train.wandb",
        "--wandb-offline": "train.wandb_offline",
    }
    values: dict[str, Any] = {name: value for name in ("system", "size") if (value := getattr(args, name))}
    for flag, path in short.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            section, _, key = path.partition(".")
            values = merge(values, {section: {key: value}})
    return merge(values, parse_settings(args.set))


def _command() -> str:
    """The command line, which is also the command that resumes the run."""
    from block_recurrent.runtime import launcher

    return f"{launcher()} {shlex.join(sys.argv[1:])}"
