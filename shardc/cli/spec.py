"""Define `shardc spec`: print the JSON Schema of specs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shardc.cli.common import console
from shardc.cli.options import option


def command(schema: Annotated[bool, option("the JSON Schema of specs, for editors")] = False) -> None:
    """Show the format of specs: --schema prints its JSON Schema."""
    from shardc.spec import Spec

    if not schema:
        console.print("shardc spec --schema prints the JSON Schema of specs; ready specs are in shardc.specs")
        raise typer.Exit(2)
    print(json.dumps(Spec.json_schema(), indent=1))
