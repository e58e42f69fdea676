"""The model as a `PreTrainedModel` of transformers: `generate`, beam search, pipelines.

The document mark is bos, eos and pad. As an input it starts a document and resets the memory; so padding
with marks is harmless, and rows that have ended can be fed marks.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from block_recurrent.errors import FileFormatError, InputError
from block_recurrent.hub.cache import BlockRecurrentCache
from block_recurrent.hub.configuration import BlockRecurrentConfig
from block_recurrent.hub.manifest import check_export
from block_recurrent.hub.padding import Rows
from block_recurrent.inference.engine import Engine, tokens_at_once
from block_recurrent.io.tensors import check_finite
from block_recurrent.model.language_model import BlockRecurrentLM
from block_recurrent.model.memory import DocumentMemory

_GENERATING: ContextVar[tuple[Any, Engine] | None] = ContextVar("generating", default=None)
"""The model that generates in this thread, and its engine: other threads may use the model at the same time."""


class BlockRecurrentForCausalLM(PreTrainedModel, GenerationMixin):
    """`BlockRecurrentLM` with transformers' interface. `past_key_values` is a `BlockRecurrentCache`."""

    config_class = BlockRecurrentConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True
    _no_split_modules = ["Layer"]  # noqa: RUF012 (transformers wants a list)

    def __init__(self, config: BlockRecurrentConfig) -> None:
        super().__init__(config)
        self.model = BlockRecurrentLM(config.model_config())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: BlockRecurrentCache | DocumentMemory | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Like other causal models of transformers. Padding is removed by the mask; logits there are zeros."""
        if input_ids is None or inputs_embeds is not None:
            raise InputError("give input_ids: this model does not support inputs_embeds")
        if output_attentions or output_hidden_states:
            raise InputError("output_attentions and output_hidden_states are not supported; see 'brt inspect'")
        if not isinstance(logits_to_keep, int):
            raise InputError("logits_to_keep must be a whole number: how many of the last logits to compute, 0 for all")
        memory = _memory_of(past_key_values, len(input_ids))
        rows = Rows.of(input_ids, attention_mask)
        keep = logits_to_keep if labels is None else 0
        one_each = (
            input_ids.shape[1] == 1 == min(rows.lengths) and not (input_ids == self.model.config.eos_token_id).any()
        )
        if (engine := self._engine) is not None and one_each:
            logits, memory = engine.decode(input_ids[:, 0], memory)
            logits = logits[:, None].to(self.dtype)
        else:
            hidden, memory = self._read(rows, input_ids, memory, keep)
            logits = hidden @ self.model.embedding.weight.T
        loss = None if labels is None else _loss(logits, labels)
        cache = None if use_cache is False else BlockRecurrentCache(memory)
        values: dict[str, Any] = {"loss": loss, "logits": logits, "past_key_values": cache}
        output = CausalLMOutputWithPast(**values)
        return output.to_tuple() if return_dict is False else output

    @torch.no_grad()
    def read(
        self, input_ids: Tensor, memory: BlockRecurrentCache | DocumentMemory | None = None
    ) -> BlockRecurrentCache:
        """Read tokens without computing logits: all but the last token, which goes to `generate`."""
        outputs = self(input_ids, past_key_values=memory, logits_to_keep=1)
        return outputs.past_key_values

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, optionally from a carried memory: `generate(new_ids, past_key_values=memory)`."""
        memory = kwargs.get("past_key_values")
        given = inputs if inputs is not None else kwargs.get("input_ids")
        if given is not None and given.shape[-1] == 0:
            raise InputError("input_ids is empty: give at least one token, such as the document mark (bos_token_id)")
        if memory is not None:
            if given is None:
                raise InputError(
                    "give at least the last token of the text, which the memory has not read, as input_ids"
                )
            _refuse_mark_after(
                _memory_of(memory, len(given)),
                Rows.of(given, kwargs.get("attention_mask")),
                self.model.config.eos_token_id,
            )
            if isinstance(memory, DocumentMemory):
                kwargs["past_key_values"] = BlockRecurrentCache(memory)
        # With the current weights, which may be trained between two calls. Always without dropout.
        token = _GENERATING.set((self, Engine(self.model)))
        try:
            return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            _GENERATING.reset(token)

    @property
    def _engine(self) -> Engine | None:
        generating = _GENERATING.get()
        return generating[1] if generating and generating[0] is self else None

    def _read(
        self, rows: Rows, input_ids: Tensor, memory: DocumentMemory | None, keep: int
    ) -> tuple[Tensor, DocumentMemory]:
        """Hidden vectors of the last `keep` columns of the input (0: of all), and the memory after it."""
        lanes, width = input_ids.shape
        if width > 1:
            _refuse_mark_after(memory, rows, self.model.config.eos_token_id)
        if keep == 1:
            if any(first + length < width for first, length in zip(rows.first, rows.lengths, strict=True)):
                raise InputError("padding is on the right of a text to continue: pad on the left")
            rows = rows.from_last_mark(self.model.config.eos_token_id)
        kept_from = width - keep if keep else 0
        hidden = self.model.embedding.weight.new_zeros(lanes, width - kept_from, self.config.d_model)
        config, engine = self.model.config, self._engine
        model = self.model if engine is None else engine.snapshot.model
        for start, end, starts in rows.calls(config.eos_token_id, tokens_at_once(config)):
            counts = [min(max(length - start, 0), end - start) for length in rows.lengths]
            lengths = None if min(counts) == end - start else torch.tensor(counts)
            x, memory = model.hidden(rows.tokens[:, start:end], memory, starts, lengths)
            memory = memory if engine is None else engine.snapshot.signed(memory)
            if x.shape == hidden.shape and not any(rows.first) and lengths is None:
                return x, memory  # the common case: one call, nothing to rearrange
            for lane, count in enumerate(counts):
                column = rows.first[lane] + start
                skipped = max(kept_from - column, 0)
                if count > skipped:
                    place = slice(column + skipped - kept_from, column + count - kept_from)
                    hidden[lane, place] = x[lane, skipped:count]
        assert memory is not None
        return hidden, memory

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: `BlockRecurrentLM` initializes its own weights."""

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers, after verifying the hashes of a folder made by `brt export`; all weights must be there,
        and finite: transformers would leave those that are missing as they happen to be in memory."""
        check_export(name)
        with_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise FileFormatError(f"the weights in '{name}' can't be used: '{missing[0]}' is missing")
        try:
            check_finite({key: p for key, p in model.named_parameters() if not p.is_meta})
        except FileFormatError as error:
            raise FileFormatError(f"the weights in '{name}' can't be used: {error}") from None
        return (model, info) if with_info else model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @staticmethod
    def _reorder_cache(past_key_values: BlockRecurrentCache, beam_idx: Tensor) -> BlockRecurrentCache:
        return past_key_values.select(beam_idx)

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """With beams or several samples, a carried memory is repeated as the inputs are."""
        cache = kwargs.get("past_key_values")
        if cache is not None and expand_size > 1:
            kwargs["past_key_values"] = cache.repeat(expand_size)
        return super()._expand_inputs_for_generation(expand_size, *args, **kwargs)  # type: ignore[misc]


