"""Damage: a file with one or a few changes, of bytes, of text, of JSON, of an archive's members."""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

EDGES = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
WORDS = (
    b"",
    b"\0",
    b"\n",
    b"\r",
    b'"',
    b",",
    b"../",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b"9" * 400,
    b"9" * 5000,
    b"[" * 3000,
    "\u202e\ud7ff é\x1b[2J".encode(),
    b"\xff\xfe",
    b"\xed\xa0\x80",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -1.5, 1e308),
    *("", "a", "\0", "\x1b[2J", "../x", "/dev/zero", "a" * 5000, "é", "\ud800", "module:attr"),
    *([], [[]], [1] * 50, {}, {"a": 1}, [None], ["x"], [2**62, 2**62]),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The file with one to four changes."""
    kinds = [of_bytes, of_bytes, of_chunks, of_words]
    if data[:1] in (b"{", b"["):
        kinds += [of_json, of_json, of_json]
    if data[:4] == b"PK\x03\x04":
        kinds += [of_members, of_members]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(kinds)(rng, data)
    return data


def of_bytes(rng: random.Random, data: bytes) -> bytes:
    """Changes bits, bytes, or integers of 2, 4 or 8 bytes, more often near the beginning or end."""
    found = bytearray(data)
    if not found:
        return bytes([rng.choice(EDGES)])
    for _ in range(rng.choice((1, 1, 2, 8))):
        near = rng.randrange(min(len(found), 300))
        place = rng.choice((near, len(found) - 1 - near, rng.randrange(len(found))))
        match rng.randrange(3):
            case 0:
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                found[place] = rng.choice(EDGES)
            case _:
                size = rng.choice((2, 4, 8))
                edge = rng.choice(
                    (0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), rng.getrandbits(31))
                )
                order = rng.choice(("little", "big"))
                found[place : place + size] = (edge % (1 << 8 * size)).to_bytes(size, order)
    return bytes(found)


def of_chunks(rng: random.Random, data: bytes) -> bytes:
    """Cuts off, cuts out, doubles or moves a chunk."""
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    chunk = data[first:last]
    match rng.randrange(5):
        case 0:
            return data[:first]
        case 1:
            return data[:first] + data[last:]
        case 2:
            return data[:last] + chunk[:4096] * rng.choice((1, 2, 50)) + data[last:]
        case 3:
            return (
                data[:first]
                + bytes(rng.randrange(256) for _ in range(rng.randrange(64)))
                + data[first:]
            )
        case _:
            return data + chunk[:4096]


def of_words(rng: random.Random, data: bytes) -> bytes:
    """Inserts a word, or replaces bytes by one."""
    place = rng.randrange(len(data) + 1)
    end = place + rng.choice((0, 0, 1, 4))
    return data[:place] + rng.choice(WORDS) + data[end:]


def of_json(rng: random.Random, data: bytes) -> bytes:
    """Changes, removes, adds or moves a value, a key or an element."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return of_bytes(rng, data)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            places.append((value, key))
            if isinstance(inner, dict | list):
                walk(inner)

    if not isinstance(found, dict | list):
        return of_bytes(rng, data)
    try:
        walk(found)
    except RecursionError:
        return of_bytes(rng, data)
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "extra", "a" * 3000, "\x1b", "check"))] = holder.pop(key)
        case 2:
            other, name = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
        case 3 if type(holder[key]) is int:
            holder[key] += rng.choice((1, -1, 1 << 31, -(1 << 40)))
        case _:
            holder[key] = rng.choice(VALUES)
    return json.dumps(found).encode()


def of_members(rng: random.Random, data: bytes) -> bytes:
    """An archive with one damaged member and matching checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            held = {info.filename: archive.read(info) for info in archive.infolist()}
    except Exception:
        return of_bytes(rng, data)
    if not held:  # damaged before, by another kind
        return of_bytes(rng, data)
    name = rng.choice(list(held))
    match rng.randrange(4):
        case 0:
            held[name] = of_chunks(rng, held[name])
        case 1:
            held[rng.choice(("extra.npy", "../x", "\x1b", name + "x"))] = held.pop(name)
        case _:
            held[name] = of_bytes(rng, held[name])
    stream = io.BytesIO()
    kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(stream, "w", kind) as archive:
        for member, content in held.items():
            archive.writestr(zipfile.ZipInfo(member), content, kind)
    return stream.getvalue()
