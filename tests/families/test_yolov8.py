"""YOLOv8 and YOLO11 from their checkpoints: the raw outputs are ultralytics' own, whatever file they came in."""

from __future__ import annotations

import copy
import functools
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from visionfast.checkpoint import open_checkpoint
from visionfast.errors import CheckpointError, OptionError, UnsupportedModelError
from visionfast.families import FAMILIES, LoadedModel, identify
from visionfast.families.yolov8_config import read_config

NAMES = {0: "cat", 1: "dog", 2: "emu"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seeded(yaml: str = "yolov8n.yaml", nc: int = 3) -> Any:
    return copy.deepcopy(_seeded(yaml, nc))


@functools.cache
def _seeded(yaml: str, nc: int) -> Any:
    """ultralytics' own model with random weights, and batch norms as if they had seen something."""
    from ultralytics.nn import tasks

    kinds = {
        "-seg": tasks.SegmentationModel,
        "-pose": tasks.PoseModel,
        "-obb": tasks.OBBModel,
        "-cls": tasks.ClassificationModel,
    }
    kind = next((k for suffix, k in kinds.items() if suffix in yaml), tasks.DetectionModel)
    torch.manual_seed(0)
    model = kind(yaml, nc=nc, verbose=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    model.names = {i: NAMES.get(i, f"n{i}") for i in range(nc)}
    model.task = next((s[1:] for s in kinds if s in yaml and s != "-seg"), "detect")
    return model.half().eval()


def save(model: Any, path: Path, **fields: Any) -> Path:
    torch.save({"model": model, "train_args": {"imgsz": 320}, "license": "AGPL-3.0", **fields}, path)
    return path


def load(path: Path, **options: Any) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    return identify(checkpoint).load(checkpoint, name="m", **options)


def outputs(module: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        out = module(images)
    return out if isinstance(out, tuple) else (out,)


def ultralytics_outputs(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its raw predictions (and prototypes), from the fused model in FP32, as its predictor runs it."""
    reference = model.float().eval().fuse(verbose=False)
    with torch.no_grad():
        predictions, *_ = reference(images)
    return predictions if isinstance(predictions, tuple) else (predictions,)


def assert_same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert [g.shape for g in got] == [e.shape for e in expected]
    for g, e in zip(got, expected, strict=True):
        assert float((g - e).abs().max()) <= 1e-4


# ---- parity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "architecture", "size_hw"),
    [
        ("yolov8n.yaml", "yolov8n", (320, 320)),
        ("yolov8n-seg.yaml", "yolov8n-seg", (192, 320)),
        ("yolov8s.yaml", "yolov8s", (96, 64)),
        ("yolo11n.yaml", "yolo11n", (160, 320)),
        ("yolo11m-seg.yaml", "yolo11m-seg", (64, 64)),
        ("yolov8n-p2.yaml", "yolov8n-p2", (64, 128)),
        ("yolov8n-p6.yaml", "yolov8n-p6", (128, 64)),
        ("yolov8n-ghost.yaml", "yolov8n", (64, 64)),
    ],
)
def test_raw_outputs_are_those_of_ultralytics(
    tmp_path: Path, yaml: str, architecture: str, size_hw: tuple[int, int]
) -> None:
    model = seeded(yaml)
    loaded = load(save(model, tmp_path / "a.pt"), size_hw=size_hw, batch=2)
    spec = loaded.spec
    assert (spec.architecture, spec.family, spec.name) == (architecture, "yolov8", "m")
    assert spec.task == ("segment" if "seg" in yaml else "detect")
    assert spec.class_names == ("cat", "dog", "emu")
    (graph,) = spec.graphs
    assert graph.inputs[0].shape == (2, 3, *size_hw)
    images = torch.rand(2, 3, *size_hw)
    got = outputs(loaded.modules[graph.name], images)
    assert [tuple(t.shape) for t in got] == [s.shape for s in graph.outputs]
    assert [s.name for s in graph.outputs] == ["predictions", "prototypes"][: len(got)]
    assert_same(got, ultralytics_outputs(model, images))


def test_real_weights(shared_data: Path, photographs: list[Path]) -> None:
    import cv2

    picture = cv2.resize(cv2.imread(str(photographs[0])), (640, 640))[..., ::-1]
    images = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float() / 255
    for name in ("yolov8n-coco", "yolov8n-seg-coco"):
        path = shared_data / "weights" / f"{name}.pt"
        loaded = load(path)
        assert loaded.spec.preprocess.size_hw == (640, 640)
        assert loaded.spec.strides == (8, 16, 32)
        assert len(loaded.spec.class_names) == 80
        got = outputs(loaded.modules["model"], images)
        assert_same(got, ultralytics_outputs(torch.load(path, weights_only=False)["model"], images))
        assert float(got[0][:, 4:84].max()) > 0.8  # it does see the bus


def test_loading_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    from ultralytics.nn.modules import Conv

    model = seeded()
    model.yaml["activation"] = "nn.LeakyReLU(0.1)"
    path = save(model, tmp_path / "a.pt")
    activation, state = Conv.default_act, torch.random.get_rng_state()
    load(path)
    assert Conv.default_act is activation
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not logging.getLogger("ultralytics").disabled


def test_nothing_is_printed(tmp_path: Path) -> None:
    """Also where ultralytics writes its settings for the first time."""
    path = save(seeded(), tmp_path / "a.pt")
    code = (
        "import sys; from visionfast.checkpoint import open_checkpoint; from visionfast.families import identify\n"
        "c = open_checkpoint(sys.argv[1]); identify(c).load(c, name='m')"
    )
    environment = {"YOLO_CONFIG_DIR": str(tmp_path / "config"), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- other files of the same weights ----------------------------------------------------------------------


def _wrapped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.model.{k}": v for k, v in state.items()}


@pytest.mark.parametrize("yaml", ["yolov8n.yaml", "yolov8s-seg.yaml", "yolo11n-seg.yaml", "yolo11m.yaml"])
def test_architecture_of_a_state_dict_is_read_from_its_shapes(tmp_path: Path, yaml: str) -> None:
    model = seeded(yaml, nc=5)
    torch.save(model.state_dict(), tmp_path / "yolov8x-wrong-name.pt")
    loaded = load(tmp_path / "yolov8x-wrong-name.pt", size_hw=(64, 64))
    assert loaded.spec.architecture == yaml.removesuffix(".yaml")
    assert loaded.spec.class_names == tuple(f"class_{i}" for i in range(5))
    assert load(tmp_path / "yolov8x-wrong-name.pt").spec.preprocess.size_hw == (640, 640)
    images = torch.rand(1, 3, 64, 64)
    assert_same(outputs(loaded.modules["model"], images), ultralytics_outputs(model, images))


def test_safetensors_and_prefixes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = seeded()
    state = {k: v.contiguous() for k, v in _wrapped(model.state_dict()).items()}
    save_file(state, tmp_path / "a.safetensors", metadata={"names": "{0: 'cat', 1: 'dog', 2: 'emu'}"})
    loaded = load(tmp_path / "a.safetensors", size_hw=(64, 64))
    assert loaded.spec.class_names == ("cat", "dog", "emu")
    images = torch.rand(1, 3, 64, 64)
    assert_same(outputs(loaded.modules["model"], images), ultralytics_outputs(model, images))


def test_batch_norm_that_was_folded_before_saving(tmp_path: Path) -> None:
    model = seeded("yolov8n-seg.yaml").float().fuse(verbose=False)
    loaded = load(save(model, tmp_path / "a.pt"), size_hw=(64, 64))
    images = torch.rand(1, 3, 64, 64)
    assert_same(outputs(loaded.modules["model"], images), ultralytics_outputs(model, images))


def test_batch_norms_own_eps_is_used(tmp_path: Path) -> None:
    model = seeded()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1
    images = torch.rand(1, 3, 64, 64)
    loaded = load(save(model, tmp_path / "a.pt"), size_hw=(64, 64))
    assert_same(outputs(loaded.modules["model"], images), ultralytics_outputs(model, images))


# ---- sizes and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imgsz", "expected"),
    [
        (320, (320, 320)),
        (300, (320, 320)),
        ([96, 160], (96, 160)),
        ([64], (64, 64)),
        (None, (640, 640)),
        ("640; rm", (640, 640)),
        (-5, (640, 640)),
        (10**9, (640, 640)),
        (True, (640, 640)),
    ],
)
def test_default_size_is_the_trainings(tmp_path: Path, imgsz: object, expected: tuple[int, int]) -> None:
    path = save(seeded(), tmp_path / "a.pt", train_args={"imgsz": imgsz})
    assert load(path).spec.preprocess.size_hw == expected


@pytest.mark.parametrize(
    ("size_hw", "nearest"),
    [((100, 64), "96x64 and 128x64"), ((0, 64), "32x64"), ((64, 10_000), "64x8192"), ((-32, 32), "32x32")],
)
def test_impossible_size_names_the_nearest(tmp_path: Path, size_hw: tuple[int, int], nearest: str) -> None:
    path = save(seeded(), tmp_path / "a.pt")
    with pytest.raises(OptionError, match=re.escape(nearest)):
        load(path, size_hw=size_hw)
    with pytest.raises(OptionError, match="batch"):
        load(path, batch=0)


def test_class_names_are_made_fit_to_print(tmp_path: Path) -> None:
    model = seeded()
    model.names = {0: "a\x1b[31m\n", 1: 7, 2: "é" * 500}
    names = load(save(model, tmp_path / "a.pt")).spec.class_names
    assert names[:2] == ("a?[31m?", "7")
    assert len(names[2]) <= 201


@pytest.mark.parametrize("names", [{0: "a", 1: "b"}, {0: "a", 1: "b", 3: "c"}, {"x": "a", 1: "b", 2: "c"}, "abc", []])
def test_class_names_that_do_not_fit_the_head(tmp_path: Path, names: Any) -> None:
    model = seeded()
    model.names = names
    with pytest.raises(CheckpointError, match="class names"):
        load(save(model, tmp_path / "a.pt"))


# ---- what is not handled ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("yolov8n-pose.yaml", "a YOLO pose model"),
        ("yolov8n-obb.yaml", "a YOLO obb model"),
        ("yolov8n-cls.yaml", "a YOLO classify model"),
        ("yolov10n.yaml", "YOLOv10 or YOLO26"),
        ("yolo26n-seg.yaml", "YOLOv10 or YOLO26"),
        ("yolov9t.yaml", "layer 2 is 'ELAN1'.*not one of YOLOv8's"),
    ],
)
def test_other_tasks_and_families_are_named(tmp_path: Path, yaml: str, says: str) -> None:
    path = save(seeded(yaml), tmp_path / "a.pt")
    with pytest.raises(UnsupportedModelError, match=says) as raised:
        load(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"model.24.anchors": torch.zeros(3, 3, 2)}, "YOLOv5 or YOLOv7"),
        ({"model.28.dec_score_head.0.weight": torch.zeros(2)}, "RT-DETR"),
        ({"layer1.weight": torch.zeros(2)}, "no known model family"),
    ],
)
def test_foreign_state_dicts_are_named(tmp_path: Path, state: dict[str, torch.Tensor], says: str) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UnsupportedModelError, match=f"{says}.*YOLOv8 and YOLO11"):
        load(tmp_path / "a.pt")


def _drop(state: dict[str, torch.Tensor]) -> None:
    del state["model.4.cv1.conv.weight"]


def _add(state: dict[str, torch.Tensor]) -> None:
    state["model.4.extra.weight"] = torch.zeros(1)


def _reshape(state: dict[str, torch.Tensor]) -> None:
    state["model.4.cv1.conv.weight"] = torch.zeros(3, 3)


@pytest.mark.parametrize("change", [_drop, _add, _reshape])
def test_weights_must_match_exactly(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = dict(seeded().state_dict())
    change(state)
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UnsupportedModelError, match=r"4\.(cv1|extra)"):
        load(tmp_path / "a.pt")
    torch.save({"state_dict": state, "yaml": seeded().yaml}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"4\.(cv1|extra)"):
        load(tmp_path / "b.pt")


# ---- a hostile architecture -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [
        "__import__('pathlib').Path({canary!r}).touch()",
        "nn.ReLU(__import__('pathlib').Path({canary!r}).touch())",
        "nn.ReLU((lambda: open({canary!r}, 'w'))())",
        "nn.Module.__subclasses__()",
        "nn.SiLU(); open({canary!r}, 'w')",
        "nn.ReLU(*[1])",
        "nn.ReLU(inplace=__name__)",
        "nn.Conv2d(1)",
        7,
        ["nn.ReLU()"],
        "nn.ReLU(" + "9" * 90 + ")" * 9,
    ],
)
def test_a_hostile_activation_is_not_evaluated(tmp_path: Path, activation: Any) -> None:
    canary = tmp_path / "canary"
    model = seeded()
    model.yaml["activation"] = activation.format(canary=str(canary)) if isinstance(activation, str) else activation
    path = save(model, tmp_path / "a.pt")
    with pytest.raises(UnsupportedModelError, match="activation") as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("nn.LeakyReLU(0.1)", "torch.nn.LeakyReLU(0.1)"),
        ("torch.nn.ReLU()", "torch.nn.ReLU()"),
        ("nn.SiLU(inplace=True)", "torch.nn.SiLU(inplace=True)"),
        ("nn.LeakyReLU( -0.1 )", None),
    ],
)
def test_an_ordinary_activation_is_written_anew(given: str, written: str | None) -> None:
    raw = {**seeded().yaml, "activation": given}
    if written is None:
        with pytest.raises(UnsupportedModelError):
            read_config(raw, "a.pt")
    else:
        assert read_config(raw, "a.pt").yaml["activation"] == written


def test_an_activation_takes_effect(tmp_path: Path) -> None:
    from ultralytics.nn.tasks import DetectionModel

    raw = {**seeded().yaml, "activation": "torch.nn.LeakyReLU(0.1)"}
    torch.manual_seed(0)
    model = DetectionModel(raw, nc=3, verbose=False).eval()
    images = torch.rand(1, 3, 64, 64)
    loaded = load(save(model, tmp_path / "a.pt"), size_hw=(64, 64))
    assert_same(outputs(loaded.modules["model"], images), ultralytics_outputs(model, images))


def _layer(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(yaml: dict[str, Any]) -> None:
        yaml["backbone"][index] = value

    return change


def _field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(yaml: dict[str, Any]) -> None:
        yaml[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _layer(0, [-1, 1, "os.system", [64, 3, 2]]),
        _layer(0, [-1, 1, "nn.Fold", [64, 3, 2]]),
        _layer(0, [-1, 1, "torchvision.ops.MLP", [64, 3, 2]]),
        _layer(0, [-1, 1, "parse_model", [64, 3, 2]]),
        _layer(0, [-1, 1, ["Conv"], [64, 3, 2]]),
        _layer(0, [-1, 1, "Conv", ["__import__('os').system('true')", 3, 2]]),
        _layer(0, [-1, 1, "Conv", ["d", 3, 2]]),
        _layer(0, [-1, 1, "Conv", [10**9, 3, 2]]),
        _layer(0, [-1, 1, "Conv", [64, 10**6, 2]]),
        _layer(0, [-1, 1, "Conv", [64, float("nan"), 2]]),
        _layer(0, [-1, 1, "Conv", [64] * 9]),
        _layer(0, [-1, 10**9, "Conv", [64, 3, 2]]),
        _layer(0, [-1, True, "Conv", [64, 3, 2]]),
        _layer(0, [5, 1, "Conv", [64, 3, 2]]),
        _layer(1, [-9, 1, "Conv", [64, 3, 2]]),
        _layer(0, ["-1", 1, "Conv", [64, 3, 2]]),
        _layer(0, [-1, 1, "Conv"]),
        _layer(0, "Conv"),
        _layer(0, [-1, 1, "nn.Upsample", [None, 4096, "nearest"]]),
        _layer(0, [-1, 1, "Conv", [64, 3, 0]]),
        _layer(0, [-1, 1, "Concat", [1]]),
        _layer(0, [-1, 1, "Detect", ["nc"]]),
        _field("backbone", [[-1, 1, "Conv", [64, 3, 2]]] * 200),
        _field("backbone", "Conv"),
        _field("head", []),
        _field("nc", "80; import os"),
        _field("nc", 10**9),
        _field("ch", 1),
        _field("channels", 4),
        _field("scales", {"n": "abc"}),
        _field("scales", {"n": [0.33, 1e9, 1024]}),
        _field("scales", {"n": [float("nan"), 0.25, 1024]}),
        _field("reg_max", 10**9),
        _field("end2end", True),
    ],
)
def test_a_made_up_architecture_is_a_clear_error(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    model = seeded()
    model.yaml.pop("channels", None)
    change(model.yaml)
    path = save(model, tmp_path / "a.pt")
    with pytest.raises(CheckpointError) as raised:
        load(path)
    assert "\n" not in str(raised.value)


def test_a_huge_architecture_over_small_weights_costs_nothing(tmp_path: Path) -> None:
    """yolov8x sixteen times over would have 17 G parameters; the weights are held against it without memory."""
    model = seeded()
    model.yaml["scales"] = {"n": [1.0, 4.0, 8192]}
    with pytest.raises(CheckpointError, match="not those of its architecture"):
        load(save(model, tmp_path / "a.pt"))


def test_every_family_in_the_table_is_there() -> None:
    from visionfast.families import get_family

    assert {name: get_family(name).name for name in FAMILIES} == {name: name for name in FAMILIES}
