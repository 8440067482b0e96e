"""Another initialization: token and value embeddings begin with a standard deviation of 0.1 instead of 1.

Raced against softcap at nano, 160 steps, 3 seeds: no evidence either way, +0.0092 bits/byte.
"""

import hotlap
from hotlap.model import GPT
from hotlap.model.layers import Table


def shrink_tables(model: GPT) -> None:
    for module in model.modules():
        if isinstance(module, Table):
            module.weight.mul_(0.1)


idea = hotlap.idea("softcap", initialize=shrink_tables)
