"""What the server's Python backend runs: a repository's `model.py` imports its class from here.

Nothing here is imported outside the server, which brings `triton_python_backend_utils`.
"""
