"""A server's life, on the real one: ready, watched, brought back, ended, and nothing of it left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving_process import Serving
from serving_process import lives as _lives
from tiny_pipeline import CONFIG, ask, call, write_pipeline

from visionfast.errors import BackendUnavailableError, ServerError
from visionfast.serving.processes import stages_of
from visionfast.serving.run_folder import remove_leftovers
from visionfast.serving.server import Server
from visionfast.serving.tritonserver import find_installation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")

_FREE = {"http": 0, "grpc": 0, "metrics": 0}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    try:
        find_installation()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for the tests that change nothing about it, with a response cache."""
    config = CONFIG + "response_cache { enable: true }\n"
    with Server(write_pipeline(tmp_path_factory.mktemp("tiny"), config=config), **_FREE) as server:
        yield server


@pytest.fixture
def serve(temporary: Path, tiny: Path) -> Iterator[Callable[..., Serving]]:
    """Starts `visionfast serve` over the tiny pipeline, as a shell would."""
    begun: list[Serving] = []

    def begin(*options: str) -> Serving:
        begun.append(Serving(tiny, *options))
        return begun[-1]

    yield begin
    for serving in begun:
        serving.end()


def _wait_until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends, "it has not come to that"
        time.sleep(0.02)


def _shared_memory(folder: Path) -> list[str]:
    """Of the servers whose temporary folder that is or was."""
    return [path.name for path in Path("/dev/shm").glob(f"{folder.name}-*")]


def _run_folders(temporary: Path) -> list[Path]:
    return [path for path in temporary.glob("visionfast-serve-*") if path.is_dir()]


# ---- a server that runs -----------------------------------------------------------------------------------


def test_it_answers_and_says_where(running: Server) -> None:
    assert running.models == ("tiny",)
    assert [stage.name for stage in running.stages] == ["tiny_0"]
    assert ask(running.http_url, 0, 2, 3) == 5
    with socket.create_connection(("127.0.0.1", int(running.grpc_url.rpartition(":")[2])), timeout=5):
        pass


def test_it_listens_on_loopback_only(running: Server) -> None:
    ports = [int(re.findall(r":(\d+)", url)[0]) for url in (running.http_url, running.grpc_url, running.metrics_url)]
    lines = [line for of in ("tcp", "tcp6") for line in Path(f"/proc/net/{of}").read_text().splitlines()[1:]]
    listening = [at.split(":") for _, at, _, state, *_ in map(str.split, lines) if state == "0A"]
    addresses = {port: [address[-8:] for address, told in listening if int(told, 16) == port] for port in ports}
    assert addresses == {port: ["0100007F"] for port in ports}  # 127.0.0.1, in IPv6's form too


def test_a_cached_answer_needs_no_stage(running: Server) -> None:
    assert [ask(running.http_url, 0, 7), ask(running.http_url, 0, 7)] == [7, 7]
    _, statistics = call(f"{running.http_url}/v2/models/tiny/stats")
    assert statistics["model_stats"][0]["inference_stats"]["cache_hit"]["count"] >= 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # A model's code may be in such a request.
        ("v2/repository/models/tiny/load", {"parameters": {"config": "{}", "file:1/model.py": "cGFzcw=="}}),
        ("v2/repository/models/tiny/unload", {}),
        ("v2/trace/setting", {"trace_file": "written"}),
        ("v2/logging", {"log_file": "written"}),
    ],
)
def test_a_client_cannot_change_what_is_served(running: Server, path: str, body: dict[str, object]) -> None:
    status, answer = call(f"{running.http_url}/{path}", body)
    assert status >= 400
    assert "error" in answer
    assert ask(running.http_url, 0, 4) == 4


