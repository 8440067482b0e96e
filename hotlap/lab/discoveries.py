"""The level of each try in a series, so that among all accepted ideas the share of false ones stays small.

With a fixed level of 5 %, two hundred worthless ideas yield ten "improvements". LORD++ (Ramdas, Yang,
Wainwright and Jordan 2017, https://arxiv.org/abs/1710.00499) gives each try a level that depends only on what
earlier tries found: it falls as tries go by, and rises after each discovery. The expected share of false
discoveries is then at most alpha, at any time and for any number of tries.

Tries may overlap. A try that is still running then counts as one that has found nothing (Zrnic, Ramdas and
Jordan 2021, https://arxiv.org/abs/1812.05068): only what was known when a try began affects its level.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import special

# The level's share that the j-th try after an event gets is proportional to j^-DECAY. A larger exponent
# favors the tries right after a discovery over those after long droughts. Chosen with `python -m bench.gate`.
DECAY = 1.6
# The share of alpha that is spent on the time before the first discovery.
START_SHARE = 0.5


def share(number: int) -> float:
    """Of the budget that an event (the start, a discovery) opens, what the `number`-th try after it gets."""
    assert number >= 1, f"tries are counted from 1, found {number}"
    return float(number**-DECAY / special.zeta(DECAY))


def level_of_try(number: int, discoveries: Sequence[int], alpha: float) -> float:
    """The level of the `number`-th try, counted from 1.

    `discoveries`: for each earlier "helps", how many tries had begun when it became known.
    """
    known = sorted(begun for begun in discoveries if begun < number)
    level = START_SHARE * alpha * share(number)
    for position, begun in enumerate(known):
        worth = (1 - START_SHARE) * alpha if position == 0 else alpha
        level += worth * share(number - begun)
    return level
