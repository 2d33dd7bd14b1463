"""ImageNet's layouts: what is found in a folder, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluate_support import numbered, photographs
from r18.errors import UsageError
from r18.evaluate.sources import NO_LABELS, ImageSet, Item, find_images


def found(folder: Path, labels: str | Path | None = None, classes: int = 10) -> ImageSet:
    return find_images(folder, classes, labels)


def refused(match: str, folder: Path, labels: str | Path | None = None, classes: int = 10) -> None:
    with pytest.raises(UsageError, match=match):
        find_images(folder, classes, labels)


# -- layouts -----------------------------------------------------------------------------------


def test_images_alone_have_no_labels(tmp_path: Path) -> None:
    photographs(tmp_path, ["b.png", "a.JPEG", "c.webp"])
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no image")
    images = found(tmp_path)
    assert images.items == (Item("a.JPEG"), Item("b.png"), Item("c.webp"))
    assert images.layout == "no labels"
    assert images.path(images.items[0]) == tmp_path.resolve() / "a.JPEG"


def test_one_folder_per_class_counts_them_in_sorted_order(tmp_path: Path) -> None:
    names = ["n02/x.png", "n01/a.png", "n01/b.png", "n10/deeper/c.png"]
    images = found(photographs(tmp_path, names), classes=3)
    assert images.items == (
        Item("n01/a.png", 0),
        Item("n01/b.png", 0),
        Item("n02/x.png", 1),
        Item("n10/deeper/c.png", 2),
    )
    assert images.layout == "one folder for each of 3 classes"


def test_folders_may_be_named_by_class_index(tmp_path: Path) -> None:
    images = found(photographs(tmp_path, ["7/a.png", "10/b.png"]), classes=11)
    assert {item.file: item.label for item in images.items} == {"7/a.png": 7, "10/b.png": 10}


def test_folders_that_are_not_all_classes_are_no_labels(tmp_path: Path) -> None:
    photographs(tmp_path, ["n01/a.png", "n02/b.png"])
    refused(r"2 folders \(n01 … n02\).*10 classes: which is which", tmp_path)
    assert [item.label for item in found(tmp_path, NO_LABELS).items] == [None, None]


def test_the_folder_above_the_right_one_is_said_to_be_that(tmp_path: Path) -> None:
    photographs(tmp_path / "val", ["a.png"])
    refused(r"one folder \(val\), and the network has 10 classes: which", tmp_path)
    (tmp_path / "val" / "labels.csv").write_text("file,label\na.png,1\n")
    refused(r"'.*/val' holds a labels.csv: is that the folder\?", tmp_path)


def test_a_csv_names_the_images_and_their_classes(tmp_path: Path) -> None:
    photographs(tmp_path, ["a.png", "b,1.png", "left out.png"])
    text = 'class_name,Filename,class_index\nowl,a.png,3\n\n"great\nowl","b,1.png",4\n'
    (tmp_path / "labels.csv").write_text(text)
    images = found(tmp_path)
    assert images.items == (Item("a.png", 3), Item("b,1.png", 4))
    assert images.layout == "labels from labels.csv"
    assert images.left_out == 1
    assert found(tmp_path, NO_LABELS).left_out == 0


def test_a_flat_folder_with_a_label_file(tmp_path: Path) -> None:
    photographs(tmp_path, ["ILSVRC2012_val_00000001.png", "a name with spaces.png"])
    list_ = "ILSVRC2012_val_00000001.png 9\n\na name with spaces.png 0\n"
    (tmp_path / "val.txt").write_text(list_)
    expected = (Item("ILSVRC2012_val_00000001.png", 9), Item("a name with spaces.png", 0))
    assert found(tmp_path).items == expected
    elsewhere = tmp_path / "list"
    elsewhere.write_text(list_)
    (tmp_path / "val.txt").unlink()
    assert found(tmp_path, elsewhere).items == expected


def test_a_listed_file_that_is_missing_is_still_an_image(tmp_path: Path) -> None:
    photographs(tmp_path, ["a.png"])
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\ngone.png,2\n")
    assert found(tmp_path).items[1] == Item("gone.png", 2)


def test_the_shared_photographs(shared: Path) -> None:
    images = find_images(shared / "photos", 1000)
    assert len(images.items) == 500
    assert images.items[0] == Item("n01440764_tench.JPEG", 0)


# -- refusals ----------------------------------------------------------------------------------


def test_no_folder_and_no_image(tmp_path: Path) -> None:
    refused("no such folder", tmp_path / "none")
    refused(r"it holds no image\n.*\.jpg", tmp_path)
    file = tmp_path / "a.png"
    file.write_bytes(b"")
    refused("no folder; name the folder", file)


def test_ambiguous_folders(tmp_path: Path) -> None:
    photographs(tmp_path, ["a.png", "cats/b.png"])
    refused(r"images next to folders of images \(a.png, cats/b.png\).*which", tmp_path)
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\n")
    (tmp_path / "val.txt").write_text("a.png 1\n")
    refused("both labels.csv and val.txt", tmp_path)
    assert len(found(tmp_path, tmp_path / "val.txt").items) == 1
    assert len(found(tmp_path, NO_LABELS).items) == 2


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name,label\na.png,1\n", r"heading is name, label; one of its columns.* named file or"),
        (
            "file,colour\na.png,1\n",
            "one of its columns, which commas separate, must be named class_index",
        ),
        ("", "its heading is empty"),
        ("file,label\n", "it lists no image"),
        ("file,label\na.png\n", "line 2: 1 columns, the heading has 2"),
        ("file,label\na.png,owl\n", "line 2: 'owl' is no class index, counted from 0"),
        ("file,label\na.png,-1\n", "'-1' is no class index"),
        ("file,label\na.png,10\n", "'a.png' has class 10, the network's are 0 to 9"),
        ("file,label\na.png,1\na.png,1\n", "'a.png' is listed twice"),
        ("file,label\n../a.png,1\n", "'../a.png' leaves the folder"),
        ("file,label\n/etc/passwd,1\n", "'/etc/passwd' leaves the folder"),
        ("file,label\nb.png,1\n", "none of its 1 files is in .* such as 'b.png'"),
    ],
)
def test_a_damaged_csv_is_refused(tmp_path: Path, text: str, match: str) -> None:
    photographs(tmp_path, ["a.png"])
    (tmp_path / "labels.csv").write_text(text)
    refused(match, tmp_path)


def test_the_ground_truth_of_the_development_kit_is_refused(tmp_path: Path) -> None:
    """The development kit's ground truth is refused: it numbers classes differently."""
    photographs(tmp_path, ["a.png"])
    truth = tmp_path / "ILSVRC2012_validation_ground_truth.txt"
    truth.write_text("490\n361\n")
    refused(
        "line 1: expected FILE CLASS, got '490'\n.*a count of classes of its own", tmp_path, truth
    )


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    photographs(tmp_path, ["a.png"])
    refused("labels '.*none.csv': no such file; check the path", tmp_path, tmp_path / "none.csv")
    (tmp_path / "here.csv").write_text("file,label\na.png,1\n")
    refused("no such file; did you mean '.*/here.csv'?", tmp_path, "here.csv")
    refused("labels '.*': cannot be read: not a regular file, but a folder", tmp_path, tmp_path)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    refused("cannot be read", tmp_path, binary)


# -- the digest --------------------------------------------------------------------------------


def test_the_digest_is_of_paths_labels_and_sizes(tmp_path: Path) -> None:
    first = found(photographs(tmp_path / "one", numbered(3)))
    again = found(photographs(tmp_path / "two", numbered(3)))
    assert first.sha256 == again.sha256
    csv = tmp_path / "labels.csv"
    csv.write_text("file,label\n" + "".join(f"{name},1\n" for name in numbered(3)))
    assert found(tmp_path / "one", csv).sha256 != first.sha256
    with (tmp_path / "two" / numbered(3)[1]).open("ab") as stream:
        stream.write(b"x")
    assert found(tmp_path / "two").sha256 != first.sha256
