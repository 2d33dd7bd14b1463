"""Weights: named float32 arrays of a schedule, from any source, checked before they are used.

Sources, as `--weights` takes them:

- `imagenet`: torchvision's IMAGENET1K_V1 of a network that it has, from PyTorch's cache or the net;
- `FILE.pth`, `FILE.pt`: a PyTorch `state_dict`, or a checkpoint with one under `state_dict`;
- `FILE.safetensors`, `FILE.npz`: arrays by torchvision's names. A manifest `FILE.json` in the
  same folder gives kinds, layouts, hashes and preprocessing, which are checked; without one, only
  names, dtypes, shapes and values can be checked;
- a folder with `manifest.json` (see `r18.weights.manifest`);
- timm's weights, with timm's preprocessing (see `r18.weights.timm`): a folder with `config.json`
  and `model.safetensors`, or a `.safetensors` file in such a folder; `timm:FILE` for one without;
- `synthetic`, `synthetic:SEED`: made here, without a download (see `r18.weights.synthetic`).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from r18.atomic import check_file, check_folder, check_replaceable, new_file, output_file
from r18.errors import ManifestError, UsageError, WeightsError, plain, show, unknown
from r18.files import WEIGHTS_LIMIT, read_bytes
from r18.graph.precision import INT8
from r18.graph.quantization import Quantization
from r18.graph.schedule import IMAGE, Schedule
from r18.images.preprocess import Preprocess
from r18.weights import timm
from r18.weights.formats import (
    is_npz,
    is_safetensors,
    read_npz,
    read_safetensors,
    read_state_dict,
    read_torch,
    save_npz,
    save_safetensors,
)
from r18.weights.manifest import (
    MANIFEST,
    Manifest,
    Progress,
    load_manifest,
    read_manifest,
    write_manifest,
)
from r18.weights.synthetic import synthetic_weights
from r18.weights.tensors import Float32, Tensor, read_tensors, tensor_bytes, tensor_sha256

SOURCES = (
    "imagenet",
    "synthetic",
    "synthetic:SEED",
    "FILE.pth",
    "FILE.pt",
    "FILE.safetensors",
    "FILE.npz",
    f"FOLDER with {MANIFEST}",
    "FOLDER of timm",
    "timm:FILE.safetensors",
)
"""The kinds of sources, as messages and `--help` name them."""

FORMATS = ("bin", "npz", "safetensors")
"""The formats that `export_weights` writes; `bin` is a folder with a manifest."""

_READERS: dict[str, Callable[[Path, bytes], dict[str, Tensor]]] = {
    ".pth": read_torch,
    ".pt": read_torch,
    ".safetensors": read_safetensors,
    ".npz": read_npz,
}

_WITH_SIDECAR = (".safetensors", ".npz")

_IMAGENET = {
    "resnet18": "https://download.pytorch.org/models/resnet18-f37072fd.pth",
    "resnet34": "https://download.pytorch.org/models/resnet34-b627a593.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
    "resnet101": "https://download.pytorch.org/models/resnet101-63fe2227.pth",
    "resnet152": "https://download.pytorch.org/models/resnet152-394f9c45.pth",
    "wide_resnet50_2": "https://download.pytorch.org/models/wide_resnet50_2-95faca4d.pth",
    "wide_resnet101_2": "https://download.pytorch.org/models/wide_resnet101_2-32ee1156.pth",
    "resnext50_32x4d": "https://download.pytorch.org/models/resnext50_32x4d-7cdf4587.pth",
    "resnext101_32x8d": "https://download.pytorch.org/models/resnext101_32x8d-8ba56ff5.pth",
}
"""Torchvision's IMAGENET1K_V1. Asking it for them would import PyTorch."""
_DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False, repr=False)
class Weights(Mapping[str, Float32]):
    """Read-only arrays by name: float32, C-contiguous, native byte order, copied when given.

    source:     where they came from, as `load_weights` was asked.
    preprocess: what the images of this network go through.
    quantization: the same weights in integers, for programs in int8.

    Equal are weights with equal `sha256`. Names, shapes and values are not checked here but by
    `load_weights` and `weights_from`. Raises `WeightsError` for arrays of another dtype.
    """

    tensors: Mapping[str, NDArray[Any]]
    source: str
    preprocess: Preprocess
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        copies = {}
        for name, array in self.tensors.items():
            if array.dtype.newbyteorder("=") != np.float32:
                raise WeightsError(
                    f"weights '{self.source}': tensor '{name}' is {array.dtype}, expected float32"
                )
            copies[name] = np.array(array, dtype=np.float32, order="C")
            copies[name].flags.writeable = False
        object.__setattr__(self, "tensors", MappingProxyType(copies))

    def __reduce__(self) -> tuple[object, ...]:
        parts = dict(self), self.source, self.preprocess, self.quantization
        return type(self), parts  # a proxy has no pickle

    def __getitem__(self, name: str) -> Float32:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def sha256(self) -> str:
        """A digest over names, shapes and little-endian bytes, in the order of the names.

        Each tensor contributes the line `NAME 64x3x7x7\\n` in UTF-8, then its bytes. Quantised
        weights have one more line, `quant SHA256\\n` with the digest of their quantisation.
        """
        digest = hashlib.sha256()
        for name in sorted(self):
            digest.update(f"{name} {'x'.join(map(str, self[name].shape))}\n".encode())
            digest.update(tensor_bytes(self[name]))
        if self.quantization is not None:
            digest.update(f"quant {self.quantization.sha256}\n".encode())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.sha256 == other.sha256 if isinstance(other, Weights) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        bits = f", int{self.quantization.bits}" if self.quantization else ""
        return f"<Weights '{self.source}': {len(self)} tensors{bits}, sha256 {self.sha256[:16]}…>"


