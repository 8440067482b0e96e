"""How many seconds of training does it take to reach a target in bits/byte on `sotu` at nano?

    python -m bench.marks [--seeds 3]         about 12 minutes on two cores

Every seed must reach the target. Each target has its own number of steps, because a longer schedule reaches
the same loss later. Runs use the defaults of `hotlap train` without torch.compile.
"""

import argparse

from bench.lap import print_header, print_laps

# recipe, steps, bits/byte
MARKS = (("sprint", 250, 1.488), ("sprint", 450, 1.422), ("sprint", 1000, 1.340), ("softcap", 640, 1.422))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print_header()
    for recipe, steps, target in MARKS:
        print_laps(recipe, steps, target, seeds, evaluations=6)


if __name__ == "__main__":
    main()
