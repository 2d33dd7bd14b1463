"""A verification as text, as plain data, and as JUnit XML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from tabulate import tabulate

from r18.errors import counted
from r18.graph.precision import INT8
from r18_oracle.findings import Finding
from r18_oracle.network import checkpoint_report
from r18_oracle.search.campaign import KernelReport
from r18_oracle.search.network_run import program_label
from r18_oracle.search.verify import BackendResult, Verification

HEADS = ("kernel", "problems", "refused", "error/bound", "sees", "s", "verdict")
LEGEND = (
    "error/bound: the largest error over its derived bound; above 1 is a fault, 0 is exact\n"
    "sees: the smallest relative error that was sure to be seen, anywhere in an output\n"
    "loss: the network's error over what is allowed; step's worst: error/bound of each step alone"
)


def text(verification: Verification) -> str:
    """For each backend a table of kernels and tables of checkpoints; then a summary."""
    parts = [_backend(result) for result in verification.backends]
    return "\n\n".join([*parts, *_expectations(verification), LEGEND, verification.closing()])


def _expectations(verification: Verification) -> list[str]:
    """The failures that were expected, and those that did not come."""
    lines = [
        f"expected: {finding.kernel}: {finding.check}: {entry}"
        for result in verification.backends
        for finding, entry in result.expected
    ]
    lines += [
        f"passes, though it is expected to fail: {test}; remove '{entry.test}' from the file"
        for test, entry in verification.passed
    ]
    return ["\n".join(lines)] if lines else []


def _backend(result: BackendResult) -> str:
    parts = [": ".join(filter(None, (result.name, str(result.device), result.left_out)))]
    if result.kernels:
        rows = [_row(report) for report in result.kernels]
        align = ("left", *["right"] * 5, "left")
        parts.append(tabulate(rows, HEADS, disable_numparse=True, colalign=align))
        parts += _refusals(result)
    for report in result.checkpoints:
        words = "image" if report.images == 1 else "images"
        against = "the integers specified" if report.precision == INT8.name else "float64"
        parts.append(
            f"{report.network} on {result.name} in {report.precision}, fusion '{report.fusion}', "
            f"{report.images} {words}, against {against}\n{checkpoint_report.text(report)}"
        )
    parts += [f"not run in {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n\n".join(parts)


def _refusals(result: BackendResult) -> list[str]:
    """Each reason for a refusal, with the number of problems and the kernels."""
    given: dict[str, list[tuple[str, int]]] = {}
    for report in result.kernels:
        for reason, count in report.tally.refused.items():
            given.setdefault(reason, []).append((report.kernel, count))
    lines = [
        f"refused: {counted(sum(count for _, count in by), 'problem')} by "
        f"{by[0][0] if len(by) == 1 else counted(len(by), 'kernel')}: {reason}"
        for reason, by in given.items()
    ]
    return ["\n".join(lines)] if lines else []


def _row(report: KernelReport) -> tuple[str, ...]:
    tally = report.tally
    return (
        report.kernel,
        str(tally.problems),
        str(sum(tally.refused.values())),
        f"{tally.ratio:.3g}" if tally.problems else "",
        ""
        if tally.resolution is None
        else f"{tally.resolution:.1e}"
        if tally.resolution
        else "all",
        f"{report.seconds:.1f}",
        report.verdict,
    )


def to_json(verification: Verification) -> dict[str, Any]:
    """Everything, as plain data."""
    request = verification.request
    return {
        "profile": request.profile.name,
        "network": request.network,
        "weights": request.weights,
        "seed": request.seed,
        "seconds": round(verification.seconds, 3),
        "executed": verification.executed,
        "closing": verification.closing(),
        "left": list(verification.left),
        "findings": [finding.to_json() for finding in verification.findings],
        "expected_failures": [
            {"finding": finding.to_json(), "reason": entry.reason, "link": entry.link}
            for result in verification.backends
            for finding, entry in result.expected
        ],
        "unexpected_passes": [test for test, _ in verification.passed],
        "backends": [
            {
                "name": result.name,
                "device": {"kind": result.device.kind, "name": result.device.name}
                | dict(result.device.details),
                "kernels": [kernel_json(report) for report in result.kernels],
                "checkpoints": [report.to_json() for report in result.checkpoints],
                "skipped": result.skipped,
                "left_out": result.left_out,
            }
            for result in verification.backends
        ],
    }


def kernel_json(report: KernelReport) -> dict[str, Any]:
    """One kernel's report, as plain data."""
    tally = report.tally
    return {
        "kernel": report.kernel,
        "verdict": report.verdict,
        "problems": tally.problems,
        "network_problems": report.network_problems,
        "choices": {name: tally.problems for name, tally in report.choices.items()},
        "refused": dict(tally.refused),
        "checks": dict(tally.passed),
        "error_over_bound": tally.ratio,
        "error_over_statistical_line": tally.sharp,
        "smallest_fault_seen": tally.resolution,
        "unjudged_elements": tally.unjudged,
        "seconds": round(report.seconds, 3),
    }


@dataclass(frozen=True)
class _Case:
    """A JUnit test case: it failed with these findings, or was skipped for that reason."""

    name: str
    seconds: float
    findings: list[Finding]
    skipped: str = ""


def junit(verification: Verification) -> str:
    """JUnit XML: a suite a backend, a case a kernel, network and coverage problem."""
    root = ElementTree.Element("testsuites", name="r18 verify")
    for result in verification.backends:
        cases = list(_cases(result, verification.request.fusion))
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=result.name,
            tests=str(len(cases)),
            failures=str(sum(bool(case.findings) for case in cases)),
            errors="0",
            skipped=str(sum(bool(case.skipped) for case in cases)),
            time=f"{sum(case.seconds for case in cases):.3f}",
        )
        for case in cases:
            element = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"r18.{result.name}",
                name=case.name,
                time=f"{case.seconds:.3f}",
            )
            if case.skipped:
                ElementTree.SubElement(element, "skipped", message=_printable(case.skipped))
            for finding in case.findings:
                failure = ElementTree.SubElement(
                    element, "failure", type=finding.check, message=_printable(finding.message)
                )
                failure.text = _printable(finding.describe())
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Without what XML cannot hold: a kernel may raise anything, colours of a terminal too."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _cases(result: BackendResult, fusion: str) -> Iterator[_Case]:
    told: list[Finding] = []
    expected = {id(finding): str(entry) for finding, entry in result.expected}
    for kernel in result.kernels:
        if reason := expected.get(id(kernel.finding)):
            yield _Case(kernel.kernel, kernel.seconds, [], f"expected failure: {reason}")
            continue
        mine = [kernel.finding] if kernel.finding else []
        told += mine
        reasons = "; ".join(kernel.tally.refused)
        refused = f"refused every problem: {reasons}" if kernel.verdict == "refused" else ""
        yield _Case(kernel.kernel, kernel.seconds, mine, refused)
    for report in result.checkpoints:
        told += report.findings
        label = program_label(result.name, report.fusion, report.precision)
        yield _Case(label, 0.0, [f for f in report.findings if id(f) not in expected])
    others = [finding for finding in result.findings if finding not in told]
    for finding in others:
        yield _Case(finding.kernel, 0.0, [finding])
    failed = {finding.kernel for finding in others}
    for precision, reason in result.skipped.items():
        label = program_label(result.name, fusion, precision)
        if label not in failed:
            yield _Case(label, 0.0, [], reason)
