"""What a server is started with, and what its log says: all that needs none to run."""

from __future__ import annotations

import fcntl
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import CONFIG, write_pipeline

from visionfast.cli_client import client_verb
from visionfast.cli_deploy import deploy_verb, rollback_verb
from visionfast.cli_serve import serve_verb
from visionfast.errors import ArtifactError, BackendUnavailableError, OptionError, ServerError
from visionfast.serving.pipelines import model_folders, wants_cache
from visionfast.serving.ports import free_endpoints
from visionfast.serving.processes import how_ended
from visionfast.serving.run_folder import RunFolder, remove_leftovers
from visionfast.serving.server import Server
from visionfast.serving.server_log import ServerLog, reason
from visionfast.serving.tritonserver import Endpoints, Installation, command, environment, find_installation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")

_FREE = {"http": 0, "grpc": 0, "metrics": 0}


# ---- which server, and how it is called -------------------------------------------------------------------


def test_no_server_on_this_machine(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITONSERVER", str(tmp_path / "none"))
    with pytest.raises(BackendUnavailableError, match=r"TRITONSERVER=.*none: expected the path of a tritonserver"):
        Server(tiny, **_FREE).__enter__()
    monkeypatch.delenv("TRITONSERVER")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="pip install --no-deps nvidia-pytriton"):
        Server(tiny, **_FREE).__enter__()
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    assert find_installation().binary == binary


def test_a_python_that_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin" / "tritonserver"
    for stub in ("3.8", "3.10"):
        (tmp_path / "python_backend_stubs" / stub).mkdir(parents=True)
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("TRITONSERVER", str(binary))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    with pytest.raises(BackendUnavailableError, match=r"serves Python 3\.8, 3\.10, this is 3\.99"):
        find_installation()


def _command(address: str, **options: object) -> list[str]:
    given = {"cache_bytes": 0, "exit_timeout_s": 30, "shared_memory": False, "parent_pid": None} | options
    return list(
        command(
            Installation(Path("/t/bin/tritonserver"), {"stub": Path("/t/stub")}, Path("/t/caches")),
            Endpoints(address, 1, 2, 3),
            models=Path("/m"),
            backends=Path("/b"),
            shm_prefix="ours-",
            **given,  # type: ignore[arg-type]
        )
    )


def test_shared_memory_is_off_unless_asked_for_and_what_is_off_has_no_key() -> None:
    for shared_memory, closed in ((False, "trace,logging,shared-memory"), (True, "trace,logging")):
        told = _command("127.0.0.1", shared_memory=shared_memory)
        restricted = [argument for argument in told if "restricted" in argument]
        # Everybody may read a command line: so the key and its value are such that no header can be.
        assert restricted == [
            f"--http-restricted-api={closed}:no one\n=nothing\n",
            f"--grpc-restricted-protocol={closed}:no one\n=nothing\n",
        ]


def test_the_cache_is_asked_for_by_its_size() -> None:
    assert not any("cache" in argument for argument in _command("127.0.0.1"))
    assert {"--cache-config=local,size=512", "--cache-directory=/t/caches"} <= set(
        _command("127.0.0.1", cache_bytes=512)
    )


def test_no_request_is_kept_for_the_next_one() -> None:
    """It would keep room for the largest image that it ever carried."""
    assert "--grpc-infer-allocation-pool-size=0" in _command("127.0.0.1")


