"""`visionfast client` on embedders and prompt segmenters: what `predict` says, from a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from visionfast.cli import app
from visionfast.errors import OptionError, QueueFullError
from visionfast.predict_prompts import Prompts
from visionfast.predict_served import run_served_detector, run_served_embedder, run_served_segmenter

if TYPE_CHECKING:
    from conftest import Served

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")

EVERYTHING = ("--everything", "--points-per-side", "4", "--score-threshold", "0", "--stability-threshold", "0")


def run(*arguments: str | Path) -> int:
    """Its exit code."""
    return int(app(list(map(str, arguments)), standalone_mode=False) or 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("embed", ()),
        ("embed", ("--shared-colours",)),
        ("prompt", ("--point", "300,200", "--point", "5,5:0", "--box", "2,3,700,500")),
        ("prompt", ("--box", "2,3,700,500", "--box", "9,9,60,70.5", "--multimask")),
        ("prompt", EVERYTHING),
    ],
    ids=str,
)
def test_as_predict(
    small_served: Callable[[str], Served],
    small_engines: dict[str, Path],
    photographs: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: tuple[str, ...],
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(photographs[0].read_bytes()[:9000])
    said: list[list[str]] = []
    for verb, folder in (
        (("predict", small_engines[name]), "here"),
        (("client", _url(small_served, name), name), "there"),
    ):
        code = run(*verb, *photographs, bad, "missing.jpg", *options, "--json", "-", "--save", tmp_path / folder)
        assert code == 1
        out, err = capsys.readouterr()
        records = [json.loads(line) for line in out.splitlines()]
        said.append([str({k: v for k, v in record.items() if k != "ms"}) for record in records])
        assert len(records) == 4
        assert ["error" in record for record in records] == [False, False, True, True]
        said[-1] += [line.rsplit(" (", 1)[0] for line in err.splitlines()]
    assert said[0] == said[1]
    pictures = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert pictures == ["bus.jpg", "zidane.jpg"]
    for picture in pictures:
        assert (tmp_path / "here" / picture).read_bytes() == (tmp_path / "there" / picture).read_bytes()


def _url(small_served: Callable[[str], Served], name: str) -> str:
    return small_served(name).http_url if name == "embed" else small_served(name).grpc_url


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("embed", ("--conf", "0.5"), "--conf: embed is for embed and takes none of the options of a detector's engine"),
        ("embed", ("--point", "3,4"), "--point: embed is for embed and takes none of the options of a SAM engine"),
        ("embed", ("--shared-colours",), "--shared-colours: goes with --save, whose pictures have them"),
        ("prompt", (), "prompt answers prompts: expected --point X,Y or --box X1,Y1,X2,Y2, or --everything"),
        ("prompt", ("--conf", "0.5", "--point", "3,4"), "--conf: prompt is for prompt-segment and takes none"),
        ("prompt", ("--point", "3,4", "--everything"), "--point with --everything: expected one of them"),
        ("prompt", ("--everything", "--multimask"), "--multimask: goes with --point or --box, got --everything"),
        ("prompt", ("--point", "3,4", "--min-area", "9"), "--min-area: goes with --everything, got --point"),
        ("prompt", ("--point", "3;4"), "point '3;4': expected X,Y"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(
    small_served: Callable[[str], Served], photographs: list[Path], name: str, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        run("client", small_served(name).grpc_url, name, photographs[0], *options)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("embed", ("--conf", "0.5"), "option 'conf': expected one of normalise for small, a model for embed"),
        ("embed", ("--image-cache-mb", "5"), "option 'image_cache_mb': expected one of normalise for small"),
        ("prompt", ("--normalise",), "option 'normalise': expected one of multimask, image_cache_mb for small"),
        ("prompt", ("--layout", "ensemble"), "layout ensemble: expected fused for prompt-segment"),
        ("embed", ("--layout", "ensemble"), "layout ensemble: expected fused for embed"),
    ],
    ids=str,
)
def test_options_that_a_deployment_has_not(
    small_engines: dict[str, Path], engine_home: Path, engine: str, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        run("deploy", small_engines[engine], "--uncertified", *options)
    assert str(caught.value).startswith(said)


def test_deployed_options_are_told(small_engines: dict[str, Path], engine_home: Path) -> None:
    for engine, options, told in (
        ("embed", ("--normalise",), '{"normalise": true}'),
        ("prompt", ("--multimask", "--image-cache-mb", "7"), '{"multimask": true, "image_cache_mb": 7}'),
    ):
        assert run("deploy", small_engines[engine], "--name", engine, "--uncertified", *options) == 0
        config = (engine_home / "pipelines" / engine / engine / "config.pbtxt").read_text()
        assert told.replace('"', '\\"') in config


def test_a_refused_request_ends_it(tmp_path: Path) -> None:
    """Of a client whose server takes no more: no file is passed over."""

    class Full:
        spec: Any = None
        class_names = ()

        def stream(self, paths: list[Path], **options: Any) -> Any:
            return iter([QueueFullError("full")])

        def segment(self, path: Path, **asked: Any) -> Any:
            raise QueueFullError("full")

    client: Any = Full()
    paths = [tmp_path / "a.jpg"]
    out = {"save": None, "json_to": None}
    with pytest.raises(QueueFullError):
        run_served_detector(client, paths, {}, **out)
    with pytest.raises(QueueFullError):
        run_served_segmenter(client, paths, Prompts(points=[(1, 2, 1)]), {}, priority="online", **out)
    client.spec = _embed_spec()
    client.embed_stream = client.stream
    with pytest.raises(QueueFullError):
        run_served_embedder(client, paths, priority="online", shared_colours=False, **out)


def _embed_spec() -> Any:
    from small_embedder import small_spec

    return small_spec()
