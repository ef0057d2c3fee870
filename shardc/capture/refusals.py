"""Explain why a model cannot be captured: a table with one message per cause.

A cause is recognised by the error that tracing raised, by an op in the graph, or by the line of the model. The first
row that fits is taken: known cases of libraries come first, general ones last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.graph import source_of
from shardc.ir.source import Source
from shardc.runtime.stage import op_errors
from shardc.torch_private import SIZE_DEPENDENT, data_dependent

DATA = "data-dependent"  # in `Cause.raised`: any error of tracing that means that Python read a tensor's value
MASK = "keep the size and mask instead: torch.where(mask, x, 0), and divide sums by mask.sum()"
MASKED_MEAN = (
    "take a sum, a mean or a loss of x[mask], or keep the size: x[mask].max() is x.masked_fill(~mask, -inf).max(), with"
    " mask of x's shape; in a cross entropy, set the other labels to -100 (its ignore_index)"
)


@dataclass(frozen=True)
class Cause:
    """One row. It fits if all of its regexes do, or one of `raised` and `op` if it has both.

    raised: on "TypeName: message" of any exception in the chain, or DATA. op: on the name of an op in the graph.
    code: on the model's line. loop: on the headers of the loops around it.
    what: the sentence of the error ({op} is the op's name). fix: the way out.
    """

    what: str
    fix: str
    raised: str = ""
    op: str = ""
    code: str = ""
    loop: str = ""

    def fits(self, raised: str, op: str, code: str, loop: str = "") -> bool:
        def matches(*pairs: tuple[str, str]) -> list[bool]:
            return [re.search(pattern, text) is not None for pattern, text in pairs if pattern]

        return any(matches((self.raised, raised), (self.op, op))) and all(matches((self.code, code), (self.loop, loop)))


DEPENDS = "depends on a tensor's value"
INDEXED = f"indexing by a condition has a result whose size {DEPENDS} (x[mask], masked_select)"
NUMBER = (
    "a tensor becomes a Python number (.item(), int(), float(), tolist(), an index of one element): the program"
    f" {DEPENDS}"
)
BRANCH = "compute both branches and choose with torch.where(condition, a, b)"
KEEP = (
    "keep it a tensor: x * n.detach(), not x * n.item(), as no gradient goes through a number; pick rows with"
    " index_select(0, i.view(1)) or gather"
)
TEXT, PRINT = (
    f"forward formats a tensor as text, which {DEPENDS}",
    "print it outside of forward: return it from the model",
)
COLUMNS = (
    "choose them where the batch is made, so that their number is fixed here (self loops, padding); values that are the"
    " same in every step may be a buffer with persistent=False; or keep all, and set the weight of the others to 0:"
    " torch.where(mask, weight, 0)"
)
ONE_OP = "shardc.nn.experts(x, index, weights, up, down)"
EXPERTS = (
    'run all experts in one op: config.experts_implementation = "grouped_mm" where transformers has it for this model'
    f" (its experts are decorated with @use_experts_implementation), else {ONE_OP} in the layer's forward, on weights"
    " stacked to [experts, out, in]"
)
ATTENTION = (
    "the attention implementation needs a package or device that this machine does not have",
    'config._attn_implementation = "sdpa" (or model.set_attn_implementation("sdpa")); ranks run the fastest kernel of'
    " their device",
)
INSIDE = "forward computes a gradient by a transform of torch.func (grad, vjp, jacrev), which tracing cannot see"
AUTOGRAD = (
    "use torch.autograd.grad(y, x, create_graph=True), which becomes ops of the program, or write out the formula"
)
OBJECT = (
    "an op takes a generator, or another Python object of the model",
    "leave generator= out: random numbers follow from the seed of the step",
)
COPIED = "forward makes a copy with copy.deepcopy", "use x.clone(); copy a module once, in __init__"
PACKED = "packed sequences have a size that depends on the lengths' values"
PADDED = "feed the padded sequences and leave padding out of the loss; pick each row's last step with gather"
#: Ops that draw by rejection.
REJECTION = r"_standard_gamma|_sample_dirichlet"
_CHOSEN = r"nonzero|item|^where$|^index$|masked_select"
REFUSALS = (
    # --- transformers
    Cause(
        f"LayerDrop leaves out layers at random: a branch {DEPENDS}",
        "set the config's layerdrop to 0 (config.layerdrop, encoder_layerdrop, decoder_layerdrop)",
        raised=DATA,
        code=r"layer_?drop|dropout_probability|skip_the_layer|drop_prob",
    ),
    Cause(
        f"module dropout leaves out adapters at random: a branch {DEPENDS}",
        "set the config's module_dropout to 0",
        raised=DATA,
        code=r"module_dropout",
    ),
    *(
        Cause(f"the loop over experts {DEPENDS}", EXPERTS, DATA, _CHOSEN, **{place: "expert"})
        for place in ("code", "loop")
    ),
    Cause(*ATTENTION, raised=r"(?i)flash.?attn|flash.?attention|`kernels` is"),
    Cause(*ATTENTION, raised=r"must be callable", code=r"flash_kwargs"),  # transformers 5.17
    Cause(
        f"the labels without padding have a size that {DEPENDS}",
        "compute the loss outside of the model: loss=lambda output, batch: F.ctc_loss(...) takes padded labels [n, s]"
        " and their lengths",
        op=r"masked_select|^index$",
        code=r"masked_select\(labels_mask\)",
    ),
    Cause(
        "{op} would draw other random numbers on every mesh: how many it rejects depends on their values (Gamma,"
        " Dirichlet, Beta, StudentT, Chi2)",
        "draw them outside of the model and pass them in with the batch, or make them of rand, randn, randint,"
        " bernoulli, exponential_ (Kumaraswamy for Beta)",
        op=REJECTION,
    ),
    Cause(
        f"trunc_normal_ draws again until all numbers are inside of its bounds: how often {DEPENDS}",
        "draw by the inverse: torch.special.ndtri(p + (q - p) * torch.rand_like(x)), p and q the normal distribution's"
        " shares below the bounds",
        raised=DATA,
        code=r"trunc_normal_",
    ),
    Cause(f"the residuals of lstsq have a size that {DEPENDS}", "x = torch.linalg.pinv(a) @ b", raised=r"linalg_lstsq"),
    Cause(
        INSIDE,
        AUTOGRAD,
        raised=r"functorch tensor|GradTrackingTensor|JVP|jvp|'Tensor' object has no attribute 'constant'"
        r"|Expected FakeTensor, got",  # torch 2.11, which does not say where
    ),
    # --- the value of a tensor
    Cause(
        f"the size of the one-hot encoding {DEPENDS}",
        "give the number of classes: F.one_hot(x, num_classes=n)",
        raised=DATA,
        code=r"one_hot\(",
    ),
    Cause(
        f"the length of a loop {DEPENDS}",
        "run a fixed number of iterations and mask the surplus: torch.where(i < n, step(x), x)",
        raised=DATA,
        code=r"^\s*(for|while)\b|\brange\(",
    ),
    Cause(f"a branch {DEPENDS}", BRANCH, raised=DATA, code=r"^\s*(if|elif|assert)\b|\bif\b.*\belse\b|\b(and|or|not)\b"),
    Cause(INDEXED, COLUMNS, raised=DATA, op=r"^index$", code=r"\[\s*(:|\.\.\.)\s*,.*(mask|[<>]|[!=]=)"),
    Cause(INDEXED, MASKED_MEAN, raised=DATA, code=r"[\w)\]]\[[^:]*(\bmask|_mask|[<>]|[!=]=)[^:]*\]"),
    Cause(TEXT, PRINT, raised=r"Sym(Float|Int|Bool)\.__format__"),
    Cause(TEXT, PRINT, raised=DATA, code=r"""\bprint\(|\blog(ger|ging)?\.|\bf["']|["'] %|\.format\(|\bstr\("""),
    Cause(
        f"the size of a slice or tensor {DEPENDS}",
        MASK,
        raised=DATA,
        code=r"\[[^\]]*:|\b(split|view|reshape|expand|narrow|zeros|ones|full|empty|rand|randn|arange)\(",
    ),
    # the second: a set of such numbers
    Cause(NUMBER, KEEP, raised=rf"{DATA}|unhashable type: non-nested SymInt", op=r"^item$|_local_scalar_dense"),
    Cause(*COPIED, raised=r"Cannot access data pointer|support the deepcopy protocol", code=r"\bdeepcopy\("),
    Cause(
        "elements of a tensor are read outside of torch's ops (a tuple of tensors as an index, an extension): the"
        f" result {DEPENDS}",
        "index with one tensor, x[rows, cols] with rows, cols = index.unbind(-1); make an extension's function an op"
        " (torch.library.custom_op)",
        raised=r"data is not allocated yet|Cannot access data pointer",
    ),
    Cause(PACKED, PADDED, op=r"_pack_padded_sequence|_pad_packed_sequence"),
    Cause(
        "repeat_interleave has a result whose size depends on a tensor's values",
        "pass the size: repeat_interleave(x, n, output_size=total)",
        op=r"repeat_interleave",
    ),
    Cause(INDEXED, MASKED_MEAN, op=r"^index$|masked_select"),
    Cause(
        f"{{op}} has a result whose size {DEPENDS}",
        MASK,
        op=r"nonzero|^where$|unique|bincount|histc|argwhere|_coalesce|masked",
    ),
    Cause(
        "a sparse tensor ({op}) cannot be split",
        "use dense tensors: x.to_dense(), torch.scatter_add for sums over edges",
        op=r"^sparse ",
    ),
    Cause(
        "the model uses a transform of torch.func that cannot be split ({op})",
        "write it with batched ops",
        op=r"^transform ",
    ),
    # the second: torch 2.11
    Cause(*OBJECT, op=r"^object$", raised=r"argument of type: <class 'torch\._C\.Generator'>"),
    Cause(
        "forward uses vmap on values that tracing cannot see",
        "write it with batched ops: torch.einsum, broadcasting",
        op=r"^fake$",
        code=r"\bvmap\(",
    ),
    Cause(INSIDE, AUTOGRAD, op=r"^fake$"),
    Cause(f"the size of the result of {{op}} {DEPENDS}", MASK, op=r"."),
    Cause(
        f"a part of a tensor begins at a place, or has a size, that {DEPENDS}",
        "give the place as a Python number, or pick the entries: x.index_select(dim, start + torch.arange(length))",
        raised=r"PendingUnbackedSymbolNotFound",
    ),
    Cause(
        f"a tensor's size {DEPENDS} (x[mask], masked_select), and the tensor is combined with one of known size",
        MASKED_MEAN,
        raised=r"size of tensor \w \(u\d+\) must match|must match the size of tensor \w \(u\d+\)",
    ),
    # --- leaving the graph
    Cause(
        "the model leaves torch: .numpy() returns a value that cannot be traced",
        "write it in torch ops",
        raised=r"numpy\(\)|Can't call numpy|__array__",
    ),
    Cause(
        "the model uses a device that this machine does not have",
        "create tensors on the device of others (device=x.device), or register them as buffers",
        raised=(
            r"not linked with support for|Torch not compiled with|No CUDA|Cannot access accelerator|Invalid device|to"
            r" be on the same device|no NVIDIA driver|found two different devices"
        ),
    ),
    Cause(
        "the ids of an embedding are not whole numbers",
        "give them as torch.long: in batch(), idx.long(); or torch.zeros(..., dtype=torch.long)",
        raised=r"'indices' to have one of the following scalar types|indices.*Long, Int",
    ),
    Cause(
        "a parameter is changed in place while its gradient is recorded",
        "change parameters outside of forward, or make it a buffer",
        raised=r"leaf Variable that requires grad",
    ),
    Cause(
        "the model uses control flow or a transform of torch's own (torch.cond, torch.func, vmap) that cannot be split",
        "write it with torch.where, batched ops, or a loop of fixed length",
        raised=r"HigherOrder|higher order|functorch|vmap|UncapturedHigherOrderOpError",
    ),
    Cause(
        "a TorchScript module cannot be traced",
        "use the module that was scripted",
        raised=r"ScriptModule|RecursiveScriptModule|torch\.jit",
    ),
    Cause(
        "a module has an attribute with the name of a method of nn.Module (such as `parameters`)",
        "give that attribute another name",
        raised=r"submodule `[^`]*`: <bound method",
    ),
    Cause(*COPIED, raised=r"support the deepcopy protocol"),
)


#: (torch's message, fix) for errors of the user's code.
_ADVICE = (
    (
        r"must have the same dtype|to have the same dtype|should be the same|expected scalar type \w+ but found",
        "give the model and its inputs one dtype: x.to(model.weight.dtype), or model.float(); to compute in"
        " fewer bits, `precision: {compute: bfloat16}`",
    ),
    (
        r"expected target dtype to be|expected scalar type Long|not implemented for '(Int|Short|Float|Double)'"
        r"|Expected dtype int32/int64 for index"
        r"|Expected floating point type for target with class probabilities",
        "labels that are classes are int64 numbers: labels.long(); floating-point targets of a cross entropy are"
        " probabilities, of the output's shape",
    ),
    (
        r"0D or 1D target tensor expected|only batches of spatial targets|Expected target size",
        "a cross entropy takes logits [rows, classes] and labels [rows]: labels.squeeze(-1) or labels.argmax(-1); of"
        " sequences logits.flatten(0, 1) and labels.flatten()",
    ),
    (
        r"Expected input batch_size .* to match target batch_size",
        "logits and labels need the same number of rows: of sequences logits.flatten(0, 1) and labels.flatten(); shift"
        " labels where logits are shifted",
    ),
    (
        r"Target size .* must be the same as input size|size of tensor a .* must match the size of tensor b",
        "print both shapes: output.squeeze(-1), or target.unsqueeze(-1), make them equal; an element-wise loss of"
        " classes needs F.one_hot(labels, classes).float()",
    ),
    (
        r"mat1 and mat2 shapes cannot be multiplied|Given groups=|expected input\[|running_mean should contain",
        "print the shape of this layer's input: its last dim (channels, for a convolution) has to be the layer's"
        " in_features",
    ),
    (
        r"Expected all tensors to be on the same device|not on the expected device",
        "build the model and its batch on one device, such as the CPU: ranks get their own parts from there",
    ),
    (
        r"got an unexpected keyword argument",
        "a forward with **keywords gets every key of the batch: name its arguments (other keys go only to the "
        "loss), or leave that key out",
    ),
    (r"no fake impl", "give the op a shape function, @OP.register_fake (docs/explanation/rules.md)"),
)


def advice(error: BaseException, *, of_loss: bool = False) -> str:
    """Return the fix for an error of the user's code, from torch or Python. of_loss: of the loss function."""
    known = next((fix for text, fix in _ADVICE if re.search(text, str(error))), "")
    if of_loss and not known:
        return "it gets the model's output and the whole batch: loss=lambda output, batch: f(output, batch['y'])"
    return known or (
        "check that model and batch run together in plain PyTorch; if they do, torch cannot trace this line: write it"
        " with other ops"
    )


def of_cause(error: BaseException, read: Sequence[str] = ()) -> ShardcError | None:
    """Return the error of the row of REFUSALS that fits an exception. read: inputs whose values were read."""
    chain: list[BaseException] = [error]
    while (e := chain[-1].__cause__ or chain[-1].__context__) is not None and e not in chain:
        chain.append(e)
    for e in chain:
        if isinstance(e, ShardcError):
            return e
    at, loop = source.of_exception(error), source.loops_of_exception(error)
    raised = "\n".join(f"{type(e).__name__}: {e}" for e in chain)
    if any(isinstance(e, data_dependent()) for e in chain):
        raised = "\n".join([DATA, *(str(e) for e in chain if isinstance(e, SIZE_DEPENDENT))])
    for cause in REFUSALS:
        if cause.raised and cause.fits(raised, "", at.code, loop):
            return _error(cause, at, at.line, read if raised.startswith(DATA) else ())
    return None


def of_error(error: BaseException, read: Sequence[str] = (), *, of_loss: bool = False) -> ShardcError:
    """Return the user's error for an exception of tracing. of_loss: the loss function raised it.

    read: inputs whose values Python read.
    """
    if (named := of_cause(error, read)) is not None:
        return named
    at = source.of_exception(error)
    text = str(error).strip().splitlines()
    part, code = "the loss" if of_loss else "the model's forward", f" ({at.shown})" if at.code else ""
    fault = f"{part} failed: {type(error).__name__}: {text[0] if text else ''}{code}"
    return ShardcError(fault, where=at.line, fix=advice(error, of_loss=of_loss))


@contextmanager
def torch_errors(graph: fx.Graph | None = None) -> Iterator[None]:
    """Convert torch's exceptions in the block to ShardcError at the model's line. graph: what runs.

    An exception of shardc's own code is a bug of shardc: it stays as it is, and so does a lack of memory.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, ShardcError) or not source.is_torchs(e) or op_errors.no_memory(e):
            raise
        if (named := of_cause(e)) is not None:
            raise named from e
        node = None if graph is None else op_errors.failed_in(e, graph)
        at = source.of_exception(e) if node is None else source_of(node)
        code, message = f" ({at.shown})" if at.code else "", (str(e).strip().splitlines() or [""])[0]
        fault = f"torch cannot run the graph that capture made of this: {type(e).__name__}: {message}{code}"
        fix = "write it with other ops; plain PyTorch runs it, so capture is at fault: report it with the model"
        raise ShardcError(fault, where=source.where(at), fix=fix) from e


def of_op(node: fx.Node, name: str, read: Sequence[str] = ()) -> ShardcError:
    """Return the error for an op that no program can contain. read: inputs whose values Python read.

    name: the op's; "object" or "fake": the node takes a placeholder of no parameter, buffer or constant.
    """
    at = source.of_node(node)
    cause = next(c for c in REFUSALS if c.op and c.fits("", name, at.code, source.loops_of_node(node)))
    return _error(cause, at, source.where(at), read, op=name)


def of_values(error: ShardcError) -> bool:
    """Return whether something was refused because Python, or a tensor's size, depends on values."""
    return any(words in error.what for words in (DEPENDS, "leaves torch"))


def _error(cause: Cause, at: Source, where: str, read: Sequence[str] = (), **names: Any) -> ShardcError:
    code = f" ({at.shown})" if at.code else ""
    fault, fix = cause.what.format(**names) + code, cause.fix
    if read:
        inputs = ", ".join(read)
        fault += f", namely that of {inputs} in the batch"
        fix += (
            f"; if {inputs} is the same in every step, leave it out of the batch and let a module around the model add"
            " it as a constant"
        )
    return ShardcError(fault, where=where, fix=fix)
