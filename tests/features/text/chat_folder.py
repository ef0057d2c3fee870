"""A small model of transformers with a tokenizer and a chat template, as save_pretrained writes them; and chats."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: ChatML, with and without the tags that mark the assistant's text.
TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SENTENCE = "the model reads a row of tokens and gives the next one each rank has a part of it and they agree"
WORDS = SENTENCE.split()


@cache
def tokenizer_text() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS), json.__doc__ or "", Path.__doc__ or ""], trainer)
    return str(made.to_str())


def tokenizer(template: str | None = PLAIN, **special: str) -> Any:
    """A tokenizer without a pad token, as many are."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", **special}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_text()), additional_special_tokens=["<|im_start|>"], **special
    )
    made.chat_template = template
    return made


def chat(i: int, turns: int = 1) -> dict[str, Any]:
    """Conversation i; each is of another length."""
    said = [" ".join(WORDS[(i + j) % 7 : (i + j) % 7 + 3 + (i * 5 + j) % 9]) for j in range(2 * turns)]
    roles = ("user", "assistant") * turns
    return {"messages": [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]}


def write_chats(file: Path, count: int) -> Path:
    file.write_text("".join(json.dumps(chat(i, 1 + i % 3)) + "\n" for i in range(count)))
    return file


def write_all(folder: Path) -> None:
    """A model in `base`, and conversations in `chats.jsonl`, for the pages of the documentation."""
    write_folder(folder / "base", TAGGED)
    write_chats(folder / "chats.jsonl", 200)


def config(**sizes: Any) -> Any:
    from transformers import LlamaConfig

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=384, num_key_value_heads=2, max_position_embeddings=256, **(small | sizes))


def write_folder(folder: Path, template: str | None = PLAIN, *, words: bool = True) -> Path:
    """As save_pretrained leaves it: `use_cache: true` in the config."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(config()).save_pretrained(folder)
    if words:
        tokenizer(template).save_pretrained(folder)
    return folder
