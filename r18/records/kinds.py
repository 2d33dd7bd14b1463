"""The contents of each kind of record. A record is checked against its type as it is decoded.

An unknown field, a missing one and a value of another type are errors. Fields are in the order in
which they are written, so that a record that is decoded and encoded again is the same file. A
field with the default `UNSET` came later than the format, or is written only where it has a value.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Number = int | float
"""A JSON number as it is written, so that 1 stays 1."""
AnyNumber = Number | Literal["nan", "inf", "-inf"]
"""A number that need not be finite; JSON has no such numbers."""
Count = Annotated[int, Meta(ge=0)]


class Part(Struct, forbid_unknown_fields=True):
    """An object of a record."""


# -- what a run depended on ----------------------------------------------------------------------


class Environment(Part):
    """See `r18.records.environment`. device: its kind, its name and details of its own."""

    device: dict[str, str]
    platform: str
    python: str
    packages: dict[str, str]
    driver: str | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        for name in ("kind", "name"):
            if name not in self.device:
                raise ValueError(f"Object missing required field `{name}` in `device`")


class CpuFacts(Part):
    """See `r18.cpu.Cpu`."""

    name: str
    threads: int
    cores: int
    nodes: int
    instructions: list[str]
    caches: dict[str, int]
    sharing: dict[str, int]


class Machine(Part):
    """See `r18.machine.machine`. cpu: since records tell it."""

    platform: str
    processor: str
    cpus: int
    threads: int
    load_average: tuple[Number, Number, Number] | None
    python: str
    numpy: str
    r18: str
    cpu: CpuFacts | UnsetType = UNSET


class WeightsId(Part):
    source: str
    sha256: str


class OfDevice(Part, kw_only=True, tag_field="record"):
    """The head of every record: its kind, as the tag, its format and its device.

    times: the record's numbers depend on the device's speed.
    """

    times: ClassVar[bool] = False
    format: int = 1
    device: str


class Skipped(Part):
    contender: str
    reason: str


# -- bench ---------------------------------------------------------------------------------------


class BenchStep(Part):
    step: str
    kernel: str
    milliseconds: Number
    phase: str | UnsetType = UNSET


class FromHost(Part):
    """See `r18.bench.inputs.from_host.FromHost`."""

    nbytes: int
    batches: int
    runs_ms: list[Number]
    copies_ms: list[Number]
    median_ms: Number
    copy_ms: Number
    images_per_second: Number
    share: Number
    copy_bytes_per_second: Number


class BenchError(Part):
    """See `r18.bench.error.Error`."""

    relative: AnyNumber
    images: int
    reference: Literal["float64", "integers"]


class BenchCold(Part):
    """See `r18.bench.inputs.cold.Cold`."""

    nbytes: int
    runs: int
    median_ms: Number
    p10_ms: Number
    p90_ms: Number


class BenchRow(Part, kw_only=True):
    """See `r18.bench.rows.Row`. Milliseconds are of a whole batch.

    error, cold: since records have them; no_error says why a newer row has no error.
    """

    backend: str
    device: str
    fusion: str
    ratio: Number | None
    arena_nbytes: int | None
    weight_nbytes: int | None
    peak_rss_nbytes: int | None
    steps: list[BenchStep]
    algorithm: str
    kernels: dict[str, int]
    best_ratio: Number | None
    best_peer: str
    loss: Number | None
    from_host: FromHost | UnsetType | None = UNSET
    error: BenchError | UnsetType | None = UNSET
    no_error: str | UnsetType = UNSET
    error_ratio: Number | UnsetType | None = UNSET
    cold: BenchCold | UnsetType | None = UNSET
    median_ms: Number
    p10_ms: Number
    p90_ms: Number
    series_ms: list[Number] | UnsetType = UNSET
    ms_per_image: Number
    images_per_second: Number


class BenchGroup(Part, kw_only=True):
    """The contenders that took turns in one run, and can be compared."""

    precision: str
    fusion: str
    batch: int
    warmup: int
    repeat: int
    series: int | UnsetType = UNSET
    date: str
    environment: Environment
    network: str
    weights: WeightsId
    machine: Machine
    skipped: list[Skipped]
    rows: list[BenchRow]


class Bench(OfDevice, kw_only=True, tag="bench"):
    """`r18 bench --record`. ratio: the denominator of the rows' ratios, in words."""

    times: ClassVar[bool] = True
    ratio: str
    groups: dict[str, BenchGroup]


# -- profile -------------------------------------------------------------------------------------


