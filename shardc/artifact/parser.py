"""Read a program's text (shardc.artifact.emit) back into its graph. Nothing in the text is executed."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping
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
_REGION = re.compile(rf"({_NAME})(?: kept ({_NAME}(?: {_NAME})*))?(?: again (\d{{1,9}}))?(?: \| |$)")
_FUSED = re.compile(r"fused (\d{1,9})(?: \| |$)")
_COPY = re.compile(rf"copy (\d{{1,18}}) ({_NAME})$")
_PREAMBLE = set(HEADER.splitlines())
_ARGUMENT = re.compile(r"    (\w+),(?:\s*# ?(.*))?$", re.ASCII)
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

    def __post_init__(self) -> None:
        self.lines = self.text.split("\n")

    def wrong(self, line: int, what: str) -> ShardcError:
        return ShardcError(
            what, where=f"{self.file}:{line}", fix="keep to the form in which shardc writes programs, or compile again"
        )

    def unreadable(self, node: ast.AST, line: int, what: str = "") -> ShardcError:
        return self.wrong(line, f"cannot read {what}{_written(node)!r}")

    def run(self) -> fx.Graph:
        """Return the graph. Raises ShardcError with file and line for anything that `emit` would not write.

        Lines are read one by one: nothing behind a wrong line is built.
        """
        source, returned = Source(), False
        body = self._function()
        for line, text in enumerate(self.lines[body:], body + 1):
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
                raise self.wrong(line, "nothing can follow the return")
            statement = self._statement(content, line)
            comment = _rest_of_line(content, statement).strip().removeprefix("# ")
            match statement:
                case ast.Return(value=ast.expr() as value):
                    self.graph.output(self._arg(value, line))
                    returned = True
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._op(name, value, comment, source, line)
                case ast.Expr(
                    value=ast.Call(func=ast.Attribute(attr="launch" | "accumulate" | "scatter")) as value
                ) if self.joint:
                    self._op("", value, f"{NO_TENSOR} | {comment}" if comment else NO_TENSOR, source, line)
                case ast.Delete(targets=targets):
                    self._delete(targets, line)
                case _:
                    raise self.unreadable(statement, line)
        if not returned:
            raise self.wrong(len(self.lines), "the function returns nothing")
        self.graph.lint()
        return self.graph

    def _statement(self, text: str, line: int) -> ast.stmt:
        """Parse the only statement of a line."""
        parts = sum(map(text.count, _SEPARATORS)) if PARTS < len(text) < LENGTH else 0
        if parts > PARTS or len(text) >= LENGTH or text.count("{") > BRACES:
            raise self.wrong(line, f"a line of more than {PARTS:,} parts, {LENGTH:,} characters or {BRACES} braces")
        try:
            tree = ast.parse(text, self.file)  # Python reads the line of an error from the file of this name
        except SyntaxError as e:
            raise self.wrong(line, f"not Python: {e.msg}") from None
        except ValueError as e:  # a null byte, before Python 3.12
            raise self.wrong(line, f"not Python: {e}") from None
        except (RecursionError, MemoryError):  # the latter is what Python's parser calls the former
            raise self.wrong(line, "nested too deeply") from None
        if len(tree.body) != 1:
            raise self.unreadable(tree.body[0], line)
        return tree.body[0]

    def _function(self) -> int:
        """Create the placeholders of the only function. Returns the number of lines before its body."""
        begins = [i for i, line in enumerate(self.lines) if line.startswith(("def ", "async def ", "class "))]
        if len(begins) != 1:
            raise self.wrong(1, f"{len(begins)} functions, not one")
        (begin,) = begins
        in_docstring = False
        for i, line in enumerate(self.lines[:begin], 1):
            quotes = line.count('"""')
            inside, in_docstring = in_docstring, in_docstring != (quotes % 2 == 1)
            if not inside and not quotes and line not in _PREAMBLE and not line.startswith("#"):
                raise self.wrong(i, f"cannot read {line.strip()[:60]!r}")
        if not re.fullmatch(r"def \w+\(", self.lines[begin], re.ASCII):
            raise self.wrong(begin + 1, "not Python that shardc writes: a program begins with a line `def forward(`")
        end = next((i for i, line in enumerate(self.lines[begin:], begin) if line == "):"), None)
        if end is None:
            raise self.wrong(begin + 1, "not Python that shardc writes: no line `):` ends the function's arguments")
        arguments: list[tuple[str, str, int]] = []  # (name, comment, line)
        for at, text in enumerate(self.lines[begin + 1 : end], begin + 2):
            if not (argument := _ARGUMENT.match(text)):
                if text.lstrip().startswith("#"):
                    continue
                raise self.wrong(
                    at, "the function's arguments are not those that the layouts list: another order or form"
                )
            arguments.append((argument[1], (argument[2] or "").strip(), at))
        taken = [name for name, _, _ in arguments]
        names = ["mesh", "rng", *self.types]
        if self.piped or self.joint:
            names = [n for n in names if n in taken] + [n for n in taken if n not in names]
        if taken != names:
            off = [f"{n!r} is missing" for n in names if n not in taken] + [
                f"{n!r} is not listed" for n in sorted({*taken} - set(names))
            ]
            why = ", ".join(off[:5]) or "another order or form"
            raise self.wrong(begin + 1, f"the function's arguments are not those that the layouts list: {why}")
        for name, comment, at in arguments:
            node = self.graph.placeholder(name)
            if node.name != name:
                raise self.wrong(at, f"{name} is a name that Python uses")
            self.env[name] = node
            node.meta = {"value": self.types.get(name), "source": Source()}
            if name not in ("mesh", "rng", *self.types):
                if self.joint and comment.partition(" | ")[2] == "":
                    node.meta["value"] = self._types(comment, at)
                else:
                    self._received(node, comment, at)
                continue
            written = comment.partition("  ")[0]
            if written and name in self.types and written != value_text(self.types[name]):
                raise self.wrong(
                    at, f"{name} is {written[:80]} here, but {value_text(self.types[name])} in the layouts"
                )
        return end + 1

    def _received(self, node: fx.Node, comment: str, line: int) -> None:
        """Describe a value of another stage; the line before it has its source."""
        source = source_of_text(self.lines[line - 2].strip()) or Source()
        self._describe(node, comment, source, line)
        if "collective" not in node.meta:
            raise self.wrong(line, f"{node.name} is not in the layouts, and no collective is given that sends it")

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
                args: tuple[Any, ...] = (self._arg(value.value, line), self._arg(value.slice, line))
                kwargs: dict[str, Any] = {}
            case ast.Call() if all(k.arg for k in value.keywords):
                target = self._target(value.func, line)
                args = tuple([self._arg(a, line) for a in value.args])
                if target is ops.opaque:
                    self._opaque(args[0] if args else None, line)
                kwargs = {str(k.arg): self._arg(k.value, line) for k in value.keywords}
            case _:
                raise self.unreadable(value, line)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name or None)
        if name and node.name != name:
            raise self.wrong(line, f"{name} is assigned twice, or is a name that Python uses")
        self._describe(node, comment, source, line)
        if name:
            self.env[name] = node

    def _opaque(self, name: Any, line: int) -> None:
        """Check that the op that `ops.opaque` calls is one that programs may call."""
        try:
            named = isinstance(name, str) and len(name) < 200
            op = self._target(ast.parse(name, self.file, mode="eval").body, line) if named else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            op = None
        if op is None or getattr(op, "__name__", "") in ops.OF_GRAPHS:
            raise self.wrong(line, f"ops.opaque of {str(name)[:60]!r}: that is not an op that programs call")

    def _describe(self, node: fx.Node, comment: str, source: Source, line: int) -> None:
        """Set a node's type, source, region and collective from the comment that follows it."""
        typed, _, collective = comment.partition(" | ")
        node.meta = {"value": self._types(typed, line), "source": source, **self.of}
        if self.joint and (fused := _FUSED.match(collective)):
            node.meta["fused"] = int(fused[1])
            collective = collective[fused.end() :]
        if self.joint and (copy := _COPY.match(collective)):
            node.meta["copy"] = HostCopy(int(copy[1]), json.loads(copy[2]))
            collective = ""
        if collective.startswith("region "):
            collective = self._region(node, collective.removeprefix("region "), line)
        if collective:
            m = _COLLECTIVE.match(collective)
            if not m:
                raise self.wrong(line, f"cannot read the collective {collective[:80]!r}")
            try:
                cause = json.loads(m[7])
            except json.JSONDecodeError as e:
                raise self.wrong(line, f"cannot read the cause {m[7][:80]}: {e.msg}") from None
            axes = tuple(m[3].split("+"))
            if not {m[1], m[2]} <= _KINDS:
                raise self.wrong(line, f"there is no collective {m[1]}/{m[2]}")
            if why := next(filter(None, (axis_fault(a, self.mesh) for a in axes)), ""):
                raise self.wrong(line, why)
            node.meta["collective"] = Collective(m[1], m[2], axes, int(m[5]), cause, bool(m[6]), int(m[4] or 0))

    def _region(self, node: fx.Node, text: str, line: int) -> str:
        """Read a region, who keeps the result, and how often it is repeated. Returns the rest of the text."""
        m = _REGION.match(text)
        if not m:
            raise self.wrong(line, f"cannot read the region {text[:80]!r}")
        node.meta["region"] = json.loads(m[1])
        if m[2]:
            node.meta["kept"] = tuple(json.loads(name) for name in re.findall(_NAME, m[2]))
        for name in (node.meta["region"], *node.meta.get("kept", ())):
            if self.regions is not None and name not in self.regions:
                raise self.wrong(line, f"there is no region {name[:60]!r} in the layouts")
        if m[3]:
            node.meta["again"] = int(m[3])
        return text[m.end() :]

    def _types(self, text: str, line: int) -> Any:
        """Return the type of a value, or the types of several; None for no tensor, in half of a stage."""
        try:
            if text.startswith("("):
                return tuple(map(self._type, text[1:-1].split(" ; ")))
            return self._type(text)
        except ValueError as e:
            raise self.wrong(line, str(e)) from None

    def _type(self, text: str) -> Value | None:
        if text == NO_TENSOR and self.joint:
            return None
        bare = text.removesuffix(" grad")
        shape, dtype, layout = typed(bare, self.mesh)
        return Value(shape, dtype, bare != text, layout)

    def _target(self, func: ast.expr, line: int) -> Any:
        """Return the op that `aten.add.Tensor`, `torch.ops.lib.op.default` or `ops.all_reduce` names."""
        path: tuple[str, ...] = ()
        head = func
        while isinstance(head, ast.Attribute) and len(path) < 5:
            path, head = (head.attr, *path), head.value
        path = (head.id, *path) if isinstance(head, ast.Name) else ()
        if path not in self.targets:
            self.targets[path] = self._resolve(path, _written(func), line)
        return self.targets[path]

    def _resolve(self, path: tuple[str, ...], text: str, line: int) -> Any:
        of_ours = path[:1] == ("ops",) and len(path) == 2
        if of_ours and (known := ops.named(path[1], joint=self.joint)) is not None:
            return known
        if path[:1] == ("aten",):
            path = ("torch", "ops", *path)
        # only ops: other attributes of torch.ops load a library, or name the loaded files
        if path[:2] != ("torch", "ops") or len(path) != 5:
            if path[:2] == ("torch", "ops") and len(path) == 4:
                raise self.wrong(
                    line,
                    f"{text} is not an op that programs call: name an op with its overload, such as aten.add.Tensor",
                )
            raise self.wrong(line, f"{text} is not an op that programs call")
        op: Any = torch.ops
        try:
            for name in path[2:]:
                op = getattr(op, name)
        except (AttributeError, RuntimeError):
            if path[2] == "aten":
                raise self.wrong(line, f"there is no op {text} in this version of torch") from None
            fix = (
                "import the module that registers it before shardc.load; on the command line, name the model file that"
                " does: --model model.py"
            )
            raise MissingOpError(
                f"nothing has registered the op {text} in this process", where=f"{self.file}:{line}", fix=fix
            ) from None
        if not isinstance(op, OpOverload):
            raise self.wrong(
                line, f"{text} is not an op that programs call: name an op with its overload, such as aten.add.Tensor"
            )
        if why := refusal(op, joint=self.joint, unknown=self.unknown_ops):
            raise self.wrong(line, f"{text} {why}")
        return op

    def _arg(self, a: ast.expr, line: int) -> Any:
        match a:
            case ast.Name(id=name):
                if name in self.env:
                    return self.env[name]
                why = f"was deleted in line {self.gone[name]}" if name in self.gone else "is not defined"
                raise self.wrong(line, f"{name[:60]} {why}")
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return a.value
            case ast.Tuple():
                return tuple([self._arg(x, line) for x in a.elts])
            case ast.List():
                return [self._arg(x, line) for x in a.elts]
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
        raise self.unreadable(a, line, "the argument ")


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
