"""Prove that a captured graph is the model: compare loss, gradients and new buffers with eager once.

Both run in the captured dtype, on the model's own weights if it has any, else on small random ones, from the same state
of torch's random generator: a captured graph has the same random ops in the same order, so dropout may stay on.

The graph of a model that trains is compared once more: with dropout and batch norm switched, as a program evaluates,
against the model in eval mode. Forward may branch on `self.training`, hooks may, and a custom `train()` may switch
anything.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from shardc.capture import patches, refusals
from shardc.capture.side_effects import line_that_changes
from shardc.errors import Errors, ShardcError
from shardc.ir import source
from shardc.ir.graph import calls, copy_graph, source_of, values_of
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.types import op_name
from shardc.passes.canonical.batch_norm import BATCH_NORMS
from shardc.runtime.data.inputs import name_of
from shardc.runtime.stage import op_errors
from shardc.torch_private import FakeTensor, OpOverload, pytree
from shardc.verify.reference import interpret, reach

#: Models up to so many multiply-adds (parameters × tokens) are run; larger ones only pass the static checks.
LIMIT_WORK = 2e11
LIMIT_PARAMS = 50e6
#: Largest error, relative to the largest entry of the gradient. Both sides run the same kernels; only the order of sums
#: differs.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
#: Factor on CLOSE where only outputs in eval mode are compared (no gradients): the same kernels in the same order.
EVALUATED = 1e-3
#: Ops that a program runs differently when it evaluates: {name: the argument that switches it}.
SWITCHED = {
    **dict.fromkeys(("dropout", "native_dropout", "feature_dropout"), "train"),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "train"),
    **dict.fromkeys(BATCH_NORMS, "training"),
    "scaled_dot_product_attention": "dropout_p",
}

#: Torch's warning if a reentrant checkpoint trains nothing.
_NO_GRADIENTS = "None of the inputs have requires_grad=True"
_NONE_INSIDE = (
    "the model's own gradient lacks what torch.utils.checkpoint(..., use_reentrant=True) computes, because none of "
    "its inputs requires a gradient"
)

#: Note on a dropout that does not get `training`.
KEEPS_DROPOUT = (
    "forward applies dropout in eval mode too, because it does not check the mode (`F.dropout(x, p)`): `evaluate` and "
    "eval() turn off all dropout. To follow the mode, pass `training=self.training` or use nn.Dropout"
)


@dataclass(frozen=True)
class Proof:
    """The result. notes: for the user, such as why nothing was compared. evaluates: see Program."""

    notes: tuple[str, ...] = ()
    evaluates: Literal["alike", "otherwise", "untried"] = "untried"


def prove(
    program: Program,
    model: nn.Module,
    batch: Any,
    eager: Callable[[Any], Sequence[Any]],
    changed: Mapping[str, Source],
    *,
    branches: bool = False,
) -> Proof:
    """Compare the captured graph with `eager(batch) -> (loss, *named values)`, a run of the user's model.

    For a forward-only program the loss is None, there are no gradients, and buffers are not updated. changed:
    attributes that its forward sets. branches: forward branches on `self.training`. A model that trains is also run in
    eval mode, and stays in it. Raises ShardcError naming every tensor that differs.
    """
    sizes = [math.prod(p.shape) for p in program.params]
    elements = max(i.value.nbytes() // i.dtype.itemsize for i in program.inputs)
    if sum(sizes) > LIMIT_PARAMS or sum(sizes) * elements > LIMIT_WORK:
        sets = (
            (f"forward sets {', '.join(map(repr, changed))}: the program uses the value of the first call",)
            if changed
            else ()
        )
        return Proof(("capture was checked statically only: the model is too large to run here once", *sets))
    real = not any(
        _empty(x) for x in (*model.parameters(), *model.buffers(), *(reach(batch, i.path) for i in program.inputs))
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {id(x): _leaf(x, generator) for x in (*model.parameters(), *model.buffers())}
    inputs = {i.name: _real(reach(batch, i.path), generator, ones=True) for i in program.inputs}
    reals = iter(inputs.values())
    whole = pytree.tree_map(lambda x: next(reals) if isinstance(x, Tensor) else x, batch)
    params = {name: tensors[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensors[id(b)] for name, b in model.named_buffers(remove_duplicate=False)}
    before = {name: b.clone() for name, b in buffers.items()}
    versions = {name: _version(x) for name, x in inputs.items()}
    # tensors among attributes that are no parameters or buffers: a program has their first values
    attributes = [(f"{path}.{n}".lstrip("."), x) for path, m in model.named_modules() for n, x in vars(m).items()]
    plain = {name: (x, x._version) for name, x in attributes if isinstance(x, Tensor) and not x.is_inference()}
    trained = {p.name: params[p.fqn] for p in program.params if p.requires_grad}
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")  # the model's own, which are read below
        torch.manual_seed(0)
        try:
            with patches.replaced_tensors(model, tensors):  # backward too: a reentrant checkpoint runs the model again
                want, *beside = eager(whole)
                if any(isinstance(x, FakeTensor) for x in (want, *beside)):
                    raise ShardcError(
                        "forward reads a tensor that it computed from weights or the batch in an earlier call, and "
                        "kept (functools.lru_cache, a list, a global)",
                        where="the model's forward",
                        fix="compute it in every call, or keep it in a buffer that forward changes in place; clear "
                        "what is kept: it is now a tensor without data",
                    )
                forwarded = {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
                want_grads = _grads(want, trained)
                after = {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
                _refuse_written_in_backward(forwarded, after)
            written = {name: Source() for name, (x, version) in plain.items() if x._version != version}
            changed = {**written, **changed}
            if changed:
                torch.manual_seed(0)
                with patches.replaced_tensors(model, tensors):
                    again = eager(whole)
                    grads_again = _grads(again[0], trained)
        except ShardcError:
            raise
        except Exception as e:  # the user's code; it may fail only on random numbers
            read = not any(_empty(reach(batch, i.path)) for i in program.inputs)
            if isinstance(e, IndexError) and read and (outside := op_errors.eager_lookup_error(e, model, inputs)):
                raise outside from e  # ids are from the real batch
            if op_errors.no_memory(e):  # of one device; ranks need less
                return Proof(("capture was checked statically only: this machine has too little memory for a forward",))
            if (cause := refusals.of_cause(e)) is not None:  # a cause that tracing did not detect
                raise cause from e
            if not real:
                why = f"the model does not run on random numbers ({type(e).__name__}: {e})"
                return Proof((f"capture was checked statically only: {why}",))
            place = source.of_exception(e)
            fault, fix = f"the model's forward failed: {type(e).__name__}: {e}", refusals.advice(e)
            raise ShardcError(fault, where=place.line, fix=fix) from e
        torch.manual_seed(0)
        with refusals.torch_errors(program.graph):
            got, news, outputs = interpret(program, params, before, inputs)
            got_grads = _grads(got, trained)
            if changed:
                torch.manual_seed(0)
                second, _, values = interpret(program, params, after, inputs)
                second_grads = _grads(second, trained)
                pairs = list(zip(again, (second, *values.values()), strict=True))
                _same_again([*pairs, *((grads_again.get(n), second_grads.get(n)) for n in trained)], changed)
    errors = Errors()
    if want is not None:
        _compare(errors, "the loss", "", want, got)
    if errors.found and (
        of_batch := {i.name: i.path for i in program.inputs if inputs[i.name]._version != versions[i.name]}
    ):
        with torch.random.fork_rng(devices=[]), patches.replaced_tensors(model, tensors):
            raise _changes_batch(of_batch, inputs, lambda: eager(whole))
    errors.raise_any()  # gradients that also differ add no information
    # a gradient that is zero in exact arithmetic (an attention key's bias) is rounding on both sides: measured against
    # the largest
    floor = 1e-3 * max((_largest(g) for g in want_grads.values()), default=0.0)
    differ = Errors()
    for p in program.params:
        one, other = want_grads.get(p.name), got_grads.get(p.name)
        if one is not None and other is None:
            differ.add(
                "the model computes a gradient (perhaps zeros) for the parameter, but the captured graph computes "
                "none: an optimizer would not decay it",
                where=p.fqn,
                fix="report this with the model; or set requires_grad=False if the parameter is not trained",
            )
        elif other is not None:  # an expert without tokens, whose branch Python skips, has none: zeros
            _compare(differ, "the gradient", p.fqn, torch.zeros_like(other) if one is None else one, other, floor)
    if any(_NO_GRADIENTS in str(w.message) for w in warned):
        for error in differ.found:
            errors.add(_NONE_INSIDE, where=error.where, fix="use_reentrant=False, or the spec's section `checkpoint:`")
    else:
        errors.found += differ.found
    for b in program.buffers:
        if b.updated:
            _compare(errors, "the new value", b.fqn, after[b.fqn], news[b.name])
        elif want is not None and b.constant is None and not torch.equal(before[b.fqn], after[b.fqn]):
            fault = "the model updates the buffer, but the captured graph does not"
            errors.add(fault, where=b.fqn, fix="update it with an in-place op in forward")
    for o, value in zip(program.outputs, beside, strict=True):
        _compare(errors, "the output", o.name, value, outputs[o.name])
    errors.raise_any()
    notes = _warnings(warned)
    if want is None or not (branches or model.training):
        return Proof(notes, evaluates="alike")
    # with other buffers: fresh statistics, of 0 and 1, and vectors that converged hide differences
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, buffer in buffers.items():
            if after[name].is_floating_point():
                after[name] = after[name] * (1 + 0.1 * torch.rand(after[name].shape, generator=generator))
            buffer.copy_(after[name])
        torch.manual_seed(0)  # forward may draw in eval mode too, such as the noise of a VAE
        try:
            evaluating = interpret(program, params, after, inputs, graph=_evaluating(program.graph))
        except RuntimeError:  # a norm that returns its statistics then has none: evaluating reports it
            return Proof(notes, evaluates="otherwise")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), patches.replaced_tensors(model, tensors):
        warnings.simplefilter("ignore")
        proof = _evaluates(
            model, lambda: eager(whole), (evaluating[0], *evaluating[2].values()), program.graph, branches
        )
        return replace(proof, notes=(*notes, *proof.notes))


def _warnings(warned: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return torch's warnings at lines of the user's model or loss: the model itself never runs again."""
    texts = {
        f"{Path(w.filename).name}:{w.lineno}: torch warns: {' '.join(str(w.message).split())}"
        for w in warned
        if w.category is UserWarning and source.is_users(w.filename) and _NO_GRADIENTS not in str(w.message)
    }
    return tuple(sorted(texts))


