"""Make tokens of a conversation by the tokenizer's chat template, and mark those that the assistant wrote.

A template with `{% generation %}` marks them itself. For others, the text before an answer, with the generation prompt,
and the text up to its end must be the beginning of the whole text; the answer is between them. Templates change earlier
answers (Qwen3 leaves their thoughts out), so the end may also be where a stand-in for the answer ends, up to the
special token behind it. What fits neither way is refused: a mask that is a little wrong trains silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import Any, cast

from shardc.errors import ShardcError
from shardc.features.text.records import conversation, is_learned, with_arguments
from shardc.optional import install

Tokens = tuple[list[int], list[bool]]  # ids, and which of them are learned
_MARK = "\u2402answer\u2403"
_TAGS = "write {% generation %} and {% endgeneration %} around the assistant's text in tokenizer.chat_template"


class ChatTokens:
    """Makes (ids, learned) of one record. Raises ShardcError where a mask cannot be made that is right."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            fix = "set tokenizer.chat_template, or take the tokenizer of a chat model; texts: shardc.text.documents"
            raise ShardcError("the tokenizer has no chat template", where="tokenizer", fix=fix)
        if not tokenizer.is_fast:
            fix = f"load it with AutoTokenizer, and {install('tokenizers')}"
            raise ShardcError("the tokenizer does not know where its tokens are in a text", where="tokenizer", fix=fix)
        self.tokenizer = tokenizer
        added = (str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)
        self._special = sorted({*added, *tokenizer.all_special_tokens} - {tokenizer.bos_token}, key=len, reverse=True)

    def __call__(self, record: Any, where: str) -> Tokens:
        messages, tools = conversation(record, where)
        objects = list[Any]()
        with_arguments(messages, objects.append)
        try:
            text, spans = self._rendered(messages, tools, where)
            joins = any(isinstance(x, dict) and x and str(x) in text for x in objects)  # as Python writes it
        except ShardcError:
            if not (joins := bool(objects)):
                raise
        if joins:  # the template joins them to a text
            messages = with_arguments(messages, partial(json.dumps, ensure_ascii=False))
            text, spans = self._rendered(messages, tools, where)
        own = [is_learned(m, f"{where}, message {i}") for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not all(own) and len(spans) != len(own):
            fault = f"the template marks {len(spans)} texts, and {len(own)} answers have weights"
            raise ShardcError(fault, where=where, fix="mark each answer once in tokenizer.chat_template")
        # the template writes the special tokens: a tokenizer that adds its own would begin twice
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        learned, spans = [], [*spans] if all(own) else [*compress(spans, own)]
        for begin, end in made["offset_mapping"]:  # both are in order
            while spans and begin >= spans[0][1]:
                spans.pop(0)
            learned.append(bool(spans) and end > spans[0][0])
        return made["input_ids"], learned

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the stretches of it that the assistant wrote."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template, render = self.tokenizer.get_chat_template(None, tools), cast(Any, render_jinja_template)
        if not re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template):
            text = self._text(messages, tools, where)
            answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
            return text, [self._span(text, messages, i, tools, f"{where}, message {i}") for i in answers]
        options = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
        with _refusals(where):
            (text,), (spans,) = render(conversations=[messages], tools=tools, chat_template=template, **options)
        return text, spans

    def _text(self, messages: list[dict[str, Any]], tools: Any, where: str, *, prompt: bool = False) -> str:
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
        with _refusals(where):
            text: str = self.tokenizer.apply_chat_template(messages, **options)
        return text

    def _span(self, text: str, messages: list[dict[str, Any]], i: int, tools: Any, where: str) -> tuple[int, int]:
        """Return where the answer `messages[i]` begins and ends in the whole text."""
        if i == 0:
            fix = f"begin with a user; or {_TAGS}"
            raise ShardcError("the conversation begins with the assistant", where=where, fix=fix)
        before, answer = self._text(messages[:i], tools, where, prompt=True), messages[i]["content"]
        fits, history = text.startswith(before), self._text(messages[:i], tools, where)
        if before == history:  # no generation prompt: what begins an answer is unknown
            if not answer or not isinstance(answer, str) or not answer.strip():
                return len(before), len(before)
            fits = fits and text[len(before) :].lstrip().startswith(answer.strip())
        after = self._text(messages[: i + 1], tools, where)
        end = len(after) if text.startswith(after) else 0
        if not end:
            other = [*messages[:i], {**messages[i], "content": _MARK}, *messages[i + 1 :]]
            _, mark, rest = self._text(other, tools, where).partition(_MARK)
            opening = before.removeprefix(history)  # of an answer: no token of it closes one
            ends = "|".join(re.escape(t) for t in self._special if t not in opening)
            closing = re.match(rf"\s*(?:{ends or '(?!)'})", rest)
            end = len(text) - len(rest) + closing.end() if mark and closing and text.endswith(rest) else 0
        if not fits or end < len(before):
            fault = "the chat template does not show where the assistant's text is: the text up to it is not the"
            raise ShardcError(f"{fault} beginning of the whole conversation's", where=where, fix=_TAGS)
        return len(before), end


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    """Turn what a chat template raises into a ShardcError: each has its own checks."""
    try:
        yield
    except Exception as e:  # any: of the template, or of an operation on a value that it does not expect
        fault = f"the chat template refuses the conversation: {str(e) or type(e).__name__}"
        system = " (a system text may begin the first user's)" if "system" in str(e).lower() else ""
        fix = f"change the conversation{system}, leave it out, or change tokenizer.chat_template"
        raise ShardcError(fault, where=where, fix=fix) from e
