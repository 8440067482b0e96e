"""Runs a function in a child process that has the emulated device. Arguments and result are JSON.

    call("hotlap.emulation.step:measure", gpu="H100", …)

The child is `python -m hotlap.emulation`; it loads the device first and imports the function's module,
and with it torch, afterwards.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from hotlap.emulation.device import SOURCE, check_available, load_before_torch
from hotlap.errors import DeviceError, HotlapError

TIMEOUT_S = 1800.0


class EmulationError(Exception):
    """A function that raised in the child; the text is its traceback."""


def call(function: str, /, *, timeout_s: float = TIMEOUT_S, device: Path = SOURCE, **arguments: Any) -> Any:
    """The result of `function`, as in "package.module:name", called by name with `arguments`."""
    check_available()
    with tempfile.TemporaryDirectory() as directory:
        result_file = Path(directory) / "result.json"
        request_file = Path(directory) / "request.json"
        request_file.write_text(
            json.dumps({"function": function, "device": str(device), "arguments": arguments})
        )
        command = [sys.executable, "-m", "hotlap.emulation", str(request_file), str(result_file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise EmulationError(f"{function} took more than {timeout_s:.0f} s") from None
        if not result_file.exists():
            raise EmulationError(f"exit code {done.returncode}\n{done.stderr[-4000:]}")
        answer = json.loads(result_file.read_text())
    if "user_error" in answer:
        raise DeviceError(**answer["user_error"])
    if "traceback" in answer:
        raise EmulationError(answer["traceback"])
    return answer["result"]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in this process, which must not have imported torch yet."""
    try:
        load_before_torch(Path(request["device"]))
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        return {"result": function(**request["arguments"])}
    except HotlapError as error:
        return {"user_error": {"expected": error.expected, "found": error.found, "do": error.do}}
    except Exception:
        return {"traceback": traceback.format_exc()}
