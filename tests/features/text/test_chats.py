"""Conversations as rows: labels on what the assistant wrote and on nothing else, whatever the template."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from shardc import text
from shardc.errors import ShardcError
from shardc.features.text.chat_masks import ChatTokens
from shardc.features.text.packing import best_fit
from shardc.features.text.records import conversation
from shardc.features.text.rows import chats_of
from tests import zoo
from tests.features.text.chat_folder import PLAIN, TAGGED, chat, config, tokenizer, write_chats, write_folder

#: As Qwen3's: thoughts of earlier answers are left out, and the last answer gets an empty one.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'].split('</think>')[-1].strip() + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: As Llama 2's: no generation prompt, and nothing before an answer.
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
#: Writes a header before an answer, and ignores add_generation_prompt: where the answer begins cannot be known.
HEADED = "{% for m in messages %}{{ '### ' + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}"
#: Closes the conversation after the last answer alone.
CLOSED_ONCE = PLAIN.replace("m['content'] + '<|im_end|>'", "m['content'] + ('<|im_end|>' if loop.last else '')", 1)


def learned(template: str, record: Any) -> list[str]:
    """The stretches that are learned, as text."""
    words = tokenizer(template)
    ids, mask = ChatTokens(words)(record, "conversation 0")
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda x: x[1])
    return [words.decode([i for i, _ in run]) for own, run in runs if own]


def said(*texts: str, first: str = "user") -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": x} for role, x in zip(roles, texts, strict=False)]}


TALK = said("one", "the first answer", "two", "the second")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TAGGED, ["the first answer<|im_end|>", "the second<|im_end|>"]),
        (PLAIN, ["the first answer<|im_end|>\n", "the second<|im_end|>\n"]),
        (THINKING, ["the first answer<|im_end|>", "<think>\n\n</think>\n\nthe second<|im_end|>\n"]),
        (BRACKETS, [" the first answer <|im_end|>", " the second <|im_end|>"]),
    ],
    ids=["tags", "prefixes", "thoughts", "no generation prompt"],
)
def test_labels_are_on_what_the_assistant_wrote(template: str, expected: list[str]) -> None:
    assert learned(template, TALK) == expected


def test_tags_are_read_as_transformers_does() -> None:
    words = tokenizer(TAGGED)
    for i in range(20):
        messages = chat(i, 1 + i % 4)["messages"]
        of_theirs = words.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = ChatTokens(words)(messages, "")
        assert ids == of_theirs["input_ids"]
        assert [int(x) for x in mask] == of_theirs["assistant_masks"]
        assert any(mask)


@pytest.mark.parametrize(
    ("template", "record", "fault"),
    [
        (
            HEADED,
            TALK,
            r"message 1: the chat template does not show where the assistant's text is.*\n  fix: write {% gen",
        ),
        (CLOSED_ONCE, TALK, r"message 1: the chat template does not show where the assistant's text is"),
        (BRACKETS, {"messages": [{"role": "system", "content": "s"}, *TALK["messages"]]}, r"System role not supported"),
        (
            PLAIN,
            {"messages": TALK["messages"][1:]},
            r"message 0: the conversation begins with the assistant\n  fix: begin",
        ),
        (
            PLAIN,
            {"messages": [{"role": "teacher", "content": "s"}]},
            r"a message of the role 'teacher'\n  fix: give each",
        ),
        (PLAIN, {"text": "a", "label": 3}, r"this is no conversation: it has text, label\n  fix: give `messages`"),
    ],
)
def test_what_cannot_be_masked_is_refused(template: str, record: Any, fault: str) -> None:
    with pytest.raises(ShardcError, match=fault):
        learned(template, record)


def test_an_empty_answer() -> None:
    """By the generation prompt its end is learned; where a template has none, nothing shows where it begins."""
    assert learned(PLAIN, said("one", "", "two", "b")) == ["<|im_end|>\n", "b<|im_end|>\n"]
    assert learned(BRACKETS, said("one", "", "two", "b")) == [" b <|im_end|>"]


def test_the_usual_forms_are_one() -> None:
    messages = [{"role": "system", "content": "s"}, *TALK["messages"]]
    said_from = {"system": "system", "user": "human", "assistant": "gpt"}
    others = [{"from": said_from[m["role"]], "value": m["content"]} for m in messages]
    for record in (
        messages,
        {"messages": messages, "conversations": None, "tools": None},
        {"conversations": others},
        {"prompt": messages[:-1], "completion": messages[-1:]},
    ):
        assert conversation(record, "") == (messages, None)
    pair = {"prompt": "one", "completion": "the first answer"}
    assert conversation(pair, "") == (TALK["messages"][:2], None)


def test_parts_of_text_are_one_text_and_others_are_refused() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    record = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]}
    messages, _ = conversation(record, "a.jsonl:3")
    assert [m["content"] for m in messages] == ["Hello there", ""]
    parts.append({"type": "image"})
    with pytest.raises(ShardcError, match="a part of a message is no text, but 'image'") as e:
        conversation(record, "a.jsonl:3")
    assert e.value.where == "a.jsonl:3, message 0"


def test_a_tokenizer_with_more_tokens_than_the_table_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "base", PLAIN)
    written = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(written | {"vocab_size": 100}))
    write_chats(tmp_path / "chats.jsonl", 4)
    with pytest.raises(ShardcError, match=r"the tokenizer has \d+ tokens, and the model's table 100 rows"):
        chats_of(tmp_path / "base" / "config.json", str(tmp_path / "chats.jsonl"), 2, 32, positions=True)


def test_tools_and_other_keys_reach_the_template_and_none_does_not() -> None:
    """`datasets` gives each message the keys of all."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    record = {
        "messages": [
            {"role": "user", "content": "1+2", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
            {"role": "tool", "content": "3", "tool_calls": None, "name": "add"},
        ],
        "tools": json.dumps([{"name": "add"}]),
    }
    messages, tools = conversation(record, "")
    assert tools == [{"name": "add"}]
    call["function"]["arguments"].pop("b")  # type: ignore[index]
    assert messages == [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "name": "add"},
    ]


