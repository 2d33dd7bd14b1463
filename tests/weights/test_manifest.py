"""Exports: round trips, every kind of damage with its own message, and whole-or-nothing writes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r18 import atomic
from r18.errors import ManifestError, WeightsError
from r18.graph.resnet import resnet, resnet18, tiny
from r18.graph.schedule import Schedule
from r18.weights import Weights, export_weights, load_weights, manifest
from r18.weights.manifest import MANIFEST, Entry, Manifest, read_manifest, write_manifest
from r18.weights.tensors import TensorFile, tensor_sha256

Json = dict[str, Any]


@pytest.fixture
def export(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "fp32"))


def edit(folder: Path, change: Callable[[Json], object]) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data))


def entry(data: Json, name: str) -> Json:
    (found,) = (t for t in data["tensors"] if t["name"] == name)
    return found


def refused(folder: Path, schedule: Schedule | None = None) -> str:
    with pytest.raises(ManifestError) as caught:
        read_manifest(folder, schedule)
    text = str(caught.value)
    assert text.startswith(f"manifest '{folder / MANIFEST}': ")
    return text.removeprefix(f"manifest '{folder / MANIFEST}': ")


# -- Round trip ------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(pristine: Path, weights: Weights) -> None:
    for schedule in (None, tiny(), tiny(image_size=64)):
        export = read_manifest(pristine, schedule)
        assert list(export.tensors) == list(tiny().weight_specs)
        assert {n: a.tobytes() for n, a in export.tensors.items()} == {
            n: a.tobytes() for n, a in weights.items()
        }
    assert read_manifest(pristine).schedule == tiny()
    assert export.manifest.preprocess == weights.preprocess


def test_manifest_says_all_that_a_reader_needs(pristine: Path, weights: Weights) -> None:
    data = json.loads((pristine / MANIFEST).read_text())
    assert list(data) == [
        "version",
        "dtype",
        "byte_order",
        "layout",
        "model",
        "network",
        "preprocess",
        "tensors",
    ]
    assert data["model"] == "tiny"
    assert data["network"] == {"classes": 10, "image_size": 32}
    assert set(data["preprocess"]) == {"resize", "center_crop", "mean", "std"}
    assert entry(data, "conv1.weight") == {
        "name": "conv1.weight",
        "path": "conv1.weight.bin",
        "shape": [8, 3, 7, 7],
        "layout": "OIHW",
        "kind": "conv_weight",
        "sha256": tensor_sha256(weights["conv1.weight"]),
    }
    raw = np.frombuffer((pristine / "conv1.weight.bin").read_bytes(), "<f4")
    assert np.array_equal(raw.reshape(8, 3, 7, 7), weights["conv1.weight"])
    kinds = {t["kind"] for t in data["tensors"]}
    assert kinds == {"conv_weight", "bn_param", "bn_buffer", "fc_weight", "fc_bias"}
    assert sorted(p.name for p in pristine.iterdir()) == sorted(
        [MANIFEST, *(t["path"] for t in data["tensors"])]
    )


def test_manifest_json_round_trip(weights: Weights) -> None:
    made = Manifest.of(weights, tiny())
    assert Manifest.from_json(json.loads(made.dumps())) == made


def test_files_that_are_not_listed_are_ignored(export: Path) -> None:
    (export / "notes.txt").write_text("mine")
    (export / "extra.bin").write_bytes(b"1234")
    read_manifest(export, tiny())


def test_paths_may_lie_in_folders_and_be_links_inside(export: Path) -> None:
    (export / "sub").mkdir()
    os.rename(export / "fc.bias.bin", export / "sub" / "b.bin")
    os.symlink(export / "sub" / "b.bin", export / "inside.bin")
    edit(export, lambda d: entry(d, "fc.bias").update(path="inside.bin"))
    read_manifest(export)
    edit(export, lambda d: entry(d, "fc.bias").update(path="sub/b.bin"))
    read_manifest(export)


# -- Damage ----------------------------------------------------------------------------------


def set_tensor(name: str, /, **values: object) -> Callable[[Json], object]:
    return lambda data: entry(data, name).update(values)


def drop(name: str) -> Callable[[Json], object]:
    return lambda data: data["tensors"].remove(entry(data, name))


def set_top(**values: object) -> Callable[[Json], object]:
    return lambda data: data.update(values)


def huge(data: Json) -> None:
    data["network"]["classes"] = 2**31 - 1
    entry(data, "fc.weight")["shape"] = [2**31 - 1, 64]
    entry(data, "fc.bias")["shape"] = [2**31 - 1]


CHANGES: dict[str, tuple[Callable[[Json], object], str]] = {
    "version": (set_top(version=2), "version is 2, this r18 reads 1"),
    "version type": (set_top(version=True), "version is True, this r18 reads 1"),
    "no version": (lambda d: d.pop("version"), "the field 'version' is missing"),
    "dtype": (set_top(dtype="float16"), "dtype is 'float16', this r18 reads 'float32'"),
    "byte order": (set_top(byte_order="big"), "byte_order is 'big'"),
    "layout": (set_top(layout="NHWC"), "layout is 'NHWC'"),
    "unknown field": (
        set_top(modle="x"),
        "unknown field 'modle', did you mean 'model'?",
    ),
    "model type": (set_top(model=18), "model must be a text that is not empty, got 18"),
    "model": (set_top(model="tinny"), "unknown model 'tinny', did you mean 'tiny'?"),
    "network type": (set_top(network=[10, 32]), "network must be an object, got [10, 32]"),
    "network field": (
        lambda d: d["network"].update(depth=18),
        "unknown field of network 'depth'",
    ),
    "no classes": (
        lambda d: d["network"].pop("classes"),
        "the field 'classes' of network is missing",
    ),
    "classes": (
        lambda d: d["network"].update(classes=10.0),
        "network.classes must be made of integers from 1 to 2^31 − 1, got 10.0",
    ),
    "crop": (
        lambda d: d["preprocess"].update(center_crop=31),
        "preprocess.center_crop is 31, network.image_size is 32",
    ),
    "preprocess": (
        lambda d: d["preprocess"].pop("mean"),
        "preprocess: no value for mean; all four are needed",
    ),
    "tensors type": (set_top(tensors={}), "tensors must be a list of objects, got {}"),
    "tensor type": (
        lambda d: d["tensors"].insert(2, None),
        "tensors[2] must be an object, got None",
    ),
    "tensor field": (
        set_tensor("conv1.weight", offset=0),
        "unknown field of tensors[0] 'offset'",
    ),
    "no shape": (
        lambda d: d["tensors"][0].pop("shape"),
        "the field 'shape' of tensors[0] is missing",
    ),
    "shape type": (
        set_tensor("conv1.weight", shape="8"),
        "tensors[0].shape must be a list of integers, got '8'",
    ),
    "extent": (
        set_tensor("conv1.weight", shape=[8, 3, 7, -7]),
        "tensors[0].shape must be made of integers from 1 to 2^31 − 1, got -7",
    ),
    "shape": (
        set_tensor("conv1.weight", shape=[8, 3, 7, 8]),
        "tensor 'conv1.weight': shape is [8, 3, 7, 8], tiny needs [8, 3, 7, 7]",
    ),
    "tensor layout": (
        set_tensor("conv1.weight", layout="HWIO"),
        "tensor 'conv1.weight': layout is 'HWIO', tiny needs 'OIHW'",
    ),
    "kind": (
        set_tensor("bn1.bias", kind="bn_buffer"),
        "tensor 'bn1.bias': kind is 'bn_buffer', tiny needs 'bn_param'",
    ),
    "sha256 form": (
        set_tensor("conv1.weight", sha256="A" * 64),
        "tensors[0].sha256 must be 64 lowercase hex digits, got 'AAAA",
    ),
    "missing tensor": (drop("fc.bias"), "tensor 'fc.bias' is missing"),
    "unknown tensor": (
        set_tensor("fc.bias", name="fc.bais"),
        "tensor 'fc.bais' is not one of tiny's, did you mean 'fc.bias'?",
    ),
    "name twice": (
        lambda d: d["tensors"].append(dict(d["tensors"][0], path="other.bin")),
        "the name 'conv1.weight' appears 2 times",
    ),
    "path twice": (
        set_tensor("bn1.bias", path="bn1.weight.bin"),
        "the path 'bn1.weight.bin' appears 2 times",
    ),
    "absolute": (
        set_tensor("fc.bias", path="/etc/hostname"),
        "tensor 'fc.bias': the path '/etc/hostname' is not a plain relative one",
    ),
    "parent": (set_tensor("fc.bias", path="a/../../x"), "the path 'a/../../x' is not a plain"),
    "backslash": (set_tensor("fc.bias", path="..\\x"), r"the path '..\\x' is not a plain"),
    "drive": (set_tensor("fc.bias", path="C:x"), "the path 'C:x' is not a plain"),
    "null": (set_tensor("fc.bias", path="a\0b"), r"the path 'a\x00b' is not a plain"),
    "surrogate": (set_tensor("fc.bias", path="\ud800"), r"the path '\ud800' is not a plain"),
    "unclean": (set_tensor("fc.bias", path="a//b"), "the path 'a//b' is not a plain"),
    "no file": (set_tensor("fc.bias", path="x.bin"), "there is no 'x.bin' in the folder"),
    "folder": (set_tensor("fc.bias", path="."), "'.' is not a regular file"),
    "long": (set_tensor("fc.bias", path="x" * 4000), "leads nowhere"),
    "huge": (huge, "'fc.weight.bin' has 2560 bytes, expected 549755"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_damaged_manifest(kind: str, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "read_file", no_allocation)
    change, fragment = CHANGES[kind]
    edit(export, change)
    assert fragment in refused(export)


def no_allocation(*_: object) -> None:
    raise AssertionError("a tensor was allocated before everything was checked")


def test_messages_differ() -> None:
    assert len({fragment for _, fragment in CHANGES.values()}) == len(CHANGES)


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON: Expecting value"),
    "array": (b"[1]", "expected a JSON object, got [1]"),
    "truncated": (b'{"version": 1, "dty', "not JSON: Unterminated string"),
    "not utf-8": (b'{"version": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    "nested": (b"[" * 200_000, "not JSON: maximum recursion depth exceeded"),
    "long number": (b'{"version": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
    "constant": (b'{"version": NaN}', "NaN is not a JSON number"),
    "duplicate": (b'{"version": 1, "version": 1}', "the field 'version' appears 2 times"),
    "too large": (b" " * (4 << 20) + b"{}", "4,194,306 bytes are too many"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_that_is_no_manifest(kind: str, export: Path) -> None:
    text, fragment = TEXTS[kind]
    (export / MANIFEST).write_bytes(text)
    assert fragment in refused(export)


def link_out(folder: Path) -> None:
    os.rename(folder / "fc.bias.bin", folder.parent / "outside.bin")
    os.symlink("../outside.bin", folder / "fc.bias.bin")


def link_manifest_out(folder: Path) -> None:
    os.rename(folder / MANIFEST, folder.parent / "outside.json")
    os.symlink(folder.parent / "outside.json", folder / MANIFEST)


def link_loop(folder: Path) -> None:
    (folder / "fc.bias.bin").unlink()
    os.symlink("fc.bias.bin", folder / "fc.bias.bin")


def fifo(folder: Path) -> None:
    (folder / "fc.bias.bin").unlink()
    os.mkfifo(folder / "fc.bias.bin")


def flip(folder: Path) -> None:
    data = bytearray((folder / "fc.bias.bin").read_bytes())
    data[5] ^= 1
    (folder / "fc.bias.bin").write_bytes(data)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "link out": (link_out, "'fc.bias.bin' is a link out of the folder, to '"),
    "manifest link": (link_manifest_out, "'manifest.json' is a link out of the folder, to '"),
    "link loop": (link_loop, "'fc.bias.bin' leads nowhere"),
    "fifo": (fifo, "'fc.bias.bin' is not a regular file"),
    "no file": (lambda f: (f / "fc.bias.bin").unlink(), "there is no 'fc.bias.bin'"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "there is no 'manifest.json'"),
    "truncated": (
        lambda f: os.truncate(f / "fc.bias.bin", 39),
        "has 39 bytes, expected 40: shape [10] in",
    ),
    "too long": (
        lambda f: os.truncate(f / "fc.bias.bin", 44),
        "has 44 bytes, expected 40: shape [10] in",
    ),
    "flipped bit": (flip, "tensor 'fc.bias': 'fc.bias.bin' has sha256 "),
    "no folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(kind: str, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "read_file", no_allocation)
    damage, fragment = FILES[kind]
    damage(export)
    assert fragment in refused(export, tiny())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "fc.bias",
            np.nan,
            "tensor 'fc.bias' is not finite: nan at [3]\n"
            "  a training run that diverged, or a damaged file?",
        ),
        (
            "bn1.running_var",
            -0.5,
            "tensor 'bn1.running_var' is a variance and below zero: -0.5 at [3]\n"
            "  it is damaged, or another tensor under this name",
        ),
    ],
)
def test_values_with_a_right_hash(export: Path, name: str, value: float, message: str) -> None:
    array = np.fromfile(export / f"{name}.bin", "<f4")
    array[3] = value
    array.tofile(export / f"{name}.bin")
    edit(export, set_tensor(name, sha256=tensor_sha256(array)))
    assert refused(export) == message


def test_file_that_changes_while_it_is_read(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = manifest.read_file

    def late(folder: Path, file: TensorFile, error: Any) -> Any:
        if file.name == "fc.bias":
            flip(export)
        return read(folder, file, error)

    monkeypatch.setattr(manifest, "read_file", late)
    assert "tensor 'fc.bias': 'fc.bias.bin' has sha256" in refused(export)


def test_another_network(export: Path) -> None:
    assert refused(export, resnet18()) == "it is of model 'tiny', asked for 'resnet18'"
    assert refused(export, tiny(classes=7)) == (
        "tensor 'fc.weight': shape is [10, 64], tiny needs [7, 64]"
    )


def test_network_of_ones_own(tmp_path: Path) -> None:
    mine = resnet("mine", blocks=(1, 2), width=4, classes=3, image_size=16)
    weights = load_weights("synthetic", mine)
    write_manifest(tmp_path / "mine", weights, mine)
    assert (
        Weights(read_manifest(tmp_path / "mine", mine).tensors, "", weights.preprocess) == weights
    )
    message = refused(tmp_path / "mine")
    assert "unknown model 'mine'" in message
    assert "pass its schedule" in message


# -- Fuzzing ---------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["..", "/", "fc.bias", "fc.bias.bin", 32, 64, [10], "float32", "tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


def mutate(node: Any, data: st.DataObject) -> Any:
    """Walk down at random, then replace, remove, repeat or rename what is there."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    key = data.draw(st.sampled_from(keys))
    child = node[key]
    if isinstance(child, dict | list) and child and data.draw(st.integers(0, 3)):
        mutate(child, data)
        return
    match data.draw(st.sampled_from(["replace", "remove", "repeat", "swap"])):
        case "replace":
            node[key] = data.draw(JSON)
        case "remove":
            del node[key]
        case "repeat" if isinstance(node, list):
            node.insert(0, child)
        case "swap":
            other = data.draw(st.sampled_from(keys))
            node[key], node[other] = node[other], node[key]


