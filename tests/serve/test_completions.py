"""/v1/completions with OpenAI's own client: the same text alone and in a crowd, from prompts and from memories."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from block_recurrent.serve.limits import Limits

from .conftest import Served, book, httpx, serving

openai = pytest.importorskip("openai", reason="needs OpenAI's client")


@pytest.fixture
def client(served: Served) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").owned_by == "block-recurrent"


def test_text_is_that_of_a_session(client: Any, served: Served) -> None:
    answer = client.completions.create(model="micro", prompt="Call me", max_tokens=30, temperature=0)
    written = served.session("Call me").write_all(30, temperature=0)
    assert answer.choices[0].text == written.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == 37


def test_stream_gives_the_same_text(client: Any) -> None:
    options: dict[str, Any] = {"model": "micro", "prompt": "The sea", "max_tokens": 40, "seed": 5}
    whole = client.completions.create(**options).choices[0]
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.text
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == whole.finish_reason
    assert [token for part in parts if part.choices for token in part.choices[0].token_ids] == whole.token_ids
    assert parts[-1].usage.completion_tokens == 40


def test_log_probabilities(client: Any, served: Served) -> None:
    answer = client.completions.create(model="micro", prompt="whale", max_tokens=8, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    written = served.session("whale").write_all(8, temperature=0)
    assert found.token_logprobs == pytest.approx(written.log_probs, abs=1e-4)
    assert len(found.tokens) == 8
    assert all(len(top) == 3 for top in found.top_logprobs)
    for token, log_prob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(log_prob)  # greedy
        assert token in top


def test_null_is_the_default(client: Any) -> None:
    nothing: Any = dict.fromkeys(("temperature", "top_p", "n", "stream", "logprobs", "stop", "suffix", "echo"))
    options: dict[str, Any] = {"model": "micro", "prompt": "sea", "seed": 4}
    plain = client.completions.create(**options, max_tokens=16)
    assert client.completions.create(**options, max_tokens=None, **nothing).choices == plain.choices


def test_several_texts_have_seeds_of_their_own(client: Any) -> None:
    options: dict[str, Any] = {"model": "micro", "max_tokens": 12}
    answer = client.completions.create(prompt=["one", "two"], n=3, seed=7, **options)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        alone = client.completions.create(prompt=["one", "two"][index // 3], seed=7 + index % 3, **options)
        assert choice.text == alone.choices[0].text


def test_stop(client: Any) -> None:
    plain = client.completions.create(model="micro", prompt="x", max_tokens=60, seed=3).choices[0].text
    stop = plain[20:22]
    stopped = client.completions.create(model="micro", prompt="x", max_tokens=60, seed=3, stop=[stop]).choices[0]
    assert stopped.text == plain[: plain.index(stop)]
    assert stopped.finish_reason == "stop"


def test_without_a_seed_texts_differ_and_can_be_had_again(served: Served) -> None:
    first, second = (served.complete(prompt="x", max_tokens=30) for _ in range(2))
    assert first["choices"][0]["text"] != second["choices"][0]["text"]
    again = served.complete(prompt="x", max_tokens=30, seed=first["seed"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_tokens_as_prompt(served: Served) -> None:
    by_text = served.complete(prompt="sea", max_tokens=9, seed=1)
    by_tokens = served.complete(prompt=list(b"sea"), max_tokens=9, seed=1)
    assert by_text["choices"] == by_tokens["choices"]


def test_same_text_alone_and_in_a_crowd(served: Served) -> None:
    """Forty requests at once, of all kinds, some of which go away: each gets what it gets alone."""
    served.read("crowd", book(300, seed=1))
    rng = random.Random(0)
    requests = [
        {
            "prompt": book(rng.choice([0, 1, 5, 90, 200]), seed=number) or "",
            "memory": rng.choice([None, "crowd"]),
            "max_tokens": rng.randint(1, 40),
            "seed": number,
            "temperature": rng.choice([0, 0.7, 1.3]),
            "n": rng.choice([1, 1, 2]),
            "logprobs": rng.choice([None, 2]),
        }
        for number in range(40)
    ]
    alone = [served.complete(**request)["choices"] for request in requests]

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:

            async def leave() -> None:
                async with client.stream("POST", "/v1/completions", json={"max_tokens": 900, "stream": True}) as answer:
                    await anext(answer.aiter_lines())

            async def ask(request: Any) -> Any:
                return (await client.post("/v1/completions", json=request)).json()["choices"]

            answers = await asyncio.gather(*map(ask, requests), *(leave() for _ in range(5)))
            return answers[: len(requests)]

    assert asyncio.run(together()) == alone


def test_continue_from_a_memory_and_keep_it(served: Served) -> None:
    text = book(150)
    served.read("kept", text)
    answer = served.complete(memory="kept", prompt=" Then", max_tokens=20, temperature=0, save_as="longer")
    session = served.session(text + " Then")
    assert answer["choices"][0]["text"] == session.write_all(20, temperature=0).text
    assert answer["usage"]["memory_tokens"] == len(text.encode())
    assert answer["saved"] == {"name": "longer", "tokens": session.position}
    assert served.client.get("/v1/memories/longer").json()["text_hash"] == session.state.text.hexdigest()
    more = served.complete(memory="longer", max_tokens=10, temperature=0)
    assert more["choices"][0]["text"] == session.write_all(10, temperature=0).text


def test_a_prompt_that_was_read_before_is_not_read_again(served: Served) -> None:
    text = book(420, seed=3)
    prompt = text + " and then"
    plain = served.complete(prompt=prompt, max_tokens=25, seed=2)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.read("prefix", text)
    reused = served.complete(prompt=prompt, max_tokens=25, seed=2)
    length = len(text.encode())
    assert reused["usage"]["prompt_tokens_details"]["cached_tokens"] == length // 512 * 512
    assert reused["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert reused["choices"] == plain["choices"]
    other = served.complete(prompt="X" + prompt, max_tokens=2)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.client.delete("/v1/memories/prefix")
    gone = served.complete(prompt=prompt, max_tokens=25, seed=2)
    assert gone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_short_text_is_reused_too(tmp_path: Path) -> None:
    """Whatever the number of tokens between checkpoints: there is one near the end of every text."""
    with serving(tmp_path, Limits()) as served:
        text = book(200, seed=3)
        size = len(text.encode())
        assert 512 < size < Limits().trail_every
        prompt = {"prompt": text + " and then", "max_tokens": 25, "seed": 2}
        plain = served.complete(**prompt)
        assert served.read("short", text)["trail"] == [size // 512 * 512]
        reused = served.complete(**prompt)
        assert reused["usage"]["prompt_tokens_details"]["cached_tokens"] == size // 512 * 512
        assert reused["choices"] == plain["choices"]
        assert served.read("more", text + " Then")["trail"] == [size // 512 * 512]