def test_long_ones_are_left_out_or_cut_and_counted(tmp_path: Path) -> None:
    words = tokenizer(TAGGED)
    short, long, hopeless = said("a", "b"), said("a", "b", "c " * 60, "d"), said("a " * 60, "b")
    size = len(ChatTokens(words)(short, "")[0])
    unlearned = {"messages": [{"role": "user", "content": "a"}]}
    source = [short, long, hopeless, unlearned]
    rows = text.chats(source, words, 40)
    assert (len(rows), rows.counts) == (1, {"read": 4, "long": 2, "unlearned": 1})
    left_out = "2 of more than 40 tokens left out, 1 with nothing to learn left out"
    assert rows.summary.startswith(f"4 conversations ({left_out}), packed into 1 row of 40 (")
    rows = text.chats(source, words, 40, long="cut", pack=False)
    assert (len(rows), rows.counts) == (2, {"read": 4, "long": 2, "unlearned": 2})
    assert rows[1]["labels"][:size].tolist() == rows[0]["labels"][:size].tolist(), "the same beginning"
    with pytest.raises(ShardcError, match=r"no row is left of 1 conversation \(1 of more than 40 tokens left out\)"):
        text.chats([hopeless], words, 40)


def test_rows_without_a_pad_token_and_their_documents() -> None:
    words = tokenizer(TAGGED)
    assert words.pad_token_id is None
    (row,) = text.chats([said("a", "b"), said("c", "d e")], words, 64)
    ids, labels, place = (row[name] for name in ("input_ids", "labels", "position_ids"))
    begins = (place == 0).nonzero().flatten().tolist()
    assert len(begins) == 3, "two conversations and the padding"
    assert (labels[begins] == -100).all()
    assert (labels[begins[2] :] == -100).all()
    assert words.decode(ids[labels >= 0]) == "b<|im_end|>d e<|im_end|>"
    assert torch.equal(ids[labels >= 0], labels[labels >= 0])