# -- Loading ---------------------------------------------------------------------------------


def load_weights(source: str | Path, schedule: Schedule, precision: str = "") -> Weights:
    """The weights of a schedule at fusion level `none`, from a source as described above.

    A string that is no keyword is a path; a `Path` is always one. precision: what they are for; in
    int8 integers that no kernel takes are refused before a tensor is allocated.

    Raises `WeightsError` for weights that are damaged, missing or not the schedule's,
    `ManifestError` (a `WeightsError`) for a damaged manifest, `UsageError` for a bad seed or no
    schedule, and `UnknownName` for a word that is none of the sources.
    """
    _check_schedule(schedule)
    if schedule.folds:
        raise WeightsError(
            f"weights are loaded for fusion level 'none', got '{schedule.level}'\n"
            "  load them first, then fuse: folding keeps the names of the level 'none'"
        )
    text = os.fspath(source)
    if isinstance(source, str):
        keyword, colon, seed = text.partition(":")
        if keyword == "synthetic":
            return _synthetic(seed if colon else "0", schedule)
        if text == "imagenet":
            return _imagenet(schedule)
        if keyword == timm.KEYWORD and colon:
            return _of_timm(Path(seed), text, schedule)
    return _from_path(Path(text), text, schedule, precision == INT8.name)


def _check_schedule(schedule: object) -> None:
    if isinstance(schedule, Schedule):
        return
    name = schedule if isinstance(schedule, str) else "resnet18"
    raise UsageError(
        f"the weights are for a schedule, not for {show(schedule)}: give r18.network({show(name)})"
    )


def imagenet_weights(schedule: Schedule, within: float = math.inf) -> Weights:
    """The source `imagenet`, downloaded only if that takes at most `within` seconds.

    Resolving the host's name does not count. Nothing is kept of a download that takes longer.
    Raises `WeightsError`, as `load_weights` does.
    """
    return _imagenet(schedule, within)


def is_plain(source: str) -> bool:
    """Whether a source is no file and no folder."""
    return source == "imagenet" or source.partition(":")[0] == "synthetic"


def resolved(source: str) -> str:
    """The source with its path made absolute, so that it is the same from every folder."""
    if is_plain(source):
        return source
    keyword, colon, path = source.partition(":")
    if keyword == timm.KEYWORD and colon:
        return f"{keyword}:{Path(path).resolve()}"
    return str(Path(source).resolve())


def check_source_named(source: str, where: str) -> None:
    """Raise `WeightsError` for a source that a file names, if it is itself a file or a folder.

    The file's author would choose what is read here, so the user has to repeat it. where: the file,
    as the message begins.
    """
    if not is_plain(source):
        # An escaped or shortened name would be another one.
        option = f" {shlex.quote(source)}" if plain(source) == source else ""
        raise WeightsError(
            f"{where} names the weights '{plain(source)}', a file or folder of this machine\n"
            f"  repeat it if that is what you want, with --weights{option}; "
            "imagenet and synthetic need no such word"
        )


