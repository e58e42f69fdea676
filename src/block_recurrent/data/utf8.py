"""UTF-8 at the level of bytes."""

from __future__ import annotations

import re


def to_utf8(text: str) -> bytes:
    """UTF-8 of a string; half a surrogate pair, which has none, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def last_character_end(buffer: bytes) -> int:
    """The end of the last whole character in the front of a longer UTF-8 text."""
    end = len(buffer)
    for back in range(1, min(4, end) + 1):
        byte = buffer[end - back]
        if byte < 0x80:
            return end
        if byte >= 0xC0:
            length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return end if length <= back else end - back
    return end
