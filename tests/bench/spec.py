"""Write docs/spec.md: every key of a spec, from the schema that checks it (`shardc spec --schema`). `make table` runs
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardc.spec import Spec

OUT = Path(__file__).resolve().parents[2] / "docs" / "spec.md"
TEXT = """\
# The spec, key by key

Made by `make table` from the schema that checks specs; `shardc spec --schema > spec.schema.json` prints it, for your editor:

    # yaml-language-server: $schema=spec.schema.json

One YAML file, each section of which may be left out. A whole one:

```yaml
shardc: 1
mesh: {{pp: 2, dp: 2, tp: 2}}                 # axis: size, outermost first; one size may be -1: what the world leaves
batch: {{microbatches: 8}}
shard:                                      # the first match wins; a pattern that matches nothing is an error
  "model.embed_tokens": vocab               # rows split over tp; lookups outside a rank's rows are masked and summed
  "*.{{q,k,v}}_proj": column                  # out-features split
  "*.o_proj": row                           # in-features split: the output is a partial sum
  "*.{{gate,up}}_proj": column
  "*.down_proj": row
  "*.qkv.weight": {{0: {{axis: tp, split: 3}}}}                    # parameter: {{dim: axis}}; a fused weight, each third split
  "*.qkv_proj.weight": {{0: {{axis: tp, sections: [512, 128, 128]}}}}     # fused parts of unequal size
  lm_head: column
activations: {{"model.layers.*": {{1: tp}}}}    # sequence parallel: a module's output ("name") or input ("name:in"): {{dim: axis}}
pipeline: {{axis: pp, stages: 4, schedule: 1f1b}}
data: {{axis: dp, zero: 2}}
checkpoint: [{{match: "model.layers.*", save: [linear, attention]}}]
precision: {{compute: bfloat16}}
```

- **Patterns** name the model's own modules and parameters: `*` matches any characters, dots too; `{{a,b}}` alternatives.
  A tied weight answers to all of its names.
- **An axis of size 1** changes nothing: the same spec runs on one device. One of more ranks that splits nothing is noted.
- **On the command line** `--mesh dp=4,tp=1` and `--set data.zero=3` override, with the same checks.
- **Not built yet**: `sequence`, which is checked, then refused.
- **In Python** a spec is a path, or a mapping of the same form.

{sections}"""


def kind(form: dict[str, Any]) -> str:
    """How a value is written."""
    if "enum" in form:
        return " \\| ".join(f"`{_word(x)}`" for x in form["enum"])
    if "anyOf" in form:
        return ", or ".join(dict.fromkeys(kind(f) for f in form["anyOf"] if f.get("type") != "null"))
    if "const" in form:
        return f"`{_word(form['const'])}`"
    if form.get("type") == "array":
        return f"list of {kind(form['items'])}" if "items" in form else "list"
    return {"string": "text", "object": "mapping", "boolean": "`true` \\| `false`"}.get(
        form.get("type", ""), form.get("type", "")
    )


def _word(x: Any) -> str:
    return x if isinstance(x, str) else json.dumps(x)


def rows(form: dict[str, Any], defs: dict[str, Any], under: str = "") -> Iterator[str]:
    for key, each in form["properties"].items():
        inner = section(each, defs)
        if inner is not None:
            yield from rows(inner, defs, f"{under}{key}.")
            continue
        default = f"`{_word(each['default'])}`" if "default" in each and each["default"] is not None else ""
        example = ", ".join(f"`{_word(x)}`" for x in each.get("examples", []))
        yield f"| `{under}{key}` | {kind(each)} | {default} | {each.get('description', '')} | {example} |\n"


def section(form: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any] | None:
    """What a key's value is made of, if that has keys of its own."""
    for each in (form.get("items", form), *form.get("anyOf", ())):
        if "$ref" in each:
            found: dict[str, Any] = defs[each["$ref"].rpartition("/")[2]]
            return found
    return None


def page() -> str:
    schema = Spec.json_schema()
    defs, parts, alone = schema["$defs"], [], {}
    head = "| key | value | default | | e.g. |\n|---|---|---|---|---|\n"
    for key, each in schema["properties"].items():
        inner = section(each, defs)
        if inner is None:
            alone[key] = each
            continue
        many = " (a list)" if "items" in each else ""
        about = " ".join(inner.get("description", "").split())
        parts.append(f"## {key}{many}\n\n{about}\n\n{head}{''.join(rows(inner, defs))}")
    parts.insert(0, f"## Keys without sections of their own\n\n{head}{''.join(rows({'properties': alone}, defs))}")
    return TEXT.format(sections="\n".join(parts))


if __name__ == "__main__":
    OUT.write_text(page())
