"""Incremental detokenisation and stop strings, in time linear in the output.

The text of byte-level tokens is the UTF-8 of their concatenated bytes, so the stream keeps the bytes of an unfinished
character in an incremental UTF-8 decoder and never decodes a token twice. Whether a character is complete is decided
from its bytes, not from U+FFFD in the text: a real U+FFFD passes like any other character.

Stop strings are found by an Aho-Corasick automaton that reads every character once. Its state is the longest end of
the text that begins some stop string, and that is exactly what has to be held back.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence

from qwen35_jax.text.reasoning import starts_inside_reasoning
from qwen35_jax.text.tokenizer import Tokenizer


class TextStream:
    """Text of one output while its tokens arrive.

    After :meth:`finish`, ``text`` equals ``tokenizer.decode(all ids)`` cut at the stop string. The hit that counts is
    the one that is complete first (the longest of those that end at the same character), whatever the size of the
    pieces that arrive.

    Attributes:
        stop_hit: the stop string that ended the text, or None.
        num_tokens_kept: tokens up to and including the one that completed the stop string; all of them without a hit.
        starts_inside_reasoning: whether the prompt had already opened the reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        prompt_tail: str | None = None,
    ):
        """Start an empty text.

        Args:
            tokenizer: where the bytes of tokens come from.
            stop: strings that end the text.
            skip_special_tokens: leave special tokens out.
            include_stop_str_in_output: keep the stop string (and the text of a stop token) at the end of the text.
            min_tokens: a stop string counts only when a later token than this many completes it.
            prompt_tail: end of the rendered prompt, for ``starts_inside_reasoning``. It is no part of the text.
        """
        self._tokenizer = tokenizer
        self._automaton = _automaton(tuple(stop)) if stop else None
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []  # final text, joined when asked for
        self._taken = 0  # parts that take() has handed out
        self._held = ""  # may yet become part of a stop string
        self._node = 0
        self._finished = False
        self.stop_hit: str | None = None
        self.num_tokens_kept = 0
        self.starts_inside_reasoning = starts_inside_reasoning(prompt_tail)

    @property
    def text(self) -> str:
        """The text that no later token can take back."""
        if len(self._parts) > 1:
            joined = "".join(self._parts)
            if self._taken in (0, len(self._parts)):
                self._parts = [joined]
                self._taken = min(self._taken, 1)
            return joined
        return self._parts[0] if self._parts else ""

    def take(self) -> str:
        """The part of ``text`` that came since the last call."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def push(self, ids: Iterable[int], *, ends_with_stop_token: bool = False) -> str | None:
        """Add tokens.

        Args:
            ids: the new token ids.
            ends_with_stop_token: the last of them is an EOS or stop token: it counts as a token, and its own text is
                left out unless ``include_stop_str_in_output``.

        Returns:
            The stop string that ended the text, now or before; tokens after it are ignored.

        Raises:
            RuntimeError: the stream is finished.
        """
        if self._finished:
            raise RuntimeError("push() after finish()")
        ids = [int(i) for i in ids]
        silent = len(ids) - 1 if ends_with_stop_token and not self._include_stop else len(ids)
        if self._automaton is None:
            pieces = (self._tokenizer.token_bytes(i) for i in ids[:silent] if i not in self._skipped)
            self._emit(self._decoder.decode(b"".join(pieces)))
            self.num_tokens_kept += len(ids)
            return None
        for place, token_id in enumerate(ids):
            if self.stop_hit is not None:
                break
            self.num_tokens_kept += 1
            if place < silent and token_id not in self._skipped:
                self._scan(self._automaton, self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return self.stop_hit

    def finish(self) -> None:
        """No more tokens: a character cut in the middle becomes U+FFFD, and held text is released."""
        if self._finished:
            return
        self._finished = True
        if self.stop_hit is not None:
            return
        tail = self._decoder.decode(b"", final=True)
        if self._automaton is None:
            self._emit(tail)
            return
        self._scan(self._automaton, tail)
        if self.stop_hit is None:
            self._emit(self._held)
            self._held = ""

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _scan(self, automaton: _Automaton, text: str) -> None:
        """Run new characters through the automaton; emit what cannot belong to a stop string any more."""
        if not text:
            return
        step, hits, depths = automaton.step, automaton.hits, automaton.depths
        node = self._node
        early = self.num_tokens_kept <= self._min_tokens
        pending = self._held + text
        for place, char in enumerate(text, start=len(self._held)):
            node = step(node, char)
            hit = hits[node]
            if hit is not None and not early:
                self.stop_hit = hit
                end = place + 1 if self._include_stop else place + 1 - len(hit)
                self._emit(pending[:end])
                self._held = ""
                return
        self._node = node
        safe = len(pending) if self._include_stop else len(pending) - depths[node]
        self._emit(pending[:safe])
        self._held = pending[safe:]


class _Automaton:
    """Aho-Corasick automaton of some stop strings; node 0 is the root.

    Attributes:
        hits: by node: the longest stop string that ends there, or None.
        depths: by node: length of the text that it stands for.
    """

    def __init__(self, strings: tuple[str, ...]):
        self._next: list[dict[str, int]] = [{}]
        self.hits: list[str | None] = [None]
        self.depths = [0]
        for string in strings:
            node = 0
            for char in string:
                child = self._next[node].get(char)
                if child is None:
                    child = self._next[node][char] = len(self._next)
                    self._next.append({})
                    self.hits.append(None)
                    self.depths.append(self.depths[node] + 1)
                node = child
            self.hits[node] = string
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for node in queue:  # breadth first: grows while it is read
            for char, child in self._next[node].items():
                queue.append(child)
                self._fail[child] = self.step(self._fail[node], char)
            if self.hits[node] is None:
                self.hits[node] = self.hits[self._fail[node]]

    def step(self, node: int, char: str) -> int:
        """Node after one more character."""
        while True:
            child = self._next[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._fail[node]


@functools.lru_cache(maxsize=256)
def _automaton(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)
