"""Tables of documents, made from records: see `r18.report.tables.markers`."""

from r18.report.tables.conditions import error_captions
from r18.report.tables.judged import sanitize_table
from r18.report.tables.markers import rendered
from r18.report.tables.table import Table, device_words
from r18.report.tables.timed import bench_captions
from r18.report.tables.used import profile_caption

__all__ = [
    "Table",
    "bench_captions",
    "device_words",
    "error_captions",
    "profile_caption",
    "rendered",
    "sanitize_table",
]
