"""Reports about the data and the weights of others (docs/measured/faults.md), as small cases here.

Those about run loops: test_run_reports.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import shardc
from shardc import text
from shardc.cli import model_file
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state.weight_files import open_weights
from tests import example_program, warm
from tests.features.text.chat_folder import PLAIN, TAGGED, chat, config, tokenizer, write_chats, write_folder
from tests.features.text.test_chats import learned, said
from tests.runtime.data.test_datasets import Shaped, Streamed, hugging_face, loaders, read

# --- chats ------------------------------------------------------------------------------------------------------------

_CALL = PLAIN.replace("m['content'] +", "m['content'] + CALL +", 1)
#: How templates write the arguments of a call: as JSON of an object, of either form, of a text, and one by one.
CALLS = {
    "tojson": "(m.tool_calls[0].function.arguments | tojson)",
    "either": "(m.tool_calls[0].function.arguments if m.tool_calls[0].function.arguments is string else "
    "m.tool_calls[0].function.arguments | tojson)",
    "text": "'' + m['tool_calls'][0]['function']['arguments']",
    "joined": "('' ~ m.tool_calls[0].function.arguments)",
    "items": "(m.tool_calls[0].function.arguments.items() | list | string)",
}


def calls(arguments: Any, *, inside: bool = True) -> dict[str, Any]:
    call = {"name": "f", "arguments": arguments}
    record = said("find it", "")
    record["messages"][1]["tool_calls"] = [{"type": "function", "function": call} if inside else {"function": call}]
    return record


@pytest.mark.parametrize("template", CALLS)
def test_arguments_of_a_call_are_the_same_as_text_and_as_object(template: str) -> None:
    """oumi#2599, flama#258, axolotl#3825, mlx-examples#1053: JSON text became JSON of a text, or a template failed."""
    named = _CALL.replace("CALL", CALLS[template])
    one, other = (learned(named, calls(x)) for x in ({"x": 1, "at": "Köln"}, '{"x": 1, "at": "Köln"}'))
    wanted = "[('x', 1), ('at', 'Köln')]" if template == "items" else '{"x": 1, "at": "Köln"}'
    assert one == other == [f"{wanted}<|im_end|>\n"]
    with pytest.raises(ShardcError, match="message 1: the arguments of a tool call are not JSON"):
        learned(named, calls("{x: 1}"))


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["plain", "tagged"])
def test_an_answer_of_weight_0_is_not_learned(template: str) -> None:
    """axolotl#1703, verl#5472: answers that a record says not to learn were learned."""
    for flag in ({"weight": 0}, {"weight": 0.0}, {"train": False}):
        record = said("a", "wrong", "b", "right")
        record["messages"][1] |= flag
        record["messages"][3] |= {"weight": 1}
        assert [x.rstrip("\n") for x in learned(template, record)] == ["right<|im_end|>"]
    record["messages"][3]["weight"] = 0.5
    with pytest.raises(ShardcError, match=r"message 3: an answer has the weight 0\.5"):
        learned(template, record)


def test_a_generator_is_no_source() -> None:
    """datasets#8295, torchtitan#1357: data were over after one reading. Here a look at their form lost the first."""
    for make in (lambda x: text.chats(x, tokenizer(), 64), lambda x: text.mix({"a": x, "b": [1]}, {"a": 1, "b": 1})):
        with pytest.raises(ShardcError, match="a generator can be read only once"):
            make(chat(i) for i in range(9))


