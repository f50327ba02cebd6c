"""The verb `serve`: the Triton server over pipelines, from here until Ctrl-C."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from visionfast.errors import OptionError

__all__ = ["serve_verb"]


def serve_verb(
    pipelines: Annotated[
        list[str], typer.Argument(metavar="PIPELINE...", help="Its folder, or its name under pipelines/.")
    ],
    http: Annotated[int, typer.Option(help="Port for HTTP; 0 is one that is free.")] = 8000,
    grpc: Annotated[int, typer.Option(help="Port for gRPC; 0 is one that is free.")] = 8001,
    metrics: Annotated[int, typer.Option(help="Port for metrics; 0 is one that is free.")] = 8002,
    address: Annotated[
        str, typer.Option(help="To listen on; 0.0.0.0 is all of this machine's, and whoever reaches it is served.")
    ] = "127.0.0.1",
    cache_mb: Annotated[
        int | None,
        typer.Option(help="Response cache, MiB; 0 is none. Default: 64 if a pipeline was deployed with --cache."),
    ] = None,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory",
            help="Clients here may have images in shared memory. For a machine whose users trust one another.",
        ),
    ] = False,
    log: Annotated[
        Path | None, typer.Option(help="File for the server's output. Default: a temporary one, kept on failure.")
    ] = None,
    log_mb: Annotated[
        int, typer.Option(help="MiB beyond which the log begins anew, with the part before in FILE.1; 0: it grows.")
    ] = 32,
    ready_timeout: Annotated[float, typer.Option(help="Seconds that the models have to load.")] = 120.0,
    exit_timeout: Annotated[int, typer.Option(help="Seconds that requests in flight have at the end.")] = 10,
) -> None:
    """Serve pipelines with the Triton Inference Server. Until Ctrl-C, which finishes the requests in flight.

    When a part of it dies, it is brought back; exit code 1 if that fails. A second Ctrl-C doesn't wait.
    """
    from visionfast.serving.server import Server

    if cache_mb is not None and cache_mb < 0:
        raise OptionError(f"--cache-mb {cache_mb}: expected MiB, or 0 for none")
    if log_mb < 0:
        raise OptionError(f"--log-mb {log_mb}: expected MiB, or 0 for no limit")
    server = Server(
        pipelines,
        http=http,
        grpc=grpc,
        metrics=metrics,
        address=address,
        cache_bytes=None if cache_mb is None else cache_mb << 20,
        shared_memory=shared_memory,
        log=log,
        log_bytes=log_mb << 20,
        ready_timeout_s=ready_timeout,
        exit_timeout_s=exit_timeout,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda *_: server.ask_to_stop())
    if sys.stderr.isatty():  # a log has enough of what is wrong, and of "ready"
        print(f"visionfast: {', '.join(server.pipelines)}: loading", file=sys.stderr, flush=True)
    server.run(_say)
    print("visionfast: stopped", file=sys.stderr)


def _say(text: str) -> None:
    # At once, also into a file or a pipe: a script waits for it.
    print(text, flush=True)
