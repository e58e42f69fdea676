"""Files and datasets of many records with a `text`: JSON lines (also .gz), Parquet, Hugging Face datasets."""

from __future__ import annotations

import gzip
import json
import os
import socket
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from block_recurrent.data.sources.document import Document, Found, LeftOut, Remarks
from block_recurrent.data.utf8 import to_utf8
from block_recurrent.errors import DataError, MissingExtraError
from block_recurrent.io.door import first_line

JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json.gz")
PARQUET = ".parquet"
RECORD_SUFFIXES = (*JSON_LINES, PARQUET)
ROWS_AT_ONCE = 16
HUB_HOST = "huggingface.co"
HUB_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}


def is_record_file(path: Path) -> bool:
    """Whether a file contains many documents, by its name."""
    return path.name.lower().endswith(RECORD_SUFFIXES)


def read_records(path: Path, name: str, split: str | None) -> Iterator[Found]:
    """The records of a JSON lines or Parquet file. A record is named by its `name`, or by the file and its number."""
    read_rows = _parquet_rows if path.name.lower().endswith(PARQUET) else _json_rows
    for label, row in read_rows(path, name):
        yield row if isinstance(row, LeftOut) else _document(row, label, split)


def hub_documents(name: str) -> Iterator[Found]:
    """The records of a Hugging Face dataset, streamed: `hf:NAME` or `hf:NAME:CONFIGURATION`."""
    datasets = _import_datasets()
    path, _, configuration = name.partition(":")
    try:
        parts = datasets.load_dataset(path, configuration or None, streaming=True)
        # A dataset with a single split is divided by names, like a folder without splits.
        known = {part: HUB_SPLITS[part] for part in parts if part in HUB_SPLITS} if len(parts) > 1 else {}
        for part, rows in parts.items():
            if len(parts) > 1 and part not in known:
                yield LeftOut(part, "is not one of the splits train, validation and test")
                continue
            for number, row in enumerate(rows):
                yield _document(row, f"{part}/{number}", known.get(part))
    except Exception as error:  # the library raises its own, the network's and the file formats' errors
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"can't load the Hugging Face dataset '{name}' ({first_line(error)}); check name and network, or give a "
            "folder"
        ) from None


def _import_datasets() -> Any:
    if not urllib.request.getproxies():
        try:
            socket.getaddrinfo(HUB_HOST, 443)
        except OSError:
            # Without a network the library would retry for half a minute; this makes it use its cache immediately.
            os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("a Hugging Face dataset", "datasets") from None
    return datasets


def _document(row: Any, label: str, split: str | None) -> Found:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        return LeftOut(label, "has no field 'text' with a string")
    own = row.get("name")
    text = row["text"]

    def read(remarks: Remarks) -> Iterator[bytes]:
        raw = to_utf8(text)
        remarks.note(raw, replaced=raw.count(b"\xef\xbf\xbd") - text.count("\ufffd"))
        yield raw

    return Document(own if isinstance(own, str) and own else label, split, read)


def _json_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                label = f"{name}:{number}"
                if not line.strip():
                    continue
                try:
                    yield label, json.loads(line)
                except (ValueError, RecursionError):
                    yield label, LeftOut(label, "is not a line of JSON in UTF-8")
    except (EOFError, zlib.error):
        yield name, LeftOut(name, f"is truncated or damaged after line {number}")
    except OSError as error:
        yield name, LeftOut(name, f"can't be read ({error.strerror or error}) after line {number}")


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("a Parquet file", "parquet") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [column for column in ("name", "text") if column in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        yield name, LeftOut(name, f"is not a readable Parquet file ({first_line(error)}) after row {number}")
