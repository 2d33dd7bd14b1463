"""The images to evaluate, and their labels, from a folder in one of ImageNet's layouts.

- A CSV with a heading: a column for the file and one for the class index; `labels.csv` in the
  folder, or any other by name.
- A list of lines `FILE CLASS`, as Caffe's `val.txt`: `val.txt` in the folder, or any other by name.
- One folder per class: the classes are the folders' names in sorted order, as torchvision's
  `ImageFolder` counts them, or what they say, where all of them are class indices.
- Otherwise images without labels.

Files in a list are evaluated and no others; one that does not exist counts as unreadable. Paths are
relative to the folder, with `/`.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from r18.errors import UsageError, plain
from r18.files import MOST_ROWS, TEXT_LIMIT, read_text

NO_LABELS = "none"
"""As a labels file: take the images of the folder, whatever it says about their classes."""
LISTS = ("labels.csv", "val.txt")
"""The lists that are found without being named."""
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff"),
    *(".bmp", ".gif", ".ppm", ".pgm", ".jp2", ".avif"),
)
FILE_COLUMNS = ("file", "filename", "path", "image")
CLASS_COLUMNS = ("class_index", "label", "class", "target")


@dataclass(frozen=True)
class Item:
    """An image: its path in the folder, and its class, where it is known."""

    file: str
    label: int | None = None


@dataclass(frozen=True)
class ImageSet:
    """The images of an evaluation, in order; each path once.

    layout: in words, how the labels were found. labels: the name of the list of labels; '' without
    one. left_out: images of the folder that this list does not have.
    """

    folder: Path
    items: tuple[Item, ...]
    layout: str
    labels: str = ""
    left_out: int = 0

    def path(self, item: Item) -> Path:
        return self.folder / item.file

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each file when it was first asked for; -1 where there is none."""
        found = {}
        for item in self.items:
            try:
                found[item.file] = self.path(item).stat().st_size
            except OSError:
                found[item.file] = -1
        return found

    @cached_property
    def sha256(self) -> str:
        """A digest over paths, labels and sizes: that of another set, or of other files, differs.

        Files are not read: of a million photographs that would take longer than classifying them.
        """
        digest = hashlib.sha256()
        for item in self.items:
            size = self.sizes[item.file]
            digest.update(f"{item.file}\0{item.label}\0{size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def find_images(folder: Path, classes: int, labels: str | Path | None = None) -> ImageSet:
    """The images of a folder for a network of `classes` classes.

    labels: a list to use, relative to here; `NO_LABELS` for none; None to find out.

    Raises `UsageError` for a folder that holds no image or more than one layout, and for a list
    that is damaged or not of these images.
    """
    if not folder.is_dir():
        what = "no folder" if folder.exists() else "no such folder"
        raise UsageError(f"images '{folder}': {what}; name the folder that holds the photographs")
    if labels == NO_LABELS:
        files = list(_images_below(folder))
        return _checked(folder, [Item(file) for file in files], "no labels", classes)
    if labels is not None:
        return _listed(folder, Path(labels), classes)
    lists = [folder / name for name in LISTS if (folder / name).is_file()]
    if len(lists) > 1:
        raise _ambiguous(folder, f"both {lists[0].name} and {lists[1].name}")
    if lists:
        return _listed(folder, lists[0], classes)
    files = list(_images_below(folder))
    flat = [file for file in files if "/" not in file]
    if flat and len(flat) < len(files):
        raise _ambiguous(folder, f"images next to folders of images ({flat[0]}, {files[-1]})")
    if flat or not files:
        return _checked(folder, [Item(file) for file in flat], "no labels", classes)
    return _by_folder(folder, files, classes)


def _ambiguous(folder: Path, found: str) -> UsageError:
    return UsageError(
        f"images '{folder}': it holds {found}; which says what is in it?\n"
        f"  name the list with --labels FILE, or --labels {NO_LABELS} for no labels at all"
    )


def _images_below(folder: Path) -> Iterator[str]:
    """Relative paths of the images, sorted, at any depth, without hidden files and folders."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(where).relative_to(folder)
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield (inside / name).as_posix()


def _checked(folder: Path, items: Sequence[Item], layout: str, classes: int) -> ImageSet:
    if not items:
        raise UsageError(
            f"images '{folder}': it holds no image\n"
            f"  files are known by their suffix: {', '.join(SUFFIXES)}"
        )
    for item in items:
        if item.label is not None and not 0 <= item.label < classes:
            raise UsageError(
                f"images '{folder}': '{plain(item.file)}' has class {item.label}, the network's "
                f"are 0 to {classes - 1}\n  classes are torchvision's, counted from 0; "
                f"--labels {NO_LABELS} compares without them"
            )
    return ImageSet(folder.resolve(), tuple(items), layout)


# -- one folder per class ----------------------------------------------------------------------


def _by_folder(folder: Path, files: Sequence[str], classes: int) -> ImageSet:
    names = sorted({file.partition("/")[0] for file in files})
    if all(name.isdecimal() and name.isascii() for name in names):
        index = {name: int(name) for name in names}
        layout = f"{len(names)} folders named by class index"
    elif len(names) == classes:
        index = {name: rank for rank, name in enumerate(names)}
        layout = f"one folder for each of {classes} classes"
    else:
        found = f"{len(names)} folders ({names[0]} … {names[-1]})"
        raise UsageError(
            f"images '{folder}': {found if len(names) > 1 else f'one folder ({names[0]})'}, and "
            f"the network has {classes} classes: which is which?\n"
            "  name the folders by class index, write a CSV and give it with --labels, or compare "
            f"without labels: --labels {NO_LABELS}" + _inside(folder, names)
        )
    items = [Item(file, index[file.partition("/")[0]]) for file in files]
    return _checked(folder, items, layout, classes)


def _inside(folder: Path, names: Sequence[str]) -> str:
    """A hint at a folder in it that has a list of its own."""
    for name in names:
        for known in LISTS:
            if (folder / name / known).is_file():
                return f"\n  '{folder / name}' holds a {known}: is that the folder?"
    return ""


# -- lists -------------------------------------------------------------------------------------


def _listed(folder: Path, path: Path, classes: int) -> ImageSet:
    try:
        lines = read_text(path, TEXT_LIMIT, "utf-8-sig")
    except FileNotFoundError:
        there = (folder / path).is_file()
        hint = f"; did you mean '{folder / path}'?" if there else "; check the path"
        raise UsageError(f"labels '{path}': no such file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"labels '{path}': cannot be read: {error}") from None
    read = _csv_items if path.suffix.lower() == ".csv" else _text_items
    items = read(path, lines)
    if not items:
        raise UsageError(f"labels '{path}': it lists no image")
    seen: set[str] = set()
    for item in items:
        parts = PurePosixPath(item.file)
        if parts.as_posix() in seen:
            raise UsageError(f"labels '{path}': '{plain(item.file)}' is listed twice; list it once")
        seen.add(parts.as_posix())  # ./a.png is a.png
        if parts.is_absolute() or ".." in parts.parts or Path(item.file).is_absolute():
            raise UsageError(
                f"labels '{path}': '{plain(item.file)}' leaves the folder; paths are relative to "
                "the folder of images"
            )
        if "\0" in item.file:
            raise UsageError(f"labels '{path}': '{plain(item.file)}' is the name of no file")
    if not any(os.path.exists(folder / item.file) for item in items):
        raise UsageError(
            f"labels '{path}': none of its {len(items)} files is in '{folder}', such as "
            f"'{plain(items[0].file)}'; paths are relative to the folder of images"
        )
    left_out = sum(file not in seen for file in _images_below(folder))
    found = _checked(folder, items, f"labels from {path.name}", classes)
    return replace(found, labels=path.name, left_out=left_out)


def _csv_items(path: Path, text: str) -> list[Item]:
    rows = csv.reader(StringIO(text, newline=""))
    try:
        return _items_of_rows(path, rows)
    except csv.Error as error:
        raise UsageError(f"labels '{path}', line {rows.line_num}: {plain(error)}") from None


def _items_of_rows(path: Path, rows: Any) -> list[Item]:
    heading = [name.strip().lower() for name in next(rows, [])]
    file, label = (_column(path, heading, known) for known in (FILE_COLUMNS, CLASS_COLUMNS))
    items: list[Item] = []
    for row in filter(None, rows):
        if len(row) <= max(file, label):
            raise UsageError(
                f"labels '{path}', line {rows.line_num}: {len(row)} columns, the heading has "
                f"{len(heading)}"
            )
        _add(path, items, Item(row[file], _class_of(path, rows.line_num, row[label])))
    return items


def _column(path: Path, heading: Sequence[str], known: Sequence[str]) -> int:
    found = [name for name in known if name in heading]
    if not found:
        raise UsageError(
            f"labels '{path}': its heading is {plain(', '.join(heading)) or 'empty'}; one of its "
            f"columns, which commas separate, must be named {' or '.join(known)}"
        )
    return heading.index(found[0])


def _text_items(path: Path, text: str) -> list[Item]:
    items: list[Item] = []
    for number, line in enumerate(StringIO(text, newline=None), start=1):
        if not line.strip():
            continue
        file, _, label = line.strip().rpartition(" ")
        if not file:
            raise UsageError(
                f"labels '{path}', line {number}: expected FILE CLASS, got "
                f"'{plain(line.strip())}'\n"
                "  ImageNet's own ground truth has a number a line, in a count of classes of its "
                "own; Caffe's val.txt, or a CSV, has what is needed"
            )
        _add(path, items, Item(file.strip(), _class_of(path, number, label)))
    return items


def _add(path: Path, items: list[Item], item: Item) -> None:
    if len(items) == MOST_ROWS:
        raise UsageError(f"labels '{path}': more than {MOST_ROWS:,} images; evaluate parts of them")
    items.append(item)


def _class_of(path: Path, line: int, text: str) -> int:
    if not (text.strip().isdecimal() and text.isascii() and len(text.strip()) < 10):
        raise UsageError(
            f"labels '{path}', line {line}: '{plain(text)}' is no class index, counted from 0"
        )
    return int(text)


__all__ = ["LISTS", "NO_LABELS", "ImageSet", "Item", "find_images"]
