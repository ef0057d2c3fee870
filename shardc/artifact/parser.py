"""Read a program's text (shardc.artifact.emit) back into its graph. Nothing in the text is executed."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import HEADER, NO_TENSOR, value_text
from shardc.artifact.program_ops import refusal
from shardc.artifact.rows import typed
from shardc.artifact.tables import axis_fault
from shardc.errors import ShardcError
from shardc.ir.conversions import COLLECTIVES
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Collective, HostCopy, Value
from shardc.ir.source import Source
from shardc.runtime import ops
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers torch.ops.shardc.*)
from shardc.torch_private import OpOverload

_OF = re.compile(r"# (\w+) (backward|again), (.*)$")
_COLLECTIVE = re.compile(r"(\w+)/(\w+) (\S+) (?:(\d{1,18})/)?(\d{1,18}) (implicit )?(\".*\")$")
_NAME = r'"(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*"'  # as JSON writes strings
_REGION = re.compile(rf"region {_NAME}(?: kept {_NAME}(?: {_NAME})*)?(?: again (\d{{1,9}}))?(?: \| |$)")
_FUSED = re.compile(r"fused (\d{1,9})(?: \| |$)")
_COPY = re.compile(rf"copy (\d{{1,18}}) ({_NAME})$")
_PREAMBLE = set(HEADER.splitlines())
_ARGUMENT = re.compile(r"    (\w+),(?:\s*# ?(.*))?$", re.ASCII)
_ARGUMENTS = "the function's arguments are not those that the layouts list"
#: Names of collectives: moves, the send between stages, and "none" for no collective.
_KINDS = {*COLLECTIVES, "send_recv", "none"}
#: The most parts of a line: Python takes up to a kilobyte for each. A stage of 126 layers returns some four thousand.
PARTS = 30_000
LENGTH = 1_000_000
#: The most braces of a line: Python reads a formatted string again for each. Programs have them only in strings.
BRACES = 200
_SEPARATORS = " ,.([{+-*/%<>=&|^~@"


def source_of_text(comment: str) -> Source | None:
    """Return the source of a comment `# module (file.py:31): code`; None for another comment."""
    start = comment.find(" (", 3)
    if not comment.startswith("# ") or start < 0:
        return None
    end = comment.find(")", start)
    while end >= 0:
        module, line, rest = comment[2:start], comment[start + 2 : end], comment[end + 1 :]
        if not rest or rest.startswith(": "):
            return Source("" if module == "·" else module, line, rest[2:])
        end = comment.find(")", end + 1)
    return None


class MissingOpError(ShardcError):
    """A program calls a user's op that is not registered in this process. meta: the program's."""

    meta: Mapping[str, Any] = {}


@dataclass
class Reader:
    """Reads the graph of the only function in a text.

    types: of params, buffers and inputs, in order, by name (from the artifact's layouts); those in the text must agree.
    piped: the function is a pipeline's stage: it takes some of the types, and then values of other stages. joint: it is
    half of a stage: it takes any of them, and others. regions: the names of existing regions; None: any. unknown_ops:
    also allow ops without a rule.
    """

    text: str
    mesh: Mesh
    types: Mapping[str, Value]
    file: str = "program"
    piped: bool = False
    joint: bool = False
    regions: Collection[str] | None = None
    unknown_ops: bool = False
    of: dict[str, Any] = field(default_factory=dict)  # the forward op of the following lines of backward
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[str, fx.Node] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)  # deleted name -> line
    targets: dict[tuple[str, ...], Any] = field(default_factory=dict)
    line: int = 1  # number of the line that is read

    def run(self) -> fx.Graph:
        """Return the graph. Raises ShardcError with file and line for anything that `emit` would not write.

        Lines are read one by one: nothing behind a wrong line is built.
        """
        self.lines = self.text.split("\n")
        try:
            return self._graph()
        except ValueError as e:
            fix = "keep to the form in which shardc writes programs, or compile again"
            raise ShardcError(str(e), where=f"{self.file}:{self.line}", fix=fix) from None

    def _graph(self) -> fx.Graph:
        source, returned = Source(), False
        body = self._function()
        for text in self._lines(body, len(self.lines)):
            content = text.strip()
            if not content:
                continue
            if content.startswith("#"):
                if self.joint:
                    m = _OF.match(content)
                    self.of = {"of": m[1], **({"repeats": True} if m[2] == "again" else {})} if m else {}
                    content = f"# {m[3]}" if m else content
                source = source_of_text(content) or source
                continue
            if returned:
                raise ValueError("nothing can follow the return")
            statement = self._statement(content)
            comment = _rest_of_line(content, statement).strip().removeprefix("# ")
            match statement:
                case ast.Return(value=ast.expr() as value):
                    self.graph.output(self._arg(value))
                    returned = True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._op(name, value, comment, source)
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(attr="launch" | "accumulate" | "scatter")) as value
                ) if self.joint:
                    self._op("", value, f"{NO_TENSOR} | {comment}" if comment else NO_TENSOR, source)
                case ast.Delete(targets=targets):
                    self._delete(targets)
                case _:
                    raise _unreadable(statement)
        if not returned:
            raise ValueError("the function returns nothing")
        self.graph.lint()
        return self.graph

    def _lines(self, begin: int, end: int) -> Iterator[str]:
        for self.line in range(begin + 1, end + 1):
            yield self.lines[self.line - 1]

    def _statement(self, text: str) -> ast.stmt:
        """Parse the only statement of a line."""
        parts = sum(map(text.count, _SEPARATORS)) if PARTS < len(text) < LENGTH else 0
        if parts > PARTS or len(text) >= LENGTH or text.count("{") > BRACES:
            raise ValueError(f"a line of more than {PARTS:,} parts, {LENGTH:,} characters or {BRACES} braces")
        try:
            tree = ast.parse(text, self.file)  # Python reads the line of an error from the file of this name
        except (SyntaxError, ValueError) as e:  # the latter for a null byte, before Python 3.12
            raise ValueError(f"not Python: {getattr(e, 'msg', e)}") from None
        except (RecursionError, MemoryError):  # the latter is what Python's parser calls the former
            raise ValueError("nested too deeply") from None
        if len(tree.body) != 1:
            raise _unreadable(tree.body[0])
        return tree.body[0]

    def _function(self) -> int:
        """Create the placeholders of the only function. Returns the number of lines before its body."""
        begins = [i for i, line in enumerate(self.lines) if line.startswith(("def ", "async def ", "class "))]
        if len(begins) != 1:
            raise ValueError(f"{len(begins)} functions, not one")
        (begin,) = begins
        in_docstring = False
        for text in self._lines(0, begin):
            quotes = text.count('"""')
            inside, in_docstring = in_docstring, in_docstring != (quotes % 2 == 1)
            if not inside and not quotes and text not in _PREAMBLE and not text.startswith("#"):
                raise ValueError(f"cannot read {text.strip()[:60]!r}")
        self.line = begin + 1
        if not re.fullmatch(r"def \w+\(", self.lines[begin], re.ASCII):
            raise ValueError("not Python that shardc writes: a program begins with a line `def forward(`")
        end = next((i for i, line in enumerate(self.lines[begin:], begin) if line == "):"), None)
        if end is None:
            raise ValueError("not Python that shardc writes: no line `):` ends the function's arguments")
        arguments: list[tuple[str, str, int]] = []  # (name, comment, line)
        for text in self._lines(begin + 1, end):
            if argument := _ARGUMENT.match(text):
                arguments.append((argument[1], (argument[2] or "").strip(), self.line))
            elif not text.lstrip().startswith("#"):
                raise ValueError(f"{_ARGUMENTS}: another order or form")
        self.line = begin + 1
        self._check_names([name for name, _, _ in arguments])
        for name, comment, self.line in arguments:
            node = self.env[name] = self.graph.placeholder(name)
            if node.name != name:
                raise ValueError(f"{name} is a name that Python uses")
            node.meta = {"value": self.types.get(name), "source": Source()}
            if name not in ("mesh", "rng", *self.types):
                self._received(node, comment)
            elif name in self.types and comment and comment.partition("  ")[0] != value_text(self.types[name]):
                raise ValueError(f"{name} is {comment[:80]} here, but {value_text(self.types[name])} in the layouts")
        return end + 1

    def _check_names(self, taken: list[str]) -> None:
        """Check the names of the arguments: a piped or joint function takes some, and others after them."""
        names = ["mesh", "rng", *self.types]
        if self.piped or self.joint:
            names = [n for n in names if n in taken] + [n for n in taken if n not in names]
        if taken != names:
            off = [f"{n!r} is missing" for n in names if n not in taken]
            off += [f"{n!r} is not listed" for n in sorted({*taken} - set(names))]
            raise ValueError(f"{_ARGUMENTS}: {', '.join(off[:5]) or 'another order or form'}")

    def _received(self, node: fx.Node, comment: str) -> None:
        """Describe a value of another stage, whose source is on the line before, or of another half of the stage."""
        if self.joint and " | " not in comment:
            node.meta["value"] = self._types(comment)
            return
        self._describe(node, comment, source_of_text(self.lines[self.line - 2].strip()) or Source())
        if "collective" not in node.meta:
            raise ValueError(f"{node.name} is not in the layouts, and no collective is given that sends it")

    def _delete(self, targets: Iterable[ast.expr]) -> None:
        for t in targets:
            if not isinstance(t, ast.Name) or t.id not in self.env:
                raise _unreadable(t, "the deletion of ")
            del self.env[t.id]
            self.gone[t.id] = self.line

    def _op(self, name: str, value: ast.expr, comment: str, source: Source) -> None:
        match value:
            case ast.Subscript():
                target: Any = operator.getitem
                args: tuple[Any, ...] = (self._arg(value.value), self._arg(value.slice))
                kwargs: dict[str, Any] = {}
            case ast.Call() if all(k.arg for k in value.keywords):
                target = self._target(value.func)
                args = tuple(map(self._arg, value.args))
                if target is ops.opaque:
                    self._opaque(args[0] if args else None)
                kwargs = {str(k.arg): self._arg(k.value) for k in value.keywords}
            case _:
                raise _unreadable(value)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name or None)
        if name and node.name != name:
            raise ValueError(f"{name} is assigned twice, or is a name that Python uses")
        self._describe(node, comment, source)
        if name:
            self.env[name] = node

    def _opaque(self, name: Any) -> None:
        """Check that the op that `ops.opaque` calls is one that programs may call."""
        try:
            named = isinstance(name, str) and len(name) < 200
            op = self._target(ast.parse(name, self.file, mode="eval").body) if named else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            op = None
        if op is None or getattr(op, "__name__", "") in ops.OF_GRAPHS:
            raise ValueError(f"ops.opaque of {str(name)[:60]!r}: that is not an op that programs call")

    def _describe(self, node: fx.Node, comment: str, source: Source) -> None:
        """Set a node's type, source, region and collective from the comment that follows it."""
        types, _, rest = comment.partition(" | ")
        node.meta = {"value": self._types(types), "source": source, **self.of}
        if self.joint and (m := _FUSED.match(rest)):
            node.meta["fused"] = int(m[1])
            rest = rest[m.end() :]
        if self.joint and (m := _COPY.match(rest)):
            node.meta["copy"] = HostCopy(int(m[1]), json.loads(m[2]))
            rest = rest[m.end() :]
        if m := _REGION.match(rest):
            region, *kept = map(json.loads, re.findall(_NAME, m[0]))
            if missing := [n for n in (region, *kept) if self.regions is not None and n not in self.regions]:
                raise ValueError(f"there is no region {missing[0][:60]!r} in the layouts")
            node.meta |= {"region": region} | ({"kept": tuple(kept)} if kept else {})
            node.meta |= {"again": int(m[1])} if m[1] else {}
            rest = rest[m.end() :]
        if rest:
            node.meta["collective"] = self._collective(rest)

    def _collective(self, text: str) -> Collective:
        if not (m := _COLLECTIVE.match(text)):
            raise ValueError(f"cannot read {text[:80]!r}")
        axes = tuple(m[3].split("+"))
        if not {m[1], m[2]} <= _KINDS:
            raise ValueError(f"there is no collective {m[1]}/{m[2]}")
        if why := next(filter(None, (axis_fault(a, self.mesh) for a in axes)), ""):
            raise ValueError(why)
        return Collective(m[1], m[2], axes, int(m[5]), json.loads(m[7]), bool(m[6]), int(m[4] or 0))

    def _types(self, text: str) -> Any:
        """Return the type of a value, or the types of several; None for no tensor, in half of a stage."""
        return tuple(map(self._type, text[1:-1].split(" ; "))) if text.startswith("(") else self._type(text)

    def _type(self, text: str) -> Value | None:
        if text == NO_TENSOR and self.joint:
            return None
        bare = text.removesuffix(" grad")
        shape, dtype, layout = typed(bare, self.mesh)
        return Value(shape, dtype, bare != text, layout)

    def _target(self, func: ast.expr) -> Any:
        """Return the op that `aten.add.Tensor`, `torch.ops.lib.op.default` or `ops.all_reduce` names."""
        path: tuple[str, ...] = ()
        head = func
        while isinstance(head, ast.Attribute) and len(path) < 5:
            path, head = (head.attr, *path), head.value
        path = (head.id, *path) if isinstance(head, ast.Name) else ()
        if path not in self.targets:
            self.targets[path] = self._resolve(path, _written(func))
        return self.targets[path]

    def _resolve(self, path: tuple[str, ...], text: str) -> Any:
        of_ours = path[:1] == ("ops",) and len(path) == 2
        if of_ours and (known := ops.named(path[1], joint=self.joint)) is not None:
            return known
        if path[:1] == ("aten",):
            path = ("torch", "ops", *path)
        # only ops: other attributes of torch.ops load a library, or name the loaded files
        op: Any = torch.ops if path[:2] == ("torch", "ops") and len(path) == 5 else None
        try:
            for name in path[2:] if op is not None else ():
                op = getattr(op, name)
        except (AttributeError, RuntimeError):
            if path[2] == "aten":
                raise ValueError(f"there is no op {text} in this version of torch") from None
            fault = f"nothing has registered the op {text} in this process"
            fix = "import the module that registers it before shardc.load"
            fix += "; on the command line, name the model file that does: --model model.py"
            raise MissingOpError(fault, where=f"{self.file}:{self.line}", fix=fix) from None
        if not isinstance(op, OpOverload):
            which = ": name an op with its overload, such as aten.add.Tensor" if path[:2] == ("torch", "ops") else ""
            raise ValueError(f"{text} is not an op that programs call{which}")
        if why := refusal(op, joint=self.joint, unknown=self.unknown_ops):
            raise ValueError(f"{text} {why}")
        return op

    def _arg(self, a: ast.expr) -> Any:
        match a:
            case ast.Name(id=name):
                if name in self.env:
                    return self.env[name]
                why = f"was deleted in line {self.gone[name]}" if name in self.gone else "is not defined"
                raise ValueError(f"{name[:60]} {why}")
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return a.value
            case ast.Tuple():
                return tuple(map(self._arg, a.elts))
            case ast.List():
                return list(map(self._arg, a.elts))
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
                make: Any = {"complex": complex, "torch.device": torch.device}.get(_written(func))
                with contextlib.suppress(ValueError, RuntimeError):  # the text is not a complex number or a device
                    if make is not None:
                        return make(text)
        raise _unreadable(a, "the argument ")


def _unreadable(node: ast.AST, what: str = "") -> ValueError:
    return ValueError(f"cannot read {what}{_written(node)!r}")


def _written(node: ast.AST) -> str:
    """Return the beginning of a node's code."""
    try:
        return ast.unparse(node)[:60]
    except (RecursionError, ValueError):
        return "what is nested very deeply, or a number of thousands of digits"


def _rest_of_line(line: str, statement: ast.stmt) -> str:
    """Return what follows a statement on its line. (ast counts bytes, so non-ASCII text is encoded.)"""
    assert statement.end_col_offset is not None
    if line.isascii():
        return line[statement.end_col_offset :]
    return line.encode()[statement.end_col_offset :].decode()
