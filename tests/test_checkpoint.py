"""Untrusted weights files: what is read, what is refused, and that nothing of a file is ever run."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
import struct
import threading
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from visionfast.checkpoint import open_checkpoint
from visionfast.checkpoint.allowed import is_allowed
from visionfast.errors import CheckpointError, UnsafeCheckpointError


def seeded_model() -> Any:
    """A YOLOv8n of ultralytics' own, with random weights."""
    return copy.deepcopy(_seeded_model())


@functools.cache
def _seeded_model() -> Any:
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    model = DetectionModel("yolov8n.yaml", nc=3, verbose=False)
    model.names = {0: "cat", 1: "dog", 2: "emu"}
    return model.eval()


def training_checkpoint(model: Any) -> dict[str, Any]:
    """What ultralytics' trainer saves, with the kinds of left-overs that its releases had."""
    from ultralytics.utils import IterableSimpleNamespace

    model.args = IterableSimpleNamespace(imgsz=320, task="detect", save_dir=Path("runs/train"))
    return {
        "epoch": -1,
        "best_fitness": np.float64(0.5),
        "model": model.half(),
        "ema": None,
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.9)}]},
        "train_args": {"imgsz": 320, "data": "coco.yaml", "project": Path("runs"), "classes": None},
        "train_metrics": {"fitness": np.float32(0.1), "curve": np.arange(3.0)},
        "date": "2026-01-01T00:00:00",
        "version": "8.4.0",
        "license": "AGPL-3.0",
    }


@pytest.fixture(scope="module")
def real_pt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "yolov8n.pt"
    torch.save(training_checkpoint(seeded_model()), path)
    return path


# ---- real files -------------------------------------------------------------------------------------------


def test_ultralytics_checkpoint_opens_without_trust(real_pt: Path) -> None:
    checkpoint = open_checkpoint(real_pt)
    expected = torch.load(real_pt, weights_only=False)["model"].state_dict()
    assert list(checkpoint.state_dict) == list(expected)
    for name, tensor in expected.items():
        assert checkpoint.state_dict[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.state_dict[name], tensor), name
    assert checkpoint.metadata["names"] == {0: "cat", 1: "dog", 2: "emu"}
    assert checkpoint.metadata["args"] == {"imgsz": 320, "task": "detect", "save_dir": "runs/train"}
    assert checkpoint.metadata["train_args"]["project"] == "runs"
    assert checkpoint.metadata["stride"] == [8, 16, 32]
    assert checkpoint.metadata["license"] == "AGPL-3.0"
    assert checkpoint.metadata["model_class"] == "ultralytics.nn.tasks.DetectionModel"
    assert checkpoint.metadata["batch_norm_eps"] == (0.001,)
    assert len(checkpoint.sha256) == 64


def test_trusted_and_untrusted_reading_agree(real_pt: Path) -> None:
    safe, trusted = open_checkpoint(real_pt), open_checkpoint(real_pt, trust=True)
    assert safe.metadata == trusted.metadata
    assert list(safe.state_dict) == list(trusted.state_dict)
    assert all(torch.equal(safe.state_dict[k], trusted.state_dict[k]) for k in safe.state_dict)


def test_the_moving_average_is_preferred(tmp_path: Path) -> None:
    model, ema = seeded_model(), seeded_model()
    with torch.no_grad():
        ema.model[0].conv.weight.fill_(0.25)
    torch.save({"model": model, "ema": ema}, tmp_path / "a.pt")
    assert torch.all(open_checkpoint(tmp_path / "a.pt").state_dict["model.0.conv.weight"] == 0.25)


def test_a_module_saved_by_itself(tmp_path: Path) -> None:
    torch.save(seeded_model(), tmp_path / "a.pt")
    assert "model.0.conv.weight" in open_checkpoint(tmp_path / "a.pt").state_dict


