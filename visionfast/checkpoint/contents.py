"""From what a weights file holds to a flat state dict and plain metadata.

Three layouts: a training checkpoint (`{"model": <module tree>, "ema": …, "train_args": …}`), a pickled
module by itself, and a state dict, bare or under one of the usual keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from visionfast.checkpoint.archive import StoredTensor, TorchArchive
from visionfast.checkpoint.pickled import Inert, printable
from visionfast.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["from_archive", "from_objects", "plain"]

_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "ema", "teacher")
_ROOT_FIELDS = ("train_args", "license", "version", "date", "names", "yaml", "nc", "stride", "task", "imgsz")
_MODULE_FIELDS = ("yaml", "names", "stride", "nc", "task", "args")
_MAX_DEPTH = 32
_MAX_VALUES = 200_000
_MAX_LISTED_ELEMENTS = 64


def from_archive(archive: TorchArchive, source: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Reads an untrusted archive: (state dict as stored, metadata)."""
    root = archive.read()

    def values_of(tensor: Any) -> Any:
        return archive.tensor(tensor).tolist() if isinstance(tensor, StoredTensor) else None

    fields = root if isinstance(root, dict) else {}
    module = _chosen(root, _is_module)
    if module is not None:
        attributes = module.state
        stored = dict(_flatten(module, source))
        described = _describe(fields, attributes, values_of)
        described["model_class"] = module.name
        described["batch_norm_eps"] = tuple(sorted(_batch_norm_eps(module)))
    else:
        stored = _tensors_of(root, StoredTensor, source)
        described = _describe(fields, {}, values_of)
    return {name: archive.tensor(tensor) for name, tensor in stored.items()}, described


