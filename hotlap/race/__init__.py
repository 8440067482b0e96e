"""Races: recipes against each other over seeds, interleaved and resumable, and what they say. Needs no torch.

`plan` says what runs, `directory` keeps it on the disk, `runner` carries it out on an `engine`, `results`
draws the conclusions; `ablation` makes a plan that takes a recipe's changes back one by one. The engines are
`local` and `ray_cluster`; `node` is the far end of the latter.
"""
