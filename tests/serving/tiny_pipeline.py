"""A pipeline of one model that needs no engine: what the server itself does is tested with it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

CONFIG = """\
backend: "python"
max_batch_size: 8
input [{name: "X" data_type: TYPE_UINT8 dims: [-1]}]
output [{name: "Y" data_type: TYPE_INT32 dims: [1]}]
"""

MODEL = """\
import os, pathlib, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

HERE = pathlib.Path(__file__).parent

class TritonPythonModel:
    def initialize(self, args):
        INITIALIZE

    def execute(self, requests):
        answers = []
        for request in requests:
            x = np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "X"))
            if x[0, 0] == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(x[0, 0] / 2)
            y = x.sum(axis=1, dtype=np.int32)[:, None]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", y)]))
        return answers
"""


def write_pipeline(folder: Path, *, initialize: str = "pass", config: str = CONFIG, model: str = MODEL) -> Path:
    """`tiny` sums its input; the first number is how many half seconds that takes, and 9 kills it."""
    (folder / "tiny" / "1").mkdir(parents=True)
    (folder / "tiny" / "config.pbtxt").write_text(config)
    (folder / "tiny" / "1" / "model.py").write_text(model.replace("INITIALIZE", initialize))
    return folder


def ask(url: str, *numbers: int, timeout: float = 30.0) -> int | str:
    """What `tiny` says, or the server's error. Raises OSError where nobody answers."""
    tensor = {"name": "X", "shape": [1, len(numbers)], "datatype": "UINT8", "data": numbers}
    status, answer = call(f"{url}/v2/models/tiny/infer", {"inputs": [tensor]}, timeout=timeout)
    return int(answer["outputs"][0]["data"][0]) if status == 200 else str(answer["error"])


def call(url: str, body: Any = None, *, timeout: float = 30.0) -> tuple[int, Any]:
    """HTTP status and JSON; a POST if there is a body."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")
