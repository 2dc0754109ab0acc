"""The way back of a replica that the policy took out: when what was wrong with its object is well again, and stays
so."""

from __future__ import annotations

from collections.abc import Callable

from agents.api.health import Verdict
from agents.api.policyfile import Policy
from agents.api.words import Health
from agents.health.desk import HealthDesk
from agents.host.clock import Clock
from agents.policy.book import Held, PolicyBook
from agents.policy.engine import Finding, decide
from agents.policy.hands import PolicyHands
from agents.policy.teller import Teller, because
from agents.policy.waiting import Waiting
from agents.problems import ApiProblem


class WayBack:
    """One thread's."""

    def __init__(  # noqa: PLR0917
        self,
        policy: Policy,
        mode: Callable[[], str],
        book: PolicyBook,
        hands: PolicyHands,
        desk: HealthDesk,
        clock: Clock,
        teller: Teller,
    ) -> None:
        self._policy, self._mode = policy, mode
        self._book, self._hands, self._desk, self._clock, self._teller = book, hands, desk, clock, teller
        self._rejoins: dict[str, Waiting | None] = {}
        self._well: dict[tuple[str, str], float] = {}

    def is_well(self, kind: str, name: str) -> None:
        """From now on."""
        self._well[kind, name] = self._clock.boot_s()

    def is_bad(self, kind: str, name: str) -> None:
        self._well.pop((kind, name), None)

    def look_anew(self) -> None:
        """The mode is another one: what was refused before is decided again."""
        self._rejoins.clear()

    def tick(self, now: float) -> None:
        for held in list(self._book.held.values()):
            self._look(held, now)

    def _look(self, held: Held, now: float) -> None:
        waiting = self._rejoins.get(held.replica)
        since = self._well_since(held, now)
        if since is None or now - since < self._policy.limits.rejoin_after_s:
            return
        if waiting is not None and waiting.next_s > now:
            return
        verdict = self._verdict_of(held)
        finding = Finding(f"{self._teller.node}/{held.object}", held.kind, "healthy", "", "none", held.incident)
        fleet = self._hands.fleet("rejoin", (held.replica,))
        if not fleet.problem and fleet.whom and held.replica not in fleet.away:
            self._book.release(held.replica)
            self._book.save(self._teller.complain)
            self._teller.tell("policy.released", verdict, f"{held.replica} is back already, by somebody else", "rejoin")
            return
        past = self._book.past()
        decision = decide(self._policy, self._mode(), finding, past, fleet, now=now)
        text = decision.reason
        if decision.action == "rejoin" and (trouble := self._trouble(held.replica)):
            text = f"{decision.reason}; not done: {trouble}"
        done = decision.action == "rejoin" and decision.perform and text == decision.reason
        if waiting is None or waiting.text != text:
            self._teller.tell("policy.decided", verdict, text, decision.action)
        if not (done and self._rejoin(held, verdict, text)):
            waiting = waiting or Waiting(verdict, "", now)
            waiting.later(now, text)
            self._rejoins[held.replica] = waiting

    def _rejoin(self, held: Held, verdict: Verdict, reason: str) -> bool:
        reason = f"{reason} [{held.incident}]"
        last = held.cordoned and not any(
            one.cordoned for one in self._book.held.values() if one.replica != held.replica
        )
        try:
            if last:
                self._hands.uncordon(reason, because(verdict, "uncordon"))
                self._teller.tell("policy.acted", verdict, f"{self._teller.node} may be used again", "uncordon")
            share = self._policy.limits.max_share
            text = self._hands.act("rejoin", held.replica, reason, because(verdict, "rejoin"), share)
        except ApiProblem as error:
            why = f"rejoin of {held.replica}: {error.body.thing}: {error.body.reason}"
            if self._rejoins.get(held.replica) is None:
                self._teller.tell("policy.failed", verdict, why, "rejoin")
            return False
        self._teller.tell("policy.acted", verdict, f"rejoin of {held.replica}: {text}", "rejoin")
        self._book.release(held.replica)
        self._book.acted(self._clock.boot_s(), f"{self._teller.node}/{held.object}", "rejoin")
        self._book.save(self._teller.complain)
        self._rejoins.pop(held.replica, None)
        return True

    def _well_since(self, held: Held, now: float) -> float | None:
        """None: it is not well, or nobody has looked yet."""
        key = (held.kind, held.object)
        worst = self._desk.worst(*key)
        if worst is not None and worst.health is not Health.HEALTHY:
            self._well.pop(key, None)
            return None
        if worst is not None:
            self._well.setdefault(key, now)
        return self._well.get(key)

    def _trouble(self, replica: str) -> str:
        """What else speaks against it on this node."""
        for verdict in self._desk.verdicts():
            bad = verdict.health is Health.UNHEALTHY and verdict.action.value in ("evict", "evict_node", "drain")
            if bad and replica in self._hands.whom(verdict.kind, verdict.object, whole_node=False):
                return f"{verdict.object} is {verdict.health.value}: {verdict.reason}"
        return ""

    def _verdict_of(self, held: Held) -> Verdict:
        return Verdict(
            node=self._teller.node,
            kind=held.kind,
            object=held.object,
            health=Health.HEALTHY,
            reason="well again",
            incident=held.incident,
            injected=held.injected,
        )
