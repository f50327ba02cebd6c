"""The names that a weights file may mention.

None of them is ever imported on the file's word (see `visionfast.checkpoint.pickled`): the list is there so
that a file which asks for anything else is refused and named, instead of being read as if it were harmless.
What real files carry, and why it is here:

- tensors and what they are made of: storages, dtypes, `torch.Size`, the rebuild functions;
- layers: a YOLO checkpoint pickles its whole module tree, so classes of `torch.nn.modules` and
  `ultralytics.nn`;
- a training run's left-overs, which nobody reads: loss objects, option namespaces, paths, dates, NumPy
  scalars.

Functions are not classes: `ultralytics.nn.tasks.DetectionModel` is on the list, `…tasks.attempt_load_weights`
or `ultralytics.utils.downloads.safe_download` are not.
"""

from __future__ import annotations

import re

__all__ = ["DTYPE_OF_STORAGE", "REBUILD_TENSOR", "is_allowed"]

# Storage class → the dtype of its elements, by torch's name. Quantised and complex storages: no weights that
# are read here have them.
DTYPE_OF_STORAGE = {
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.DoubleStorage": "float64",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}

REBUILD_TENSOR = frozenset({"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"})

_EXACT = frozenset(
    {
        *DTYPE_OF_STORAGE,
        *REBUILD_TENSOR,
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.torch_version.TorchVersion",
        *(f"torch.{dtype}" for dtype in DTYPE_OF_STORAGE.values()),
        "_codecs.encode",  # how protocol 2 writes bytes
        *(f"builtins.{n}" for n in ("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int")),
        *(f"builtins.{n}" for n in ("list", "object", "range", "set", "slice", "str", "tuple")),
        *(f"collections.{n}" for n in ("Counter", "OrderedDict", "defaultdict", "deque")),
        *(f"datetime.{n}" for n in ("date", "datetime", "timedelta", "timezone")),
        "argparse.Namespace",
        "types.SimpleNamespace",
        "numpy.dtype",
        "numpy.ndarray",
    }
)
_CLASS = r"(?:v\d+)?[A-Z]\w*"  # Detect, v10Detect, v8DetectionLoss
_PATTERNS = re.compile(
    "|".join(
        (
            rf"torch\.nn\.modules\.\w+\.{_CLASS}",
            rf"ultralytics\.nn\.modules(?:\.\w+)?\.{_CLASS}",  # 8.0 had them all in ultralytics.nn.modules
            rf"ultralytics\.nn\.tasks\.{_CLASS}",
            r"ultralytics\.(?:yolo\.)?utils\.IterableSimpleNamespace",
            rf"ultralytics\.(?:yolo\.)?utils\.(?:loss|tal)\.{_CLASS}",
            r"ultralytics\.yolo\.v8\.\w+\.train\.\w*Loss",
            # The yolov5 repository's: so that such a file can be told what it is, rather than that it is
            # unsafe.
            rf"models\.(?:yolo|common|experimental)\.{_CLASS}",
            r"pathlib(?:\._local)?\.(?:Pure)?(?:Posix|Windows)?Path",
            r"numpy\.(?:bool_?|u?int(?:8|16|32|64)|float(?:16|32|64))",
            r"numpy\._?core\.(?:multiarray\.(?:scalar|_reconstruct)|numeric\._frombuffer)",
        )
    ),
    re.ASCII,
)


def is_allowed(name: str) -> bool:
    """Whether a weights file may mention this global, e.g. `collections.OrderedDict`."""
    return name in _EXACT or _PATTERNS.fullmatch(name) is not None
