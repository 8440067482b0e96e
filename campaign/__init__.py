"""A campaign that tries to break Hotlap: damaged files, killed processes, full disks and the like.

docs/reliability.md says what is tried and has the results; `python -m campaign --help` how to run it.
"""
