"""Deciding about ideas: the gate, the ledger of a series of tries, and the ladder of sizes. Needs no torch.

`sequential` and `decision` are the test of one gate, `discoveries` the level that each try of a series gets;
these three are pure functions. `gate` carries a gate out, `ledger` keeps what was tried, `page` shows it;
`ladder` compares at several sizes, `scaling` says how an effect changes with compute.
"""
