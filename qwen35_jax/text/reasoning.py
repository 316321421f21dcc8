"""Split of a chat answer into reasoning and content."""

from __future__ import annotations

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def starts_inside_reasoning(prompt: str | None) -> bool:
    r"""Whether the output of a rendered prompt starts inside the reasoning: the prompt ends in ``<think>\n``.

    Decided from the rendered text, not from the options: a template may think by default, or not at all.
    """
    return prompt is not None and prompt.rstrip().endswith(THINK_OPEN)


def split_reasoning(text: str, starts_inside: bool) -> tuple[str | None, str]:
    """Split an answer at its first ``</think>``.

    Args:
        text: the output text.
        starts_inside: whether the prompt already opened the reasoning (:func:`starts_inside_reasoning`). If not, only
            an answer that itself begins with ``<think>`` has reasoning.

    Returns:
        Reasoning (None when there is none) without the newlines around it, and the content without the newlines
        before it. Reasoning that never closes (the answer was cut) leaves the content empty.
    """
    if not starts_inside:
        opened = text.lstrip()
        if not opened.startswith(THINK_OPEN):
            return None, text
        text = opened
    # A model that repeats the tag which the prompt already gave does not mean it as text.
    if text.lstrip().startswith(THINK_OPEN):
        text = text.lstrip()[len(THINK_OPEN) :]
    reasoning, _, content = text.partition(THINK_CLOSE)
    return reasoning.strip("\n"), content.lstrip("\n")
