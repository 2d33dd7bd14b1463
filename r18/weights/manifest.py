"""The manifest: the single source of truth about exported weights, for readers in any language.

An export is a folder with `manifest.json` and one file for each tensor, its raw values in float32,
little-endian, row-major, with no header:

    {
      "version": 1, "dtype": "float32", "byte_order": "little", "layout": "NCHW",
      "model": "resnet18",
      "network": {"classes": 1000, "image_size": 224},
      "preprocess": {"resize": 256, "center_crop": 224, "mean": […], "std": […]},  (1)
      "tensors": [
        {"name": "conv1.weight", "path": "conv1.weight.bin", "shape": [64, 3, 7, 7],
         "layout": "OIHW", "kind": "conv_weight", "sha256": "…"},
        …
      ]
    }

(1) and `"interpolation": "bicubic"` where images are resized by that filter, not bilinear.

The outer `layout` is that of the images, a tensor's its own: OIHW, OI or O. Names are
torchvision's. `kind` is conv_weight, bn_param, bn_buffer, fc_weight or fc_bias; `sha256` is of the
tensor's bytes. For an `.npz` or `.safetensors` file the same fields are in `NAME.json`, and `path`
is the name of the array in it.

Quantised weights have one field more, `quant` (see `r18.weights.quant`), and files of integers. The
float tensors stay: they are what the integers stand for, and every precision reads one folder.

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
from r18.graph.quantization import Quantization
from r18.graph.resnet import NETWORKS, network
from r18.graph.schedule import IMAGE, Schedule
from r18.images.preprocess import Preprocess
from r18.weights.fields import (
    as_extent,
    as_list,
    as_object,
    as_shape,
    as_text,
    check_known,
    field,
)
from r18.weights.quant import QuantBlock, stored_bytes
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
_FIELDS = (*_CONSTANTS, "model", "network", "preprocess", "tensors", "quant")


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
    """The contents of `manifest.json`; checked in itself when read, against a schedule by
    `schedule`."""

    model: str
    classes: int
    image_size: int
    preprocess: Preprocess
    tensors: tuple[Entry, ...]
    quant: QuantBlock | None = None

    @property
    def files(self) -> list[TensorFile]:
        """Every file that it lists."""
        return [e.file for e in self.tensors] + (self.quant.files if self.quant else [])

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
            quant=(
                None
                if weights.quantization is None
                else QuantBlock.of(weights.quantization, schedule)
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; `from_json` is the inverse."""
        quant = {} if self.quant is None else {"quant": self.quant.to_json()}
        return {
            **_CONSTANTS,
            "model": self.model,
            "network": {"classes": self.classes, "image_size": self.image_size},
            "preprocess": self.preprocess.to_json(),
            "tensors": [asdict(entry) | {"shape": list(entry.shape)} for entry in self.tensors],
            **quant,
        }

    def dumps(self) -> str:
        """The text of `manifest.json`: one line for each tensor."""
        data = self.to_json()
        data.pop("quant", None)
        tensors = ",\n".join(f"    {json.dumps(entry)}" for entry in data.pop("tensors"))
        head = "".join(f"  {json.dumps(k)}: {json.dumps(v)},\n" for k, v in data.items())
        quant = "" if self.quant is None else f',\n  "quant": {self.quant.dumps()}'
        return f'{{\n{head}  "tensors": [\n{tensors}\n  ]{quant}\n}}\n'

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Check every field by itself. Raises `ManifestError`, which does not name the file."""
        data = as_object(data, "a manifest")
        if data.get("kind") == "dump":
            raise ManifestError("it belongs to a dump, which holds no weights")
        for name, known in _CONSTANTS.items():
            value = field(data, name)
            if type(value) is not type(known) or value != known:
                raise ManifestError(f"{name} is {show(value)}, this r18 reads {known!r}")
        check_known(data, _FIELDS, "field")
        shape = as_object(field(data, "network"), "network")
        check_known(shape, ("classes", "image_size"), "field of network")
        try:
            preprocess = Preprocess.from_json(field(data, "preprocess"))
        except R18Error as error:
            raise ManifestError(str(error)) from None
        image_size = as_extent(field(shape, "image_size", "network"), "network.image_size")
        if preprocess.center_crop != image_size:
            raise ManifestError(
                f"preprocess.center_crop is {preprocess.center_crop}, network.image_size is "
                f"{image_size}; they must be equal"
            )
        tensors = as_list(field(data, "tensors"), "tensors")
        entries = tuple(_entry(value, index) for index, value in enumerate(tensors))
        check_distinct("name", [entry.name for entry in entries], ManifestError)
        quant = QuantBlock.from_json(data["quant"]) if "quant" in data else None
        paths = [entry.path for entry in entries] + (list(quant.paths()) if quant else [])
        check_distinct("path", paths, ManifestError)
        return cls(
            model=as_text(field(data, "model"), "model"),
            classes=as_extent(field(shape, "classes", "network"), "network.classes"),
            image_size=image_size,
            preprocess=preprocess,
            tensors=entries,
            quant=quant,
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
        if self.quant is not None:
            self.quant.check(wanted)
        return wanted


@dataclass(frozen=True)
class Export:
    """A manifest and its tensors, all checked: float32, by name, in the schedule's order.

    quantization: what the `quant` block describes, if there is one.
    """

    manifest: Manifest
    schedule: Schedule
    tensors: Mapping[str, Float32]
    quantization: Quantization | None = None


# -- Reading ---------------------------------------------------------------------------------


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, checked by itself. Raises `ManifestError`."""
    with _locating(path):
        return _parse(Path(path))


