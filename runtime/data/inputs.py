"""Cut one rank's inputs from a user's batch: find them by path, check them, cut them by layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.ir.patterns import match
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.shard_chunks import chunks, widen
from shardc.ir.similar_names import nearest
from shardc.ir.stored import Input
from shardc.ir.type_text import DTYPES
from shardc.optional import registered
from shardc.torch_private import is_traceable_wrapper_subclass

Path = tuple[str | int, ...]
#: Maximal number of a batch's entries that an error names.
SHOWN_NAMES = 12
#: The key of given choices in a batch (shardc.features.choices): {name: tensor}.
CHOICES = "choices"


def with_choices(batch: Any, choices: Mapping[str, Any]) -> Any:
    """Return a batch with choices beside its own entries; None is the key of a batch that is one tensor."""
    inner = entries(batch)
    own = dict(inner) if inner is not None else {None: batch}
    return {**own, CHOICES: {**own.get(CHOICES, {}), **choices}}


def without_choices(batch: Any) -> Any:
    """Return the model's own batch of one with choices."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get(CHOICES), Mapping):
        return batch
    own = {k: x for k, x in batch.items() if k != CHOICES}
    if own.keys() == {None}:
        return own[None]
    return tuple(own.values()) if own and all(isinstance(k, int) for k in own) else own


def entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return (key, value) of a mapping, a named tuple or a sequence, as paths of inputs name them; None of a leaf."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def with_values(nested: Any, values: list[Any]) -> Any:
    """Return a mapping, a named tuple or a sequence of the same form with other values, in the order of `entries`."""
    if isinstance(nested, Mapping):
        return dict(zip(nested, values, strict=True))
    return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)


