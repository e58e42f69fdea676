"""lm-evaluation-harness: an adapter for models, and a task for a folder of books.

Importing this module registers the model `block-recurrent`. The harness' rolling log-likelihood cuts a text into
independent windows; here the memory is carried from the first token to the last, so each token is predicted
exactly once, from everything before it, and the result is that of `brt eval`.

    brt harness runs/first --books books/
    brt harness runs/first --tasks lambada_openai,wikitext
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from block_recurrent.checkpoint import load_run
from block_recurrent.data import Tokenizer
from block_recurrent.errors import InputError, did_you_mean
from block_recurrent.inference.engine import engine_of
from block_recurrent.inference.session import Session
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.runtime import pick_device

TASKS = Path(__file__).parent / "tasks"
DEFAULT_NEW_TOKENS = 256


@register_model("block-recurrent")
class BlockRecurrentHarness(TemplateLM):
    """A run, or a model and its tokenizer, for the harness. No limit on the length of a text."""

    def __init__(
        self,
        run: str | None = None,
        checkpoint: str = "last",
        model: BlockRecurrentLM | None = None,
        tokenizer: Tokenizer | None = None,
        device: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if run is not None:
            loaded = load_run(run, checkpoint, pick_device(device or "auto"))
            model, tokenizer = loaded.model, loaded.tokenizer
        if model is None or tokenizer is None:
            raise InputError("give run=FOLDER, or a model and its tokenizer")
        self.engine, self.text_tokenizer = engine_of(model), tokenizer
        self.batch_size = max(int(batch_size), 1) if str(batch_size).isdigit() else 1

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.sha256[:12]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.text_tokenizer.encode(string).tolist()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Natural log-probability of each whole text, as a separate document."""
        found: list[float] = []
        for start in range(0, len(requests), self.batch_size):
            rows = [self.tok_encode(request.args[0]) for request in requests[start : start + self.batch_size]]
            inputs = [[self.eot_token_id, *row][: len(row)] for row in rows]
            found += [-float(nats.sum(dtype=float)) for nats in self.engine.score(inputs, rows).nats]
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation after its context: its natural log-probability, and whether it is the greedy one."""
        return [self._continuation(context, continuation) for _, context, continuation in requests]

    def _continuation(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        if not continuation:
            return 0.0, True
        mark = self.eot_token_id
        context = context if context[:1] == [mark] else [mark, *context]
        logits, memory = self.engine.prefill([context])
        log_prob, greedy = 0.0, True
        for index, token in enumerate(continuation):
            if index:
                logits, memory = self.engine.decode([continuation[index - 1]], memory)
            log_probs = logits[0].double().log_softmax(-1)
            log_prob += log_probs[token].item()
            greedy = greedy and int(log_probs.argmax()) == token
        return log_prob, greedy

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, greedy unless the task samples, up to one of its stop strings."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
        new_tokens = int(options.get("max_gen_toks") or DEFAULT_NEW_TOKENS)
        session = Session(self.engine, self.text_tokenizer)
        session.read(context)
        return session.write_all(new_tokens, temperature=temperature, stop=stops).text


def evaluate(
    lm: TemplateLM, books: str | Path | None = None, tasks: Sequence[str] = (), limit: int | None = None
) -> dict[str, Any]:
    """Run tasks of the harness, and `books` on a folder of books; returns the results by task."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    names = [*tasks, *(["books"] if books else [])]
    metadata = {"folder": str(books)} if books else {}
    manager = TaskManager(include_path=str(TASKS), include_defaults=bool(tasks), metadata=metadata)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise InputError(f"the harness has no task '{name}'{did_you_mean(name, manager.all_tasks)}")
    results = simple_evaluate(model=lm, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=0)
    assert results is not None, "only other ranks get nothing"
    return results["results"]
