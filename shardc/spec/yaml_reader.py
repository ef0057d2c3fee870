"""Read YAML safely, with the place of every key and value; also overrides (`--set`) and dicts.

Only the YAML that a spec needs is allowed: mappings, lists, text, numbers, true/false and null. Anchors, aliases, tags,
merge keys, duplicate keys and several documents are errors. Words follow YAML 1.2: `on`, `no` and `012` are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardc.errors import Errors, ShardcError

Path = tuple[str | int, ...]  # ("shard", "*.o_proj", 0, "axis"): keys and list indices from the root
#: Most characters of a spec, and
LENGTH = 500_000
#: most values and keys.
VALUES = 4_000
DEPTH = 32  # deeper than any spec; keeps hostile nesting from exhausting the stack

_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {w: v for text, v in (("true", True), ("false", False)) for w in (text, text.capitalize(), text.upper())}


@dataclass
class Places:
    """The places of keys and values: path -> "spec.yaml:7:3" or "--set data.zero=3". Empty for a dict."""

    keys: dict[Path, str] = field(default_factory=dict)
    values: dict[Path, str] = field(default_factory=dict)

    def where(self, path: Path, *, value: bool = False) -> str:
        """Return the place of a key (or of its value), or of its nearest parent in the source."""
        table = self.values if value else self.keys
        for n in range(len(path), -1, -1):
            if path[:n] in table:
                return table[path[:n]]
        return f"spec: {dotted(path)}" if path else "spec"

    def put(self, path: Path, text: str) -> None:
        """Set the place of `path` and of everything under it."""
        for table in (self.keys, self.values):
            for old in [p for p in table if p[: len(path)] == path]:
                del table[old]
            table[path] = text


@dataclass(frozen=True)
class Document:
    """The parsed text. broken: paths of unreadable values, already reported: they cause no other errors."""

    value: Any
    places: Places
    broken: frozenset[Path] = frozenset()


def dotted(path: Path) -> str:
    """Format a path as people write it: `shard."*.o_proj".0`, `experts[1].axis`."""
    text = ""
    for i, part in enumerate(path):
        # depth from which a number is an item of a list; above it is a key, such as a dim
        items = {"experts": 1, "checkpoint": 1, "shard": 3, "activations": 3, "outputs": 3}.get(str(path[0]), 2)
        if isinstance(part, int) and i >= items:
            text += f"[{part}]"
        else:
            name = (
                part
                if isinstance(part, str) and _PLAIN.fullmatch(part)
                else f'"{part}"'
                if isinstance(part, str)
                else str(part)
            )
            text += f".{name}" if text else name
    return text


# --- reading


def read(text: str, file: str, errors: Errors) -> Document:
    """Read one YAML document. Syntax errors are raised; YAML that is not allowed is added to `errors`."""
    reader = _Reader(text, lambda line, column: f"{file}:{line + 1}:{column + 1}", errors)
    return reader.document()


def read_value(text: str, where: str, errors: Errors) -> Any:
    """Read the value of an override; its only place is `where`."""
    return _Reader(text, lambda line, column: where, errors).document().value


def of_mapping(value: Any) -> Any:
    """Copy a Python spec with mappings as dicts and sequences as lists, as if it were read from a file.

    Raises ShardcError for what no file can contain: endless nesting, very many values or very long numbers.
    """
    room = [VALUES]

    def copied(value: Any, path: Path) -> Any:
        room[0] -= 1
        if len(path) > DEPTH or room[0] < 0:
            fault = f"nested more than {DEPTH} deep" if room[0] >= 0 else f"a spec of more than {VALUES:,} values"
            raise ShardcError(fault, where="spec", fix="write a smaller spec; perhaps it contains itself")
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, bool) or not isinstance(key, (str, int)):
                    fault = f"a key is text or a whole number, not a {type(key).__name__}"
                    raise ShardcError(fault, where="spec", fix="quote it if it is text")
            return {copied(k, path): copied(v, (*path, "")) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [copied(v, (*path, "")) for v in value]
        if isinstance(value, int) and abs(value) >= 10**18:
            raise ShardcError("a number of more than 18 digits", where="spec", fix="write a smaller size")
        return value

    return copied(value, ())


class _Reader:
    def __init__(self, text: str, place: Callable[[int, int], str], errors: Errors) -> None:
        self.text, self.place, self.errors = text, place, errors
        self.places = Places()
        self.broken: set[Path] = set()
        self.events: Iterator[yaml.Event] = iter(())

    def document(self) -> Document:
        if len(self.text) > LENGTH:
            fix = 'patterns name many weights at once: "layers.*.{q,k,v}_proj"'
            raise ShardcError(f"a spec of more than {LENGTH:,} characters", where=self.place(0, 0), fix=fix)
        try:
            self.events = yaml.parse(self.text, Loader=yaml.SafeLoader)
            value: Any = None
            for i, event in enumerate(
                e for e in self.events if isinstance(e, (yaml.DocumentStartEvent, yaml.StreamEndEvent))
            ):
                if isinstance(event, yaml.StreamEndEvent):
                    self.places.keys.setdefault((), self.place(0, 0))
                    self.places.values.setdefault((), self.place(0, 0))
                    break
                if i == 0:
                    value = self.node(next(self.events), (), 0)
                    continue
                self._add(
                    event,
                    "a spec is one YAML document, and here a second one begins",
                    "write each spec in its own file",
                )
                break
        except yaml.MarkedYAMLError as e:
            raise self._syntax(e) from None
        except yaml.reader.ReaderError as e:
            before = self.text[: e.position]
            where = self.place(before.count("\n"), e.position - before.rfind("\n") - 1)
            fault = f"the character U+{ord(self.text[e.position]):04X} is not allowed in YAML"
            raise ShardcError(fault, where=where, fix="delete it, or save the file as UTF-8 text") from None
        return Document(value, self.places, frozenset(self.broken))

    def _syntax(self, e: yaml.MarkedYAMLError) -> ShardcError:
        mark = e.problem_mark or e.context_mark
        assert mark is not None
        line = "".join(self.text.splitlines()[mark.line : mark.line + 1])
        fix = "write `name: value`, and quote text that holds any of : # { } [ ] , * & ! |"
        if "\t" in line[: mark.column + 1]:
            fix = "indent with spaces, not tabs"
        elif (
            e.context_mark
            and e.context_mark.line < mark.line
            and (closed := re.search(r"expected ',' or '([]}])'", str(e.problem)))
        ):
            fix = f"close what line {e.context_mark.line + 1} opens, with {closed[1]!r}, before line {mark.line + 1}"
        elif pattern := re.match(r"\s*([*{][^\s:]*)", line):
            fix = f'quote the pattern: "{pattern[1]}"'
        fault = f"this is not YAML: {e.problem}"
        if e.context:
            since = f" in line {e.context_mark.line + 1}" if e.context_mark and e.context_mark.line != mark.line else ""
            fault += f" ({e.context}{since})"
        return ShardcError(fault, where=self.place(mark.line, mark.column), fix=fix)

    def _add(self, event: yaml.Event, what: str, fix: str) -> None:
        self.errors.add(what, where=self._at(event), fix=fix)

    def _at(self, event: yaml.Event) -> str:
        mark = event.start_mark
        assert mark is not None
        return self.place(mark.line, mark.column)

    def node(self, event: yaml.Event, path: Path, depth: int) -> Any:
        """Read the value that begins with `event`, and store its place under `path`."""
        self.places.values[path] = self._at(event)
        self.places.keys.setdefault(path, self.places.values[path])
        if len(self.places.values) > VALUES:
            fix = 'patterns name many weights at once: "layers.*.{q,k,v}_proj"'
            raise ShardcError(f"a spec of more than {VALUES:,} values", where=self._at(event), fix=fix)
        if depth > DEPTH:
            raise ShardcError(
                f"nested more than {DEPTH} deep", where=self._at(event), fix="no section of a spec nests so deep"
            )
        if isinstance(event, yaml.AliasEvent):
            self._add(event, f"YAML aliases are not allowed: *{event.anchor}", "write the value out")
            self.broken.add(path)
            return None
        assert isinstance(event, yaml.NodeEvent)
        if self._check(event):
            self.broken.add(path)
        if isinstance(event, yaml.ScalarEvent):
            return scalar(event.value) if event.style is None and event.tag is None else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            return [self.node(e, (*path, i), depth + 1) for i, e in enumerate(self._until(yaml.SequenceEndEvent))]
        return self._mapping(path, depth)

    def _check(self, event: yaml.NodeEvent) -> bool:
        """Report anchors and tags. Returns whether there is a tag, as the value is then unknown."""
        tag = getattr(event, "tag", None)
        if event.anchor is not None:
            self._add(event, f"YAML anchors are not allowed: &{event.anchor}", "write the value out where it is used")
        if tag is not None:
            name = tag.replace("tag:yaml.org,2002:", "!!")
            self._add(event, f"YAML tags are not allowed: {name}", "delete the tag; quote text, leave numbers bare")
        return tag is not None

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := next(self.events), end):
            yield event

    def _mapping(self, path: Path, depth: int) -> dict[str | int, Any]:
        mapping: dict[str | int, Any] = {}
        for event in self._until(yaml.MappingEndEvent):
            key, wrong, fix = self._key(event, mapping, path)
            if wrong:
                self._add(event, wrong, fix)
            spot = (*path, "\0" if wrong else key)  # a wrong entry is read too, to find mistakes inside it
            self.places.keys[spot] = self._at(event)
            value = self.node(next(self.events), spot, depth + 1)
            if not wrong:
                mapping[key] = value
        return mapping

    def _key(self, event: yaml.Event, mapping: Mapping[str | int, Any], path: Path) -> tuple[str | int, str, str]:
        """Return the key, its mistake ("" if none) and the fix."""
        if isinstance(event, yaml.AliasEvent):
            return (
                "",
                f"YAML aliases are not allowed: *{event.anchor}",
                f'quote it if it is a pattern: "*{event.anchor}"',
            )
        if not isinstance(event, yaml.ScalarEvent):
            fault = (
                "a key is text or a whole number, not"
                f" {'a list' if isinstance(event, yaml.SequenceStartEvent) else 'a mapping'}"
            )
            raise ShardcError(fault, where=self._at(event), fix='quote the pattern: "*.{q,k}_proj": column')
        self._check(event)
        plain = event.style is None and event.tag is None
        key = scalar(event.value) if plain else event.value
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            return "", f"a key is text or a whole number, not {say(key)}", "quote it if it is text"
        if plain and key == "<<":
            return "", "YAML merge keys (<<) are not allowed", "write the entries out"
        if key in mapping:
            line = re.search(r":(\d+):\d+$", self.places.keys[(*path, key)])
            return (
                "",
                f"duplicate key {say(key)}",
                "keep one of them" + (f"; the first is in line {line[1]}" if line else ""),
            )
        return key, "", ""


def scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain (unquoted) scalar, by YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def say(value: Any) -> str:
    """Format a value as in YAML, shortened, for error messages."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) < 80 else text[:76] + " ...'"