def test_what_is_off_has_no_key_that_a_header_could_bring(running: Server) -> None:
    """Though everybody on the machine can read the server's command line."""
    told = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
    (key,) = [argument.split(b":", 1)[1] for argument in told if b"http-restricted-api" in argument]
    name, _, value = key.partition(b"=")
    for header in (
        name + b": " + value,
        name.strip() + b": " + value.strip(),
        name.strip() + b":" + value.strip() + b"\r\n ",
        name.strip() + b"\r\n : " + value.strip() + b"\r\n ",
        name.strip() + b"%0a: " + value.strip() + b"%0a",
    ):
        for path in (b"/v2/logging", b"/v2/trace/setting", b"/v2/systemsharedmemory/status"):
            with _connection(running) as connection:
                connection.sendall(
                    b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n" + header + b"\r\nConnection: close\r\n\r\n"
                )
                answer = connection.recv(4096)
            assert not answer or b" 403 " in answer.splitlines()[0], (header, answer)
    assert ask(running.http_url, 0, 4) == 4


def test_a_port_in_use_is_told_before_the_server_starts(running: Server, tiny: Path) -> None:
    # gRPC's too, which the server would share without a word.
    port = int(running.grpc_url.rpartition(":")[2])
    with pytest.raises(ServerError, match=rf"--grpc {port}: another program has this port on 127\.0\.0\.1"):
        Server(tiny, http=0, grpc=port, metrics=0).__enter__()


# ---- ended in order ---------------------------------------------------------------------------------------


def test_the_end_finishes_what_is_in_flight_and_leaves_nothing(tiny: Path, temporary: Path, tmp_path: Path) -> None:
    server = Server(tiny, **_FREE, log=tmp_path / "serve.log")
    with ThreadPoolExecutor(3) as pool, server:
        where = server.http_url
        (folder,) = _run_folders(temporary)
        pids = [server.pid, *(stage.pid for stage in server.stages)]
        assert all(_lives(pid) for pid in pids if pid is not None)
        assert _shared_memory(folder)
        answers = [pool.submit(ask, where, 1, n) for n in range(3)]
        time.sleep(0.3)  # they are on their way
    assert sorted(answer.result() for answer in answers) == [1, 2, 3]
    assert not any(_lives(pid) for pid in pids if pid is not None)
    assert not _shared_memory(folder)
    assert not list(temporary.iterdir())
    with server:  # at once, on the same ports
        assert server.http_url == where
        assert ask(where, 0, 2) == 2
    assert (tmp_path / "serve.log").read_text().count("Started HTTPService") == 2  # named by the user, so kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serve_in_order(serve: Callable[..., Serving], temporary: Path, number: signal.Signals) -> None:
    serving = serve()
    (folder,) = _run_folders(temporary)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, serving.url, 2, 1)
        time.sleep(0.3)  # it is on its way
        serving.process.send_signal(number)
        assert answer.result() == 3
    assert serving.finish() == (0, ["visionfast: stopped"])
    assert not _lives(serving.pid)
    assert not _shared_memory(folder)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("asked", [0, 1, 5])
def test_the_end_does_not_wait_for_connections_that_are_merely_open(tiny: Path, asked: int) -> None:
    """Triton does, for its whole exit timeout; here a minute."""
    with Server(tiny, **_FREE, exit_timeout_s=60) as server, _connection(server) as connection:
        for _ in range(asked):
            assert _asked(connection, 0) == 7
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server.http_url, 2, 3)  # on one of its own
            time.sleep(0.5)
            began = time.monotonic()
            server.__exit__(None, None, None)
            assert time.monotonic() - began < 20
            assert answer.result() == 5


@pytest.mark.parametrize("before", [0, 5])
def test_a_connection_with_a_request_in_flight_is_not_cut(tiny: Path, before: int) -> None:
    """Also not where the request came at once behind an answer; or in pieces."""
    with Server(tiny, **_FREE, exit_timeout_s=60) as server, _connection(server) as hot, _connection(server) as slow:
        for _ in range(before):
            assert _asked(hot, 0) == 7
        slow.sendall(_request(2)[:-5])
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(_asked, hot, 4), pool.submit(_answer, slow)]
            time.sleep(0.5)
            ending = pool.submit(server.__exit__, None, None, None)
            time.sleep(1.0)
            slow.sendall(_request(2)[-5:])
            assert [answer.result() for answer in answers] == [11, 9]
            ending.result()


