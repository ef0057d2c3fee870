"""Read records of text: a JSON Lines file or a dataset; and conversations in their usual forms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.similar_names import nearest

#: Names of roles in public datasets, and what chat templates call them.
ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool")),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("function_response", "observation", "function", "ipython"), "tool"),
}
FORMS = "`messages` (role, content), `conversations` (from, value), or `prompt` and `completion`"


def read(source: str | Path) -> list[Any]:
    """Return the records of a .jsonl or .json file. Raises ShardcError with the line of a mistake."""
    path = Path(source).expanduser()
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else [])
        fix = f"did you mean {path.parent / near}?" if near else "name a .jsonl file with a JSON object a line"
        raise ShardcError(f"there is no file {path}", where="data", fix=fix)
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        fix = "name a .jsonl file, or give a dataset, such as datasets.load_dataset(...)"
        fault = f"records are not read from a file {path.suffix or 'without an ending'}"
        raise ShardcError(fault, where=str(path), fix=fix)
    text = path.read_text(encoding="utf-8-sig")
    lines = [text] if path.suffix == ".json" else text.split("\n")
    found: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as e:
                fix = "write one JSON object a line"
                raise ShardcError(f"not JSON: {e}", where=f"{path}:{number}", fix=fix) from None
    if path.suffix == ".json" and found and isinstance(found[0], list):
        found = found[0]
    if not found:
        raise ShardcError("the file is empty", where=str(path), fix="write one JSON object a line")
    return found


def records(source: Any) -> Iterator[Any]:
    """Yield the records of a path, or of an iterable or dataset."""
    if isinstance(source, (str, Path)):
        yield from read(source)
    elif isinstance(source, Mapping) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        fix = "give a .jsonl file, a list of records, or a dataset; of a DatasetDict, one of its splits"
        raise ShardcError(f"a {type(source).__name__} is not a source of records", where="data", fix=fix)
    elif hasattr(source, "__iter__"):
        yield from source
    else:
        yield from (source[i] for i in range(len(source)))


def conversation(record: Any, where: str) -> tuple[list[dict[str, Any]], Any]:
    """Return the messages of a record as chat templates read them, and its tools or None.

    Keys that are None are left out: `datasets` gives every record every key. Raises ShardcError for another form.
    """
    if isinstance(record, list):
        record = {"messages": record}
    given = {k: v for k, v in record.items() if v is not None} if isinstance(record, Mapping) else {}
    chat = given.get("messages") or given.get("conversations")
    if not chat and "completion" in given:
        sides = (("prompt", "user"), ("completion", "assistant"))
        parts = ((given.get(side, []), role) for side, role in sides)
        chat = [m for x, role in parts for m in ([{"role": role, "content": x}] if isinstance(x, str) else x)]
    if not chat or not isinstance(chat, (list, tuple)):
        has = ", ".join(map(str, given)) or type(record).__name__
        raise ShardcError(f"this is no conversation: it has {has}", where=where, fix=f"give {FORMS}")
    if isinstance(tools := given.get("tools"), str):
        tools = json.loads(tools or "null")
    return [_message(x, f"{where}, message {i}") for i, x in enumerate(chat)], _without_none(tools) or None


def _message(message: Any, where: str) -> dict[str, Any]:
    given = _without_none(message) if isinstance(message, Mapping) else {}
    role, content = given.pop("role", given.pop("from", None)), given.pop("content", given.pop("value", ""))
    if role not in ROLES:
        fix = f"give each message a role: {', '.join(x for x, other in ROLES.items() if other is None)}"
        raise ShardcError(f"a message of the role {role!r}", where=where, fix=fix)
    return {"role": ROLES[role] or role, "content": content, **given}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(x) for x in value] if isinstance(value, (list, tuple)) else value


def texts(source: Any, column: str) -> Iterator[tuple[str, str]]:
    """Yield the text of each record, and where it is."""
    for number, record in enumerate(records(source)):
        where = f"record {number}"
        text = record.get(column) if isinstance(record, Mapping) else record
        if not isinstance(text, str):
            has = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
            near = nearest(column, record) if isinstance(record, Mapping) else ""
            fix = f"name the column with the text, column={near or 'NAME'!r}, and leave out records without text"
            raise ShardcError(f"there is no text in {column!r}: the record has {has}", where=where, fix=fix)
        yield text, where


def is_stream(source: Any) -> bool:
    """Return whether a source has no length: it is read again for each epoch, and not kept."""
    return not isinstance(source, (str, Path)) and not hasattr(source, "__len__") and isinstance(source, Iterable)
