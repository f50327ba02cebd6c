"""Any number of images through an embedder's session: in order, in bounded memory, decoded beside the engine.

Whoever asks for the answers takes the items, too, so `items` may belong to one thread. Decoding threads bring each to
the network's size; what is ready goes to the engine in the order of the items, a full batch at a time, and a stream of
the engine computes it. Every task on these threads ends by itself: none waits for another, so nothing can hang.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

from visionfast.errors import ImageError
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Changed, Embedded, EmbedSession, Prepared, without_frames

__all__ = ["embed_stream"]

_Item = TypeVar("_Item")
_Task = TypeVar("_Task")


def embed_stream(
    session: EmbedSession,
    items: Iterable[_Item],
    *,
    load: Callable[[_Item], ImageSource],
    patches: bool,
    prefetch: int,
    threads: int,
) -> Generator[tuple[_Item, Embedded | ImageError], None, None]:
    """See `visionfast.embedder.Embedder.stream`.

    Args:
        session: of the engine.
        items: what the images are known by.
        load: an item's image.
        patches: give the patches' vectors too.
        prefetch: items that were taken and whose answers were not given out yet, at most; at least 1.
        threads: to decode on, at least 1.
    """
    flow = _Flow(session, load, patches, prefetch, threads)
    try:
        source = iter(items)
        while True:
            flow.fill(source)
            if (entry := flow.take()) is None:
                return
            yield entry.item, entry.answered()
    finally:
        flow.stop()


class _Entry(Generic[_Item]):
    """One item on its way. Its fields are written by the one thread that works on it, before it is told of."""

    __slots__ = ("answer", "failure", "index", "item", "prepared")

    def __init__(self, item: _Item, index: int) -> None:
        self.item = item
        self.index = index
        self.prepared: Prepared | None = None
        self.answer: Embedded | ImageError | None = None
        self.failure: BaseException | None = None

    @property
    def settled(self) -> bool:
        return self.answer is not None or self.failure is not None

    @property
    def decoded(self) -> bool:
        return self.prepared is not None or self.settled

    def answered(self) -> Embedded | ImageError:
        if self.failure is not None:
            raise self.failure
        assert self.answer is not None
        return self.answer


class _Flow(Generic[_Item]):
    """The items between being taken and being given out."""

    def __init__(
        self,
        session: EmbedSession,
        load: Callable[[_Item], ImageSource],
        patches: bool,
        prefetch: int,
        threads: int,
    ) -> None:
        self._session = session
        self._load = load
        self._patches = patches
        self._prefetch = prefetch
        self._changed = Changed()
        self._entries: deque[_Entry[_Item]] = deque()  # not given out yet, in order
        self._waiting: deque[_Entry[_Item]] = deque()  # of these, what no batch has yet
        self._batch: list[_Entry[_Item]] = []  # ready, and too few
        self._taken = 0
        self._ended = False  # no more items: there are none, or one has failed
        self._stopped = False
        self._failed_at: float = math.inf  # of the engine: what comes after it is not asked for
        self._decoders = _Workers("visionfast-decode", min(threads, prefetch), self._decode)
        self._engines = _Workers("visionfast-engine", session.streams, self._embed)
        atexit.register(self.stop)  # whoever still holds the generator then

    def fill(self, source: Iterator[_Item]) -> None:
        """Takes items while there is room."""
        while not self._ended and len(self._entries) < self._prefetch:
            try:
                entry = _Entry(next(source), self._taken)
            except StopIteration:
                self._add(None)
                return
            except Exception as error:
                self._add(_failed(error, self._taken))
                return
            self._taken += 1
            self._add(entry)
            self._decoders.do(entry)

    def take(self) -> _Entry[_Item] | None:
        """The next item, once it is settled; `None` after the last one."""
        self._changed.wait_for(lambda: not self._entries or self._entries[0].settled)
        return self._entries.popleft() if self._entries else None

    def stop(self) -> None:
        """Waits for what is being computed; what is not begun is dropped."""
        self._stopped = self._ended = True
        atexit.unregister(self.stop)
        self._decoders.end()
        self._engines.end()
        # A forgotten generator is closed by whichever thread collects it; a worker cannot wait for itself.
        if threading.current_thread() not in (*self._decoders.threads, *self._engines.threads):
            self._decoders.join()
            self._engines.join()

    def _add(self, entry: _Entry[_Item] | None) -> None:
        with self._changed.lock:
            if entry is None:
                self._ended = True
            else:
                self._entries.append(entry)
                self._waiting.append(entry)
            self._dispatch()

    def _decode(self, entry: _Entry[_Item]) -> None:
        if self._stopped:
            return
        try:
            entry.prepared = self._session.prepare(self._load(entry.item), name=_name(entry))
        except ImageError as error:
            entry.answer = without_frames(error)
        except BaseException as error:  # whatever it is, it is the caller's, in its place
            entry.failure = error
        with self._changed.lock:
            self._dispatch()
            self._changed.notify()

    def _dispatch(self) -> None:
        """Puts what is ready into batches, in order; the lock is held."""
        while self._waiting and self._waiting[0].decoded:
            entry = self._waiting.popleft()
            if entry.failure is not None:
                self._ended = True
                self._waiting.clear()  # nobody will see what comes after it
            elif entry.prepared is not None:
                self._batch.append(entry)
                if len(self._batch) == self._session.batch:
                    self._submit()
        # What is not full waits for more, unless there is none, or no room for it before this is given out.
        if self._batch and not self._waiting:
            full = len(self._entries) >= self._prefetch and self._entries[0] is self._batch[0]
            if self._ended or full:
                self._submit()

    def _submit(self) -> None:
        batch, self._batch = self._batch, []
        self._engines.do(batch)

    def _embed(self, batch: list[_Entry[_Item]]) -> None:
        if self._stopped or batch[0].index > self._failed_at:
            return
        try:
            prepared = [entry.prepared for entry in batch if entry.prepared is not None]
            answers = self._session.embed(prepared, patches=self._patches)
            assert len(answers) == len(batch)
        except BaseException as error:
            with self._changed.lock:
                self._fail(batch, error)
            return
        with self._changed.lock:
            for entry, answer in zip(batch, answers, strict=True):
                entry.answer, entry.prepared = answer, None
            self._changed.notify()

    def _fail(self, batch: list[_Entry[_Item]], error: BaseException) -> None:
        """The engine's batches come in order: what has none yet is behind this one. The lock is held."""
        self._failed_at = min(self._failed_at, batch[0].index)
        for entry in batch:
            entry.failure, entry.prepared = error, None
        self._ended = True
        self._waiting.clear()
        self._batch.clear()
        self._changed.notify()