def weights_from(
    state_dict: Mapping[str, Any], schedule: Schedule, *, source: str = "state_dict"
) -> Weights:
    """The weights in a `state_dict` of PyTorch tensors or NumPy arrays, with the same checks.

    Raises `WeightsError`, and `UsageError` for no schedule.
    """
    _check_schedule(schedule)
    where = f"weights '{source}'"
    tensors = read_tensors(read_state_dict(state_dict, where), schedule, where)
    return Weights(tensors, source, _preprocess(schedule))


def _synthetic(seed: str, schedule: Schedule) -> Weights:
    if not re.fullmatch(r"[0-9]{1,18}", seed, re.ASCII):
        raise UsageError(
            f"weights 'synthetic:{seed}': the seed must be an integer of 1 to 18 digits\n"
            "  for example synthetic:7; synthetic alone is synthetic:0"
        )
    number = int(seed)
    tensors = synthetic_weights(schedule, number)
    return Weights(tensors, f"synthetic:{number}", _preprocess(schedule))


def _from_path(path: Path, source: str, schedule: Schedule, computable: bool) -> Weights:
    try:
        return _from_folder_or_file(path, source, schedule, computable)
    except OSError as error:
        raise WeightsError(f"weights '{source}': cannot be read: {error}") from None


MOST_NAMED = 3
"""Files that are named as what a folder offers."""


def _instead_of(folder: Path, source: str) -> str:
    """What to do about a folder without a manifest."""
    names = sorted(file.name for file in folder.iterdir())
    if not names:
        return f"make one with `r18 export --out {source}`"
    files = [plain(name) for name in names if PurePath(name).suffix.lower() in _READERS]
    if files:
        more = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
        return f"name the file in it: {', '.join(files[:MOST_NAMED])}{more}"
    known = ", ".join(_READERS)
    return (
        f"name a folder that `r18 export` wrote, a file of weights ({known}), or a folder of "
        f"timm's, whose {timm.CONFIG} has a {timm.HEAD}"
    )


def _from_folder_or_file(path: Path, source: str, schedule: Schedule, computable: bool) -> Weights:
    if path.is_dir():
        if not (path / MANIFEST).exists() and timm.is_config(path / timm.CONFIG):
            return _of_timm(path, source, schedule)
        if not (path / MANIFEST).exists():
            raise WeightsError(
                f"weights '{source}': the folder holds no {MANIFEST}\n  {_instead_of(path, source)}"
            )
        export = read_manifest(path, schedule, computable=computable)
        preprocess = _preprocess(schedule, export.manifest)
        return Weights(export.tensors, source, preprocess, export.quantization)
    if not path.exists() and not path.suffix and path.name == source:
        raise unknown("weights source", source, SOURCES)
    if path.suffix.lower() not in _READERS:
        raise WeightsError(
            f"weights '{source}': "
            + ("" if path.exists() else "no such file, and ")
            + f"nothing is known about '{path.suffix or path.name}'\n  known: {', '.join(SOURCES)}"
        )
    where = f"weights '{source}'"
    if not path.exists():
        raise WeightsError(f"{where}: no such file; check the path")
    data = read_bytes(path, WEIGHTS_LIMIT)
    tensors = read_tensors(_READERS[path.suffix.lower()](path, data), schedule, where)
    sidecar = path.with_suffix(".json")
    if path.suffix.lower() == ".safetensors" and timm.is_config(path.parent / timm.CONFIG):
        return _prepared_by_timm(tensors, source, schedule, path.parent / timm.CONFIG)
    if path.suffix.lower() not in _WITH_SIDECAR or not sidecar.exists():
        return Weights(tensors, source, _preprocess(schedule))
    manifest = load_manifest(sidecar)
    _check_sidecar(sidecar, manifest, schedule, tensors)
    return Weights(tensors, source, _preprocess(schedule, manifest))


def _of_timm(path: Path, source: str, schedule: Schedule) -> Weights:
    """timm's weights in a folder or file; without a `config.json` prepared as is usual in timm."""
    where = f"weights '{source}'"
    config = (path if path.is_dir() else path.parent) / timm.CONFIG
    file = path / timm.WEIGHTS if path.is_dir() else path
    if file.suffix.lower() not in _READERS:
        raise WeightsError(
            f"{where}: timm's weights are in a file such as {timm.WEIGHTS}, got '{plain(file)}'"
        )
    if not file.is_file():
        raise WeightsError(f"{where}: there is no file '{plain(file)}'; check the path")
    try:
        data = read_bytes(file, WEIGHTS_LIMIT)
    except OSError as error:
        raise WeightsError(f"{where}: cannot be read: {error}") from None
    if timm.is_config(config):
        timm.read_config(config).check(schedule.name)  # before names of tensors are compared
    tensors = read_tensors(_READERS[file.suffix.lower()](file, data), schedule, where)
    return _prepared_by_timm(tensors, source, schedule, config)


