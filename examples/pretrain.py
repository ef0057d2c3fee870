"""Pretraining from text: files become tokens once, in an array that every rank maps into memory (`make pretrain`).

`python examples/pretrain.py` trains a tokenizer on the Python standard library's sources and writes runs/tokens:
tokenizer.json, train.bin and valid.bin (u16), and tokens.json with a digest of all that they were made from. It does
nothing if that has not changed. `shardc run examples/pretrain.py examples/pretrain.yaml` trains a small Llama on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(os.environ.get("TOKENS", Path(__file__).resolve().parents[1] / "runs" / "tokens"))
VOCAB, SEQ, BATCH, END = 1024, 128, 16, "<|end|>"
#: Files that train, and files that are held out; the tokenizer sees the first of those that train.
FILES, HELD_OUT, READ = 400, 20, 100


def files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
    found = sorted(f for f in root.rglob("*.py") if not skip.intersection(f.relative_to(root).parts))
    random.Random(0).shuffle(found)
    return found[: FILES + HELD_OUT]


def prepare(folder: Path = FOLDER) -> dict[str, object]:
    """Write the arrays, if they are not there yet. Returns what tokens.json has."""
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files()]
    digest = hashlib.sha256(json.dumps([VOCAB, FILES, HELD_OUT, READ, END, texts]).encode()).hexdigest()
    written = folder / "tokens.json"
    if written.exists() and (old := json.loads(written.read_text()))["digest"] == digest:
        return old
    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts[HELD_OUT:][:READ], trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END).save_pretrained(folder)
    end, counts = bpe.token_to_id(END), {"vocabulary": bpe.get_vocab_size()}
    for split, part in (("valid", texts[:HELD_OUT]), ("train", texts[HELD_OUT:])):
        ids = [i for row in bpe.encode_batch(part) for i in (*row.ids, end)]
        np.array(ids, dtype=np.uint16).tofile(folder / f"{split}.bin")
        counts[split] = len(ids)
    written.write_text(json.dumps({"digest": digest, **counts}))  # last: an array without it is made again
    return {"digest": digest, **counts}


def about() -> dict[str, int]:
    return json.loads((FOLDER / "tokens.json").read_text())


class Windows(Dataset[dict[str, Tensor]]):
    """Rows of SEQ tokens, one behind the other. Nothing is read before a row is needed."""

    def __init__(self, split: str) -> None:
        self.tokens = np.memmap(FOLDER / f"{split}.bin", np.uint16, "r")
        if len(self.tokens) != about()[split]:
            raise ValueError(f"{FOLDER}/{split}.bin is not what tokens.json says: python examples/pretrain.py")

    def __len__(self) -> int:
        return len(self.tokens) // SEQ

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self.tokens[SEQ * i : SEQ * (i + 1)].astype(np.int64))
        return {"input_ids": row, "labels": row}


# the names that shardc looks for


def model() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ends = {"vocab_size": about()["vocabulary"], "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends))


def batch() -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def data(split: str) -> Dataset[dict[str, Tensor]]:
    return Windows(split)


def optimizer(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = list(params)
    decayed, others = ([p for _, p in pairs if (p.ndim >= 2) == wide] for wide in (True, False))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}], lr=2e-3)


if __name__ == "__main__":
    print(FOLDER, prepare())
