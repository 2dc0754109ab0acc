"""Hears every verdict of this node, decides about it, and does what was decided, in the order in which it happened.

One thread. What could not be done (a cool-down, too many out already, a coordinator that does not answer) is looked at
again while the verdict stands, later each time; it is told again only when the answer is another one.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import OrderedDict
from dataclasses import replace

from agents.api.health import Verdict
from agents.api.models import ProblemView
from agents.api.policy import HeldView, PolicyAnswer
from agents.api.policyfile import OUT, Policy, Rule
from agents.api.words import Health
from agents.health.causes import News
from agents.health.desk import HealthDesk, short
from agents.host.clock import Clock
from agents.policy.book import Held, PolicyBook
from agents.policy.comeback import WayBack
from agents.policy.engine import Decision, Finding, Fleet, decide, rule_for
from agents.policy.hands import PolicyHands
from agents.policy.hooks import Hooks
from agents.policy.teller import Emit, Teller, because
from agents.policy.waiting import RETRY_S, Waiting
from agents.problems import ApiProblem

_LOG = logging.getLogger(__name__)
TICK_S = 0.25
MAX_WAITING, MAX_QUEUE, MAX_DECIDED = 256, 1000, 4096
_Of = tuple[str, str, str, str]  # source, kind, object, code
_What = tuple[str, str, str, int, int]  # incident, health, action, times, count


class PolicyRunner:
    """`hear` may be called by any thread, and never waits."""

    def __init__(  # noqa: PLR0917
        self,
        node: str,
        policy: Policy,
        source: str,
        mode: str,
        book: PolicyBook,
        hands: PolicyHands,
        desk: HealthDesk,
        emit: Emit,
        clock: Clock,
    ) -> None:
        self._node, self._policy, self._source, self._default_mode = node, policy, source, mode
        self._book, self._hands, self._desk, self._clock = book, hands, desk, clock
        self._teller = Teller(node, emit, clock)
        self._back = WayBack(policy, lambda: self.mode, book, hands, desk, clock, self._teller)
        self._hooks = Hooks()
        self._heard: queue.Queue[tuple[News, bool]] = queue.Queue(MAX_QUEUE)
        self._lost = 0
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], Waiting] = {}
        self._decided: OrderedDict[_Of, _What] = OrderedDict()
        self._wanted: dict[str, ProblemView] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)

    @property
    def mode(self) -> str:
        return self._book.mode or self._default_mode

    def start(self) -> None:
        if self._book.trouble:
            self._teller.note("policy.damaged", f"{self._book.trouble}; the mode is {self.mode}")
        self._desk.listen(self.hear)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._hooks.close()

    def hear(self, news: News, *, again: bool = False) -> None:
        """`again`: it was heard before, and is to be judged anew."""
        try:
            self._heard.put_nowait((news, again))
        except queue.Full:
            self._lost += 1

    def set_mode(self, mode: str, by: str, reason: str) -> bool:
        """Whether it was another one. What stands is decided anew in the new mode. Raises ApiProblem."""
        with self._lock:
            before = self.mode
            try:
                self._book.set_mode(mode, by, self._clock.wall_s())
            except OSError as error:
                why = f"its mode is still {before}: {error.strerror}"
                raise ApiProblem("failed", f"policy of {self._node}", why, "make room on its disk") from None
            if mode == before:
                return False
            forgotten = self._book.forget_acts()
            self._wanted.clear()
            self._back.look_anew()
        counts = f"; {forgotten} acts no longer count for its breakers" if forgotten else ""
        self._teller.note("policy.mode", f"{mode} instead of {before}, by {by}: {reason}{counts}")
        for verdict in self._desk.verdicts():
            if verdict.code and verdict.health is not Health.HEALTHY:
                self.hear(News(verdict), again=True)
        return True

    def answer(self) -> PolicyAnswer:
        book = self._book
        rules = [rule_view(rule) for rule in self._policy.rules]
        held = [HeldView(**{name: getattr(one, name) for name in HeldView.model_fields}) for one in book.held.values()]
        limits = {name: float(getattr(self._policy.limits, name)) for name in self._policy.limits.__dataclass_fields__}
        return PolicyAnswer(
            node=self._node,
            mode=self.mode,
            mode_by=book.set_by if book.mode else "configuration",
            mode_since=book.set_since,
            source=self._source,
            limits=limits,
            rules=rules,
            held=held,
            decisions=self._teller.last(),
            trouble=book.trouble,
        )

    def recommendations(self) -> list[ProblemView]:
        return list(self._wanted.values())

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.is_set():
            heard = None
            with contextlib.suppress(queue.Empty):
                heard = self._heard.get(timeout=TICK_S)
            try:
                if heard is not None:
                    self.handle(*heard)
                if self._heard.empty():
                    self.tick()
            except Exception:  # noqa: BLE001 - a bug about one verdict must not end the policy for all
                _LOG.exception("the policy goes on after an error of its own")

    def handle(self, news: News, again: bool = False) -> None:
        """One piece of news, now."""
        verdict = news.verdict
        key = (verdict.kind, verdict.object)
        with self._lock:
            if news.over:
                if verdict.health is Health.HEALTHY:
                    self._back.is_well(*key)
                    self._wanted.pop(verdict.object, None)
                return
            if verdict.health is not Health.HEALTHY:
                self._back.is_bad(*key)
            if not again and self._decided.get(_of(verdict)) == _what(verdict):
                return  # the same news
            self._judge(verdict, again=again)

    def tick(self) -> None:
        """Time has passed."""
        with self._lock:
            now = self._clock.boot_s()
            if lost := self._lost:
                self._lost = 0
                self._teller.note("policy.overrun", f"{lost} verdicts came faster than they could be decided")
                self._catch_up()
            for key, waiting in list(self._waiting.items()):
                if not self._stands(waiting.verdict):
                    del self._waiting[key]
                elif waiting.next_s <= now:
                    self._judge(waiting.verdict, waiting)
            self._back.tick(now)

    def _catch_up(self) -> None:
        """Some verdicts were not heard: what stands now and was not decided is decided now."""
        verdicts = self._desk.verdicts()
        for verdict in verdicts:
            if verdict.code and verdict.health is not Health.HEALTHY and not self._was_decided(verdict):
                self._judge(verdict)
        bad = {verdict.object for verdict in verdicts if verdict.health is not Health.HEALTHY}
        self._wanted = {name: wanted for name, wanted in self._wanted.items() if name in bad}

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def _judge(self, verdict: Verdict, before: Waiting | None = None, *, again: bool = False) -> None:
        """`before`: it waits since an earlier look. What is judged again is not its own second fault."""
        now = self._clock.boot_s()
        again = again or before is not None
        finding = Finding(f"{self._node}/{verdict.object}", verdict.kind, verdict.health.value, verdict.code,
                          verdict.action.value, verdict.incident)  # fmt: skip
        past = self._book.past(finding if again else None)
        rule = rule_for(self._policy, finding, past, now=now)
        whom, fleet = self._about(rule, verdict)
        decision = decide(self._policy, self.mode, finding, past, fleet, now=now)
        key = (verdict.object, verdict.code)
        heard = again and before is None and key not in self._waiting
        over = heard and decision.action == "restart" and self._was_decided(verdict)
        if over:
            reason = f"{decision.reason}; not done: it was decided about when it happened"
            decision = replace(decision, perform=False, reason=reason)
        if not again:
            self._book.saw(now, finding)
        self._decided[_of(verdict)] = _what(verdict)
        self._decided.move_to_end(_of(verdict))
        if len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)
        if before is None or decision.reason != before.text:
            self._teller.tell("policy.decided", verdict, decision.reason, decision.action)
        failed = self._carry_out(decision, rule, whom, fleet, verdict) if decision.perform else ""
        if rule is not None and rule.hook and self.mode == "act" and before is None and not decision.held and not over:
            self._hook(rule, verdict, decision)
        self._recommend(decision, verdict, whom)
        if not decision.held and not failed:
            self._waiting.pop(key, None)
            return
        if before is None and (key in self._waiting or len(self._waiting) < MAX_WAITING):
            self._waiting[key] = Waiting(verdict, decision.reason, now + RETRY_S)
        elif before is not None:
            before.later(now, decision.reason)

    def _was_decided(self, verdict: Verdict) -> bool:
        """Whether it came back since, or the count of its lines only grew."""
        decided = self._decided.get(_of(verdict))
        return decided is not None and decided[:-1] == _what(verdict)[:-1]

    def _about(self, rule: Rule | None, verdict: Verdict) -> tuple[tuple[str, ...], Fleet]:
        if rule is None or rule.action == "watch":
            return (), Fleet(1)
        whole = verdict.action.value == "evict_node"
        whom = self._hands.whom(verdict.kind, verdict.object, whole_node=whole)
        return whom, self._hands.fleet(rule.action, whom)

    def _carry_out(
        self, decision: Decision, rule: Rule | None, whom: tuple[str, ...], fleet: Fleet, verdict: Verdict
    ) -> str:
        """Why it is not done, or not for all of them; empty: done."""
        reason, done, failed = f"{decision.reason} [{verdict.incident}]", 0, ""
        for replica in (name for name in whom if name not in fleet.away):
            try:
                why = because(verdict, decision.action)
                text = self._hands.act(decision.action, replica, reason, why, self._policy.limits.max_share)
            except ApiProblem as error:
                failed = f"{error.body.thing}: {error.body.reason}"
                self._teller.tell(
                    "policy.failed", verdict, f"{decision.action} of {replica}: {failed}", decision.action
                )
                continue
            done += 1
            self._teller.tell("policy.acted", verdict, f"{decision.action} of {replica}: {text}", decision.action)
            if decision.action in OUT:
                held = Held(replica, verdict.kind, verdict.object, verdict.incident, decision.action,
                            self._clock.wall_s(), rule is not None and rule.cordon, verdict.injected)  # fmt: skip
                self._book.hold(held)
                self._back.is_bad(verdict.kind, verdict.object)
        if done:
            self._book.acted(self._clock.boot_s(), f"{self._node}/{verdict.object}", decision.action)
            if rule is not None and rule.cordon:
                self._cordon(verdict, reason)
            self._book.save(self._teller.complain)
        return failed

    def _cordon(self, verdict: Verdict, reason: str) -> None:
        try:
            if self._hands.cordon(reason, because(verdict, "cordon")):
                self._teller.tell("policy.acted", verdict, f"{self._node} is set apart", "cordon")
        except ApiProblem as error:
            self._teller.tell("policy.failed", verdict, f"cordon: {error.body.reason}", "cordon")

    def _hook(self, rule: Rule, verdict: Verdict, decision: Decision) -> None:
        name = rule.hook[0]
        environment = {
            "FTCTL_NODE": self._node,
            "FTCTL_INCIDENT": verdict.incident,
            "FTCTL_OBJECT": verdict.object,
            "FTCTL_UUID": verdict.uuid,
            "FTCTL_HEALTH": verdict.health.value,
            "FTCTL_CODE": verdict.code,
            "FTCTL_ACTION": decision.action,
            "FTCTL_REASON": verdict.reason.replace("\0", " "),
            "FTCTL_INJECTED": "1" if verdict.injected else "0",
        }

        def ended(failure: str) -> None:
            kind = "policy.failed" if failure else "policy.acted"
            self._teller.tell(kind, verdict, f"hook {name}: {failure or 'done'}", "hook")

        if why := self._hooks.run(rule.hook, environment, rule.timeout_s, ended):
            self._teller.tell("policy.failed", verdict, f"hook {name} was not started: {why}", "hook")

    def _recommend(self, decision: Decision, verdict: Verdict, whom: tuple[str, ...]) -> None:
        if self.mode != "recommend" or decision.held or decision.action in ("watch", "rejoin"):
            return
        verb = "drain" if decision.action in ("drain", "promote") else "evict"
        because = f"--reason {verdict.code or verdict.kind} --incident {verdict.incident}"
        command = "; ".join(f"ftctl {verb} replica {name} {because}" for name in whom)
        self._wanted[verdict.object] = ProblemView(
            object=f"{self._node}/{short(verdict)}",
            reason=f"the policy recommends: {decision.action} {', '.join(whom)} ({verdict.reason})",
            action=command or "ftctl policy show",
        )

    # --- small --------------------------------------------------------------------------------------------------------

    def _stands(self, verdict: Verdict) -> bool:
        return any(
            (one.kind, one.object, one.code) == (verdict.kind, verdict.object, verdict.code)
            for one in self._desk.verdicts()
        )


def _of(verdict: Verdict) -> _Of:
    return verdict.source, verdict.kind, verdict.object, verdict.code


def _what(verdict: Verdict) -> _What:
    return verdict.incident, verdict.health.value, verdict.action.value, verdict.times, verdict.count


def rule_view(rule: Rule) -> dict[str, object]:
    return {name: getattr(rule, name) for name in rule.__dataclass_fields__}
