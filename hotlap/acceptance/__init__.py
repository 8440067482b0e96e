"""The acceptance test of a device: does Hotlap compute the right thing here, without waits, and how fast?

`hotlap doctor --gpu` runs it. Every check ends as passed, failed or skipped, with a reason and its figures.
"""
