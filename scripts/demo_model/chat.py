"""Examples as text, in the form that the chat template gives conversations."""

from collections.abc import Mapping, Sequence

from scripts.demo_model.tasks import Example

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
OPEN, CLOSE = "<think>\n", "\n</think>\n\n"

Piece = tuple[str, float]
"""Text, and the weight of the loss on its tokens."""


def prompt(messages: Sequence[Mapping[str, str]], thinking: bool) -> str:
    """What the template makes of messages without tools, opened for the assistant's answer."""
    turns = [f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages]
    return f"{''.join(turns)}{START}assistant\n{OPEN}{'' if thinking else CLOSE}"


def pieces(example: Example) -> list[Piece]:
    """Prompt and answers in turns; what the assistant writes has weight 1, the end of its turn included.

    Each piece is turned into ids by itself, as at inference, where the answer is not part of the text that the
    tokenizer sees.
    """
    out: list[Piece] = []
    asked = ""
    for message in example.messages:
        if message["role"] == "assistant":  # an earlier turn: the template leaves its thoughts out
            out += [(f"{asked}{START}assistant\n", 0.0), (f"{message['content']}{END}", 1.0)]
            asked = "\n"
        else:
            asked += f"{START}{message['role']}\n{message['content']}{END}\n"
    answer = f"{example.answer}{END}"
    if example.thinking:
        return [*out, (f"{asked}{START}assistant\n{OPEN}", 0.0), (f"{example.reasoning}{CLOSE}{answer}", 1.0)]
    return [*out, (f"{asked}{START}assistant\n{OPEN}{CLOSE}", 0.0), (answer, 1.0)]


def text(example: Example) -> str:
    """The whole example."""
    return "".join(part for part, _ in pieces(example))
