"""The check `state`: a kernel that is right alone is right after other calls, too.

A cache keyed by too little, scratch that two programs share, weights that are changed while they
are prepared: a single call in a fresh process shows none of them. So one small problem A is called
in sequences, each a scenario of its own:

| scenario    | what is called                                                                   |
|-------------|----------------------------------------------------------------------------------|
| a field     | A, B, A, with B like A but for one field: stride_h, relu, padding_w, bias, n, …  |
| `same_output` | B, C, B, with C like a B but for an image whose output has the same shape      |
| `same_channels` | B, C, B, with the same total channels: B in two groups, C in four             |
| `several`   | A and every B, all prepared first, then called, and called again in reverse      |
| `inputs`    | A, the same program on other inputs, A                                           |
| `weights`   | programs whose weights are at the same addresses, one after another              |
| `prepared`  | two programs that two threads prepare line by line, each with its own weights    |
| `twin`      | two programs of the same weights, in turn and line by line in two threads        |
| `threads`   | four programs of different problems in four threads, line by line and freely     |
| `thread_count` | a program that was planned for another number of threads                      |

Every result is judged against its own reference, A's results must have the same bits if the kernel
is deterministic, and weights must be the same before and after.

A kernel may be wrong on B for any other reason. So before B is blamed on A, other problems with B's
field are called, which A cannot have prepared the way for. If one of them is wrong too, B is a
suspect for the ordinary checks. Other faults are confirmed in a fresh process
(`r18_oracle.search.history`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice, repeat
from typing import Any, NoReturn, TypeVar

import numpy as np

from r18.backend import (
    Array,
    Backend,
    Kernel,
    Launch,
    download,
    input_layout,
    output_layout,
    prepare_weights,
    upload,
)
from r18.backend.host import HostMemory
from r18.errors import UnknownName, UsageError, shortened
from r18.graph.ops import Problem
from r18_oracle.cases import Case
from r18_oracle.check.call import (
    Arena,
    Raised,
    attempted,
    bits_differ,
    buffer_sizes,
    copied,
    nans,
    stray_write,
)
from r18_oracle.check.relatives import others, regrouped
from r18_oracle.check.tally import Tally
from r18_oracle.check.turns import alternating, thread_count, together
from r18_oracle.check.watch import Process
from r18_oracle.findings import BEFORE, STATE, Failed, Finding, failed, problem_to_json
from r18_oracle.generate.inputs import make_case
from r18_oracle.generate.sizes import takes
from r18_oracle.judge.declared import declaration
from r18_oracle.judge.reference import kernel_running
from r18_oracle.judge.verdict import judge, ratio_text

T = TypeVar("T")

KIND = "normal"
RELATIVES = 3
"""Problems that are tried before B is blamed on A."""
FREED = 24
FREED_ON_DEVICE = 4
"""Programs that are made and freed in turn, until one is where another has been. Python's objects
need more turns than the blocks of a device's allocator, which the next program gets."""
VALUES = 3
"""The number of different weights that those programs have."""
KEPT = 8
"""Programs that are made and kept until one is where none has been."""
AGAIN = 3
"""Calls of A that must repeat the first, before anything else is called."""
ROUNDS = 3
"""Runs of threads that are not held in step."""
THREADS = 4
"""Threads, each with a program of its own: a pool of two of something is enough for two."""
PLANNED = ((1, 3), (3, 1))
"""Threads when a program is planned and when it runs."""
NEW = "in a new program, after other programs of the kernel were freed"
"""How a message describes the first call of a program whose problem was right before."""


@dataclass(frozen=True)
class Fault:
    """A message about one wrong result, and the worst element where values were compared."""

    message: str
    coordinate: tuple[int, ...] | None = None
    got: float | None = None
    expected: float | None = None
    bound: float | None = None


