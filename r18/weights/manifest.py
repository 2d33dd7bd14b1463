"""The manifest: the single source of truth about exported weights, for readers in any language.

An export is a folder with `manifest.json` and one file for each tensor, its raw values in float32,
little-endian, row-major, with no header:

    {
      "version": 1, "dtype": "float32", "byte_order": "little", "layout": "NCHW",
      "model": "resnet18",
      "network": {"classes": 1000, "image_size": 224},
      "preprocess": {"resize": 256, "center_crop": 224, "mean": […], "std": […]},
      "tensors": [
        {"name": "conv1.weight", "path": "conv1.weight.bin", "shape": [64, 3, 7, 7],
         "layout": "OIHW", "kind": "conv_weight", "sha256": "…"},
        …
      ]
    }

The outer `layout` is that of the images, a tensor's its own: OIHW, OI or O. Names are
torchvision's. `kind` is conv_weight, bn_param, bn_buffer, fc_weight or fc_bias; `sha256` is of the
tensor's bytes. For an `.npz` or `.safetensors` file the same fields are in `NAME.json`, and `path`
is the name of the array in it.

A manifest may come from anywhere and is not trusted: everything it says is checked before the
first tensor is allocated, and each kind of damage has its own message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r18.atomic import check_free, new_folder
from r18.errors import ManifestError, R18Error, WeightsError, show, unknown
from r18.files import check_distinct, open_file, read_object
from r18.graph.ops import Linear
from r18.graph.resnet import NETWORKS, network
from r18.graph.schedule import IMAGE, Schedule
from r18.images.preprocess import Preprocess
from r18.weights.tensors import (
    Float32,
    Tensor,
    TensorFile,
    check_described,
    check_file,
    check_hash,
    check_names,
    check_sha256,
    check_values,
    inside,
    read_file,
    tensor_bytes,
    tensor_sha256,
)

if TYPE_CHECKING:
    from r18.weights.sources import Weights

MANIFEST = "manifest.json"
VERSION = 1
MAX_BYTES = 4 << 20
"""The largest manifest that is read; ResNet-34's has 50 KB."""

_CONSTANTS = {"version": VERSION, "dtype": "float32", "byte_order": "little", "layout": "NCHW"}
_FIELDS = (*_CONSTANTS, "model", "network", "preprocess", "tensors")


@dataclass(frozen=True)
class Entry:
    """One tensor of a manifest."""

    name: str
    path: str
    shape: tuple[int, ...]
    layout: str
    kind: str
    sha256: str

    @property
    def file(self) -> TensorFile:
        return TensorFile(self.name, self.path, self.shape, sha256=self.sha256)


