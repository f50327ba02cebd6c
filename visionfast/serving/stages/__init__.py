"""What the server runs: one module a role, each with the `TritonPythonModel` that its Python backend looks for.

A deployed `model.py` imports one of them: `fused` for a detector, `embed` or `prompt` for another task's whole pipeline
in one process; `preprocess`, `engine` or `postprocess` for one step of an ensemble. On a CPU neither torch nor anything
that builds is imported. One request's fault is that request's error, and one image's is that image's entry: neither
reaches its neighbours.
"""

from visionfast.serving import allocator

allocator.for_stage()  # before the first image: a stage's process is told what to keep by nobody else