class ProfileRow(Part):
    """See `r18.bench.profile.Row`."""

    contender: str
    cpu_ms: Number
    cuda_ms: Number | None
    cpu_ratio: Number
    cuda_ratio: Number | None
    loss: Number | None


class ProfileGroup(Part):
    backend: str
    precision: str
    batch: int
    channels_last: bool
    date: str
    environment: Environment
    repeat: int
    weights: WeightsId
    machine: Machine
    skipped: list[Skipped]
    rows: list[ProfileRow]


class Profile(OfDevice, kw_only=True, tag="profile"):
    """`r18 profile --record`."""

    times: ClassVar[bool] = True
    groups: dict[str, ProfileGroup]


# -- verify --------------------------------------------------------------------------------------


class Found(Part):
    """A finding as `r18_oracle.findings.Finding.to_json` writes it."""

    finding: Literal[1]
    check: str
    backend: str
    kernel: str
    problem: dict[str, Any] | None
    kind: str
    seed: int
    message: str
    coordinate: list[int] | None
    got: str | None
    expected: str | None
    bound: str | None
    details: dict[str, Any]


class VerifiedKernel(Part, kw_only=True):
    """A verified kernel. digest: of the sources and of the ids of the choices. environment: a key
    of `environments`. carried: the revision that ran, where sources have changed since and
    tools/carry_evidence.py found what a device gets unchanged.

    choices: how often each was taken. checks: how often each was made. Ratios are None where
    nothing was compared.
    """

    profile: str
    network: str | None
    seed: int
    date: str
    environment: str
    digest: str | None
    verified: bool
    findings: list[Found]
    verdict: str
    problems: Count
    network_problems: Count
    choices: dict[str, int] | UnsetType = UNSET
    refused: dict[str, int]
    checks: dict[str, int]
    error_over_bound: Number | None
    error_over_statistical_line: Number | None
    smallest_fault_seen: Number | None
    unjudged_elements: Count
    carried: str | UnsetType = UNSET
    seconds: Number


class VerifiedCheckpoint(Part):
    """See `r18_oracle.network.losses.Loss`."""

    name: str
    value: str
    ok: bool
    steps: list[str]
    forced: str | None
    max_abs: AnyNumber
    rms: AnyNumber
    relative: AnyNumber
    cosine: AnyNumber
    own_rms: AnyNumber
    own_max: AnyNumber
    own_relative: AnyNumber
    allowed_rms: AnyNumber
    allowed_max: AnyNumber
    ratio: AnyNumber
    nonfinite: int
    coordinate: list[int] | None
    got: AnyNumber | None
    expected: AnyNumber | None


class VerifiedStep(Part):
    step: str
    kernel: str
    problem: str
    first_image: int
    ratio: AnyNumber
    sharp: AnyNumber | None
    check: str
    message: str
    coordinate: list[int] | None
    got: AnyNumber | None
    expected: AnyNumber | None
    bound: AnyNumber | None
    picture: dict[str, Any] | None
    ok: bool


class Tie(Part):
    image: int
    margin: AnyNumber
    first: int
    second: int
    got: int


class TopOne(Part):
    images: int
    bound: AnyNumber
    ties: list[Tie]
    wrong: list[Tie]


class VerifiedNetwork(Part):
    profile: str
    network: str
    seed: int
    date: str
    environment: str
    weights: str
    verified: bool
    backend: str
    precision: str
    fusion: str
    images: int
    batch: int
    source: str
    multiple: Number
    ok: bool
    checkpoints: list[VerifiedCheckpoint]
    steps: list[VerifiedStep]
    top1: TopOne | None
    findings: list[Found]


class Verify(OfDevice, kw_only=True, tag="verify"):
    """`r18 verify --record`."""

    environments: dict[str, Environment]
    kernels: dict[str, VerifiedKernel]
    networks: dict[str, VerifiedNetwork]


# -- check ---------------------------------------------------------------------------------------


class CheckRun(Part):
    """The request of an `r18 check`, and where it ran. machine: of the last run there."""

    profile: str
    network: str | None
    seed: int
    environment: Environment
    machine: Machine


class CheckedFunction(Part, kw_only=True):
    """A function of another library, as `r18 check` judged it.

    library:  its name and version. found: the contract that was found, and words, for people.
    fault:    why a function that is wrong is no false alarm; "" for one that is right.
    reduced:  how the search of a slow function was reduced; "" if it was not.
    seconds:  of the whole command, with its imports.
    """

    run: str
    date: str
    library: str
    operator: str
    dtype: str
    arrays: str
    contract: str
    found: str | None
    words: str
    below: list[str]
    notes: list[str]
    verdict: str
    ok: bool
    fault: str
    problems: Count
    refused: dict[str, int]
    checks: dict[str, int]
    error_over_bound: Number | None
    reduced: str
    seconds: Number
    findings: list[Found]


