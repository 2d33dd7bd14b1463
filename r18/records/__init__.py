"""Records: evidence from a device, as JSON files that are committed.

There is one file for each kind of evidence and each device: `verify-nvidia-h200.json`,
`bench-nvidia-h200.json`. All CPUs share `verify-cpu.json`, but times have a file for each model of
CPU: `bench-amd-epyc-avx2.json`. A record appears whole or not at all, and a later run replaces only
what it measured; runs at the same time take turns. `kinds` has their types, `files` reads and
writes them, `environment` says what a run depended on.
"""

from r18.records.environment import device_text, environment, key_of, now
from r18.records.files import (
    FOLDER,
    FORMAT,
    REMEDY,
    load,
    load_all,
    path_of,
    slug,
    update,
    write,
)
from r18.records.kinds import KINDS, Environment

__all__ = [
    "FOLDER",
    "FORMAT",
    "KINDS",
    "REMEDY",
    "Environment",
    "device_text",
    "environment",
    "key_of",
    "load",
    "load_all",
    "now",
    "path_of",
    "slug",
    "update",
    "write",
]
