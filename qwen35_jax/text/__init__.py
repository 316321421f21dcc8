"""Text on the host: tokenizer and chat template, incremental detokenisation with stop strings, reasoning split."""

from qwen35_jax.text.reasoning import split_reasoning, starts_inside_reasoning
from qwen35_jax.text.stream import TextStream
from qwen35_jax.text.tokenizer import ChatError, Tokenizer, TokenizerError

__all__ = [
    "ChatError",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "split_reasoning",
    "starts_inside_reasoning",
]
