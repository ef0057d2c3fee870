"""Write the layouts of engines whose conventions are known: transformers' own plan, vLLM, SGLang.

    layout = engines.vllm(model, tp=4)                     q, k and v of a layer in one tensor, and so on
    layout = engines.transformers(model, tp=2)             by the model's tp_plan
    layout = engines.described(2, describe)                by what the engine answers for each rank

vLLM: model_executor/layers/linear.py (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear: a head of keys
is on several ranks where there are fewer heads than ranks), vocab_parallel_embedding.py (rows padded to 64),
fused_moe/layer.py (w13_weight: gate, then up; w2_weight; experts in order over ranks). SGLang has the same layers
(sglang/srt/layers). transformers: distributed/tensor_parallel.py, with pieces as torch.chunk cuts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from torch import nn

from shardc.errors import Errors, ShardcError
from shardc.features.reshard.layout import EIGHT_BITS, Held, Layout, Part, Scale, Sizes, check
from shardc.ir.patterns import match
from shardc.runtime.state.boxes import Numbers

Range = tuple[int, int]  # begin, end


class _Piece(NamedTuple):
    """A tensor of the model, the dim that ranks split, and each rank's range; None: whole on each. of: as of Part."""

    of: str
    dim: int | None = None
    ranges: list[Range] | None = None


@dataclass(frozen=True)
class Rule:
    """The modules that an engine keeps as one, and the dim that ranks split, from the right; None: whole on each.

    into: the engine's name of the module; "": the model's. of: the model's modules, in their order there. split: "" in
    equal parts; "chunks": as torch.chunk, of which the last may be shorter or empty; "heads": of attention; "rows": of
    a vocabulary, padded. packed: parts that the model has fused already.
    """

    of: tuple[str, ...]
    dim: int | None
    into: str = ""
    split: str = ""
    packed: int = 1


#: By the last name of a module. Parameters of one dim are whole, unless their module is split by its first dim.
_SHARED = (
    Rule(("q_proj", "k_proj", "v_proj"), -2, "qkv_proj", "heads"),
    Rule(("gate_proj", "up_proj"), -2, "gate_up_proj"),
    Rule(("gate_up_proj",), -2, packed=2),
    *(Rule((name,), -2) for name in ("q_proj", "q_b_proj", "kv_b_proj", "fc1")),
    *(Rule((name,), -1) for name in ("o_proj", "out_proj", "down_proj", "fc2")),
    *(Rule((name,), -2, split="rows") for name in ("embed_tokens", "lm_head")),
    *(Rule((name,), None) for name in ("gate", "router", "shared_expert_gate", "kv_a_proj_with_mqa", "q_a_proj")),
)
RULES: dict[str, tuple[Rule, ...]] = {
    "vllm": (Rule(("q_a_proj", "kv_a_proj_with_mqa"), None, "fused_qkv_a_proj"), *_SHARED),
    "sglang": (Rule(("q_a_proj", "kv_a_proj_with_mqa"), None, "fused_qkv_a_proj_with_mqa"), *_SHARED),
}
#: Of stacked parameters of experts; `into` is the engine's parameter.
_EXPERTS = {"gate_up_proj": Rule((), -2, "w13_weight", packed=2), "down_proj": Rule((), -1, "w2_weight")}
_PADDED = 64  # DEFAULT_VOCAB_PADDING_SIZE
_FLOAT32 = ("e_score_correction_bias",)


def sizes_of(model: nn.Module, within: str = "") -> dict[str, Numbers]:
    """Return the shapes of the numbers that a model's checkpoints have, by their first names in a module around it."""
    kept, prefix = model.state_dict(keep_vars=True), within and f"{within}."
    named = [*model.named_parameters(), *model.named_buffers()]
    return {f"{prefix}{n}": tuple(x.shape) for n, x in named if n in kept and x.is_floating_point()}