def _evaluates(
    model: nn.Module, eager: Callable[[], Sequence[Tensor]], ours: Sequence[Tensor], graph: fx.Graph, branches: bool
) -> Proof:
    """Compare the model in eval mode with `ours`, without and then with gradients; leave it in eval mode.

    Evaluation usually has no gradients. torch's fast paths and custom branches test for them.
    """

    def run(seed: int, grad: bool) -> Sequence[Tensor]:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(grad):
            return eager()

    model.eval()
    without: Sequence[Tensor] | None = None
    try:
        without = run(0, grad=False)
        if _all_close(without, ours, EVALUATED):
            return Proof(evaluates="alike")
    except Exception:  # such as a forward that differentiates: its result with gradients counts
        pass
    try:
        expected = run(0, grad=True)
        draws = not _all_close(run(1, grad=True), expected, EVALUATED)
    except Exception:  # in eval mode it may have no loss: evaluating reports it
        return Proof(evaluates="otherwise")
    notes = () if without is None or draws or _all_close(without, expected) else (_without_gradients(model),)
    if _all_close(expected, ours, EVALUATED):
        return Proof(notes, evaluates="alike")
    drops = any(SWITCHED.get(name := op_name(n.target)) == "train" and "dropout" in name for n in calls(graph))
    if draws and not branches and drops:
        return Proof((KEEPS_DROPOUT,), evaluates="alike")
    return Proof(notes, evaluates="otherwise")


