"""What `predict` does, answered by a server: the same words, JSON and pictures, whatever the model's task is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from visionfast.errors import ImageError, ServerError
from visionfast.predict import Found
from visionfast.predict_embeddings import run_embedder
from visionfast.predict_output import report
from visionfast.predict_prompts import Prompts, run_everything, run_prompts
from visionfast.results import Masks

if TYPE_CHECKING:
    from visionfast.serving.client import Client
    from visionfast.serving.client_request import Answer, Options, Priority
    from visionfast.sessions.embeddings import Embedded
    from visionfast.waterfall import Traces

__all__ = ["run_served_detector", "run_served_embedder", "run_served_segmenter"]

_Answer = TypeVar("_Answer")


def run_served_detector(
    client: Client,
    paths: Sequence[Path],
    options: Options,
    *,
    save: Path | None,
    json_to: str | None,
    traces: Traces | None = None,
) -> int:
    """As `predict.run`; with `traces`, which are kept, one file after the other.

    Raises `ServerError` for the first file that was refused.
    """

    def found() -> Iterator[tuple[Path, Found | ImageError]]:
        if traces is None:
            answers: Iterator[Answer] = client.stream(paths, on_error="return", **options)
        else:
            answers = (
                _or_error(lambda path: traces.keep(path, client.traced(path, **options)), path) for path in paths
            )
        for path, answer in zip(paths, answers, strict=True):
            if isinstance(answer, ServerError):
                raise answer
            yield path, answer if isinstance(answer, ImageError) else Found(answer, client.class_names)

    return report(found(), paths, save=save, json_to=json_to)


def run_served_embedder(
    client: Client,
    paths: Sequence[Path],
    *,
    priority: Priority,
    save: Path | None,
    json_to: str | None,
    shared_colours: bool,
    traces: Traces | None = None,
) -> int:
    """As `predict_embeddings.run_embedder`; with `traces`, which are kept, one file after the other.

    Raises `ServerError` for the first file that was refused.
    """
    served = _ServedEmbedder(client, priority, traces)
    return run_embedder(served, paths, save=save, json_to=json_to, shared_colours=shared_colours)


def run_served_segmenter(
    client: Client,
    paths: Sequence[Path],
    prompts: Prompts | None,
    everything: Mapping[str, Any],
    *,
    priority: Priority,
    save: Path | None,
    json_to: str | None,
    traces: Traces | None = None,
) -> int:
    """As `predict_prompts.run_prompts`, and without prompts as `run_everything`; with `traces`, which are kept.

    Raises `ServerError` for the first file that was refused.
    """
    if prompts is not None:

        def segment(path: Path, **asked: Any) -> Masks:
            if traces is not None:
                return traces.keep(path, client.traced_segment(path, priority=priority, **asked))
            return client.segment(path, priority=priority, **asked)

        return run_prompts(segment, paths, prompts, save=save, json_to=json_to)

    def find(path: Path, *, progress: object, **options: Any) -> Masks:
        if traces is not None:
            return traces.keep(path, client.traced_everything(path, priority=priority, **options))
        return client.everything(path, priority=priority, **options)  # a server tells of no progress

    return run_everything(find, paths, everything, save=save, json_to=json_to)


class _ServedEmbedder:
    """See `predict_embeddings.Embeds`."""

    def __init__(self, client: Client, priority: Priority, traces: Traces | None) -> None:
        self._client = client
        self._priority = priority
        self._traces = traces
        cls, patches = client.spec.graphs[0].outputs
        self.dim = cls.shape[-1]
        self.grid_hw = (patches.shape[1], patches.shape[2])

    def stream(
        self, items: Sequence[Path], *, load: Callable[[Path], Path], patches: bool
    ) -> Generator[tuple[Path, Embedded | ImageError], None, None]:
        sources = [load(item) for item in items]
        answers: Iterator[Embedded | ImageError | ServerError]
        if self._traces is None:
            answers = self._client.embed_stream(sources, patches=patches, on_error="return", priority=self._priority)
        else:
            answers = (_or_error(lambda source: self._traced(source, patches), source) for source in sources)
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, ServerError):
                raise answer
            yield item, answer

    def _traced(self, source: Path, patches: bool) -> Embedded:
        assert self._traces is not None
        done = self._client.traced_embed(source, patches=patches, priority=self._priority)
        return self._traces.keep(source, done)


def _or_error(ask: Callable[[Path], _Answer], path: Path) -> _Answer | ImageError:
    try:
        return ask(path)
    except ImageError as error:
        return error
