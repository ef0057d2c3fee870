"""Read records of text: a JSON Lines file or a dataset; and conversations in their usual forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest
from shardc.runtime.data.samples import check_again

#: Names of roles in public datasets, and what chat templates call them.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "function", "ipython"), "tool"),
}
FORMS = "`messages` (role, content), `conversations` (from, value), or `prompt` and `completion`"


class Records(list[Any]):
    """The records of a file. places: FILE:LINE of each, for errors."""

    def __init__(self, records: Iterable[Any], places: list[str]) -> None:
        super().__init__(records)
        self.places = places

    def __getitem__(self, i: Any) -> Any:
        part = super().__getitem__(i)
        return Records(part, self.places[i]) if isinstance(i, slice) else part


def read(source: str | Path) -> Records:
    """Return the records of a .jsonl file. Raises ShardcError with the line of a mistake."""
    path, fix = Path(source).expanduser(), "write one JSON object a line"
    if not path.is_file() or path.suffix != ".jsonl":
        near = nearest(path.name, [p.name for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else [])
        fix = f"did you mean {path.parent / near}?" if near else "name a .jsonl file with a JSON object a line"
        fault = f"{path} is no .jsonl file" if path.exists() else f"there is no file {path}"
        raise ShardcError(fault, where="data", fix=f"{fix} Other files: give datasets.load_dataset(...)")
    every = Records([], [])
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        try:
            if line.strip():
                every.append(json.loads(line))
                every.places.append(f"{path}:{number}")
        except ValueError as e:
            raise ShardcError(f"not JSON: {e}", where=f"{path}:{number}", fix=fix) from None
    if not every:
        raise ShardcError("the file is empty", where=str(path), fix=fix)
    return every


def placed(source: Any, kind: str) -> Iterator[tuple[Any, str]]:
    """Yield each record of a path, an iterable or a dataset, and its place: FILE:LINE, or its kind and number."""
    if isinstance(source, Mapping) or not any(hasattr(source, x) for x in ("__iter__", "__getitem__", "__fspath__")):
        fix = "give a .jsonl file, a list of records, or a dataset; of a DatasetDict, one of its splits"
        raise ShardcError(f"a {type(source).__name__} is not a source of records", where="data", fix=fix)
    every = read(source) if isinstance(source, (str, Path)) else source
    for number, record in enumerate(every if hasattr(every, "__iter__") else map(every.__getitem__, range(len(every)))):
        yield record, every.places[number] if isinstance(every, Records) else f"{kind} {number}"


def is_stream(source: Any) -> bool:
    """Return whether a source has no length: it is read again for each epoch, and not kept."""
    check_again(source, "data")
    return not isinstance(source, (str, Path)) and not hasattr(source, "__len__")


def conversation(record: Any, where: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages of a record as chat templates read them, and its tools or None.

    Keys that are None are left out: `datasets` gives every record every key. Raises ShardcError for another form.
    """
    given = _without_none({"messages": record} if isinstance(record, list) else record)
    given = given if isinstance(given, dict) else {}
    chat = given.get("messages") or given.get("conversations")
    if not chat and "completion" in given:
        sides = ((given.get("prompt", []), "user"), (given["completion"], "assistant"))
        chat = [m for x, role in sides for m in ([{"role": role, "content": x}] if isinstance(x, str) else x)]
    if not chat or not isinstance(chat, list):
        has = ", ".join(map(str, given)) or type(record).__name__
        raise ShardcError(f"this is no conversation: it has {has}", where=where, fix=f"give {FORMS}")
    tools = _parsed(given.get("tools") or None, "tools", where, "write a list of tools")
    return [_message(x, f"{where}, message {i}") for i, x in enumerate(chat)], tools or None


def with_arguments(messages: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return messages with the arguments of their tool calls changed."""

    def call(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        inside = {"function": call} if "function" in given else {"arguments": change}
        return {k: inside[k](x) if k in inside else x for k, x in given.items()}

    return [{k: [*map(call, x)] if k == "tool_calls" and x else x for k, x in m.items()} for m in messages]


def _parsed(value: Any, name: str, where: str, fix: str) -> Any:
    """Return a value that may be given as the text of its JSON, as APIs do."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as e:
        raise ShardcError(f"{name} are not JSON: {e}", where=where, fix=fix) from None


def _message(message: Any, where: str) -> dict[str, Any]:
    given = dict(message) if isinstance(message, dict) else {}
    role, content = given.pop("role", given.pop("from", None)), given.pop("content", given.pop("value", ""))
    if role not in ROLES:
        fix = f"give each message a role: {', '.join(x for x, other in ROLES.items() if x == other)}"
        raise ShardcError(f"a message of the role {role!r}", where=where, fix=fix)
    if isinstance(content, list):  # of parts: most templates would print the list
        other = [x for x in content if not isinstance(x, str) and (not isinstance(x, dict) or "text" not in x)]
        if other:
            kind = other[0].get("type") if isinstance(other[0], dict) else type(other[0]).__name__
            fix = "leave such messages out, or write data() with the model's own processor"
            raise ShardcError(f"a part of a message is no text, but {kind!r}", where=where, fix=fix)
        content = "".join(x if isinstance(x, str) else x["text"] for x in content)
    made = {"role": ROLES[role], "content": content, **given}
    name, fix = "the arguments of a tool call", "write an object, or its JSON text"
    return with_arguments([made], lambda x: _parsed(x, name, where, fix))[0]


def is_learned(message: Mapping[str, Any], where: str) -> bool:
    """Return whether an answer is learned: `weight: 0`, or `train: false`, says that it is not."""
    said = [message[name] for name in ("weight", "train") if name in message]
    if wrong := [x for x in said if x not in (0, 1)]:
        fix = "write 1 or true for an answer that is learned, 0 or false for one that is not"
        raise ShardcError(f"an answer has the weight {wrong[0]!r}", where=where, fix=fix)
    return all(said)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(x) for x in value] if isinstance(value, (list, tuple)) else value


def text_of(record: Any, column: str, where: str) -> str:
    """Return the text of a record. Raises ShardcError if it has none."""
    text = record.get(column) if isinstance(record, Mapping) else record
    if not isinstance(text, str):
        names = [*map(str, record)] if isinstance(record, Mapping) else []
        fix = f"column={nearest(column, names) or 'NAME'!r} names the one with the text; leave out records without any"
        fault = f"there is no text in {column!r}: the record has {', '.join(names) or type(record).__name__}"
        raise ShardcError(fault, where=where, fix=fix)
    return text