def _prepared_by_timm(
    tensors: Mapping[str, Float32], source: str, schedule: Schedule, config: Path
) -> Weights:
    settings = timm.read_config(config) if timm.is_config(config) else timm.Settings()
    settings.check(schedule.name)
    return Weights(tensors, source, settings.preprocess(_image_size(schedule)))


def _check_sidecar(
    sidecar: Path, manifest: Manifest, schedule: Schedule, tensors: Mapping[str, Float32]
) -> None:
    try:
        if manifest.quant is not None:
            raise ManifestError(
                "it has a quant block, whose integers are files of a folder: name that folder"
            )
        manifest.schedule(schedule)
        for entry in manifest.tensors:
            if entry.path != entry.name:
                raise ManifestError(
                    f"tensor '{entry.name}': path is '{plain(entry.path)}', expected the array's "
                    "name"
                )
            found = tensor_sha256(tensors[entry.name])
            if found != entry.sha256:
                raise ManifestError(
                    f"tensor '{entry.name}' has sha256 {found[:16]}…, the manifest says "
                    f"{entry.sha256[:16]}…\n"
                    "  it belongs to other weights, or one of the two is damaged; export again"
                )
    except ManifestError as error:
        raise ManifestError(f"manifest '{sidecar}': {error}") from None


def _preprocess(schedule: Schedule, manifest: Manifest | None = None) -> Preprocess:
    """The manifest's preprocessing, brought to the schedule's image size, or ImageNet's at it."""
    size = _image_size(schedule)
    if manifest is None:
        return Preprocess.for_image_size(size)
    known = manifest.preprocess
    return known if manifest.image_size == size else known.at(size)


def _image_size(schedule: Schedule) -> int:
    return schedule.input_shape[-1] if schedule.input == IMAGE else 224


# -- ImageNet --------------------------------------------------------------------------------


def _imagenet(schedule: Schedule, within: float = math.inf) -> Weights:
    if schedule.name not in _IMAGENET:
        raise WeightsError(
            f"weights 'imagenet' exist for {', '.join(_IMAGENET)}, not for '{schedule.name}'\n"
            "  use --weights synthetic, which fits every network"
        )
    url = _IMAGENET[schedule.name]
    path = _hub() / "checkpoints" / url.rpartition("/")[2]
    if not path.exists():
        _download(url, path, within)
    data = _read_cached(path)
    if not _is_genuine(data, path.name):
        raise WeightsError(
            f"weights 'imagenet': {path} is damaged, its sha256 does not begin as its name says\n"
            "  delete it, and it is downloaded again"
        )
    tensors = read_tensors(read_torch(path, data), schedule, f"weights 'imagenet' ({path})")
    return Weights(tensors, "imagenet", _preprocess(schedule))


def _hub() -> Path:
    """PyTorch's folder of downloads, as `torch.hub.get_dir` chooses it."""
    if (torch := sys.modules.get("torch")) is not None:
        return Path(torch.hub.get_dir())  # a program may have set another one
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("TORCH_HOME", os.path.join(cache, "torch"))
    return Path(os.path.expanduser(home)) / "hub"


def _read_cached(path: Path) -> bytes:
    try:
        return read_bytes(path, WEIGHTS_LIMIT)
    except OSError as error:
        raise WeightsError(f"weights 'imagenet': {path} cannot be read: {error}") from None


def _download(url: str, path: Path, within: float) -> None:
    print(f"r18: downloading {url}\n  to {path}", file=sys.stderr)
    deadline = time.monotonic() + within
    try:
        with (
            urllib.request.urlopen(url, timeout=min(_DOWNLOAD_TIMEOUT, within)) as response,
            new_file(path) as draft,
            draft.open("wb") as stream,
        ):
            while block := response.read1(_BLOCK):
                stream.write(block)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"incomplete after {within:g} s")
            stream.flush()
            if not _is_genuine(draft.read_bytes(), path.name):
                raise OSError("what came is damaged or incomplete, by its sha256")
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        raise WeightsError(
            f"weights 'imagenet' are not in PyTorch's cache and cannot be downloaded: {error}\n"
            f"  asked for {url}\n"
            f"  without a network: put {path.name} into {path.parent},\n"
            "  or use --weights FILE.pth, or --weights synthetic (no download needed)"
        ) from None


