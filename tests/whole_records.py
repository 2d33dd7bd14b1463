"""Records from the parts that matter to a test: the other required fields are filled in."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from r18.bench.roofline import Ceilings
from r18.records import KINDS
from r18.records.kinds import CeilingsRecord

EMPTY = {
    inspect.StrType: "",
    inspect.IntType: 0,
    inspect.FloatType: 0.0,
    inspect.BoolType: False,
    inspect.NoneType: None,
    inspect.DictType: {},
    inspect.ListType: [],
    inspect.TupleType: None,
    inspect.StructType: {},
}


def whole(record: dict[str, Any]) -> dict[str, Any]:
    """A record with all required fields; fields that it already has stay."""
    return _filled(inspect.type_info(KINDS[record["record"]]), {"format": 1} | record)


def ceilings_of(record: dict[str, Any]) -> Ceilings:
    return Ceilings.from_record(msgspec.convert(whole(record), CeilingsRecord))


def _filled(kind: inspect.Type, data: Any) -> Any:
    if isinstance(kind, inspect.UnionType):
        chosen = (one for one in kind.types if isinstance(EMPTY.get(type(one)), type(data)))
        kind = next(chosen, inspect.AnyType())
    if isinstance(kind, inspect.StructType) and isinstance(data, dict):
        fields = {one.encode_name: one for one in kind.fields}
        missing = {n: _empty(f.type) for n, f in fields.items() if f.required and n not in data}
        known = missing | data
        return {n: _filled(fields[n].type, v) if n in fields else v for n, v in known.items()}
    if isinstance(kind, inspect.DictType) and isinstance(data, dict):
        return {name: _filled(kind.value_type, value) for name, value in data.items()}
    if isinstance(kind, inspect.ListType) and isinstance(data, list):
        return [_filled(kind.item_type, value) for value in data]
    return data


def _empty(kind: inspect.Type) -> Any:
    """A value of a required field: None where that is allowed."""
    if isinstance(kind, inspect.UnionType):
        nullable = any(isinstance(one, inspect.NoneType) for one in kind.types)
        return None if nullable else _empty(kind.types[0])
    if isinstance(kind, inspect.StructType) and kind.cls.__name__ == "Environment":
        return {"device": {"kind": "cpu", "name": "a CPU"}}
    return kind.values[0] if isinstance(kind, inspect.LiteralType) else EMPTY[type(kind)]


__all__ = ["ceilings_of", "whole"]
