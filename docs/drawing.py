"""Run the page's drawing code without a browser, in V8 (the package mini-racer), for pictures of docs and for tests.

page = Drawing(data(program, cost, proof))
page.markup("commPanel()")                        # an element, or several, as text
page.picture("timelinePicture(1100)", "a step")   # a complete SVG file
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

from shardc.report.page import DRAWING, read


class Drawing:
    """The scripts that draw, with the data of one page."""

    def __init__(self, shown: object, scripts: Iterable[str] = DRAWING) -> None:
        self._context = MiniRacer()
        self._context.eval("globalThis.structuredClone = (x) => x && JSON.parse(JSON.stringify(x))")  # a browser has it
        self._context.eval(f"const DATA = {json.dumps(json.dumps(shown))};")
        for script in (*map(read, scripts), Path(__file__).with_suffix(".js").read_text()):
            self._context.eval(script)

    def run(self, script: str) -> Any:
        """The value of an expression: a number, a text, or what JSON can hold."""
        caught = "catch (e) { return JSON.stringify({ error: e.stack }) }"
        answer = json.loads(
            str(self._context.eval(f"(() => {{ try {{ return JSON.stringify({{ is: {script} }}) }} {caught} }})()"))
        )
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("is")

    def markup(self, drawn: str) -> str:
        """What an expression draws, as text."""
        return str(self.run(f"[{drawn}].flat(Infinity).filter((node) => node).map(markup).join('')"))

    def picture(self, drawn: str, title: str) -> str:
        """An SVG file of what an expression draws. Its colours are those of the page, for both themes."""
        style = json.dumps(read("colours.css") + read("picture.css"))
        return str(self.run(f"standalone({drawn}, {json.dumps(title)}, {style})"))
