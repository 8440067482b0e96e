"""Benchmarks. They are meant for an idle machine, where threads wait as they do in the command: spinning."""