def _without_gradients(model: nn.Module) -> str:
    """Write the note on a model whose result depends on whether gradients are on."""
    fast = any(isinstance(m, (nn.TransformerEncoderLayer, nn.MultiheadAttention)) for m in model.modules())
    return (
        "in eval mode the model computes other results under torch.no_grad() than with gradients on: `evaluate` "
        "returns the results with gradients on"
    ) + (
        ". torch's fast path for nn.TransformerEncoder returns zeros where the batch is padded;"
        " torch.backends.mha.set_fastpath_enabled(False) turns it off in plain PyTorch"
        if fast
        else ""
    )


def _version(x: Tensor) -> int:
    """Return how often a tensor was written to; 0 for an inference tensor, which has no count."""
    return 0 if x.is_inference() else x._version


def _evaluating(graph: fx.Graph) -> fx.Graph:
    """Copy a graph as a program evaluates it: no dropout, batch norms with running statistics."""
    graph = copy_graph(graph)
    for node in calls(graph):
        if (name := SWITCHED.get(op_name(node.target))) is None or not isinstance(node.target, OpOverload):
            continue
        schema = [a.name for a in node.target._schema.arguments]
        if name in schema and not (name == "training" and node.args[schema.index("running_mean")] is None):
            value = 0.0 if name == "dropout_p" else False
            if (index := schema.index(name)) < len(node.args):
                node.update_arg(index, value)
            else:
                node.update_kwarg(name, value)
    return graph


