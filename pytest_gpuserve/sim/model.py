"""A toy language model that is really split over the ranks.

A sequence's hidden state is one 64-bit number. Every one of 64 heads adds its term to the next logit, each rank owns
some heads, and the token is a function of the sum over all ranks: no token without every rank, the same tokens for
every number of ranks, with and without speculation.
"""

from __future__ import annotations

HEADS = 64
MASK = (1 << 64) - 1

WORDS = """
    a able about after again all also and any are as at back be because been before being between both but by call
    came can case come could day did do does down each end even every far few find first for from get give go good
    great had has have he her here him his home how if in into is it its just know last left life like line little
    long look made make man many may me men might more most much must my name never new next no not now number of
    off old on one only or other our out over own part people place point right said same say see seem set she
    should show side small so some state still such take tell than that the their them then there these they thing
    think this those thought three time to too two under until up upon us use very want was water way we well went
    were what when where which while who why will with word work world would year you young your
""".split()  # noqa: SIM905 - a list of 190 lines helps nobody
VOCABULARY = len(WORDS)


def mix(value: int) -> int:
    """splitmix64: a well spread 64-bit number for any number."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def token_of(logit: int) -> int:
    return mix(logit) % VOCABULARY


def gap_of(state: int) -> float:
    """Difference of the logarithms of the two most likely next tokens' probabilities, 0.001 to 4."""
    return (mix(state ^ 0x5EED) % 4000 + 1) / 1000


def advance(state: int, token: int) -> int:
    """The hidden state after one more token."""
    return mix(state * 31 + token)


def detokenize(tokens: list[int]) -> str:
    """Each token is a word with the space before it."""
    return "".join(" " + WORDS[token] for token in tokens)


class Shard:
    """The heads of one rank. Terms are linear in the state, so a rank's share is one multiplication."""

    def __init__(self, rank: int, size: int) -> None:
        self._factor, self._bias = _terms(range(rank, HEADS, size))
        self._whole = _terms(range(HEADS))

    def partial(self, state: int) -> int:
        """This rank's share of the next logit."""
        return (state * self._factor + self._bias) & MASK

    def draft(self, state: int, length: int, right: int) -> list[int]:
        """``length`` proposed tokens, of which the first ``right`` are the model's own and the next is not."""
        factor, bias = self._whole
        proposed = []
        for position in range(length):
            token = token_of((state * factor + bias) & MASK)
            if position >= right:
                token = (token + 1) % VOCABULARY
            proposed.append(token)
            state = advance(state, token)
        return proposed


def _terms(heads: range) -> tuple[int, int]:
    return sum(mix(2 * head) for head in heads) & MASK, sum(mix(2 * head + 1) for head in heads) & MASK
