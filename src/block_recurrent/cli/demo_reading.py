"""The first steps of `brt demo`: the bundled model reads an unseen text, is scored with it, and generates from it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from block_recurrent.cli.output import print_notes, size
from block_recurrent.errors import BlockRecurrentError
from block_recurrent.io.output import print_table

if TYPE_CHECKING:
    from block_recurrent.inference.session import Session
    from block_recurrent.studies.demo import Document, Unseen

QUICK_TOKENS = 2000
DEFINITIONS = (
    "With its memory: the memory covers everything before. State cleared: the recurrent state is reset at each "
    "segment; the window of tokens is kept. With nothing: each window of tokens is read on its own."
)


@dataclass
class Demo:
    """Settings, and the results so far."""

    out: Path
    model: str | None
    text: str | None
    source: str
    size: str
    steps: int
    quick: bool
    found: dict[str, Any] = field(default_factory=dict)
    closing: list[list[str]] = field(default_factory=list)
    step: int = 0

    def say(self, title: str, what: str) -> None:
        """Announce a step: its title, and what it does."""
        self.step += 1
        print(f"\n{self.step}. {title}\n{_wrapped(what, '   ')}", flush=True)


def _wrapped(text: str, first: str) -> str:
    return textwrap.fill(text, 90, initial_indent=first, subsequent_indent="   ")


def seen(text: str) -> None:
    """Say what a step has shown."""
    print(_wrapped(text, "=> "), flush=True)


def read_and_generate(demo: Demo) -> None:
    """Steps 1 to 5: read an unseen text, score it, and generate from its memory."""
    from block_recurrent.checkpoint import load_run
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.studies.demo import given_text, read_unseen, unseen_modules

    assert demo.model is not None
    texts = [given_text(demo.text)] if demo.text else unseen_modules(demo.model)
    loaded = load_run(demo.model)
    print_notes(loaded.notes)
    limit = QUICK_TOKENS if demo.quick else None
    demo.say(
        f"'{demo.model}' reads {texts[0].name}, which it has never seen",
        "It reads the text once, from beginning to end, into a memory whose size never changes.",
    )
    with shown_progress("reading") as progress:
        document = read_unseen(loaded, texts[0], limit, progress)
    places = document.reading.sizes
    shown = [places[0], places[len(places) // 2], places[-1]]
    print_table(["tokens read", "memory"], [[f"{tokens:,}", size(count)] for tokens, count in shown])
    count = len(document.reading.tokens)
    seen(
        f"Read {count:,} tokens in {document.seconds:.1f} s ({count / document.seconds:,.0f} tokens/s). The memory is "
        f"as large at the end as after the first {places[0][0]:,} tokens."
    )
    demo.found |= {
        "document": document.name,
        "definitions": DEFINITIONS,
        "memory_bytes": places[-1][1],
        "tokens": count,
    }
    demo.closing += [
        ["text that the model has never seen", f"{document.name}, {count:,} tokens"],
        ["its memory, at the start and at the end", f"{size(places[0][1])}, {size(places[-1][1])}"],
    ]
    _scoring(demo, document)
    _writing(demo, document, texts[1] if len(texts) > 1 else None)


def _scoring(demo: Demo, document: Document) -> None:
    from block_recurrent.io.progress import shown_progress
    from block_recurrent.studies.demo import worth_of
    from block_recurrent.studies.memory_worth import CLEARED, MEMORY, NOTHING

    demo.say("The second half, scored in three ways", DEFINITIONS)
    with shown_progress("scoring") as progress:
        worth = worth_of(document, progress)
    found = worth["bits_per_token"]
    extra = {way: bits - found[MEMORY] for way, bits in found.items()}
    rows = [[way, f"{found[way]:.4f}", f"{worth['bits_per_byte'][way]:.4f}", f"{extra[way]:+.4f}"] for way in found]
    print_table([f"{worth['tokens']:,} tokens", "bits per token", "bits per byte", "extra bits per token"], rows)
    cleared = f"Clearing the state costs {extra[CLEARED]:.2f} bits per token. " if CLEARED in extra else ""
    seen(
        f"{cleared}Having read nothing costs {extra[NOTHING]:.2f}: with its memory, the model gives the right token "
        f"{2 ** extra[NOTHING]:.1f} times the probability, on (geometric) average."
    )
    demo.closing += [
        [f"bits per token, {way}", f"{found[way]:.2f}" + (f" ({extra[way]:+.2f})" if way != MEMORY else "")]
        for way in found
    ]
    demo.found["worth"] = worth
    _words(demo, document, worth["words"])


def _words(demo: Demo, document: Document, words: list[dict[str, Any]]) -> None:
    what = (
        f"Each last occurred more than {document.engine.config.window} tokens before, outside the window. The "
        "probability is that of the token that follows the context, with the memory and with the state cleared."
    )
    demo.found["words_note"] = what
    demo.say("Words that the memory helped to predict", what)
    if not words:
        seen("There are none in so short a text.")
        return
    rows = [
        [
            w["word"],
            f"{w['chance']:.0%}",
            f"{w['chance_cleared']:.1%}",
            f"{w['distance']:,}",
            " ".join(w["before"].split())[-40:],
        ]
        for w in words
    ]
    print_table(["word", "probability", "state cleared", "last seen, tokens ago", "context"], rows)
    far = max(words, key=lambda w: w["distance"])
    chances = f"{far['chance']:.0%} likely, and {far['chance_cleared']:.1%} with the state cleared"
    seen(f"'{far['word']}' was last seen {far['distance']:,} tokens ago: it is {chances}.")
    demo.closing.append([f"'{far['word']}', last seen {far['distance']:,} tokens ago", chances])


def _writing(demo: Demo, document: Document, other: Unseen | None) -> None:
    from block_recurrent.inference.session import Session
    from block_recurrent.studies.demo import OTHER_BYTES, memory_hash

    length = 16 if demo.quick else 80
    prompt = "\n\n" if demo.text else "\n\ndef "
    here, elsewhere = document.session(), Session(document.engine, document.loaded.tokenizer)
    if other is not None:
        elsewhere.read(other.text[: 600 if demo.quick else OTHER_BYTES])
    name = other.name if other is not None else "nothing"
    demo.say(
        "One prompt, two memories",
        f"Both start with {prompt.strip() or 'a new paragraph'!r} and the same random seed; only the text that they "
        "have read differs.",
    )
    written = [[f"memory of {document.name}", _continued(here, prompt, length, 1)]]
    written.append([f"memory of {name}", _continued(elsewhere, prompt, length, 1)])
    _print_texts(written)
    seen("Compare the names that the two use.")
    demo.say("A fork costs nothing", "A memory is a value: two continuations, with different seeds, share it.")
    before = memory_hash(here)
    forks = [[f"fork with seed {seed}", _continued(here, prompt, length // 2, seed)] for seed in (2, 3)]
    _print_texts(forks)
    if memory_hash(here) != before:
        raise BlockRecurrentError("generating changed the memory that it started from: please report this")
    seen(f"After both, the memory is unchanged: its hash is still {before[:16]}.")
    document.session(at_end=True).save(demo.out / "document.memory")
    demo.found |= {
        "written": written + forks,
        "written_note": "From the middle of the text. The forks start from the first memory, with other seeds.",
    }


def _continued(session: Session, prompt: str, tokens: int, seed: int) -> str:
    """The prompt and its continuation."""
    from block_recurrent.studies.demo import write_from

    return (prompt + write_from(session, prompt, tokens, seed)).strip("\n")


def _print_texts(texts: list[list[str]]) -> None:
    for name, text in texts:
        print(f"--- {name}")
        print("\n".join(f"    {line}" for line in text.splitlines()), flush=True)