def _connection(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.http_url.rpartition(":")[2])), timeout=30)


def _request(half_seconds: int) -> bytes:
    tensor = {"name": "X", "shape": [1, 2], "datatype": "UINT8", "data": [half_seconds, 7]}
    body = json.dumps({"inputs": [tensor]}).encode()
    return b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _asked(connection: socket.socket, half_seconds: int) -> int:
    connection.sendall(_request(half_seconds))
    return _answer(connection)


def _answer(connection: socket.socket) -> int:
    told = b""
    while b'"data":[' not in told or not told.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, f"closed after {told!r}"
        told += piece
    return int(re.findall(rb'"data":\[(\d+)\]', told)[0])


def test_serve_shortens_its_log(serve: Callable[..., Serving], tmp_path: Path) -> None:
    """The server goes on writing into it."""
    log = tmp_path / "serve.log"
    serving = serve("--log", str(log), "--log-mb", "1")
    with log.open("ab") as file:
        file.write(b"words of a stage\n" * 100_000)
    _wait_until(lambda: log.stat().st_size < 1000)
    assert log.with_name("serve.log.1").stat().st_size > 1_700_000
    serving.process.send_signal(signal.SIGTERM)
    assert serving.finish() == (0, ["visionfast: stopped"])
    assert log.read_bytes().startswith(b"Signal (15) received.")


def test_a_second_signal_does_not_wait(serve: Callable[..., Serving], temporary: Path) -> None:
    serving = serve()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, serving.url, 200, 1, timeout=90.0)
        time.sleep(0.3)
        serving.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert serving.process.poll() is None  # it waits for the request
        serving.process.send_signal(signal.SIGINT)
        with pytest.raises((ConnectionError, urllib.error.URLError)):
            answer.result()
    assert serving.finish()[0] == 0
    assert not list(temporary.iterdir())


# ---- what dies --------------------------------------------------------------------------------------------


def test_a_stage_that_dies_is_brought_back(serve: Callable[..., Serving], temporary: Path) -> None:
    serving = serve()
    (stage,) = stages_of(serving.pid)
    # By a request, which is answered all the same. Triton itself sees nothing, now or later.
    assert "Stub process 'tiny_0' is not healthy" in str(ask(serving.url, 9))
    (heard,) = serving.hear("stage tiny_0 was killed by SIGKILL")
    serving.hear("tiny: ready again")
    assert ask(serving.url, 0, 5) == 5
    assert not _lives(serving.pid)
    assert not _lives(stage.pid)
    assert len(_run_folders(temporary)) == 1
    assert Path(heard.split("(log: ")[1].split(")")[0]).is_file()


def test_a_server_that_dies_is_brought_back_and_twice_in_a_row_only(
    serve: Callable[..., Serving], tiny: Path, temporary: Path
) -> None:
    serving = serve()
    (stage,) = stages_of(serving.pid)
    os.kill(serving.pid, signal.SIGKILL)
    serving.hear("the server was killed by SIGKILL")
    serving.hear("ready again")
    assert ask(serving.url, 0, 5) == 5
    assert not _lives(stage.pid)
    model = tiny / "tiny" / "1" / "model.py"
    model.write_text(model.read_text().replace("        pass\n", '        raise ValueError("no\\nmore")\n'))
    assert "not healthy" in str(ask(serving.url, 9))
    code, told = serving.finish()
    assert code == 1
    assert len(told) == 1
    assert re.match(r"visionfast: model tiny, version 1: ValueError: no more; brought back 2 times already ", told[0])
    assert not _run_folders(temporary)


def test_when_serve_is_killed_the_server_ends_too(serve: Callable[..., Serving], temporary: Path) -> None:
    serving = serve()
    (folder,) = _run_folders(temporary)
    (stage,) = stages_of(serving.pid)
    serving.process.kill()
    _wait_until(lambda: not _lives(serving.pid) and not _lives(stage.pid))
    assert folder.exists()  # nobody was there to take it away
    (Path("/dev/shm") / f"{folder.name}-left").touch()
    _wait_until(lambda: remove_leftovers() == [folder])
    assert not folder.exists()
    assert not _shared_memory(folder)


