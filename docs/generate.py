"""Fill the generated blocks of the documentation: `make table`, or `.venv/bin/python docs/generate.py`.

A block is the text between `<!-- NAME:begin -->` and `<!-- NAME:end -->` in a page: what shardc prints for a program
that is compiled here, or a table of data that the code reads. So a page cannot disagree with the code:
tests/docs/test_generated.py compares every block. The prose around the blocks is written by hand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
Blocks = dict[str, str]


# --- pages and blocks


def fill(page: str, blocks: Blocks) -> str:
    """A page with its blocks replaced. Raises KeyError for a block that the page lacks."""
    for name, text in blocks.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise KeyError(f"the page lacks {begin} ... {end}")
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n{text.strip(chr(10))}\n{end}{rest.partition(end)[2]}"
    return page


def write(file: Path, blocks: Blocks) -> None:
    file.write_text(fill(file.read_text(), blocks))


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```"


def lines_of(text: str) -> str:
    """Lines of a program, fenced; the comment of a long line follows on the next one."""
    broken = re.sub(r"^(?=.{161})( *)(.*?)  (# .*)$", r"\1\2\n\1    \3", text, flags=re.MULTILINE)
    return fenced(broken, "python")


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows])


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder: programs cite files as they were named on the command line."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def module(name: str) -> Any:
    """A file of examples/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses and inspect look there
    spec.loader.exec_module(loaded)
    return loaded


# --- README's example, which architecture.md follows through the passes


