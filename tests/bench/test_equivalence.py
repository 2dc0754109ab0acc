"""The statistics of `bench parity`, against values from printed tables and worked examples."""

from __future__ import annotations

import math

import pytest

from ftar_core.bench.equivalence import compare, incomplete_beta, t_below, t_quantile


@pytest.mark.parametrize(
    ("freedom", "share", "t"),  # NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2
    [(1, 0.95, 6.314), (2, 0.975, 4.303), (4, 0.95, 2.132), (5, 0.99, 3.365), (10, 0.9, 1.372), (30, 0.95, 1.697)],
)
def test_quantiles_are_those_of_the_table(freedom: int, share: float, t: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(t, abs=6e-4)
    assert t_quantile(1 - share, freedom) == pytest.approx(-t, abs=6e-4)


def test_the_distribution_has_its_closed_forms() -> None:
    for t in (-3.0, -0.2, 0.0, 1.0, 25.0):
        assert t_below(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)  # Cauchy
        assert t_below(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)
        assert t_below(t, 1e7) == pytest.approx(0.5 * (1 + math.erf(t / math.sqrt(2))), abs=1e-6)  # the normal one


def test_the_incomplete_beta_function_counts_tails() -> None:
    for n, p in ((5, 0.3), (40, 0.9)):  # P(at least k of n) = I_p(k, n - k + 1)
        for k in range(1, n + 1):
            tail = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
            assert incomplete_beta(k, n - k + 1, p) == pytest.approx(tail, abs=1e-12)
    assert (incomplete_beta(2, 3, 0), incomplete_beta(2, 3, 1)) == (0, 1)


def test_no_share_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="share"):
        t_quantile(1.0, 3)


def test_a_worked_example() -> None:
    found = compare([1.0, 2.0, 3.0, 2.0, 2.0], 3.0)
    error = math.sqrt(0.5 / 5)
    assert found.difference == pytest.approx(2.0)
    assert found.low == pytest.approx(2 - 2.13185 * error, abs=1e-4)
    assert found.high == pytest.approx(2 + 2.13185 * error, abs=1e-4)
    assert found.p == pytest.approx(1 - t_below(1 / error, 4))
    assert found.verdict == "equivalent"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.2, 0.15, 0.0], "equivalent"),
        ([3.0, 3.1, 2.9, 3.0], "worse"),
        ([-3.0, -3.1, -2.9, -3.0], "better"),
        ([0.5, -2.5, 2.8, 0.1], "undecided"),  # no significant difference: that is not the same
        ([0.9, 1.1, 1.0, 1.05], "undecided"),  # on the margin
        ([0.0, 0.0, 0.0], "equivalent"),
        ([1.0, 1.0, 1.0], "undecided"),  # the margin itself is not within
        ([0.4, -0.4], "undecided"),  # two pairs prove next to nothing
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    found = compare(differences, 1.0)
    assert found.verdict == verdict
    assert found.p is not None
    assert (found.p < 0.05) == (verdict == "equivalent")


def test_one_pair_is_no_sample() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        compare([0.1], 1.0)
