"""Define the parameters, buffers and inputs that a program's graphs take, and buckets of parameters.

Ranks store parameters and buffers under the model's names; a graph takes them by the names of its placeholders:

    model's state_dict                 program.params                                        placeholder of the graphs
    "up.weight"      [256, 64]         Param("up_weight", fqn="up.weight", ...)              up_weight
    "emb", "head"    one tied tensor   Param("emb", fqn="emb", aliases=("head",))            emb
    "e.0.w", "e.1.w" two experts       Param("e_w", fqn="e.*.w", members=("e.0.w", ...))     e_w, a stack [2, ...]

Gradients are reduced in flat buffers (shardc.passes.gradient_buckets makes them, shardc.runtime.zero holds them):

    bucket 0: all_reduce over dp          [ down.weight | down.bias | up.weight | up.bias ]   as backward finishes them
    the same at ZeRO, shard="dp", 2 ranks [ rank 0's part          | rank 1's part        ]   cut across parameters
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import torch
from pydantic import AfterValidator, Field

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import Layout, Shard
from shardc.ir.similar_names import did_you_mean


def _examples(names: list[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


class UnknownParameterError(ShardcError, KeyError):
    """A name that no parameter of the model has."""

    @classmethod
    def of(cls, name: str, known: Iterable[str], where: str) -> UnknownParameterError:
        """Build the error for a name, with the nearest known one. where: the call that failed."""
        names = list(known)
        fix = did_you_mean(name, names, f"names are the model's, such as {_examples(names)}")
        return cls(f"the model has no parameter {name!r}", where=where, fix=fix)


class UnknownNameError(ShardcError, AttributeError):
    """A name that a module does not have; an AttributeError, as nn.Module raises it."""


@contextmanager
def named_nearest(call: str, kind: str, name: str, known: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Replace an AttributeError by UnknownNameError with the nearest name. call: the failing method."""
    try:
        yield
    except UnknownNameError:
        raise  # get_parameter calls get_submodule
    except AttributeError:
        names = [n for n in known() if n]
        fix = did_you_mean(name, names, f"there are {_examples(names)}" if names else f"it has no {kind}")
        fault = f"the module has no {kind} {name!r}"
        raise UnknownNameError(fault, where=f"module.{call}({name!r})", fix=fix) from None


def _name(text: str) -> str:
    """Check a placeholder's name: other names of programs are their own. Raises ValueError if it is invalid."""
    taken = keyword.iskeyword(text) or text in ("mesh", "rng", "ops", "aten", "torch") or "__" in text[:2]
    if not text.isascii() or not text.isidentifier() or taken:
        raise ValueError(f"{text[:40]!r} cannot be a name in a program")
    return text


#: The name of a placeholder. A compiled folder may come from anybody: bounds of a field are checked when it is read.
Name = Annotated[str, AfterValidator(_name)]
_Stored = TypeVar("_Stored", bound="Stored")


def whole_name(part: str) -> str:
    """Return the name of the weight that a stored tensor is or belongs to.

    It is `q_proj.weight` for `q_proj.weight:qdata`, a part of a quantised weight (shardc.runtime.state.quantized).
    """
    return part.partition(":")[0]


