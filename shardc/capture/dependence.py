"""What values of a traced graph depend on: on which sources, and which values are zero if the sources are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from shardc.ir import types as values
from shardc.ir.graph import operands_of
from shardc.rules import registry
from shardc.rules.op_call import call_of
from shardc.torch_private import FakeTensor


def uses(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Does a value depend on the numbers (not just on the shapes) of any of the sources?"""
    todo, seen = [node], set()
    while todo:
        n = todo.pop()
        if n in sources:
            return True
        if n not in seen:
            seen.add(n)
            if not _shape_only(n):
                todo.extend(n.all_input_nodes)
    return False


def _shape_only(node: fx.Node) -> bool:
    name = values.op_name(node.target)
    return node.op == "call_function" and (name.endswith("_like") or name.startswith("new_"))


class Zeros:
    """Which values of a traced graph are certainly zero where the sources are: an op linear in operands that are all
    zero gives zero.
    """

    def __init__(self, module: fx.GraphModule, sources: Sequence[fx.Node]) -> None:
        self.module = module
        self.known = dict.fromkeys(sources, True)
        for node in module.graph.nodes:
            val = node.meta.get("val")
            node.meta["value"] = values.of_tensor(val) if isinstance(val, Tensor) else None

    def __call__(self, node: fx.Node) -> bool:
        if node not in self.known:
            self.known[node] = self._look(node)
        return self.known[node]

    def _look(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value = getattr(self.module, str(node.target), None)
            return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not bool(value.any())
        if node.op != "call_function" or node.meta["value"] is None:
            return False
        name = values.op_name(node.target)
        if name in ("zeros", "zeros_like", "new_zeros"):
            return True
        if name in ("full", "full_like", "new_full"):
            return isinstance(node.args[-1], (int, float)) and node.args[-1] == 0
        rule = registry.find(node.target)
        operands = operands_of(node)
        if rule is None or any(n.meta["value"] is None for n in operands):
            return False
        return any(
            group and all(i < len(operands) and self(operands[i]) for i in group)
            for group in rule.groups(call_of(node))
        )


def works(node: fx.Node) -> bool:
    """Is an op one of those whose work counts (matmuls, convolutions, attention)?"""
    rule = registry.find(node.target) if node.op == "call_function" else None
    return rule is not None and rule.flops is not None


def made_only_for(paths: Sequence[fx.Node | None], ys: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that the paths need and the results do not."""

    def behind(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
        todo, seen = [n for n in nodes if n is not None], set[fx.Node]()
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo.extend(node.all_input_nodes)
        return seen

    return behind(paths) - behind(ys)
