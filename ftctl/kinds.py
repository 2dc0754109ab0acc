"""From a fault's published spec (agents/api/faultspecs.py) to the command that injects it, and back from what is typed.

Typer reads options from a signature, so the signature is made here, from data: the options of the kind of target, those
of the kind itself, and those that every fault has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import typer

from agents.api.blast import OVERRIDES
from agents.api.faultspecs import Param, ParamValue, Spec

NodeOption = Annotated[str, typer.Option("--node", metavar="NODES", help="Where: node1, or several as node[0-3].")]
AnyNodeOption = Annotated[
    str | None, typer.Option("--node", metavar="NODES", help="Only there. Without it: wherever its target is.")
]
NicOption = Annotated[str | None, typer.Option("--nic", metavar="NAME", help="The network device, a rail.")]
RailOption = Annotated[int | None, typer.Option("--rail", metavar="K", help="The K-th rail of the node, from 0.")]
AllowLastRailOption = Annotated[
    bool,
    typer.Option("--allow-last-rail", help="Also when no other healthy rail is left on the node; takes a --reason."),
]
ReplicaOption = Annotated[str, typer.Option("--replica", metavar="R", help="Whose processes: r1.")]
AnyReplicaOption = Annotated[str | None, typer.Option("--replica", metavar="R", help="Whose processes: r1.")]
RankOption = Annotated[
    int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank of it. Without it: all of them.")
]
AllowLastReplicaOption = Annotated[
    bool,
    typer.Option(
        "--allow-last-replica", help="Also when fewer replicas than the job needs would be left; takes a --reason."
    ),
]
DurationOption = Annotated[
    str, typer.Option("--duration", metavar="TIME", help="When it takes itself back: 500ms, 20s, 2m. Agents cap it.")
]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown wherever the fault is shown.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="RULE",
        help=f"A limit not to hold to ({', '.join(OVERRIDES)}); takes a --reason. May be repeated.",
    ),
]


class OnPartial(str, Enum):
    REVERT = "revert"
    KEEP = "keep"


OnPartialOption = Annotated[
    OnPartial,
    typer.Option(
        "--on-partial",
        help="When some nodes have the fault and others refuse it: take it back there, or keep and name it.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Let the agents make all checks, and inject nothing.")]
ParamOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param", metavar="NAME=VALUE", help="A parameter of this kind of fault; may be given several times."
    ),
]

Options = dict[str, tuple[Any, Any]]  # name -> (annotation, default)
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Wish:
    """What was typed. `params` by their names in the spec; `raw` are those of a kind that only the agents know."""

    node: str | None = None
    nic: str | None = None
    rail: int | None = None
    replica: str | None = None
    rank: int | None = None
    allow_last_rail: bool = False
    allow_last_replica: bool = False
    duration: str | None = None
    reason: str = ""
    override: tuple[str, ...] = ()
    on_partial: OnPartial = OnPartial.REVERT
    dry_run: bool = False
    params: dict[str, ParamValue] = field(default_factory=dict)
    raw: tuple[str, ...] = ()


def command_of(spec: Spec, act: Callable[[Any, Spec, Wish], Any]) -> Callable[..., Any]:
    """`command(cluster, **options)` for this kind of fault, with the signature that shows its options."""

    def command(cluster: Any, **given: Any) -> Any:
        params = {param.name: _plain(given.pop(param.name)) for param in spec.params}
        override = tuple(given.pop("override") or ())
        return act(cluster, spec, Wish(params=params, override=override, **given))

    options = {
        **_target_options(spec),
        **{param.name: _param_option(param) for param in spec.params},
        **_common_options(spec),
    }
    return _with_signature(command, spec.kind, described(spec), options)


def command_of_unknown(kind: str, act: Callable[[Any, str, Wish], Any]) -> Callable[..., Any]:
    """The same for a kind that only the agents know: every kind of target, and parameters by name."""

    def command(cluster: Any, *, param: list[str] | None, **given: Any) -> Any:
        override = tuple(given.pop("override") or ())
        return act(cluster, kind, Wish(raw=tuple(param or ()), override=override, **given))

    options: Options = {
        "node": (AnyNodeOption, None),
        "nic": (NicOption, None),
        "rail": (RailOption, None),
        "replica": (AnyReplicaOption, None),
        "rank": (RankOption, None),
        "param": (ParamOption, None),
        "duration": (DurationOption, "60s"),
        "reason": (ReasonOption, ""),
        "override": (OverrideOption, None),
        "on_partial": (OnPartialOption, OnPartial.REVERT),
        "dry_run": (DryRunOption, False),
        "allow_last_rail": (AllowLastRailOption, False),
        "allow_last_replica": (AllowLastReplicaOption, False),
    }
    text = "A kind of fault that this ftctl does not know; the agents are asked for it (ftctl inject --list)."
    return _with_signature(command, kind, text, options)


def described(spec: Spec) -> str:
    """Its summary as a sentence, and what else must be known before it is used."""
    return spec.summary + "." + (" It cannot be taken back." if spec.irreversible else "")


def _target_options(spec: Spec) -> Options:
    if spec.target == "nic":
        return {
            "node": (NodeOption, REQUIRED),
            "nic": (NicOption, None),
            "rail": (RailOption, None),
            **({"allow_last_rail": (AllowLastRailOption, False)} if spec.takes_out else {}),
        }
    guard: Options = {"allow_last_replica": (AllowLastReplicaOption, False)} if spec.takes_out else {}
    if spec.target == "replica":
        return {
            "replica": (ReplicaOption, REQUIRED),
            "rank": (RankOption, None),
            "node": (AnyNodeOption, None),
            **guard,
        }
    if spec.target == "coordinator":
        return {"node": (AnyNodeOption, None), **guard}
    return {"node": (NodeOption, REQUIRED), **guard}


def _common_options(spec: Spec) -> Options:
    duration: Options = {} if spec.irreversible else {"duration": (DurationOption, "60s")}
    return {
        **duration,
        "reason": (ReasonOption, ""),
        "override": (OverrideOption, None),
        "on_partial": (OnPartialOption, OnPartial.REVERT),
        "dry_run": (DryRunOption, False),
    }


def _param_option(param: Param) -> tuple[Any, Any]:
    default: Any = REQUIRED if param.default is None else param.default
    if param.type == "bool":
        return Annotated[bool, typer.Option(f"{param.option}/--no-{param.option[2:]}", help=f"{param.help}.")], default
    if param.choices:
        kind = Enum(param.name, {choice: choice for choice in param.choices}, type=str)  # type: ignore[misc]
        default = default if default is REQUIRED else kind(default)
        return Annotated[kind, typer.Option(param.option, help=f"{param.help}.")], default
    metavar = (param.unit or {"int": "N", "float": "X", "addresses": "NODES"}.get(param.type, "TEXT")).upper()
    if param.type in ("str", "addresses"):
        return Annotated[str, typer.Option(param.option, metavar=metavar, help=f"{param.help}.")], default
    number: Any = int if param.type == "int" else float
    least, most = (None if limit is None else number(limit) for limit in (param.minimum, param.maximum))
    option = typer.Option(param.option, metavar=metavar, help=f"{param.help}{_limits(param)}.", min=least, max=most)
    return Annotated[number, option], default


def _limits(param: Param) -> str:
    if param.minimum is not None and param.maximum is not None:
        return f" ({param.minimum:g} to {param.maximum:g})"
    if param.minimum is not None:
        return f" (at least {param.minimum:g})"
    return "" if param.maximum is None else f" (at most {param.maximum:g})"


def _plain(value: Any) -> ParamValue:
    plain: ParamValue = value.value if isinstance(value, Enum) else value
    return plain


def _with_signature(command: Callable[..., Any], kind: str, text: str, options: Options) -> Callable[..., Any]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]
    first = inspect.Parameter("cluster", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    command.__signature__ = inspect.Signature([first, *shown])  # type: ignore[attr-defined]
    command.__annotations__ = {name: annotation for name, (annotation, _default) in options.items()}
    command.__name__, command.__doc__ = kind, text
    return command
