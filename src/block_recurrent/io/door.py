"""Validation of input files: sealed text, lists of files with their hashes, and schemas.

A sealed text ends with the SHA-256 of everything before it, so that any flipped bit is detected. Every problem is a
one-line FileFormatError. A hash detects damage and mistakes; it is not a signature, see docs/security.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from block_recurrent.errors import FileFormatError

MANIFEST = "manifest.json"
COUNT_LIMIT = 1 << 53
"""Larger than any real count, and exact in every number format."""
_JSON_SEAL, _TOML_SEAL = ',\n "sha256": "{}"\n}}\n', "# sha256: {}\n"
Rule = Callable[[Any], bool]


def seal_json(text: str) -> str:
    """The text of a JSON object with its seal as the last key."""
    # Half a character, of a name that is not UTF-8, is written as JSON escapes it.
    text = text.encode(errors="backslashreplace").decode()
    return _sealed(text.rstrip().removesuffix("}").rstrip(), _JSON_SEAL)


def seal_toml(text: str) -> str:
    """The text of a TOML file with its seal as the last line, a comment."""
    return _sealed(text, _TOML_SEAL)


def toml_seal(text: str) -> bool | None:
    """Whether a TOML file matches its seal; None if it has none."""
    return None if "# sha256" not in text else _is_sealed(text, _TOML_SEAL)


def _sealed(body: str, seal: str) -> str:
    return body + seal.format(hashlib.sha256(body.encode()).hexdigest())


def _is_sealed(text: str, seal: str) -> bool:
    body = text[: -len(seal.format("0" * 64))]
    return text == _sealed(body, seal)


def is_utf8(path: Path) -> bool:
    """Whether a name is UTF-8: safetensors opens no other file."""
    return str(path) == str(path).encode(errors="replace").decode()


def read_bytes(path: Path) -> bytes:
    """The contents of a file; any problem is an OSError, also a pipe or a device, which could block."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path.read_bytes()


def read_manifest(path: Path, kind: str, rules: Mapping[int, Mapping[str, Rule]]) -> dict[str, Any]:
    """A manifest of a kind; `rules`: the keys of each version and their valid values. From version 2 on it is sealed.

    A file that can't be opened is an OSError; any other problem is a FileFormatError.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise FileFormatError(f"its {path.name} is not a regular file")
    raw = path.read_bytes()
    try:
        text = raw.decode()
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"its {path.name} is not JSON ({first_line(error)})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != kind:
        raise FileFormatError(f"its {path.name} is not the manifest of a {kind}")
    version: Any = manifest.get("version")
    if not is_count(version) or version not in rules:
        raise FileFormatError(
            f"its {path.name} has format version {version!r}; this version supports up to {max(rules)}"
        )
    if version > 1 and not (_is_sealed(text, _JSON_SEAL) and manifest.pop("sha256", None)):
        raise FileFormatError(f"its {path.name} does not match its own hash: it was changed after it was written")
    check_schema(manifest, {"format": is_text, "version": is_count, **rules[version]}, f"its {path.name}")
    return manifest


def check_schema(values: Any, rules: Mapping[str, Rule], whose: str) -> None:
    """Raise an error that names the first key that is missing, unknown or invalid. 'key?' is optional."""
    if not isinstance(values, dict):
        raise FileFormatError(f"{whose} is a {type(values).__name__} instead of an object with keys")
    for name, rule in rules.items():
        key = name.removesuffix("?")
        if key not in values:
            if key == name:
                raise FileFormatError(f"{whose} lacks '{key}'")
        elif not rule(values[key]):
            raise FileFormatError(f"{whose} has an invalid '{key}': {_shown(values[key])}")
    if len(values) > len(rules) or not all(key in rules or f"{key}?" in rules for key in values):
        unknown = next(key for key in values if key not in rules and f"{key}?" not in rules)
        raise FileFormatError(f"{whose} has the unknown key '{unknown}'")


def is_count(value: Any) -> bool:
    """A whole number, usable as a count."""
    return type(value) is int and 0 <= value < COUNT_LIMIT


def is_number(value: Any) -> bool:
    """A finite number, as a float has them too."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_plain(value: Any, depth: int = 6) -> bool:
    """Text, numbers, and objects and lists of them, not deep."""
    if isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(is_plain(inner, depth - 1) for inner in inside)
    return value is None or isinstance(value, (str, bool)) or is_number(value)


def is_object(rules: Mapping[str, Rule]) -> Rule:
    """The rule for an object with these keys."""

    def holds(value: Any) -> bool:
        try:
            check_schema(value, rules, "")
        except FileFormatError:
            return False
        return True

    return holds


def is_list_of(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def is_counts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(is_count, value))


def is_files(value: Any) -> bool:
    """Names of files inside a folder, each with its hash."""
    return isinstance(value, dict) and all(
        is_hash(digest) and not os.path.isabs(name) and ".." not in Path(name).parts for name, digest in value.items()
    )


def list_files(folder: Path) -> dict[str, str]:
    """Every file of a folder with its hash, for its manifest."""
    return {name: sha256_of(folder / name) for name in _names(folder)}


def check_files(folder: Path, listed: Mapping[str, str]) -> None:
    """Raise an error unless a folder contains exactly the files that its manifest lists, with their hashes."""
    found = _names(folder)
    for name in sorted(found | set(listed)):
        if name not in found:
            raise FileFormatError(f"{name} is missing")
        if name not in listed:
            raise FileFormatError(f"its {MANIFEST} does not list {name}: remove it if it does not belong there")
        if (folder / name).is_symlink() or not (folder / name).is_file():
            raise FileFormatError(f"{name} is not a regular file")
        if sha256_of(folder / name) != listed[name]:
            raise FileFormatError(f"the hash of {name} differs")


def _names(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths} - {MANIFEST}


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_line(error: object) -> str:
    """The message of an error, as one line."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
