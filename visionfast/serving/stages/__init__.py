"""What the server runs: one module a role, each with the `TritonPythonModel` that its Python backend looks for.

A deployed `model.py` imports one of them: `fused`, or `preprocess`, `engine` and `postprocess`. Neither torch nor
anything that builds is imported here. One request's fault is that request's error, and one image's is that image's
entry: neither reaches its neighbours.
"""