def test_layout_of_release_8_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8.0 had every block in `ultralytics.nn.modules`, and the options in `ultralytics.yolo.utils`."""
    from ultralytics.nn import modules

    for name in ("Conv", "C2f", "SPPF", "Bottleneck", "Concat", "Detect", "DFL"):
        monkeypatch.setattr(getattr(modules, name), "__module__", "ultralytics.nn.modules")
    torch.save(training_checkpoint(seeded_model()), tmp_path / "old.pt")
    checkpoint = open_checkpoint(tmp_path / "old.pt")
    assert len(checkpoint.state_dict) > 300
    assert is_allowed("ultralytics.yolo.utils.IterableSimpleNamespace")


def test_a_fused_model_with_its_bound_methods(tmp_path: Path) -> None:
    """After `fuse()` each block pickles `forward = getattr(block, "forward_fuse")`."""
    model = seeded_model().fuse(verbose=False)
    torch.save({"model": model}, tmp_path / "fused.pt")
    assert "model.0.conv.bias" in open_checkpoint(tmp_path / "fused.pt").state_dict


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_that_torch_can_be_told_to_use(tmp_path: Path, protocol: int) -> None:
    torch.save(training_checkpoint(seeded_model()), tmp_path / "a.pt", pickle_protocol=protocol)
    assert open_checkpoint(tmp_path / "a.pt").metadata["names"][2] == "emu"


@pytest.mark.parametrize("wrap", [None, "state_dict", "model", "model_state_dict"])
def test_plain_state_dicts(tmp_path: Path, wrap: str | None) -> None:
    state = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).state_dict()
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / "a.pt")
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert {k: tuple(v.shape) for k, v in checkpoint.state_dict.items()} == {
        k: tuple(v.shape) for k, v in state.items()
    }


def test_tensors_of_every_kind_survive(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": base.view(4, 6).t(),
        "view": base[5:11:2],
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(torch.rand(2)),
        "bf16": torch.rand(3).bfloat16(),
        "i64": torch.tensor([2**62]),
        "bool": torch.tensor([True, False]),
    }
    torch.save(state, tmp_path / "a.pt")
    read = open_checkpoint(tmp_path / "a.pt").state_dict
    assert all(torch.equal(read[k], v) and read[k].dtype == v.dtype for k, v in state.items())


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.arange(3.0)}, tmp_path / "a.safetensors", metadata={"names": '{"0": "cat"}', "by": "me"})
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    assert checkpoint.state_dict["w"].tolist() == [0, 1, 2]
    assert checkpoint.metadata == {"names": {"0": "cat"}, "by": "me"}


def test_nothing_of_torch_is_left_changed(real_pt: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    open_checkpoint(real_pt)
    assert set(torch.serialization.get_safe_globals()) == before


def test_threads_do_not_disturb_each_other(real_pt: Path) -> None:
    sums: list[float] = []
    threads = [
        threading.Thread(
            target=lambda: sums.append(
                sum(float(t.double().sum()) for t in open_checkpoint(real_pt).state_dict.values())
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sums) == 4
    assert len(set(sums)) == 1


def test_shared_real_files(shared_data: Path) -> None:
    for name in ("yolov8n-coco", "yolov8n-seg-coco", "yolov8n-pose-coco"):
        assert open_checkpoint(shared_data / "weights" / f"{name}.pt").metadata["names"][0] == "person"


# ---- hostile files ----------------------------------------------------------------------------------------


class Calls:
    """Pickles as `function(*args)`."""

    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


def _touch(canary: Path) -> str:
    return f"__import__('pathlib').Path({str(canary)!r}).touch()"


def _in_state(canary: Path) -> Any:
    """A real layer whose state holds a call, and attributes that unpickling must not set on anything real."""
    layer = nn.Conv2d(1, 1, 1)
    layer.__dict__["__setstate__"] = Calls(eval, _touch(canary))
    layer.__dict__["__class__"] = "x"
    return {"model": layer}


HOSTILE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "os.system": ("posix.system", lambda c: Calls(os.system, f"touch {c}")),
    "eval": ("builtins.eval", lambda c: Calls(eval, _touch(c))),
    "exec": ("builtins.exec", lambda c: Calls(exec, _touch(c))),
    "import": ("builtins.__import__", lambda c: Calls(__import__, "os")),
    "beside real weights": ("builtins.eval", lambda c: {"w": torch.zeros(2), "x": Calls(eval, _touch(c))}),
    "in a layer's state": ("builtins.eval", _in_state),
    "partial": ("functools.partial", lambda c: functools.partial(os.system, f"touch {c}")),
    "getattr": ("builtins.getattr", lambda c: Calls(getattr, OrderedDict, "__class__")),
    "getattr chain": (
        "builtins.getattr",
        lambda c: Calls(getattr, Calls(getattr, nn.Conv2d(1, 1, 1), "__init__"), "__globals__"),
    ),
    "getattr of a bound method's name": (
        "builtins.getattr",
        lambda c: Calls(getattr, "text", "forward_fuse"),
    ),
    "torch.load again": ("torch.serialization.load", lambda c: Calls(torch.load, str(c))),
    "a function of ultralytics": ("ultralytics.utils.downloads.safe_download", lambda c: Calls(_download(), str(c))),
    "pickle.loads of bytes": (
        "loads",
        lambda c: Calls(pickle.loads, pickle.dumps(Calls(eval, _touch(c)))),
    ),
    "state on a function": ("builtins.eval", lambda c: Calls(eval, "1", state={"a": 1})),
    "defaultdict's factory": ("builtins.eval", lambda c: Calls(defaultdict, eval)),
}


def _download() -> Any:
    from ultralytics.utils.downloads import safe_download

    return safe_download


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_name_and_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    expected, make = HOSTILE[name]
    canary = tmp_path / "canary"
    torch.save(make(canary), tmp_path / "a.pt", pickle_protocol=protocol)
    with pytest.raises(UnsafeCheckpointError) as raised:
        open_checkpoint(tmp_path / "a.pt")
    assert expected in str(raised.value)
    assert "nothing of it was run" in str(raised.value)
    assert "--trust-checkpoint" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not canary.exists()


def test_the_same_file_does_run_when_trusted(tmp_path: Path) -> None:
    """So that the tests above are known to hold a live charge."""
    canary = tmp_path / "canary"
    torch.save({"w": torch.zeros(1), "x": Calls(eval, _touch(canary))}, tmp_path / "a.pt")
    with contextlib.suppress(CheckpointError):
        open_checkpoint(tmp_path / "a.pt", trust=True)
    assert canary.exists()


def test_a_nested_pickle_in_bytes_stays_bytes(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    inner = pickle.dumps(Calls(eval, _touch(canary)))
    torch.save({"model": {"w": torch.zeros(2)}, "extra": inner, "license": inner}, tmp_path / "a.pt")
    assert list(open_checkpoint(tmp_path / "a.pt").state_dict) == ["w"]
    assert not canary.exists()


@pytest.mark.parametrize("legacy", [True, False], ids=["before 1.6", "bare pickle"])
def test_legacy_files_are_not_read(tmp_path: Path, legacy: bool) -> None:
    canary, path = tmp_path / "canary", tmp_path / "a.pt"
    hostile = {"x": Calls(eval, _touch(canary))}
    if legacy:
        torch.save(hostile, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="legacy PyTorch" if legacy else "bare pickle"):
        open_checkpoint(path)
    assert not canary.exists()


def test_torchscript_is_refused_as_code(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", category=FutureWarning)
        warnings.filterwarnings("ignore", "`torch.jit", category=DeprecationWarning)
        torch.jit.save(torch.jit.trace(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 2, 2)), str(tmp_path / "a.pt"))
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(tmp_path / "a.pt")


# ---- files put together by hand ---------------------------------------------------------------------------


def archive(path: Path, pickled: bytes, storage: bytes = b"", **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", "little")
        file.writestr("a/data/0", storage)
    return path


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def tensor_pickle(numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """The pickle of `{"w": <tensor>}` with these claims about a float32 storage."""
    storage = _tuple(_text("storage"), b"ctorch\nFloatStorage\n", _text("0"), _text("cpu"), _int(numel)) + b"Q"
    args = _tuple(storage, _int(offset), _tuple(*map(_int, shape)), _tuple(*map(_int, stride)), b"\x89", b"N")
    return b"\x80\x02}" + _text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n" + args + b"Rs."


def test_a_file_by_hand_reads(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", tensor_pickle(4, (2, 2), (2, 1)), struct.pack("<4f", 1, 2, 3, 4))
    assert open_checkpoint(path).state_dict["w"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("numel", "shape", "stride", "offset"),
    [
        (1 << 20, (1 << 20,), (1,), 0),
        (4, (1000,), (1,), 0),
        (4, (2**31 - 1, 2**31 - 1), (0, 0), 0),
        (4, (5,), (0,), 0),
        (4, (4,), (1,), 1),
        (4, (4,), (-1,), 3),
        (4, (2,), (1,), -1),
        (-1, (2,), (1,), 0),
        (4, (2, 2), (1,), 0),
        (4, (0, 2**31 - 1), (1, 1), 0),
        (4, (1,) * 9, (1,) * 9, 0),
    ],
)
def test_a_tensor_that_claims_more_than_the_file_has(
    tmp_path: Path, numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    path = archive(tmp_path / "a.pt", tensor_pickle(numel, shape, stride, offset), b"\0" * 16)
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(path)


def test_many_tensors_over_one_storage_share_it(tmp_path: Path) -> None:
    """A thousand copies of a storage would be a thousand times the file."""
    storage = torch.arange(1000.0)
    torch.save({f"w{i}": storage.view(10, 100).t() for i in range(1000)}, tmp_path / "a.pt")
    tensors = open_checkpoint(tmp_path / "a.pt").state_dict.values()
    assert len(tensors) == 1000
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {next(iter(tensors)).data_ptr()}


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.pt", tensor_pickle(1 << 22, (1 << 22,), (1,)), b"\0" * (1 << 24), compression=zipfile.ZIP_DEFLATED
    )
    assert path.stat().st_size < 1 << 18
    with pytest.raises(CheckpointError, match="compressed"):
        open_checkpoint(path)


def test_entries_on_top_of_each_other_are_refused(tmp_path: Path) -> None:
    """The central directory names the same megabyte a hundred times."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02}.")
        file.writestr("a/data/0", b"\0" * (1 << 20))
        first = file.getinfo("a/data/0")
        for i in range(1, 100):
            twin = zipfile.ZipInfo(f"a/data/{i}")
            for field in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(twin, field, getattr(first, field))
            file.filelist.append(twin)
    with pytest.raises(CheckpointError, match="more bytes than the file"):
        open_checkpoint(path)


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        warnings.simplefilter("ignore", UserWarning)
        file.writestr("a/data.pkl", b"\x80\x02}.")
        file.writestr("a/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="one name"):
        open_checkpoint(tmp_path / "a.pt")


def _doubling(levels: int) -> bytes:
    """`x = (x, x)`, over and over: linear in the file, exponential when it is walked."""
    return b"N" + b"q\x00h\x00\x86" * levels


def _module_of_itself() -> bytes:
    """A layer whose every child is itself."""
    modules = b"}q\x02(" + b"".join(_text(str(i)) + b"h\x01" for i in range(20)) + b"u"
    return b"\x80\x02ctorch.nn.modules.container\nSequential\n)\x81q\x01}" + _text("_modules") + modules + b"s" + b"b."


@pytest.mark.parametrize(
    "pickled",
    {
        "nested tuples": b"\x80\x02N" + b"\x85" * 100_000 + b".",
        "nested tuples as a key": b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",
        "doubling": b"\x80\x02}" + _text("names") + _doubling(60) + b"s.",
        "a module of itself": _module_of_itself(),
        "a list of itself": b"\x80\x02]q\x00h\x00a}" + _text("names") + b"h\x00s.",
        "empty stack": b"\x80\x020.",
        "no end": b"\x80\x02N",
        "empty": b"",
        "memo that was never set": b"\x80\x02h\x05.",
        "call of a number": b"\x80\x02K\x01)R.",
        "call of an instance": b"\x80\x02ctorch.nn.modules.conv\nConv2d\n)\x81)R.",
        "append to a tuple": b"\x80\x02)Na.",
        "items of a number": b"\x80\x02K\x01NNs.",
        "state of a class": b"\x80\x02ctorch.nn.modules.conv\nConv2d\n}b.",
        "a storage that is none": b"\x80\x02"
        + _tuple(_text("file"), _text("x"), _text("y"), _text("z"), _int(1))
        + b"Q.",
        "an ordered dict of numbers": b"\x80\x02ccollections\nOrderedDict\n]K\x01a\x85R.",
        "a huge string's length": b"\x80\x02X\xff\xff\xff\xff.",
        "not UTF-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_made_up_pickle_is_a_clear_error(tmp_path: Path, pickled: tuple[str, bytes]) -> None:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(archive(tmp_path / "a.pt", pickled[1]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "pickled",
    [
        b"(S'touch /tmp/x'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"cos\nsystem\n(S'true'\ntR.",  # protocol 0
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
    ],
    ids=["INST", "OBJ", "EXT1", "protocol 0", "STACK_GLOBAL"],
)
def test_rare_instructions_are_refused(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"os\.system|instruction"):
        open_checkpoint(archive(tmp_path / "a.pt", pickled))


@pytest.fixture(scope="module")
def small_pt() -> bytes:
    buffer = io.BytesIO()
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    torch.save({"model": model, "names": {0: "cat"}, "train_args": SimpleNamespace(imgsz=64)}, buffer)
    return buffer.getvalue()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_wrong_bytes_opens_or_says_why(small_pt: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small_pt)
    for _ in range(data.draw(st.integers(1, 4))):
        # Mostly inside the pickle and the directory, which is where the meaning is.
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.pt"
    path.write_bytes(damaged[: data.draw(st.integers(len(damaged) * 3 // 4, len(damaged)))])
    with contextlib.suppress(CheckpointError):
        open_checkpoint(path)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of pickletools
def test_a_pickle_with_wrong_bytes_opens_or_says_why(small_pt: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """The archive is put together anew, so that its checksums do not catch the damage first."""
    with zipfile.ZipFile(io.BytesIO(small_pt)) as whole:
        records = {name: whole.read(name) for name in whole.namelist()}
    (name,) = (n for n in records if n.endswith("data.pkl"))
    pickled = bytearray(records[name])
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        for record, content in records.items():
            file.writestr(record, bytes(pickled) if record == name else content)
    with contextlib.suppress(CheckpointError):
        open_checkpoint(path)


# ---- not weights at all -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello, I am no weights file\n", "text file"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "JPEG"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        (b"\x80", "not a kind of file"),
        (b"\x00\x01\x02\x03" * 20, "not a kind of file"),
        (b"PK\x03\x04 and no more", "damaged"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json}      ", "safetensors"),
    ],
)
def test_other_files_are_told_what_they_are(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_directory_onnx_and_other_zips(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="directory"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    with pytest.raises(CheckpointError, match="ONNX"):
        open_checkpoint(tmp_path / "a.onnx")
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    with pytest.raises(CheckpointError, match=r"zip archive, but not one"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_checkpoint_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"no weights \(its keys are epoch, lr\)"):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.getattr",
        "torch.load",
        "torch.nn.functional.conv2d",
        "torch.nn.modules.conv.os.system",
        "ultralytics.nn.tasks.attempt_load_weights",
        "ultralytics.utils.downloads.safe_download",
        "torch.hub.load",
        "numpy.load",
        "numpy.core.multiarray.frombuffer",
        "torch.nn.modules.conv.Ｃonv2d",
        "torch.FloatStorage\n",
    ],
)
def test_names_that_are_not_allowed(name: str) -> None:
    assert not is_allowed(name)
