"""Write a model file, a spec and example data for a folder of transformers: what `shardc init` does."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardc.errors import ShardcError
from shardc.features.text.records import read
from shardc.features.text.rows import loaded

_MODEL = '''"""Fine-tune NAME: `shardc run model.py spec.yaml`. Written by `shardc init`; change it as you like."""

from pathlib import Path

import torch
import transformers

from shardc import text

BASE = BASE_PATH  # config, tokenizer and weights
DATA = DATA_PATH
ROWS, SEQ = ROWS_SEQ  # rows of a global batch, over all ranks; tokens of a row

weights = BASE  # where training begins; each rank reads its part


def model():
    config = transformers.AutoConfig.from_pretrained(BASE)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch():  # one global batch, of the form of the data: the program is compiled for it
    return BATCH


def data(split):
    records = text.read(DATA)
    cut = max(1, len(records) // 20)  # the first twentieth is held out
    # several sources: text.mix({"chat": ..., "code": ...}, {"chat": 0.7, "code": 0.3}); for "valid" a dict of them
    return READ


def optimizer(params):  # (name, parameter) pairs
    return torch.optim.AdamW([p for _, p in params], lr=2e-5, weight_decay=0.0)


def scheduler(optimizer):  # the learning rate rises over the first steps
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
'''
_SPEC = """shardc: 1
mesh: {dp: 1, tp: 1}        # {dp: 2, tp: 4}: 8 ranks; `shardc plan model.py --devices 8` finds the fastest
# shard: {use: model}       # with tp: splits weights as the model's own plan says; {use: structure}: finds a split
# data: {zero: 1}           # splits the optimizer's state over dp; 3: weights and gradients too
# batch: {microbatches: 2}  # less memory, the same step
# checkpoint: [{match: "*.{layers,h}.*", recompute: cheap}]            # less memory; runs cheap ops again
# adapters: [{match: "*_proj", kind: lora, rank: 16, alpha: 32}]       # trains few numbers beside the model's
PRECISION
run: {steps: 20, clip: 1.0, save: runs/a, log: runs/a, eval_every: 10}
"""
_LOW = "precision: {params: float32, compute: bfloat16}  # the weights are of DTYPE: updates of them would be lost"
_FULL = "# precision: {compute: bfloat16}                                       # on a GPU: faster, less memory"


def written(config: Path, into: Path, data: str | None, batch: int, seq: int | None) -> list[Path]:
    """Write model.py, spec.yaml, and example data if `data` names none; return the files.

    config: config.json of the model's folder. Replaces nothing: raises ShardcError for a file that is there.
    """
    base, values = config.parent.resolve(), json.loads(config.read_text())
    tokenizer = loaded(base)
    chat = bool(getattr(tokenizer, "chat_template", None)) and (data is None or _is_chats(Path(data)))
    longest = values.get("max_position_embeddings") or 1024
    seq = seq or min(1024, int(longest))
    place = json.dumps(str(Path(data).resolve())) if data else f'Path(__file__).parent / "{_name(chat)}"'
    positions = _takes_positions(values)
    more = "" if positions else ", pack=False, positions=False" if chat else ", pack=False"
    rows = "chats" if chat else "documents"
    example = "text.example(ROWS, SEQ)"
    if not positions:
        example = f'{{name: x for name, x in {example}.items() if name != "position_ids"}}'
    model = _filled(
        _MODEL,
        NAME=base.name,
        BASE_PATH=json.dumps(str(base)),
        DATA_PATH=f"{place}  # {_COMMENT[chat]}",
        ROWS_SEQ=f"{batch}, {seq}",
        BATCH=example,
        READ=f'text.{rows}(records[cut:] if split == "train" else records[:cut], BASE, SEQ{more})',
    )
    model = model if not data else model.replace("from pathlib import Path\n\n", "")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    spec = _filled(_SPEC, PRECISION=_FULL if dtype == "float32" else _LOW.replace("DTYPE", dtype))
    files = {"model.py": model, "spec.yaml": spec}
    if not data:
        files[_name(chat)] = _examples(tokenizer, batch * seq, chat=chat)
    if there := [name for name in files if (into / name).exists()]:
        fix = "name another folder: shardc init hf:DIR FOLDER"
        raise ShardcError(f"{into} has {', '.join(there)} already", where=str(into), fix=fix)
    into.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (into / name).write_text(content, encoding="utf-8")
    return [into / name for name in files]


_COMMENT = {
    True: 'a line each: {"messages": [{"role": "user", "content": "..."}, ...]}',
    False: 'a line each: {"text": "..."}',
}


def _filled(template: str, **words: str) -> str:
    for name, word in words.items():
        template = template.replace(name, word)
    return template


def _name(chat: bool) -> str:
    return "chats.jsonl" if chat else "texts.jsonl"


def _is_chats(file: Path) -> bool:
    return not (isinstance(first := read(file)[0], Mapping) and isinstance(first.get("text"), str))


def _takes_positions(values: Mapping[str, Any]) -> bool:
    import transformers

    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(transformers.AutoConfig.for_model(**values))]
    return "position_ids" in inspect.signature(kind.forward).parameters


def _examples(tokenizer: Any, tokens: int, *, chat: bool) -> str:
    """Return records enough for two batches of this many tokens: sums, to be replaced."""
    lines, made, i = [], 0, 0
    while made < 2.5 * tokens:
        a, b = i % 97, i // 97 % 89
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said} if chat else {"text": f"{question} {answer}"}))
        made, i = made + len(tokenizer(f"{question} {answer}")["input_ids"]), i + 1
    return "\n".join(lines) + "\n"