class Check(OfDevice, kw_only=True, tag="check"):
    """`tools/check_foreign.py --record`."""

    runs: dict[str, CheckRun]
    functions: dict[str, CheckedFunction]


# -- mutate --------------------------------------------------------------------------------------


class MutateFinding(Part):
    check: str
    kernel: str
    kind: str
    seed: int
    message: str


class Fate(Part, kw_only=True):
    """The fate of a mutant; if it was not killed, also where and what it is."""

    digest: str
    environment: str
    file: str | UnsetType = UNSET
    line: int | UnsetType = UNSET
    scope: str | UnsetType = UNSET
    operator: str | UnsetType = UNSET
    before: str | UnsetType = UNSET
    after: str | UnsetType = UNSET
    status: str
    reason: str
    kernels: list[str]
    finding: MutateFinding | None
    problem: str | None
    seconds: Number
    sanitizer: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.status == "killed":
            if self.finding is None:
                raise ValueError("Expected a finding of a mutant with the status `killed`")
            return
        for name in ("file", "line", "scope", "operator", "before", "after"):
            if getattr(self, name) is UNSET:
                raise ValueError(f"Object missing required field `{name}`")


class PaceOf(Part):
    """An unchanged kernel that passed."""

    digest: str
    environment: str
    seconds: Number
    silence: Number


class MutateSample(Part, kw_only=True):
    """A request and its results; as in `MutateRun`."""

    date: str
    kernels: str
    files: str
    limit: int | None
    mutants: Count
    killed: Count
    survived: Count
    equivalent: Count
    invalid: Count
    further: Count
    left: Count
    score: Number


class MutateRun(Part, kw_only=True):
    date: str
    profile: str
    seed: int
    network: str | None
    kernels: str
    files: str
    limit: int | None
    backend: str
    mutants: Count
    killed: Count
    survived: Count
    equivalent: Count
    invalid: Count
    further: Count
    left: Count
    score: Number
    environments: dict[str, Environment]
    unchanged: dict[str, PaceOf]
    by_hand: dict[str, str] | UnsetType = UNSET
    state: dict[str, dict[str, Count]] | UnsetType = UNSET
    """How many structural mutants of each class have which status. The score is of tokens."""
    samples: dict[str, MutateSample] | UnsetType = UNSET
    """The last run of other files, by their glob. The first run's files keep the score above."""
    results: dict[str, Fate]


class Mutate(OfDevice, kw_only=True, tag="mutate"):
    """`r18 mutate --record`."""

    backends: dict[str, MutateRun]


# -- sanitize ------------------------------------------------------------------------------------


class SanitizeRun(Part):
    profile: str
    network: str | None
    seed: int
    sanitizer: str
    environment: Environment


class SanitizeComplaint(Part):
    what: str
    function: str
    count: int


class SanitizedKernel(Part):
    digest: str | None
    run: str
    date: str
    problems: Count
    errors: int | None
    complaints: list[SanitizeComplaint] | UnsetType = UNSET
    broken: str | UnsetType = UNSET


class SanitizedTool(Part):
    date: str
    errors: Count
    verdict: str
    missing: Count
    kernels: dict[str, SanitizedKernel]


class Sanitize(OfDevice, kw_only=True, tag="sanitize"):
    """`r18 sanitize --record`."""

    sanitizer: str
    runs: dict[str, SanitizeRun]
    tools: dict[str, SanitizedTool]


# -- perturb -------------------------------------------------------------------------------------


class PerturbRun(Part):
    """A run with perturbed schedules. seed: of problems and inputs. seeds: of delays, for each
    problem. kinds: of sites."""

    profile: str
    network: str | None
    seed: int
    seeds: Count
    kinds: list[str]
    environment: Environment


class PerturbedKernel(Part):
    """A kernel that ran with delays. calls: with and without delays."""

    digest: str | None
    run: str
    date: str
    problems: Count
    calls: Count
    seconds: Number
    finding: Found | UnsetType = UNSET


class PerturbedProgram(Part):
    """A program that ran with delays. batches: in a row, with each seed. broken: what was wrong."""

    run: str
    date: str
    batches: Count
    calls: Count
    seconds: Number
    broken: str | UnsetType = UNSET


class Perturb(OfDevice, kw_only=True, tag="perturb"):
    """`r18 perturb --record`."""

    runs: dict[str, PerturbRun]
    kernels: dict[str, PerturbedKernel]
    programs: dict[str, PerturbedProgram]


