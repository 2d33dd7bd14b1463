"""A verification as the data of a page; `r18.report` renders it."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from r18.graph.precision import INT8
from r18.machine import machine
from r18.report.verification import verification_page
from r18_oracle.check.checks import CHECKS
from r18_oracle.findings import Finding
from r18_oracle.network.checkpoint_report import CheckpointReport
from r18_oracle.network.losses import Loss
from r18_oracle.search.verify import Verification
from r18_oracle.search.verify_text import to_json

OWN = "fp64"
"""In this precision PyTorch's own loss is that of float32. In int8 it has none."""


def page(
    verification: Verification,
    *,
    findings: Path | None = None,
    about: Mapping[str, str] | None = None,
) -> str:
    """The page as HTML.

    findings: the folder of the findings' files, for the commands that replay them.
    about:    versions and the machine; default those of this process.
    """
    return verification_page(
        page_data(verification, findings, surroundings() if about is None else about)
    )


def page_data(
    verification: Verification, folder: Path | None, about: Mapping[str, str]
) -> dict[str, Any]:
    """The data for `r18.report.verification.verification_page`."""
    data, request = to_json(verification), verification.request
    for backend, result in zip(data["backends"], verification.backends, strict=True):
        backend |= {"executed": result.executed, "device_words": str(result.device)}
        for kernel, report in zip(backend["kernels"], result.kernels, strict=True):
            kernel["finding"] = None if report.finding is None else _finding(report.finding, folder)
        for run, compared in zip(backend["checkpoints"], result.checkpoints, strict=True):
            _extend(run, compared)
    return data | {
        "checks": list(CHECKS),
        "findings": [_finding(finding, folder) for finding in verification.findings],
        "request": {
            "profile": request.profile.name,
            "kernels": "all" if request.kernels == "*" else request.kernels,
            "network": f"{request.network}, fusion '{request.fusion}'",
            "weights": request.weights,
            "precisions": ", ".join(request.precisions) or "all that each backend can run",
            "seed": request.seed,
            **about,
        },
    }


def surroundings() -> dict[str, str]:
    """The versions and the machine of this process."""
    here = machine()
    versions = [f"r18 {here['r18']}", f"Python {here['python']}", f"NumPy {here['numpy']}"]
    versions.append(f"PyTorch {metadata.version('torch')}")
    return {
        "versions": ", ".join(versions),
        "host": f"{here['processor']}, {here['cpus']} cores, {platform.system()}",
    }


def severity(finding: Finding) -> float:
    """Error/bound of a finding's worst element; infinite where it has none or the bound is 0."""
    if finding.got is None or finding.expected is None or not finding.bound:
        return math.inf
    ratio = abs(finding.got - finding.expected) / finding.bound
    return math.inf if math.isnan(ratio) else ratio


def allowed(loss: Loss) -> float:
    """The allowed rms relative to the reference's rms; NaN where that is unknown."""
    for relative, rms in ((loss.relative, loss.rms), (loss.own_relative, loss.own_rms)):
        if rms and math.isfinite(rms) and math.isfinite(relative):
            return loss.allowed_rms * (relative / rms)
    return math.nan


def _finding(finding: Finding, folder: Path | None) -> dict[str, Any]:
    replay = ""
    if folder is not None:
        replay = finding.command((folder / finding.file_name).as_posix())
    said = None if finding.problem is None else str(finding.problem)
    return finding.to_json() | {"severity": severity(finding), "said": said, "replay": replay}


def _extend(run: dict[str, Any], report: CheckpointReport) -> None:
    run["own"] = report.precision not in (OWN, INT8.name)
    for row, checkpoint in zip(run["checkpoints"], report.checkpoints, strict=True):
        row["allowed"] = allowed(checkpoint.loss)
    for step, judged in zip(run["steps"], report.steps, strict=True):
        shape = "×".join(map(str, judged.problem.output[1:]))
        step["label"] = f"{judged.problem.op.label} → {shape}"


__all__ = ["allowed", "page", "page_data", "severity", "surroundings"]
