"""From a finding, what happened before, and the time: a decision with its reason. No clock, no effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from agents.api.policyfile import MODES, OUT, Policy, Rule

__all__ = ["MODES", "Decision", "Finding", "Fleet", "Past", "decide", "rule_for"]

# An act is not held up by the cool-down after a weaker one: a GPU may fall off the bus just after a restart.
STRENGTH = {"watch": 0, "rejoin": 0, "restart": 1, "drain": 2, "promote": 2, "evict": 3}


@dataclass(frozen=True)
class Finding:
    """What a verdict says: `object` unique in the fleet ("node1/gpu 3"), `suggests` the action it asks for."""

    object: str
    kind: str
    health: str
    code: str = ""
    suggests: str = ""
    incident: str = ""


@dataclass(frozen=True)
class Past:
    """`seen`: findings before this one; `acts`: (when, object, action) that were done."""

    seen: Sequence[tuple[float, Finding]] = ()
    acts: Sequence[tuple[float, str, str]] = ()


@dataclass(frozen=True)
class Fleet:
    """Replicas, and how many of them are out. `present`: whether the thing to act on is there; `whom`: the replicas
    it is about, of which `away` are out already. `problem`: why this is not known. `spares`: hot ones, which take
    places."""

    size: int
    out: int = 0
    present: bool = True
    whom: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    problem: str = ""
    spares: int = 0


@dataclass(frozen=True)
class Decision:
    action: str
    rule: str
    reason: str
    incident: str
    perform: bool
    held: str = ""  # why it is not done, though the mode would let it


def rule_for(policy: Policy, finding: Finding, past: Past, *, now: float) -> Rule | None:
    """The first rule that fits."""
    return next((rule for rule in policy.rules if _fits(rule, finding, past, now)), None)


def decide(policy: Policy, mode: str, finding: Finding, past: Past, fleet: Fleet, *, now: float) -> Decision:
    rule = rule_for(policy, finding, past, now=now)
    if rule is None:
        return Decision("watch", "", f"no rule fits {finding.object}", finding.incident, False)
    times = _fits(rule, finding, past, now)
    why = f"rule {rule.name}: {finding.object} is {finding.health}" + (f" ({finding.code})" if finding.code else "")
    if rule.at_least > 1:
        why += f", {times} times in {rule.within_s:g} s"
    held = "" if rule.action == "watch" else _held(policy, rule.action, finding, past, fleet, now=now)
    if held:
        return Decision(rule.action, rule.name, f"{why}; not done: {held}", finding.incident, False, held)
    if rule.action != "watch" and mode != "act":
        why += f"; not done: mode is {mode}"
    return Decision(rule.action, rule.name, why, finding.incident, mode == "act" and rule.action != "watch")


def _fits(rule: Rule, finding: Finding, past: Past, now: float) -> int:
    """How often it was seen within the rule's time, this one included; 0: does not fit."""
    if not _alike(rule, finding):
        return 0
    if rule.at_least == 1:
        return 1
    since = now - rule.within_s
    times = 1 + sum(at >= since and f.object == finding.object and _alike(rule, f) for at, f in past.seen)
    return times if times >= rule.at_least else 0


def _alike(rule: Rule, finding: Finding) -> bool:
    return (
        rule.kind in ("", finding.kind)
        and (not rule.codes or any(fnmatchcase(finding.code, pattern) for pattern in rule.codes))
        and (not rule.health or finding.health in rule.health)
        and (not rule.suggests or finding.suggests in rule.suggests)
    )


def _held(policy: Policy, action: str, finding: Finding, past: Past, fleet: Fleet, *, now: float) -> str:
    limits = policy.limits
    if fleet.problem:
        return fleet.problem
    if not fleet.present:
        return f"{finding.object} is gone"
    if action != "rejoin" and fleet.whom and set(fleet.whom) <= set(fleet.away):
        return f"{', '.join(fleet.whom)} is out already"
    mine = [
        (at, done)
        for at, name, done in past.acts
        if name == finding.object and done != "rejoin" and at > now - limits.window_s
    ]
    if len(mine) >= limits.max_acts:
        return f"the breaker is open: {len(mine)} acts on it in {limits.window_s:g} s"
    if action == "rejoin":
        return ""
    cooling = [at for at, done in mine if STRENGTH[action] <= STRENGTH.get(done, 0)]
    if cooling and now - max(cooling) < limits.cooldown_s:
        return f"it cools down for {limits.cooldown_s:g} s after an act"
    more = len(set(fleet.whom) - set(fleet.away)) if fleet.whom else 1
    if action in OUT and fleet.out + max(0, more - fleet.spares) > limits.max_share * fleet.size:
        return f"{fleet.out} of {fleet.size} are out already, at most {limits.max_share:.0%} may be"
    return ""
