"""The command line as a person meets it: real processes, real files, one line an error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch


def visionfast(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "visionfast.cli", *map(str, arguments)]
    environment = os.environ | {"VISIONFAST_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, check=False, timeout=300)


def _fails_in_one_line(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("visionfast: ")]
    assert done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one seeded yolov8n checkpoint (2 classes) and its OpenVINO engine at 128 pixels."""
    from ultralytics.nn.tasks import DetectionModel

    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    model = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
    model.names = {0: "cat", 1: "dog"}
    (folder / "models" / "tiny").mkdir(parents=True)
    content = {"model": model.half(), "ema": None, "train_args": {"imgsz": 128, "task": "detect"}, "epoch": -1}
    torch.save(content, folder / "models" / "tiny" / "tiny.pt")
    built = visionfast(folder, "build", "--model", "tiny")
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (90, 160, 3), dtype=np.uint8)
    path.write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    return path


def test_build_writes_a_certified_engine(home: Path) -> None:
    document = json.loads((home / "engines/tiny/openvino-fp32-cpu-128x128-b1/engine.json").read_text())
    assert document["certificate"]["status"] == "passed"
    assert document["spec"]["class_names"] == ["cat", "dog"]
    assert len(document["certificate"]["images"]) == 2
    assert not [p for p in (home / "engines/tiny").iterdir() if p.name.startswith(".")]


def test_predict_writes_json_and_pictures(home: Path, picture: Path, tmp_path: Path) -> None:
    done = visionfast(
        home, "predict", "tiny", picture, "--json", "-", "--save", tmp_path / "out", "--conf", "0.001", "--max-det", "7"
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["image_hw"] == [90, 160]
    assert set(record["ms"]) == {"decode", "preprocess", "engine", "postprocess"}
    assert 0 < len(record["detections"]) <= 7
    assert {d["class_name"] for d in record["detections"]} <= {"cat", "dog"}
    drawn = cv2.imread(str(tmp_path / "out" / "picture.jpg"))
    assert drawn.shape == (90, 160, 3)


def test_a_bad_file_among_good_ones(home: Path, picture: Path, tmp_path: Path) -> None:
    bad = tmp_path / "words.jpg"
    bad.write_text("these are words")
    out = tmp_path / "answers.jsonl"
    done = visionfast(home, "predict", "tiny", bad, picture, tmp_path / "missing.jpg", "--json", out)
    assert done.returncode == 1
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r.get("error", {}).get("kind") for r in records] == ["format", None, "not-found"]
    assert "2 of 3" in done.stderr
    assert "Traceback" not in done.stderr


