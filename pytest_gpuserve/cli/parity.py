"""The last part of isolate's built-in check: does a server repeat itself, and the base, at temperature 0?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import GpuserveError
from ..isolation.signature import Signature
from ..server.greedy import Difference, Greedy, differences

if TYPE_CHECKING:
    from .launches import Seen

PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "def fibonacci(n):\n",
)

TOKENS = 64
"""Of each prompt."""

BROKEN = Signature("degraded", "serving", frozenset({"parity"}))


def judged(found: Sequence[Difference], who: str) -> tuple[Signature | None, str]:
    """What differences prove: a fault where the first server was sure of its token; else a line to show, or nothing.

    ``who``: begins the sentence.
    """
    wrong = [one for one in found if one.gap is not None and not one.tie]
    unsure = [one for one in found if one.gap is None]
    if wrong:
        return BROKEN, f"{who}: {wrong[0]}"
    if unsure:
        return None, f"{who}, which is reported and not counted as a failure: {unsure[0]}"
    return None, ""


def with_base(base: Sequence[Greedy] | None, seen: Seen) -> Seen:
    """What ``seen`` is once it is compared with the base's completions; None, or empty: there are none.

    Raises:
        GpuserveError: they are of other prompts.
    """
    if not base or not seen.outputs or not seen.signature.passed:
        return seen
    try:
        found = differences(base, seen.outputs)
    except ValueError:
        raise GpuserveError("isolate.json holds completions of other prompts. Begin anew with --fresh.") from None
    broken, text = judged(found, "not what the base says at temperature 0")
    return replace(seen, signature=broken or seen.signature, text="\n".join(filter(None, (text, seen.text))))
