"""Reads network interfaces, keeps their history over restarts of the agent, and has them judged (nicjudge.py)."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from agents.api.models import NicView
from agents.host.links import Counters, LinkMode, Links, Nic
from agents.host.netobjects import Address
from agents.host.sysfs import Sysfs
from agents.monitors.flaps import PortPast, carriers_lost
from agents.monitors.nicjudge import (
    FLAPS,
    MANAGEMENT,
    OTHER,
    RAIL,
    UNKNOWN_MODE,
    Judgement,
    NicReading,
    Usual,
    judge,
    with_past,
)
from agents.monitors.portlimits import NicLimits
from agents.monitors.portmemory import PortMemory, PortRecord

SPEED_EVERY_S = 30.0  # some drivers ask their firmware for the speed


@dataclass
class _History:
    """What one NIC counted lately: (time, counters), oldest first."""

    samples: deque[tuple[float, Counters]] = field(default_factory=deque)
    mode: LinkMode = UNKNOWN_MODE
    pcie_width: int | None = None
    mode_at: float = float("-inf")
    carrier: bool = False
    identity: str = ""
    seen: bool = False
    missed: int = 0
    past: PortPast = field(default_factory=PortPast)

    def add(self, now: float, nic: Nic, window_s: float) -> int:
        """Returns how many carriers were lost since the last look."""
        counters, identity = nic.counters, f"{nic.index} {nic.mac}"
        before = self.samples[-1][1] if self.samples and identity == self.identity else None
        if before is None or _went_back(before, counters):
            self.samples.clear()  # another device, or a driver that was loaded again: it counts from nothing
            lost = int(before is not None and self.carrier and not nic.carrier)
        else:
            lost = carriers_lost(self.carrier, counters.carrier_changes - before.carrier_changes)
        if self.carrier and not nic.up:
            lost = max(0, lost - 1)  # somebody set it down
        self.samples.append((now, counters))
        while len(self.samples) > 1 and now - self.samples[0][0] > window_s:
            self.samples.popleft()
        self.identity, self.seen, self.missed = identity, True, 0
        return lost

    def reading(self, name: str, role: str, nic: Nic, fault: str) -> NicReading:
        (first_at, first), (last_at, last) = self.samples[0], self.samples[-1]
        errors = last.rx_errors + last.tx_errors - first.rx_errors - first.tx_errors
        changes = last.carrier_changes - first.carrier_changes
        return NicReading(
            name, role, nic, changes, errors, last_at - first_at, fault,
            was_up=self.past.was_up, mode=self.mode, pcie_width=self.pcie_width,
        )  # fmt: skip


def _went_back(before: Counters, now: Counters) -> bool:
    names = ("carrier_changes", "rx_errors", "tx_errors")
    return any(getattr(now, name) < getattr(before, name) for name in names)


class NicMonitor:
    """Reads all NICs and judges them. `read` wants to be called regularly, from one thread; `clear` by any."""

    def __init__(  # noqa: PLR0917
        self,
        links: Links,
        rails: tuple[str, ...],
        management_nic: str | None,
        limits: NicLimits | None = None,
        sysfs: Sysfs | None = None,
        memory: PortMemory | None = None,
    ) -> None:
        self._links = links
        self._rails = rails
        self._management = management_nic
        self._limits = limits or NicLimits()
        self._sysfs = sysfs
        self._memory = memory
        self._loaded = memory is None
        self._lock = threading.Lock()
        self._history: dict[str, _History] = {}
        self._gateways: frozenset[str] = frozenset()  # where no management NIC is named: the default route's
        self._gateways_at = float("-inf")

    def read(
        self, now: float, faults: Mapping[str, str], *, wall: float = 0.0, lately: Collection[str] = ()
    ) -> list[tuple[NicView, tuple[Judgement, ...]]]:
        """`now` monotonic seconds, `wall` Unix seconds; `faults`: NIC name -> id of our open fault; `lately`: NICs
        whose fault is over just now. Rails first. Raises HostError."""
        nics = {nic.name: nic for nic in self._links.nics() if nic.name != "lo"}
        addresses = self._links.all_addresses()
        if self._management is None and now - self._gateways_at > SPEED_EVERY_S:
            indexes, self._gateways_at = self._links.default_route_indexes(), now
            self._gateways = frozenset(nic.name for nic in nics.values() if nic.index in indexes)
        names = sorted([*nics, *(r for r in self._rails if r not in nics)], key=self._order)
        with self._lock:
            if not self._loaded:
                self._load(now, wall)
            self._history = {name: self._history.get(name, _History()) for name in names}
            for name in names:
                self._look(name, nics.get(name), now, excused=name in faults or name in lately)
            usual = self._usual(nics)
            result = [self._one(name, nics.get(name), addresses, now, faults.get(name, ""), usual) for name in names]
            if self._memory is not None:
                self._memory.save(now, wall, {name: self._record(name) for name in self._rails})
        return result

    def clear(self, kind: str, name: str) -> frozenset[str]:
        """An operator has seen to it: its past is forgotten. Returns the codes that are over with it."""
        with self._lock:
            history = self._history.get(name.removeprefix("nic ")) if kind == "nic" else None
            return frozenset({FLAPS}) if history is not None and history.past.clear() else frozenset()

    def _look(self, name: str, nic: Nic | None, now: float, *, excused: bool) -> None:
        history = self._history[name]
        if nic is None:
            history.missed += history.seen
            if history.missed >= self._limits.gone_polls and not excused:
                history.past.saw(now, up=False, lost=0, limits=self._limits.flaps)
            return
        if excused:
            history.samples.clear()
            history.past.excused()
        lost = history.add(now, nic, self._limits.window_s)
        if now - history.mode_at > SPEED_EVERY_S or nic.carrier != history.carrier:
            history.mode, history.mode_at = self._links.link_mode(name), now
            history.pcie_width = self._pcie_width(nic)
        history.carrier = nic.carrier
        if not excused or nic.carrier:
            history.past.saw(now, up=nic.up and nic.carrier, lost=0 if excused else lost, limits=self._limits.flaps)

    def _pcie_width(self, nic: Nic) -> int | None:
        """None also where sysfs shows another network namespace than ours."""
        if self._sysfs is None or not self._sysfs.shows(nic.name, nic.index):
            return None
        return self._sysfs.number(f"class/net/{nic.name}/device/current_link_width")

    def _usual(self, nics: Mapping[str, Nic]) -> Usual:
        limits = self._limits
        mine = [self._history[name] for name in self._rails if name in nics and nics[name].carrier]
        if any(one is not None for one in (limits.expect_speed_mbit, limits.expect_duplex, limits.expect_pcie_width)):
            return Usual(
                limits.expect_speed_mbit, limits.expect_duplex or "", limits.expect_pcie_width, configured=True
            )
        speed = _most([one.mode.speed_mbit for one in mine if one.mode.speed_mbit])
        duplex = _most([1 + (one.mode.duplex == "full") for one in mine if one.mode.duplex])
        width = _most([one.pcie_width for one in mine if one.pcie_width])
        return Usual(speed or None, ("", "half", "full")[duplex], width or None)

    def _one(  # noqa: PLR0917
        self,
        name: str,
        nic: Nic | None,
        addresses: dict[int, tuple[Address, ...]],
        now: float,
        fault: str,
        usual: Usual,
    ) -> tuple[NicView, tuple[Judgement, ...]]:
        role, history = self._role(name), self._history[name]
        if nic is None:
            first = judge(NicReading(name, role, None, fault=fault, missed=history.missed), self._limits)
        else:
            peers = any(self._history[rail].carrier for rail in self._rails if rail != name)
            reading = replace(
                history.reading(name, role, nic, fault), peers_up=peers, usual=usual if role == RAIL else Usual()
            )
            first = judge(reading, self._limits)
        if role != RAIL:
            verdicts: tuple[Judgement, ...] = (first,)
        else:
            history.past.judged(now, bad=bool(first.code) and not fault)
            verdicts = with_past(first, history.past, now, self._limits)
        return _view(name, role, nic, history, addresses, verdicts[0], fault), verdicts

    def _load(self, now: float, wall: float) -> None:
        self._loaded = True
        assert self._memory is not None  # noqa: S101 - nothing is to be loaded without
        known = self._memory.load(now, wall)
        for name, record in known.ports.items():
            history = self._history[name] = _History(
                identity=record.identity, carrier=record.up, seen=True, past=record.past
            )
            if record.counters:
                counters = Counters(**{key: record.counters.get(key, 0) for key in Counters.__struct_fields__})
                history.samples.append((now - min(known.age_s, self._limits.window_s), counters))

    def _record(self, name: str) -> PortRecord:
        history = self._history[name]
        last = history.samples[-1][1] if history.samples else None
        counters = {key: getattr(last, key) for key in Counters.__struct_fields__} if last is not None else {}
        return PortRecord(history.past, counters, history.identity, history.carrier)

    def _role(self, name: str) -> str:
        if name in self._rails:
            return RAIL
        return MANAGEMENT if name == self._management or name in self._gateways else OTHER

    def _order(self, name: str) -> tuple[int, int, str]:
        place = self._rails.index(name) if name in self._rails else len(self._rails)
        return ((RAIL, MANAGEMENT, OTHER).index(self._role(name)), place, name)


def _most(values: list[int]) -> int:
    """The most common one; of equally many the highest. 0: there are none."""
    return max(Counter(values).items(), key=lambda one: (one[1], one[0]), default=(0, 0))[0]


def _view(  # noqa: PLR0917
    name: str,
    role: str,
    nic: Nic | None,
    history: _History,
    addresses: dict[int, tuple[Address, ...]],
    verdict: Judgement,
    fault: str,
) -> NicView:
    view = NicView(
        name=name,
        role=role,
        present=nic is not None,
        up=nic is not None and nic.up,
        carrier=nic is not None and nic.carrier,
        state=verdict.health,
        reason=verdict.reason,
        injected=bool(fault),
    )
    if nic is None:
        return view
    counters = nic.counters
    return view.model_copy(
        update={
            "speed_mbit": history.mode.speed_mbit,
            "duplex": history.mode.duplex,
            "pcie_width": history.pcie_width,
            "addresses": [address.text for address in addresses.get(nic.index, ())],
            "mac": nic.mac,
            "mtu": nic.mtu,
            **{key: getattr(counters, key) for key in Counters.__struct_fields__},
        }
    )
