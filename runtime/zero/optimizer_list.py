"""Several optimizers as one, such as Muon for matrices and AdamW for all else: what an engine makes of a list.

To the rest of the runtime it is an optimizer with the groups of all of them, in a row. Each keeps its own state and its
own settings, and whether it may be sharded or stepped in pieces is tried for each by itself
(shardc.runtime.zero.optimizer_check).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import ShardcError

State = dict[str, Any]


class OptimizerList(Optimizer):
    """Steps its members one after the other. members: no two of them hold the same parameter. returned: by the
    user's function, the list or dict of them.

    .param_groups: the members' own groups, the same objects. .state: looks a parameter up with the member that has it.
    """

    def __init__(self, members: Sequence[Optimizer], returned: Any) -> None:
        # without Optimizer.__init__: that would make groups of its own
        self.members, self.returned = tuple(members), returned
        self._empty = [m for m in members if not _holds(m)]  # on this rank; they count their steps all the same
        self.read_groups()

    def read_groups(self) -> None:
        """Take the members' groups and states as they are now."""
        self.param_groups = [group for m in self.members for group in m.param_groups]
        self.defaults = {k: v for m in self.members for k, v in m.defaults.items()}
        self.state = _States(self.members)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """closure: not used; it is in the signature of torch's optimizers."""
        for m in self.members:
            if m in self._empty or _holds(m):  # else this is a step of others' parameters
                m.step()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the members' groups in a row."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for m in self.members:
            own, start = m.state_dict(), sum(len(g["params"]) for g in groups)
            state |= {n + start: s for n, s in own["state"].items()}
            groups += [{**g, "params": [n + start for n in g["params"]]} for g in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """state_dict: as `state_dict` gives it."""
        groups = iter(state_dict["param_groups"])
        for m in self.members:
            own = [next(groups) for _ in m.param_groups]
            numbers = [n for group in own for n in group["params"]]
            m.load_state_dict(
                {"state": {n: s for n, s in state_dict["state"].items() if n in numbers}, "param_groups": own}
            )
        self.read_groups()

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.members))}]"


class _States(MutableMapping[Tensor, State]):
    """{parameter: its state}, of several optimizers. What is put in goes to the one that holds the parameter."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def __contains__(self, p: object) -> bool:
        return any(p in m.state for m in self._members)

    def __getitem__(self, p: Tensor) -> State:
        for m in self._members:
            if p in m.state:  # asked first: torch's own makes an entry of what it is asked for
                found: State = m.state[p]
                return found
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


def _holds(optimizer: Optimizer) -> bool:
    return any(group["params"] for group in optimizer.param_groups)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that it consists of: itself, if it is one."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else (optimizer,)


def class_of(optimizer: Optimizer) -> str:
    """The class's name, or the names of several."""
    return " + ".join(dict.fromkeys(type(m).__name__ for m in members_of(optimizer)))


def group_classes(optimizer: Optimizer) -> list[str]:
    """For each parameter group the name of the class that steps it."""
    return [type(m).__name__ for m in members_of(optimizer) for _ in m.param_groups]


def as_one(returned: Any) -> Optimizer:
    """What the user's function returns as one optimizer: itself, or a list's or dict's.

    Raises ShardcError for what is neither an optimizer nor a list of them.
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


def lr_rates(optimizer: Optimizer | None) -> list[float | None]:
    """The learning rate of each parameter group: None where an optimizer has its own (Adafactor with lr=None); []
    without an optimizer.
    """
    groups = optimizer.param_groups if optimizer is not None else []
    return [float(lr) if (lr := g.get("lr")) is not None else None for g in groups]


def rates_text(values: Iterable[float | None], form: str = "") -> str:
    """Different rates, in their order, each once; form: of `format`."""
    return ", ".join("its own" if lr is None else format(lr, form) for lr in dict.fromkeys(values))
