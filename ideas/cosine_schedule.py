"""A cosine schedule: the learning rate falls from the first step on, to a tenth of its peak."""

import math

import hotlap

FINAL = 0.1


def cosine(step: int, steps: int) -> float:
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * step / steps)) / 2


idea = hotlap.idea("softcap", schedule=cosine)