class _Program:
    """A kernel prepared for one problem, as a compiled program holds it, with its own buffers."""

    def __init__(
        self, backend: Backend, kernel: Kernel, case: Case, given: tuple[Array, ...]
    ) -> None:
        self.kernel, self.case, self.memory = kernel, case, backend.memory
        problem = copied(case.problem)
        names = [spec.role for spec in problem.op.weights()]
        with kernel_running():
            self.weights = prepare_weights(kernel, problem, names, given)
            scratch_nbytes = kernel.workspace(problem)
        self.arena = arena = Arena.of(self.memory, buffer_sizes(case, scratch_nbytes))
        inputs = tuple(arena.buffer(f"input {index}") for index in range(len(case.inputs)))
        output, scratch = arena.buffer("output"), arena.buffer("workspace")
        self.launch = Launch(kernel, problem, inputs, self.weights, output, scratch)
        self.stream = backend.stream()

    def fill(self, case: Case) -> None:
        """Write the inputs, and NaN everywhere else."""
        self.case = case
        self.memory.upload(nans(self.arena.nbytes), self.arena.whole)
        layout = input_layout(self.kernel, case.problem)
        for array, buffer in zip(case.inputs, self.launch.inputs, strict=True):
            upload(self.memory, array, layout, array.dtype, buffer)
        self._before = self.arena.read()

    def run(self) -> None:
        self.launch.enqueue(self.stream)
        self.stream.synchronize()

    def run_alone(self) -> None:
        """Run it while the reference is out of reach."""
        with kernel_running():
            self.run()

    def output(self) -> Array:
        problem = self.case.problem
        layout, output = output_layout(self.kernel, problem), self.arena.buffer("output")
        return download(self.memory, output, problem.output, layout, self.case.output_dtype)

    def trespass(self) -> str | None:
        return stray_write(self.arena, self._before, self.arena.read())