def _all_close(plain: Sequence[Tensor], ours: Sequence[Tensor], tighter: float = 1.0) -> bool:
    errors = Errors()
    if [x.shape for x in plain] != [x.shape for x in ours]:
        return False
    for want, got in zip(plain, ours, strict=True):
        _compare(errors, "", "", want, got, tighter=tighter)
    return not errors.found


def _same_again(pairs: Sequence[tuple[Any, Any]], changed: Mapping[str, Source]) -> None:
    """Raise ShardcError if results of the model's second call differ from those of the program's second step.

    The second call finds what the first left in buffers and attributes, the program only the buffers. pairs: the loss
    first; None: no loss, or a gradient of zeros.
    """
    again, result = Errors(), "result" if pairs[0][0] is None else "loss"
    floor = 1e-3 * max((_largest(x) for x, _ in pairs if x is not None), default=0.0)
    for want, got in pairs:
        if want is not None or got is not None:
            zeros = torch.zeros_like(got if want is None else want)
            _compare(again, "", "", zeros if want is None else want, zeros if got is None else got, floor)
    if again.found:
        place = next((place for place in changed.values() if place.line), Source())
        names = ", ".join(map(repr, changed))
        raise place.error(
            f"the model returns another {result} on the second call: its forward sets {names}, and a program uses "
            "only the first value",
            "make it a buffer (register_buffer) that forward changes in place, or set it outside of forward",
        )


def _changes_batch(
    changed: Mapping[str, Sequence[Any]], inputs: Mapping[str, Tensor], run: Callable[[], Any]
) -> ShardcError:
    """Return the error for a forward that writes into the batch. run: runs the user's model once more."""
    place, _ = line_that_changes(lambda: [inputs[name]._version for name in changed], run) or (Source(), "")
    names = ", ".join(name_of(tuple(path)) for path in changed.values())
    return place.error(
        f"forward changes {names} of the batch in place: later reads of the batch see other numbers, but a program does"
        " not change the batch",
        "make a new tensor: write `x = x - 3`, and not `x -= 3`; x = x.clone() before x[mask] = 0",
    )