def vllm(
    model: nn.Module,
    tp: int = 1,
    *,
    ep: bool = False,
    dtype: str = "bfloat16",
    block: tuple[int, int] = (128, 128),
    within: str = "",
    name: str = "vllm",
) -> Layout:
    """Return the layout of a model of transformers in vLLM, over `tp` ranks. ep: they divide experts, not each expert.

    dtype: of its weights; a dtype of 8 bits: linear layers have scales of these blocks. The names of modules are the
    model's. within: its name in the module that is trained, if that wraps it. Raises ShardcError for a weight for which
    no rule is known.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    facts = {"tp": tp, "ep": ep, "dtype": dtype, "block": list(block), "within": within, "heads": heads}
    facts["kv_heads"] = getattr(config, "num_key_value_heads", None) or heads
    return of_origin({"of": name, **facts}, sizes_of(model, within))


def sglang(model: nn.Module, tp: int = 1, **settings: Any) -> Layout:
    """Return the layout of a model of transformers in SGLang. settings: as of `vllm`."""
    return vllm(model, tp, **settings, name="sglang")


def described(
    ranks: int, describe: Callable[[int], Mapping[str, Mapping[str, Any]]], unused: Iterable[str] = ()
) -> Layout:
    """Return the layout that an engine describes, rank by rank.

    describe: rank -> {engine's name: {"shape": ..., "dtype": ..., "parts": [{"of": ..., "box": (offset, shape), "at":
    ...}]}}; `dims` of a part and `scale` ({"name": ..., "block": ...}) as in Part and Scale.
    """
    answers, tensors = [describe(r) for r in range(ranks)], dict[str, Held]()
    for name in dict.fromkeys(n for answer in answers for n in answer):
        each = [answer.get(name, {"shape": (0,), "parts": ()}) for answer in answers]
        first, parts = next(answer[name] for answer in answers if name in answer), []
        for r, x in enumerate(each):
            for p in x["parts"]:
                boxes = [p["box"] if rank == r else None for rank in range(ranks)]
                parts.append({"of": p["of"], "boxes": boxes, "at": [p["at"]], "dims": p.get("dims")})
        facts = {"dtype": str(first["dtype"]).removeprefix("torch."), "scale": first.get("scale"), "parts": parts}
        tensors[name] = TypeAdapter(Held).validate_python({"shapes": [x["shape"] for x in each], **facts})
    return Layout(ranks, tensors, tuple(unused))


def of_origin(origin: Mapping[str, Any], sizes: Sizes) -> Layout:
    """Return the layout that a convention gives with these settings, for a model's tensors."""
    of, settings = origin.get("of"), ("tp", "dtype", "within")
    needed = (*settings, "plan") if of == "transformers" else (*settings, "ep", "block", "heads", "kv_heads")
    if of not in ("transformers", *RULES) or not origin.keys() >= set(needed):
        fix = "write it with shardc.engines, or remove `origin`"
        raise ShardcError(f"origin names {of!r} with {', '.join(map(str, origin))}", where="origin", fix=fix)
    prefix = origin["within"] and f"{origin['within']}."
    inside = {n.removeprefix(prefix): s for n, s in sizes.items() if n.startswith(prefix)}
    writer = _Writer(dict(origin), inside, prefix)
    writer.run()
    return Layout(origin["tp"], writer.tensors, origin=dict(origin))


def checked(layout: Layout, sizes: Sizes, ties: Mapping[str, str]) -> None:
    """Raise ShardcError for a layout that does not fit the model (`layout.check`), or its own origin."""
    if within := layout.origin.get("within"):  # what is outside is not the engine's
        sizes = {n: s for n, s in sizes.items() if n.startswith(f"{within}.")}
    check(layout, sizes, ties)
    if not layout.origin:
        return
    own = {n: s for n, s in sizes.items() if n not in ties and not any(match(p, n) for p in layout.unused)}
    errors, expected = Errors(), of_origin(layout.origin, own)
    for name in {**expected.tensors, **layout.tensors}:
        has, should = layout.tensors.get(name), expected.tensors.get(name)
        if has != should:
            fault = f"it is not as {layout.origin['of']} keeps it: {_difference(has, should, layout.ranks)}"
            errors.add(fault, where=name, fix="write it with shardc.engines, or remove `origin` if it is meant so")
    errors.raise_any()


