"""Small statistics: is the difference between paired measurements smaller than a margin?

"No significant difference" is no evidence of sameness: the fewer runs, and the noisier, the surer one is to find none.
The burden of proof has to lie on the claim. So the two one-sided tests of D. J. Schuirmann ("A comparison of the two
one-sided tests procedure and the power approach for assessing the equivalence of average bioavailability", Journal of
Pharmacokinetics and Biopharmaceutics 15, 1987): the mean difference is shown to be above -margin and below +margin,
each at level alpha; the same as that its confidence interval of 1 - 2 alpha lies within the margin. Too few runs end as
"undecided" here, never as "equivalent".

Differences are of pairs (one seed, with and without the treatment): what the seeds differ by is not in them, which
Welch's test on the two groups would have to see through.

Student's t comes from the incomplete beta function by its continued fraction (Abramowitz and Stegun 26.5.8, 26.7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

ALPHA = 0.05
EQUIVALENT, WORSE, BETTER, UNDECIDED = "equivalent", "worse", "better", "undecided"


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), regularized; a, b > 0 and x from 0 to 1."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # there the fraction converges slowly
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b), by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1.0)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + term / c
            c = c if abs(c) > tiny else tiny
            change = c * d
            value *= change
        if abs(change - 1.0) < 1e-15:
            break
    return value


def t_below(t: float, freedom: float) -> float:
    """P(T <= t) of Student's distribution."""
    tail = incomplete_beta(freedom / 2.0, 0.5, freedom / (freedom + t * t)) / 2.0
    return 1.0 - tail if t > 0 else tail


def t_quantile(share: float, freedom: float) -> float:
    """The t with P(T <= t) = share; share between 0 and 1."""
    if not 0.0 < share < 1.0:
        raise ValueError(f"share {share}: between 0 and 1 is expected")
    low, high = -1.0, 1.0
    while t_below(low, freedom) > share:
        low *= 2.0
    while t_below(high, freedom) < share:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if t_below(middle, freedom) < share else (low, middle)
    return (low + high) / 2.0


@dataclass(frozen=True)
class Finding:
    """`low` and `high`: the confidence interval of 1 - 2 alpha of the mean difference. `p`: of equivalence (the larger
    one of both tests); None where there is nothing to test."""

    difference: float
    low: float
    high: float
    margin: float
    p: float | None
    verdict: str


def compare(differences: Sequence[float], margin: float, alpha: float = ALPHA) -> Finding:
    """Treated minus untreated, one value a pair (at least 2, else ValueError). Worse or better: by more than the
    margin, with the whole interval; a higher value is worse."""
    n = len(differences)
    if n < 2:
        raise ValueError(f"{n} pairs: at least 2 are needed")
    mean, error = fmean(differences), stdev(differences) / math.sqrt(n)
    half = t_quantile(1.0 - alpha, n - 1) * error
    low, high = mean - half, mean + half
    if error > 0.0:
        p = max(1.0 - t_below((mean + margin) / error, n - 1), t_below((mean - margin) / error, n - 1))
    else:  # all pairs differ by the same, as bit-identical runs do: by nothing
        p = 0.0 if abs(mean) < margin else 1.0
    verdict = UNDECIDED
    if -margin < low and high < margin:
        verdict = EQUIVALENT
    elif low > margin or high < -margin:
        verdict = WORSE if low > margin else BETTER
    return Finding(mean, low, high, margin, p, verdict)
