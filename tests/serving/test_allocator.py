"""What the server and its stages are told to keep; and that a stage of the real server does keep it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import MODEL, ask, write_pipeline

from visionfast.serving import allocator
from visionfast.serving.server import Server


def test_who_sets_glibc_s_variables_has_the_word() -> None:
    variables = {"MALLOC_ARENA_MAX": "7", "HOME": "/h"}
    allocator.for_server(variables)
    assert variables["MALLOC_ARENA_MAX"] == "7"
    assert {name for name in variables if name.startswith("MALLOC_")} == {
        "MALLOC_ARENA_MAX",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
    }
    assert "ARENA_MAX" not in variables["VISIONFAST_STAGE_MALLOC"].split(",")


KEEPS = """
import ctypes, os, re, sys
from visionfast.serving import allocator
variables = dict(os.environ)
if sys.argv[1] == "stage":
    allocator.for_stage(variables)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
block = libc.malloc(4 << 20)
ctypes.memset(ctypes.c_void_p(block), 1, 4 << 20)
held = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
before = held()
libc.free(block)
print(before - held())
"""


@pytest.mark.parametrize(("who", "given_back_mib"), [("server", 4), ("stage", 0)])
def test_a_server_gives_an_image_s_memory_back_and_a_stage_keeps_it(who: str, given_back_mib: int) -> None:
    variables = {"PYTHONPATH": str(Path(allocator.__file__).parents[2])}
    allocator.for_server(variables)
    done = subprocess.run(
        [sys.executable, "-c", KEEPS, who], env=variables, capture_output=True, text=True, check=True, timeout=60
    )
    assert abs(int(done.stdout) - given_back_mib) <= 1


def test_a_stage_of_the_real_server_takes_its_own_values(tmp_path: Path) -> None:
    """It inherits the server's environment, and has imported what a deployed model imports."""
    probe = tmp_path / "probe.py"
    probe.write_text(KEEPS.replace("sys.argv[1]", "'server'").replace("print(", "print('given back', ", 1))
    asks = f"        answers = []\n        exec(open({str(probe)!r}).read(), {{}})\n"
    model = "import visionfast.serving.stages\n" + MODEL.replace("        answers = []\n", asks)
    log = tmp_path / "server.log"
    with Server(write_pipeline(tmp_path / "p", model=model), http=0, grpc=0, metrics=0, log=log) as server:
        ask(server.http_url, 0, 1)
    assert re.search(r"given back [-01]\b", log.read_text())
