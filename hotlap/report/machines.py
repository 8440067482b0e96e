"""Times of different machines are not compared: which machine a run met, and tests within machines.

A machine is a block of the experiment. Its own speed multiplies every time on it, so the comparison is of
logarithms, with one constant per machine: a recipe that happened to meet the faster machine gains nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from hotlap.report.stats import (
    CONFIDENCE,
    MOST_PERMUTATIONS,
    NAN,
    Difference,
    Values,
    Waits,
    cumulative_hazard,
    has_spread,
)
from hotlap.runs.reader import Floats, Run
from hotlap.terminal import printable

WITHIN_MACHINES = "t within machines"


def machine_of(run: Run) -> str:
    """The machine that a run was trained on; several if it went on elsewhere, which is a block of its own."""
    return " then ".join(dict.fromkeys(_described(facts) for facts in run.environments))


def hardware_of(run: Run) -> str:
    """The processor and its cores, or the number of GPUs and their name; empty if it was not recorded."""
    facts = run.environment
    if not facts.get("device_name"):
        return ""
    count = f"{facts['world_size']} × " if facts.get("device") == "cuda" and facts.get("world_size") else ""
    return count + _device(facts)


def _device(facts: Mapping[str, object]) -> str:
    cores = f", {facts['cores']} cores" if facts.get("cores") and facts.get("device") == "cpu" else ""
    return f"{facts.get('device_name') or 'unknown hardware'}{cores}"


def _described(facts: Mapping[str, object]) -> str:
    hardware = _device(facts)
    name = facts.get("machine")
    return printable(f"{name} ({hardware})" if name else hardware)


def count_machines(runs_by_label: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, int]]:
    """{machine: {label: runs}}, with every label in each."""
    counts = {label: Counter(machine_of(run) for run in runs) for label, runs in runs_by_label.items()}
    machines = dict.fromkeys(machine for counter in counts.values() for machine in counter)
    return {machine: {label: counter[machine] for label, counter in counts.items()} for machine in machines}


def machine_notes(runs_by_label: Mapping[str, Sequence[Run]]) -> list[str]:
    """A note if there were several machines, and whether each recipe met the same ones."""
    counts = count_machines(runs_by_label)
    if len(counts) < 2:
        return []
    listed = "; ".join(
        f"{machine}: {', '.join(f'{label} {count}' for label, count in by_label.items())}"
        for machine, by_label in counts.items()
    )
    is_balanced = all(len(set(by_label.values())) == 1 for by_label in counts.values())
    met = "each recipe met the same machines" if is_balanced else "the recipes did not meet the same machines"
    return [
        f"{met} ({listed}); times and tokens/s are compared within a machine, and their means over machines"
        " say little"
    ]


def difference_within(
    baseline: Values, candidate: Values, machines: tuple[Sequence[str], Sequence[str]]
) -> tuple[Difference, Floats, Floats]:
    """The difference of two recipes with one constant per machine, by least squares on logarithms.

    Returns it as a difference from the baseline's geometric mean, and both samples as logarithms without
    their machine's constant. Undefined if no machine has trained both.
    """
    a, b = (np.log(np.asarray(values, dtype=np.float64)) for values in (baseline, candidate))
    weighted = weights = 0.0
    blocks = [_of_machine(name, machines) for name in dict.fromkeys([*machines[0], *machines[1]])]
    for in_a, in_b in blocks:
        if in_a.any() and in_b.any():
            weight = in_a.sum() * in_b.sum() / (in_a.sum() + in_b.sum())
            weighted += weight * float(b[in_b].mean() - a[in_a].mean())
            weights += weight
    undefined = Difference(WITHIN_MACHINES, NAN, NAN, NAN, NAN)
    if not weights:
        return undefined, a, b
    ratio = weighted / weights
    plain_a, plain_b = a.copy(), b.copy()
    for in_a, in_b in blocks:
        constant = np.concatenate([a[in_a], b[in_b] - ratio]).mean()
        plain_a[in_a] -= constant
        plain_b[in_b] -= constant
    residuals = np.concatenate([plain_a, plain_b - ratio])
    freedom = residuals.size - len(blocks) - 1
    scale = math.exp(float(a.mean()))
    mean = scale * math.expm1(ratio)
    if freedom < 1 or not has_spread(residuals):
        return Difference(WITHIN_MACHINES, mean, NAN, NAN, NAN), plain_a, plain_b
    error = math.sqrt(float(residuals @ residuals) / freedom / weights)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(ratio) / error, freedom))
    low, high = scale * math.expm1(ratio - half), scale * math.expm1(ratio + half)
    return Difference(WITHIN_MACHINES, mean, low, high, p), plain_a, plain_b


def log_rank_within(
    baseline: Waits, candidate: Waits, machines: tuple[Sequence[str], Sequence[str]]
) -> tuple[float, float]:
    """(p, hazard ratio) of the log-rank test stratified by machine, by permutation within machines."""
    observed = expected = others_observed = others_expected = 0.0
    strata: list[tuple[Floats, int]] = []  # residuals, the candidate's first, and how many are its own
    for name in dict.fromkeys([*machines[0], *machines[1]]):
        in_a, in_b = _of_machine(name, machines)
        if not (in_a.any() and in_b.any()):
            continue
        reached = np.concatenate([candidate.reached[in_b], baseline.reached[in_a]])
        until = np.concatenate([candidate.until[in_b], baseline.until[in_a]])
        hazard, count = cumulative_hazard(until, reached), int(in_b.sum())
        observed += float(reached[:count].sum())
        expected += float(hazard[:count].sum())
        others_observed += float(reached[count:].sum())
        others_expected += float(hazard[count:].sum())
        strata.append((reached - hazard, count))
    if not (expected and others_expected):
        return NAN, NAN
    found = abs(sum(float(residuals[:count].sum()) for residuals, count in strata))
    p = float(np.mean(np.abs(_relabeled(strata)) >= found - 1e-9))
    if not others_observed:
        return p, math.inf
    return p, (observed / expected) / (others_observed / others_expected)


def _of_machine(
    name: str, machines: tuple[Sequence[str], Sequence[str]]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    a, b = (np.array([machine == name for machine in names], dtype=np.bool_) for names in machines)
    return a, b


def _relabeled(strata: Sequence[tuple[Floats, int]]) -> Floats:
    """The statistic under relabelings within strata: all of them, or if they are too many a fixed sample."""
    possible = math.prod(math.comb(residuals.size, count) for residuals, count in strata)
    if possible <= MOST_PERMUTATIONS:
        sums = [
            [
                float(residuals[list(own)].sum())
                for own in itertools.combinations(range(residuals.size), count)
            ]
            for residuals, count in strata
        ]
        return np.array([sum(chosen) for chosen in itertools.product(*sums)])
    generator = np.random.default_rng(0)
    total = np.zeros(MOST_PERMUTATIONS)
    for residuals, count in strata:
        shuffled = generator.permuted(np.tile(residuals, (MOST_PERMUTATIONS, 1)), axis=1)
        total += shuffled[:, :count].sum(axis=1)
    total[0] = sum(float(residuals[:count].sum()) for residuals, count in strata)  # as it was found
    return total
