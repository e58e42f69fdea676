"""The tokenizers as a `PreTrainedTokenizer` of transformers: bytes, and SentencePiece files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer

from block_recurrent.data import Tokenizer, load_tokenizer
from block_recurrent.errors import DataError
from block_recurrent.hub.manifest import check_export

MARK = "<|document|>"
VOCABULARY = "tokenizer.model"


class BlockRecurrentTokenizer(PreTrainedTokenizer):
    """Puts the document mark in front of every text, as training does; pads with it on the left.

    Text is only text: the name of the mark in a text is not encoded as the mark.
    """

    vocab_files_names = {"vocab_file": VOCABULARY}  # noqa: RUF012 (transformers wants plain attributes)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | None = None, kind: str = "bytes", **kwargs: Any) -> None:
        if kind != "bytes" and vocab_file is None:
            raise DataError(f"this tokenizer needs its file {VOCABULARY}, which is missing")
        self.tokenizer: Tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(vocab_file))
        self.vocab_file, self.kind = vocab_file, kind
        self._pieces = _piece_names(self.tokenizer)
        self._ids = {piece: index for index, piece in enumerate(self._pieces)}
        mark = AddedToken(MARK, special=True, normalized=False)
        self._added_tokens_decoder = {self.tokenizer.eos_token_id: mark}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token", "added_tokens_decoder"):
            kwargs.pop(name, None)
        kwargs.setdefault("padding_side", "left")
        kwargs["clean_up_tokenization_spaces"] = False
        super().__init__(kind=kind, bos_token=mark, eos_token=mark, pad_token=mark, unk_token=None, **kwargs)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """transformers' own, after checking the hashes of a folder that `brt export` made."""
        check_export(name)
        return super().from_pretrained(name, *args, **kwargs)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.size

    def get_vocab(self) -> dict[str, int]:
        return self._ids | {MARK: self.tokenizer.eos_token_id}

    def tokenize(  # type: ignore[override]  # transformers' own slow tokenizers have fewer parameters too
        self, text: str, **kwargs: Any
    ) -> list[str]:
        return [self._pieces[index] for index in self.tokenizer.encode(text).tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.tokenizer.decode([self._ids[token] for token in tokens if token in self._ids])

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """Decodes whole sequences at once, so that characters of several tokens are correct."""
        texts: list[list[int]] = [[]]
        for token in [token_ids] if isinstance(token_ids, int) else token_ids:
            if token == self.tokenizer.eos_token_id:
                texts.append([])
            else:
                texts[-1].append(int(token))
        return ("" if skip_special_tokens else MARK).join(self.tokenizer.decode(text) for text in texts)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [self.tokenizer.eos_token_id, *token_ids_0, *(token_ids_1 or [])]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            return [int(token == self.tokenizer.eos_token_id) for token in token_ids_0]
        return [1] + [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * (1 + len(token_ids_0) + len(token_ids_1 or []))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        if self.vocab_file is None:
            return ()
        target = Path(save_directory) / (f"{filename_prefix}-{VOCABULARY}" if filename_prefix else VOCABULARY)
        if Path(self.vocab_file).resolve() != target.resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)


def _piece_names(tokenizer: Tokenizer) -> list[str]:
    if tokenizer.model is None:
        return [f"<0x{byte:02X}>" for byte in range(tokenizer.size)]
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    return [processor.id_to_piece(index) for index in range(tokenizer.size)]
