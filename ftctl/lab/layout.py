"""What a lab looks like: its nodes, rails and addresses, worked out from the options before anything is made.

Everything lives in network namespaces of the lab's own. One of them, the fabric, holds a bridge for each rail and one
for management: the switches. Each node has a namespace with one veth a rail and one for management; the other ends are
ports of those bridges. A node that takes its rail down therefore does not drop the carrier of its peers, as behind a
real switch. Addresses may be the same in every lab and on the host: namespaces keep them apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ftctl.errors import UsageProblem

MAX_NODES = 64  # each node is an agent and a training process: memory ends long before addresses do
MAX_RAILS = 8
MAX_RANKS = 16  # of a replica
MAX_SEED = 2**63 - 1  # what torch.manual_seed takes
COORDINATOR_PORT = 7600
MEETING_PORT = 7620  # where the ranks of an NCCL job meet, at node0
AGENT_PORT = 7610
FABRIC_ADDRESS = "10.99.0.254"
MANAGEMENT = "mgmt0"
MAX_GPUS = 64  # of a node
GPU_PROFILES = ("h100", "h200")
POLICY_MODES = ("observe", "recommend", "act")
TRAINING, NCCL = JOBS = ("training", "nccl")

# Names end up in socket paths (108 bytes at most) and in job names.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,30}[a-z0-9])?\Z")
_RATE = re.compile(r"(\d{1,6})(kbit|mbit|gbit)\Z")
_INTERVAL = re.compile(r"[1-9]\d{0,8}|[1-9]\d{0,5}(\.\d{1,3})?(s|min|h)\Z")
_UNIT = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}


class LabOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asked for.

    `job`: training (replicas with a coordinator) or nccl (a rank a node that moves bytes through the NCCL plugin).
    `spares`: further replicas that follow and take the place of one that is lost. `evict_hung`: the coordinator takes
    a hung replica out, instead of only showing it. `evict_diverged`: and a replica whose results differ from those of
    the majority. `ranks`: processes of a replica, which share its model. `checkpoint_every`: from one checkpoint to
    the next so many steps ("50") or so long ("10min"); empty: none are kept. `gpus`: simulated GPUs of each node, of
    the model `gpu_profile`. `policy`: the mode of the agents' policy; empty: act where there are GPUs, else observe.
    `policy_file`: its rules, in the place of those that ship. `step_ms` is the paced length of a training step, or of
    a round of messages; `steps` 0 goes on without an end."""

    name: str = "lab"
    replicas: int = 3
    nodes_per_replica: int = 1
    ranks: int = 1
    rails: int = 2
    rate: str = ""
    step_ms: int = 200
    steps: int = 0
    seed: int = 0
    min_replicas: int = 1
    spares: int = 0
    evict_hung: bool = False
    evict_diverged: bool = False
    job: str = TRAINING
    checkpoint_every: str = ""
    gpus: int = 0
    gpu_profile: str = "h100"
    policy: str = ""
    policy_file: str = ""


class Rail(msgspec.Struct, frozen=True):
    """A network device of a node, and the fabric's end of it."""

    name: str
    port: str  # device name of the other end, in the fabric
    bridge: str
    address: str
    address6: str  # empty: none


class Node(msgspec.Struct, frozen=True):
    name: str
    replica: str
    ranks: tuple[int, ...]  # those of the replica's ranks that run here
    rails: tuple[Rail, ...]
    management: Rail

    def devices(self) -> Iterator[Rail]:
        yield from self.rails
        yield self.management


def valid_lab_name(name: str) -> bool:
    return _NAME.match(name) is not None


def rate_bits(rate: str) -> int:
    """Bits per second of a rate such as 100mbit or 1gbit. Raises UsageProblem."""
    match = _RATE.match(rate)
    bits = int(match[1]) * _UNIT[match[2]] if match else 0
    if not 1_000_000 <= bits <= 100_000_000_000:
        raise UsageProblem(f"--rate {rate}", "not a rate of 1mbit to 100gbit", "write it like this: --rate 1gbit")
    return bits