class Stored:
    """Base of parameters and buffers: names in the model's state_dict.

    A parameter may be a stack of several of the model's, [number, ...]: then these are its `members`, in order.
    """

    fqn: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    members: tuple[str, ...]

    def changed(self: _Stored, changes: Mapping[str, object]) -> _Stored:
        """Return `dataclasses.replace(self, **changes)` in a fifth of the time: passes change hundreds."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, **changes)
        return new

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the model."""
        return self.members or (self.fqn, *self.aliases)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of the tensor of each name."""
        return dict.fromkeys(self.names, self.shape[1:] if self.members else self.shape)

    def by_name(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the global tensor by name: under all names if it is tied; for a stack, a view per member."""
        return dict(zip(self.members, whole, strict=True)) if self.members else dict.fromkeys(self.names, whole)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the global tensor from tensors by name. Raises KeyError if none of its names is there."""
        if self.members:
            return torch.stack([tensors[n] for n in self.members])
        name = next((n for n in self.names if n in tensors), self.fqn)
        return tensors[name]


@dataclass(frozen=True)
class Param(Stored):
    """A trainable or frozen parameter. Tied parameters are one Param with several names.

    name: its placeholder in the graphs. fqn: the first of its names in the model; aliases: the others.
    members: of a stack of several of the model's parameters: their names, in order; fqn is then a pattern of them.
    shape, dtype: global. layout: how it is stored. reduce: axes over which its gradient is summed.
    order: position in which backward finishes its gradient (0 = first). bucket: index of its bucket, -1 = none.
    stages: of a pipeline: those that use it, whose ranks hold it. frozen: the spec says that it is not trained.
    added: an optional feature added it to the model's.
    """

    name: Name
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    layout: Layout = Layout()
    reduce: tuple[str, ...] = ()
    order: Annotated[int, Field(ge=-1, lt=1 << 62)] = 0
    bucket: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    stages: tuple[int, ...] = ()
    members: tuple[str, ...] = ()
    frozen: bool = False
    added: bool = False

    def __repr__(self) -> str:
        return f"<Param {self.fqn} {self.value}>"

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, self.requires_grad, self.layout)


@dataclass(frozen=True)
class Buffer(Stored):
    """A buffer (running statistics, masks) or a constant tensor of the graph.

    updated: the step computes its new value; adds: each microbatch computes a summand. persistent: it is in the
    state_dict.
    constant: the tensor itself, for constants that capture lifted out of the code (they have no name in the model).
    stages: of a pipeline: those that use it, whose ranks hold it. cache: keys or values that a generating program keeps
    from token to token (shardc.features.generation); the model does not have it.
    """

    name: Name
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    layout: Layout = Layout()
    updated: bool = False
    adds: bool = False
    persistent: bool = True
    constant: torch.Tensor | None = field(default=None, compare=False)
    stages: tuple[int, ...] = ()
    members: tuple[str, ...] = ()  # none: buffers are not stacked
    cache: bool = False

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, False, self.layout)


@dataclass(frozen=True)
class Choice:
    """What a given choice is (shardc.features.choices). module: of the model, that makes it.

    shape: of the model's own value; the input's may have rows and tokens as two dims. rows, tokens: these dims of the
    input, None: it has none. below: its numbers are 0 .. below - 1; 0: any. distinct: its numbers differ along this
    dim; None: they may be equal.
    """

    module: str
    shape: tuple[int, ...]
    rows: int | None = None
    tokens: int | None = None
    below: int = 0
    distinct: int | None = None


@dataclass(frozen=True)
class Input:
    """One tensor of the batch. path: its place there, such as (0, "mask"); () = the batch itself.

    microbatch: how a rank's part is cut into the step's microbatches; None = each microbatch gets all of it. A batch is
    a dict (keyword arguments), tuple or tensor, possibly nested; leaves that are not tensors become constants.
    choice: of a choice that the model would make itself, and that is given.
    """

    name: Name
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = Layout()
    microbatch: Shard | None = None
    choice: Choice | None = None

    def __repr__(self) -> str:
        return f"<Input {self.name} {self.value}>"

    def local_shape(self, mesh: Mesh, microbatches: int) -> tuple[int, ...]:
        """Return the shape of a rank's part in one microbatch."""
        shape, cut = list(self.value.local_shape(mesh)), self.microbatch
        if cut is not None:
            padded = bool(
                self.layout.shards(cut.dim)
            )  # by the axes that split the batch: all of a dim have the same padding
            shape[cut.dim] = (shape[cut.dim] if padded else cut.padded(shape[cut.dim])) // microbatches
        return tuple(shape)

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, False, self.layout)


@dataclass(frozen=True)
class Rounded:
    """How a parameter is rounded: format and granule as in `fp8_round`.

    axes: over which granules are split, besides the bucket's axis.
    """

    format: Annotated[str, Field(pattern="^(e4m3|e5m2)$")]
    granule: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Parameters in one flat buffer, whose gradients are reduced together.

    axes: over which gradients are summed; () = no sum is needed, or there are no gradients. dtype: of the sums.
    params: names in the order in which backward finishes them; local parts of one dtype.
    shard: the data axis over which the flat buffer is cut into one part per rank; "" = it is not cut.
    zero: what each rank keeps only its part of: 1 the optimizer's state, 2 gradients too, 3 parameters too (Rajbhandari
    et al. 2020, "ZeRO"); 0 = nothing.
    compute: dtype in which the whole parameters are held or gathered, if all ops use another one than the stored one;
    None = the stored one.
    keep: at zero 3, gathered parameters are kept, and gradients are not summed, until the last backward of a step.
    rounded: at zero 3, of each parameter, if all ops use only its `fp8_round`: it is rounded before the gather, which
    sends 8 bits. () = gathered as `compute` says.
    stages: of a pipeline: those that use its parameters. late: stages of other ranks use them too; the sum starts after
    all backwards, as ranks finish theirs at different times.
    """

    axes: tuple[str, ...]
    dtype: torch.dtype
    params: tuple[str, ...]
    shard: str = ""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    compute: torch.dtype | None = None
    stages: tuple[int, ...] = (0,)
    late: bool = False
    keep: bool = False
    rounded: tuple[Rounded, ...] = ()

    @property
    def each(self) -> bool:
        """Whether gradients are summed in every backward, so that none are kept whole; otherwise once a step."""
        return self.zero == 2 or (self.zero == 3 and not self.keep)
