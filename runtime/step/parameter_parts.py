"""What a parameter cannot say of itself where this rank has a part of it: `nn.init.normal_(p)`, `p.norm()`.

Drawing: every rank would draw the first numbers of its own generator for its own part: where all are seeded alike, each
slice of the weight gets the same numbers, and a fan is that of a slice. A norm, a mean or a maximum is that of the
part, and a penalty of it has another gradient than on one device; a sum has not, and neither has what is along dims of
which the rank has all. Nothing of that can be seen later; so it is refused where it happens.

Torch has no hook there that leaves parameters plain (a subclass would cost optimizers their fused forms), but finds its
methods by name: the parameter object answers to these. Functions (`torch.norm(p)`) do not ask it, unless they use such
a method: torch.nn.utils.parameters_to_vector and its reverse are known by who calls `view` and `numel`.

torch.distributed.checkpoint takes a plain tensor for the whole one, alike on all ranks, of which it writes one. It asks
a tensor first how it is to be written: parts refuse, as parameters, in a state_dict and in an optimizer's.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.step import partial_grad_guard
from shardc.runtime.step.clip_grad_norm import norm_axes

DRAWS = tuple(
    f"{name}_"
    for name in ["bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"]
)
REDUCTIONS = (
    *("norm", "mean", "nanmean", "std", "var", "prod", "logsumexp", "softmax", "cumprod"),
    *("amax", "amin", "max", "min", "argmax", "argmin", "median", "nanmedian", "quantile", "dist"),
)


class _Draw:
    """One of these methods, of one parameter."""

    def __init__(self, fqn: str, method: str) -> None:
        self.fqn, self.method = fqn, method

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ShardcError(
            f"{self.method} would draw for this rank's part alone: other ranks draw the same numbers for theirs, or"
            " others than one device",
            where=self.fqn,
            fix="fill it where the model is built (given the function that builds it, each rank computes its part);"
            " or p.copy_() this rank's part of what you draw, under torch.no_grad()",
        )


class _Reduction:
    """One of these. dims: those of which this rank has some only; None: it has a stretch of the flattened parameter."""

    def __init__(self, p: nn.Parameter, fqn: str, method: str, dims: Collection[int] | None) -> None:
        self.p, self.fqn, self.method, self.dims = weakref.ref(p), fqn, method, dims

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        p = self.p()
        assert p is not None
        if partial_grad_guard.along_whole(self.method, partial_grad_guard.part(p, self.dims), args, kwargs):
            return getattr(Tensor, self.method)(p, *args, **kwargs)
        raise ShardcError(
            f"p.{self.method}() would be that of the part which this rank has, another on every rank; a penalty of it"
            " has another gradient than on one device",
            where=self.fqn,
            fix="compute it in the model's forward or in the loss function (shardc.compile(..., loss=...)), where the"
            " parameter is whole; or of the whole state: full_state_dict();"
            f" p.detach().{self.method}() is this rank's part, which sums over ranks can make whole",
        )


class _InVector:
    """view or numel: torch's functions ask for them that put all parameters into one vector, or take them out of it."""

    def __init__(self, p: nn.Parameter, fqn: str, method: str) -> None:
        self.p, self.fqn, self.method = weakref.ref(p), fqn, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == "torch.nn.utils.convert_parameters":
            raise ShardcError(
                "this rank has a part of the parameter: the vector would be another one on every rank, and none the"
                " whole model's",
                where=f"torch.nn.utils.{caller.f_code.co_name}: {self.fqn}",
                fix="take the whole weights, model.load_state_dict(module.full_state_dict()) on all ranks, and the"
                " plain model's parameters for the vector; program.module(model) makes a module of them again",
            )
        return getattr(Tensor, self.method)(self.p(), *args, **kwargs)


def refuse_checkpoint(x: Tensor, fqn: str) -> None:
    """Let torch.distributed.checkpoint not take this part of a tensor for the whole."""
    x.__create_write_items__ = functools.partial(_write_items, fqn)  # type: ignore[attr-defined]
    x.__create_chunk_list__ = functools.partial(_write_items, fqn)  # type: ignore[attr-defined]
    x.__getstate__ = _no_state  # type: ignore[method-assign]


def _write_items(fqn: str, *_: Any) -> NoReturn:
    raise ShardcError(
        "this rank has a part of it, which torch.distributed.checkpoint would take for the whole, alike on all ranks",
        where=fqn,
        fix="save by module.save(folder, optimizer) or engine.save(folder), which any mesh loads; or give it the whole"
        " weights, full_state_dict()",
    )


def watch(program: Program, params: Mapping[str, nn.Parameter], runs: Collection[str]) -> None:
    """Let parameters of which ranks have parts refuse what would be of the part. params: by name in the program; runs:
    those that are stretches of the flattened parameter (ZeRO).
    """
    for x in program.params:
        if x.name not in params or not (x.name in runs or norm_axes(program, x.name)):
            continue
        p, dims = params[x.name], frozenset(s.dim for a, s in x.layout.shards() if program.mesh.size(a) > 1)
        for method in DRAWS:  # of a pipeline's stages too, which draw one after the other on one device
            setattr(p, method, _Draw(x.fqn, method))
        for method in REDUCTIONS if dims or x.name in runs else ():
            setattr(p, method, _Reduction(p, x.fqn, method, None if x.name in runs else dims))
        if dims or x.name in runs:
            p.view, p.numel = _InVector(p, x.fqn, "view"), _InVector(p, x.fqn, "numel")  # type: ignore[method-assign]
            refuse_checkpoint(p, x.fqn)
        p.__getstate__ = _no_state  # type: ignore[method-assign]  # what torch.save writes is plain


def _no_state() -> None:
    """Nothing beside the tensor."""


class ByName(dict[str, nn.Parameter]):
    """A rank's parameters by the model's names, each once; asked for, also by other names of a tied one, and by the
    program's placeholder names.
    """

    def __init__(self, program: Program, owned: Mapping[str, nn.Parameter]) -> None:
        here = [p for p in program.params if p.name in owned]
        super().__init__((p.fqn, owned[p.name]) for p in here)
        self._others = {name: owned[p.name] for p in here for name in (p.name, *p.aliases)}
        self._elsewhere = {n: p.stages for p in program.params for n in (p.fqn, *p.aliases) if p.stages}

    def __missing__(self, name: str) -> nn.Parameter:
        if name not in self._others and name in self._elsewhere:
            where = " and ".join(map(str, self._elsewhere[name]))
            raise KeyError(f"{name}: ranks of stage {where} have it, this one does not; ask `in` first, as loops do")
        return self._others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def __setitem__(self, name: str, value: object) -> None:
        raise ShardcError(
            "an engine keeps the parameters that it was made with",
            where=f"engine.params[{name!r}] = ...",
            fix="write into it: with torch.no_grad(): engine.params[name].copy_(value)",
        )

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self._others.get(name, default))