def _is_genuine(data: bytes, name: str) -> bool:
    """PyTorch's file names end in the first digits of the file's sha256."""
    return hashlib.sha256(data).hexdigest().startswith(Path(name).stem.rpartition("-")[2])


# -- Exporting -------------------------------------------------------------------------------


def export_weights(
    out: str | Path,
    weights: Weights,
    schedule: Schedule,
    *,
    format: str = "bin",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write weights with a manifest; returns the folder (`bin`) or file that `load_weights` takes.

    format:    `bin`, a folder with `manifest.json` and raw tensors; `npz` or `safetensors`, one
               file next to `NAME.json`, and `out` may leave the suffix off.
    overwrite: replace what an earlier export wrote.
    progress:  called with each tensor (`r18.weights.manifest.Entry`).

    Raises `UsageError` for an unknown format, `ManifestError` when the target is there already or
    cannot be written, `WeightsError` when the weights are not the schedule's.
    """
    if format not in FORMATS:
        raise unknown("export format", format, FORMATS, error=UsageError)
    path = _written(Path(out), format)
    if format != "bin" and weights.quantization is not None:
        raise UsageError(
            f"quantised weights are exported in the format bin, a folder; {format} holds float32 "
            "tensors only"
        )
    if format == "bin":
        write_manifest(path, weights, schedule, overwrite=overwrite, progress=progress)
        return path
    sidecar = path.with_suffix(".json")
    manifest = Manifest.of(weights, schedule, suffix="")
    try:
        _check_free(path, sidecar, manifest, overwrite)
        # The manifest is renamed first: should a crash keep the other old, the hashes tell.
        with output_file(path) as draft, output_file(sidecar) as draft_manifest:
            (save_npz if format == "npz" else save_safetensors)(draft, weights)
            draft_manifest.write_text(manifest.dumps(), encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"cannot write '{path}': {error}") from error
    if progress is not None:
        for entry in manifest.tensors:
            progress(entry)
    return path


def check_place(out: str | Path, format: str = "bin") -> None:
    """Raise `UsageError` where an export could not be written, before weights are loaded or made.

    format: of `FORMATS`, or another that is a file.
    """
    path = _written(Path(out), format)
    if format == "bin":
        check_folder(path, "--out")
    else:
        check_file(path, "--out")


def _written(out: Path, format: str) -> Path:
    """The folder or file of an export: files may be named without their suffix."""
    if format in FORMATS and format != "bin" and out.suffix != f".{format}":
        return out.with_name(f"{out.name}.{format}")
    return out


def _check_free(path: Path, sidecar: Path, manifest: Manifest, overwrite: bool) -> None:
    """Raise `ManifestError` unless both files may be written.

    The same weights in the other format have the same manifest, which may stay; what is no
    manifest, or is that of other weights in the other format, is never replaced, nor is a file of
    another format.
    """
    known = is_npz if path.suffix == ".npz" else is_safetensors
    check_replaceable(path, f"{path.suffix} file", known, error=ManifestError)
    taken = [path] if path.exists() else []
    others = [found for name in FORMATS if (found := path.with_suffix(f".{name}")) != path]
    if sidecar.exists():
        try:
            taken += [sidecar] if load_manifest(sidecar) != manifest else []
        except ManifestError as error:
            raise ManifestError(
                f"cannot export to '{path}': its manifest would replace another file; choose "
                f"another name\n  {error}"
            ) from None
    if sidecar in taken and (other := next(filter(Path.is_file, others), None)):
        raise ManifestError(
            f"cannot export to '{path}': '{sidecar}' is the manifest of '{other}' too, which has "
            "other weights; choose another name"
        )
    if taken and not (overwrite and all(target.is_file() for target in taken)):
        raise ManifestError(
            f"cannot export to '{path}': '{taken[0]}' is there already\n"
            "  replace it with --force (overwrite=True), or choose another name"
        )


__all__ = [
    "FORMATS",
    "SOURCES",
    "Weights",
    "check_place",
    "check_source_named",
    "export_weights",
    "imagenet_weights",
    "is_plain",
    "load_weights",
    "resolved",
    "weights_from",
]
