"""The faults there are, as data: what both sides must agree on before anything is sent.

The agent's implementations (agents/faults, one file a kind) refer to these entries, and the agent holds requests to
them; `ftctl inject`, its options, their help, shell completion and the catalogue in agents/faults/CATALOG.md are made
from them. Standard library only: the smallest processes and `ftctl inject --help` load it.

A newer agent may know kinds that this list does not have: `ftctl inject KIND --param NAME=VALUE` asks for them.
"""

from __future__ import annotations

from agents.api.faultspec import MAX_TEXT, TARGETS, TYPES, Param, ParamValue, Spec
from agents.api.gpufaults import GPU_FAULTS

__all__ = ["MAX_TEXT", "NOT_OFFERED", "POINTS", "SPECS", "TARGETS", "TYPES", "Param", "ParamValue", "Spec"]

_WAY = Param(
    "direction",
    "str",
    "What comes in, what is sent, or both",
    default="both",
    choices=("in", "out", "both"),
)

# Of a rank's (ftar_core/wire/breakpoints.py, RANK_POINTS), those that can be taken back; a test holds the two together.
POINTS = (
    "forward",
    "backward",
    "reduced",
    "done-sent",
    "commit-received",
    "update",
    "updated",
    "epoch",
    "join-prepare",
    "fetch",
    "serve",
    "replay",
    "promote",
    "checkpoint-copied",
    "checkpoint-write",
    "checkpoint-joined",
    "checkpoint-manifest",
    "checkpoint-published",
    "checkpoint-load",
)

