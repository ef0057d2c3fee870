"""Hostile artifacts: compiled folders that somebody made to do harm. Generated, from a seed; digests are made to fit.

    python -m tests.artifact.hostile [N]      the fixed ones and N random ones, with times and memory

Each is refused by a ShardcError with a place; or it loads, and is then proven to compute what its model does or told to
compute something else. None runs anything, or opens a file outside of its folder.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shardc
from shardc.errors import ShardcError
from shardc.spec import Spec
from tests import harm
from tests.spec import hostile as specs

#: What refusing one may take; a program that is read takes the time that its text takes.
SECONDS, BYTES, HANG = 0.05, 50 << 20, 30
ZERO_3 = "shardc: 1\nmesh: {dp: 2, tp: 2}\nshard: {use: structure}\ndata: {zero: 3}\n"
Attack = Callable[[Path], None]


def originals(folder: Path) -> list[Path]:
    """Compiled folders: split and padded, a pipeline with a schedule, ZeRO 3."""
    model, batch, captured = specs.subject()
    made = []
    for i, text in enumerate((*specs.RIGHT[:2], ZERO_3)):
        made.append(folder / f"right{i}")
        shardc.compile(model, batch, Spec.parse(text, "spec.yaml"), captured=captured, prove=False).save(made[-1])
    return made


# --- what is put where

#: Instead of an op. The first word of each would be a name that the text binds or Python knows.
TARGETS = (
    *("os.system", "eval", "exec", "__import__", "open", "print", "torch.load", "torch.save", "torch.hub.load"),
    *("torch.ops.load_library", "torch.ops.import_module", "torch.classes.load_library", "torch.jit.load"),
    *("torch.ops.aten.from_file.default", "aten.from_file.default", "aten.zero_.default", "aten.add_.Tensor"),
    *("aten.add.out", "aten.set_.source_Tensor", "aten.resize_.default", "aten._assert_async.msg", "aten.item.default"),
    *("aten.add", "aten.add.Tensor.__call__", "aten.add.Tensor._op", "aten.__class__.__base__", "aten.linear.__init__"),
    *("aten.linear.default.__globals__", "ops.__builtins__", "ops.torch", "ops.torch.load", "ops.__loader__", "ops"),
    *("torch.ops.prim.Print.default", "torch.ops.profiler._record_function_enter_new.default", "mesh.barrier", "rng"),
    *("torch.ops.c10d.barrier.default", "torch.ops._c10d_functional.all_reduce.default", "torch.ops.aten.linear"),
    *(
        "torch.ops.inductor.resize_storage_bytes_.default",
        "torch.ops.fsdp.copy_.default",
        "torch.ops.prims.add.default",
    ),
    *("torch.ops.higher_order.cond", "torch.ops.mylib.mine.default", "torch.ops.nothing", "(lambda: 0)", "getattr"),
    *("[].append", "'x'.join", "aten['linear']", "aten.linear.default()", "breakpoint", "globals().get", "ops.launch"),
    *("torch.ops.streams.synchronize_device.default", "torch.ops.debugprims.load_tensor.default", "ops.all_reduce2"),
    *("torch.ops.export.noop.default", "torch.ops.symm_mem.one_shot_all_reduce.default", "аten.linear.default"),
)
STATEMENTS = (
    *("import os", "from os import system", "import os; os.system('touch RAN')", "exec('1')", "pass", "global torch"),
    *("__import__('os').system('touch RAN')", "open('RAN', 'w')", "x: int = open('RAN', 'w')", "def inner(): ..."),
    *("class A(metaclass=print): ...", "@print", "async def f(): ...", "while True: pass", "for i in range(9): pass"),
    *("with open('RAN', 'w') as f: pass", "try: pass", "raise SystemExit", "assert open('RAN', 'w')", "yield 1", "del"),
    *(
        "return open('RAN', 'w')",
        "a = b = 1",
        "a, b = 1, 2",
        "a.b = 1",
        "a[0] = 1",
        "a += 1",
        "(a := 1)",
        "a = [i for i",
    ),
    *("a = f'{open(1)}'", "a = aten.add.Tensor(*[])", "a = aten.add.Tensor(**{})", "a = (lambda: 1)()", "a = mesh.x"),
    *("a = mesh.__class__", "a = 9 ** 9 ** 9", "a = 'x' * 10**9", "a = [0] * 10**9", "a = b''", "a = {}", "a = {1: 2}"),
    *("a = aten.add.Tensor(open('RAN', 'w'), 1)  # f32[2]", "torch = mesh", "aten = mesh", "ops = rng", "mesh = rng"),
    *(
        "a = aten.empty.memory_format([10**18])  # f32[2]",
        "a = torch.float32",
        "a = torch.os",
        "a = not mesh",
        "del mesh",
    ),
    *("a = ops.opaque('os.system', mesh)  # f32[2]", "ops.launch(mesh, 'x')", "a = aten.relu.default(a)", "match a:"),
    *("a = complex('1' * 9)", "a = torch.device('/etc/passwd')", "a = float('1')", "\x0cimport os", "\\", "'''", '"""'),
    *("a = aten.relu.default(mesh)  # f32[2]\r    import os", "a\u2028import os", "if 1: import os", "nonlocal a"),
)
BOMBS = (
    *("a = " + "-" * 50_000 + "1", "a = a" + ".b" * 30_000, "a = " + "(" * 5_000, "a = a" + "[0]" * 20_000),
    *("a = 1" + "+1" * 20_000, "a = a" + "()" * 20_000, "a = " + "not " * 20_000 + "1", "a = (" + "1," * 500_000 + ")"),
    *(
        "a = '" + "x" * 3_000_000 + "'",
        "a = " + "9" * 100_000,
        "a = f'" + "{1}" * 9_000 + "'",
        "a = 1" + "<1" * 300_000,
    ),
    *("# " + "a (" * 100_000, "# " + "(" * 300_000 + ")" * 300_000, "x = 1;" * 100_000, "a = " + "'a' " * 100_000),
    *(
        "a = 0x" + "f" * 1_000_000,
        "a = 1e999999",
        "a = " + "lambda:" * 9_000 + "1",
        "a = [" * 3_000,
        "a = 1j" + "j" * 9,
    ),
    *(
        "a = aten.relu.default(a)  # f32[" + "9" * 5_000 + "]",
        "a = aten.relu.default(a)  # f32[" + "1, " * 99_999 + "1]",
    ),
)
TYPES = (
    *("f32[99999999999999999999]", "f32[2, 2", "f99[2]", "f32[-1]", "f32[2@zz]", "f32[2@dp@dp]", "f32[] +dp +dp"),
    *(
        "f32[" + "1, " * 9_999 + "1]",
        "f32[1000000000000, 1000000000000]",
        "f32[3@dp]",
        "f32[2] ~zz",
        "?",
        "",
        "()",
        "f32",
    ),
    *(
        "f32[2·2@dp/0]",
        "f32[1|1@dp]",
        "f32[2+9999999999999@dp]",
        "f32[٣]",
        "obj[2]",
        "f32[2] +__class__:dp",
        "f32[2@dp[0]]",
    ),
    *('f32[2] | region "x"', 'f32[2] | exec/none dp 4 "x"', 'f32[2] | all_reduce/none zz 4 "x"', "f32[2] | piece 1"),
    *(
        'f32[2] | all_reduce/none dp[99] 4 "x"',
        "f32[2] | all_reduce/none dp " + "9" * 5000 + ' "x"',
        "f32[2] | " + "a" * 99_999,
    ),
)
LEAVES: tuple[Any, ...] = (
    *(
        -1,
        0,
        1,
        7,
        2**31,
        2**63,
        2**64,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        True,
        None,
        "",
        "x",
        [],
        {},
        [[]],
        [-1],
    ),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "/dev/zero",
        "a\0b",
        "\ud800",
        "a" * 100_000,
        [0] * 1000,
        {"a": 1},
        [2**62] * 60,
    ),
    *(
        "__class__",
        "mesh",
        "import os",
        "os.system",
        "torch.load",
        "\x1b[31mred",
        "\u202eabc",
        "torch.float99",
        "torch.os",
    ),
    *(
        {"__reduce__": ["os.system", "touch RAN"]},
        [{"name": "x"}],
        "f32[2]",
        "f32[4@dp, 4@tp]",
        "f32[10, 10] +dp",
        "dp",
        "pp",
    ),
)
NAMES = (
    *("../right1/stage0.py", "/etc/passwd", "./stage0.py", "stage0.py/../x", "", ".", "..", "a\0b", "~", "stage0.pyc"),
    *(
        "stage99999999999999.py",
        "stage0.PY",
        "a" * 5_000,
        "__init__.py",
        "conftest.py",
        "sitecustomize.py",
        "stage0.so",
    ),
    *(
        "con",
        "pickle.pkl",
        "archive/data.pkl",
        "stage٣.py",
        "single.py\n",
        "-rf",
        "model.safetensors.index.json",
        "a/b.py",
    ),
)
TABLES = ("manifest.json", "layouts.json")
JSONS = (
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"[" * 1_000_000,
        b'{"a":' * 300_000,
    ),
    *(
        b"9" * 1_000_000,
        b"NaN",
        b"[" + b"[]," * 3_000_000 + b"[]]",
        b'{"a": 1, "a": 2}',
        b'"' + b"a" * 17_000_000 + b'"',
    ),
    *(
        b" " * 18_000_000,
        b"[" + b"1," * 4_000_000 + b"1]",
        b"{" + b",".join(b'"%d": {}' % i for i in range(300_000)) + b"}",
    ),
)
SCHEDULES = (
    "",
    "rank 0: 99999999999999999F0",
    "rank 999999999999: 0F0",
    "rank 0: 999999F0",
    "rank 0: 0F999999",
    "rank 0: 0F0\n" * 100_000,
    "x" * 1_000_000,
    "rank 0: 0SEND_F0>99999999999",
    "rank 0: import os",
    "/etc/passwd",
    "rank 0: " + "0F0 " * 300_000,
)


