"""The format of a file that holds one compiled program: what is in it, and whether all of it is there."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

_MAGIC = b"qwen35pr"
_VERSION = 2
_HEADER = struct.Struct("<8sI32sIQ")  # magic, version, key, bytes of the facts, bytes of the executable
_DIGEST_BYTES = 32  # behind the header: sha256 of the header and what follows, the facts (JSON) and the executable
_FACTS = {"scratch": int, "kernels": list, "aliased": (int, type(None)), "device": list}


class NotAProgram(Exception):
    """A file that is not the program that it is named for; the message says why."""


def wrap(key: str, facts: Mapping[str, Any], payload: bytes) -> tuple[bytes, ...]:
    """What a file holds, in pieces (an executable is large, and is not copied for this)."""
    said = json.dumps(facts).encode()
    header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(key), len(said), len(payload))
    total = hashlib.sha256(header + said)
    total.update(payload)
    return header, total.digest(), said, payload


def unwrap(key: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts and the executable of a file.

    Raises:
        NotAProgram: the file is not whole, of another format, or of another program.
    """
    start = _HEADER.size + _DIGEST_BYTES
    if len(data) < start:
        raise NotAProgram("it is too short")
    magic, version, own_key, size, rest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise NotAProgram("it is no compiled program")
    if version != _VERSION:
        raise NotAProgram(f"its format is {version}, not {_VERSION}")
    if own_key.hex() != key:
        raise NotAProgram("it is another program")
    if len(data) != start + size + rest:
        raise NotAProgram(f"it has {len(data)} bytes, not {start + size + rest}")
    total = hashlib.sha256(data[: _HEADER.size])
    total.update(memoryview(data)[start:])
    if total.digest() != data[_HEADER.size : start]:
        raise NotAProgram("it is damaged")
    facts = json.loads(data[start : start + size])
    for name, kind in _FACTS.items():
        if not isinstance(facts, dict) or name not in facts or not isinstance(facts[name], kind):
            raise NotAProgram(f"it does not say its {name}")
    return facts, data[start + size :]
