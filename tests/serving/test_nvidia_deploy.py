"""What `deploy` writes and prints for NVIDIA's container, and which engines it refuses."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dali_message import on_the_cpu
from nvidia_double import tensorrt_engine

from visionfast import artifacts
from visionfast.errors import ArtifactError, BackendUnavailableError, CertificateError, OptionError

pytest.importorskip("tritonclient.grpc", reason="config.pbtxt is made with tritonclient: visionfast[triton]")
pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

from visionfast.cli_deploy import deploy_verb
from visionfast.serving import container
from visionfast.serving.container import commands
from visionfast.serving.metadata import manifest_of
from visionfast.serving.pbtxt import read_config
from visionfast.serving.repository import deploy, rollback, versions
from visionfast.serving.scheduling import Scheduling


@pytest.fixture
def plan(copied_engine: Path) -> Path:
    return tensorrt_engine(copied_engine, copied_engine.parents[1] / "planned" / "tensorrt-fp32-sm89")


@pytest.fixture
def rtx(copied_engine: Path) -> Path:
    return tensorrt_engine(copied_engine, copied_engine.parents[1] / "rtx" / "sm89", backend="tensorrt-rtx", batch=4)


def nvidia(engine: Path, **options: Any) -> Path:
    return deploy(engine, **{"name": "gpu", "target": "nvidia", "layout": "ensemble", "uncertified": True} | options)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_an_ensemble_s_models_each_have_what_their_backend_runs(plan: Path) -> None:
    folder = nvidia(plan)
    assert files(folder) == sorted(
        ["Dockerfile", "gpu_preprocess/warmup/encoded", "gpu_preprocess/1/model.dali", "gpu_engine/1/model.plan"]
        + ["gpu_engine/1/engine/engine.json", "gpu_engine/1/engine/model.engine"]
        + [f"gpu_{role}/1/model.py" for role in ("intake", "postprocess")]
        + [f"gpu{step}/{version}config.pbtxt" for version in ("", "1/") for step in
           ("", "_intake", "_preprocess", "_engine", "_postprocess")]
    )  # fmt: skip
    assert (folder / "gpu_engine/1/model.plan").read_bytes() == (plan / "model.engine").read_bytes()
    for role in ("intake", "postprocess"):
        module = "device_postprocess" if role == "postprocess" else role
        assert f"stages.{module} import" in (folder / f"gpu_{role}/1/model.py").read_text()
        told = read_config((folder / f"gpu_{role}/config.pbtxt").read_text()).parameters
        place = folder / f"gpu_{role}/1" / told["engine"].string_value
        assert artifacts.read_manifest(place, verify=True) == artifacts.read_manifest(plan)
    whole = read_config((folder / "gpu/config.pbtxt").read_text()).parameters
    assert manifest_of({key: value.string_value for key, value in whole.items()}).backend == "tensorrt"


def test_the_deployed_graph_runs_on_the_warm_up_s_image(plan: Path) -> None:
    import nvidia.dali as dali

    folder = nvidia(plan, scheduling=Scheduling(max_batch=3))
    graph = (folder / "gpu_preprocess/1/model.dali").read_bytes()
    pipeline = dali.Pipeline.deserialize(on_the_cpu(graph), prefetch_queue_depth=1)
    pipeline.build()
    assert pipeline.max_batch_size == 3
    sample = np.frombuffer((folder / "gpu_preprocess/warmup/encoded").read_bytes(), np.uint8)
    (warm,) = read_config((folder / "gpu_preprocess/config.pbtxt").read_text()).model_warmup
    assert list(warm.inputs["encoded"].dims) == list(sample.shape)
    pipeline.feed_input("encoded", [sample] * 3)
    images, decoded_hw, told = (output.as_array() for output in pipeline.run())
    spec = artifacts.read_manifest(plan).spec
    assert (images.shape[1:], images.dtype.name) == (spec.graphs[0].inputs[0].shape[1:], "float32")
    assert (decoded_hw.tolist(), told.tolist()) == ([[1, 1]] * 3, [[0, 1, 1, 0, 0]] * 3)


def test_versions_of_different_targets_stand_beside_one_another(plan: Path, copied_engine: Path) -> None:
    folder = nvidia(plan, image="registry.example/triton:1")
    first = (folder / "gpu_preprocess/1/model.dali").read_bytes()
    nvidia(plan, image="registry.example/triton:2")
    assert "FROM registry.example/triton:2\n" in (folder / "Dockerfile").read_text()
    deploy(copied_engine, name="gpu", uncertified=True)
    assert versions(folder) == (3, (1, 2, 3))
    assert [path.name for path in folder.iterdir() if (path / "config.pbtxt").is_file()] == ["gpu"]
    assert rollback("gpu") == 2
    assert sum((path / "config.pbtxt").is_file() for path in folder.iterdir()) == 5
    assert (folder / "gpu_preprocess/1/model.dali").read_bytes() == first


def test_a_fused_pipeline_brings_the_session_s_own_packages(plan: Path, rtx: Path) -> None:
    folder = nvidia(rtx, layout="fused")
    assert files(folder) == [
        "Dockerfile",
        "gpu/1/config.pbtxt",
        "gpu/1/engine/engine.json",
        "gpu/1/engine/model.engine",
        "gpu/1/model.py",
        "gpu/config.pbtxt",
    ]
    assert "stages.fused_gpu import" in (folder / "gpu/1/model.py").read_text()
    assert "'visionfast[gpu,dali]==" in (text := (folder / "Dockerfile").read_text())
    assert "'tensorrt-rtx-cu13==10.13.3.9'" in text
    assert "'tensorrt-cu13==10.13.3.9'" in (nvidia(plan, layout="fused", name="b") / "Dockerfile").read_text()
    text = (nvidia(plan, name="c") / "Dockerfile").read_text()
    assert f"FROM {container.IMAGE}\n" in text
    assert "'visionfast[gpu]==" in text
    assert "tensorrt" not in text.partition("FROM")[2]  # the container's own loads the plan


def test_openvino_s_backend_gets_its_files_and_no_python(copied_engine: Path) -> None:
    folder = deploy(copied_engine, name="o", layout="ensemble", engine_backend="openvino", uncertified=True)
    place = folder / "o_engine/1"
    for file in ("model.xml", "model.bin"):
        assert (place / file).read_bytes() == (copied_engine / file).read_bytes()
    assert not (place / "model.py").exists()
    assert "visionfast==" in (folder / "Dockerfile").read_text()


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
def test_an_engine_for_a_cpu_is_refused(copied_engine: Path, layout: str) -> None:
    with pytest.raises(OptionError, match="an engine for the cpu; target nvidia runs those for a GPU"):
        nvidia(copied_engine, layout=layout)


def test_an_engine_that_no_backend_of_triton_s_loads_is_refused_for_an_ensemble(rtx: Path, plan: Path) -> None:
    single = tensorrt_engine(plan, rtx.parent / "single", backend="tensorrt-rtx")
    with pytest.raises(OptionError, match="an engine of tensorrt-rtx, which the server's TensorRT backend does not"):
        nvidia(single)
    with pytest.raises(OptionError, match="target cpu runs those for the cpu"):
        nvidia(plan, target="cpu")
    manifest = artifacts.read_manifest(plan)
    (graph,) = manifest.spec.graphs
    image = replace(graph.inputs[0], shape=(1, 320, 320, 3), dtype="uint8", layout="NHWC")
    levels = replace(manifest.spec, graphs=(replace(graph, inputs=(image,)),))
    artifacts.write_manifest(plan, replace(manifest, spec=levels))
    with pytest.raises(OptionError, match="takes NCHW float32 or float16, as DALI makes it, got NHWC uint8"):
        nvidia(plan)
    assert not artifacts.pipelines_home().exists()


def test_a_plan_without_a_certificate_needs_a_word(plan: Path) -> None:
    with pytest.raises(CertificateError, match="its certificate: not yet run on a device"):
        nvidia(plan, uncertified=False)


def test_without_dali_an_ensemble_says_what_to_install(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(BackendUnavailableError, match=r"install visionfast\[dali\]"):
        nvidia(plan)
    assert not list(artifacts.pipelines_home().glob("*"))


def test_by_a_model_s_name_the_engine_for_a_gpu_is_meant(plan: Path, copied_engine: Path) -> None:
    beside = copied_engine.parent / plan.name
    plan.rename(beside)
    assert nvidia(Path(copied_engine.parent.name)).name == "gpu"
    with pytest.raises(ArtifactError):
        nvidia(Path("nobody"))


def test_the_commands_serve_this_machine_alone(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = "registry.example/triton:3"
    deploy_verb(str(plan), name="My.gpu", target="nvidia", layout="ensemble", cache=True, uncertified=True, image=image)
    said = capsys.readouterr().out.splitlines()
    folder = artifacts.pipelines_home() / "My.gpu"
    assert said[0] == f"{folder}: version 1; NVIDIA's container serves it:"
    build, run = (shlex.split(line) for line in said[1:])
    assert build == ["docker", "build", "--tag", "visionfast-my.gpu", "-", "<", str(folder.resolve() / "Dockerfile")]
    assert run[:2] == ["docker", "run"]
    assert [run[i + 1] for i, word in enumerate(run) if word == "--gpus"] == ["all"]
    ports = [run[i + 1] for i, word in enumerate(run) if word == "-p"]
    assert ports == [f"127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002)]
    assert f"{folder.resolve()}:/models:ro" in run
    assert run[run.index("visionfast-my.gpu") + 1 :] == [
        "serve-models",
        "--disable-auto-complete-config",
        "--cache-config=local,size=67108864",
    ]
    assert f"FROM {image}\n" in (folder / "Dockerfile").read_text()


@pytest.mark.parametrize(("name", "served"), [("a..b", "a-b"), ("A_", "a"), ("a._-b-", "a-b"), ("a.b_c-d", "a.b_c-d")])
def test_an_image_has_a_name_that_docker_takes(name: str, served: str, tmp_path: Path) -> None:
    build, run = commands(tmp_path / name, gpu=True)
    assert f" --tag visionfast-{served} - <" in build
    assert f" visionfast-{served} serve-models " in run


def test_only_models_with_a_configuration_are_served(plan: Path, tmp_path: Path) -> None:
    """The server (Triton 2.51) does not start where another layout's version has left a model without."""
    for layout in ("ensemble", "fused"):
        folder = deploy(plan, name="both", target="nvidia", layout=layout, uncertified=True)  # type: ignore[arg-type]
    assert (folder / "both_engine").is_dir()
    served, program, server = tmp_path / "served", tmp_path / "serve-models", tmp_path / "bin" / "tritonserver"
    written = (folder / "Dockerfile").read_text().partition("RUN printf")[2]
    for place, here in (("/usr/local/bin/serve-models", program), ("/served", served), ("/models", folder)):
        written = written.replace(place, str(here))
    subprocess.run(["sh", "-c", f"printf{written}"], check=True)
    server.parent.mkdir()
    server.write_text('#!/bin/sh\necho "$@"\n')
    server.chmod(0o755)
    environment = {"PATH": f"{server.parent}:{os.environ['PATH']}"}
    for _ in range(2):  # a container may be started again
        said = subprocess.run([program, "--flag"], env=environment, check=True, capture_output=True, text=True).stdout
        assert said == f"--model-repository={served} --flag\n"
        assert [model.name for model in served.iterdir()] == ["both"]
        assert (served / "both" / "config.pbtxt").is_file()


def test_a_container_for_a_pipeline_that_needs_none_is_refused(copied_engine: Path) -> None:
    with pytest.raises(OptionError, match="--image x: expected --target nvidia or --engine-backend openvino"):
        deploy_verb(str(copied_engine), image="x", uncertified=True)


def test_a_cpu_s_container_is_run_without_a_gpu(copied_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deploy_verb(str(copied_engine), name="o", layout="ensemble", engine_backend="openvino", uncertified=True)
    assert "docker run --rm" in (said := capsys.readouterr().out)
    assert "--gpus" not in said


def test_nothing_of_a_deployment_s_is_imported_to_serve() -> None:
    """The intake runs on a CPU, in a container that has no DALI for Python."""
    code = (
        "import sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('utils')\n"
        "import visionfast.serving.stages.intake\n"
        "unwanted = {'torch', 'nvidia.dali', 'ultralytics', 'onnx', 'openvino', 'tritonclient'} & set(sys.modules)\n"
        "assert not unwanted, unwanted\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