def example(folder: Path) -> None:
    """Write README's model.py and spec.yaml into a folder."""
    block = re.compile(r"^`(model\.py|spec\.yaml)`[^\n]*\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)
    blocks = block.findall((ROOT / "README.md").read_text())
    assert {name for name, _ in blocks} == {"model.py", "spec.yaml"}, blocks
    for name, text in blocks:
        (folder / name).write_text(text)


def dumped(folder: Path) -> dict[str, str]:
    """The dump of every pass, {"00-capture.txt": text, "01-canonical.diff": ...}."""
    import shardc

    example(folder)
    with inside(folder):
        names: dict[str, Any] = {"__name__": "model"}
        exec(compile(Path("model.py").read_text(), str(folder / "model.py"), "exec"), names)
        shardc.compile(names["model"](), names["batch"](), "spec.yaml", dump="dump", prove=False)
    return {f.name: f.read_text() for f in sorted((folder / "dump").iterdir())}


def architecture() -> Blocks:
    """The walk of two linear layers through the dump of every pass."""
    with tempfile.TemporaryDirectory() as name:
        files = dumped(Path(name))
    blocks = {"files": fenced("\n".join(files), "text")}
    for file, text in files.items():
        stage, kind = file.partition("-")[2].split(".")
        if stage in ("capture", "partition") and kind == "txt":
            body = text[text.index("# the model as" if stage == "capture" else "# stage0") :]
            blocks[stage] = fenced(body, "python")
        elif stage not in ("capture", "partition") and kind == "diff" and text:
            blocks[stage] = fenced("".join(text.splitlines(keepends=True)[2:]), "diff")
    return blocks


# --- algebra.md: real rules


RULES = [
    "aten.linear.default",
    "aten.mm.default",
    "aten.bmm.default",
    "aten.mul.Tensor",
    "aten.sum.dim_IntList",
    "aten._softmax.default",
    "aten.layer_norm.default",
    "aten.embedding.default",
    "aten.view.default",
    "aten.scaled_dot_product_attention.default",
]


def algebra() -> Blocks:
    from typer.testing import CliRunner

    from shardc.cli import app
    from shardc.ir import conversions

    output = CliRunner().invoke(app, ["rules", *RULES, "--json"])
    each = {r["op"]: r for r in json.loads(output.stdout)}
    rows = []
    for op in RULES:
        about = "; ".join(dict.fromkeys(filter(None, each[op]["about"].values())))
        rows.append(
            [
                f"`{op}`",
                f"`{each[op]['notation']}`",
                (f"`{each[op]['linear']}`" if each[op]["linear"] else "").replace("|", "\\|"),
                about,
            ]
        )
    return {
        "conversions": conversions.markdown(),
        "rules": table(["op", "rule", "linear in", "the function says"], rows),
        "tensor": mlp("gpt"),
        "sequence": mlp("gpt-sp"),
    }


def proof() -> Blocks:
    from shardc.verify.static.assumptions import ASSUMPTIONS

    rows = (f"- **{a.name}**: {a.sentence} Test: `{a.test}`." for a in ASSUMPTIONS)
    wrapped = (textwrap.fill(row, 150, subsequent_indent="  ", break_on_hyphens=False) for row in rows)
    return {"assumptions": "\n".join(wrapped)}


def mlp(spec: str) -> str:
    """One MLP of examples/gpt.py, without comments and `del`, from the program of a ready spec."""
    import shardc

    with inside(ROOT):
        gpt = module("gpt")
        program = shardc.compile(gpt.model(), gpt.batch(), f"specs/{spec}.yaml", prove=False)
    lines = program.text(full=True).splitlines()
    begin = next(i for i, line in enumerate(lines) if "# blocks.0.norm2 " in line)
    end = next(i for i, line in enumerate(lines) if "# blocks.1" in line)
    kept = [line.strip() for line in lines[begin:end] if not line.strip().startswith(("#", "del "))]
    return lines_of("\n".join(kept))


# --- experts.md, from examples/moe.py


EXPERTS = [{"match": "moe", "axis": "ep"}]
MESHES: dict[str, dict[str, Any]] = {
    "ep=2": {"mesh": {"ep": 2}},
    "dp=2 × ep=2": {"mesh": {"dp": 2, "ep": 2}},
    "dp=4, experts over dp": {"mesh": {"dp": 4}, "experts": [{"match": "moe", "axis": "dp"}]},
    "ep=2 × tp=2": {"mesh": {"ep": 2, "tp": 2}, "shard": {"use": "structure"}},
    "pp=2 × ep=2, 2 microbatches": {
        "mesh": {"pp": 2, "ep": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
    },
}


def experts() -> Blocks:
    """How a layer of experts becomes one op, what is exchanged, and how experts may be placed."""
    import shardc
    from shardc.artifact import emit

    moe = module("moe")

    def compiled(more: dict[str, Any]) -> Any:
        return shardc.compile(moe.model(), moe.batch(), {"shardc": 1, "experts": EXPERTS, **more}, prove=False)

    def ops(function: str) -> str:
        return "\n".join(line.strip() for line in function.splitlines() if "= ops.experts" in line)

    program = compiled(MESHES["dp=2 × ep=2"])
    return {
        "layer": fenced(inspect.getsource(moe.MoE), "python"),
        "whole": fenced(ops(emit.function(program.graph, program)), "python"),
        "local": fenced(ops(emit.function(program.stages[0].graph, program)), "python"),
        "routes": _routes(moe),
        "sent": _sent(moe, program),
        "meshes": _meshes(compiled),
    }


def _routes(moe: Any) -> str:
    """How many of each rank's choices go to the experts of each rank, by the router of the example's model, on ep=2."""
    import torch

    model, ranks = moe.model(), 2
    with torch.no_grad():
        index = model.moe.router(model.embed(moe.batch()["ids"])).topk(moe.CHOICES, -1).indices
    here = moe.EXPERTS // ranks
    head = ["tokens of", *(f"experts {r * here} - {r * here + here - 1}, on rank {r}" for r in range(ranks)), "choices"]
    rows = []
    for r, mine in enumerate(index.chunk(ranks)):
        counts = [int((mine // here == to).sum()) for to in range(ranks)]
        rows.append(
            [f"rank {r}", *(f"{n} {'stay' if to == r else 'go'}" for to, n in enumerate(counts)), str(sum(counts))]
        )
    return table(head, rows)


def _sent(moe: Any, program: Any) -> str:
    """What the program says of its exchanges, and what a run sent."""
    import shardc

    ran = [c for c in shardc.simulate(program, moe.model(), moe.batch()).comms if c.kind == "all_to_all"]
    rows = []
    for node in program.stages[0].graph.nodes:
        c = node.meta.get("collective")
        if c is not None and c.kind == "all_to_all":
            value = node.meta["value"]
            shown = "counts" if isinstance(value, tuple) else f"`{value}`"
            rows.append([node.target.__name__, f"{c.kind}/{c.backward}", "+".join(c.axes), str(c.bytes), shown])
    for direction in ("forward", "backward"):
        sent = " + ".join(str(c.bytes) for c in ran if c.direction == direction)
        rows.append([f"a run, rank 0, {direction}", "", "ep", sent, ""])
    return table(["op", "forward/backward", "axis", "bytes a rank", "of"], rows)


def _meshes(compiled: Callable[[dict[str, Any]], Any]) -> str:
    rows = []
    for name, more in MESHES.items():
        program = compiled(more)
        up, router = program.param("moe.up"), program.param("moe.router.weight")
        sent = [
            c for s in program.stages for n in s.graph.nodes if (c := n.meta.get("collective")) and c.kind != "none"
        ]
        kinds = sorted({f"{c.kind} {'+'.join(c.axes)}" for c in sent})
        share = 100 * up.value.nbytes(program.mesh) // up.value.nbytes()
        rows.append(
            [
                name,
                f"`{up.value}`",
                f"{share} %",
                "+".join(up.reduce) or "none",
                "+".join(router.reduce) or "none",
                ", ".join(kinds),
            ]
        )
    head = [
        "mesh",
        "moe.up",
        "of it on a rank",
        "its gradient is summed over",
        "the router's over",
        "collectives of the program",
    ]
    return table(head, rows)


# --- joint.md: a linear layer of examples/gpt.py


def joint() -> Blocks:
    """The lines of one column-parallel layer, forward and backward, and what sections of the spec change in them."""
    forward, _, backward = _joint().partition("def stage0_backward(")
    weight, host = "blocks_0_mlp_up_weight", "checkpoint=[{match: blocks.*, save: [linear], offload: cpu}]"
    stored = _joint("data.zero=3", "data.bucket_mb=0.1")
    (bucket,) = re.findall(rf"= ops.gather_start\(\({weight},\), '(bucket\d+)'", stored)
    compiled = _joint("execution.compile=layers")
    (fused,) = re.findall(r"blocks_0_mlp_up_bias_grad = .* \| (fused \d+)", compiled)
    pair = _joint("batch.microbatches=2", "execution.overlap=microbatches").partition("def pair_0_0(")[2]
    beside = re.search(r"linear_3_sum_start = ops.start.*?linear_3_sum = ops.wait[^\n]*", pair, re.DOTALL)
    assert beside is not None
    blocks = {
        "forward": _of_layer(forward),
        "backward": _of_layer(backward),
        "zero": _with(stored, rf"\b{bucket}(_|\b)|= .*{weight}_whole\b|{weight}_whole_grad ="),
        "recompute": _with(
            _joint("checkpoint=[{match: blocks.*, save: [linear]}]"), r"^(gelu|linear_2|linear_2_grad) ="
        ),
        "host": _with(_joint(host), r"linear_2(_\w+)? = ops|^gelu ="),
        "overlap": _with(beside[0], r"ops\.(\w*start|wait)\(|aten\.mm\b"),
        "fused": _with(compiled, rf"\| {fused}$"),
    }
    return {name: lines_of(text) for name, text in blocks.items()}


def _joint(*settings: str) -> str:
    import shardc

    with inside(ROOT):
        gpt = module("gpt")
        return shardc.compile(gpt.model(), gpt.batch(), "specs/gpt.yaml", overrides=settings, prove=False).joint()


def _with(text: str, pattern: str) -> str:
    """The lines with a pattern, without `del` and comments."""
    lines = (line for line in map(str.strip, text.splitlines()) if not line.startswith(("del ", "# ", "return ")))
    return "\n".join(line for line in lines if re.search(pattern, line))


def _of_layer(text: str) -> str:
    """Those of the layer, without `del`. Which line of the model they belong to is said once."""
    kept, ours = [], False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("# "):
            ours = "blocks.0.mlp.up (" in line
            if ours and not any(k.startswith("# ") for k in kept):
                kept.append(line)
        elif (ours and not line.startswith("del ")) or line.startswith("ops.launch("):
            kept.append(line)
    return "\n".join(kept)


# --- spec.md, from the schema that checks specs


def spec() -> Blocks:
    from docs.from_code import paragraph
    from shardc.spec import Spec

    schema = Spec.json_schema()
    defs, parts, alone = schema["$defs"], [], {}
    head = "| key | value | default | | e.g. |\n|---|---|---|---|---|\n"
    for key, each in schema["properties"].items():
        inner = _section(each, defs)
        if inner is None:
            alone[key] = each
            continue
        many = " (a list)" if "items" in each else ""
        about = paragraph(inner.get("description", ""), set())
        parts.append(f"## {key}{many}\n\n{about}\n\n{head}{''.join(_rows(inner, defs))}")
    parts.insert(0, f"## Keys without a section of their own\n\n{head}{''.join(_rows({'properties': alone}, defs))}")
    return {"sections": "\n".join(parts)}


def _kind(form: dict[str, Any]) -> str:
    """How a value is written."""
    if "enum" in form:
        return " \\| ".join(f"`{_word(x)}`" for x in form["enum"])
    if "anyOf" in form:
        kinds = list(dict.fromkeys(_kind(f) for f in form["anyOf"] if f.get("type") != "null"))
        return ", or ".join(
            kind.replace(kinds[0], "these") if i and "|" in kinds[0] else kind for i, kind in enumerate(kinds)
        )
    if "const" in form:
        return f"`{_word(form['const'])}`"
    if form.get("type") == "array":
        return f"list of {_kind(form['items'])}" if "items" in form else "list"
    return {"string": "text", "object": "mapping", "boolean": "`true` \\| `false`"}.get(
        form.get("type", ""), form.get("type", "")
    )


def _word(x: Any) -> str:
    return x if isinstance(x, str) else json.dumps(x)


def _rows(form: dict[str, Any], defs: dict[str, Any], under: str = "") -> Iterator[str]:
    for key, each in form["properties"].items():
        inner = _section(each, defs)
        if inner is not None:
            yield from _rows(inner, defs, f"{under}{key}.")
            continue
        default = f"`{_word(each['default'])}`" if "default" in each and each["default"] is not None else ""
        example = ", ".join(f"`{_word(x)}`" for x in each.get("examples", []))
        row = f"| `{under}{key}` | {_kind(each)} | {default} | {each.get('description', '')} |"
        yield f"{row} {example} |\n" if len(row) + len(example) < 195 else f"{row} |\n"


def _section(form: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any] | None:
    """What a key's value is made of, if that has keys of its own."""
    for each in (form.get("items", form), *form.get("anyOf", ())):
        if "$ref" in each:
            section: dict[str, Any] = defs[each["$ref"].rpartition("/")[2]]
            return section
    return None


# --- pictures


def pictures() -> dict[str, str]:
    """{file of docs/pictures: SVG}: the first layer of examples/gpt.py, split over tp, as the page draws it."""
    import shardc
    from docs.drawing import Drawing
    from shardc.report.page.data import data

    with inside(ROOT):
        gpt = module("gpt")
        spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
        program = shardc.compile(gpt.model(), gpt.batch(), spec, prove=False)
    layer = "graphPicture(units(D.after, moduleAt.get('blocks.0'), 'after', true), 'after')"
    title = f"blocks.0 on {program.mesh}: what a rank runs"
    return {"layer.svg": Drawing(data(program, program.cost(), None)).picture(layer, title)}


def field_bugs() -> Blocks:
    """Bugs of other frameworks, by chapter, and what happens here."""
    from tests.verify.field_bugs import BUGS, CHAPTERS

    chapters = []
    for title, bugs in CHAPTERS.items():
        rows = [[f"[{b.name}]", b.wrong, b.here, b.mutant] for b in bugs]
        chapters.append(f"## {title}\n\n" + table(["bug", "what went wrong", "here", "mutant"], rows))
    links = "\n".join(dict.fromkeys(f"[{b.name}]: {b.link}" for b in BUGS))
    refused = sum(b.here != "equal" for b in BUGS)
    threads, mutants = len({b.thread for b in BUGS}), sum(bool(b.mutant) for b in BUGS)
    said = f"{len(BUGS)} bugs of {threads} threads: {len(BUGS) - refused} equal to one device here, {refused} refused."
    return {"bugs": f"{said} {mutants} are a kind of mutant, too.\n\n" + "\n\n".join([*chapters, links])}


def reshard() -> Blocks:
    """What moves between two plans of README's model."""
    import shardc

    with tempfile.TemporaryDirectory() as folder, inside(Path(folder)):
        example(Path())
        names: dict[str, Any] = {}
        exec(Path("model.py").read_text(), names)
        given = names["model"](), names["batch"]()
    zero = shardc.compile(*given, {"shardc": 1, "mesh": {"dp": 8}, "data": {"zero": 3}})
    split = shardc.compile(*given, {"shardc": 1, "mesh": {"dp": 2, "tp": 4}, "shard": {"use": "structure"}})
    return {"moves": fenced(str(zero.reshard(split, moments=2)), "text")}


def from_code(page: str) -> Blocks:
    """The blocks of a page that docs/from_code.py makes."""
    from docs import from_code

    return getattr(from_code, page)()  # type: ignore[no-any-return]


#: page of docs/ -> what makes its blocks
PAGES: dict[str, Callable[[], Blocks]] = {
    "reference/python.md": lambda: from_code("python"),
    "reference/cli.md": lambda: from_code("cli"),
    "reference/errors.md": lambda: from_code("errors"),
    "explanation/architecture.md": architecture,
    "explanation/algebra.md": algebra,
    "how-to/experts.md": experts,
    "measured/field-bugs.md": field_bugs,
    "explanation/joint.md": joint,
    "explanation/proof.md": proof,
    "how-to/reshard.md": reshard,
    "reference/spec.md": spec,
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for docs.drawing and tests
    for name in sys.argv[1:] or PAGES:
        write(DOCS / name, PAGES[name]())
    if not sys.argv[1:]:
        for name, svg in pictures().items():
            (DOCS / "pictures" / name).write_text(svg)
