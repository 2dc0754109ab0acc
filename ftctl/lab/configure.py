"""Writes what the lab's processes read: each agent's configuration, the inventory for ftctl, and the keeper's list."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ftctl.errors import UsageProblem
from ftctl.lab.credentials import Credentials, to_yaml
from ftctl.lab.layout import AGENT_PORT, COORDINATOR_PORT, FABRIC_ADDRESS, MANAGEMENT, MEETING_PORT, NCCL, Node
from ftctl.lab.manifest import Manifest, ProcessSpec, save
from ftctl.lab.paths import LONGEST_SOCKET_PATH, LabPaths, make_private, write_private

COORDINATOR = "coordinator"
POLICY = "policy.yaml"
TRAINING_MODULE = "ftar_core.training.example"
NCCL_MODULE = "ftar_core.ncclrun"
# What a replica would import when it starts: torch, and what the first optimizer pulls in (2 s of a core).
PRELOAD = ("torch", "torch._dynamo", TRAINING_MODULE)
PRELOAD_SHARDED = ("torch.distributed.fsdp", "torch.distributed.tensor")
# A lab's replicas are killed every few seconds on purpose; a real node's back-off would take that for a bad replica.
BACKOFF_MAX_S, HEALTHY_S = 5.0, 10.0
# A coordinator that ends with 0 has ended the job, with 1 it cannot go on, with 2 its settings are wrong.
MASTER_PORT = 29500  # torchrun's default: one replica a node
COORDINATOR_FINAL = (0, 1, 2)
AGENT_FINAL = (2,)
# Done or a wrong byte, and wrong settings; a rank whose peer is gone is started again, and all meet anew.
RANK_FINAL = (0, 1, 2)
# Long enough to be seen by somebody who looks once a second.
RANK_HOLD_DOWN_MS = 3000
# Three trainers on two cores: more threads than one each only fight each other. Read by OpenMP and MKL before torch is
# imported, so it must be in the environment of the pre-imported process, which is a child of the agent.
# A lab is there to be broken: what a real cluster must be spared of is tried here. min_replicas still holds.
NO_BOUNDS = {"faults": 64, "nodes_percent": 100, "replicas_percent": 100, "same_replica": False}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def agent_name(node: Node) -> str:
    return f"agent-{node.name}"


def agent_socket(manifest: Manifest, node: Node) -> Path:
    return Path(manifest.runtime_dir) / f"{node.name}.sock"


def ranks_socket(manifest: Manifest, node: Node) -> Path:
    return Path(manifest.runtime_dir) / f"{node.name}-ranks.sock"


def write_all(
    paths: LabPaths,
    manifest: Manifest,
    nodes: Sequence[Node],
    credentials: Credentials,
    processes: tuple[ProcessSpec, ...],
) -> None:
    """Everything but the secrets. Raises UsageProblem, OSError."""
    leaders = {node.replica: node for node in reversed(nodes)}  # the first node of each replica: its rank 0 is there
    for node in nodes:
        longest = len(str(ranks_socket(manifest, node)))
        if longest > LONGEST_SOCKET_PATH:
            raise UsageProblem(
                "XDG_RUNTIME_DIR", f"too long for Unix sockets ({longest} bytes)", "unset XDG_RUNTIME_DIR"
            )
    for directory in (paths.logs, paths.journal, paths.store, paths.root / "nodes", Path(manifest.runtime_dir)):
        make_private(directory)
    for node in nodes:
        make_private(paths.node(node.name))
        config = paths.node(node.name) / "agent.yaml"
        write_private(config, to_yaml(agent_config(paths, manifest, node, credentials, leaders[node.replica])))
    if manifest.options.policy_file:  # a copy: an agent that is started again reads it again
        write_private(paths.root / POLICY, Path(manifest.options.policy_file).read_text(encoding="utf-8"))
    write_private(paths.inventory, to_yaml(inventory(manifest, nodes, credentials)))
    save(paths.processes, processes)


def inventory(manifest: Manifest, nodes: Sequence[Node], credentials: Credentials) -> dict[str, object]:
    return {
        "version": 1,
        "job": manifest.options.name,
        "environment": "lab",
        "token_file": str(credentials.mine),
        "ca_file": str(credentials.ca),
        "nodes": [{"name": node.name, "url": f"unix://{agent_socket(manifest, node)}"} for node in nodes],
    }


def agent_config(
    paths: LabPaths, manifest: Manifest, node: Node, credentials: Credentials, leader: Node
) -> dict[str, object]:
    """`leader`: the node on which rank 0 of the node's replica runs."""
    certificate, key = credentials.certificates[node.name]
    options = manifest.options
    config: dict[str, object] = {
        "node": node.name,
        "state_dir": str(paths.node(node.name) / "state"),
        "listen": f"{node.management.address}:{AGENT_PORT}",
        "unix_socket": str(agent_socket(manifest, node)),
        "ranks_socket": str(ranks_socket(manifest, node)),
        "tls_cert": str(certificate),
        "tls_key": str(key),
        "tokens_file": str(credentials.agents),
        "rails": [rail.name for rail in node.rails],
        "management_nic": node.management.name,
        "blast_radius": NO_BOUNDS,
        "breaker": {"replicas_percent": 0},
        "kernel_log": None,  # there is one for the whole machine, whose GPUs are no lab's
        "kmsg_device": None,
    }
    if options.gpus:
        config["simulated_gpus"] = {"count": options.gpus, "profile": options.gpu_profile}
    rules = {"file": str(paths.root / POLICY)} if options.policy_file else {}
    config["policy"] = {"mode": options.policy or ("act" if options.gpus else "observe"), **rules}
    if options.job == NCCL:
        return config
    config["coordinator"] = {
        "address": f"{FABRIC_ADDRESS}:{COORDINATOR_PORT}",
        "job": options.name,
        "token_file": str(credentials.job_operator),
    }
    config["supervision"] = {
        "preload": [*PRELOAD, *(PRELOAD_SHARDED if options.ranks > 1 else ())],
        "backoff_max_s": BACKOFF_MAX_S,
        "healthy_s": HEALTHY_S,
        "replicas": [
            {
                "replica": node.replica,
                "rank": rank,
                "module": TRAINING_MODULE,
                "args": training_args(manifest, paths),
                "env": {
                    **rank_environment(paths, manifest, node, credentials),
                    **(across_nodes(manifest, leader) if options.nodes_per_replica > 1 else {}),
                },
            }
            for rank in node.ranks
        ],
    }
    return config


