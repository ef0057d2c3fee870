"""Read a program's text (shardc.emit) back into its graph. The text is straight-line Python: nothing in it is executed here."""

from __future__ import annotations

import ast
import io
import json
import operator
import re
import tokenize
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.mesh import Mesh
from shardc.placement import Layout
from shardc.placement import parse as parse_type
from shardc.program import Collective, Source, Value
from shardc.runtime import ops

_SOURCE = re.compile(r"# (\S+) \(([^)]*)\)(?:: (.*))?$")
_COLLECTIVE = re.compile(r"(\w+)/(\w+) (\S+) (\d+) (unasked )?(\".*\")$")


def graph_of(text: str, mesh: Mesh, types: Mapping[str, Value], file: str = "program") -> fx.Graph:
    """The graph of the one function in a text. types: of the placeholders, by name (from the artifact's layouts).

    Raises ShardcError with file and line for anything that `shardc.emit` would not have written.
    """
    return _Reader(text, mesh, types, file).run()


class _Reader:
    def __init__(self, text: str, mesh: Mesh, types: Mapping[str, Value], file: str) -> None:
        self.text, self.mesh, self.types, self.file = text, mesh, types, file
        self.graph = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.seen: dict[str, Value | tuple[Value, ...]] = {}

    def wrong(self, line: int, what: str) -> ShardcError:
        return ShardcError(what, where=f"{self.file}:{line}", fix="keep to the form in which shardc writes programs, or compile again")

    def run(self) -> fx.Graph:
        try:
            tree = ast.parse(self.text)
        except SyntaxError as e:
            raise self.wrong(e.lineno or 1, f"not Python: {e.msg}") from None
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        if len(functions) != 1:
            raise self.wrong(1, f"{len(functions)} functions, not one")
        comments = {
            t.start[0]: t.string for t in tokenize.generate_tokens(io.StringIO(self.text).readline) if t.type == tokenize.COMMENT
        }
        sources = {line: c for line, c in comments.items() if not self.text_before(line)}
        for a in functions[0].args.args:
            node = self.graph.placeholder(a.arg)
            node.meta = {"value": self.types.get(a.arg), "source": Source()}
            self.env[a.arg] = node
        source, said = Source(), sorted(sources)
        for statement in functions[0].body:
            line = statement.lineno
            while said and said[0] < line:
                source = self._source(sources[said.pop(0)], source)
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                self.graph.output(self._arg(statement.value))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._op(statement.targets[0].id, statement.value, comments.get(line, ""), source, line)
            elif not isinstance(statement, ast.Delete):
                raise self.wrong(line, f"cannot read {ast.unparse(statement)[:60]!r}")
        self.graph.lint()
        return self.graph

    def text_before(self, line: int) -> str:
        return self.text.splitlines()[line - 1].partition("#")[0].strip()

    def _source(self, comment: str, before: Source) -> Source:
        m = _SOURCE.match(comment)
        return Source("" if m[1] == "·" else m[1], m[2], m[3] or "") if m else before

    def _op(self, name: str, value: ast.expr, comment: str, source: Source, line: int) -> None:
        if isinstance(value, ast.Subscript):
            target: Any = operator.getitem
            args: tuple[Any, ...] = (self._arg(value.value), self._arg(value.slice))
            kwargs: dict[str, Any] = {}
        elif isinstance(value, ast.Call):
            target = self._target(value.func, line)
            args = tuple(self._arg(a) for a in value.args)
            kwargs = {k.arg: self._arg(k.value) for k in value.keywords if k.arg}
        else:
            raise self.wrong(line, f"cannot read {ast.unparse(value)[:60]!r}")
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if node.name != name:
            raise self.wrong(line, f"{name} is assigned twice")
        typed, _, collective = comment.removeprefix("# ").partition(" | ")
        node.meta = {"value": self._types(typed, line), "source": source}
        if collective:
            m = _COLLECTIVE.match(collective)
            if not m:
                raise self.wrong(line, f"cannot read the collective {collective!r}")
            node.meta["collective"] = Collective(m[1], m[2], tuple(m[3].split("+")), int(m[4]), json.loads(m[6]), not m[5])
        self.env[name] = node

    def _types(self, text: str, line: int) -> Value | tuple[Value, ...]:
        if text not in self.seen:
            try:
                if text.startswith("("):
                    self.seen[text] = tuple(self._type(t) for t in text[1:-1].split(" ; "))
                else:
                    self.seen[text] = self._type(text)
            except ValueError as e:
                raise self.wrong(line, str(e)) from None
        return self.seen[text]

    def _type(self, text: str) -> Value:
        bare = text.removesuffix(" grad")
        shape, dtype, placements = parse_type(bare)
        return Value(shape, dtype, bare != text, Layout.of(placements, self.mesh))

    def _target(self, func: ast.expr, line: int) -> Any:
        path = ast.unparse(func).split(".")
        at: Any = {"aten": torch.ops.aten, "torch": torch, "ops": ops}.get(path[0])
        known = path[0] == "aten" or path[:2] == ["torch", "ops"] or (path[0] == "ops" and len(path) == 2 and path[1] in ops.__all__)
        if not known:
            raise self.wrong(line, f"{'.'.join(path)} is no op that programs call")
        try:
            for name in path[1:]:
                at = getattr(at, name)
        except AttributeError:
            raise self.wrong(line, f"there is no op {'.'.join(path)} in this version of torch") from None
        return at

    def _arg(self, a: ast.expr) -> Any:
        match a:
            case ast.Name():
                if a.id not in self.env:
                    raise self.wrong(a.lineno, f"{a.id} is not defined")
                return self.env[a.id]
            case ast.Constant():
                return a.value
            case ast.Tuple():
                return tuple(map(self._arg, a.elts))
            case ast.List():
                return list(map(self._arg, a.elts))
            case ast.UnaryOp(op=ast.USub()):
                return -self._arg(a.operand)
            case ast.Attribute(value=ast.Name(id="torch")) if isinstance(getattr(torch, a.attr, None), torch.dtype):
                return getattr(torch, a.attr)
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
                return float(text)
        raise self.wrong(a.lineno, f"cannot read the argument {ast.unparse(a)[:60]!r}")