def _empty(x: Any) -> bool:
    return isinstance(x, FakeTensor) or x.device.type == "meta"


def _leaf(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a real tensor in place of a parameter or buffer."""
    fresh = _real(x.detach(), generator)
    return nn.Parameter(fresh, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else fresh


def _real(x: Tensor, generator: torch.Generator, ones: bool = False) -> Tensor:
    """Copy `x`; if it has no data, make small positive random numbers; integers 0 (or 0 and 1 if `ones`)."""
    if not _empty(x):
        return x.detach().clone()
    if x.dtype.is_floating_point:
        return (0.02 + 0.1 * torch.rand(tuple(x.shape), generator=generator, dtype=torch.float64)).to(x.dtype)
    return torch.randint(0, 2 if ones else 1, tuple(x.shape), generator=generator).to(x.dtype)


def _grads(loss: Tensor | None, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients, by `backward`: reentrant checkpoints refuse `autograd.grad`. Resets `.grad`."""
    if loss is not None and loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
    for p in trained.values():
        p.grad = None
    return {name: g.to_dense() if g.is_sparse else g for name, g in grads.items()}


def _refuse_written_in_backward(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Raise ShardcError for buffers that backward changes; nan is ignored."""
    again = [n for n, b in after.items() if not ((b == before[n]) | (b != b)).all()]
    if again:
        raise ShardcError(
            f"backward updates {', '.join(again[:3])}{' and more' if len(again) > 3 else ''}, as torch.utils.checkpoint"
            " runs the module's forward a second time there: a batch counts twice in it",
            where=again[0].rpartition(".")[0],
            fix="remove that torch.utils.checkpoint and write the spec's section `checkpoint:`, which recomputes "
            "without counting twice",
        )


def _largest(x: Tensor) -> float:
    return x.detach().abs().nan_to_num(0, 0, 0).max().item() if x.numel() else 0.0


def _compare(
    errors: Errors, name: str, where: str, want: Tensor, got: Tensor, floor: float = 0.0, tighter: float = 1.0
) -> None:
    bound = tighter * CLOSE.get(want.dtype.to_real() if want.dtype.is_complex else want.dtype, 0.0)
    wide = torch.promote_types(want.dtype, torch.float64)
    want, got = want.detach().to(wide), got.detach().to(wide)
    scale = max(_largest(want), floor)
    if not torch.allclose(got, want, rtol=0, atol=bound * scale + 1e-30, equal_nan=True):
        worst = (got - want).abs().max().item() / (scale or 1.0)
        errors.add(
            f"{name} of the captured graph differs from the model's own by {worst:.1e} of its size",
            where=where,
            fix=(
                "Python values are read once, when the model is captured: make a clock, a counter or other state"
                " that changes between calls a buffer or part of the batch. If there is no such state, report "
                "this with the model"
            ),
        )


def narrow_values(program: Program) -> tuple[str, ...]:
    """Return a note on the first line that computes in a narrower type than float64 weights.

    A sum over ranks is taken in another order, so a comparison with one device is only as exact as that type.
    """
    weights = {p.dtype for p in program.params if p.dtype.is_floating_point}
    if weights != {torch.float64}:
        return ()
    narrow = [
        (node, value.dtype)
        for node in calls(program.graph)
        for value in values_of(node)
        if value.dtype.is_floating_point and value.dtype != torch.float64
    ]
    if not narrow:
        return ()
    (first, dtype), *rest = narrow
    place = source_of(first)
    name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    return (
        f"{place.line}: the weights are float64, but forward computes in {name} here"
        f"{f' ({place.shown})' if place.code else ''} and at {len(rest)} more values: compared with one device it"
        f" differs by rounding of {name}, about {eps:.0e}, not of float64",
    )