def from_objects(root: Any, source: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same, from the objects that a trusted file was unpickled to."""
    import torch

    def values_of(tensor: Any) -> Any:
        small = isinstance(tensor, torch.Tensor) and tensor.numel() <= _MAX_LISTED_ELEMENTS
        return tensor.tolist() if small else None

    fields = root if isinstance(root, dict) else {}
    module = _chosen(root, lambda value: isinstance(value, torch.nn.Module))
    if module is not None:
        described = _describe(fields, vars(module), values_of)
        described["model_class"] = f"{type(module).__module__}.{type(module).__qualname__}"
        norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        described["batch_norm_eps"] = tuple(sorted({m.eps for m in norms}))
        return dict(module.state_dict()), described
    return _tensors_of(root, torch.Tensor, source), _describe(fields, {}, values_of)


def _is_module(value: Any) -> bool:
    return isinstance(value, Inert) and isinstance(_attribute(value, "_modules"), dict)


def _chosen(root: Any, is_module: Callable[[Any], bool]) -> Any:
    """The module to use: the weights' moving average where there is one, as in training's own loader."""
    candidates = (root.get("ema"), root.get("model")) if isinstance(root, dict) else (root,)
    return next((value for value in candidates if is_module(value)), None)


def _tensors_of(root: Any, tensor_type: type, source: str) -> dict[str, Any]:
    if isinstance(root, dict):
        for candidate in (root, *(root.get(key) for key in _STATE_DICT_KEYS)):
            if isinstance(candidate, dict):
                found = {k: v for k, v in candidate.items() if isinstance(k, str) and isinstance(v, tensor_type)}
                # A bare state dict is tensors and nothing else; one under a key may have companions.
                if found and len(found) == len(candidate):
                    return found
    what = f"its keys are {', '.join(printable(k, 20) for k in list(root)[:6])}" if isinstance(root, dict) else ""
    raise CheckpointError(
        f"{source}: holds no weights{f' ({what})' if what else ''}: expected a model, or a state dict bare "
        f"or under one of {', '.join(_STATE_DICT_KEYS)}"
    )


# ---- the module tree --------------------------------------------------------------------------------------


def _attribute(module: Inert, name: str) -> Any:
    return module.state.get(name) if isinstance(module.state, dict) else None


def _walk(module: Inert, prefix: str, source: str, depth: int = 0) -> Iterator[tuple[str, Inert]]:
    """Every module with its dotted prefix (`model.0.`), parents first."""
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{source}: made up: its modules are nested more than {_MAX_DEPTH} deep")
    yield prefix, module
    children = _attribute(module, "_modules")
    for name, child in children.items() if isinstance(children, dict) else ():
        if isinstance(child, Inert):
            yield from _walk(child, f"{prefix}{name}.", source, depth + 1)


def _modules(module: Inert, source: str) -> Iterator[tuple[str, Inert]]:
    for count, found in enumerate(_walk(module, "", source)):
        # The same child under many parents makes an exponential tree out of a small file.
        if count >= _MAX_VALUES:
            raise CheckpointError(f"{source}: made up: it has more than {_MAX_VALUES} modules")
        yield found


def _flatten(root: Inert, source: str) -> Iterator[tuple[str, StoredTensor]]:
    """(`model.0.conv.weight`, its tensor) for every parameter and buffer, named as in `Module.state_dict`."""
    for prefix, module in _modules(root, source):
        transient = _members(_attribute(module, "_non_persistent_buffers_set"))
        for group in ("_parameters", "_buffers"):
            tensors = _attribute(module, group)
            for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
                if isinstance(tensor, StoredTensor) and name not in transient:
                    yield f"{prefix}{name}", tensor


def _members(inert_set: Any) -> list[Any]:
    if not isinstance(inert_set, Inert):
        return []
    given = inert_set.args[0] if inert_set.args else []
    return [*(given if isinstance(given, list) else []), *inert_set.items]


def _batch_norm_eps(root: Inert) -> set[float]:
    found = (_attribute(m, "eps") for _, m in _modules(root, "") if m.name.endswith(".BatchNorm2d"))
    return {eps for eps in found if isinstance(eps, float)}


# ---- metadata ---------------------------------------------------------------------------------------------


def _describe(fields: Mapping[Any, Any], attributes: Any, values_of: Callable[[Any], Any]) -> dict[str, Any]:
    """The fields that say what the model is, as plain values."""
    own = attributes if isinstance(attributes, dict) else {}
    chosen = {name: fields[name] for name in _ROOT_FIELDS if name in fields}
    chosen.update({name: own[name] for name in _MODULE_FIELDS if name in own})
    budget = [_MAX_VALUES]
    return {name: plain(value, values_of, budget) for name, value in chosen.items()}


def plain(value: Any, values_of: Callable[[Any], Any], budget: list[int], depth: int = 0) -> Any:
    """A value as dicts, lists, numbers and text; what has no such form becomes `None`.

    Args:
        value: from a file; may be cyclic, or share its parts so often that it is huge when written out.
        values_of: the elements of a small tensor, or `None` for what is not one.
        budget: one number, counted down; below zero all is `None`.
        depth: how deep `value` is nested.
    """
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        return None
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, dict):
        return {k: plain(v, values_of, budget, depth + 1) for k, v in value.items() if isinstance(k, (str, int))}
    if isinstance(value, (list, tuple)):
        return [plain(item, values_of, budget, depth + 1) for item in value]
    if isinstance(value, StoredTensor):
        small = math.prod(value.shape) <= _MAX_LISTED_ELEMENTS
        return values_of(value) if small else None
    if isinstance(value, Inert):
        if value.name.endswith("Namespace"):
            return plain(value.state, values_of, budget, depth + 1)
        if value.name.startswith("pathlib."):
            return PurePath(*(part for part in value.args if isinstance(part, str))).as_posix()
        return None
    if isinstance(value, PurePath):
        return value.as_posix()
    if type(value).__name__.endswith("Namespace"):
        return plain(vars(value), values_of, budget, depth + 1)
    return values_of(value)
