"""Hostile specs: what a slip, a script or an ill-disposed person may write. Generated, from a seed.

    python tests/spec/hostile.py [N]      N mutations and N random specs besides the fixed ones, with times and memory

Each has to be compiled, in a second and 100 MB (`SECONDS`, `BYTES`), or refused by a ShardcError with a place; none
runs anything, or opens a file that it does not name as its schedule.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.spec import Spec
from tests import harm

SECONDS, BYTES, HANG = 1.0, 100 << 20, 20
Source = str | dict[Any, Any]
#: Where files may be opened: `schedule: FILE` names one, as a spec's author may.
SCHEDULES = (Path("/dev"), Path("/proc"), Path("/etc"), Path.cwd())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Small, with the things that sections of a spec are about."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def subject() -> tuple[nn.Module, dict[str, Tensor], Program]:
    ids = torch.arange(8 * 6).view(8, 6) % 24
    model, batch = Model(), {"ids": ids, "labels": ids}
    return model, batch, capture(model, batch)


RIGHT = (
    """shardc: 1
mesh: {dp: 2, tp: 2}
batch: {dims: {"*": 0}, microbatches: 2}
shard: {"layers.*.up": column, "layers.*.down": row, embed: vocab}
activations: {"layers.*.norm": {1: tp}}
data: {zero: 2, bucket_mb: 25}
checkpoint:
  - {match: "layers.*", save: [linear]}
precision: {compute: bfloat16, reduce: float32}
""",
    """shardc: 1