def training_args(manifest: Manifest, paths: LabPaths) -> list[str]:
    options = manifest.options
    args = ["--step-ms", str(options.step_ms), "--seed", str(options.seed)]
    if options.ranks > 1:
        args += ["--batch-size", str(options.ranks)]  # a sample for each
    if options.checkpoint_every:
        args += ["--checkpoint", str(paths.checkpoints), "--checkpoint-every", options.checkpoint_every]
    return [*args, "--steps", str(options.steps)] if options.steps else args


def rank_environment(paths: LabPaths, manifest: Manifest, node: Node, credentials: Credentials) -> dict[str, str]:
    """ARCHITECTURE.md, "Environment of a rank"."""
    return {
        "FTAR_COORDINATOR": f"{FABRIC_ADDRESS}:{COORDINATOR_PORT}",
        "FTAR_JOB": manifest.options.name,
        "FTAR_REPLICA": node.replica,
        "FTAR_TOKEN_FILE": str(credentials.job),
        "FTAR_RAILS": rail_list(node),
        "FTAR_NODE": node.name,
        "FTAR_AGENT": str(ranks_socket(manifest, node)),
        "FTAR_JOURNAL": str(paths.journal),
        # Without this (or `across_nodes`) gloo looks for the host's name in the node's network.
        **({"GLOO_SOCKET_IFNAME": "lo"} if manifest.options.ranks > 1 else {}),
        **ONE_THREAD,
    }


