"""The server that people write first: FastAPI and uvicorn round eager PyTorch and PIL (`bench.baseline`), one process.

`benchmarks/serving.py` starts it:

    NAIVE_WEIGHTS=yolov8n.pt python -m uvicorn --app-dir benchmarks naive_server:app
"""

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

from visionfast.bench.baseline import NaivePyTorch

app = FastAPI()
detect = NaivePyTorch(Path(os.environ["NAIVE_WEIGHTS"]))


@app.get("/health")
def health() -> str:
    return "ready"


@app.post("/detect")
async def answer(request: Request) -> dict[str, Any]:
    """An encoded image → its boxes, original pixels."""
    found = await run_in_threadpool(detect, await request.body())
    return {
        "xyxy": found.xyxy.tolist(),
        "confidence": found.confidence.tolist(),
        "class_id": found.class_id.tolist(),
    }
