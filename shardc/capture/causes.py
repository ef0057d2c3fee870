"""Why a model cannot be captured: one message per cause, as a table.

A cause is recognised by what was raised while the model was traced, by an op in the graph, or by the line of the model;
the first row that fits counts. Rows for known cases of libraries come first, general ones last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.program import Source
from shardc.torch_private import DATA_DEPENDENT

DATA = "data-dependent"  # stands for what tracing raises where the value of a tensor is asked for
MASK = "keep the size and mask instead: torch.where(mask, x, 0), and divide sums by mask.sum()"


@dataclass(frozen=True)
class Cause:
    """One row. raised: regex on "TypeName: message" of any exception on the way, or DATA; op: regex on the name of an
    op
    in the graph;
    code: regex on the model's line; loop: on the headers of the loops around it. All that are given have to fit.
    what: the sentence of the error ({op} is the op's name); fix: the way out.
    """

    what: str
    fix: str
    raised: str = ""
    op: str = ""
    code: str = ""
    loop: str = ""

    def fits(self, raised: str, op: str, code: str, loop: str = "") -> bool:
        pairs = ((self.raised, raised), (self.op, op), (self.code, code), (self.loop, loop))
        return all(re.search(pattern, text) is not None for pattern, text in pairs if pattern)


DEPENDS = "depends on a tensor's value"
NUMBER = (
    "a tensor becomes a Python number (.item(), int(), float(), tolist(), an index of one element): the program"
    f" {DEPENDS}"
)
KEEP = "keep it a tensor: x * n, not x * n.item(); pick rows with index_select(0, i.view(1)) or gather"
TEXT, PRINT = (
    f"forward writes a tensor's value as text: what it does {DEPENDS}",
    "print it outside of forward: let the model return it",
)
ONE_OP = "shardc.nn.experts(x, index, weights, up, down)"
EXPERTS = (
    'run all experts in one op: config.experts_implementation = "grouped_mm" where transformers made that switch for'
    " the model (its class of "
    f"experts stands under @use_experts_implementation), else {ONE_OP} in the layer's forward, on weights stacked to"
    " [experts, out, in]"
)
INSIDE = (
    "a gradient is computed inside forward by a transform of torch.func's (grad, vjp, jacrev), where tracing does not"
    " see it"
)
AUTOGRAD = (
    "use torch.autograd.grad(y, x, create_graph=True), which becomes ops of the program; or write the gradient as a"
    " formula"
)
PACKED = "packed sequences have a size that depends on the lengths' values"
PADDED = "feed the padded sequences and leave padding out of the loss; pick each row's last step with gather"
#: Ops that draw by rejection.
REJECTION = r"_standard_gamma|_sample_dirichlet"
CAUSES = (
    # --- transformers
    Cause(
        f"LayerDrop leaves out layers at random: a branch {DEPENDS}",
        "set the config's layerdrop to 0 (config.layerdrop, encoder_layerdrop, decoder_layerdrop)",
        raised=DATA,
        code=r"layer_?drop|dropout_probability|skip_the_layer|drop_prob",
    ),
    Cause(f"the loop over experts {DEPENDS}", EXPERTS, raised=DATA, code=r"expert"),
    Cause(
        f"the loop over experts {DEPENDS}", EXPERTS, op=r"nonzero|item|^where$|^index$|masked_select", code=r"expert"
    ),
    Cause(f"the loop over experts {DEPENDS}", EXPERTS, raised=DATA, loop=r"expert"),
    Cause(
        f"the loop over experts {DEPENDS}", EXPERTS, op=r"nonzero|item|^where$|^index$|masked_select", loop=r"expert"
    ),
    Cause(
        "the attention implementation needs a package or device that is not here",
        'config._attn_implementation = "sdpa" (or model.set_attn_implementation("sdpa")); ranks run the fastest kernel'
        " of their device",
        raised=r"(?i)flash.?attn|flash.?attention|flex.?attention|`kernels` is",
    ),
    Cause(
        f"the labels without padding have a size that {DEPENDS}",
        "give the loss from outside: loss=lambda output, batch: F.ctc_loss(...) takes padded labels [n, s] and their"
        " lengths",
        op=r"masked_select|^index$",
        code=r"masked_select\(labels_mask\)",
    ),
    Cause(
        "{op} draws random numbers that would differ on every mesh: how many it throws away depends on their values"
        " (Gamma, Dirichlet, Beta, StudentT, Chi2)",
        "draw them outside of the model and pass them in with the batch, or make them of rand, randn, randint,"
        " bernoulli, exponential_ (Kumaraswamy for Beta)",
        op=REJECTION,
    ),
    Cause(
        INSIDE,
        AUTOGRAD,
        raised=r"functorch tensor|GradTrackingTensor|JVP|jvp|'Tensor' object has no attribute 'constant'",
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
        "run a fixed number of turns, and mask out what is too many: torch.where(i < n, step(x), x)",
        raised=DATA,
        code=r"^\s*(for|while)\b|\brange\(",
    ),
    Cause(
        f"a branch {DEPENDS}",
        "compute both branches and choose with torch.where(condition, a, b)",
        raised=DATA,
        code=r"^\s*(if|elif|assert)\b|\bif\b.*\belse\b|\b(and|or|not)\b",
    ),
    Cause(TEXT, PRINT, raised=r"Sym(Float|Int|Bool)\.__format__"),
    Cause(
        TEXT,
        PRINT,
        raised=DATA,
        code=r"""\bprint\(|\blog(ger|ging)?\.|\bf["']|["'] %|\.format\(|\bstr\(""",
    ),
    Cause(
        f"the size of a slice or tensor {DEPENDS}",
        MASK,
        raised=DATA,
        code=r"\[[^\]]*:|\b(split|view|reshape|expand|narrow|zeros|ones|full|empty|rand|randn|arange)\(",
    ),
    Cause(NUMBER, KEEP, raised=DATA),
    Cause(
        "elements of a tensor are read outside of torch's ops (by a tuple of them as index, by an extension): what it"
        f" gives {DEPENDS}",
        "index with one tensor, x[rows, cols] with rows, cols = index.unbind(-1); make an extension's function an op"
        " (torch.library.custom_op)",
        raised=r"data is not allocated yet|Cannot access data pointer",
    ),
    Cause(NUMBER, KEEP, op=r"^item$|_local_scalar_dense"),
    Cause(
        PACKED,
        PADDED,
        op=r"_pack_padded_sequence|_pad_packed_sequence",
    ),
    Cause(
        "repeat_interleave gives a size that depends on a tensor's values",
        "say it: repeat_interleave(x, n, output_size=total)",
        op=r"repeat_interleave",
    ),
    Cause(
        f"indexing by a condition gives a size that {DEPENDS} (x[mask], masked_select)",
        MASK,
        op=r"^index$|masked_select",
    ),
    Cause(
        f"{{op}} gives a size that {DEPENDS}",
        MASK,
        op=r"nonzero|^where$|unique|bincount|histc|argwhere|_coalesce|masked",
    ),
    Cause(
        "a sparse tensor ({op}) cannot be split",
        "use dense tensors: x.to_dense(), torch.scatter_add for sums over edges",
        op=r"^sparse ",
    ),
    Cause(
        "the model uses a transform of torch.func's that cannot be split ({op})",
        "write it with batched ops",
        op=r"^transform ",
    ),
    Cause(
        "a generator or another object of the model's own stands in the graph",
        "leave generator= out: the step's seed makes it reproducible",
        op=r"^object$",
    ),
    Cause(
        INSIDE,
        AUTOGRAD,
        op=r"^fake$",
    ),
    Cause(f"the size of what {{op}} gives {DEPENDS}", MASK, op=r"."),
    # --- leaving the graph
    Cause(
        "the model leaves torch: .numpy() gives a value that the program cannot follow",
        "write it in torch ops",
        raised=r"numpy\(\)|Can't call numpy|__array__",
    ),
    Cause(
        "the model names a device that is not here",
        "make tensors where others are (device=x.device), or register them as buffers",
        raised=(
            r"not linked with support for|Torch not compiled with|No CUDA|Cannot access accelerator|Invalid device|to"
            r" be on the same device"
        ),
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
        "the model copies a tensor with copy.deepcopy",
        "use x.clone()",
        raised=r"support the deepcopy protocol",
    ),
)


def of_error(error: BaseException, asked: Sequence[str] = ()) -> ShardcError:
    """What an exception that was raised while a model was traced means to its user. asked: inputs whose values Python
    asked for.
    """
    chain: list[BaseException] = [error]
    while (e := chain[-1].__cause__ or chain[-1].__context__) is not None and e not in chain:
        chain.append(e)
    for e in chain:
        if isinstance(e, ShardcError):
            return e
    at, loop = source.of_exception(error), source.loops_of_exception(error)
    raised = "\n".join(f"{type(e).__name__}: {e}" for e in chain)
    if any(isinstance(e, DATA_DEPENDENT) for e in chain):
        raised = DATA
    for cause in CAUSES:
        if cause.raised and cause.fits(raised, "", at.code, loop):
            return _error(cause, at, at.line, asked if raised == DATA else ())
    text = str(error).strip().splitlines()
    code = f" ({at.code})" if at.code else ""
    fix = "check that model and batch run together in plain PyTorch"
    if "no fake impl" in str(error):
        fix = "give the op a shape function, @OP.register_fake (README: Your own op)"
    return ShardcError(
        f"the model's forward failed: {type(error).__name__}: {text[0] if text else ''}{code}",
        where=at.line,
        fix=fix,
    )


def of_op(node: fx.Node, name: str, asked: Sequence[str] = ()) -> ShardcError:
    """Why an op of an exported graph, whose result has a size or value that is not known, cannot be kept. asked: as for
    `of_error`.
    """
    at = source.of_node(node)
    cause = next(c for c in CAUSES if c.op and c.fits("", name, at.code, source.loops_of_node(node)))
    return _error(cause, at, source.where(at), asked, op=name)


def of_input(placeholder: fx.Node, kind: str) -> ShardcError:
    """Why something that is neither parameter, buffer nor constant cannot be given to a graph. kind: "object" or
    "fake".
    """
    user = next(iter(placeholder.users), placeholder)
    at = source.of_node(user)
    cause = next(c for c in CAUSES if c.op and c.fits("", kind, at.code))
    return _error(cause, at, source.where(at))


def _error(cause: Cause, at: Source, where: str, asked: Sequence[str] = (), **names: Any) -> ShardcError:
    code = f" ({at.code})" if at.code else ""
    what, fix = cause.what.format(**names) + code, cause.fix
    if asked:
        inputs = ", ".join(asked)
        what += f", namely that of {inputs} in the batch"
        fix += (
            f"; if {inputs} is the same in every step, leave it out of the batch and let a module around the model add"
            " it as a constant"
        )
    return ShardcError(what, where=where, fix=fix)
