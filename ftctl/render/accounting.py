"""Where a job's time went, for people: one line for `ftctl status`, and a table of everything.

Shares are rounded so that what is shown adds up to 100.0 % (largest remainders first), as the microseconds do.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import ConsoleRenderable
from rich.text import Text

from agents.api.models import JobAccount, TimeSpent
from ftctl.durations import show
from ftctl.render.tables import FAINT, GOOD, PASSING, Cell, table

LINE = 80  # columns
BAR = 24
CAUSES = {
    "killed": "replica killed",
    "silent": "replica silent",
    "hung": "replica hung",
    "unreachable": "replica unreachable",
    "diverged": "results differed",
    "evicted": "replica evicted",
    "left": "replica left",
    "vanished": "all replicas gone",
    "min-replicas": "below min-replicas",
    "record": "record not written",
    "coordinator": "coordinator down",
    "restart": "steps since a checkpoint",
    "drained": "drain",
    "rejoin": "rejoin",
    "link": "rail down",
    "compile": "first steps",
    "non-finite": "skipped steps",
    "absent": "replica never came",
}
CATEGORIES = {"starting": "start-up", "slow": "slow steps"}


def line(account: JobAccount) -> Text:
    """`effective 97.2 % of 2h13m  lost: 1.1 % killed (3), 0.9 % degraded, 0.8 % other`: the largest losses that fit."""
    if not account.total_us:
        return Text("effective: nothing is counted before the first commit", style=FAINT)
    productive = sum(entry.us for entry in account.spent if entry.category == "productive")
    losses = [loss for loss in _losses(account.spent) if loss[0]]
    shares = permille([productive, *(us for us, _what in losses)])
    text = f"effective {_percent(shares[0])} of {show(account.total_us / 1e6)}"
    named = [f"{_percent(share)} {what}" for share, (_us, what) in zip(shares[1:], losses, strict=True) if share]
    for count in range(len(named), -1, -1):
        rest = sum(shares[1 + count :])
        said = named[:count] + ([f"{_percent(rest)} other"] if rest else [])
        whole = f"{text}  lost: {', '.join(said)}" if said else text
        if len(whole) <= LINE:
            break
    style = GOOD if shares[0] >= 900 else ""
    return Text(whole, style=style) if not account.late else Text(f"{whole}\n{_late(account.late)}")


def _late(late: TimeSpent) -> str:
    return f"the running step is longer than a calm one by {show(late.us / 1e6)}: {_what(late)}"


def _losses(spent: Sequence[TimeSpent]) -> list[tuple[int, str]]:
    """The largest first; the degraded and the recomputed each as one, whatever their causes."""
    sums: dict[str, int] = {}
    for entry in spent:
        if entry.category == "productive":
            continue
        what = _what(entry).removeprefix("replica ")
        if entry.category in ("degraded", "recomputed"):
            what = entry.category
        elif entry.category == "stalled" and entry.count:
            what += f" ({entry.count})"
        sums[what] = sums.get(what, 0) + entry.us
    return sorted(((us, what) for what, us in sums.items()), reverse=True)


def _what(entry: TimeSpent) -> str:
    if entry.cause is not None:
        return CAUSES.get(entry.cause, entry.cause)
    return CATEGORIES.get(entry.category, entry.category)


def parts(account: JobAccount | None) -> list[ConsoleRenderable]:
    """The line and the table; every entry, also those that took no time."""
    if account is None:
        return [Text("where the job's time went is not known: no coordinator says so")]
    found: list[ConsoleRenderable] = [line(account)]
    if account.total_us:
        shares = permille([entry.us for entry in account.spent])
        rows = [_row(entry, share) for entry, share in zip(account.spent, shares, strict=True)]
        rows.append(("all", show(account.total_us / 1e6), _percent(sum(shares)), "-", ""))
        found.append(table("", ("what", "time", "share", "count", ""), rows))
    return found


def _row(entry: TimeSpent, share: int) -> tuple[Cell, ...]:
    what = _what(entry)
    if entry.cause is not None:
        what = f"{entry.category}: {what}"
    style = GOOD if entry.category == "productive" else PASSING
    bar = Text("=" * round(share * BAR / 1000), style=style)
    return (what, show(entry.us / 1e6), _percent(share), str(entry.count), bar)


def permille(parts: Sequence[int]) -> list[int]:
    """Thousandths of the sum, which add up to 1000: the largest remainders are rounded up."""
    total = sum(parts)
    if not total:
        return [0] * len(parts)
    whole = [part * 1000 // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda at: (-(parts[at] * 1000 % total), at))
    for at in by_remainder[: 1000 - sum(whole)]:
        whole[at] += 1
    return whole


def _percent(permille: int) -> str:
    return f"{permille / 10:.1f} %"
