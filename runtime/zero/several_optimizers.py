"""Combine several optimizers in one, such as Muon for matrices and AdamW for the rest.

An engine builds it from the list that `optimizer(params)` returns. To the rest of the runtime it is one optimizer with
the groups of all. Each member keeps its state and settings, and is tested separately for whether it may be sharded or
stepped in pieces (shardc.runtime.zero.optimizer_check).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import ShardcError

State = dict[str, Any]


class OptimizerList(Optimizer):
    """Steps its members one after the other. members: no two of them hold the same parameter.

    returned: by the user's function, the list or dict of them. .param_groups: the members' own groups, the same
    objects. .state: finds a parameter's state in the member that holds it.
    """

    def __init__(self, members: Sequence[Optimizer], returned: Any) -> None:
        # without Optimizer.__init__, which would make new groups
        self.members, self.returned = tuple(members), returned
        # without parameters on this rank; they still count their steps
        self._empty = [m for m in members if not _has_params(m)]
        self.read_groups()

    def read_groups(self) -> None:
        """Read the members' current groups and states."""
        self.param_groups = [group for m in self.members for group in m.param_groups]
        self.defaults = {k: v for m in self.members for k, v in m.defaults.items()}
        self.state = _States(self.members)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the members. closure: not used; it is in the signature of torch's optimizers."""
        for m in self.members:
            if m in self._empty or _has_params(m):  # else only other members' parameters step now
                m.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with the members' groups in a row."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for m in self.members:
            part, start = m.state_dict(), sum(len(g["params"]) for g in groups)
            state |= {n + start: s for n, s in part["state"].items()}
            groups += [{**g, "params": [n + start for n in g["params"]]} for g in part["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned."""
        groups = iter(state_dict["param_groups"])
        for m in self.members:
            part = [next(groups) for _ in m.param_groups]
            numbers = [n for group in part for n in group["params"]]
            m.load_state_dict(
                {"state": {n: s for n, s in state_dict["state"].items() if n in numbers}, "param_groups": part}
            )
        self.read_groups()

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.members))}]"


class _States(MutableMapping[Tensor, State]):
    """{parameter: its state}, of several optimizers. New state goes to the one that holds the parameter."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def __contains__(self, p: object) -> bool:
        return any(p in m.state for m in self._members)

    def __getitem__(self, p: Tensor) -> State:
        for m in self._members:
            if p in m.state:  # test first: torch's defaultdict makes an entry when it is read
                state: State = m.state[p]
                return state
        raise KeyError(p)

    def __setitem__(self, p: Tensor, state: State) -> None:
        home = next(m for m in self._members if any(q is p for group in m.param_groups for q in group["params"]))
        home.state[p] = state

    def __delitem__(self, p: Tensor) -> None:
        del next(m for m in self._members if p in m.state).state[p]

    def __iter__(self) -> Iterator[Tensor]:
        return (p for m in self._members for p in m.state)

    def __len__(self) -> int:
        return sum(len(m.state) for m in self._members)


def _has_params(optimizer: Optimizer) -> bool:
    return any(group["params"] for group in optimizer.param_groups)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of an OptimizerList; else the optimizer itself."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else (optimizer,)


def class_of(optimizer: Optimizer) -> str:
    """Return the class's name, or the names of several."""
    return " + ".join(dict.fromkeys(type(m).__name__ for m in members_of(optimizer)))


def group_classes(optimizer: Optimizer) -> list[str]:
    """Return the name of the class that steps each parameter group."""
    return [type(m).__name__ for m in members_of(optimizer) for _ in m.param_groups]


def as_one(returned: Any) -> Optimizer:
    """Convert the result of the user's function to one optimizer.

    Raises ShardcError for what is neither an optimizer nor a list or dict of them.
    """
    if isinstance(returned, Optimizer):
        return returned
    several = list(returned.values()) if isinstance(returned, dict) else returned
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(m, Optimizer) for m in several):
        kind = f"a {type(returned).__name__}"
        if isinstance(several, (list, tuple)):
            kind += f" of {', '.join(dict.fromkeys(type(m).__name__ for m in several)) or 'nothing'}"
        fix = "return a torch.optim.Optimizer, or a list of them, e.g. [Muon(matrices), AdamW(others)]"
        raise ShardcError(f"optimizer(params) returns {kind}", where="optimizer", fix=fix)
    return OptimizerList(several, returned)


def learning_rates(optimizer: Optimizer | None) -> list[float | None]:
    """Return the learning rate of each group; None if the optimizer computes it (Adafactor with lr=None)."""
    groups = optimizer.param_groups if optimizer is not None else []
    return [float(lr) if (lr := g.get("lr")) is not None else None for g in groups]


def rates_text(values: Iterable[float | None], form: str = "") -> str:
    """Format the different rates, in their order, each once. form: of `format`."""
    return ", ".join("computed by the optimizer" if lr is None else format(lr, form) for lr in dict.fromkeys(values))


#: Settings that name an implementation.
IMPLEMENTATIONS = ("foreach", "fused")
#: The classes that are fused on GPUs. Not their subclasses, which may override `step`.
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def prefer_fused(optimizer: Optimizer) -> None:
    """Set `fused` in groups on a GPU that leave the implementation open and have no state yet.

    The user leaves it open by `foreach=None, fused=None`. A fused kernel reads and writes every element once; torch's
    own choice on a GPU is foreach, which makes temporaries as large as all parameters. (On a CPU it is one parameter
    after the other.) Fused kernels round the last digits differently. A checkpoint does not record which one ran.
    """
    for member in members_of(optimizer):
        for group in member.param_groups:
            if type(member) in _FUSED and _open(group) and not any(p in member.state for p in group["params"]):
                group["fused"] = True


def _open(group: dict[str, object]) -> bool:
    """Return whether the user left the implementation open, and the fused one supports the group."""
    params = group["params"]
    assert isinstance(params, list)
    return (
        all(group.get(name, False) is None for name in IMPLEMENTATIONS)
        and not group.get("differentiable")
        and not group.get("capturable")
        and isinstance(group.get("lr"), float)
        and all(p.is_floating_point() for p in params)
    )