class Trap:
    """A pickle of it makes a folder."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.ran),)


# --- attacks, on a copy of a folder


def fixed(count_of_stages: int) -> Iterator[tuple[str, Attack]]:
    """Those written by hand."""
    for i, target in enumerate(TARGETS):
        yield f"a target {target}", _line(lambda line, t=target: _retargeted(line, t), i)
    for i, statement in enumerate(STATEMENTS):
        yield f"a statement {statement[:30]!r}", _inserted(f"    {statement}", i)
        yield f"a statement before {statement[:30]!r}", _top(statement)
    for i, bomb in enumerate(BOMBS):
        yield f"a bomb {bomb[:20]!r}", _inserted(f"    {bomb}", i)
    for i, type_ in enumerate(TYPES):
        yield f"a type {type_[:30]!r}", _line(lambda line, t=type_: f"{line.partition('  # ')[0]}  # {t}", i)
    for name in NAMES:
        yield (
            f"the manifest lists {name[:30]!r}",
            _table("manifest.json", lambda t, n=name: t["sha256"].update({n: "0" * 64})),
        )
        yield (
            f"the manifest renames to {name[:30]!r}",
            _table("manifest.json", lambda t, n=name: t["sha256"].update({n: t["sha256"].pop("stage0.py")})),
        )
    for table in TABLES:
        for data in JSONS:
            yield f"{table} is {data[:12]!r} ({len(data):,})", _bytes(table, data)
    for i, text in enumerate(SCHEDULES):
        yield f"a schedule {i}", _bytes("schedule.txt", text.encode())
    for path in ("/dev/zero", "/dev/stdin", "/proc/self/mem", "/etc/passwd", "/", "pipe", "\0", "~/x", "a" * 9_000):
        yield f"main source {path[:20]!r}", _source(main=path)
        yield f"model_ref {path[:20]!r}", _table("manifest.json", lambda t, p=path: t["meta"].update(model_ref=p))
        yield f"source {path[:20]!r}", _source(files={path: {"x": "y"}})
        yield (
            f"offload {path[:20]!r}",
            _bytes("spec.yaml", f"shardc: 1\nmesh: {{dp: 2}}\ndata: {{offload: {{optimizer: {path!r}}}}}\n".encode()),
        )
        yield (
            f"spec's schedule {path[:20]!r}",
            _bytes(
                "spec.yaml",
                f"shardc: 1\nmesh: {{pp: 2, dp: 2}}\npipeline: {{axis: pp, stages: 2, schedule: {path!r}}}\n".encode(),
            ),
        )
    yield "the main source is a link of the folder's", _linked_source
    for name in ("stage0.py", "single.py", "layouts.json", "manifest.json", "spec.yaml", "constants.safetensors"):
        for kind in ("link", "loop", "pipe", "folder", "missing", "pickle", "torch", "empty", "large"):
            yield f"{name} is a {kind}", _other(name, kind)
    for text in ("\ufeff", "\0", "\x1b[2J", "\r", "\u2028", "\x0c"):
        yield (
            f"a character {text!r}",
            _edited("stage0.py", lambda t, x=text: x + t if x == "\ufeff" else t.replace("aten", f"aten{x}", 1)),
        )
    yield "no stages", _table("layouts.json", lambda t: t.update(stages=[]))
    yield "many stages", _table("layouts.json", lambda t: t.update(stages=t["stages"] * 9_999))
    yield "a mesh of many", _table("manifest.json", lambda t: t.update(mesh={"dp": 10**9, "tp": 10**9}))
    yield "a mesh of many axes", _table("manifest.json", lambda t: t.update(mesh={f"a{i}": 1 for i in range(9_999)}))
    yield "another mesh", _table("manifest.json", lambda t: t.update(mesh={"dp": 3}))
    yield "format 99", _table("manifest.json", lambda t: t.update(format=99))
    yield "another torch", _table("manifest.json", lambda t: t.update(torch="1.0"))
    header = b'{"x":{"dtype":"F32","shape":[%s],"data_offsets":[0,%d]}}'
    for lie in (
        (2**62).to_bytes(8, "little"),
        len(header % (b"2", 8)).to_bytes(8, "little") + header % (b"2", 8),
        len(header % (b"9" * 30, 8)).to_bytes(8, "little") + header % (b"9" * 30, 8) + b"\0" * 8,
        (9_000_000).to_bytes(8, "little") + b"[" * 9_000_000,
        (9).to_bytes(8, "little") + b'{"a":' + b"x" * 4,
        b"PK\3\4" + b"\0" * 64,
    ):
        yield f"constants of {lie[:12]!r}", _bytes("constants.safetensors", lie)


def at_random(rng: random.Random) -> tuple[str, Attack]:
    kind = rng.randrange(10)
    if kind < 4:  # a value of a table becomes another
        table, seed = rng.choice(TABLES), rng.random()
        return f"a value of {table}", _table(table, lambda t: _changed_leaf(t, random.Random(seed)))
    if kind == 4:
        table, seed = rng.choice(TABLES), rng.random()
        return f"a key of {table}", _table(table, lambda t: _changed_key(t, random.Random(seed)))
    if kind == 5:
        line, target = rng.randrange(200), rng.choice(TARGETS)
        return f"line {line} calls {target}", _line(lambda x: _retargeted(x, target), line)
    if kind == 6:
        line, statement = rng.randrange(200), rng.choice((*STATEMENTS, *BOMBS))
        return f"line {line} is {statement[:20]!r}", _inserted(f"    {statement}", line)
    if kind == 7:
        seed = rng.random()
        return "characters of a text", _edited("stage0.py", lambda t: _mistyped(t, random.Random(seed)))
    if kind == 8:
        seed = rng.random()
        return "bytes of a file", lambda folder: _torn(folder, random.Random(seed))
    text = specs.mutated(rng)
    return "a spec", _bytes("spec.yaml", text.encode(errors="surrogatepass"))


def fitted(folder: Path) -> None:
    """Digests and names in the manifest become those of the files."""
    manifest = folder / "manifest.json"
    if manifest.is_symlink() or not manifest.is_file() or manifest.stat().st_size > 1 << 26:
        return
    try:
        table = json.loads((folder / "manifest.json").read_bytes())
        listed = table["sha256"]
        for name in listed:
            path = folder / name.replace("\0", "")[:200]
            if "/" not in name and path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26:
                listed[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(table))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # it is no manifest any more


def _listed(folder: Path, name: str) -> None:
    _table("manifest.json", lambda t: t["sha256"].setdefault(name, ""))(folder)


def _edited(name: str, change: Callable[[str], str]) -> Attack:
    def attack(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_text()).encode(errors="surrogatepass"))

    return attack


def _line(change: Callable[[str], str], at: int) -> Attack:
    """Another line for the at-th op."""

    def changed(text: str) -> str:
        lines = text.split("\n")
        ops = [i for i, x in enumerate(lines) if " = " in x and x.startswith("    ") and not x.lstrip().startswith("#")]
        i = ops[at % len(ops)]
        lines[i] = change(lines[i])
        return "\n".join(lines)

    return _edited("stage0.py", changed)


def _inserted(statement: str, at: int) -> Attack:
    def changed(text: str) -> str:
        lines = text.split("\n")
        body = lines.index("):") + 1
        lines.insert(body + at % (len(lines) - body - 1), statement)
        return "\n".join(lines)

    return _edited("stage0.py", changed)


def _top(statement: str) -> Attack:
    return _edited(
        "stage0.py", lambda text: text.replace("aten = torch.ops.aten\n", f"aten = torch.ops.aten\n{statement}\n", 1)
    )


def _retargeted(line: str, target: str) -> str:
    head, equals, rest = line.partition(" = ")
    return f"{head}{equals}{target}({rest.partition('(')[2]}" if "(" in rest else f"{head}{equals}{target}()"


def _table(name: str, change: Callable[[Any], Any]) -> Attack:
    def attack(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        change(table)
        (folder / name).write_bytes(json.dumps(table, ensure_ascii=False).encode(errors="surrogatepass"))

    return attack


def _places(table: Any) -> list[tuple[Any, Any]]:
    found = []
    inside = [table]
    while inside:
        box = inside.pop()
        for key in list(box) if isinstance(box, dict) else range(len(box)):
            if box is table and key == "sha256":
                continue
            found.append((box, key))
            if isinstance(box[key], (dict, list)):
                inside.append(box[key])
    return found


def _changed_leaf(table: Any, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        box, key = rng.choice(_places(table))
        others = (b[k] for b, k in rng.sample(_places(table), 3))
        box[key] = copy.deepcopy(rng.choice((*LEAVES, *others)))


def _changed_key(table: Any, rng: random.Random) -> None:
    boxes = [(b, k) for b, k in _places(table) if isinstance(b, dict)]
    box, key = rng.choice(boxes)
    if rng.random() < 0.5:
        box[rng.choice(("__class__", "pickle", "code", "x", "", "../x", "\x1b[31m", "a" * 9_999))] = rng.choice(LEAVES)
    else:
        del box[key]


def _mistyped(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        cut = rng.choice((0, 1, 1, 5, 50))
        text = (
            text[:at]
            + rng.choice(("", *"()[]{}.,=#'\"\\\n *@|+~:;0é\0", "__", "mesh", "open('RAN','w')", "10**9"))
            + text[at + cut :]
        )
    return text


def _torn(folder: Path, rng: random.Random) -> None:
    files = sorted(x for x in folder.iterdir() if x.is_file())
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    kind = rng.randrange(4)
    if kind == 0:
        data = data[: rng.randrange(len(data))]
    elif kind == 1:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data = bytearray(rng.choice(files).read_bytes())
    else:
        at = rng.randrange(len(data))
        data[at : at + 64] = bytes(64)
    path.write_bytes(data)


def _bytes(name: str, data: bytes) -> Attack:
    def attack(folder: Path) -> None:
        if name not in ("manifest.json", "layouts.json"):
            _listed(folder, name)
        (folder / name).write_bytes(data)

    return attack


def _other(name: str, kind: str) -> Attack:
    def attack(folder: Path) -> None:
        path = folder / name
        if name != "manifest.json":
            _listed(folder, name)
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(folder.parent / "right1" / (name if name != "constants.safetensors" else "stage0.py"))
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "pickle":
            path.write_bytes(pickle.dumps(Trap(folder.parent / "RAN")))
        elif kind == "torch":
            import torch

            torch.save({"x": Trap(folder.parent / "RAN")}, path)
        elif kind == "empty":
            path.touch()
        elif kind == "large":
            with path.open("wb") as f:
                f.truncate(1 << 33)  # a hole in the file, which takes no room on the disk

    return attack


def _linked_source(folder: Path) -> None:
    (folder / "m.py").symlink_to("/dev/zero")
    _source(main=str(folder / "m.py"))(folder)


def _source(**entries: Any) -> Attack:
    source = {"main": "m.py", "python": [3, 11], "files": {"": {"x": "y"}}, **entries}
    return _table("manifest.json", lambda t: t["meta"].update(source=source))


def every(count: int, seed: int = 0) -> Iterator[tuple[str, Attack, int]]:
    """(name, attack, which of the originals)."""
    for i, (name, attack) in enumerate(fixed(2)):
        yield name, attack, 1 if "schedule" in name else i % 3
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        name, attack = at_random(rng)
        yield f"{i}: {name}", attack, rng.randrange(3)


def attacked(attack: Attack, original: Path) -> Path:
    """A copy of a folder, changed so; digests fit."""
    folder = original.parent / "hostile"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    attack(folder)
    fitted(folder)
    return folder


def tried(folder: Path, seen: harm.Watch) -> str:
    """ "refused: ...", "not proven: ..." or "proven". Every other exception passes."""
    program, error = None, None
    try:
        with seen:
            program = shardc.load(folder)
    except ShardcError as e:
        error = e
    if program is None:
        assert error is not None
        assert all(x.where and x.what for x in error.errors), f"no place: {error}"
        text = str(error)
        assert text.replace("\n", "").isprintable(), "a terminal would obey it"
        assert len(text) < 20_000, f"an error of {len(text):,} characters"
        return f"refused: {text}"
    text = str(program)
    assert text.replace("\n", "").isprintable(), "a terminal would obey its text"
    proof = program.prove()
    return "proven" if proof.ok else f"not proven: {proof.gaps[0]}"


def main(count: int, seed: int) -> None:
    found: Counter[str] = Counter()
    wrong, slow, large = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        right = originals(Path(temporary))
        for folder in right:
            shardc.load(folder).prove()
        os.chdir(temporary)
        for name, attack, which in every(count, seed):
            faulthandler.dump_traceback_later(HANG, exit=True)
            print(f"{name:70.70}", end="\r", file=sys.stderr)
            folder = attacked(attack, right[which])
            seen = harm.Watch(folder, Path(shardc.__file__).parent)
            try:
                result = tried(folder, seen)
            except Exception as e:  # what the search is for
                result = "TRACEBACK"
                wrong.append((name, f"{type(e).__name__}: {str(e)[:300]}"))
            if seen.harm:
                wrong.append((name, f"HARM: {seen.harm}"))
            found[result.partition(":")[0]] += 1
            if result.startswith("refused"):
                slow.append((seen.seconds, name))
                large.append((seen.nbytes, name))
        assert not (Path(temporary) / "RAN").exists()
        faulthandler.cancel_dump_traceback_later()
        os.chdir("/")
    print(f"{sum(found.values())} artifacts: {', '.join(f'{n} {what}' for what, n in found.most_common())}")
    late, much = [s for s in slow if s[0] > SECONDS], [s for s in large if s[0] > BYTES]
    print(f"of the refused, over {SECONDS} s of CPU: {len(late)}; over {BYTES >> 20} MB: {len(much)}")
    for seconds, name in sorted(slow)[-12:]:
        print(f"  {seconds:.3f} s  {name}")
    for grown, name in sorted(large)[-5:]:
        print(f"  {grown / 2**20:.0f} MB  {name}")
    for name, what in wrong[:60]:
        print(f"  {name}: {what}")
    sys.exit(bool(wrong or late or much))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 700, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