def same_or_refused(folder: Path, weights: Weights) -> None:
    for schedule in (tiny(), None):
        try:
            export = read_manifest(folder, schedule)
        except ManifestError:
            continue
        assert {n: (a.shape, a.tobytes()) for n, a in export.tensors.items()} == {
            n: (a.shape, a.tobytes()) for n, a in weights.items()
        }


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(data=st.data())
def test_fuzzed_fields(data: st.DataObject, pristine: Path, weights: Weights) -> None:
    path = pristine / MANIFEST
    text = path.read_text()
    fields = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        if fields:
            mutate(fields, data)
    try:
        path.write_text(json.dumps(fields))
        same_or_refused(pristine, weights)
    finally:
        path.write_text(text)


@settings(derandomize=True, deadline=None, max_examples=100, database=None)
@given(data=st.data())
def test_fuzzed_bytes(data: st.DataObject, pristine: Path, weights: Weights) -> None:
    name = data.draw(st.sampled_from([MANIFEST, "fc.bias.bin", "bn1.running_var.bin"]))
    path = pristine / name
    before = path.read_bytes()
    start = data.draw(st.integers(0, len(before)))
    length = data.draw(st.integers(0, 40))
    after = before[:start] + data.draw(st.binary(max_size=40)) + before[start + length :]
    try:
        path.write_bytes(after)
        same_or_refused(pristine, weights)
    finally:
        path.write_bytes(before)