def across_nodes(manifest: Manifest, leader: Node) -> dict[str, str]:
    """What an agent cannot know that sees only some of a replica's ranks; torchrun and Slurm would tell each rank."""
    return {
        "WORLD_SIZE": str(manifest.options.ranks),
        "MASTER_ADDR": leader.management.address,
        "MASTER_PORT": str(MASTER_PORT),
        "GLOO_SOCKET_IFNAME": MANAGEMENT,
    }


def rail_list(node: Node) -> str:
    return ",".join(f"{rail.name}={rail.address}@{rail.name}" for rail in node.rails)


def traffic_report(paths: LabPaths, node: str) -> Path:
    """Where the rank of a node says what it has moved and checked (ftar_core.ncclrun)."""
    return paths.journal / f"{node}.json"


def wished_net_options() -> str:
    """FTAR_NET_OPTIONS of whoever makes the lab: its NCCL ranks get them, behind the lab's own."""
    return os.environ.get("FTAR_NET_OPTIONS", "")


def nccl_rank(
    paths: LabPaths, manifest: Manifest, nodes: Sequence[Node], rank: int, credentials: Credentials
) -> ProcessSpec:
    node, options = nodes[rank], manifest.options
    name = f"rank-{node.name}"
    return ProcessSpec(
        name=name,
        namespace=node.name,
        argv=(
            *(sys.executable, "-m", NCCL_MODULE),
            *("--rails", rail_list(node), "--token-file", str(credentials.job), "--allow-sockets"),
            *("--round-ms", str(options.step_ms), "--rounds", str(options.steps)),
            *("--report", str(traffic_report(paths, node.name))),
        ),
        log=str(paths.log(name)),
        env={
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": nodes[0].management.address,
            "MASTER_PORT": str(MEETING_PORT),
            "FTAR_JOB": options.name,
            "FTAR_NET_OPTIONS": ",".join(filter(None, [f"hold_down_ms={RANK_HOLD_DOWN_MS}", wished_net_options()])),
        },
        final_codes=RANK_FINAL,
    )


def process_list(
    paths: LabPaths, manifest: Manifest, nodes: Sequence[Node], credentials: Credentials
) -> tuple[ProcessSpec, ...]:
    options = manifest.options
    coordinator = ProcessSpec(
        name=COORDINATOR,
        namespace="fabric",
        argv=(
            *(sys.executable, "-m", "ftar_core.coordinator"),
            *("--job", options.name),
            *("--listen", f"{FABRIC_ADDRESS}:{COORDINATOR_PORT}"),
            *("--store", str(paths.store)),
            *("--token-file", str(credentials.job)),
            *("--operator-token-file", str(credentials.job_operator)),
            *("--replicas", str(options.replicas), "--spares", str(options.spares)),
            *("--min-replicas", str(options.min_replicas)),
            *("--profile", "lab", *(("--evict-hung",) if options.evict_hung else ())),
            *(("--evict-diverged",) if options.evict_diverged else ()),
        ),
        log=str(paths.log(COORDINATOR)),
        final_codes=COORDINATOR_FINAL,
    )
    agents = (
        ProcessSpec(
            name=agent_name(node),
            namespace=node.name,
            argv=(
                *(sys.executable, "-m", "agents.daemon"),
                *("--config", str(paths.node(node.name) / "agent.yaml"), "--allow-faults"),
            ),
            log=str(paths.log(agent_name(node))),
            env=ONE_THREAD,
            final_codes=AGENT_FINAL,
        )
        for node in nodes
    )
    if options.job == NCCL:
        return (*agents, *(nccl_rank(paths, manifest, nodes, rank, credentials) for rank in range(len(nodes))))
    return (coordinator, *agents)