def test_the_stages_run_this_python_with_these_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib64")
    monkeypatch.setenv("VISIONFAST_HOME", "relative")
    variables = environment(tmp_path)
    root = str(Path(inspect.getfile(Server)).parents[2])
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == root
    assert variables["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"
    assert variables["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert variables["LD_LIBRARY_PATH"] == "/lib64"
    assert variables["VISIONFAST_HOME"] == str(Path("relative").resolve())
    (tmp_path / "lib").mkdir()
    assert environment(tmp_path)["LD_LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/lib64"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("response_cache {\n  enable: true\n}", True),
        ("response_cache { enable: true }", True),
        ("response_cache {\n}", False),
        ("response_cache {\n  enable: false\n}", False),
        ("", False),
    ],
)
def test_who_wants_a_cache(tmp_path: Path, text: str, wanted: bool) -> None:
    folder = write_pipeline(tmp_path, config=f"{CONFIG}{text}\n") / "tiny"
    assert wants_cache(folder) is wanted


# ---- ports ------------------------------------------------------------------------------------------------


def test_free_ports_differ_and_a_named_one_is_kept() -> None:
    first = free_endpoints("localhost", 0, 0, 0)
    assert first.address == "127.0.0.1"
    assert len({first.http, first.grpc, first.metrics}) == 3
    again = free_endpoints("localhost", 0, first.grpc, 0)
    assert again.grpc == first.grpc
    assert len({again.http, again.grpc, again.metrics}) == 3


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"http": 8000, "grpc": 8000}, OptionError, "--http 8000 --grpc 8000 --metrics 0: expected different ports"),
        ({"metrics": 65536}, OptionError, "--metrics 65536: expected a port"),
        ({"http": -1}, OptionError, "--http -1: expected a port"),
        ({"address": "192.0.2.1"}, OptionError, "192.0.2.1: expected an address of this machine"),
        ({"address": "::1"}, OptionError, "--address ::1: expected an IPv4 address"),
        ({"address": "no such"}, OptionError, "--address no such: expected an IPv4 address"),
        ({"cache_bytes": -1}, OptionError, "cache_bytes -1"),
        ({"exit_timeout_s": -1}, OptionError, "expected a time"),
        ({"log": "/"}, ServerError, "/: the log cannot be written"),
        ({"log_bytes": -1}, OptionError, "log_bytes -1: expected the size of the log"),
    ],
)
def test_options_that_cannot_be(
    tiny: Path, options: dict[str, object], error: type[Exception], said: str, temporary: Path
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        Server(tiny, **{**_FREE, **options}).__enter__()  # type: ignore[arg-type]
    assert not list(temporary.iterdir())


# ---- what is left -----------------------------------------------------------------------------------------


def test_a_folder_is_a_leftover_when_no_process_has_it(temporary: Path) -> None:
    folder = RunFolder()
    region = Path("/dev/shm") / f"{folder.shm_prefix}region"
    region.touch()
    other = Path("/dev/shm") / f"{folder.path.name}another-region"
    other.touch()
    try:
        with subprocess.Popen(["sleep", "60"], pass_fds=[folder.lock]) as heir:
            assert remove_leftovers() == []
            os.close(folder.lock)
            assert remove_leftovers() == []
            assert region.exists()
            heir.kill()
        assert remove_leftovers() == [folder.path]
        assert not region.exists()
        assert other.exists()
    finally:
        region.unlink(missing_ok=True)
        other.unlink()


def test_a_folder_that_is_still_had_is_not_removed(temporary: Path) -> None:
    folder = RunFolder()
    inherited = os.dup(folder.lock)
    assert not folder.remove(within_s=0.1)
    assert folder.path.is_dir()
    fcntl.flock(inherited, fcntl.LOCK_UN)
    os.close(inherited)
    assert remove_leftovers() == [folder.path]


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match="cannot be written"):
        RunFolder()


def test_how_a_child_ended() -> None:
    for script, how in (("exit 3", "exited with code 3"), ("kill -11 $$", "was killed by SIGSEGV")):
        with subprocess.Popen(["sh", "-c", script]) as child:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert [how_ended(child.pid), how_ended(child.pid)] == [how, how]
            child.wait()
            assert how_ended(child.pid) == "is gone"


# ---- the log ----------------------------------------------------------------------------------------------


def test_a_log_that_is_too_long_begins_anew_with_the_part_before_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text("of an earlier start\n")
    log = ServerLog(path, "tiny", most_bytes=1000)
    descriptor = log.open()
    os.write(descriptor, b"first\n" * 100)
    log.shorten()
    assert log.written() == "first\n" * 100  # not yet
    for line in (b"second\n", b"third\n"):
        os.write(descriptor, line * 200)
        log.shorten()
        assert path.read_bytes() == b""
    assert (tmp_path / "serve.log.1").read_bytes() == b"third\n" * 200  # one old part, and no other
    os.write(descriptor, b"last\n")  # what has it open goes on at the beginning
    assert path.read_bytes() == b"last\n"
    assert log.written() == "last\n"
    os.close(descriptor)
    log.close()
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "serve.log.1"]


def test_a_temporary_log_goes_unless_something_failed(temporary: Path) -> None:
    for fails in (False, True):
        log = ServerLog(None, "tiny", most_bytes=1)
        descriptor = log.open()
        os.write(descriptor, b"words")
        log.shorten()
        os.write(descriptor, b"more")
        os.close(descriptor)
        assert log.written() == "more"
        assert len(list(temporary.glob("visionfast-serve-tiny-*"))) == 2
        if fails:
            log.keep()
        log.close()
        assert len(list(temporary.iterdir())) == (2 if fails else 0)


def test_a_log_whose_old_part_cannot_be_written_is_cut_all_the_same(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "serve.log", "tiny", most_bytes=1)
    (tmp_path / "serve.log.1").mkdir()
    descriptor = log.open()
    os.write(descriptor, b"words")
    log.shorten()
    assert (tmp_path / "serve.log").read_bytes() == b""
    os.close(descriptor)


@pytest.mark.parametrize("most_bytes", [0, 1])
def test_a_log_that_is_no_file_or_has_no_limit_stays(tmp_path: Path, most_bytes: int) -> None:
    path = Path("/dev/null") if most_bytes else tmp_path / "serve.log"
    log = ServerLog(path, "tiny", most_bytes)
    descriptor = log.open()
    os.write(descriptor, b"words")
    log.shorten()
    assert log.written() == ("" if most_bytes else "words")
    os.close(descriptor)


