"""Which of torch's ops shardc knows: every op and module of torch's own test database, captured in a small model.
Prints what it does not know.

    .venv/bin/python -m pip install expecttest && .venv/bin/python tests/bench/ops.py      # some minutes; docs/rules.md has what it said

Of each op up to four of the database's sample calls are tried, as a model's forward whose operands need gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import shardc

SAMPLES = 4


class Calls(nn.Module):
    """Calls a function on constants and the batch's tensors; floating ones are multiplied by a parameter, unless it is
    a loss.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.one = function, nn.Parameter(torch.ones(()))
        self.given, self.form = pytree.tree_flatten((args, kwargs))
        self.plain = "Loss" in type(function).__name__

    def batch(self) -> dict[str, Tensor]:
        tensors = {f"x{i}": x.detach().clone() for i, x in enumerate(self.given) if isinstance(x, Tensor)}
        return {**tensors, "unused": torch.ones(2)}

    def forward(self, unused: Tensor, **tensors: Tensor) -> Tensor:
        leaves = list(self.given)
        for name, x in tensors.items():
            real = (x.is_floating_point() or x.is_complex()) and not self.plain
            leaves[int(name[1:])] = x * self.one.to(x.dtype) if real else x
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        total = self.one + unused.sum()
        for y in pytree.tree_leaves(self.function(*args, **kwargs)):
            if isinstance(y, Tensor):
                total = total + (torch.view_as_real(y.resolve_conj()) if y.is_complex() else y).float().sum()
        return total


def calls() -> Iterator[tuple[str, Calls]]:
    for info in op_db:
        if torch.float32 in info.dtypes:
            samples = list(info.sample_inputs("cpu", torch.float32))
            for s in samples[:: max(1, len(samples) // (SAMPLES - 1))]:
                yield info.name, Calls(info.op, (s.input, *s.args), s.kwargs)
    for info in module_db:
        inputs = info.module_inputs_func(info, "cpu", torch.float32, True, True)
        for s in inputs[:: max(1, len(inputs) // (SAMPLES - 1))]:
            if s.forward_input is not None:
                module = info.module_cls(*s.constructor_input.args, **s.constructor_input.kwargs)
                yield info.name, Calls(module.train(), s.forward_input.args, s.forward_input.kwargs)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    by_problem: dict[str, set[str]] = {}
    count: set[str] = set()
    for name, model in calls():
        count.add(name)
        try:
            rows = shardc.coverage(model, model.batch()).rows
            problems = [f"{r.how}: {r.op}" for r in rows if r.how in ("no rule", "refused")]
        except shardc.ShardcError as e:
            problems = [e.errors[0].what.partition(" (")[0]]
        except Exception as e:  # what is no message of shardc's is what this looks for
            problems = [f"raises {type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}"]
        for p in problems:
            by_problem.setdefault(p, set()).add(name)
    print(f"{len(count)} ops and modules, {len(count) - len(set().union(*by_problem.values()))} without a finding")
    for problem, names in sorted(by_problem.items()):
        print(f"{problem}: {' '.join(sorted(names))}")


if __name__ == "__main__":
    main()
