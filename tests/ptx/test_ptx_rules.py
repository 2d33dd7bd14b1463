"""Each rule on the shortest PTX that breaks it, and on the same PTX in the right order."""

from __future__ import annotations

import pytest

from r18_oracle.ptx.disorder import Disorder
from r18_oracle.ptx.parse import functions
from r18_oracle.ptx.rules import disorders

STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%r3], [%rd1, {%r1, %r2}], [%r4];"
)
FENCED = "wgmma.fence.sync.aligned;"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%f1}, %rd1, %rd2, 1, 1, 1;"
WGMMA = f"{FENCED} {PRODUCT}"
OTHER = WGMMA.replace("%f1", "%f4")
COPY = "cp.async.cg.shared.global [%r1], [%rd1], 16;"
FENCE, BARRIER, WRITE = "fence.proxy.async.shared::cta;", "bar.sync 0;", "st.shared.f32 [%r1], %f9;"
COMMIT, WAIT = "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"
RELEASE = "barrier.cluster.arrive.release.aligned;"
RELAXED = "barrier.cluster.arrive.relaxed.aligned;"
CLUSTER_WAIT = "barrier.cluster.wait.acquire.aligned;"
REMOTE = "ld.shared::cluster.v4.f32 {%f1, %f2, %f3, %f4}, [%r1];"
SEND = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r1], {%f1, %f2}, [%r2];"
INIT = "mbarrier.init.shared::cta.b64 [%r1], %r2;"
READ_X, PARAMETER = "ld.global.f32 %f1, [%rd1+4];", "ld.param.u64 %rd1, [f_param_0];"
SUM = "add.f32 %f2, %f1, %f3;"
GROUP, ALL_BUT_ONE = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"
PRODUCTS = "wgmma.wait_group.sync.aligned 0;"
PREVIOUS = "griddepcontrol.wait;"
SLOT, STAGE = (
    "mbarrier.arrive.shared::cta.b64 _, [%r1];",
    "mbarrier.arrive.shared::cta.b64 _, [%r2];",
)
TOGETHER = "bar.warp.sync -1;"