mesh: {pp: 2, dp: 2}
shard: {"head": {style: column, axis: dp}}
pipeline: {axis: pp, stages: 2, schedule: 1f1b}
batch: {microbatches: 4, axes: []}
data: {axis: dp, zero: 0}
uneven: pad
""",
    'shardc: 1\nmesh: {tp: 2}\nshard: {use: structure, "layers.{0,1}.up.weight": {0: {axis: tp, split: 2}}}\n',
)
HUGE = 10**17
LONG = "a" * 100_000
BRACES = "{a,b}" * 20
VALUES: tuple[str, ...] = (
    "",
    "~",
    "null",
    "true",
    "-1",
    "0",
    "1",
    "3",
    "7",
    "4096",
    "1000000000",
    str(HUGE),
    "9" * 30,
    "-" + "9" * 30,
    "1.5",
    "1e308",
    "1e-320",
    ".inf",
    ".nan",
    "'2'",
    '"\\e[31mred\\0"',
    '"\\0"',
    "é",
    "🙂",
    "'\u202eabc'",
    "[]",
    "{}",
    "[[]]",
    "[1, 2]",
    "{a: b}",
    "{1: 2}",
    "{-1: tp}",
    "{0: tp}",
    "{0: [tp, tp]}",
    "{0: {axis: tp, sections: [100000000000, 100000000000]}}",
    "{0: {axis: tp, split: 1000000000000}}",
    "{99999999: tp}",
    "&a x",
    "*a",
    "!!python/object/apply:os.system [echo]",
    "!!binary aGk=",
    "? a",
    "<<",
    '"*"',
    '"**"',
    f'"{BRACES}"',
    '"{*,*}{*,*}{*,*}{*,*}{*,*}{*,*}{*,*}{*,*}"',
    f'"{"*a" * 60}b"',
    '"{"',
    '"}{"',
    '"{,}"',
    f"'{LONG}'",
    "/dev/zero",
    "/dev/stdin",
    "/proc/self/mem",
    "../../../etc/passwd",
    "/",
    "./",
    "pp",
    "tp",
    "dp",
    "microbatch",
    "mesh",
    "rng",
    "model",
    "structure",
    "interleaved",
    "zb-v",
    "dynamic",
    "cpu",
    "disk/",
    "auto",
)
KEYS = (*list(Spec.json_schema()["properties"]), "x", "é", '"*"', "1", "~", "<<", '"\\e[31mx"', f'"{BRACES}"', "[a]: b")


def fixed() -> Iterator[tuple[str, Source]]:
    """The specs written by hand, with names."""
    for i, value in enumerate(VALUES):
        yield f"a mesh {i}", f"shardc: 1\nmesh: {{dp: {value}}}\n"
        yield f"an axis {i}", f"shardc: 1\nmesh: {{{value or 'x'}: 2}}\n"
        yield f"a pattern {i}", f"shardc: 1\nmesh: {{tp: 2}}\nshard:\n  {value or 'x'}: column\n"
        yield f"a schedule {i}", f"shardc: 1\nmesh: {{pp: 2}}\npipeline: {{axis: pp, stages: 2, schedule: {value}}}\n"
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    loop: dict[Any, Any] = {"shardc": 1}
    loop["mesh"] = loop
    wide: Any = "x"
    for _ in range(12):
        wide = [wide] * 10
    head = "shardc: 1\nmesh: {tp: 2}\n"
    texts: dict[str, Source] = {
        "nothing": "",
        "a null byte": "\0",
        "only comments": "#" * 1000 + "\n",
        "a million comments": "#\n" * 500_000,
        "deep lists": "shardc: " + "[" * 100_000,
        "deep mappings": "{a: " * 5000,
        "an alias bomb": "a: &a [x, x]\n"
        + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20)),
        "merge keys": "a: &a {b: 1}\n<<: *a\n",
        "two documents": head + "---\n" + head,
        "a directive": "%YAML 9.9\n---\n" + head,
        "a long key": f"{LONG}: 1\n",
        "a long number": f"shardc: {'1' * 100_000}\n",
        "many keys": head + "".join(f"k{i}: {i}\n" for i in range(20_000)),
        "many patterns": head + "shard:\n" + "".join(f'  "layers.*.{i}": column\n' for i in range(4_000)),
        "many alike patterns": head + "shard:\n" + "".join(f'  "layers.{i}.upp": column\n' for i in range(1_000)),
        "many activations": head + "activations:\n" + "".join(f'  "layers.*.{i}": {{1: tp}}\n' for i in range(1_000)),
        "many experts": head + "experts:\n" + '  - {match: "*", axis: tp}\n' * 1_000,
        "many checkpoints": head + "checkpoint:\n" + '  - {match: "*.q"}\n' * 1_000,
        "a duplicate key a thousand times": head + "mesh: {tp: 2}\n" * 1_000,
        "tabs": "shardc: 1\nmesh:\n\tdp: 2\n",
        "a byte order mark": "\ufeff" + head,
        "unicode spaces": "shardc:\u00a01\nmesh: {tp: 2}\n",
        "surrogates": "shardc: 1\nmesh: {'\ud800': 2}\n",
        "an axis called microbatch": "shardc: 1\nmesh: {microbatch: 2}\nbatch: {axes: [microbatch], microbatches: 2}\n",
        "one axis for stages and weights": "shardc: 1\nmesh: {tp: 2}\npipeline: {axis: tp, stages: 2}\nuneven: pad\n"
        'shard: {"layers.{0,1}.*": {style: row}}\n',
        "one axis for stages and a plan": "shardc: 1\nmesh: {tp: 2}\npipeline: {axis: tp, stages: 2}\n"
        "shard: {use: structure}\n",
        "many ranks, padded": "shardc: 1\nmesh: {dp: 1000000}\nuneven: pad\n",
        "many axes": "shardc: 1\nmesh: {" + ", ".join(f"a{i}: 1" for i in range(500)) + "}\n",
        "many axes of two": "shardc: 1\nmesh: {" + ", ".join(f"dp_{i}: 2" for i in range(20)) + "}\n",
        "microbatches": f"{head}batch: {{microbatches: {HUGE}}}\n",
        "microbatches, padded": f"{head}batch: {{microbatches: {HUGE}}}\nuneven: pad\n",
        "prefetch": f"shardc: 1\nmesh: {{dp: 2}}\ndata: {{zero: 3, prefetch: {HUGE}}}\n",
        "small buckets": "shardc: 1\nmesh: {dp: 2}\ndata: {zero: 3, bucket_mb: 1.0e-300}\n",
        "large buckets": "shardc: 1\nmesh: {dp: 2}\ndata: {zero: 3, bucket_mb: 1.0e+300}\n",
        "stages": f"shardc: 1\nmesh: {{pp: 2}}\npipeline: {{axis: pp, stages: {HUGE}}}\n",
        "cuts": "shardc: 1\nmesh: {pp: 1}\npipeline: {axis: pp, cut: [" + "layers.1, " * 1_000 + "]}\n",
        "balance": f"shardc: 1\nmesh: {{pp: 2}}\npipeline: {{axis: pp, balance: [{HUGE}, {HUGE}]}}\n",
        "every": f"{head}checkpoint: [{{match: 'layers.*', every: {HUGE}}}]\n",
        "sections": f"{head}shard: {{head.weight: {{0: {{axis: tp, sections: [{HUGE}, {HUGE}]}}}}}}\n",
        "more dims": head + "shard: {head.weight: {" + ", ".join(f"{i}: tp" for i in range(1_000)) + "}}\n",
        "a deep dict": {"shardc": 1, "mesh": deep},
        "a dict in itself": loop,
        "a wide dict": {"shardc": 1, "mesh": {"tp": wide}},
        "a long number in a dict": {"shardc": 1, "mesh": {"tp": 10**5000}},
        "odd keys in a dict": {"shardc": 1, None: 1, 3.5: 2, b"x": 3, (1,): 4},
        "odd values in a dict": {"shardc": 1, "mesh": {"tp": {1, 2}}, "shard": object(), "data": b"x"},
    }
    yield from texts.items()


def mutated(random_: random.Random) -> str:
    """A right spec with a few slips in it."""
    lines = random_.choice(RIGHT).splitlines(keepends=True)
    for _ in range(random_.randint(1, 4)):
        i = random_.randrange(len(lines))
        line = lines[i]
        at = random_.randrange(len(line))
        kind = random_.randrange(8)
        if kind == 0:
            del lines[i]
            lines = lines or ["\n"]
        elif kind == 1:
            lines.insert(random_.randrange(len(lines)), line)
        elif kind == 2:
            lines[i] = line[:at] + line[at + 1 :]
        elif kind == 3:
            lines[i] = line[:at] + random_.choice("{}[],:&*!|>'\"%@`#- \t\0\n\u2028é0aZ") + line[at:]
        elif kind == 4:
            lines[i] = line[:at] + random_.choice(VALUES) + line[at:]
        elif kind == 5:
            key, colon, _ = line.partition(":")
            lines[i] = f"{key}{colon} {random_.choice(VALUES)}\n"
        elif kind == 6:
            words = line.replace(",", " ").replace("}", " ").split()
            lines[i] = line.replace(random_.choice(words), random_.choice(VALUES), 1) if words else line
        else:
            lines[i] = f"{random_.choice(KEYS)}: {random_.choice(VALUES)}\n"
    return "".join(lines)


def shaped(random_: random.Random) -> dict[Any, Any]:
    """A spec of the schema's keys, with values that are partly right."""
    plain: tuple[Any, ...] = (None, True, -1, 0, 1, 2, 3, 8, HUGE, 0.5, "tp", "pp", "dp", "*", "layers.*", "x", [], {})

    def value(schema: dict[str, Any], depth: int) -> Any:
        if random_.random() < 0.08 or depth > 6:
            return random_.choice(plain)
        if "$ref" in schema:
            return value(definitions[schema["$ref"].rpartition("/")[2]], depth + 1)
        for key in ("anyOf", "enum", "examples"):
            if key in schema:
                chosen = random_.choice(schema[key])
                return value(chosen, depth + 1) if key == "anyOf" else chosen
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            found = {k: value(s, depth + 1) for k, s in schema.get("properties", {}).items() if random_.random() < 0.4}
            more = schema.get("additionalProperties")
            if isinstance(more, dict):
                names = ("*", "layers.*.up", "layers.*.down", "head", "embed", "dp", "tp", "pp", "ids", "layers.0:in")
                found |= {random_.choice(names): value(more, depth + 1) for _ in range(random_.randint(0, 3))}
            return found
        if kind == "array":
            return [value(schema.get("items", {}), depth + 1) for _ in range(random_.randint(0, 3))]
        words = ("tp", "dp", "pp", "layers.*", "layers.1", "*", "cpu", "1f1b")
        kinds = {"integer": (1, 2, 3, 4), "number": (0.5, 2), "boolean": (True, False), "string": words}
        return random_.choice(kinds.get(str(kind), plain))

    schema = Spec.json_schema()
    definitions = schema.get("$defs", {})
    spec = value({k: v for k, v in schema.items() if k != "required"}, 0)
    return {**spec, "shardc": 1, "mesh": {"dp": 2, "tp": 2, "pp": 2}} if isinstance(spec, dict) else {"shardc": spec}