Progress = Callable[[Entry], None]
"""Called with each tensor that was written."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says; checked in itself when read, against a schedule by `schedule`."""

    model: str
    classes: int
    image_size: int
    preprocess: Preprocess
    tensors: tuple[Entry, ...]

    @classmethod
    def of(cls, weights: Weights, schedule: Schedule, suffix: str = ".bin") -> Manifest:
        """The manifest of these weights, each tensor in a file of its name and `suffix`.

        Raises `WeightsError` when they are not the schedule's, or it is no whole network.
        """
        classes = [s.op.out_features for s in schedule.steps if isinstance(s.op, Linear)]
        if schedule.input != IMAGE or schedule.folds or not classes:
            raise WeightsError(
                f"only a whole network's weights can be exported, at fusion level 'none'; "
                f"'{schedule.name}' is a part of one, or fused"
            )
        size = schedule.input_shape[-1]
        if weights.preprocess.center_crop != size:
            raise WeightsError(
                f"the weights come with preprocessing to {weights.preprocess.center_crop} pixels, "
                f"'{schedule.name}' takes {size}; load them for this schedule"
            )
        where = f"weights '{weights.source}'"
        check_described({n: Tensor.of(array) for n, array in weights.items()}, schedule, where)
        check_values(weights, schedule, where)
        return cls(
            model=schedule.name,
            classes=classes[-1],
            image_size=size,
            preprocess=weights.preprocess,
            tensors=tuple(
                Entry(
                    name=name,
                    path=name + suffix,
                    shape=spec.shape,
                    layout=spec.layout,
                    kind=spec.kind,
                    sha256=tensor_sha256(weights[name]),
                )
                for name, spec in schedule.weight_specs.items()
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; `from_json` is the inverse."""
        return {
            **_CONSTANTS,
            "model": self.model,
            "network": {"classes": self.classes, "image_size": self.image_size},
            "preprocess": self.preprocess.to_json(),
            "tensors": [asdict(entry) | {"shape": list(entry.shape)} for entry in self.tensors],
        }

    def dumps(self) -> str:
        """The text of `manifest.json`: one line for each tensor."""
        data = self.to_json()
        tensors = ",\n".join(f"    {json.dumps(entry)}" for entry in data.pop("tensors"))
        head = "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in data.items())
        return f'{{\n{head}  "tensors": [\n{tensors}\n  ]\n}}\n'

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Check every field by itself. Raises `ManifestError`, which does not name the file."""
        data = _object(data, "a manifest")
        for name, known in _CONSTANTS.items():
            value = _field(data, name)
            if type(value) is not type(known) or value != known:
                raise ManifestError(f"{name} is {show(value)}, this r18 reads {known!r}")
        _only(data, _FIELDS, "field")
        shape = _object(_field(data, "network"), "network")
        _only(shape, ("classes", "image_size"), "field of network")
        try:
            preprocess = Preprocess.from_json(_field(data, "preprocess"))
        except R18Error as error:
            raise ManifestError(str(error)) from None
        image_size = _integer(_field(shape, "image_size", "network"), "network.image_size")
        if preprocess.center_crop != image_size:
            raise ManifestError(
                f"preprocess.center_crop is {preprocess.center_crop}, network.image_size is "
                f"{image_size}; they must be equal"
            )
        tensors = _field(data, "tensors")
        if not isinstance(tensors, list):
            raise ManifestError(f"tensors must be a list, got {show(tensors)}")
        entries = tuple(_entry(value, index) for index, value in enumerate(tensors))
        check_distinct("name", [entry.name for entry in entries], ManifestError)
        check_distinct("path", [entry.path for entry in entries], ManifestError)
        return cls(
            model=_text(_field(data, "model"), "model"),
            classes=_integer(_field(shape, "classes", "network"), "network.classes"),
            image_size=image_size,
            preprocess=preprocess,
            tensors=entries,
        )

    def schedule(self, wanted: Schedule | None = None) -> Schedule:
        """The schedule that the tensors serve, checked against it name by name.

        With `wanted`, that one, which may take images of another size; without it, the network
        that the manifest names. Raises `ManifestError`, which does not name the file.
        """
        if wanted is None:
            if self.model not in NETWORKS:
                raise unknown(
                    "model",
                    self.model,
                    NETWORKS,
                    hint="A network of your own: pass its schedule.",
                    error=ManifestError,
                )
            try:
                wanted = network(self.model, classes=self.classes, image_size=self.image_size)
            except R18Error as error:
                raise ManifestError(f"{self.model} cannot be built: {error}") from None
        elif wanted.name != self.model:
            raise ManifestError(f"it is of model {show(self.model)}, asked for '{wanted.name}'")
        check_names([e.name for e in self.tensors], wanted, error=ManifestError)
        for entry in self.tensors:
            spec = wanted.weight_specs[entry.name]
            for what in ("shape", "layout", "kind"):
                found, expected = getattr(entry, what), getattr(spec, what)
                if found != expected:
                    raise ManifestError(
                        f"tensor '{entry.name}': {what} is {show(_plain(found))}, "
                        f"{wanted.name} needs {_plain(expected)!r}"
                    )
        return wanted


@dataclass(frozen=True)
class Export:
    """A manifest and its tensors, all checked: float32, by name, in the schedule's order."""

    manifest: Manifest
    schedule: Schedule
    tensors: Mapping[str, Float32]


# -- Reading ---------------------------------------------------------------------------------


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, checked by itself. Raises `ManifestError`."""
    with _locating(path):
        return _parse(Path(path))


def read_manifest(folder: str | Path, schedule: Schedule | None = None) -> Export:
    """The tensors of an export, after every check of the manifest and of each file it lists.

    schedule: whose weights they must be; without it the network that the manifest names.

    Names, shapes, kinds, paths, file sizes and hashes are checked before a tensor is allocated,
    values afterwards. Files that the manifest does not list are ignored. Raises `ManifestError`.
    """
    with _locating(Path(folder) / MANIFEST):
        if not Path(folder).is_dir():
            raise ManifestError("no such folder")
        root = Path(folder).resolve()
        manifest = _parse(inside(root, MANIFEST, ManifestError))
        schedule = manifest.schedule(schedule)
        files = [entry.file for entry in manifest.tensors]
        paths = [check_file(root, file, ManifestError) for file in files]
        for file, path in zip(files, paths, strict=True):
            with open_file(path, file.nbytes) as stream:
                check_hash(file, hashlib.file_digest(stream, "sha256").hexdigest(), ManifestError)
        arrays = {file.name: read_file(root, file, ManifestError) for file in files}
        tensors = {name: arrays[name] for name in schedule.weight_specs}
        check_values(tensors, schedule, error=ManifestError)
        return Export(manifest, schedule, tensors)


@contextmanager
def _locating(path: str | Path) -> Iterator[None]:
    """Put the manifest's path before the message of whatever goes wrong inside."""
    try:
        yield
    except ManifestError as error:
        raise ManifestError(f"manifest '{path}': {error}") from None
    except OSError as error:
        raise ManifestError(f"manifest '{path}': cannot be read: {error}") from None


def _parse(path: Path) -> Manifest:
    return Manifest.from_json(read_object(path, MAX_BYTES, ManifestError))


# -- Writing ---------------------------------------------------------------------------------


def write_manifest(
    folder: str | Path,
    weights: Weights,
    schedule: Schedule,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Export the weights: `folder` appears whole, or stays as it was (see `r18.atomic`).

    overwrite: replace an export that is there. A folder with anything but an export in it is
               never replaced.
    progress:  called with each tensor that was written.

    Raises `ManifestError` when the folder exists or cannot be written, `WeightsError` when the
    weights are not the schedule's.
    """
    folder = Path(folder)
    manifest = Manifest.of(weights, schedule)
    check_free(folder, "export", MANIFEST, overwrite, load_manifest, ManifestError)
    try:
        with new_folder(folder, overwrite=overwrite) as draft:
            for entry in manifest.tensors:
                (draft / entry.path).write_bytes(tensor_bytes(weights[entry.name]))
                if progress is not None:
                    progress(entry)
            (draft / MANIFEST).write_text(manifest.dumps(), encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"cannot write '{folder}': {error}") from error
    return manifest


# -- Fields ----------------------------------------------------------------------------------


def _entry(value: object, index: int) -> Entry:
    what = f"tensors[{index}]"
    data = _object(value, what)
    names = tuple(field.name for field in fields(Entry))
    _only(data, names, f"field of {what}")
    texts = {n: _text(_field(data, n, what), f"{what}.{n}") for n in names if n != "shape"}
    shape = _field(data, "shape", what)
    if not isinstance(shape, list):
        raise ManifestError(f"{what}.shape must be a list of integers, got {show(shape)}")
    extents = tuple(_integer(extent, f"{what}.shape") for extent in shape)
    check_sha256(texts["sha256"], f"{what}.sha256", ManifestError)
    return Entry(shape=extents, **texts)


def _field(data: Mapping[str, object], name: str, of: str = "") -> object:
    if name not in data:
        raise ManifestError(f"the field '{name}'" + (f" of {of}" if of else "") + " is missing")
    return data[name]


def _only(data: Mapping[str, object], known: tuple[str, ...], kind: str) -> None:
    for name in data:
        if name not in known:
            raise unknown(kind, name[:80], known, error=ManifestError)


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ManifestError(f"{what} must be an object, got {show(value)}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ManifestError(f"{what} must be a text that is not empty, got {show(value)}")
    return value


def _integer(value: object, what: str) -> int:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ManifestError(
            f"{what} must be made of integers from 1 to 2^31 − 1, got {show(value)}"
        )
    return value


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


__all__ = [
    "MANIFEST",
    "Entry",
    "Export",
    "Manifest",
    "load_manifest",
    "read_manifest",
    "write_manifest",
]
