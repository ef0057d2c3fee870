"""A headless Chromium, spoken to over a pipe in its DevTools protocol: no package is needed, and no port is open.

with Browser() as browser:
    browser.open(file, width=1280, height=800, dark=True)
    browser.run("document.title")              # a value of the page's JavaScript
    browser.key("/"); browser.type("o_proj")
    browser.picture(file)
    browser.problems                           # exceptions, console errors, refused and requested addresses
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

#: What distributions call it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str:
    """Where it is; "" if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), "")


class Browser:
    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()

        def join() -> None:  # Chromium reads commands on 3 and writes answers on 4
            spare = [os.dup(commands), os.dup(answers)]  # not 3 or 4 themselves, which are about to be replaced
            os.dup2(spare[0], 3)
            os.dup2(spare[1], 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--hide-scrollbars", "--disable-extensions", "--disable-background-networking", "--disable-sync"]
        self._process = subprocess.Popen(
            [chromium(), *flags, "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"],
            preexec_fn=join,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number = b"", 0
        self.problems: list[str] = []
        self._session = ""
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._do(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def open(self, file: Path, *, width: int = 1280, height: int = 800, dark: bool = False, hash_: str = "") -> None:
        """Load a page and wait until its scripts say that it is ready."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._do("Emulation.setEmulatedMedia", features=scheme)
        mobile = width < 600
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self._do("Page.navigate", url="about:blank")
        address = file.resolve().as_uri()
        self._do("Page.navigate", url=address + hash_)
        # a page that is left may still answer
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.documentElement?.dataset.ready")

    def wait(self, expression: str, seconds: float = 60) -> Any:
        """Until an expression is true: its value. Raises TimeoutError with what went wrong in the page."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := self.run(expression):
                return value
            time.sleep(0.05)
        raise TimeoutError(f"{expression} is never true: {self.problems}")

    def run(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON. Raises RuntimeError for an exception."""
        answer = self._do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def key(self, key: str) -> None:
        """Press a key, by its name in JavaScript: "a", "Enter", "ArrowDown"."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self._do("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._do("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        self._do("Input.insertText", text=text)

    def move(self, selector: str) -> None:
        """Put the pointer on the middle of an element."""
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, selector)

    def _mouse(self, kind: str, selector: str) -> None:
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'nearest', inline: 'nearest'}})")
        box = self.run(
            f"(() => {{ const r = {found}.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] }})()"
        )
        button = "none" if kind == "mouseMoved" else "left"
        self._do("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def picture(self, file: Path) -> None:
        """PNG, or WebP by the file's name."""
        form = {"format": "webp", "quality": 90} if file.suffix == ".webp" else {"format": "png"}
        file.write_bytes(base64.b64decode(self._do("Page.captureScreenshot", **form)["data"]))

    # --- the protocol

    def _do(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has ended")
            self._buffer += read
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"])[:1500])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(about["args"])[:500])
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("file:", "about:")):
            self.problems.append(f"requested {about['request']['url'][:200]}")