def test_pictures_of_one_name_do_not_overwrite_one_another(home: Path, picture: Path, tmp_path: Path) -> None:
    sources = [tmp_path / name for name in ("a/x.png", "b/x.png", "c/x-2.png", "d/x.png")]
    for source in sources:
        source.parent.mkdir()
        shutil.copy(picture, source)
    done = visionfast(home, "predict", "tiny", *sources, "--save", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["x-2-2.jpg", "x-2.jpg", "x-3.jpg", "x.jpg"]


def test_one_bad_file_alone_is_one_line(home: Path, tmp_path: Path) -> None:
    _fails_in_one_line(visionfast(home, "predict", "tiny", tmp_path / "missing.jpg"), "missing.jpg")


def test_names_with_line_breaks(home: Path, picture: Path, tmp_path: Path) -> None:
    odd = tmp_path / "a\nb.png"
    shutil.copy(picture, odd)
    done = visionfast(home, "predict", "tiny", odd, tmp_path / "c\nd.png")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [str(tmp_path / "a\\nb.png")]
    assert [line.startswith("visionfast: ") for line in done.stderr.splitlines()] == [True, True]


def test_a_terminal_obeys_no_message(home: Path, tmp_path: Path) -> None:
    missing = visionfast(home, "predict", "tiny", tmp_path / "\x1b[2J\u202e.jpg")
    _fails_in_one_line(missing, "/\\x1b[2J\\u202e.jpg: ")
    _fails_in_one_line(visionfast(home, "show", "\x1b[2J"), "\\x1b[2J: no engine there")
    usage = visionfast(home, "show", "tiny", "\x1b[2J")
    assert usage.returncode == 2
    assert "\\x1b[2J" in usage.stderr
    assert "\x1b" not in missing.stderr + usage.stderr


def test_directories_and_patterns(home: Path, picture: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(picture) in visionfast(home, "predict", "tiny", tmp_path).stdout
    assert str(picture) in visionfast(home, "predict", "tiny", tmp_path / "*.png").stdout
    _fails_in_one_line(visionfast(home, "predict", "tiny", empty), "directory with images")
    _fails_in_one_line(visionfast(home, "predict", "tiny", tmp_path / "*.bmp"), "matches nothing")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build", "--model", "nothing.pt"), ("nothing.pt", "tiny")),
        (("build", "--model", "tiny", "--imgsz", "100"), ("multiple", "32")),
        (("build", "--model", "tiny", "--imgsz", "wide"), ("--imgsz wide",)),
        (("build", "--model", "tiny", "--backend", "onnx"), ("onnx", "openvino")),
        (("build", "--model", "tiny", "--precision", "int4"), ("int4", "fp32")),
        (("build", "--model", "tiny", "--backend", "openvino", "--gpu", "sm89"), ("--gpu",)),
        (("build", "--model", "tiny", "--gpu", "sm90"), ("sm90", "sm89")),
        (("build", "--model", "tiny", "--batch", "0"), ("batch",)),
        (("build", "--model", "tiny", "--images", "."), ("images",)),
        (("predict", "nothing", "x.jpg"), ("nothing", "engine")),
        (("predict", "models/tiny/tiny.pt", "x.jpg"), ("got weights",)),
        (("predict", "tiny", "x.jpg", "--conf", "2"), ("conf", "2")),
        (("predict", "tiny", "x.jpg", "--classes", "horse"), ("horse", "cat")),
        (("predict", "tiny", "x.jpg", "--classes", "9"), ("9",)),
        (("predict", "tiny", "x.jpg", "--threads", "0"), ("threads",)),
        (("predict", "tiny", "x.jpg", "--point", "3,4"), ("--point", "tiny is for detect", "SAM")),
        (("predict", "tiny", "x.jpg", "--everything"), ("--everything", "tiny is for detect")),
        (("show", "nothing"), ("nothing",)),
        (("build", "--model", "tiny", "--gpu", "sm89", "--gpu", "sm90"), ("sm90", "sm89")),
        (("certify", "nothing"), ("nothing", "engine")),
        (("certify", "tiny", "--model", "nothing"), ("nothing", "models")),
        (("certify", "tiny", "--images", "."), ("images",)),
        (("build", "--model", "tiny", "--imgsz", "²"), ("--imgsz ²",)),
        (("build", "--model", "tiny", "--gpu", ""), ("TensorRT-RTX compiles for", "sm89")),
        (("build", "--model", "tiny", "--gpu", "sm89", "--keep-fp32", "blocks.4,"), ("'blocks.4,'", "empty")),
        (("build", "--model", "tiny", "--gpu", "sm89", "--keep-fp32", "blocks.4, blocks.99"), ("'blocks.99'",)),
        (("build", "--model", "tiny", "--name", "../tiny"), ("'../tiny'",)),
        (("show", "a\nb"), ("a\\nb: no engine",)),
        (("fetch", "yolov9000"), ("yolov9000", "yolov8s-people")),
    ],
)
def test_every_mistake_is_one_line(home: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    _fails_in_one_line(visionfast(home, *arguments), *words)


def test_a_weights_file_that_is_not_one(home: Path, tmp_path: Path) -> None:
    for name, content in (("empty.pt", b""), ("words.pt", b"hello"), ("cut.safetensors", b"\0" * 20)):
        path = tmp_path / name
        path.write_bytes(content)
        _fails_in_one_line(visionfast(home, "build", "--model", path), name)
    assert sorted(p.name for p in (home / "engines").iterdir()) == ["tiny"]


def test_a_damaged_manifest(home: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(home / "engines/tiny/openvino-fp32-cpu-128x128-b1", tmp_path / "engine")
    manifest = engine / "engine.json"
    manifest.write_text(manifest.read_text()[:200])
    _fails_in_one_line(visionfast(home, "predict", engine, "x.jpg"), "engine.json", "damaged")


def test_certify_records_what_it_found(home: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(home / "engines/tiny/openvino-fp32-cpu-128x128-b1", tmp_path / "engine")
    before = json.loads((engine / "engine.json").read_text())
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (pictures / "noise.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())

    done = visionfast(home, "certify", engine, "--images", pictures)  # its weights are found under models/
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("certificate: passed on 1 images")
    assert done.stdout.splitlines()[-1] == str(engine)
    after = json.loads((engine / "engine.json").read_text())
    assert [entry["file"] for entry in after["certificate"]["images"]] == ["noise.png"]
    assert {key for key in after if after[key] != before[key]} == {"certificate"}

    other = tmp_path / "other.pt"
    other.write_bytes((home / "models/tiny/tiny.pt").read_bytes() + b"0")
    wrong = visionfast(home, "certify", engine, "--model", other)
    _fails_in_one_line(wrong, before["weights_sha256"], hashlib.sha256(other.read_bytes()).hexdigest())

    # Weights that the engine was not built from, and a manifest that says it was.
    content = torch.load(home / "models/tiny/tiny.pt", weights_only=False)
    content["model"].model[-1].cv3[0][-1].bias.data.zero_()  # every score is about a half
    torch.save(content, other)
    after["weights_sha256"] = hashlib.sha256(other.read_bytes()).hexdigest()
    (engine / "engine.json").write_text(json.dumps(after))
    failed = visionfast(home, "certify", engine, "--images", pictures, "--model", other)
    _fails_in_one_line(failed, "the certificate failed", "engine.json says so")
    assert failed.stdout.splitlines()[0].startswith("certificate: failed")
    assert json.loads((engine / "engine.json").read_text())["certificate"]["status"] == "failed"


def test_a_name_is_enough_where_one_engine_runs_here(home: Path, tmp_path: Path) -> None:
    here = home / "engines/tiny/openvino-fp32-cpu-128x128-b1"
    copied = shutil.copytree(here, tmp_path / "engines/tiny" / here.name)
    elsewhere = shutil.copytree(here, tmp_path / "engines/tiny/tensorrt-fp16-sm10-128x128-b1")
    document = json.loads((elsewhere / "engine.json").read_text()) | {"backend": "tensorrt", "device": "sm10"}
    (elsewhere / "engine.json").write_text(json.dumps(document))
    certified = visionfast(tmp_path, "certify", "tiny", "--model", home / "models/tiny/tiny.pt")
    assert certified.returncode == 0, certified.stderr
    assert certified.stdout.splitlines()[-1] == str(copied)
    assert str(copied) in visionfast(tmp_path, "show", "tiny").stdout
    shutil.copytree(here, tmp_path / "engines/tiny/second")
    several = visionfast(tmp_path, "show", "tiny")
    _fails_in_one_line(several, f"3 engines are there, 2 of them run here; give one of: tiny/{here.name}, ")
    assert elsewhere.name not in several.stderr


def test_an_engine_whose_certificate_failed_says_so(home: Path, picture: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(home / "engines/tiny/openvino-fp32-cpu-128x128-b1", tmp_path / "engine")
    document = json.loads((engine / "engine.json").read_text())
    document["certificate"]["status"] = "failed"
    (engine / "engine.json").write_text(json.dumps(document))
    done = visionfast(home, "predict", engine, picture)
    assert done.returncode == 0
    assert done.stderr == f"visionfast: {engine}: its certificate failed: it does not agree with PyTorch\n"


def test_usage_errors_exit_with_two(home: Path) -> None:
    done = visionfast(home, "predict")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(home: Path) -> None:
    done = visionfast(home, "--debug", "show", "nothing")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_list_show_and_doctor(home: Path) -> None:
    listed = visionfast(home, "list").stdout
    assert "models/tiny/tiny.pt" in listed
    (row,) = [line.split() for line in listed.splitlines() if "openvino-fp32-cpu-128x128-b1" in line]
    assert row[1:] == ["yolov8n", "detect", "passed", "yes"]
    shown = visionfast(home, "show", "tiny").stdout
    assert "yolov8n" in shown
    assert "passed" in shown
    assert "kept in FP32" not in shown
    assert "layers" not in shown
    doctor = visionfast(home, "doctor").stdout
    assert "openvino" in doctor
    assert f"PyTorch  {torch.__version__.split('+')[0]}" in doctor
    assert [line.split()[0] for line in doctor.splitlines() if line.startswith(("Triton ", "DALI "))] == [
        "Triton",
        "DALI",
    ]


def test_the_list_of_commands_has_whole_sentences(home: Path) -> None:
    listed = visionfast(home, "--help").stdout.partition("Commands:")[2].split("\n")
    commands = [line.strip() for line in listed if line.strip()]
    assert len(commands) >= 16
    assert [line for line in commands if not line.endswith((".", "`"))] == []
    assert [line for line in commands if line.endswith("...")] == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, visionfast, visionfast.cli; "
        "print([m for m in ('torch','cv2','openvino','numpy','rich.table','PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
