"""Models that another library has wrapped or cut for several devices already: refused by name. What torch.compile
wraps is looked through.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardc.errors import Errors


def check(model: nn.Module) -> None:
    """Raises ShardcError for a model, or a part of it, that is wrapped to sum gradients or to be split over devices,
    and for parameters that are DTensors.
    """
    errors = Errors()
    if hasattr(model, "full_state_dict") and hasattr(model, "clip_grad_norm_"):  # what program.module makes
        what, fix = (
            "it is compiled already, and has this rank's part",
            "pass the plain model, which it was compiled from",
        )
        errors.add(what, where="the model", fix=fix)
        errors.raise_any()
    for name, module in model.named_modules():
        where = name or "the model"
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            what = f"it is wrapped in {type(module).__name__}, which spreads the batch and sums gradients by itself"
            held = f"{name}.module" if name else "model.module"
            errors.add(what, where=where, fix=f"pass what it holds: {held}; `mesh: {{dp: ...}}` of the spec does that")
            break
        if kind := _sharded_by_fsdp(module):
            what = f"{kind} has cut its parameters over the ranks already"
            fix = "pass the model as it was before; `data: {zero: 3}` of the spec cuts parameters as it does"
            errors.add(what, where=where, fix=fix)
            break
    else:
        cut = [name for name, p in model.named_parameters() if _is_dtensor(p)]
        if cut:
            more = f" ({len(cut)} such)" if len(cut) > 1 else ""
            what = f"the parameter is a DTensor: something has cut it over the ranks already{more}"
            errors.add(what, where=cut[0], fix="pass the model as it was before, and write its plan as `shard:`")
    errors.raise_any()


def beneath_compile(model: nn.Module) -> nn.Module:
    """What torch.compile(model) wraps, whose forward has names for its arguments."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


# Who has wrapped a model has imported these; importing them here would cost every start.


def _sharded_by_fsdp(module: nn.Module) -> str:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, said in (("FSDPModule", "fully_shard"), ("FullyShardedDataParallel", "FullyShardedDataParallel")):
        if (kind := getattr(fsdp, name, None)) is not None and isinstance(module, kind):
            return said
    return ""


def _is_dtensor(p: object) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(p, tensor.DTensor)