# -- Writing ---------------------------------------------------------------------------------


def test_an_export_is_not_replaced_unasked(export: Path, weights: Weights) -> None:
    with pytest.raises(ManifestError) as caught:
        write_manifest(export, weights, tiny())
    assert str(caught.value) == (
        f"cannot write the export '{export}': one is there already\n"
        "  replace it with --force (overwrite=True), or choose another folder"
    )
    other = load_weights("synthetic:1", tiny())
    (export / "stale.bin").write_bytes(b"")
    write_manifest(export, other, tiny(), overwrite=True)
    assert load_weights(export, tiny()) == other
    assert not (export / "stale.bin").exists()
    assert [p.name for p in export.parent.iterdir()] == ["fp32"]


def test_what_is_no_export_is_never_replaced(tmp_path: Path, weights: Weights) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("mine")
    for extra in ((), (MANIFEST,)):
        for name in extra:
            (home / name).write_text("{}")
        with pytest.raises(ManifestError, match=r"it is no export, it holds 'thesis\.tex'"):
            write_manifest(home, weights, tiny(), overwrite=True)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(home)
    for name in ("file", "link"):
        with pytest.raises(ManifestError, match="it is a file or a link; name a folder"):
            write_manifest(tmp_path / name, weights, tiny(), overwrite=True)
    assert (home / "thesis.tex").read_text() == "mine"