# ---- what the log says ------------------------------------------------------------------------------------

_STUB = "E1130 15:08:30.471775 25754 backend_model.cc:692] \"ERROR: Failed to create instance: Stub process 'a_0' …\""


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], None),
        (["I1130 15:08:30.474262 25754 server.cc:305] \"Waiting for in-flight requests to complete.\""], None),
        (
            [
                _STUB,
                "E1130 15:08:30.472606 25754 model_lifecycle.cc:642] \"failed to load 'a' version 2: Internal: "
                'ValueError: \\"x\\"\\n y\\n\\nAt:\\n  /m/a/2/model.py(5): initialize\\n"',
                "E1130 15:08:30.482606 25754 model_lifecycle.cc:642] \"failed to load 'b' version 1: Internal: no a\"",
                "error: creating server: Internal - failed to load all models",
            ],
            'model a, version 2: ValueError: "x" y',
        ),
        (
            [
                "E1130 15:08:31.605312 26258 model_repository_manager.cc:724] \"failed to load model 'a': at least one "
                "version must be available under the version policy of model 'a'\""
            ],
            "failed to load model 'a': at least one version must be available under the version policy of model 'a'",
        ),
        (
            [
                "/b/python/triton_python_backend_stub: error while loading shared libraries: libpython3.12.so.1.0: "
                "cannot open shared object file: No such file or directory",
                _STUB,
            ],
            "the library libpython3.12.so.1.0 is not on this machine; on Debian and Ubuntu `apt install libpython3.12` "
            "brings it",
        ),
        (["failed to start HTTP service: Unavailable - Socket '127.0.0.1:8000' already in use "],
         "127.0.0.1:8000 is in use by another program"),
        (["tritonserver: unrecognized option '--nosuch=1'", "Usage: tritonserver [options]"],
         "tritonserver: unrecognized option '--nosuch=1'"),
        (["error: creating server: Internal - failed to load all models"],
         "creating server: Internal - failed to load all models"),
    ],
)  # fmt: skip
def test_the_reason(lines: list[str], said: str | None) -> None:
    assert reason("\n".join(lines)) == said


# ---- what is served ---------------------------------------------------------------------------------------


def test_pipelines_by_name_and_several(engine_home: Path, tmp_path: Path) -> None:
    write_pipeline(engine_home / "pipelines" / "one")
    other = write_pipeline(tmp_path / "other")
    (other / "tiny").rename(other / "more")
    write_pipeline(engine_home / "pipelines" / "one" / ".half")
    (other / ".more.old").mkdir()
    (other / ".more.old" / "config.pbtxt").touch()
    (other / "notes").mkdir()
    assert Server(["one", other]).models == ("more", "tiny")


def test_pipelines_that_are_none(engine_home: Path, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none: expected a pipeline.*pipelines here: none yet.*visionfast deploy"):
        Server("none")
    write_pipeline(engine_home / "pipelines" / "one")
    with pytest.raises(ArtifactError, match=r"pipelines here: one\)"):
        Server("none")
    with pytest.raises(ArtifactError, match="got one of its models; name the folder above"):
        Server(tiny / "tiny")
    with pytest.raises(OptionError, match="model tiny: expected one of that name"):
        Server([tiny, "one"])
    with pytest.raises(OptionError, match="expected at least one"):
        Server([])


def test_the_steps_of_an_ensemble_alone_are_no_pipeline(tmp_path: Path) -> None:
    place = tmp_path / "photos"
    for model in ("photos", "photos_engine"):
        (place / model / "1").mkdir(parents=True)
        (place / model / "config.pbtxt").write_text("")
    assert list(model_folders([place])) == ["photos", "photos_engine"]
    (place / "photos" / "config.pbtxt").unlink()
    with pytest.raises(ArtifactError, match=r"photos/photos: damaged: expected a config\.pbtxt in it; deploy"):
        model_folders([place])


def test_every_option_of_serve_that_the_page_names_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text("utf-8")
    (table,) = re.findall(r"\n\| `serve` \|.*?\n\n", page, re.DOTALL)
    named = {option for row in table.splitlines() for option in re.findall(r"--[a-z-]+[a-z]", row.rsplit("|", 2)[0])}
    declared = _options(serve_verb) - {"--pipelines"}
    assert named == declared
    of_others = _options(deploy_verb) | _options(rollback_verb) | _options(client_verb) | {"--model", "--no-deps"}
    assert set(re.findall(r"--[a-z]+[a-z-]*[a-z]", page)) <= declared | of_others | {"--help", "--shm-size"}  # Docker's


def _options(verb: Callable[..., None]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in inspect.signature(verb).parameters}