def test_the_end_of_a_server_that_was_killed_takes_its_stages_along(tiny: Path, temporary: Path) -> None:
    with Server(tiny, **_FREE) as server:
        assert server.pid is not None
        (stage,) = server.stages
        assert server.fault() is None
        assert remove_leftovers() == []  # it is in use
        os.kill(server.pid, signal.SIGKILL)
        _wait_until(lambda: server.fault() == "the server was killed by SIGKILL")
    assert not _lives(stage.pid)
    assert not _run_folders(temporary)


def test_the_end_does_not_wait_for_a_stage_that_is_dead(tiny: Path, temporary: Path) -> None:
    with Server(tiny, **_FREE, exit_timeout_s=300) as server:  # more than a test may take, if it waited
        (stage,) = server.stages
        os.kill(stage.pid, signal.SIGKILL)
        _wait_until(lambda: server.fault() == "stage tiny_0 was killed by SIGKILL")
        assert "not healthy" in str(ask(server.http_url, 0, 1))
        assert call(f"{server.http_url}/v2/health/ready")[0] == 200  # Triton does not say
        assert call(f"{server.http_url}/v2/models/tiny/ready")[0] == 200
    assert not list(temporary.iterdir())


# ---- what does not start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"initialize": 'raise ValueError("engine.json: damaged\\n build it again")'},
         r"model tiny, version 1: ValueError: engine\.json: damaged build it again"),
        ({"initialize": "import nosuch"}, "model tiny, version 1: ModuleNotFoundError: No module named 'nosuch'"),
        ({"initialize": "os.kill(os.getpid(), signal.SIGSEGV)"}, r"model tiny, version 1: Stub process .* not healthy"),
        ({"model": "syntax error"}, r"model tiny, version 1: SyntaxError: invalid syntax .*"),
        ({"config": "nonsense: 1"}, r'model tiny: .* \(.*no field named "nonsense"\)'),
        ({"config": CONFIG.replace('"python"', '"tensorrt_plan"')},
         r"model tiny, version 1: this server has no backend tensorrt_plan; the one in NVIDIA's container has"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_load(tmp_path: Path, temporary: Path, changes: dict[str, str], said: str) -> None:
    with pytest.raises(ServerError) as caught, Server(write_pipeline(tmp_path / "p", **changes), **_FREE):
        pass
    told = str(caught.value)
    assert re.search(f"^{said} \\(log: .*\\.log\\)$", told), told
    (log,) = temporary.iterdir()  # the log, and nothing else
    assert str(log) in told
    assert log.stat().st_size > 0


def test_a_model_whose_code_is_missing_is_not_waited_for(tiny: Path, temporary: Path) -> None:
    (tiny / "tiny" / "1" / "model.py").unlink()
    began = time.monotonic()
    with (
        pytest.raises(
            ServerError, match=r"^model file not found in '.*/tiny/1/model\.py'; deploy the engine again \(log: "
        ),
        Server(tiny, **_FREE),
    ):
        pass
    assert time.monotonic() - began < 60  # and not the 120 s that it has to load


def test_a_model_that_does_not_get_ready(tmp_path: Path, temporary: Path) -> None:
    pipeline = write_pipeline(tmp_path / "p", initialize="time.sleep(60)")
    with (
        pytest.raises(ServerError, match=r"tiny: not ready within 1 s"),
        Server(pipeline, **_FREE, ready_timeout_s=1.0, exit_timeout_s=0),
    ):
        pass
    assert not _run_folders(temporary)


def test_a_program_that_is_no_server(tiny: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setenv("TRITONSERVER", "false")
    with pytest.raises(ServerError, match=r"the server exited with code 1 before it was ready"):
        Server(tiny, **_FREE).__enter__()
