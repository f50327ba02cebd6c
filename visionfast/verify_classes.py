"""Which of a data set's categories is which of the engine's classes, told by their names."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from visionfast.errors import OptionError
from visionfast.terminal import one_line

__all__ = ["ClassMatch", "match_classes"]


@dataclass(frozen=True, slots=True)
class ClassMatch:
    """Attributes:
    categories: class id → category id, for those that both have, by class id.
    without_category: names of the engine's other classes.
    without_class: names of the data set's other categories.
    """

    categories: Mapping[int, int]
    without_category: tuple[str, ...]
    without_class: tuple[str, ...]


def match_classes(class_names: Sequence[str], categories: Mapping[int, str]) -> ClassMatch:
    """Ids are of no use: COCO's eighty classes have ids from 1 to 90 in its own files, and 0 to 79 in others.

    Args:
        class_names: the engine's, by class id.
        categories: the data set's, id → name.

    Raises:
        OptionError: they have no name in common, or a name stands for two. Case, spaces, `-` and `_` do not tell names
            apart.
    """
    ours = _by_name(enumerate(class_names), "the engine")
    theirs = _by_name(categories.items(), "the data set")
    if not (both := ours.keys() & theirs.keys()):
        raise OptionError(
            f"classes: the engine and the data set have no name in common; the engine has {_some(class_names)}, the "
            f"data set {_some(categories.values())}; give the data set's categories the engine's names"
        )
    matched = {ours[name]: theirs[name] for name in sorted(both, key=ours.__getitem__)}
    found = set(matched.values())
    return ClassMatch(
        categories=matched,
        without_category=tuple(name for index, name in enumerate(class_names) if index not in matched),
        without_class=tuple(name for number, name in categories.items() if number not in found),
    )


def _by_name(names: Iterable[tuple[int, str]], whose: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    for number, name in names:
        plain = "".join(unicodedata.normalize("NFC", name).casefold().replace("_", " ").replace("-", " ").split())
        if plain in ids:
            raise OptionError(f"classes: {whose} has two that are called {one_line(name)!r}; names have to be unique")
        ids[plain] = number
    return ids


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(one_line(name) for name in listed[:8]) + (", …" if len(listed) > 8 else "")
