"""How many prefill tokens the next step may carry."""

from __future__ import annotations

from collections.abc import Sequence

POLICIES = ("off", "auto")
FINISHING_WINDOW = 4
"""A row with at most this many tokens left is about to free its slot: ``auto`` lets it finish before it prefills."""


def check_policy(policy: str) -> None:
    """Refuse a policy that is not built.

    Raises:
        ValueError: names the policy and those that exist.
    """
    if policy not in POLICIES:
        raise ValueError(f"scheduler policy {policy!r} is not supported; choose one of {', '.join(POLICIES)}")


def choose_prefill_budget(
    policy: str, base: int, active: Sequence[int], prefilling: Sequence[int], overlap: bool
) -> int:
    """Prefill tokens allowed in the next step.

    ``auto`` is the reference policy, kept exactly with its weaknesses: it does not bound how many ticks in a row the
    finishing window may defer prefill (a steady flow of finishing rows starves it); the cap at the front prompt leaves
    budget unused that a second prompt could fill; and a budget in tokens does not bound the latency of a step.

    Args:
        policy: "off" or "auto".
        base: hard cap on prefill tokens of a step; decode rows are not counted in it.
        active: output tokens left of every decoding row (all >= 1).
        prefilling: prompt tokens left of the admitted prompts, in FIFO order.
        overlap: whether a chunk overlaps with decode (``stream`` and ``device``). Then it runs off the decode step or
            inside it, so holding it back buys decode nothing and only delays prefill: no finishing window.

    Returns:
        The budget; 0 asks for a decode-only step.

    Raises:
        ValueError: the policy is not built.
    """
    check_policy(policy)
    if policy == "off" or not active or not prefilling:
        return base
    if not overlap and min(active) <= FINISHING_WINDOW:
        return 0
    return min(prefilling[0], base)