class State:
    """The check `state` of one kernel on one problem A, with one seed.

    announce: called with (A, "state", seed) before each program is made.
    """

    def __init__(
        self,
        backend: Backend,
        kernel: Kernel,
        problem: Problem,
        seed: int,
        tally: Tally | None = None,
        *,
        backend_name: str | None = None,
        announce: Callable[[Problem, str, int], None] = lambda problem, kind, seed: None,
    ) -> None:
        self.backend, self.kernel, self.problem, self.seed = backend, kernel, problem, seed
        self.tally = tally or Tally()
        self.backend_name = backend_name or backend.name
        self.announce = announce
        self.others = others(kernel, problem)
        self.suspects: list[Problem] = []
        self._name: str | None = None
        self._calls: list[Problem] = []
        self._cases: dict[tuple[Problem, int, int], Case] = {}
        self._case = self._case_of(problem)
        self._process = Process.now()
        self._watched = True
        self._declared = declaration(kernel)

    def run(self, only: str | None = None) -> list[Problem]:
        """Play every scenario, or one of them; return the problems that the ordinary checks should
        look at.

        Raises `Failed` with the finding at the first result that other calls have changed.
        """
        if not self.right_alone():
            return [self.problem]
        plays: dict[str, Callable[[], None]] = {
            "weights": self._weights,
            "inputs": self._inputs,
            "prepared": self._prepared,
            "twin": self._twin,
            "thread_count": self._thread_count,
        }
        for name, other in self.others.items():
            plays[name] = partial(self._field, name, other)
        plays |= {
            "same_output": self._same_output,
            "same_channels": self._same_channels,
            "several": self._several,
            "threads": self._threads,
        }
        for name in plays if only is None else [only]:
            if name in plays and self.problem not in self.suspects:
                self._scenario(name, plays[name])
        self._same_declaration()
        return self.suspects

    def _scenario(self, name: str, play: Callable[[], None]) -> None:
        self._name, self._calls = name, []
        play()
        self.tally.passed["state"] += 1

    def right_alone(self) -> bool:
        """Whether A is right in some calls of a new program.

        If not, the ordinary checks say what is wrong, and the scenarios tell nothing.
        """
        self._name, self._calls = None, []
        program = self._program(self._case)
        if isinstance(program, Fault):
            return False
        first = self._result(program, self._case)
        if isinstance(first, Fault):
            return False
        again = (self._result(program, self._case, first) for _ in range(AGAIN))
        right = not any(isinstance(result, Fault) for result in again)
        self._same_declaration()
        return right

    def _same_declaration(self) -> None:
        """After its calls, the kernel declares what it declared, and takes what it took."""
        now = declaration(self.kernel)
        if other := [name for name, value in self._declared.items() if value != now[name]]:
            fault = Fault(f"its {other[0]} changed while it ran")
            self._fail(self.problem, fault, "", "declaration")
        if not takes(self.kernel, self.problem):
            fault = Fault("refuses the problem after running it")
            self._fail(self.problem, fault, "", "refusal")

    # -- the scenarios -------------------------------------------------------------------------

    def _field(self, name: str, other: Problem) -> None:
        how = f"after a call that differs in {name} only"
        self._between(self._case, name, other, how)

    def _same_output(self) -> None:
        """Find state kept by the output's shape, not the image's: it serves two images of one
        output."""
        good = (p for p in self.others.values() if p not in self.suspects)
        pairs = (
            (base, name, other)
            for base in good
            for name, other in others(self.kernel, base).items()
            if (other.op, other.output) == (base.op, base.output)
        )
        for base, name, other in islice(pairs, 1):
            how = "after a call on another image whose output has the same shape"
            self._between(self._case_of(base), name, other, how)

    def _same_channels(self) -> None:
        """Find state kept by the total channels: it serves two numbers of groups.

        A grouped weight that is expanded to a dense one, for example: B's values remain where C
        needs zeros.
        """
        pair = regrouped(self.kernel, self.problem)
        if pair is not None:
            few, many = pair
            case = self._case_of(few)
            program = self._program(case)
            if isinstance(program, Fault) or self._fault(program, case) is not None:
                self.suspects.append(few)
                return
            how = "after a call with as many channels in another number of groups"
            self._between(case, "groups", many, how)

    def _between(self, mine: Case, name: str, other: Problem, how: str) -> None:
        """Run a case, then `other`, and the case again. name: the field in which `other` is new."""
        program = self._made(mine)
        first = self._must(program, mine, NEW)
        case = self._case_of(other)
        theirs = self._program(case)
        fault = theirs if isinstance(theirs, Fault) else self._fault(theirs, case)
        if fault is not None:
            if self._relatives_are_right(name, other):
                self._fail(other, fault, how)
            self.suspects.append(other)
            return
        self._must(program, mine, how, first)

    def _several(self) -> None:
        good = [p for p in self.others.values() if p not in self.suspects]
        cases = [self._case, *map(self._case_of, good)]
        programs = [self._made(case) for case in cases]
        order = [*zip(programs, cases, strict=True)]
        first = [self._must(program, case, "among several programs") for program, case in order]
        for (program, case), result in reversed([*zip(order, first, strict=True)]):
            self._must(program, case, "after calls of several programs", result)

    def _inputs(self) -> None:
        program = self._made(self._case)
        first = self._must(program, self._case, NEW)
        case = self._case_of(self.problem, inputs=1)
        fault = self._fault(program, case)
        if fault is not None:
            if not self._right_elsewhere(case):
                self.suspects.append(self.problem)
                return
            self._fail(self.problem, fault, "after a call with other inputs at the same addresses")
        self._must(program, self._case, "after a call with other inputs", first)

    def _weights(self) -> None:
        """Put other values into the same host arrays; then free programs and make them again."""
        if not self._case.weights:
            return
        given = self._given(self._case)
        mine = self._made(self._case, given)
        first = self._must(mine, self._case, NEW)
        case = self._case_of(self.problem, 1, 1)
        for array, new in zip(given, self._given(case), strict=True):
            array[...] = new
        theirs = self._made(case, given)
        how = "with other values in the weights' arrays after a program was made of them"
        fault = self._fault(theirs, case)
        if fault is not None:
            if self._fault(self._made(case), case) is not None:
                self.suspects.append(self.problem)
                return
            self._fail(self.problem, fault, how)
        self._must(mine, self._case, how, first)
        del mine, theirs
        # Made first: arrays that stay would take the places of freed ones.
        cases = [self._case_of(self.problem, v, v) for v in range(2, 2 + VALUES)]
        on_host = isinstance(self.backend.memory, HostMemory)
        for case in islice(cycle(cases), FREED if on_host else FREED_ON_DEVICE):
            fault = self._fault(self._made(case), case)
            if fault is None:
                continue
            if self._right_elsewhere(case):
                self._fail(self.problem, fault, "after a program with other weights was freed")
            self.suspects.append(self.problem)
            return

    def _prepared(self) -> None:
        """Prepare two programs of different weights in two threads that take turns."""
        if not self._case.weights:
            return
        cases = (self._case, self._case_of(self.problem, 0, 1))
        if any(self._fault(self._made(case), case) is not None for case in cases):
            self.suspects.append(self.problem)
            return
        made: dict[int, _Program] = {}

        def make(index: int) -> None:
            case = cases[index]
            made[index] = _Program(self.backend, self.kernel, case, self._given(case))

        raised = alternating(partial(make, 0), partial(make, 1))
        how = "in a program that was prepared while another thread prepared one"
        for index, (error, case) in enumerate(zip(raised, cases, strict=True)):
            fault = _raised(error) if error else self._fault(made[index], case)
            if fault is not None:
                self._fail(self.problem, fault, how)

    def _twin(self) -> None:
        given = self._given(self._case)
        before = [array.tobytes() for array in given]
        programs = [self._made(self._case, given) for _ in range(2)]
        if [array.tobytes() for array in given] != before:
            if self._changes_float64():
                self.suspects.append(self.problem)
                return
            self._fail(self.problem, Fault("`prepare` wrote to the caller's weights"), "")
        one, two = programs
        how = "in one of two programs of the same weights"
        first = self._must(one, self._case, how)
        case = self._case_of(self.problem, inputs=1)
        second = self._must(two, case, how)
        self._must(one, self._case, how, first)
        pair = [(one, self._case, first), (two, case, second)]
        how = "in another thread, in turn with another program of its weights"
        self._in_threads(alternating, pair, how)

    def _threads(self) -> None:
        good = [p for p in self.others.values() if p not in self.suspects]
        problems = islice(chain(good, repeat(self.problem)), THREADS - 1)
        # With other values: problems of one seed begin with the same ones.
        rest = (self._case_of(problem, inputs=1 + i) for i, problem in enumerate(problems))
        cases = [self._case, *rest]
        programs = [self._made(case) for case in cases]
        before = [self._must(*call, NEW) for call in zip(programs, cases, strict=True)]
        calls = list(zip(programs, cases, before, strict=True))
        for run in (alternating, *repeat(together, ROUNDS)):
            self._in_threads(run, calls, "in another thread, while others ran other programs")

    def _thread_count(self) -> None:
        if not isinstance(self.backend.memory, HostMemory):
            return
        for planned, run in PLANNED:
            with self._on(planned):
                program = self._made(self._case)
            with self._on(run):
                how = f"on {run} thread(s) after it was planned for {planned}"
                self._must(program, self._case, how)

    @contextmanager
    def _on(self, count: int) -> Iterator[None]:
        """Run the block with another number of threads. A kernel that puts back the number that it
        found first is no concern of this check, so the state of the process is not looked at."""
        with thread_count(count):
            self._watched = False
            try:
                yield
            finally:
                self._watched = True

    # -- their parts ---------------------------------------------------------------------------

    def _in_threads(
        self,
        run: Callable[..., list[BaseException | None]],
        calls: list[tuple[_Program, Case, Array]],
        how: str,
    ) -> None:
        """Run programs in threads of their own; each must give the result that it gave before."""
        for program, case, _ in calls:
            program.fill(case)
            self._calls.append(case.problem)
        with kernel_running():
            raised = run(*(program.run for program, _, _ in calls))
        for error, (program, case, before) in zip(raised, calls, strict=True):
            fault = _raised(error) if error else self._judged(program, case, before)
            if fault is not None:
                self._fail(case.problem, fault, how)

    def _right_elsewhere(self, case: Case) -> bool:
        """Whether any of `KEPT` new programs of a case is right. All are kept, so that the last
        are at new addresses."""
        kept: list[_Program] = []
        while len(kept) < KEPT:
            kept.append(self._made(case))
            if self._fault(kept[-1], case) is None:
                return True
        return False

    def _relatives_are_right(self, name: str, other: Problem) -> bool:
        """Whether other problems with the same value of the field are right.

        They differ in two more sizes, so that no scenario called them with A's value of the field.
        """
        near = (p for key, p in others(self.kernel, other).items() if key != name)
        far = (p for one in near for key, p in others(self.kernel, one).items() if key != name)
        known = {self.problem, *self.others.values()}
        new = (p for p in far if p not in known)
        for problem in islice(new, RELATIVES):
            case = self._case_of(problem)
            program = self._program(case)
            if isinstance(program, Fault) or self._fault(program, case) is not None:
                return False
        return True

    def _case_of(self, problem: Problem, inputs: int = 0, weights: int = 0) -> Case:
        """The case with these variants of inputs and weights; the same object each time."""
        key = (problem, inputs, weights)
        if key not in self._cases:
            made, other = (
                make_case(self.kernel, problem, KIND, self.seed, v) for v in (inputs, weights)
            )
            self._cases[key] = replace(made, weights=other.weights)
        return self._cases[key]

    def _key(self, case: Case) -> Hashable:
        """The key of a case in the cache of answers."""
        which = next((key for key, known in self._cases.items() if known is case), None)
        return which and (STATE, *which, self.seed, case.precision, self.kernel.contract)

    def _given(self, case: Case) -> tuple[Array, ...]:
        """Host arrays to prepare from: float32 where that holds every value, else float64."""
        wide = case.handed()
        if case.precision.storage == "float64":
            return wide
        return tuple(array.astype(np.float32) for array in wide)

    def _changes_float64(self) -> bool:
        """Whether `prepare` also writes to float64 arrays, which `inputs_unchanged` sees."""
        wide = self._case.handed()
        before = [array.tobytes() for array in wide]
        self._made(self._case, wide)
        return [array.tobytes() for array in wide] != before

    def _made(self, case: Case, given: tuple[Array, ...] | None = None) -> _Program:
        """A program of a problem that the kernel was right on; fails if it cannot be made."""
        program = self._program(case, given)
        if isinstance(program, Fault):
            self._fail(case.problem, program, "when another program was made")
        return program

    def _program(self, case: Case, given: tuple[Array, ...] | None = None) -> _Program | Fault:
        self.announce(self.problem, STATE, self.seed)
        handed = self._given(case) if given is None else given
        return self._guarded(lambda: _Program(self.backend, self.kernel, case, handed))

    def _guarded(self, call: Callable[[], T]) -> T | Fault:
        """Call the kernel; what it raises is a fault. Fails `global_state`."""
        result = attempted(call)
        if self._watched and (change := self._process.change()) is not None:
            self._process.restore()
            self._fail(self.problem, Fault(f"the call {change}"), "", "global_state")
        if isinstance(result, Raised):
            return _raised(result.error)
        return result

    def _must(self, program: _Program, case: Case, how: str, before: Array | None = None) -> Array:
        """The result of a call that must be right, with the bits of `before` if deterministic."""
        result = self._result(program, case, before)
        if isinstance(result, Fault):
            self._fail(case.problem, result, how)
        return result

    def _fault(self, program: _Program, case: Case) -> Fault | None:
        result = self._result(program, case)
        return result if isinstance(result, Fault) else None

    def _result(self, program: _Program, case: Case, before: Array | None = None) -> Array | Fault:
        """Call a program: its output, or what is wrong with it."""
        self._calls.append(case.problem)
        prepared = [_bytes(program, index) for index in range(len(program.weights))]
        program.fill(case)
        if (fault := self._guarded(program.run_alone)) is not None:
            return fault
        for index, old in enumerate(prepared):
            if not np.array_equal(old, _bytes(program, index)):
                return Fault(f"prepared weight {index} was written to")
        return self._judged(program, case, before) or program.output()

    def _judged(self, program: _Program, case: Case, before: Array | None) -> Fault | None:
        """The fault in the output that a program holds, or None."""
        if (stray := program.trespass()) is not None:
            return Fault(stray)
        got = program.output()
        try:
            judgement = judge(case, self.kernel.contract, got, key=self._key(case))
        except (UnknownName, UsageError) as error:
            return Fault(f"no error bound follows from its contract: {error}")
        if not judgement.ok:
            return Fault(
                f"error exceeds the bound (error/bound {ratio_text(judgement.ratio)})",
                judgement.coordinate,
                judgement.got,
                judgement.expected,
                judgement.allowed,
            )
        if before is None or not self.kernel.deterministic:
            return None
        differs = bits_differ(before, got)
        if not differs.any():
            return None
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), got.shape))
        many = f"{np.count_nonzero(differs)} of {got.size} elements differ from the first call's"
        return Fault(many, at, float(got[at]), float(before[at]), 0.0)

    def _fail(self, problem: Problem, fault: Fault, how: str, check: str = "state") -> NoReturn:
        scenario: dict[str, Any] = {"scenario": self._name, "base": problem_to_json(self.problem)}
        raise failed(
            Finding(
                check=check,
                backend=self.backend_name,
                kernel=self.kernel.id,
                problem=problem,
                kind=KIND,
                seed=self.seed,
                message=shortened(f"{fault.message}, {how}" if how else fault.message),
                coordinate=fault.coordinate,
                got=fault.got,
                expected=fault.expected,
                bound=fault.bound,
                details={
                    STATE: scenario,
                    BEFORE: [{"problem": problem_to_json(p)} for p in self._calls[:-1]],
                },
            )
        )


def _raised(error: BaseException) -> Fault:
    return Fault(Raised(error).words())


def _bytes(program: _Program, index: int) -> Array:
    buffer = program.weights[index]
    return program.memory.download(buffer, (buffer.nbytes,), np.dtype(np.uint8))


__all__ = ["Failed", "State"]