def read_manifest(
    folder: str | Path, schedule: Schedule | None = None, *, computable: bool = False
) -> Export:
    """The tensors of an export, after every check of the manifest and of each file it lists.

    schedule: whose weights they must be; without it the network that the manifest names.
    computable: refuse integers that no kernel takes, before anything of them is read.

    Names, shapes, kinds, paths, file sizes and hashes are checked before a tensor is allocated,
    values afterwards. Files that the manifest does not list are ignored. Raises `ManifestError`.
    """
    with _locating(Path(folder) / MANIFEST):
        if not Path(folder).is_dir():
            raise ManifestError("no such folder")
        root = Path(folder).resolve()
        manifest = _parse(inside(root, MANIFEST, ManifestError))
        schedule = manifest.schedule(schedule)
        if computable and manifest.quant is not None:
            manifest.quant.check_computable()
        files = manifest.files
        paths = [check_file(root, file, ManifestError) for file in files]
        for file, path in zip(files, paths, strict=True):
            with open_file(path, file.nbytes) as stream:
                check_hash(file, hashlib.file_digest(stream, "sha256").hexdigest(), ManifestError)
        entries = {entry.name: entry.file for entry in manifest.tensors}
        tensors = {
            name: read_file(root, entries[name], ManifestError) for name in schedule.weight_specs
        }
        check_values(tensors, schedule, error=ManifestError)
        quant = manifest.quant
        found = None if quant is None else quant.read(root, schedule)
        return Export(manifest, schedule, tensors, found)


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
    check_target(folder, overwrite)
    try:
        with new_folder(folder, overwrite=overwrite) as draft:
            for entry in manifest.tensors:
                (draft / entry.path).write_bytes(tensor_bytes(weights[entry.name]))
                if progress is not None:
                    progress(entry)
            for name, array in stored_bytes(weights.quantization) if weights.quantization else ():
                (draft / f"{name}.bin").write_bytes(array)
            (draft / MANIFEST).write_text(manifest.dumps(), encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"cannot write '{folder}': {error}") from error
    return manifest


def check_target(folder: str | Path, overwrite: bool = False) -> None:
    """Raise `ManifestError` unless an export may be written there, as `write_manifest` does."""
    check_free(Path(folder), "export", MANIFEST, overwrite, load_manifest, ManifestError)


# -- Fields ----------------------------------------------------------------------------------


def _entry(value: object, index: int) -> Entry:
    what = f"tensors[{index}]"
    data = as_object(value, what)
    names = tuple(field.name for field in fields(Entry))
    check_known(data, names, f"field of {what}")
    texts = {n: as_text(field(data, n, what), f"{what}.{n}") for n in names if n != "shape"}
    extents = as_shape(field(data, "shape", what), f"{what}.shape")
    check_sha256(texts["sha256"], f"{what}.sha256", ManifestError)
    return Entry(shape=extents, **texts)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


__all__ = [
    "MANIFEST",
    "Entry",
    "Export",
    "Manifest",
    "check_target",
    "load_manifest",
    "read_manifest",
    "write_manifest",
]