def test_documents_end_begin_once_and_are_cut_into_pieces() -> None:
    from tokenizers.processors import TemplateProcessing

    words = tokenizer()
    begin, end = words.bos_token_id, words.eos_token_id
    words._tokenizer.post_processor = TemplateProcessing(  # adds BOS, as Llama's does
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    for given in ("the model", "<|endoftext|>the model", "the model<|im_end|>"):
        (row,) = text.documents([{"text": given}], words, 16)
        padding = (row["position_ids"] == 0).nonzero()[1]
        tokens = row["input_ids"][:padding].tolist()
        assert tokens == [begin, *words("the model", add_special_tokens=False)["input_ids"], end]
    rows = text.documents(["a " * 50], words, 16)
    assert rows.summary.startswith("1 document (1 of more than 16 tokens in pieces), packed into")
    kept = [t for row in rows for t in row["input_ids"].tolist()]
    assert [t for t in kept if t != end] == [t for t in words("a " * 50)["input_ids"] if t != end]
    with pytest.raises(ShardcError, match=r"no text in 'text': the record has body\n  fix: column='NAME' names"):
        text.documents([{"body": "x"}], words, 16)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n\n{broken\n')
    with pytest.raises(ShardcError, match=r"chats.jsonl:3: not JSON"):
        text.read(tmp_path / "chats.jsonl")
    with pytest.raises(ShardcError, match=r"there is no file .*\n  fix: did you mean .*chats.jsonl"):
        text.read(tmp_path / "chat.jsonl")
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(ShardcError, match=r"rows.csv is no .jsonl file\n  fix: .*load_dataset"):
        text.read(tmp_path / "rows.csv")
    with pytest.raises(ShardcError, match=r"the tokenizer has no chat template\n  fix: set"):
        text.chats([TALK], tokenizer(None), 32)
    with pytest.raises(ShardcError, match=r"cannot read a tokenizer from"):
        text.chats([TALK], tmp_path, 32)


def test_a_dataset_of_hugging_face_gives_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [chat(i, 1 + i % 3) for i in range(30)]
    rows = datasets.Dataset.from_list([r | {"source": f"s{i}", "tools": None} for i, r in enumerate(records)])
    words = tokenizer(PLAIN)
    expected = text.chats(records, words, 160)
    assert text.chats(rows, words, 160).digest == expected.digest
    stream = text.chats(rows.to_iterable_dataset(), words, 160)
    assert [r["input_ids"].tolist() for r in stream] == [r["input_ids"].tolist() for r in expected]
    assert stream.counts == expected.counts
    again = pickle.loads(pickle.dumps(stream))  # as workers that are new processes get it
    assert [r["labels"].tolist() for r in again] == [r["labels"].tolist() for r in expected]


@pytest.mark.parametrize("seq", [7, 32, 100])
def test_best_fit_packs_each_document_once(seq: int) -> None:
    lengths = torch.randint(1, seq + 1, (500,), generator=torch.Generator().manual_seed(seq)).tolist()
    rows = best_fit(lengths, seq)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(lengths[i] for i in row) <= seq for row in rows)
    assert len(rows) <= -(-sum(lengths) // seq) * 11 / 9 + 1, "of the best possible, as best fit decreasing does"
    assert best_fit([5, 5, 3, 2, 3, 2], 10) == [[0, 1], [2, 3, 4, 5]]
    one_by_one = text.chats([said("a", "b")] * 3, tokenizer(TAGGED), 64, pack=False)
    assert len(one_by_one) == 3


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2, "tp": 2}])
def test_a_packed_loss_is_that_of_each_conversation_alone(mesh: dict[str, int]) -> None:
    """Of a model as it is saved, with `use_cache: true`: plain transformers lets packed conversations mix then."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model, words = LlamaForCausalLM(config()).double(), tokenizer(TAGGED)
    records = [chat(i, 1 + i % 2) for i in range(16)]
    rows = text.chats(records, words, 160)
    assert len(rows) < len(records)
    count = len(rows) - len(rows) % 2
    batch = torch.utils.data.default_collate([rows[i] for i in range(count)])
    spec = {"shardc": 1, "mesh": mesh, "shard": {"use": "model"} if "tp" in mesh else {}}
    with zoo.Wide():
        program = shardc.compile(model, batch, spec, prove=False)
    packed = float(shardc.simulate(program, model, batch).loss)
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for row in (rows[i] for i in range(count)):
        begins = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 160]
        for begin, end in itertools.pairwise(begins):
            one = {name: row[name][None, begin:end] for name in ("input_ids", "labels")}
            if n := int((one["labels"][:, 1:] >= 0).sum()):
                with zoo.Wide():
                    total, counted = total + model(**one).loss.detach() * n, counted + n
    assert packed == pytest.approx(float(total / counted), rel=1e-12)


def test_the_rows_of_a_file(tmp_path: Path) -> None:
    rows = text.chats(write_chats(tmp_path / "chats.jsonl", 20), tokenizer(PLAIN), 200)
    assert rows.counts["read"] == 20
    assert rows.digest != text.chats(tmp_path / "chats.jsonl", tokenizer(PLAIN), 220).digest
    assert rows.digest != text.chats(tmp_path / "chats.jsonl", tokenizer(TAGGED), 200).digest
    assert rows[-1].keys() == text.example(1, 200).keys()