def _memory_of(cache: BlockRecurrentCache | DocumentMemory | None, lanes: int) -> DocumentMemory | None:
    if cache is None:
        return None
    if not isinstance(cache, (BlockRecurrentCache, DocumentMemory)):
        raise InputError(
            f"past_key_values is a {type(cache).__name__}: it must be a BlockRecurrentCache, as returned by this model"
        )
    memory = cache if isinstance(cache, DocumentMemory) else cache.memory
    # One book, several continuations.
    return memory.select([0] * lanes) if memory.lanes == 1 and lanes > 1 else memory


def _refuse_mark_after(memory: DocumentMemory | None, rows: Rows, mark: int) -> None:
    """A mark would reset the memory, which is an error if one was given."""
    if memory is None or memory.lanes != len(rows.lengths):
        return  # the model rejects a wrong number of lanes
    for lane, (count, length) in enumerate(zip(memory.tokens_read.tolist(), rows.lengths, strict=True)):
        if count and length and int(rows.tokens[lane, 0]) == mark:
            raise InputError(
                f"a memory that has read {count} tokens was given, and input_ids begins with the document mark {mark}, "
                "which starts a new document: omit the mark (add_special_tokens=False), or the memory"
            )


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the next tokens; labels of -100 are ignored. Shifted here, as in transformers."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