class _Workers(Generic[_Task]):
    """Threads that take tasks in turns, as many as there are tasks, and `most` of them at most.

    Not an executor of the standard library: who hands it a task holds locks for it that Ctrl-C can leave locked
    (see `Changed`).
    """

    def __init__(self, name: str, most: int, work: Callable[[_Task], None]) -> None:
        self.threads: list[threading.Thread] = []
        self._name = name
        self._most = most
        self._work = work
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()

    def do(self, task: _Task) -> None:
        self._tasks.put(task)
        if len(self.threads) < self._most:
            self.threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self.threads[-1].start()

    def end(self) -> None:
        """After the tasks that are there."""
        for _ in range(self._most):
            self._tasks.put(None)

    def join(self) -> None:
        for thread in self.threads:
            if thread.is_alive():
                thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._work(task)
            del task  # or it would be held until the next one comes


def _failed(error: Exception, index: int) -> _Entry[_Item]:
    """In the place of an item that could not be had."""
    entry: _Entry[_Item] = _Entry(None, index)  # type: ignore[arg-type]  # never given out: its failure is raised
    entry.failure = error
    return entry


def _name(entry: _Entry[_Item]) -> str:
    """What errors call the item: its path, else its place among all."""
    item: object = entry.item
    if isinstance(item, (str, os.PathLike)):
        path = os.fspath(item)
        return path if isinstance(path, str) else os.fsdecode(path)
    return f"image {entry.index}"