@pytest.mark.parametrize("own", [False, True], ids=["of the base", "of data()"])
def test_a_run_saves_the_tokenizer_of_its_data(tmp_path: Path, own: bool) -> None:
    """LlamaFactory#7785, marin#7406, litgpt#1986: the saved template was the base's, not that of the training."""
    write_folder(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", 30)
    template = "words.chat_template += '{# mine #}'" if own else "words = BASE"
    (tmp_path / "data.py").write_text(
        "import transformers\nfrom pathlib import Path\nfrom shardc import text\n"
        "BASE = Path(__file__).parent / 'base'\n"
        f"def data(split):\n    words = transformers.AutoTokenizer.from_pretrained(BASE)\n    {template}\n"
        "    rows = text.chats(BASE.parent / 'chats.jsonl', words, 96)\n"
        "    return text.mix({'a': rows, 'b': rows}) if split == 'train' else None\n"
    )
    done = warm.run("run", "hf:base", "--data", "data.py", "--batch", "4", "--steps", "1", "--save", "o", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("mine" in (tmp_path / "o/chat_template.jinja").read_text()) == own
    done = warm.run("generate", "hf:o", "--prompt", "the model", "--max-new-tokens", "1", cwd=tmp_path)
    assert "1 tokens in" in done.stdout, "one device, as `run`, where no spec is named"


# --- streams ----------------------------------------------------------------------------------------------------------


class Shuffled(IterableDataset[dict[str, Any]]):
    """Orders its samples otherwise in a worker, as `datasets` does after shuffle()."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = [*range(16)]
        random.Random(get_worker_info() is None).shuffle(numbers)
        return map(Shaped(16).__getitem__, numbers)


@pytest.mark.parametrize("library", [False, True])
def test_the_order_of_a_shuffled_stream_is_that_without_workers(library: bool) -> None:
    """datasets#3423, #7901: samples came twice or never. Here each came once, in an order that workers changed."""
    made = (lambda: hugging_face(16, stream=True).shuffle(seed=1, buffer_size=5)) if library else Shuffled
    (alone,) = loaders(1, made())
    order = read([alone]) + read([alone])
    (first,), (second,) = loaders(1, made(), num_workers=2), loaders(1, made(), num_workers=1)
    assert read([first]) + [i for part in [next(iter(first))] for i in part["ids"][:, 0].tolist()] == order[:20]
    second.load_state_dict(first.state_dict())
    assert read([second]) == order[20:]


class Late(Streamed):
    """Begins as on every rank, and goes on with others."""

    def __init__(self, rank: int) -> None:
        super().__init__(16)
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        rows = [{"x": torch.full((8,), float(i)), "y": torch.zeros(8)} for i in range(16)]
        return iter([*rows[:3], *rows[3 + self.rank :]])


def test_streams_of_ranks_are_compared_beyond_the_first_sample() -> None:
    """datasets#5696, #7868: shards or orders that differed between ranks; the first sample was the same."""
    made = example_program.program(2, 2)

    def work(mesh: LoopbackMesh) -> None:
        made.engine(example_program.Model(), mesh=mesh).loader(Late(mesh.rank))

    with pytest.raises(ShardcError, match=r"its first 16 samples\) differs between ranks"):
        loopback(made.mesh, work)


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("saved_first", [False, True])
def test_a_resume_says_that_a_stream_begins_with_others(
    moved: int, saved_first: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """datasets#5360, #6156: an order without a fixed seed is another one in each process, and on one rank too."""
    made = example_program.program(1)
    engine, other = (made.engine(example_program.Model()) for _ in range(2))
    next(iter(engine.loader(Late(0))))
    engine.loaders.note_step()
    state = json.loads(json.dumps(engine.loaders.state_dict()))
    if saved_first:
        other.loaders.load_state_dict(state)
    other.loader(Late(moved))
    if not saved_first:
        other.loaders.load_state_dict(state)
    said_so = "the stream begins with other samples than in the run of the checkpoint" in capfd.readouterr().err
    assert said_so == bool(moved)


# --- weights in -------------------------------------------------------------------------------------------------------


NAMES = "model.fp16.safetensors model-00001-of-00002.safetensors model.gguf flax_model.msgpack tf_model.h5 a-link"


@pytest.mark.parametrize("name", [*NAMES.split(), "consolidated.00.pth", "model.safetensors.incomplete"])
def test_a_folder_with_weights_that_are_not_read_does_not_begin_at_random(tmp_path: Path, name: str) -> None:
    """sglang#32279, vllm#34859: a download that was not complete gave a model of random weights."""
    write_folder(tmp_path, words=False)
    weights = tmp_path / "model.safetensors"
    if name == "a-link":  # as in a hub's cache, without its blob
        weights.unlink()
        weights.symlink_to("../blobs/absent")
    else:
        weights.rename(tmp_path / name)
    shown = "model.safetensors" if name == "a-link" else name
    with pytest.raises(ShardcError, match=f"of these, .* is not read, or a part is absent: {shown}"):
        open_weights(tmp_path)
    with pytest.raises(ShardcError, match=r"config\.json begins with random weights"):
        model_file.load(f"hf:{tmp_path}")
    assert "random" in model_file.load(f"hf:{tmp_path / 'config.json'}").note


@pytest.mark.parametrize("inner", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module._orig_mod"])
@pytest.mark.parametrize("outer", ["", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_names_of_wrapped_layers_are_found(inner: str, outer: str) -> None:
    """nanoGPT#325, train-llm-from-scratch#36: layers of compiled or recomputed modules kept their initial weights."""
    net = example_program.Model()
    first = next(n for n, _ in net.named_children())
    state = {f"{outer}{n.replace(f'{first}.', f'{first}.{inner}.')}": x + 1 for n, x in net.state_dict().items()}
    engine = example_program.program(1).engine(net, weights=state)
    assert all(torch.equal(x, net.state_dict()[n] + 1) for n, x in engine.full_state_dict().items())


# --- weights out ------------------------------------------------------------------------------------------------------

LORA = {"adapters": [{"match": "*q_proj", "rank": 2, "alpha": 8}]}


def batch() -> dict[str, torch.Tensor]:
    return text.example(2, 16, positions=False)


def compiled(model: nn.Module, dp: int = 1, **spec: Any) -> Any:
    return shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": dp}, **spec}, prove=False)


def llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config())


def test_settings_of_generation_do_not_stop_a_save(tmp_path: Path) -> None:
    """transformers#29988, Qwen3-ASR#210, LlamaFactory#2767: a run that was done could not be saved."""
    model = llama()
    model.generation_config.temperature, model.generation_config.do_sample = 0.9, False
    model.config.temperature = 0.7
    compiled(model).engine(model).export(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.9
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


def test_a_file_that_cannot_be_written_fails_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank alone writes the config: the others waited for it."""
    model, failed = llama(), list[int]()
    made = compiled(model, 2)

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("not JSON")

    monkeypatch.setattr(type(model.config), "save_pretrained", refuse)

    def work(mesh: LoopbackMesh) -> None:
        with pytest.raises(ShardcError, match="the weights cannot be written: not JSON"):
            made.engine(model, mesh=mesh).export(tmp_path)
        failed.append(mesh.rank)

    loopback(made.mesh, work)
    assert sorted(failed) == [0, 1]


def test_merged_weights_replace_the_adapters_in_a_folder(tmp_path: Path) -> None:
    """peft#1381: transformers added the adapters of the same folder to weights that had them already."""
    from transformers import AutoModelForCausalLM

    model = llama()
    engine = compiled(model, **LORA).engine(model)
    engine.step(batch() | {"labels": torch.arange(32).view(2, 16)})
    engine.export(tmp_path / "one")
    assert (tmp_path / "one/adapter_config.json").exists()
    for folder in ("one", "other"):
        engine.export(tmp_path / folder, merge=True)
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict() for folder in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[n]) for n, x in one.items())
    (tmp_path / "peft").mkdir()
    torch.save({}, tmp_path / "peft/adapter_model.bin")
    with pytest.raises(ShardcError, match=r"adapter_model\.bin were not written by shardc"):
        engine.export(tmp_path / "peft", merge=True)


def head() -> Any:
    from transformers import LlamaForSequenceClassification

    return LlamaForSequenceClassification(config(num_labels=3, pad_token_id=0))


@pytest.mark.parametrize("freeze", [None, ["*", "!score"]])
def test_frozen_numbers_that_were_drawn_are_noted(tmp_path: Path, freeze: Any) -> None:
    """peft#310, #577: adapters were saved without the new head, which was another one in the next process."""
    model = head()
    example = {"input_ids": batch()["input_ids"], "labels": torch.tensor([0, 1])}
    spec = {"shardc": 1, "mesh": {"dp": 1}, **LORA, **({"freeze": freeze} if freeze else {})}
    made = shardc.compile(model, example, spec, prove=False)
    llama().save_pretrained(tmp_path / "base")
    engine = made.engine(head, weights=tmp_path / "base")
    noted = "drawn and frozen: score.weight. Neither files nor saved adapters have these numbers: train them"
    assert any(noted in x for x in engine.weight_notes) == (freeze is None)
    assert not any("drawn" in x for x in made.engine(head).weight_notes), "all of it is drawn"
    engine.export(tmp_path / "out")
    saved = load_file(tmp_path / "out/adapter_model.safetensors")
    assert any("score" in n for n in saved) == (freeze is not None)


def test_drawn_rows_of_a_longer_table_are_noted(tmp_path: Path) -> None:
    """peft#1457, #2415: rows of new tokens were in no file."""
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path)

    def longer() -> Any:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.resize_token_embeddings(400, mean_resizing=False)
        return model

    (note,) = (x for x in compiled(longer(), **LORA).engine(longer).weight_notes if "drawn and" in x)
    assert "drawn and frozen: model.embed_tokens.weight, lm_head.weight." in note
