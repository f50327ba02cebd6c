"""The real Triton Inference Server as a child of this process: started, watched, brought back and ended.

What it does by itself was measured with Triton 2.51 of nvidia-pytriton 0.7.0, on a CPU. When a stage's process is
killed, the server goes on: it and its models stay "ready", every request that needs the stage gets an error after a
second ("Stub process '…' is not healthy"), and it stays so: a model whose files are as they were is not loaded again,
and one whose process is dead is never unloaded. So `run` watches the processes, and starts the whole server anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from visionfast.errors import OptionError, ServerError
from visionfast.serving.idle_connections import close_idle_connections
from visionfast.serving.pipelines import model_folders, wants_cache
from visionfast.serving.ports import free_endpoints
from visionfast.serving.processes import Stage, how_ended, stages_of
from visionfast.serving.run_folder import RunFolder, remove_leftovers
from visionfast.serving.server_log import ServerLog, missing_code, reason
from visionfast.serving.server_questions import forget_dead_clients, is_ready
from visionfast.serving.tritonserver import Endpoints, command, environment, find_installation, link_backends

__all__ = ["Server"]

_CACHE_BYTES = 64 << 20
_STEADY_S = 10.0
"""A server that fails sooner has not been brought back."""
_TRIES = 2
"""To bring it back, in a row."""
_POLL_S = 0.2
_CLIENTS_S = 5.0
"""Between two looks for shared memory of dead clients."""
_BESIDE_DEAD_S = 3.0
"""That requests in flight have when a stage has died: those at the others. Its own are never answered."""
_DRAINED = "All models are stopped"
"""In the log, once it was told to end."""


class Server:
    """A Triton Inference Server that serves pipelines, as a context manager.

        with Server("pipelines/yolov8s", http=0, grpc=0, metrics=0) as server:
            print(server.http_url, server.grpc_url)

    Inside the block all models are ready. At its end requests in flight are finished, and no process and no shared
    memory is left. Started by the main thread, it also ends with this process, however that goes.

    Args:
        pipelines: folders that `visionfast deploy` wrote, or their names under pipelines/. One, or several.
        http, grpc, metrics: ports; 0 is one that is free.
        address: an IPv4 address to listen on. Whoever reaches it is served: there are no passwords.
        cache_bytes: of the response cache, for the models that have it enabled; 0 is none. Default: 64 MiB if one has.
        shared_memory: clients of this machine may have their images in it (`Client(shared_memory=True)`). Whoever
            reaches the port then has the server map any shared memory of this user's, so it is for machines whose users
            trust one another; loopback addresses only.
        log: file that the server's output is added to. Default: a temporary one, kept where something failed.
        log_bytes: beyond which `run` has the log begin anew, with the part before in `<log>.1`; 0: it grows.
        ready_timeout_s: how long the models have to load.
        exit_timeout_s: how long requests in flight have to finish.

    Raises:
        ArtifactError: there is no model in a pipeline.
        OptionError: an argument that cannot be.
        ServerError: entering it: a port is taken, a model doesn't load, or the server ended.
        BackendUnavailableError: entering it: there is no server on this machine.
    """

    def __init__(
        self,
        pipelines: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        http: int = 8000,
        grpc: int = 8001,
        metrics: int = 8002,
        address: str = "127.0.0.1",
        cache_bytes: int | None = None,
        shared_memory: bool = False,
        log: str | os.PathLike[str] | None = None,
        log_bytes: int = 32 << 20,
        ready_timeout_s: float = 120.0,
        exit_timeout_s: int = 10,
    ) -> None:
        if cache_bytes is not None and cache_bytes < 0:
            raise OptionError(f"cache_bytes {cache_bytes}: expected the size of the response cache, or 0 for none")
        if exit_timeout_s < 0 or ready_timeout_s <= 0:
            raise OptionError(f"timeouts {ready_timeout_s} and {exit_timeout_s} s: expected a time to start and to end")
        if log_bytes < 0:
            raise OptionError(f"log_bytes {log_bytes}: expected the size of the log, or 0 for no limit")
        self._pipelines = [pipelines] if isinstance(pipelines, (str, os.PathLike)) else list(pipelines)
        self._folders = model_folders(self._pipelines)
        self._cache_bytes = cache_bytes
        self._shared_memory = shared_memory
        self._wanted = (address, http, grpc, metrics)
        self._endpoints: Endpoints | None = None
        self._log = ServerLog(None if log is None else Path(log), min(self._folders), log_bytes)
        self._ready_timeout_s, self._exit_timeout_s = ready_timeout_s, exit_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._run_folder: RunFolder | None = None
        self._stages: tuple[Stage, ...] = ()
        self._stops_asked = 0

    @property
    def models(self) -> tuple[str, ...]:
        """Their names, sorted; an ensemble's steps are models, too."""
        return tuple(sorted(self._folders))

    @property
    def pipelines(self) -> tuple[str, ...]:
        """The models that are asked for: a step of an ensemble has another name than its pipeline."""
        named = [name for name, folder in self._folders.items() if name == folder.parent.name]
        return tuple(named) or self.models

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The Python processes of the models."""
        return self._stages

    @property
    def pid(self) -> int | None:
        """Of the server, while there is one."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> Path | None:
        """The file with the server's output, once started."""
        return self._log.path

    @property
    def http_url(self) -> str:
        return f"http://{self._reached}:{self._listens.http}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self._reached}:{self._listens.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reached}:{self._listens.metrics}/metrics"

    @property
    def _listens(self) -> Endpoints:
        assert self._endpoints is not None, "where a server listens is known once it was started"
        return self._endpoints

    @property
    def _reached(self) -> str:
        """The address for this machine itself."""
        return "127.0.0.1" if self._listens.address == "0.0.0.0" else self._listens.address

    def __enter__(self) -> Server:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    # ---- a server's life --------------------------------------------------------------------------------------

    def run(self, say: Callable[[str], None]) -> None:
        """Starts, serves until `ask_to_stop`, and ends; brings the server back when it or a stage dies.

        Args:
            say: is told, a line at a time, that all is ready, what died, and that all is ready again.

        Raises:
            ServerError: it did not start, or could not be brought back twice in a row.
            BackendUnavailableError: there is no server on this machine.
        """
        names = ", ".join(self.pipelines)
        try:
            self._start()
            if not self._stops_asked:
                say(f"{names}: ready at {self.http_url}, {self.grpc_url} and {self.metrics_url}")
            failures, since, looked = 0, time.monotonic(), 0.0
            while not self._stops_asked:
                time.sleep(_POLL_S)
                self._log.shorten()
                if self._shared_memory and time.monotonic() - looked > _CLIENTS_S:
                    forget_dead_clients(self._reached, self._listens.http)
                    looked = time.monotonic()
                if (fault := self.fault()) is None:
                    continue
                failures = failures + 1 if time.monotonic() - since < _STEADY_S else 1
                self._bring_back(fault, failures, say)
                since = time.monotonic()
                if not self._stops_asked:
                    say(f"{names}: ready again")
        finally:
            self._stop()

    def _bring_back(self, fault: str, failures: int, say: Callable[[str], None]) -> None:
        while failures <= _TRIES:
            say(f"{self._error(fault)}; starting again")
            self._stop()
            try:
                return self._start()
            except ServerError as error:
                fault, failures = str(error).removesuffix(str(self._log)), failures + 1
        raise self._error(f"{fault}; brought back {_TRIES} times already")

    def ask_to_stop(self) -> None:
        """Has `run` finish the requests in flight and return; asked twice, it doesn't wait. For signal handlers."""
        self._stops_asked += 1

    def fault(self) -> str | None:
        """What is wrong with a server that was started: it, or one of its stages, has ended; None if nothing is."""
        assert self._process is not None, "the server was not started"
        if (how := how_ended(self._process.pid)) is not None:
            return f"the server {how}"
        for stage in self._stages:
            if (how := stage.fault()) is not None:
                return f"stage {stage.name} {how}"
        return None

    def _start(self) -> None:
        assert self._process is None, "a server is started once"
        installation = find_installation()
        self._folders = model_folders(self._pipelines)  # it may have been deployed anew
        wanted = _CACHE_BYTES if any(map(wants_cache, self._folders.values())) else 0
        remove_leftovers()
        self._endpoints = free_endpoints(*self._wanted)
        if self._shared_memory and not self._listens.address.startswith("127."):
            raise OptionError(
                f"--address {self._listens.address} --shared-memory: expected a loopback address, such as 127.0.0.1"
            )
        # Where it chose its ports, it keeps them when it is brought back.
        self._wanted = (self._listens.address, self._listens.http, self._listens.grpc, self._listens.metrics)
        self._run_folder = RunFolder()
        try:
            models, backends = self._run_folder.path / "models", self._run_folder.path / "backends"
            models.mkdir()
            for name, folder in self._folders.items():
                (models / name).symlink_to(folder)
            link_backends(installation, backends)
            arguments = command(
                installation,
                self._listens,
                models=models,
                backends=backends,
                shm_prefix=self._run_folder.shm_prefix,
                cache_bytes=wanted if self._cache_bytes is None else self._cache_bytes,
                exit_timeout_s=self._exit_timeout_s,
                shared_memory=self._shared_memory,
                # Linux ties it to the thread that starts it, and only the main thread lives as long as the process.
                parent_pid=os.getpid() if threading.current_thread() is threading.main_thread() else None,
            )
            output = self._log.open()
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self._run_folder.path,  # Python looks for modules where it is started
                    env=environment(backends),
                    pass_fds=[self._run_folder.lock],
                    start_new_session=True,  # Ctrl-C is for us, who then end it in order
                )
            finally:
                os.close(output)
            self._wait_until_ready()
            self._stages = stages_of(self._process.pid)
        except OSError as error:
            self._stop()
            raise ServerError(f"the server cannot be started: {error.filename}: {error.strerror}") from error
        except BaseException:
            self._stop()
            raise

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        ends = time.monotonic() + self._ready_timeout_s
        while not self._is_ready() and not self._stops_asked:
            if (how := how_ended(self._process.pid)) is not None:
                raise self._error(reason(self._log.written()) or f"the server {how} before it was ready")
            if (missing := missing_code(self._log.written())) is not None:
                raise self._error(missing)
            if time.monotonic() > ends:
                raise self._error(f"{', '.join(self.models)}: not ready within {self._ready_timeout_s:g} s")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        return is_ready(self._reached, self._listens.http, self._listens.metrics)

    def _stop(self) -> None:
        """Ends what there is, when requests in flight are finished."""
        process, folder = self._process, self._run_folder
        stage_is_dead = any(stage.fault() for stage in self._stages)
        try:
            if process is not None and how_ended(process.pid) is None:
                self._close_idle_connections(process.pid)
                process.terminate()
                # To unload its models it takes a second or two more than its own limit. With a dead stage, for which
                # it waits in vain, it is enough that nothing is in flight elsewhere.
                limit_s = min(self._exit_timeout_s, _BESIDE_DEAD_S) if stage_is_dead else self._exit_timeout_s + 10.0
                ends = time.monotonic() + limit_s
                while how_ended(process.pid) is None and time.monotonic() < ends and self._stops_asked < 2:
                    if stage_is_dead and _DRAINED in self._log.written():
                        break
                    time.sleep(0.05)
                    self._close_idle_connections(process.pid)
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what is left, stages of a dead server among it
                process.wait()
            self._process, self._run_folder, self._stages = None, None, ()
            if folder is not None:
                folder.remove(within_s=5.0)
            self._log.close()

    def _close_idle_connections(self, pid: int) -> None:
        close_idle_connections(pid, self._listens.http)

    def _error(self, text: str) -> ServerError:
        self._log.keep()
        return ServerError(f"{text}{self._log}")