# -- evaluate ------------------------------------------------------------------------------------


class Accuracy(Part):
    images: int
    top1: Number
    top5: Number


class Quantised(Part):
    """How weights and activations of int8 were made; see `r18.graph.quantization.Calibration`."""

    bits: int
    method: str
    rounding: str
    images: Count
    sha256: str


class EvaluateEntry(Part):
    """A finished evaluation: the request, the numbers of the summary, and how long it took."""

    date: str
    environment: Environment
    machine: Machine
    network: str
    weights_sha256: str
    backend: str
    against: str | None
    precision: str
    against_precision: str
    fusion: str
    batch: int
    version: str
    workers: int | None
    folder: str
    layout: str
    images_sha256: str
    images: Count
    unreadable: Count
    compared: Count
    agree_top1: Count
    agree_top5: Count
    bound: Number | None
    near_ties: Count
    backend_ms: Number | None
    reference_ms: Number | None
    speedup: Number | None
    accuracy: Accuracy | None
    reference_accuracy: Accuracy | None
    changed: Count
    not_read: Count
    resumed: Count
    seconds: Number
    images_per_second: Number | None
    quantised: Quantised | UnsetType = UNSET


class Evaluate(OfDevice, kw_only=True, tag="evaluate"):
    """`r18 evaluate --record`."""

    times: ClassVar[bool] = True
    entries: dict[str, EvaluateEntry]


# -- explain -------------------------------------------------------------------------------------


class ExplainedStep(Part):
    """A step of a run in int8: its elements that differ from another run's, and why.

    logits: whether they are floats. inherited: those that follow from other inputs. classes: those
    that the step itself computes differently, by class. moved: as of `Explained`.
    """

    step: str
    logits: bool
    elements: Count
    differ: Count
    inherited: Count
    classes: dict[str, Count]
    arithmetic: str
    moved: Number


class ExplainEntry(Part):
    """The departures of one run from another, which is as specified."""

    date: str
    environment: Environment
    machine: Machine
    network: str
    weights_sha256: str
    input_sha256: str
    expected: str
    got: str
    unexplained: Count
    steps: list[ExplainedStep]


class Explain(OfDevice, kw_only=True, tag="explain"):
    """`r18 diff --explain --record`."""

    entries: dict[str, ExplainEntry]


# -- ceilings ------------------------------------------------------------------------------------


class Rate(Part):
    operations_per_second: Number
    best: Number
    runs: int
    how: str


class CopyRate(Part):
    bytes_per_second: Number
    best: Number
    runs: int
    how: str


class Pace(Part):
    """See `r18.backend.ceilings.Pace`."""

    per_second: Number
    best: Number
    runs: int


class MeasuredCeiling(Part):
    """See `r18.backend.ceilings.Ceiling`."""

    sustained: Pace
    burst: Pace
    how: str


class CeilingsRecord(OfDevice, kw_only=True, tag="ceilings"):
    """`r18 roofline --measure`. threads: of a CPU.

    rates, copy:  of a library's matrix products, and of its copy.
    instructions: operations a second, by precision and instruction. memory: bytes a second, by
    the kind of access. Both only for devices whose backend measures them.
    """

    times: ClassVar[bool] = True
    date: str
    environment: Environment
    machine: Machine
    threads: int | None
    rates: dict[str, Rate]
    copy: CopyRate
    instructions: dict[str, dict[str, MeasuredCeiling]] | UnsetType = UNSET
    memory: dict[str, MeasuredCeiling] | UnsetType = UNSET


# -- tuned ---------------------------------------------------------------------------------------


class Tuned(Part, kw_only=True):
    """`r18 tune`: precision → problem at batch 1 → batch → (kernel id, microseconds)."""

    format: Literal[1] = 1
    device: str
    unit: Literal["microseconds"]
    choices: dict[str, dict[str, dict[str, tuple[str, Number]]]]


Record = (
    Bench
    | Profile
    | Verify
    | Check
    | Mutate
    | Sanitize
    | Perturb
    | Evaluate
    | Explain
    | CeilingsRecord
)

KINDS: dict[str, type[Record]] = {
    "bench": Bench,
    "profile": Profile,
    "verify": Verify,
    "check": Check,
    "mutate": Mutate,
    "sanitize": Sanitize,
    "perturb": Perturb,
    "evaluate": Evaluate,
    "explain": Explain,
    "ceilings": CeilingsRecord,
}
"""The kinds by the word in their file names."""