def tried(source: Source, model: nn.Module, batch: Any, captured: Program, seen: harm.Watch | None = None) -> str:
    """ "compiled", or the text of the error. Every other exception passes. seen: what it did and took."""
    try:
        with seen or nullcontext():
            spec = Spec.parse(source, "spec.yaml") if isinstance(source, str) else Spec.load(source)
            shardc.compile(model, batch, spec, captured=captured)
            return "compiled"
    except ShardcError as e:
        error = e
    text = str(error)
    assert all(x.where and x.what for x in error.errors), f"no place: {text[:200]}"
    assert text.replace("\n", "").isprintable(), "a terminal would obey it"
    assert len(text) < 100_000, f"an error of {len(text):,} characters"
    return text


def every(count: int, seed: int = 0) -> Iterator[tuple[str, Source]]:
    yield from fixed()
    for i in range(count):
        yield f"mutation {i}", mutated(random.Random(f"{seed} mutation {i}"))
        yield f"random {i}", shaped(random.Random(f"{seed} random {i}"))


def main(count: int) -> None:
    model, batch, captured = subject()
    tried("shardc: 1\nmesh: {dp: 3}\nuneven: pad\n", model, batch, captured)  # imports what compiles
    slow, large, wrong, total, compiled, quick = [], [], [], 0, 0, 0
    for name, source in every(count):
        faulthandler.dump_traceback_later(HANG, exit=True)
        print(name, end="\r", file=sys.stderr)
        seen = harm.Watch(*SCHEDULES)
        try:
            result = tried(source, model, batch, captured, seen)
            compiled += result == "compiled"
            quick += result != "compiled" and seen.seconds < 0.05 and seen.nbytes < 50 << 20
        except Exception as e:  # what the search is for
            wrong.append((name, f"{type(e).__name__}: {str(e)[:200]}"))
        if seen.harm:
            wrong.append((name, f"HARM: {seen.harm}"))
        slow.append((seen.seconds, name))
        large.append((seen.nbytes, name))
        total += 1
    faulthandler.cancel_dump_traceback_later()
    refused = total - compiled - len(wrong)
    print(f"{total} specs: {compiled} compiled, {refused} refused, {len(wrong)} tracebacks or harm")
    print(f"refused in 50 ms of CPU and 50 MB: {quick} of {refused}")
    late, much = [s for s in slow if s[0] > SECONDS], [s for s in large if s[0] > BYTES]
    print(f"over {SECONDS} s of CPU: {len(late)}; over {BYTES >> 20} MB: {len(much)}")
    for seconds, name in sorted(slow)[-5:]:
        print(f"  {seconds:.2f} s  {name}")
    for grown, name in sorted(large)[-3:]:
        print(f"  {grown / 2**20:.0f} MB  {name}")
    for name, what in wrong[:40]:
        print(f"  {name}: {what}")
    sys.exit(bool(wrong or late or much))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 700)
