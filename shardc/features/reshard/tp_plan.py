"""Write the layout of a model of transformers under its own plan of tensor parallelism."""

from __future__ import annotations

from torch import nn

from shardc.errors import ShardcError
from shardc.features.reshard.conventions import of_origin, sizes_of
from shardc.features.reshard.layout import Layout
from shardc.passes.annotate import model_plan

#: The word of an expert plan that splits stacked experts: by their first dim, of three.
_EXPERTS = "grouped_gemm"


def transformers(
    model: nn.Module, tp: int = 1, *, ep: bool = False, dtype: str = "bfloat16", within: str = ""
) -> Layout:
    """Return the layout of a model under its own tp_plan, over `tp` ranks. ep: experts by its ep_plan.

    within: its name in the module that is trained, if that wraps it.
    """
    plan = model_plan.read(model) | (dict(getattr(model, "ep_plan", None) or {}) if ep else {})
    if tp > 1 and not plan:
        fix = "describe the layout: engines.described"
        raise ShardcError("the model has no tp_plan", where="engines.transformers", fix=fix)
    words = model_plan.WORDS
    if unknown := {p: word for p, word in plan.items() if word not in words and word != _EXPERTS}:
        fault = f"its plan has words that are not known: {', '.join(unknown.values())}"
        raise ShardcError(fault, where=", ".join(unknown), fix="describe the layout: engines.described")
    meant = {
        p: [-3, 1, False] if word == _EXPERTS else [words[word].dim, words[word].parts, words[word].bias]
        for p, word in plan.items()
    }
    split = {p: m for p, m in meant.items() if m[0] is not None}
    settings = {"tp": tp, "dtype": dtype, "within": within, "plan": split}
    return of_origin({"of": "transformers", **settings}, sizes_of(model, within))
