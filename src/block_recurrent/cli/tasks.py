"""`brt tasks`: train models from scratch on memory tasks with published results, and measure them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.output import (
    MOST_THREADS,
    add_command,
    add_json,
    check_budget,
    check_outputs,
    check_range,
    check_results,
    give_json,
    in_snake_case,
    stopped,
)
from block_recurrent.errors import ConfigError, OutputError
from block_recurrent.io.output import markdown, print_table, write_file, write_json
from block_recurrent.presets import SIZES, SYSTEMS, preset
from block_recurrent.run_config import check_keys, parse_settings

if TYPE_CHECKING:
    from block_recurrent.studies.tasks.study import TaskStudy

OTHERS = {
    "recall": "planted names by distance, as in 'brt recall'; measured in bits",
    "needle": "a sentence planted in books, for a trained model: --run RUN --data BOOK...",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND", title="commands")
    listing = add_command(commands, "list", "list all tasks", "brt tasks list")
    add_json(listing)
    example = "brt tasks run copy-24 --system rec-fixed-skip --against slide-plus --size tiny --out build/tasks"
    run = add_command(commands, "run", "train systems on tasks, and measure them", example)
    run.add_argument("names", nargs="+", metavar="NAME", help="tasks; see 'brt tasks list'")
    run.add_argument("--system", default="rec-fixed-skip", help=f"the system to train: {', '.join(SYSTEMS)}")
    run.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SYSTEM",
        help="systems to train in exactly the same way, for comparison",
    )
    run.add_argument(
        "--size", default="micro", help=f"model size: {', '.join(SIZES)}; micro also uses shorter examples"
    )
    run.add_argument(
        "--variants",
        metavar="A,B",
        help="only these variants of the models, such as 'chunk 1' or S=64; others can be added later (default: all)",
    )
    run.add_argument("--seeds", type=int, default=1, metavar="K", help="runs per model; more can be added later")
    run.add_argument(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="maximum minutes of training per run, by the speed of the first system (default: the steps of the task)",
    )
    run.add_argument("--out", required=True, type=Path, metavar="DIR", help="output folder for runs and results")
    run.add_argument("--threads", type=int, default=1, help="processor threads; small models hardly benefit from 2")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting of the task (task.steps, ...) or of all models (model.num_states, ...); repeatable",
    )
    needle = run.add_argument_group("needle")
    needle.add_argument("--run", metavar="RUN", help="the folder of a trained run, or a checkpoint")
    needle.add_argument("--data", nargs="+", default=[], metavar="BOOK", help="books: UTF-8 text files")
    needle.add_argument("--needle", metavar="TEXT", help="the sentence to plant, with {answer} in it")
    needle.add_argument("--question", metavar="TEXT", help="the text that precedes the answer")
    needle.add_argument("--answers", metavar="A,B", help="possible answers, as they follow the question")
    needle.add_argument("--distances", metavar="N,M", help="tokens of the book between needle and question")
    add_json(run)


def run(args: argparse.Namespace) -> int:
    check_outputs(args, "json", beside=getattr(args, "out", None))
    return _list(args) if args.action == "list" else _run(args)


def _list(args: argparse.Namespace) -> int:
    from block_recurrent.studies.tasks.catalog import TASKS, spec_of

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "what": spec_of(name, "").what,
            "published": [row._asdict() for row in spec_of(name, "").published],
        }
        for name in TASKS
    ] + [{"name": name, "what": what, "published": []} for name, what in OTHERS.items()]
    give_json(args, rows)
    if args.json != "-":
        for row in rows:
            said = "; ".join(f"{p['system']} {p['accuracy']:.2f}" for p in row["published"])
            print(f"{row['name']:18}  {row['what']}" + (f"\n{'':18}  published: {said}" if said else ""))
    return 0


def _run(args: argparse.Namespace) -> int:
    check_range(args, "seeds", 1)
    check_range(args, "threads", 1, MOST_THREADS)
    if args.budget is not None:
        check_budget(args.budget)
    for name in args.names:
        check_results(args.out, name, {"task"}, args.overwrite)
    systems = list(dict.fromkeys([args.system, *args.against]))
    for system in systems:
        preset(system, args.size)  # raises an error if the system or size does not exist
    works = [
        (name, _work(name, args, systems)) for name in dict.fromkeys(args.names)
    ]  # raises errors before training begins
    import torch

    torch.set_num_threads(args.threads)
    found = {}
    for name, work in works:
        try:
            found[name] = work()
        except OSError as error:
            raise OutputError(f"can't write to '{args.out}': {error.strerror or error}") from None
        if found[name] is None:
            return stopped()
    give_json(args, {name: in_snake_case(result) for name, result in found.items()})
    return 0


def _work(name: str, args: argparse.Namespace, systems: list[str]) -> Any:
    """The function that computes the results of a task."""
    if name == "needle":
        return _needle_work(args)
    if name == "recall":
        return lambda: _recall(args, systems)
    study = _study(name, args, systems)
    return lambda: _train_and_measure(study, args)


def _study(name: str, args: argparse.Namespace, systems: list[str]) -> TaskStudy:
    from block_recurrent.studies.tasks.catalog import spec_of
    from block_recurrent.studies.tasks.study import TaskStudy

    task: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for text in args.set:
        ((section, values),) = parse_settings([text]).items()
        if section not in ("task", "model"):
            raise ConfigError(f"--set {text}: the section must be task or model")
        (task if section == "task" else model).update(values)
    check_keys({"model": model})
    spec = spec_of(name, args.size).changed(task)
    if args.variants is not None:
        spec = spec.only([label.strip() for label in args.variants.split(",")])
    settings = {f"task.{key}": value for key, value in task.items()}
    settings |= {f"model.{key}": value for key, value in model.items()}
    study = TaskStudy(spec, args.size, tuple(systems), args.out, args.seeds, args.budget, settings, model)
    for system in systems:
        if args.variants is not None and not any(point.label for point in spec.points_of(system)):
            raise ConfigError(f"{name} has none of the variants {args.variants} for {system}")
        for point in spec.points_of(system):
            study.model_config(system, point)
    return study


def _train_and_measure(study: TaskStudy, args: argparse.Namespace) -> dict[str, Any] | None:
    from block_recurrent.analysis.plots import write_charts
    from block_recurrent.bench.harness import with_origin
    from block_recurrent.studies.tasks.report import chart, describe, page
    from block_recurrent.studies.tasks.study import run_task

    found = run_task(study, _tell)
    if found is None:
        return None
    found = with_origin(found)
    _write(args.out, study.spec.name, found, page(found))
    write_charts(args.out / study.spec.name, chart(found, study.spec.by_state))
    if args.json != "-":
        print(describe(found))
        print(f"wrote {study.spec.name}.json, .md and plots in {args.out}, along with the runs")
    return found


def _recall(args: argparse.Namespace, systems: list[str]) -> dict[str, Any] | None:
    from block_recurrent.analysis.plots import write_charts
    from block_recurrent.bench.harness import with_origin
    from block_recurrent.studies.curriculum import RecallTraining, cooldown_of
    from block_recurrent.studies.recall import RecallSettings, recall_study
    from block_recurrent.studies.recall_report import describe_recall, recall_chart

    steps = parse_settings([text for text in args.set if text.startswith("task.steps=")]).get("task", {}).get("steps")
    steps = RecallTraining.steps if steps is None else steps
    training = RecallTraining(steps, cooldown_of(steps, RecallTraining.cooldown))
    against = systems[1] if len(systems) > 1 else None
    settings = RecallSettings(args.system, against, args.size, training=training)
    found = recall_study(settings, args.out / "runs" / "recall")
    if found is None:
        return None
    found = with_origin({"task": "recall", **found})
    said = describe_recall(found)
    _write(args.out, "recall", found, f"# recall\n\n`{found['command']}`\n\n```text\n{said}\n```\n")
    write_charts(args.out / "recall", recall_chart(found))
    if args.json != "-":
        print(said)
    return found


def _needle_work(args: argparse.Namespace) -> Any:
    if not args.run or not args.data:
        raise ConfigError("needle needs a trained model and books: --run RUN --data BOOK.txt")
    from block_recurrent.studies.tasks.needle import Needle

    given: dict[str, Any] = {"sentence": args.needle, "question": args.question}
    given["answers"] = tuple(args.answers.split(",")) if args.answers else None
    try:
        given["distances"] = tuple(map(int, args.distances.split(","))) if args.distances else None
    except ValueError:
        raise ConfigError(f"--distances is '{args.distances}': it must be whole numbers, such as 1000,5000") from None
    needle = Needle(**{key: value for key, value in given.items() if value is not None})
    return lambda: _find_needles(args, needle)


def _find_needles(args: argparse.Namespace, needle: Any) -> dict[str, Any]:
    from dataclasses import asdict

    from block_recurrent.bench.harness import with_origin
    from block_recurrent.checkpoint import load_run
    from block_recurrent.inference.text_input import read_text
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.studies.tasks.needle import find_needles, summary

    loaded = load_run(args.run)
    books = {Path(name).name: "".join(read_text(name)) for name in args.data}
    with shown_progress("reading") as progress:
        results = find_needles(loaded.model, loaded.tokenizer, books, needle, progress)
    rows = summary(results)
    head = list(rows[0])
    cells = [[f"{v:,}" if isinstance(v, int) else f"{v:.2f}" for v in row.values()] for row in rows]
    facts = {"task": "needle", "run": str(args.run), "system": loaded.config.system, "size": loaded.config.size}
    found = with_origin({**facts, "needle": asdict(needle), "by_distance": rows, "results": results})
    note = f"Rank of the answer among {len(needle.answers)}, and its bits; chance is a rank of {_middle(needle):.1f}."
    page = f"# needle\n\n`{found['command']}`\n\n{note}\n\n{markdown(head, cells)}"
    args.out.mkdir(parents=True, exist_ok=True)
    _write(args.out, "needle", found, page)
    if args.json != "-":
        print_table(head, cells)
        print(note)
    return found


def _middle(needle: Any) -> float:
    return (len(needle.answers) + 1) / 2


def _write(out: Path, name: str, found: dict[str, Any], page: str) -> None:
    write_json(out / f"{name}.json", found)
    write_file(out / f"{name}.md", page)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
