"""Write a model file, a spec and example data for a folder of transformers: what `shardc init` does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from shardc.errors import ShardcError
from shardc.features.text.chat_masks import ChatTokens
from shardc.features.text.records import read
from shardc.features.text.rows import HELD_OUT, loaded_for, longest

_MODEL = Template(
    '''"""Fine-tune $NAME: `shardc run model.py spec.yaml`. Written by `shardc init`; change it as you like."""

${PATHLIB}import transformers

from shardc import text

BASE = $BASE  # config, tokenizer and weights
DATA = $DATA
ROWS, SEQ = $NUMBERS  # rows of a global batch, over all ranks; tokens of a row

weights = BASE  # where training begins; each rank reads its part


def model():
    config = transformers.AutoConfig.from_pretrained(BASE)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch():  # one global batch, of the form of the data: the program is compiled for it
    return text.example(ROWS, SEQ$POSITIONS)


def data(split):
    records = text.read(DATA)
    cut = max(1, len(records) // $PARTS)  # one of $PARTS is held out
    # several sources: text.mix({"chat": ..., "code": ...}, {"chat": 0.7, "code": 0.3}); for "valid" a dict of them
    return text.$KIND(records[cut:] if split == "train" else records[:cut], BASE, SEQ$UNPACKED)
'''
)
_SPEC = Template(
    """shardc: 1
mesh: {dp: 1, tp: 1}        # {dp: 2, tp: 4}: 8 ranks; `shardc plan model.py --devices 8` finds the fastest
# shard: {use: model}       # with tp: splits weights as the model's own plan says; {use: structure}: finds a split
# data: {zero: 1}           # splits the optimizer's state over dp; 3: weights and gradients too
# batch: {microbatches: 2}  # less memory, the same step
# checkpoint: [{match: "*.{layers,h}.*", recompute: cheap}]            # less memory; runs cheap ops again
# adapters: [{match: "*_proj", kind: lora, rank: 16, alpha: 32}]       # trains few numbers beside the model's
$PRECISION
optimizer: {name: adamw, lr: 2.0e-5, weight_decay: 0.0}               # --lr 1e-5; schedule: {name: cosine, warmup: 10}
run: {steps: 20, clip: 1.0, save: runs/a, log: runs/a, eval_every: 10}
"""
)
_LOW = "precision: {{params: float32, compute: bfloat16}}  # the weights are of {}: updates of them would be lost"
_FULL = "# precision: {compute: bfloat16}                                       # on a GPU: faster, less memory"
#: By kind: the file of example data, and what a line of it has.
_DATA = {
    "chats": ("chats.jsonl", '{"messages": [{"role": "user", "content": "..."}, ...]}'),
    "documents": ("texts.jsonl", '{"text": "..."}'),
}


def written(config: Path, into: Path, data: str | None, batch: int, seq: int | None, *, positions: bool) -> list[Path]:
    """Write model.py, spec.yaml, and example data if `data` names none; return the files.

    config: config.json of the model's folder. positions: whether the model takes position_ids. Replaces nothing: raises
    ShardcError for a file that is there.
    """
    base, values = config.parent.resolve(), json.loads(config.read_text())
    tokenizer, dtype = loaded_for(config), str(values.get("dtype") or values.get("torch_dtype") or "float32")
    kind = "chats" if getattr(tokenizer, "chat_template", None) else "documents"
    first = (given := read(data))[0] if data else {}
    if isinstance(first, Mapping) and isinstance(first.get("text"), str):
        kind = "documents"
    elif data:
        ChatTokens(tokenizer)(first, given.places[0])  # what it refuses is known now
        kind = "chats"
    name, line = _DATA[kind]
    seq = seq or longest(config)
    place = json.dumps(str(Path(data).resolve())) if data else f'Path(__file__).parent / "{name}"'
    alone = "" if positions else ", positions=False"
    model = _MODEL.substitute(
        NAME=base.name,
        PATHLIB="" if data else "from pathlib import Path\n\n",
        BASE=json.dumps(str(base)),
        DATA=f"{place}  # a line each: {line}",
        NUMBERS=f"{batch}, {seq}",
        POSITIONS=alone,
        KIND=kind,
        PARTS=HELD_OUT,
        UNPACKED=f", pack=False{alone}" if alone else "",
    )
    spec = _SPEC.substitute(PRECISION=_FULL if dtype == "float32" else _LOW.format(dtype))
    files = {"model.py": model, "spec.yaml": spec}
    files |= {} if data else {name: _examples(tokenizer, batch * seq, chat=kind == "chats")}
    if there := [name for name in files if (into / name).exists()]:
        fix = "name another folder: shardc init hf:DIR FOLDER"
        raise ShardcError(f"{into} has {', '.join(there)} already", where=str(into), fix=fix)
    into.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (into / name).write_text(content, encoding="utf-8")
    return [into / name for name in files]


def _examples(tokenizer: Any, tokens: int, *, chat: bool) -> str:
    """Return records enough for two batches of this many tokens: sums, to be replaced."""
    lines, made = list[str](), 0
    while made < 2.5 * tokens:
        a, b = len(lines) % 97, len(lines) // 97 % 89
        question, answer = f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": said} if chat else {"text": f"{question} {answer}"}))
        made += len(tokenizer(f"{question} {answer}")["input_ids"])
    return "\n".join(lines) + "\n"