def leaves(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of everything in a nested batch of mappings and sequences."""
    if (inner := entries(batch)) is None:
        yield path, batch
        return
    for key, value in inner:
        yield from leaves(value, path if key is None else (*path, key))


def prepared(program: Program, batch: Any, choices: Any = None, *, local: bool) -> Any:
    """Return a batch with its choices as the program takes them. choices: those that are given beside it."""
    for prepare in registered("runtime", "prepare"):
        batch = prepare(program, batch, choices, local=local)
    return batch


def mapped(batch: Any, path: Path, leaf: Callable[[Path, Any], Any]) -> Any:
    """Return a nested batch with every leaf replaced by leaf(path, leaf)."""
    if (inner := entries(batch)) is None:
        return leaf(path, batch)
    return with_values(batch, [mapped(x, path if key is None else (*path, key), leaf) for key, x in inner])


def name_of(path: Path) -> str:
    return ".".join(map(str, path)) or "the batch"


def check_real(by_path: Mapping[Path, Any]) -> None:
    """Raise ShardcError for a tensor without numbers."""
    errors = Errors()
    for path, leaf in by_path.items():
        if isinstance(leaf, Tensor) and leaf.is_meta:
            fault = f"{type_name(leaf.dtype, leaf.shape)} is on the device 'meta', so it has no numbers"
            errors.add(fault, where=name_of(path), fix="pass a tensor with data; 'meta' is enough only for compile")
    errors.raise_any()


def check_plain(batch: Any) -> None:
    """Raise ShardcError for a tensor that is not plain, such as a DTensor: this rank has only a part."""
    errors = Errors()
    for path, leaf in leaves(batch):
        if is_traceable_wrapper_subclass(leaf):
            kind = type(leaf).__name__
            fix = "pass the whole tensor, x.full_tensor(); or this rank's part, x.to_local(), with local=True"
            fix = fix if kind == "DTensor" else "pass a torch.Tensor of its numbers"
            errors.add(f"a {kind} is not a plain tensor", where=name_of(path), fix=fix)
    errors.raise_any()


def check_no_gradient(batch: Any) -> None:
    """Raise ShardcError for a tensor computed from other parameters, such as those of an encoder.

    A program computes only its own gradients, so these would silently get none. A leaf may require a gradient: a
    forward that differentiates by its input makes it so.
    """
    errors = Errors()
    for path, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            fault = "it depends on other parameters, which would get no gradient: a program computes gradients only for"
            fault, fix = f"{fault} its own parameters", "detach it, or include the earlier computation in the model"
            errors.add(fault, where=name_of(path), fix=fix)
    errors.raise_any()


def take(program: Program, batch: Any, mesh: Any, *, local: bool) -> list[Tensor]:
    """Return this rank's part of every input, in the program's order, on the mesh's device.

    local: the batch is this rank's part already. Raises ShardcError for every input that is missing, unknown or of
    another shape or dtype, with name, actual and expected type; and for changed numbers and texts that were baked into
    the program.
    """
    parts = _cut(program, batch, mesh.rank, given_local=local, wanted_local=local)
    # programs compute no gradients of inputs
    return [part.detach().to(mesh.device, non_blocking=True).contiguous() for part in parts.values()]


def local(program: Program, batch: Any, rank: int) -> Any:
    """Return a rank's part of a global batch, in the batch's form, for `local=True` and for a module.

    Tensors keep their device. Raises ShardcError as `take` does, and for a program that pads its batch.
    """
    batch = prepared(program, batch, local=False)
    parts = _cut(program, batch, rank, given_local=False, wanted_local=True)
    cut = {x.path: part.contiguous() for x, part in zip(program.inputs, parts.values(), strict=True)}
    return mapped(batch, (), lambda path, leaf: cut.get(path, leaf))


def _cut(program: Program, batch: Any, rank: int, *, given_local: bool, wanted_local: bool) -> dict[str, Tensor]:
    """Return {input: a rank's part}, in the program's order. given_local: the batch is that part already."""
    by_path = dict(leaves(batch))
    _check_form(program, batch, by_path)
    check_real(by_path)
    errors = Errors()
    expected, lacking = {x.path for x in program.inputs}, [x for x in program.inputs if x.path not in by_path]
    for path, leaf in by_path.items():
        if isinstance(leaf, Tensor) and path not in expected:
            if any(path[: len(x.path)] == x.path for x in lacking):
                continue  # an entry of a list where a tensor is expected: reported below
            same_form = (name_of(x.path) for x in lacking if (len(x.shape), x.dtype) == (leaf.ndim, leaf.dtype))
            near = nearest(name_of(path), [name_of(x.path) for x in lacking]) or next(same_form, "")
            fault = f"the program was compiled without this input, {type_name(leaf.dtype, leaf.shape)}"
            fix = f"name it {near!r}" if near else "leave it out, or compile again with a batch that has it"
            errors.add(fault, where=name_of(path), fix=fix)
    for path, then in program.baked:
        now = by_path.get(path)
        if isinstance(now, str) and isinstance(then, str) and now != then and len(path) == 1:  # not for texts in lists
            fault = f"the batch gives {now!r}, but the program was compiled with {then!r} in its place"
            errors.add(fault, where=name_of(path), fix="compile again with a batch that has this value")
        elif isinstance(now, (bool, int, float)) and now != then and then == then:
            fault = f"the batch gives the number {now}, but the program was compiled with {then} there"
            errors.add(fault, where=name_of(path), fix=f"pass it as a tensor, also to compile: torch.tensor({now})")
    parts = {}
    for x in program.inputs:
        if wanted_local and (x.layout.paddings() or (x.microbatch is not None and x.microbatch.padding)):
            fault = f"its size {list(x.shape)} does not divide over ranks: the whole size is unknown from a part"
            fix = "pass the whole batch, without local=True, or make the size divide"
            errors.add(fault, where=name_of(x.path), fix=fix)
            continue
        part = x.layout.local_shape(x.shape, program.mesh)
        want = part if given_local else x.shape
        part = part if wanted_local else x.shape
        leaf = by_path.get(x.path)
        if isinstance(leaf, Tensor) and tuple(leaf.shape) == want and leaf.dtype == x.dtype:
            coords = program.mesh.coords(rank)
            parts[x.name] = leaf if given_local else x.layout.local(leaf, program.mesh, coords, copies=True)
        else:
            fault, fix = _mismatch(x, by_path, want, given_local), _fix(x, by_path, given_local, part)
            errors.add(fault, where=name_of(x.path), fix=fix)
    errors.raise_any()
    for check in registered("runtime", "check_inputs"):
        check(program, parts, rank)
    return parts


def _check_form(program: Program, batch: Any, by_path: Mapping[Path, Any]) -> None:
    """Raise one ShardcError for a batch of another form, such as a tuple for a dict."""
    paths = [x.path for x in program.inputs]
    kinds = {_kind(path) for path in by_path}
    if not kinds or kinds & {_kind(path) for path in paths}:
        return
    form = {
        "key": f"a dict {{{', '.join(dict.fromkeys(str(path[0]) for path in paths if path))}}}",
        "place": f"a tuple of {len({path[:1] for path in paths})}",
        "tensor": "a tensor",
    }[_kind(paths[0])]
    fix = f"pass {form}"
    if _kind(paths[0]) == "key":
        fix += ", which a loader's collate_fn can make: lambda samples: dict(zip(names, default_collate(samples)))"
    got = f"a {type(batch).__name__}" if batch is not None else "None"
    if isinstance(batch, str):  # probably a key of a dict
        got = f"the text {batch!r}"
        fix = "a loop over a dict yields its names: where batches are expected, as in data() and evaluate_all, pass "
        fix += "a list of them, [batch], or a torch Dataset of samples"
    raise ShardcError(f"the batch is {got}, and the program was compiled for {form}", where="batch", fix=fix)


def _kind(path: Path) -> str:
    return "tensor" if not path else "key" if isinstance(path[0], str) else "place"


def batch_dims(program: Program) -> dict[str, int | None]:
    """Return {input: its batch dim, None if it has none}, by the spec's `batch: {dims: ...}`; default 0."""
    patterns = program.spec.batch.dims

    def dim(x: Input) -> int | None:
        if x.choice is not None:
            return x.choice.rows
        name = name_of(x.path) if x.path else x.name
        return next((d for pattern, d in patterns.items() if match(pattern, name)), 0) if x.shape else None

    return {x.name: dim(x) for x in program.inputs}


def part_of(program: Program, rank: int) -> tuple[int, int]:
    """Return (number of this rank's part of a global batch, number of parts), along the inputs' batch dim.

    Ranks with the same rows, such as those of a tensor-parallel group, have the same part. Raises ShardcError if inputs
    are cut differently, and if parts are padded.
    """
    dims, coords = batch_dims(program), program.mesh.coords(rank)
    positions: set[tuple[int, int]] = set()
    for x in program.inputs:
        d = dims[x.name]
        if d is None:
            continue
        cut = Layout(tuple((a, replace(s, dim=0)) for a, s in x.layout.shards(d)))
        part = cut.local(torch.arange(x.shape[d]), program.mesh, coords)
        parts = x.shape[d] // max(len(part), 1)
        index = int(part[0]) // max(len(part), 1)
        whole = len(part) * parts == x.shape[d]
        if x.layout.paddings() or not whole or part.tolist() != list(range(index * len(part), (index + 1) * len(part))):
            fault = f"its {x.shape[d]} rows are not cut into equal parts in order"
            raise ShardcError(fault, where=name_of(x.path), fix="read global batches: each rank cuts its own part")
        positions.add((index, parts))
    if len(positions) > 1:
        fault = f"inputs are cut into {' and '.join(str(parts) for _, parts in sorted(positions))} parts"
        raise ShardcError(fault, where="batch", fix="read global batches: each rank cuts its own part")
    return positions.pop() if positions else (0, 1)


def rows(program: Program) -> int:
    """Return the rows of the global batch, the fewest if inputs differ; 1 if no input has any."""
    dims = batch_dims(program)
    return min((x.shape[d] for x in program.inputs if (d := dims[x.name]) is not None), default=1)


def repeated(program: Program, batch: Any, mesh: Any) -> Any:
    """Return a rank's rows of one microbatch, whole along other dims, once for each: its part of a batch."""
    dims, coords = batch_dims(program), program.mesh.coords(mesh.rank)
    by_path = {x.path: x for x in program.inputs}

    def part(path: Path, leaf: Any) -> Any:
        if path not in by_path or not isinstance(leaf, Tensor) or leaf.dim() != len(by_path[path].shape):
            return leaf
        x, d = by_path[path], dims[by_path[path].name]
        cut = Layout(tuple((a, s) for a, s in x.layout.shards() if s.dim != d))
        leaf = leaf if cut.problem(leaf.shape, program.mesh) else cut.local(leaf, program.mesh, coords)
        return leaf if d is None or x.microbatch is None else torch.cat([leaf] * program.microbatches, d)

    return mapped(batch, (), part)


def microbatches(program: Program, parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut the result of `take` into the step's microbatches."""
    cut: list[list[Tensor]] = [[] for _ in range(program.microbatches)]
    for x, part in zip(program.inputs, parts, strict=True):
        s = x.microbatch
        if s is None:
            pieces = [part] * program.microbatches
        else:
            if s.padding and not x.layout.shards(s.dim):  # else the other axes' shards have padded it
                part = widen(part, s, copies=True)
            pieces = chunks(part, s, program.microbatches)
        for into, piece in zip(cut, pieces, strict=True):
            into.append(piece.contiguous())
    return cut


def type_name(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return a type as text: i64[8, 64]."""
    return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(map(str, shape))}]"


def _describe_nested(at: Path, by_path: Mapping[Path, Any]) -> str:
    """Describe the nested value that a batch has in place of a tensor."""
    inside = [leaf for path, leaf in by_path.items() if path[: len(at)] == at]
    if not isinstance(inside[0], Tensor):
        return "a list or dict of others"
    return f"a list or dict of {len(inside)} tensors, such as {type_name(inside[0].dtype, inside[0].shape)}"


def _mismatch(x: Input, by_path: Mapping[Path, Any], want: Sequence[int], local: bool) -> str:
    expected = f"the program was compiled for {type_name(x.dtype, want)}{' on each rank' if local else ''}"
    if x.path not in by_path:
        if any(path[: len(x.path)] == x.path for path in by_path):
            return f"the batch gives {_describe_nested(x.path, by_path)}, but {expected}"
        names = sorted({name_of(path) for path in by_path})
        more = f", ... ({len(names)} in all)" if len(names) > SHOWN_NAMES else ""
        return f"the batch does not have it (it has {', '.join(names[:SHOWN_NAMES]) or 'nothing'}{more}); {expected}"
    leaf = by_path[x.path]
    got = type_name(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
    return f"the batch gives {got}, but {expected}"


def _fix(x: Input, by_path: Mapping[Path, Any], local: bool, part: Sequence[int]) -> str:
    """Return the fix for a mismatch. part: the shape of a rank's part, if one is needed."""
    leaf = by_path.get(x.path)
    if isinstance(leaf, Tensor) and leaf.dtype == x.dtype and tuple(part) != x.shape and leaf.shape[1:] == x.shape[1:]:
        if not local and tuple(leaf.shape) == tuple(part):
            return (
                "if this is a rank's part already, as local(batch) returns it: pass it directly; a smaller batch: use "
                "engine.step, which compiles for it, or drop it (drop_last=True)"
            )
        if 0 < leaf.shape[0] < (part if local else x.shape)[0]:
            last = "drop the last, smaller batch of an epoch (drop_last=True)"
            return f"{last}, or use engine.step, which compiles for it"
    if type(leaf).__module__ == "numpy":
        return "make it a tensor: torch.from_numpy(...)"
    if leaf is None and any(path[: len(x.path)] == x.path and not isinstance(v, Tensor) for path, v in by_path.items()):
        return "make it a tensor: torch.tensor(...)"
    if leaf is None and any(path[: len(x.path)] == x.path for path in by_path):
        return (
            "make each sample a tensor (torch.tensor(...), or set_format('torch') of datasets): torch's default_collate"
            " transposes lists of numbers; or write a collate"
        )
    if isinstance(leaf, Tensor) and leaf.dtype == x.dtype and x.shape and tuple(leaf.shape) == x.shape[1:]:
        loader = f"DataLoader(dataset, batch_size={x.shape[0]})"
        return f"this is one sample, not a batch: let {loader} or engine.loader(dataset) make batches"
    if isinstance(leaf, Tensor) and leaf.dtype == x.dtype and local and tuple(leaf.shape) == x.shape:
        whole = "this is the whole batch: cut this rank's part with program.local(batch)"
        return f"{whole}, or let engine.step(batch) do it"
    if isinstance(leaf, Tensor) and leaf.dtype != x.dtype and leaf.ndim == len(x.shape):
        cast = {torch.float32: "float()", torch.float64: "double()", torch.int64: "long()", torch.int32: "int()"}
        name = name_of(x.path)
        name = name if name.isidentifier() else "x"
        to = cast.get(x.dtype, f"to({x.dtype})")
        return f"convert it: {name}.{to}, or compile again with a batch of {leaf.dtype}"
    if isinstance(leaf, Tensor) and leaf.dtype == x.dtype and leaf.ndim == len(x.shape) and leaf.ndim and not local:
        rows, compiled = leaf.shape[0], x.shape[0]
        if not rows:
            return "leave it out: it has no rows"
        others = {
            name_of(path): y.shape[0]
            for path, y in by_path.items()
            if path != x.path and isinstance(y, Tensor) and y.ndim and y.shape[0] == compiled != rows
        }
        if others and leaf.shape[1:] == x.shape[1:]:
            return f"use as many rows as {', '.join(others)}: {compiled}"
        if rows > compiled and leaf.shape[1:] == x.shape[1:]:
            return f"compile again with a batch of {rows} rows, or cut it into batches of at most {compiled}"
    return "pass a batch of the compiled shapes and dtypes, or compile again for this one"


def from_call(
    program: Program, takes: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Build the batch, in its compiled form, from the arguments of a call like the model's.

    takes: from `arguments`. Positional arguments for a program that was compiled from keyword arguments (or the other
    way) are matched by the names in the model's forward.
    """
    if CHOICES in kwargs and any(x.choice is not None for x in program.inputs):
        own = {name: x for name, x in kwargs.items() if name != CHOICES}
        return with_choices(from_call(program, takes, args, own), kwargs[CHOICES])
    names = list(takes)
    heads = {x.path[0] if x.path else None for x in program.inputs if x.choice is None}
    check_keywords(program, kwargs, takes)
    if heads == {None}:
        return next(iter((*args, *kwargs.values())), None)
    if any(isinstance(h, str) for h in heads):
        if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and heads <= set(args[0]):
            fault = "the batch came as one argument, and was compiled as keyword arguments"
            raise ShardcError(fault, where="module(batch)", fix="unpack it: module(**batch)")
        return {**dict(zip(names, args, strict=False)), **kwargs}
    return {**dict(enumerate(args)), **{(names.index(k) if k in names else k): v for k, v in kwargs.items()}}


def arguments(model: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the model's forward; {} if the weights come from no module."""
    return inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}


def _default(now: Any, default: Any) -> bool:
    """Return whether a value is forward's default. If that is None, any bool is: the config decides it."""
    if default is None:
        return isinstance(now, bool)
    return type(now) is type(default) and bool(now == default)


def check_keywords(program: Program, named: Any, takes: Mapping[str, inspect.Parameter]) -> None:
    """Raise ShardcError for a number or text that the model would use and the program would not.

    It is among a call's keywords or a batch's entries, was not compiled, and is not the default. takes: from
    `arguments`.
    """
    if not isinstance(named, Mapping):
        return
    defaults = {name: p.default for name, p in takes.items()}
    # with `**kwargs`, any other name may be absent, and its default counts as None; else such a name has no default
    rest = None if inspect.Parameter.VAR_KEYWORD in {p.kind for p in takes.values()} else inspect.Parameter.empty
    known = {path[0] for path in (*dict(program.baked), *(x.path for x in program.inputs)) if path}
    errors = Errors()
    for name, now in named.items():
        plain = isinstance(now, (bool, int, float, str))
        if plain and name not in known and not _default(now, defaults.get(name, rest)):
            fault = f"the program was compiled without this argument, {now!r}"
            errors.add(fault, where=str(name), fix="leave it out, or compile again with a batch that has it")
    errors.raise_any()
