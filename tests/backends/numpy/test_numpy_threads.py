"""An exception of a task on another thread reaches the caller."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from r18_numpy import threads


def test_an_error_of_another_worker_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def task(item: int, worker: int) -> None:
        both.wait(timeout=60)  # until each worker has an item
        if worker == 1:
            raise ValueError("of the other worker")

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(threads, "_pool", lambda: pool)
        with pytest.raises(ValueError, match="of the other worker"):
            threads.run_all(task, (0, 1), workers=2)