def flow(value: Any) -> str:
    """Format a value in YAML's flow form, with quotes where needed, so that `read` returns an equal value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        # for other tools, quote what YAML 1.1 reads differently (on, no, 1:30)
        if (
            re.fullmatch(r"[A-Za-z_][\w./-]*", value, re.ASCII)
            and scalar(value) == value
            and yaml.safe_load(value) == value
        ):
            return value
        return yaml.safe_dump(value, default_style='"', width=1 << 30).strip()
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value)


# --- overrides

_PART = re.compile(r'"((?:[^"\\]|\\.)*)"|\'([^\']*)\'|([^.="\'\s]+)')


def override(document: Document, setting: str, errors: Errors) -> None:
    """Put a setting (`data.zero=3`, `shard."*.o_proj"=row`) into the document. YAML null removes."""
    where = f"--set {setting}" if len(setting) < 200 else f"--set {setting[:196]} ..."
    path: list[str | int] = []
    position = 0
    while part := _PART.match(setting, position):
        quoted, single, bare = part.groups()
        path.append(int(bare) if bare and bare.isdecimal() else bare or single or quoted or "")
        position = part.end()
        if setting[position : position + 1] != "." or (
            bare and re.search(r"[*{}]", bare)
        ):  # dots in a pattern belong to it
            break
        position += 1
    if not path or setting[position : position + 1] != "=" or setting[position - 1] == ".":
        example = 'section.key=value, e.g. data.zero=3; quote patterns: shard."*.o_proj"=row'
        errors.add("cannot read this override", where=where, fix=f"write {example}")
        return
    if len(path) > DEPTH:
        fix = "no section of a spec nests so deep"
        errors.add(f"a path of {len(path)} keys: no more than {DEPTH} are allowed", where=where, fix=fix)
        return
    with errors.collect():
        put(document, tuple(path), read_value(setting[position + 1 :], where, errors), where)


def put(document: Document, path: Path, value: Any, where: str) -> None:
    """Set `path` in the document to `value`, and create mappings on the way. where: its place from now on."""
    node: Any = document.value
    for i, part in enumerate(path):
        last = i + 1 == len(path)
        if isinstance(node, dict):
            if last:
                node[part] = value
            elif node.get(part) is None:
                node[part] = {}
                document.places.put(path[: i + 1], where)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            if last:
                node[part] = value
        elif isinstance(node, list):
            fix = f"use an index from 0 to {len(node) - 1}" if node else f"set {dotted(path[:i])} itself"
            raise ShardcError(
                f"{dotted(path[:i])} is a list of {len(node)} without an item {say(part)}", where=where, fix=fix
            )
        else:
            fix = f"set {dotted(path[:i])} itself"
            raise ShardcError(
                f"{dotted(path[:i])} is {say(node)}, which cannot contain {say(part)}", where=where, fix=fix
            )
        node = node if last else node[part]
    document.places.put(path, where)


def without(value: Any, path: Path) -> None:
    """Delete the entry at `path` of a nested value, in place."""
    for part in path[:-1]:
        value = value[part]
    del value[path[-1]]


def reach(value: Any, location: Iterable[str | int]) -> Path:
    """Return the longest path into `value` that follows `location`, without steps that do not exist."""
    path: list[str | int] = []
    for part in location:
        if part in (value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
            value = value[part]
            path.append(part)
    return tuple(path)
