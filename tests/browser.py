"""A headless Chromium, driven by the protocol that all browsers' drivers speak."""

import base64
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


class Browser:
    """A window of the given size, closed at the end of a ``with`` statement."""

    def __init__(self, log: Path, size: tuple[int, int] = (1400, 800)) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log = log.open("wb")
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=self._log, stderr=subprocess.STDOUT
        )
        self._url = f"http://127.0.0.1:{port}"
        try:
            while not self._is_ready():
                assert self._driver.poll() is None, log.read_text()
                time.sleep(0.1)
            options = {"args": [*_OPTIONS, f"--window-size={size[0]},{size[1]}"]}
            session = self._post(
                "/session", capabilities={"alwaysMatch": {"goog:chromeOptions": options}}
            )
        except BaseException:
            self._end_driver()
            raise
        self._url += f"/session/{session['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._request("", method="DELETE")
        finally:
            self._end_driver()

    def _end_driver(self) -> None:
        self._driver.terminate()
        self._driver.wait()
        self._log.close()

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str, *arguments: object) -> object:
        """Run JavaScript in the page; a promise that it returns is waited for."""
        return self._post("/execute/sync", script=script, args=list(arguments))

    @property
    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._request("/screenshot")))

    def _is_ready(self) -> bool:
        try:
            return bool(self._request("/status")["ready"])
        except urllib.error.URLError:
            return False

    def _post(self, path: str, **content: object):
        return self._request(path, json.dumps(content).encode())

    def _request(self, path: str, content: bytes | None = None, method: str | None = None):
        request = urllib.request.Request(
            self._url + path, content, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
