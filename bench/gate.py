"""Does the gate keep its promises? Simulated gates and series, with the spread of recorded runs.

`python -m bench.gate [--series N] [--seed N]`. Effects are in standard deviations of a run between seeds. A
gate looks after every round from the third on and stops when it is decided. Recorded runs: the final bits per
byte of docs/gate-runs.json around the mean of their recipe, drawn with replacement; each side has the spread
of a recipe of its own, from there or docs/recipes.json. Widest and narrowest differ by a factor of sixty.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import special

from hotlap.lab.decision import OUTCOMES, Design, Outcome, stops
from hotlap.lab.discoveries import level_of_try
from hotlap.lab.sequential import looks_of
from hotlap.runs.reader import Floats

DOCS = Path(__file__).parents[1] / "docs"
RECORDED = ("recipes.json", "gate-runs.json")  # the last has recipes of about the same spread
ALPHA = 0.05
MOST_SEEDS = 12
IDEAS, HELPFUL, EFFECT = 200, 10, 3.0  # of a series
HELPS = OUTCOMES.index(Outcome.HELPS)

# draw(rng, gates, rounds) → (baseline, candidate) without effect, each (gates, rounds), and the mean of both
# sides' standard deviations as a root mean square, (gates, 1).
Draw = Callable[[np.random.Generator, int, int], tuple[Floats, Floats, Floats]]


def normal(candidate_sd: float = 1.0, correlation: float = 0.0) -> Draw:
    def draw(rng: np.random.Generator, gates: int, rounds: int) -> tuple[Floats, Floats, Floats]:
        baseline, other = rng.normal(size=(2, gates, rounds))
        candidate = correlation * baseline + math.sqrt(1 - correlation**2) * other
        sd = math.sqrt((1 + candidate_sd**2) / 2)
        return baseline, candidate_sd * candidate, np.full((gates, 1), sd)

    return draw


def skewed(rng: np.random.Generator, gates: int, rounds: int) -> tuple[Floats, Floats, Floats]:
    """Rarely a much worse run on either side: exponential tails."""
    baseline, candidate = rng.exponential(size=(2, gates, rounds)) - 1
    return baseline, candidate, np.ones((gates, 1))


def recorded(residuals: Floats, spreads: Floats, correlation: float = 0.0) -> Draw:
    def draw(rng: np.random.Generator, gates: int, rounds: int) -> tuple[Floats, Floats, Floats]:
        sds = rng.choice(spreads, size=(2, gates, 1))
        baseline, other = rng.choice(residuals, size=(2, gates, rounds))
        candidate = correlation * baseline + math.sqrt(1 - correlation**2) * other
        return sds[0] * baseline, sds[1] * candidate, np.sqrt((sds**2).mean(axis=0))

    return draw


def recorded_spread(docs: Path = DOCS) -> tuple[Floats, Floats]:
    """Residuals of recorded runs around their recipe's mean, with variance 1, and the recipes' spreads."""
    spreads: list[float] = []
    residuals: list[float] = []
    for name in RECORDED:
        values: dict[str, list[float]] = {}
        for run in json.loads((docs / name).read_text())["runs"]:
            values.setdefault(run["label"], []).append(run["val_bpb"])
        spreads += [float(np.std(of_label, ddof=1)) for of_label in values.values()]
        # In units of one spread for all: those of three or four runs each are far off by themselves.
        residuals = [x - float(np.mean(of_label)) for of_label in values.values() for x in of_label]
    return np.array(residuals) / np.std(residuals), np.array(spreads)


def gates(
    draw: Draw, effect: float, design: Design, count: int, rng: np.random.Generator
) -> tuple[dict[Outcome, float], float]:
    """(share of each outcome, mean rounds) of simulated gates. The least effect is in standard deviations."""
    baseline, candidate, sd = draw(rng, count, design.most_seeds)
    outcomes, rounds = stops((candidate - baseline) / sd - effect, design)
    return {outcome: float(np.mean(outcomes == i)) for i, outcome in enumerate(OUTCOMES)}, float(
        rounds.mean()
    )


def other_designs(effect: float, count: int, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """{design: (share that finds an effect, mean rounds)} on normal runs, looking at the same rounds."""
    d = np.diff(rng.normal(size=(2, count, MOST_SEEDS)), axis=0)[0] - effect
    looks = looks_of(MOST_SEEDS)
    t = {n: d[:, :n].mean(axis=1) / d[:, :n].std(axis=1, ddof=1) * math.sqrt(n) for n in looks}

    def first(reached: Callable[[int], np.ndarray]) -> tuple[float, float]:
        stopped = np.full(count, MOST_SEEDS + 1)
        for n in reversed(looks):
            stopped[reached(n)] = n
        return float((stopped <= MOST_SEEDS).mean()), float(np.minimum(stopped, MOST_SEEDS).mean())

    return {
        "t test after every round at 5 %": first(lambda n: special.stdtr(n - 1, t[n]) <= ALPHA),
        "Bonferroni over the looks": first(lambda n: special.stdtr(n - 1, t[n]) <= ALPHA / len(looks)),
        "anytime-valid t (e-process)": first(lambda n: e_value(-t[n], n, math.sqrt(2)) >= 1 / ALPHA),
    }


def e_value(t: Floats, n: int, effect: float) -> Floats:
    """Likelihood ratio of t for an effect in standard deviations of a difference, against none.

    It is a martingale under no effect, whatever the variance, so that it exceeds 1/alpha at any time with
    P ≤ alpha (Pérez-Ortiz, Lardy, de Heide and Grünwald 2024, https://arxiv.org/abs/2208.07610).
    """
    center = effect * math.sqrt(n)
    y = np.linspace(0, 12 + math.sqrt(n) + center, 400)[1:]
    weights = np.exp((n - 1) * np.log(y) - y * y / 2 - ((n - 1) * math.log(n) - n) / 2)
    tilt = np.exp(center * np.outer(t / np.sqrt(t * t + n - 1), y) - center**2 / 2)
    return tilt @ weights / weights.sum()


def fixed_seeds(power: float, effect: float) -> tuple[int, int]:
    """Seeds per side that a fixed one-sided test at 5 % needs: (Welch's, paired), for normal runs."""
    from hotlap.report.stats import noncentral_t_below

    def needed(freedom: Callable[[int], int]) -> int:
        for n in range(2, 200):
            critical = -float(special.stdtrit(freedom(n), ALPHA))
            if 1 - noncentral_t_below(critical, freedom(n), effect * math.sqrt(n / 2)) >= power:
                return n
        return 200

    return needed(lambda n: 2 * n - 2), needed(lambda n: n - 1)


# --- many series of ideas, in step ---

Results = tuple[Floats, Floats, Floats]  # of each series: true discoveries, false ones, runs of ideas


def all_series(
    draw: Draw,
    rng: np.random.Generator,
    count: int,
    *,
    level: Callable[[int, Sequence[int]], float],
    shared: bool = False,
) -> Results:
    """`level(number, discoveries)` of each try. `shared`: one set of baseline runs for a whole series."""
    is_helpful = helpful_ideas(rng, count)
    discoveries: list[list[int]] = [[] for _ in range(count)]
    first_baseline, _, first_sd = draw(rng, count, MOST_SEEDS)
    true, false, runs = np.zeros((3, count))
    for index in range(IDEAS):
        baseline, candidate, sd = draw(rng, count, MOST_SEEDS)
        if shared:
            candidate, baseline, sd = candidate / sd * first_sd, first_baseline, first_sd
        differences = (candidate - baseline) / sd - EFFECT * is_helpful[:, index : index + 1]
        levels = np.array([rounded_down(level(index + 1, found)) for found in discoveries])
        helps = np.zeros(count, dtype=np.bool_)
        for one in np.unique(levels):
            at = levels == one
            outcomes, rounds = stops(differences[at], Design(float(one), ALPHA, 1.0, MOST_SEEDS))
            helps[at] = outcomes == HELPS
            runs[at] += rounds
        for of_series in np.flatnonzero(helps):
            discoveries[of_series].append(index + 1)
        true += helps & is_helpful[:, index]
        false += helps & ~is_helpful[:, index]
    return true, false, runs


def helpful_ideas(rng: np.random.Generator, count: int) -> np.ndarray:
    """(series, ideas): which ideas help."""
    ranks = rng.random((count, IDEAS)).argsort(axis=1)
    return ranks < HELPFUL


def rounded_down(level: float) -> float:
    """To one of ten levels per decade, so that few boundaries have to be computed."""
    return float(10 ** (math.floor(10 * math.log10(level)) / 10))


def best_of_one(draw: Draw, rng: np.random.Generator, count: int) -> Results:
    """The same ideas with one run each: kept if it scored better than one run of the baseline."""
    is_helpful = helpful_ideas(rng, count)
    baseline, candidate, sd = draw(rng, count * IDEAS, 1)
    better = ((candidate - baseline) / sd).reshape(count, IDEAS) < EFFECT * is_helpful
    true, false = (better & is_helpful).sum(axis=1), (better & ~is_helpful).sum(axis=1)
    return true, false, np.full(count, float(IDEAS))


LEVELS: Mapping[str, Callable[[int, Sequence[int]], float]] = {
    "gates at the levels of LORD++": lambda number, found: level_of_try(number, found, ALPHA),
    "gates at 5 % each": lambda _number, _found: ALPHA,
    "gates at 5 % / 200 (Bonferroni)": lambda _number, _found: ALPHA / IDEAS,
}


def summary(results: Results) -> tuple[float, float, float, float]:
    """Means over series: (found, falsely accepted, share of false ones among the accepted, runs)."""
    true, false, runs = results
    shares = false / np.maximum(true + false, 1)
    return float(true.mean()), float(false.mean()), float(shares.mean()), float(runs.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gates", type=int, default=10_000, help="simulated gates per line")
    parser.add_argument("--series", type=int, default=500, help="simulated series per line")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    residuals, spreads = recorded_spread()
    draws: dict[str, Draw] = {
        "normal": normal(),
        "normal, same-seed correlation 0.5": normal(correlation=0.5),
        "normal, candidate 5 × the spread": normal(5.0),
        "normal, candidate a fifth of the spread": normal(0.2),
        "skewed (exponential)": skewed,
        "recorded": recorded(residuals, spreads),
        "recorded, same-seed correlation 0.8": recorded(residuals, np.ones(1), 0.8),
    }
    print(f"recorded runs: {residuals.size}, spreads {spreads.min():.4f} to {spreads.max():.4f} bits/byte\n")
    print_gates(draws, options.gates, rng)
    print_designs(options.gates, rng)
    print_series(
        {name: draws[name] for name in ("normal", "skewed (exponential)", "recorded")}, options.series, rng
    )


def print_gates(draws: Mapping[str, Draw], count: int, rng: np.random.Generator) -> None:
    print(f"One gate at alpha = 5 %, at most {MOST_SEEDS} seeds, least effect 1 sd; {count:,} gates per line")
    print("| runs | effect | helps | hurts | no effect worth having | undecided | mean rounds |")
    print("|---|---|---|---|---|---|---|")
    for name, draw in draws.items():
        for effect in (0.0, 1.0, 2.0, 3.0, -2.0):
            shares, rounds = gates(draw, effect, Design(ALPHA, ALPHA, 1.0, MOST_SEEDS), count, rng)
            cells = " | ".join(f"{100 * shares[outcome]:.1f} %" for outcome in OUTCOMES)
            print(f"| {name} | {effect:g} sd | {cells} | {rounds:.1f} |")
    print()


def print_designs(count: int, rng: np.random.Generator) -> None:
    print(f"Ways to look after every round; normal runs, {count:,} gates per cell")
    print("| design | helps at no effect | helps at 2 sd | mean rounds at 2 sd |")
    print("|---|---|---|---|")
    design = Design(ALPHA, ALPHA, 0.0, MOST_SEEDS)
    lines = {"alpha spending (the gate)": [gates(normal(), effect, design, count, rng) for effect in (0, 2)]}
    (null, _), (found, rounds) = lines["alpha spending (the gate)"]
    power = found[Outcome.HELPS]
    print(f"| the gate (alpha spending) | {null[Outcome.HELPS]:.1%} | {power:.1%} | {rounds:.1f} |")
    without, with_effect = other_designs(0, count, rng), other_designs(2, count, rng)
    for name, (share, rounds) in with_effect.items():
        print(f"| {name} | {without[name][0]:.1%} | {share:.1%} | {rounds:.1f} |")
    for wanted in (0.9, power):
        welch, paired = fixed_seeds(wanted, 2.0)
        print(f"| fixed number of seeds, {wanted:.1%} power: Welch | 5.0% | {wanted:.1%} | {welch} |")
        print(f"| fixed number of seeds, {wanted:.1%} power: paired | 5.0% | {wanted:.1%} | {paired} |")
    print()


def print_series(draws: Mapping[str, Draw], count: int, rng: np.random.Generator) -> None:
    print(
        f"{IDEAS} ideas, {HELPFUL} of which gain {EFFECT:g} sd; at most {MOST_SEEDS} seeds each;"
        f" means over {count:,} series"
    )
    print("| runs | procedure | found | falsely accepted | false share | runs of ideas |")
    print("|---|---|---|---|---|---|")

    def line(name: str, procedure: str, results: Results) -> None:
        found, false, share, runs = summary(results)
        print(f"| {name} | {procedure} | {found:.1f} of {HELPFUL} | {false:.1f} | {share:.1%} | {runs:.0f} |")

    for name, draw in draws.items():
        for procedure, level in LEVELS.items():
            line(name, procedure, all_series(draw, rng, count, level=level))
        level = LEVELS["gates at the levels of LORD++"]
        line(name, "LORD++, baseline runs shared", all_series(draw, rng, count, level=level, shared=True))
        line(name, "keep what scored better in one run", best_of_one(draw, rng, count))


if __name__ == "__main__":
    main()
