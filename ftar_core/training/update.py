"""What a committed step changes, and how: models, optimizers, schedulers, a gradient scaler.

`Update` is the one function of a step that is run again by a replica that catches up. So whatever decides in it must
be the same everywhere: reduced gradients, registered state, and who contributed (`contributors`), which travels with
each step.

A gradient scaler: that gradients overflowed is not decided here, by each replica for itself, but by the commit, for
all: nobody updates, and `skipped` lowers the scale on every replica alike. In an update that runs, gradients are
finite, on all ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Union

import torch
from torch import nn

from ftar_core.errors import SettingsError
from ftar_core.training.clipping import clip_grad_norm_
from ftar_core.training.state import Stateful, state_digest

T = TypeVar("T")
Many = Union[T, Sequence[T], Mapping[str, T]]  # noqa: UP007 (Python 3.10's mypy knows no other generic alias)


class Update:
    """`skipped` runs where gradients were not finite somewhere. `lr_scale` of the share of `replicas` that contributed
    is a factor to every learning rate, for this update only. Raises SettingsError."""

    def __init__(
        self,
        *,
        models: object,
        optimizers: object,
        schedulers: object,
        scaler: torch.amp.GradScaler | None,
        update: Callable[[], None] | None,
        skipped: Callable[[], None] | None,
        max_norm: float | None,
        lr_scale: Callable[[float], float] | None,
        replicas: int,
    ) -> None:
        self.optimizers: dict[str, torch.optim.Optimizer] = _named(optimizers, torch.optim.Optimizer, "optimizer")
        self.schedulers: dict[str, Any] = {} if schedulers is None else _named(schedulers, object, "scheduler")
        self.model = _one(_named(models, nn.Module, "model"))
        self.scaler = scaler
        self.contributors: tuple[str, ...] = ()  # of the last step
        self._update = update if update is not None else self._default
        self._skipped = skipped if skipped is not None else self._lower_scale
        self._max_norm = max_norm
        self._lr_scale, self._replicas = lr_scale, replicas
        self._factor = 1.0
        self._kept: list[tuple[dict[str, Any], object]] = []
        if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
            raise SettingsError(f"max_norm={max_norm}: a finite number above 0 is expected")
        if max_norm is not None and update is not None:
            raise SettingsError("max_norm is for the default update", hint="clip in your update: clip_grad_norm_")
        if lr_scale is not None:
            if replicas < 1:
                raise SettingsError(
                    "lr_scale needs to know how many replicas are all", hint="give replicas=N, as the coordinator's"
                )
            for optimizer in self.optimizers.values():
                optimizer.register_step_pre_hook(self._scale_rates)
                optimizer.register_step_post_hook(self._restore_rates)
        if scaler is not None and scaler.is_enabled():
            first = next(iter(self.model.parameters()), torch.zeros(()))
            # Its scale exists from the first use on, which a replica that catches up has only after its first updates.
            scaler.scale(torch.zeros((), device=first.device))

    def parts(self) -> dict[str, Stateful]:
        """What travels, by name."""
        found: dict[str, Stateful] = {"model": self.model}
        found |= {_part("optimizer", name): optimizer for name, optimizer in self.optimizers.items()}
        found |= {_part("scheduler", name): scheduler for name, scheduler in self.schedulers.items()}
        if self.scaler is not None:
            found["scaler"] = self.scaler
        return found

    def parameter_names(self) -> dict[str, tuple[str, ...]]:
        """Of each optimizer, by its part's name: its parameters in the order of its state_dict(), as the model names
        them."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found: dict[str, tuple[str, ...]] = {}
        for part, optimizer in self.optimizers.items():
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            named = tuple(known.get(id(parameter), str(number)) for number, parameter in enumerate(own))
            found[_part("optimizer", part)] = named
        return found

    def run(self, contributors: tuple[str, ...]) -> None:
        """With reduced gradients in `.grad`."""
        self.contributors = contributors
        if self._lr_scale is not None:
            share = len(contributors) / self._replicas
            self._factor = float(self._lr_scale(share))
            if not (math.isfinite(self._factor) and self._factor >= 0):
                raise ValueError(f"lr_scale({share:g}) is {self._factor}: a finite number of at least 0 is expected")
        self._update()

    def skip(self, contributors: tuple[str, ...]) -> None:
        self.contributors = contributors
        self._skipped()

    def _default(self) -> None:
        scaler = self.scaler
        for optimizer in self.optimizers.values():
            if scaler is not None:
                scaler.unscale_(optimizer)
        if self._max_norm is not None:
            clip_grad_norm_(self.model.parameters(), self._max_norm)
        for optimizer in self.optimizers.values():
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        for scheduler in self.schedulers.values():
            scheduler.step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _lower_scale(self) -> None:
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        state = scaler.state_dict()  # as torch._amp_update_scale_ does after an overflow
        scaler.load_state_dict({**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0})

    def _scale_rates(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._kept = [(group, group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self._factor

    def _restore_rates(self, *_: object) -> None:
        """Schedulers derive the next rate from this one."""
        for group, rate in self._kept:
            group["lr"] = rate
        self._kept = []

    # --- for digests

    def state_of(self, parameter: torch.Tensor) -> Iterator[tuple[str, object]]:
        """What optimizers keep for a parameter, in an order of its own."""
        for optimizer in self.optimizers.values():
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                yield str(key), state[key]

    def digest(self) -> str:
        """SHA-256 (hex) over the state of all optimizers."""
        digests = [state_digest(optimizer) for optimizer in self.optimizers.values()]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _named(given: object, kind: type[T], what: str) -> dict[str, T]:
    """By name; the name of a single one is empty."""
    if isinstance(given, kind) and not (kind is object and isinstance(given, list | tuple | Mapping)):
        return {"": given}
    if isinstance(given, Mapping):
        found = {str(name): one for name, one in given.items()}
    elif isinstance(given, list | tuple):
        found = {str(number): one for number, one in enumerate(given)}
    else:
        raise SettingsError(f"a {type(given).__name__} is no {what}, nor a list or mapping of them")
    wrong = next((f"{name}: a {type(one).__name__}" for name, one in found.items() if not isinstance(one, kind)), None)
    if wrong is not None or not found:
        raise SettingsError(f"{what} {wrong or 'list'} is not what is expected", hint=f"give one {what}, or several")
    return found


def _one(models: dict[str, nn.Module]) -> nn.Module:
    """All of them as one module; they stay what they are."""
    if list(models) == [""]:
        return models[""]
    return nn.ModuleDict(models)


def _part(kind: str, name: str) -> str:
    return f"{kind}.{name}" if name else kind