def test_an_empty_folder_may_be_there(tmp_path: Path, weights: Weights) -> None:
    write_manifest(tmp_path, weights, tiny())
    assert load_weights(tmp_path, tiny()) == weights


@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupted_write_leaves_things_as_they_were(
    tmp_path: Path, weights: Weights, overwrite: bool
) -> None:
    target = tmp_path / "fp32"
    if overwrite:
        write_manifest(target, weights, tiny())
    saved: list[Entry] = []

    def interrupt(entry: Entry) -> None:
        saved.append(entry)
        if len(saved) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_manifest(
            target,
            load_weights("synthetic:1", tiny()),
            tiny(),
            overwrite=overwrite,
            progress=interrupt,
        )
    assert [p.name for p in tmp_path.iterdir()] == (["fp32"] if overwrite else [])
    if overwrite:
        assert load_weights(target, tiny()) == weights


def test_disk_full(tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "_flush", full)
    with pytest.raises(ManifestError, match=r"cannot write '.*fp32': .*No space left on device"):
        write_manifest(tmp_path / "fp32", weights, tiny())
    assert list(tmp_path.iterdir()) == []


def test_replacing_that_fails_puts_the_old_export_back(
    export: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append((source, target))
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ManifestError, match="Input/output error"):
        write_manifest(export, load_weights("synthetic:1", tiny()), tiny(), overwrite=True)
    assert len(calls) == 3
    assert load_weights(export, tiny()) == weights
    assert [p.name for p in export.parent.iterdir()] == ["fp32"]


def test_only_whole_fitting_networks_are_exported(tmp_path: Path, weights: Weights) -> None:
    for schedule, message in (
        (tiny().between("stem_pool", "logits"), "only a whole network's weights can be exported"),
        (tiny(image_size=64), "preprocessing to 32 pixels, 'tiny' takes 64"),
        (tiny(classes=7), r"tensor 'fc\.weight' has shape \[10, 64\], tiny needs \[7, 64\]"),
    ):
        with pytest.raises(WeightsError, match=message):
            write_manifest(tmp_path / "x", weights, schedule)
    assert list(tmp_path.iterdir()) == []


def test_a_forced_export_never_replaces_a_dump(tmp_path: Path) -> None:
    """A forced export never replaces a dump, also a folder of `manifest.json` and `.bin` files."""
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"kind": "dump", "version": 1}')
    (folder / "logits.bin").write_bytes(b"1234")
    schedule = tiny()
    with pytest.raises(ManifestError, match="it is no export, "):
        export_weights(folder, load_weights("synthetic", schedule), schedule, overwrite=True)
    assert (folder / "logits.bin").read_bytes() == b"1234"
