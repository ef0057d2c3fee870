"""Reads a program's text (shardc.artifact.emit) back into its graph. Nothing in the text is executed."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import HEADER, NO_TENSOR, value_text
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout
from shardc.ir.program import Collective, Source, Value
from shardc.ir.type_text import parse as parse_type
from shardc.runtime import ops
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers torch.ops.shardc.*)
from shardc.torch_private import OpOverload

_OF = re.compile(r"# (\w+) (backward|again), (.*)$")
_SOURCE = re.compile(r"# (.+?) \((.*?)\)(?:: (.*))?$")
#: `unasked` is what earlier versions wrote for `implicit`.
_COLLECTIVE = re.compile(r"(\w+)/(\w+) (\S+) (\d+) (implicit |unasked )?(\".*\")$")
_NAME = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*"'  # as JSON writes strings
_REGION = re.compile(rf"({_NAME})(?: kept ({_NAME}(?: {_NAME})*))?(?: again (\d+))?(?: \| |$)")
_PIECE = re.compile(r"piece (\d+)(?: \| |$)")
#: Ops that programs written by earlier versions call by another name.
_RENAMED = {
    "vary": "sum_grad",
    "unvary": "first_grad",
    "all_gather_varying": "all_gather_partial_grad",
    "shard_varying": "shard_partial_grad",
    "varying_to_partial": "partial_grad_to_partial",
}
_PREAMBLE = [ast.unparse(s) for s in ast.parse(HEADER).body]


def graph_of(
    text: str,
    mesh: Mesh,
    types: Mapping[str, Value],
    file: str = "program",
    *,
    piped: bool = False,
    lowered: bool = False,
) -> fx.Graph:
    """The graph of the one function in a text.

    types: of params, buffers and inputs, in order, by name (from the artifact's layouts); those in the text have to
    agree. piped: the function is a pipeline's stage: it takes some of them, and after them values of other stages.
    lowered: it is a half of a lowered stage: it takes any of them, and others. Raises ShardcError with file and line
    for anything that `shardc.artifact.emit` would not have written.
    """
    return _Reader(text, mesh, types, file, piped, lowered).run()


class MissingOpError(ShardcError):
    """A program calls an op of the user's that nothing has registered in this process."""


class _Reader:
    def __init__(
        self, text: str, mesh: Mesh, types: Mapping[str, Value], file: str, piped: bool, lowered: bool
    ) -> None:
        self.text, self.mesh, self.types, self.file = text, mesh, types, file
        self.piped, self.lowered = piped or lowered, lowered
        self.of: dict[str, Any] = {}  # the op of forward that lines of backward belong to
        self.lines = text.split("\n")
        self.graph = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.gone: dict[str, int] = {}  # deleted name -> line
        self.seen: dict[str, Any] = {}
        self.targets: dict[tuple[str, ...], Any] = {}

    def wrong(self, line: int, what: str) -> ShardcError:
        return ShardcError(
            what, where=f"{self.file}:{line}", fix="keep to the form in which shardc writes programs, or compile again"
        )

    def unreadable(self, node: ast.AST, line: int, what: str = "") -> ShardcError:
        return self.wrong(line, f"cannot read {what}{ast.unparse(node)[:60]!r}")

    def run(self) -> fx.Graph:
        function = self._function()
        source, returned = Source(), False
        read = max((x.lineno for x in function.args.args), default=function.lineno)  # lines up to `read` are done with
        for statement in function.body:
            line = statement.lineno
            if returned:
                raise self.wrong(line, "nothing can follow the return")
            for comment in self.lines[read : line - 1]:
                said = comment.strip()
                if self.lowered and (of := _OF.match(said)):
                    self.of = {"of": of[1], **({"repeats": True} if of[2] == "again" else {})}
                    said = f"# {of[3]}"
                if m := _SOURCE.match(said):
                    source = Source("" if m[1] == "·" else m[1], m[2], m[3] or "")
            read = statement.end_lineno or line
            match statement:
                case ast.Return(value=ast.expr() as value):
                    self.graph.output(self._arg(value))
                    returned = True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._op(name, value, self._rest_of_line(statement).strip().removeprefix("# "), source, line)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="launch" | "put" | "scatter")) as value) if (
                    self.lowered
                ):
                    comment = self._rest_of_line(statement).strip().removeprefix("# ")
                    self._op("", value, f"{NO_TENSOR} | {comment}" if comment else NO_TENSOR, source, line)
                case ast.Delete(targets=targets):
                    self._delete(targets, line)
                case _:
                    raise self.unreadable(statement, line)
        if not returned:
            raise self.wrong(read, "the function returns nothing")
        self.graph.lint()
        return self.graph

    def _function(self) -> ast.FunctionDef:
        """The only function in the text. Makes its placeholders."""
        try:
            tree = ast.parse(self.text)
        except SyntaxError as e:
            raise self.wrong(e.lineno or 1, f"not Python: {e.msg}") from None
        except ValueError as e:  # a null byte, before Python 3.12
            raise self.wrong(1, f"not Python: {e}") from None
        functions = [s for s in tree.body if isinstance(s, ast.FunctionDef)]
        if len(functions) != 1:
            raise self.wrong(1, f"{len(functions)} functions, not one")
        function = functions[0]
        others = [s for s in tree.body if s is not function]
        if others and isinstance(others[0], ast.Expr) and isinstance(others[0].value, ast.Constant):
            del others[0]  # the docstring
        for s in others:
            if ast.unparse(s) not in _PREAMBLE:
                raise self.unreadable(s, s.lineno)
        a = function.args
        names = ["mesh", "rng", *self.types]
        if self.piped:
            taken = [x.arg for x in a.args]
            names = [n for n in names if n in taken] + [n for n in taken if n not in names]
        if a.posonlyargs or a.vararg or a.kwonlyargs or a.kwarg or a.defaults or [x.arg for x in a.args] != names:
            actual = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)}
            off = [f"{n!r} is missing" for n in names if n not in actual] + [
                f"{n!r} is not listed" for n in sorted(actual - set(names))
            ]
            why = ", ".join(off[:5]) or "another order or form"
            raise self.wrong(function.lineno, f"the function's arguments are not those that the layouts list: {why}")
        for x in a.args:
            self.env[x.arg] = node = self.graph.placeholder(x.arg)
            node.meta = {"value": self.types.get(x.arg), "source": Source()}
            if x.arg not in ("mesh", "rng", *self.types):
                if self.lowered and (after := self._rest_of_line(x).partition("# ")[2]).partition(" | ")[2] == "":
                    node.meta["value"] = self._types(after.strip(), x.lineno)
                    continue
                self._received(node, self._rest_of_line(x).removeprefix(",").strip().removeprefix("# "), x.lineno)
                continue
            written = self._rest_of_line(x).removeprefix(",").strip().removeprefix("# ").partition("  ")[0]
            if written and x.arg in self.types and written != value_text(self.types[x.arg]):
                raise self.wrong(
                    x.lineno, f"{x.arg} is {written} here, but {value_text(self.types[x.arg])} in the layouts"
                )
        return function

    def _received(self, node: fx.Node, comment: str, line: int) -> None:
        """A value of another stage; the line before it has its source."""
        m = _SOURCE.match(self.lines[line - 2].strip())
        source = Source("" if m[1] == "·" else m[1], m[2], m[3] or "") if m else Source()
        self._describe(node, comment, source, line)
        if "collective" not in node.meta:
            raise self.wrong(line, f"{node.name} is not in the layouts, and no collective is given that sends it")

    def _rest_of_line(self, node: ast.stmt | ast.arg) -> str:
        """The rest of the last line of a piece of code. (ast counts bytes, so other than ASCII is encoded for it.)"""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        line = self.lines[node.end_lineno - 1]
        return line[node.end_col_offset :] if line.isascii() else line.encode()[node.end_col_offset :].decode()

    def _delete(self, targets: Iterable[ast.expr], line: int) -> None:
        for t in targets:
            if not isinstance(t, ast.Name) or t.id not in self.env:
                raise self.unreadable(t, line, "the deletion of ")
            del self.env[t.id]
            self.gone[t.id] = line

    def _op(self, name: str, value: ast.expr, comment: str, source: Source, line: int) -> None:
        match value:
            case ast.Subscript():
                target: Any = operator.getitem
                args: tuple[Any, ...] = (self._arg(value.value), self._arg(value.slice))
                kwargs: dict[str, Any] = {}
            case ast.Call() if all(k.arg for k in value.keywords):
                target = self._target(value.func)
                args = tuple([self._arg(a) for a in value.args])
                if target is ops.taped:
                    self._taped(args[0] if args else None, line)
                kwargs = {str(k.arg): self._arg(k.value) for k in value.keywords}
            case _:
                raise self.unreadable(value, line)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name or None)
        if name and node.name != name:
            raise self.wrong(line, f"{name} is assigned twice, or is a name that Python uses")
        self._describe(node, comment, source, line)
        if name:
            self.env[name] = node

    def _taped(self, name: Any, line: int) -> None:
        """The op that `ops.taped` is to call stands as a text, which the reader of ops has to accept, too."""
        try:
            op = self._target(ast.parse(name, mode="eval").body) if isinstance(name, str) else None
        except (SyntaxError, ValueError):
            op = None
        if op is None or getattr(op, "__name__", "") in ops.OF_LOWERED:
            raise self.wrong(line, f"ops.taped of {str(name)[:60]!r}: that is not an op that programs call")

    def _describe(self, node: fx.Node, comment: str, source: Source, line: int) -> None:
        """Set a node's type, source and collective from the comment that follows it."""
        typed, _, collective = comment.partition(" | ")
        node.meta = {"value": self._types(typed, line), "source": source, **self.of}
        if self.lowered and (piece := _PIECE.match(collective)):
            node.meta["piece"] = int(piece[1])
            collective = collective[piece.end() :]
        if collective.startswith("region "):
            collective = self._region(node, collective.removeprefix("region "), line)
        if collective:
            m = _COLLECTIVE.match(collective)
            if not m:
                raise self.wrong(line, f"cannot read the collective {collective!r}")
            try:
                cause = json.loads(m[6])
            except json.JSONDecodeError as e:
                raise self.wrong(line, f"cannot read the cause {m[6]}: {e.msg}") from None
            node.meta["collective"] = Collective(m[1], m[2], tuple(m[3].split("+")), int(m[4]), cause, bool(m[5]))

    def _region(self, node: fx.Node, text: str, line: int) -> str:
        """Read the region, who keeps the result, and how often it is repeated. Returns the rest of the text."""
        m = _REGION.match(text)
        if not m:
            raise self.wrong(line, f"cannot read the region {text!r}")
        node.meta["region"] = json.loads(m[1])
        if m[2]:
            node.meta["kept"] = tuple(json.loads(name) for name in re.findall(_NAME, m[2]))
        if m[3]:
            node.meta["again"] = int(m[3])
        return text[m.end() :]

    def _types(self, text: str, line: int) -> Any:
        """The type of a value, or the types of several; None for what is no tensor, in a lowered stage."""
        if text not in self.seen:
            try:
                self.seen[text] = (
                    tuple(map(self._type, text[1:-1].split(" ; "))) if text.startswith("(") else self._type(text)
                )
            except ValueError as e:
                raise self.wrong(line, str(e)) from None
        return self.seen[text]

    def _type(self, text: str) -> Value | None:
        if text == NO_TENSOR and self.lowered:
            return None
        bare = text.removesuffix(" grad")
        shape, dtype, placements = parse_type(bare)
        if unknown := set(placements) - set(self.mesh.names):
            raise ValueError(f"the mesh has no axis {', '.join(sorted(unknown))}")
        return Value(shape, dtype, bare != text, Layout.of(placements, self.mesh))

    def _target(self, func: ast.expr) -> Any:
        """The op that `aten.add.Tensor`, `torch.ops.lib.op.default` or `ops.all_reduce` names, and nothing else."""
        path: tuple[str, ...] = ()
        head = func
        while isinstance(head, ast.Attribute):
            path, head = (head.attr, *path), head.value
        path = (head.id, *path) if isinstance(head, ast.Name) else ()
        if path not in self.targets:
            self.targets[path] = self._resolve(path, func)
        return self.targets[path]

    def _resolve(self, path: tuple[str, ...], func: ast.expr) -> Any:
        text = ast.unparse(func)[:60]
        if path[:1] == ("ops",) and len(path) == 2:
            name = _RENAMED.get(path[1], path[1])
            if name in ops.__all__ and (self.lowered or name not in ops.OF_LOWERED):
                return getattr(ops, name)
        if path[:1] == ("aten",):
            path = ("torch", "ops", *path)
        if path[:2] != ("torch", "ops"):
            raise self.wrong(func.lineno, f"{text} is not an op that programs call")
        op: Any = torch.ops
        try:
            for name in path[2:]:
                op = getattr(op, name)
        except AttributeError:
            if path[2] == "aten":
                raise self.wrong(func.lineno, f"there is no op {text} in this version of torch") from None
            fix = (
                "import the module that registers it before shardc.load; on the command line, name the model file that"
                " does: --model model.py"
            )
            raise MissingOpError(
                f"nothing has registered the op {text} in this process", where=f"{self.file}:{func.lineno}", fix=fix
            ) from None
        if not isinstance(op, OpOverload):
            raise self.wrong(
                func.lineno,
                f"{text} is not an op that programs call: name an op with its overload, such as aten.add.Tensor",
            )
        if why := _effect(op):
            raise self.wrong(func.lineno, f"{text} {why}: programs call ops that only compute")
        return op

    def _arg(self, a: ast.expr) -> Any:
        match a:
            case ast.Name(id=name):
                if name in self.env:
                    return self.env[name]
                why = f"was deleted in line {self.gone[name]}" if name in self.gone else "is not defined"
                raise self.wrong(a.lineno, f"{name} {why}")
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return a.value
            case ast.Tuple():
                return tuple([self._arg(x) for x in a.elts])
            case ast.List():
                return [self._arg(x) for x in a.elts]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                constant = getattr(torch, name, None)
                if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                    return constant
            case ast.Call(
                func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" | "nan" as text)], keywords=[]
            ):
                return float(text)
            case ast.Call(func=func, args=[ast.Constant(value=str(text))], keywords=[]):
                make: Any = {"complex": complex, "torch.device": torch.device}.get(ast.unparse(func))
                with contextlib.suppress(ValueError, RuntimeError):  # the text is not a complex number or a device
                    if make is not None:
                        return make(text)
        raise self.unreadable(a, a.lineno, "the argument ")


def _effect(op: OpOverload) -> str:
    """What the op does beside computing its result; "" for those that shardc writes. Programs may come from anybody."""
    arguments = op._schema.arguments
    if any(a.alias_info is not None and a.alias_info.is_write for a in arguments):
        return "changes its arguments"
    from_text = any(str(a.type) in ("str", "Optional[str]") for a in arguments)
    if from_text and not any("Tensor" in str(a.type) for a in arguments):
        return "opens a file"
    return "" if op._schema.returns else "returns nothing"