def found(
    *lines: str, constants: frozenset[int] = frozenset(), overlaps: bool = True
) -> list[Disorder]:
    body = "\n".join((*lines, "ret;"))
    (function,) = functions(f".entry f(.param .u64 f_param_0)\n{{\n{body}\n}}\n")
    return list(disorders(function, constants=constants, overlaps=overlaps))


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        ("proxy-fence", (WRITE, BARRIER, WGMMA), (WRITE, FENCE, BARRIER, WGMMA)),
        ("proxy-fence", (FENCE, WRITE, BARRIER, WGMMA), (WRITE, FENCE, BARRIER, WGMMA)),
        ("proxy-fence", (WRITE, WGMMA), (WGMMA, WRITE)),
        (
            "proxy-fence",
            (WGMMA, GROUP, PRODUCTS, WRITE, SLOT),
            (WGMMA, GROUP, PRODUCTS, WRITE, FENCE, SLOT),
        ),
        (
            "proxy-fence",
            (COPY, "cp.async.commit_group;", FENCE, BARRIER, WGMMA),
            (COPY, "cp.async.commit_group;", "cp.async.wait_group 0;", FENCE, BARRIER, WGMMA),
        ),
        ("proxy-fence", (COPY, "cp.async.wait_all;", BARRIER, WGMMA), (COPY, BARRIER)),
        ("store-wait", (STORE, COMMIT), (STORE, COMMIT, WAIT)),
        ("store-wait", (STORE, WAIT), (STORE, COMMIT, WAIT)),
        ("store-wait", (STORE, COMMIT, "@%p1 bra $E;", WAIT, "$E:"), (STORE, COMMIT, WAIT, "$E:")),
        (
            "store-wait",
            ("$A:", WRITE, FENCE, BARRIER, STORE, COMMIT, "@%p1 bra $A;", WAIT),
            ("$A:", WRITE, FENCE, BARRIER, STORE, COMMIT, WAIT, "@%p1 bra $A;", WAIT),
        ),
        (
            "cluster-order",
            (WRITE, RELAXED, CLUSTER_WAIT, REMOTE, RELAXED, CLUSTER_WAIT),
            (WRITE, RELEASE, CLUSTER_WAIT, REMOTE, RELAXED, CLUSTER_WAIT),
        ),
        (
            "cluster-order",
            (WRITE, RELEASE, REMOTE, CLUSTER_WAIT, RELEASE, CLUSTER_WAIT),
            (WRITE, RELEASE, CLUSTER_WAIT, REMOTE, RELEASE, CLUSTER_WAIT),
        ),
        ("cluster-order", (REMOTE,), (REMOTE, RELAXED, CLUSTER_WAIT)),
        ("cluster-order", (REMOTE, RELAXED), (REMOTE, RELEASE, CLUSTER_WAIT)),
        ("cluster-order", (SEND,), (RELAXED, CLUSTER_WAIT, SEND)),
        ("cluster-order", (CLUSTER_WAIT, SEND), (RELAXED, CLUSTER_WAIT, SEND)),
        (
            "cluster-order",
            (RELAXED, INIT, FENCE, CLUSTER_WAIT, SEND),
            (INIT, FENCE, RELAXED, CLUSTER_WAIT, SEND),
        ),
        (
            "init-fence",
            (INIT, RELAXED, CLUSTER_WAIT, SEND),
            (INIT, FENCE, RELAXED, CLUSTER_WAIT, SEND),
        ),
        ("cluster-order", (RELAXED, SEND, CLUSTER_WAIT), (RELAXED, CLUSTER_WAIT, SEND)),
        (
            "cluster-order",
            ("@%p1 bra $A;", RELAXED, CLUSTER_WAIT, "$A:", SEND),
            ("@%p1 bra $A;", "$A:", TOGETHER, RELAXED, CLUSTER_WAIT, SEND),
        ),
        ("init-fence", (INIT, BARRIER, WGMMA), (INIT, FENCE, BARRIER, WGMMA)),
        ("init-fence", (INIT, BARRIER, WGMMA), (INIT, BARRIER)),
        (
            "retry",
            ("mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;",),
            ("$A:", "mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;", "@!p bra $A;"),
        ),
        ("products-wait", (WGMMA, GROUP, SUM), (WGMMA, GROUP, PRODUCTS, SUM)),
        ("products-wait", (WGMMA, PRODUCTS, SUM), (WGMMA, GROUP, PRODUCTS, SUM)),
        (
            "products-wait",
            (WGMMA, GROUP, ALL_BUT_ONE, SUM),
            (WGMMA, GROUP, OTHER, GROUP, ALL_BUT_ONE, SUM),
        ),
        (
            "products-wait",
            (WGMMA, GROUP, "mov.f32 %f7, %f1;", "add.f32 %f2, %f7, %f3;"),
            (WGMMA, GROUP, "mov.f32 %f1, %f7;", SUM),
        ),
        (
            "products-wait",
            ("$A:", WGMMA, GROUP, "@%p1 bra $B;", PRODUCTS, "$B:", SUM),
            ("$A:", WGMMA, GROUP, "@%p1 bra $A;", PRODUCTS, "$B:", SUM),
        ),
        ("products-fence", (PRODUCT,), (FENCED, PRODUCT)),
        ("products-fence", (PRODUCT, FENCED), (FENCED, PRODUCT, PRODUCT)),
        (
            "products-fence",
            ("mov.f32 %f1, %f7;", WGMMA, GROUP, PRODUCTS, SUM, PRODUCT),
            ("mov.f32 %f1, %f7;", WGMMA, GROUP, PRODUCTS, SUM, WGMMA),
        ),
        (
            "products-fence",
            (FENCED, "mov.f32 %f1, 0f00000000;", PRODUCT),
            ("mov.f32 %f1, 0f00000000;", FENCED, PRODUCT),
        ),
        (  # a copy of a fenced register is fenced too
            "products-fence",
            (FENCED, "mov.f32 %f7, 0f00000000;", "mov.f32 %f1, %f7;", PRODUCT),
            ("mov.f32 %f7, 0f00000000;", FENCED, "mov.f32 %f1, %f7;", PRODUCT),
        ),
        (
            "products-fence",
            ("@%p1 bra $B;", FENCED, "$B:", PRODUCT),
            ("@%p1 bra $B;", "$B:", FENCED, PRODUCT),
        ),
        (  # a pipeline: the stage of the group before is released
            "release-wait",
            ("$A:", WGMMA, GROUP, STAGE, "@%p1 bra $A;", PRODUCTS),
            ("$A:", WGMMA, GROUP, ALL_BUT_ONE, STAGE, "@%p1 bra $A;", PRODUCTS),
        ),
        ("release-wait", (WGMMA, GROUP, STAGE, PRODUCTS), (WGMMA, GROUP, PRODUCTS, STAGE)),
        (  # an arrival for other memory, and then the one that releases the stage
            "release-wait",
            (WGMMA, GROUP, SLOT, PRODUCTS, WGMMA, GROUP, PRODUCTS, STAGE),
            (WGMMA, GROUP, SLOT, PRODUCTS, STAGE),
        ),
        (  # that a copy has begun releases nothing
            "release-wait",
            (WGMMA, GROUP, STAGE, PRODUCTS),
            (WGMMA, GROUP, STAGE.replace("arrive", "arrive.expect_tx"), PRODUCTS),
        ),
        (
            "aligned",
            ("@%p1 bra $B;", WRITE, "$B:", RELEASE, CLUSTER_WAIT),
            ("@%p1 bra $B;", WRITE, "$B:", TOGETHER, RELEASE, CLUSTER_WAIT),
        ),
        (
            "aligned",
            ("$A:", WRITE, "@%p1 bra $A;", RELEASE, TOGETHER, CLUSTER_WAIT),
            ("$A:", WRITE, "@%p1 bra $A;", BARRIER, RELEASE, TOGETHER, CLUSTER_WAIT),
        ),
        ("aligned", ("@%p1 bra $B;", "$B:", RELEASE), ("bra.uni $B;", "$B:", RELEASE)),
        ("launch-wait", (PARAMETER, READ_X), (PARAMETER, PREVIOUS, READ_X)),
        ("launch-wait", (PARAMETER, READ_X, PREVIOUS), (PARAMETER, PREVIOUS, READ_X)),
        (
            "launch-wait",
            (PARAMETER, "@%p1 bra $B;", PREVIOUS, "$B:", READ_X),
            (PARAMETER, "@%p1 bra $B;", PREVIOUS, READ_X, "$B:"),
        ),
        ("launch-wait", (PARAMETER, COPY), (PARAMETER, PREVIOUS, COPY)),
        ("launch-wait", ("mov.b64 %rd1, f_param_0;", LOAD), (PREVIOUS, LOAD)),
        # Only the first of several iterations waits: a flag decides, which no path shows.
        (
            "launch-wait",
            (PARAMETER, "$A:", "@%p1 bra $B;", "$B:", READ_X, PREVIOUS, "@%p2 bra $A;"),
            (PARAMETER, "$A:", "@%p1 bra $B;", PREVIOUS, "$B:", READ_X, "@%p2 bra $A;"),
        ),
    ],
)
def test_a_rule_reports_what_breaks_it_and_nothing_else(
    rule: str, broken: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    overlaps = rule == "launch-wait"
    assert rule in [one.rule for one in found(*broken, overlaps=overlaps)]
    assert found(*kept, overlaps=overlaps) == []


def test_weights_may_be_read_before_the_wait() -> None:
    assert found(PARAMETER, READ_X, constants=frozenset({0})) == []
    assert found(PARAMETER, READ_X, constants=frozenset({1}))


def test_a_launch_that_does_not_overlap_need_not_wait() -> None:
    (function,) = functions(
        f".entry f(.param .u64 f_param_0)\n{{\n{PARAMETER}\n{READ_X}\nret;\n}}\n"
    )
    assert disorders(function) == ()


def test_a_disorder_names_the_rule_the_function_and_both_lines() -> None:
    (one,) = found(WRITE, BARRIER, WGMMA)
    assert str(one) == (
        "proxy-fence: f, PTX lines 3, 4: a generic write to shared memory reaches 'bar.sync' "
        "without fence.proxy.async, and the async proxy is used after it"
    )
