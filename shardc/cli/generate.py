"""Define `shardc generate`: generate tokens after prompts, with one process for each rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardc.cli.options import Named, NprocOption, names_program, option
from shardc.cli.ranks.make_job import ranks
from shardc.errors import Errors, ShardcError
from shardc.optional import needed

Source = Annotated[str, typer.Argument(help="hf:DIR, or model.py[:name]")]


@names_program("forward", "score", "batch", "seq", "data", "trust", "model_file", model=Source)
def command(
    named: Named,
    prompt: Annotated[list[str] | None, option("prompt text; repeat for several, which are generated together")] = None,
    ids: Annotated[list[str] | None, option("a prompt as token ids: 1,15,7")] = None,
    max_new_tokens: Annotated[int, option("maximum number of new tokens for each prompt", min=1)] = 20,
    temperature: Annotated[float, option("0: the most likely token each time", min=0)] = 0.0,
    top_k: Annotated[int | None, option("draw from the k most likely tokens", min=1)] = None,
    top_p: Annotated[float | None, option("draw from the likeliest with this total probability")] = None,
    stop: Annotated[
        list[str] | None, option("a token, or its id, that ends a text; default: those of the model's folder")
    ] = None,
    seed: Annotated[int, option("seed of sampling, and of weights that no file has", min=0)] = 0,
    weights: Annotated[
        Path | None, option("generate with these: a folder or file of safetensors, a torch file, or what --save wrote")
    ] = None,
    nproc: NprocOption = None,
) -> None:
    """Generate: continue texts with the model's tokens, greedily or drawn, the same on every mesh."""
    from shardc.spec import Run

    with ranks(dataclasses.replace(named, forward=True), nproc, weights) as all_ranks:
        words = Words(named.model)
        prompts = words.prompts(prompt or [], ids or [])
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        options |= {"top_k": top_k, "top_p": top_p, "stop": words.stop(stop)}
        # it checks them, before any process is started
        needed("generation", "runtime", "Options")(
            tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        all_ranks.program()
        job = all_ranks.job(Run(seed=seed), prompts=prompts, generate=options)
        if (output := all_ranks.start(job)) is not None:
            output["texts"] = words.texts(prompts, output["tokens"])
            new = sum(map(len, output["tokens"]))
            text = "\n".join([*output["texts"], f"{new} tokens in {output['seconds']:.1f} s, compilation included"])
            all_ranks.show(text, output)


class Words:
    """Conversion between texts and tokens, by the tokenizer in a model's folder, if there is one."""

    def __init__(self, model: str) -> None:
        named = Path(model.rpartition(":")[2]) if model.startswith("hf:") else None
        self.model, self.folder = model, named if named is not None and named.is_dir() else None
        self._tokenizer: Any = None

    def tokenizer(self, option: str) -> Any:
        """Return the tokenizer. Raises ShardcError if there is none, or if it cannot be read."""
        if self._tokenizer is None:
            fix = "save one there (tokenizer.save_pretrained), or pass token ids: --ids 1,15,7"
            if self.folder is None or not any(self.folder.glob("*token*")):
                raise ShardcError(f"there is no tokenizer in {self.folder or self.model}", where=option, fix=fix)
            self._tokenizer = needed("text", "rows", "loaded")(self.folder)
        return self._tokenizer

    def prompts(self, texts: list[str], ids: list[str]) -> list[list[int]]:
        """Return the token ids of each prompt. Raises ShardcError for wrong ids, or without any prompt."""
        errors, result = Errors(), [list(self.tokenizer("--prompt")(text)["input_ids"]) for text in texts]
        for written in ids:
            try:
                result.append([int(i) for i in written.replace(",", " ").split()])
            except ValueError:
                errors.add(f"{written!r} are not token ids", where="--ids", fix="write numbers: --ids 1,15,7")
        if not result and not errors.found:
            fault, fix = "there is no prompt", 'pass one: --prompt "Once upon a time", or --ids 1,15,7'
            errors.add(fault, where="generate", fix=fix)
        errors.raise_any()
        return result

    def stop(self, given: list[str] | None) -> list[int] | None:
        """Return the ids that end a text: those given, else those of the model's generation_config.json."""
        if given is None:
            ends = self._config("generation_config.json").get("eos_token_id")
            return ends if ends is None or isinstance(ends, list) else [ends]
        stops: list[int] = []
        for text in given:
            named = text.isdecimal()
            tokens = [int(text)] if named else self.tokenizer("--stop")(text, add_special_tokens=False)["input_ids"]
            if len(tokens) != 1:
                fault = f"{text!r} is {len(tokens)} tokens, but exactly one token ends a text"
                raise ShardcError(fault, where="--stop", fix="name one token, or its id")
            stops += tokens
        return stops

    def texts(self, prompts: list[list[int]], tokens: list[list[int]]) -> list[str]:
        """Return prompts with the generated texts; ids without a tokenizer. An encoder's prompt is left out."""
        if self._tokenizer is None:
            return [f"{_ids(p)} -> {_ids(t)}" for p, t in zip(prompts, tokens, strict=True)]
        before = [[] for _ in prompts] if self._config("config.json").get("is_encoder_decoder") else prompts
        both = (p + t for p, t in zip(before, tokens, strict=True))
        return [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in both]

    def _config(self, name: str) -> dict[str, Any]:
        """Read a file of the model's folder; {} without it."""
        file = self.folder / name if self.folder is not None else None
        return json.loads(file.read_text()) if file is not None and file.is_file() else {}


def _ids(ids: list[int]) -> str:
    return ",".join(map(str, ids))