def check(options: LabOptions) -> None:
    """Raises UsageProblem for what cannot be built."""
    if not valid_lab_name(options.name):
        raise UsageProblem(
            f"lab {options.name!r}",
            "this cannot be a lab's name",
            "use 1 to 32 of a-z, 0-9, dot and dash, with a letter or digit at both ends",
        )
    if options.job not in JOBS:
        raise UsageProblem(f"--job {options.job}", f"not one of {', '.join(JOBS)}", "ftctl lab up --help")
    _within("nodes-per-replica", options.nodes_per_replica, 1, MAX_RANKS)
    each = options.nodes_per_replica
    if options.job == NCCL and each != 1:
        raise UsageProblem(
            f"--nodes-per-replica {each}", "with --job nccl there are no replicas", "ftctl lab up --help"
        )
    if each > 1 and (options.ranks < each or options.ranks % each):
        raise UsageProblem(
            f"--nodes-per-replica {each}",
            f"{options.ranks} rank{'' if options.ranks == 1 else 's'} of a replica cannot be spread evenly over them",
            f"give --ranks {each}, or a multiple of it",
        )
    _within("replicas", options.replicas, 2 if options.job == NCCL else 1, MAX_NODES // each)
    if options.policy not in ("", *POLICY_MODES):
        raise UsageProblem(f"--policy {options.policy}", f"not one of {', '.join(POLICY_MODES)}", "ftctl lab up --help")
    if options.policy_file:
        _check_policy(options.policy_file)
    if options.job == NCCL and options.ranks != 1:
        raise UsageProblem(f"--ranks {options.ranks}", "with --job nccl every node has one rank", "ftctl lab up --help")
    if options.job == NCCL and options.spares:
        raise UsageProblem(f"--spares {options.spares}", "with --job nccl there are no replicas", "ftctl lab up --help")
    if options.checkpoint_every:
        _check_interval(options)
    _within("spares", options.spares, 0, MAX_NODES // each - options.replicas)
    _within("ranks", options.ranks, 1, MAX_RANKS)
    _within("rails", options.rails, 1, MAX_RAILS)
    _within("step-ms", options.step_ms, 0, 60_000)
    _within("steps", options.steps, 0, 10**9)
    _within("seed", options.seed, 0, MAX_SEED)
    _within("min-replicas", options.min_replicas, 1, options.replicas)
    _within("gpus", options.gpus, 0, MAX_GPUS)
    if options.gpu_profile not in GPU_PROFILES:
        known = ", ".join(GPU_PROFILES)
        raise UsageProblem(f"--gpu-profile {options.gpu_profile}", f"not one of {known}", "ftctl lab up --help")
    if options.rate:
        rate_bits(options.rate)


def _check_policy(file: str) -> None:
    from agents.api.policyfile import PolicyProblem, read

    try:
        read(Path(file))
    except PolicyProblem as error:
        raise UsageProblem("--policy-file", str(error), f"ftctl policy validate {file}") from None


def _check_interval(options: LabOptions) -> None:
    given = f"--checkpoint-every {options.checkpoint_every}"
    if options.job == NCCL:
        raise UsageProblem(given, "with --job nccl nothing is trained", "ftctl lab up --help")
    if not _INTERVAL.fullmatch(options.checkpoint_every):
        raise UsageProblem(
            given, "neither steps nor a time", "write it like this: --checkpoint-every 50, or 30s, 10min, 1h"
        )


def _within(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageProblem(f"--{option} {value}", f"not in {low} to {high}", "ftctl lab up --help")


def nodes(options: LabOptions) -> tuple[Node, ...]:
    """With one node a replica, node i carries replica r<i>; with n, nodes n*i to n*i+n-1 do, each with as many of its
    ranks. Rail k of node i is 10.99.(k+1).(i+1) and fd99:0:0:(k+1)::(i+1)."""
    each = options.nodes_per_replica
    return tuple(_node(index, options) for index in range((options.replicas + options.spares) * each))


def _node(index: int, options: LabOptions) -> Node:
    host = index + 1
    replica, part = divmod(index, options.nodes_per_replica)
    here = options.ranks // options.nodes_per_replica
    return Node(
        name=f"node{index}",
        replica=f"r{replica}",
        ranks=tuple(range(part * here, (part + 1) * here)),
        rails=tuple(
            Rail(
                name=f"rail{k}",
                port=f"n{index}-rail{k}",
                bridge=f"br-rail{k}",
                address=f"10.99.{k + 1}.{host}",
                address6=f"fd99:0:0:{k + 1:x}::{host:x}",
            )
            for k in range(options.rails)
        ),
        management=Rail(MANAGEMENT, f"n{index}-mgmt", "br-mgmt", f"10.99.0.{host}", ""),
    )