_ALL = (
    Spec("noop", "Change nothing but a marker file of the agent's own: a rehearsal of the life cycle", "node"),
    Spec(
        "link-down",
        "Set a rail down (administratively), as a pulled cable or a dead optic at this end would",
        "nic",
        takes_out=True,
    ),
    Spec(
        "link-flap",
        "Set a rail down and up again, over and over, as a loose connector or a hot transceiver would",
        "nic",
        (
            Param("period_ms", "float", "One loss and one return", "ms", 2000.0, 100, 600_000),
            Param("down_percent", "float", "Part of each period in which it is down", "percent", 50.0, 1, 99),
            Param("jitter_percent", "float", "Part of the pause by which it may be late", "percent", 0.0, 0, 100),
            Param("seed", "int", "Of the jitter: the same seed, the same moments", default=0, minimum=0),
        ),
        takes_out=True,
    ),
    Spec(
        "link-blackhole",
        "Let frames of a rail vanish while its carrier stays, as a switch that lost its tables would",
        "nic",
        (_WAY,),
        takes_out=True,
    ),
    Spec(
        "link-loss",
        "Let a part of a rail's frames vanish, as a dirty fibre or an overflowing port would",
        "nic",
        (Param("percent", "float", "How many", "percent", None, 0.001, 99), _WAY),
    ),
    Spec(
        "link-duplicate",
        "Send a part of a rail's frames twice, as a switch that learns its tables anew would",
        "nic",
        (Param("percent", "float", "How many", "percent", None, 0.001, 100),),
    ),
    Spec(
        "link-rate",
        "Slow down what a rail sends, as a port that trained at a lower speed would",
        "nic",
        (
            Param("mbit", "float", "How much it still sends", "mbit", None, 0.1, 1_000_000),
            Param("queue_ms", "float", "How long what waits may wait; more is dropped", "ms", 50.0, 1, 10_000),
        ),
    ),
    Spec(
        "link-delay",
        "Delay what a rail sends, as a detour or a congested switch would",
        "nic",
        (
            Param("delay_ms", "float", "By how much", "ms", None, 0.01, 60_000),
            Param("jitter_ms", "float", "More or less than that by up to so much, at random", "ms", 0.0, 0, 60_000),
        ),
    ),
    Spec(
        "link-corrupt",
        "Damage a bit of a part of the frames that a rail sends; checksums find it and the frame is lost",
        "nic",
        (Param("percent", "float", "How many", "percent", None, 0.001, 100),),
    ),
    Spec(
        "link-reorder",
        "Let a part of the frames that a rail sends overtake others, as two paths of unequal length would",
        "nic",
        (
            Param("percent", "float", "How many overtake", "percent", None, 0.001, 99),
            Param("delay_ms", "float", "By how much the others are delayed", "ms", 10.0, 0.01, 60_000),
        ),
    ),
    Spec(
        "partition",
        "Cut nodes off from others on all their rails, as a failed spine or a wrong VLAN would",
        "node",
        (
            Param("peers", "addresses", "Those that are cut off from it: nodes (node[2-3]), or addresses"),
            _WAY,
        ),
        takes_out=True,
        rails=True,
    ),
    Spec(
        "proc-kill",
        "Send a replica's processes a signal that ends them, as the OOM killer, a crash or a lost GPU would",
        "replica",
        (
            Param(
                "signal",
                "str",
                "Which one",
                default="KILL",
                choices=("KILL", "SEGV", "ABRT", "BUS", "TERM", "INT"),
            ),
        ),
        irreversible=True,
        takes_out=True,
    ),
    Spec(
        "proc-hang",
        "Stop a replica's processes (SIGSTOP), as a driver that hangs would: connections stay, nothing moves",
        "replica",
        takes_out=True,
    ),
    Spec(
        "proc-slow",
        "Slow a replica's processes down by stopping and resuming them all the time, as a throttled core would",
        "replica",
        (
            Param("percent", "float", "Part of the time in which they stand still", "percent", 50.0, 1, 95),
            Param("period_ms", "float", "One stop and one resumption", "ms", 100.0, 20, 5000),
        ),
    ),
    Spec(
        "replica-crash-at",
        "Let a replica's processes fail at a named point of a step, exactly there",
        "replica",
        (
            Param("point", "str", "Where; ARCHITECTURE.md says what each is", choices=POINTS),
            Param("step", "int", "At this step or the first time later; 0: the next time", default=0, minimum=0),
            Param("action", "str", "What then", default="kill", choices=("kill", "stop", "raise", "sleep")),
            Param("sleep_ms", "int", "How long a sleep takes", "ms", 1000, 1, 600_000),
            Param("within_s", "float", "It is forgotten if it was not reached by then", "s", 120.0, 1, 900),
        ),
        takes_out=True,
    ),
    Spec(
        "mem-hog",
        "Take memory of a node with a process of the agent's own, as a leak in a data loader would",
        "node",
        (
            Param("mb", "int", "How much", "mb", None, 1, 100_000_000),
            Param("leave_mb", "int", "How much must stay available; it is refused otherwise", "mb", 1024, 64),
        ),
    ),
    Spec(
        "disk-full",
        "Fill the file system of the agent's state directory with one file, as logs and core dumps would",
        "node",
        (
            Param("mb", "int", "How much; 0: all but what is to be left", "mb", 0, 0, 100_000_000),
            Param("leave_mb", "int", "What stays free, for the agent's own records", "mb", 64, 8),
        ),
    ),
    Spec(
        "node-down",
        "Take all rails of a node down and kill all its training processes, as a power loss would",
        "node",
        takes_out=True,
        whole_node=True,
        rails=True,
    ),
    Spec(
        "agent-kill",
        "Kill the agent of a node; its watchdog, or the next agent, takes back what it had injected",
        "node",
        (Param("after_ms", "int", "How long after it has answered", "ms", 300, 50, 10_000),),
        irreversible=True,
    ),
    Spec(
        "coordinator-kill",
        "Kill the job's coordinator, as a lost head node would",
        "coordinator",
        irreversible=True,
    ),
    Spec(
        "coordinator-freeze",
        "Stop the job's coordinator (SIGSTOP), as a machine that swaps or a paused virtual machine would",
        "coordinator",
    ),
    Spec(
        "state-corrupt",
        "Flip one bit in a replica's memory, as a bad memory cell or link would, for the divergence check to find",
        "replica",
        (
            Param(
                "where",
                "str",
                "In its copy of the reduced gradients, in a parameter, or in what the optimizer keeps for one",
                default="reduced",
                choices=("reduced", "parameter", "optimizer"),
            ),
            Param("seed", "int", "Chooses the bit", default=0, minimum=0, maximum=999_999_999),
        ),
        irreversible=True,
    ),
    *GPU_FAULTS,
)

# What one may look for and not find, and why.
NOT_OFFERED = {
    "clock-skew": "a wrong date cannot be kept to one job: it is the machine's, and time namespaces shift only the "
    "monotonic clocks, of processes that are yet to start (time_namespaces(7)). Nothing in ftar_core decides by dates.",
}

SPECS: dict[str, Spec] = {spec.kind: spec for spec in _ALL}