def _difference(has: Held | None, should: Held | None, ranks: int) -> str:
    if has is None or should is None:
        return "the tensor is missing" if has is None else "it has no such tensor"
    if (parts := [p.of for p in has.parts]) != (others := [p.of for p in should.parts]):
        return f"its parts are {', '.join(parts)}, not {', '.join(others)}"
    if has.dtype != should.dtype:
        return f"it is of {has.dtype}, not {should.dtype}"
    moved = (r for r in range(ranks) if [p.box(r) for p in has.parts] != [p.box(r) for p in should.parts])
    return next((f"rank {r} has other boxes" for r in moved), "its shapes or scales differ")


class _Writer:
    """Writes the tensors of a layout by the rules of an engine."""

    def __init__(self, origin: dict[str, Any], sizes: Sizes, prefix: str) -> None:
        self.origin, self.sizes, self.prefix, self.tensors = origin, sizes, prefix, dict[str, Held]()
        self.n: int = origin["tp"]
        if self.n < 1:
            raise ShardcError(f"tp is {self.n}", where="tp", fix="a whole number from 1 on")

    def run(self) -> None:
        errors, done = Errors(), set[str]()
        for name in self.sizes:
            if name not in done:
                with errors.collect():
                    done |= self._planned(name) if self.origin["of"] == "transformers" else self._ruled(name)
        errors.raise_any()

    def _planned(self, name: str) -> set[str]:
        """Put a tensor by the plan of transformers: names and shapes are the model's."""
        module, _, parameter = re.sub(r"\.\d+\.", ".*.", name).rpartition(".")
        module = re.sub(r"\.\d+$", ".*", module)
        plan: dict[str, Any] = self.origin["plan"]
        dim, packed, bias = plan.get(f"{module}.{parameter}", plan.get(module, (None, 1, False)))
        if len(self.sizes[name]) == 1:
            dim, packed = dim if dim == -2 and bias else None, 1
        self._put(name, self._pieces(name, Rule((), dim, split="chunks", packed=packed)), self.origin["dtype"])
        return {name}

    def _ruled(self, name: str) -> set[str]:
        """Put a tensor, with those that are fused with it, by the rules of vLLM or SGLang."""
        dtype, shape = self.origin["dtype"], self.sizes[name]
        module, _, parameter = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        if last == "experts" and parameter in _EXPERTS and self._out_in(module):
            rule = _EXPERTS[parameter]
            whole_experts = replace(rule, dim=-3, packed=1) if self.origin["ep"] else rule
            self._put(f"{module}.{rule.into}", self._pieces(name, whole_experts), dtype, low=True)
            return {name}

        def names(rule: Rule) -> list[str]:
            return [_joined(parent, of, parameter) for of in rule.of]

        rules = (r for r in RULES[self.origin["of"]] if last in r.of and all(n in self.sizes for n in names(r)))
        if (fitting := next(rules, None)) is None:
            if len(shape) < 2:
                self._put(name, [_Piece(name)], "float32" if parameter in _FLOAT32 else _wide(dtype))
                return {name}
            fix = "describe the layout: engines.described, or write layout.json without it"
            raise ShardcError(f"no rule of {self.origin['of']} is known for {last!r}", where=name, fix=fix)
        pieces = [piece for n in names(fitting) for piece in self._pieces(n, fitting)]
        low = len(shape) == 2 and fitting.split != "rows" and fitting.dim is not None
        into = _joined(parent, fitting.into or last, parameter)
        self._put(into, pieces, dtype if low else _wide(dtype), low=low)
        return set(names(fitting))

    def _out_in(self, module: str) -> bool:
        """Return whether stacked experts are [experts, out, in]: gate and up behind each other, as in most models."""
        up, down = (self.sizes.get(f"{module}.{n}", ()) for n in ("gate_up_proj", "down_proj"))
        return len(up) == len(down) == 3 and up[2] == down[1] and up[1] == 2 * down[2]

    def _pieces(self, name: str, rule: Rule) -> list[_Piece]:
        shape = self.sizes[name]
        if rule.dim is None or (len(shape) == 1 and rule.dim == -1):
            return [_Piece(name)]
        dim = max(0, len(shape) + rule.dim)
        size = shape[dim] // rule.packed
        if rule.split == "rows":
            rows = -(-size // _PADDED) * _PADDED
            ends = [(min(size, a), min(size, b)) for a, b in self._ranges(name, dim, rows, "")]
            return [_Piece(name, dim, ends), _Piece("", dim, [(0, rows // self.n - (b - a)) for a, b in ends])]
        ranges = self._ranges(name, dim, size, rule.split)
        return [_Piece(name, dim, [(a + i * size, b + i * size) for a, b in ranges]) for i in range(rule.packed)]

    def _ranges(self, name: str, dim: int, size: int, split: str) -> list[Range]:
        """Return each rank's range of a dim. One head may be on several ranks, if it is of keys and values."""
        n, units, divided, repeats = self.n, size, f"{size} in dim {dim}", 1
        if split == "chunks":
            ends = [min(size, r * -(-size // n)) for r in range(n + 1)]
            return list(pairwise(ends))
        if split == "heads":
            of_queries = name.rpartition(".")[0].endswith("q_proj")
            units = self.origin["heads" if of_queries else "kv_heads"]
            divided = f"{units} heads"
            if not of_queries and units < n and n % units == 0:
                repeats = n // units
        if units * repeats % n:
            fix = f"use a number of ranks that divides {units}"
            raise ShardcError(f"{divided} do not divide over {n} ranks", where=name, fix=fix)
        one = size * repeats // n
        return [(r // repeats * one, (r // repeats + 1) * one) for r in range(n)]

    def _put(self, name: str, pieces: list[_Piece], dtype: str, *, low: bool = False) -> None:
        """Add a tensor of pieces of the model's, behind each other in the split dim. low: in 8 bits it has scales."""
        shape = self.sizes[pieces[0].of]
        axis = next((p.dim for p in pieces if p.dim is not None), 0)
        filled, parts = [0] * self.n, []
        for of, _, ranges in pieces:
            size = self.sizes.get(of, shape)
            each = ranges or [(0, size[axis] if size else 1)] * self.n
            boxes = tuple(_cut(size, axis, ends) if ends[0] < ends[1] else None for ends in each)
            at = tuple(tuple(filled[r] if d == axis else 0 for d in range(len(size))) for r in range(self.n))
            filled = [a + end - begin for a, (begin, end) in zip(filled, each, strict=True)]
            if any(box is not None for box in boxes):
                parts.append(Part(f"{self.prefix}{of}" if of else "", boxes, at))
        shapes = tuple(tuple(filled[r] if d == axis else n for d, n in enumerate(shape)) for r in range(self.n))
        block = (1,) * (len(shape) - 2) + tuple(self.origin["block"]) if low and dtype in EIGHT_BITS else None
        scale = Scale(f"{name}_scale_inv", block) if block is not None else None
        self.tensors[name] = Held(dtype, shapes, tuple(parts), scale)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _cut(shape: Numbers, dim: int, ends: Range) -> tuple[Numbers, Numbers]:
    begin, end = ends
    offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
    return offset, tuple(end - begin if d == dim else n for d, n in enumerate(shape))


def _wide(dtype: str) -> str:
    return "bfloat16" if dtype in EIGHT_BITS else dtype
