"""COCO's JSON, as it is found on disks: layouts, names that lead elsewhere, and mistakes, which are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_dataset import annotation, document, write_dataset

from visionfast.errors import ImageNotFoundError, OptionError
from visionfast.verify_classes import match_classes
from visionfast.verify_dataset import read_dataset

IMAGES = {"b.jpg": (60, 80), "a.jpg": (30, 40)}
POLYGON = [[10, 20, 30, 20, 30, 30]]


def _touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_val.json", "val"),
        ("annotations/instances_val.json", "images/val"),
        ("annotations/instances_val.json", "images"),
        ("instances.json", "images"),
        ("instances_val.json", "."),
        ("_annotations.coco.json", "."),
    ],
)
def test_layouts(tmp_path: Path, file: str, images: str) -> None:
    write_dataset(tmp_path, document(IMAGES, [annotation(1, 2)]), file)
    _touch(tmp_path / images, "a.jpg")
    for given in (tmp_path, tmp_path / file):
        data = read_dataset(given)
        assert data.folder == tmp_path / images
        assert data.annotations == tmp_path / file
        assert data.path(data.images[0]) == tmp_path / images / "b.jpg"


def test_what_is_read(tmp_path: Path) -> None:
    things = [annotation(5, 2, category=3, iscrowd=1, area=7.5), annotation(9, 2, segmentation=POLYGON)]
    write_dataset(tmp_path, document(IMAGES, things))
    _touch(tmp_path / "val", "a.jpg")
    data = read_dataset(tmp_path)
    assert [(image.id, image.file_name, image.image_hw) for image in data.images] == [
        (1, "b.jpg", (60, 80)),
        (2, "a.jpg", (30, 40)),
    ]
    assert data.images[0].objects == ()
    crowd, other = data.images[1].objects
    assert (crowd.category_id, crowd.xywh, crowd.area, crowd.crowd) == (3, (10, 20, 20, 10), 7.5, True)
    assert other.segmentation is None  # not asked for
    assert not data.has_masks
    assert data.categories == {1: "kind 0", 2: "kind 1", 3: "kind 2"}


def test_a_limit_is_of_the_files_order_and_images_come_by_id(tmp_path: Path) -> None:
    content = document(IMAGES | {"c.jpg": (5, 5)}, [annotation(1, 2), annotation(2, 3)])
    content["images"].reverse()
    write_dataset(tmp_path, content)
    _touch(tmp_path / "val", "a.jpg", "c.jpg")
    data = read_dataset(tmp_path, limit=2)
    assert [image.file_name for image in data.images] == ["a.jpg", "c.jpg"]
    assert [len(image.objects) for image in data.images] == [1, 1]


@pytest.mark.parametrize(
    "name",
    ["../a.jpg", "/a.jpg", "x/../../a.jpg", "C:\\a.jpg", "\\\\host\\a.jpg", "..\\a.jpg", "a\0.jpg", "", " "],
)
def test_a_name_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    _touch(tmp_path, "a.jpg")
    write_dataset(tmp_path / "set", document({name: (30, 40), "a.jpg": (30, 40)}))
    _touch(tmp_path / "set" / "val", "a.jpg")
    data = read_dataset(tmp_path / "set")
    with pytest.raises(ImageNotFoundError, match="leads elsewhere"):
        data.path(data.images[0])
    assert data.path(data.images[1]).is_file()  # the others are not harmed


def test_names_may_be_paths_and_links(tmp_path: Path) -> None:
    _touch(tmp_path / "store", "picture")
    write_dataset(tmp_path / "set", document({"sub/a..b.jpg": (30, 40)}))
    (tmp_path / "set" / "val" / "sub").mkdir()
    (tmp_path / "set" / "val" / "sub" / "a..b.jpg").symlink_to(tmp_path / "store" / "picture")
    data = read_dataset(tmp_path / "set")
    assert data.path(data.images[0]).is_file()


def _fails(tmp_path: Path, content: Any, *words: str, **options: Any) -> None:
    write_dataset(tmp_path, content)
    _touch(tmp_path / "val", "a.jpg")
    with pytest.raises(OptionError) as raised:
        read_dataset(tmp_path, **options)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_id": 3}, ("annotation 4: image_id", "got 3")),
        ({"image_id": True}, ("image_id", "got True")),
        ({"category_id": 9}, ("category_id", "got 9")),
        ({"bbox": [1, 2, 3]}, ("bbox", "[left, top, width, height]")),
        ({"bbox": [1, 2, -3, 4]}, ("bbox",)),
        ({"bbox": [1, 2, float("nan"), 4]}, ("bbox", "nan")),
        ({"bbox": [10**400, 2, 3, 4]}, ("bbox", "[1000")),
        ({"area": 10**400}, ("area", "1000")),
        ({"bbox": [1, 2, "3", 4]}, ("bbox",)),
        ({"bbox": None}, ("bbox",)),
        ({"area": float("inf")}, ("area",)),
        ({"area": None}, ("area",)),
        ({"iscrowd": 2}, ("iscrowd", "0 or 1")),
        ({"segmentation": [[1, 2, 3, 4]]}, ("segmentation", "three corners")),
        ({"segmentation": [[1, 2, 3, 4, 5, 6e9]]}, ("segmentation", "in pixels")),
        ({"segmentation": [[1, 2, 3, 4, 5, float("nan")]]}, ("segmentation", "in pixels")),
        ({"segmentation": [[1, 1, 1e5, 1e5, -1e5, 3] * 2000]}, ("segmentation", "around")),
        ({"segmentation": "polygon"}, ("segmentation", "polygons or run lengths")),
        ({"segmentation": {"size": [30, 40], "counts": [100]}}, ("1200 pixels in all",)),
        ({"segmentation": {"size": [30], "counts": [30]}}, ("their size",)),
        ({"segmentation": {"size": [40, 30], "counts": [1200]}}, ("for 30×40 pixels", "(40, 30)")),
    ],
)
def test_a_bad_annotation(tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    thing = annotation(4, 2, segmentation=POLYGON) | fields
    _fails(tmp_path, document(IMAGES, [thing]), "instances_val.json", *words, masks=True)


def test_other_mistakes(tmp_path: Path) -> None:
    good = document(IMAGES)
    _fails(tmp_path, [], "an object, got list")
    _fails(tmp_path, good | {"images": []}, "images: expected at least one")
    _fails(tmp_path, good | {"images": None}, "images: expected a list")
    _fails(tmp_path, good | {"annotations": [3]}, "annotations: expected a list of objects")
    _fails(tmp_path, good | {"images": [{"id": 1, "file_name": 5}]}, "image 1: file_name")
    _fails(tmp_path, good | {"images": [{"id": "x", "file_name": "a.jpg"}]}, "images[0]: id", "'x'")
    _fails(tmp_path, good | {"images": good["images"][:1] * 2}, "images[1]: id: expected each once")
    _fails(tmp_path, good | {"images": [{"id": 1, "file_name": "a.jpg", "height": 0, "width": 3}]}, "(0, 3)")
    _fails(tmp_path, good | {"categories": [{"id": 1, "name": " "}]}, "category 1: name")
    some = [annotation(1, 1, segmentation=POLYGON), annotation(2, 1)]
    _fails(tmp_path, document(IMAGES, some), "for every one or for none", "1 without", masks=True)
    unsized = document(IMAGES, [annotation(1, 1, segmentation=POLYGON)])
    unsized["images"] = [{"id": 1, "file_name": "a.jpg"}]
    _fails(tmp_path, unsized, "image 1: height, width", masks=True)
    (tmp_path / "annotations" / "instances_val.json").write_text('{"images": [')
    with pytest.raises(OptionError, match="damaged"):
        read_dataset(tmp_path)


def test_which_file_and_which_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"instances_\*\.json"):
        read_dataset(tmp_path)
    write_dataset(tmp_path, document(IMAGES))
    with pytest.raises(OptionError, match="name their folder"):
        read_dataset(tmp_path)
    _touch(tmp_path / "elsewhere", "a.jpg")
    assert read_dataset(tmp_path, images=tmp_path / "elsewhere").folder == tmp_path / "elsewhere"
    with pytest.raises(OptionError, match="expected the images' folder"):
        read_dataset(tmp_path, images=tmp_path / "nowhere")
    (tmp_path / "annotations" / "instances_train.json").write_text(json.dumps(document(IMAGES)))
    with pytest.raises(OptionError, match=r"instances_train\.json, annotations/instances_val\.json; name the one"):
        read_dataset(tmp_path)


def test_classes_by_name() -> None:
    match = match_classes(["person", "Traffic-Light", "ghost"], {90: "traffic light", 1: "person", 5: "kite"})
    assert match.categories == {0: 1, 1: 90}
    assert match.without_category == ("ghost",)
    assert match.without_class == ("kite",)


def test_names_that_say_nothing() -> None:
    with pytest.raises(OptionError, match=r"no name in common; the engine has cat, the data set dog, \\x1b\[2J"):
        match_classes(["cat"], {1: "dog", 2: "\x1b[2J"})
    with pytest.raises(OptionError, match="the data set has two that are called 'Hot_Dog'"):
        match_classes(["hot dog"], {1: "hot dog", 2: "Hot_Dog"})
    with pytest.raises(OptionError, match="the engine has two"):
        match_classes(["item", "item"], {1: "item"})
    with pytest.raises(OptionError, match="no name in common"):
        match_classes(["cat"], {})
