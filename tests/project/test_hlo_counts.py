"""The counts of compiled programs of JAX, which a benchmark compares."""

import pytest

from benchmarks.peers import hlo_counts

# The loop runs one fusion, one all-reduce over pairs of devices and one
# comparison. The module also runs one all-gather.
TEXT = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[4,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %e = f32[4,8]{1,0} exponential(%p)
  ROOT %n = f32[4,8]{1,0} negate(%e)
}

%body (s: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %s = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%s), index=1
  %f = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %g = f32[4,8] all-reduce(%f), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %g)
}

%condition (s: (s32[], f32[4,8])) -> pred[] {
  %s = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %c = (f32[4,8], bf16[2]) all-gather(%x, %y), replica_groups=[2,2]<=[4]
  ROOT %w = (s32[], f32[4,8]) while(%i), condition=%condition, body=%body
}
"""


def test_a_fusion_is_one_kernel_and_bytes_are_those_of_a_ring():
    module = hlo_counts.Module(TEXT, devices=4)
    counts = hlo_counts.Counts(ops=4, kernels=3, collectives=1, sent_bytes=128)
    assert module.counts(of_loop=True) == counts
    gather = hlo_counts.Counts(1, 1, 1, (4 * 8 * 4 + 2 * 2) / 2)
    assert module.counts() == counts + gather


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 150),
        ("all-gather", 75),
        ("reduce-scatter", 300),
        ("all-to-all", 75),
        ("collective-permute", 100),
    ],
)
def test_bytes_that_one_of_four_devices_sends(kind, sent):
    assert hlo_counts.sent_bytes(kind, 100, 4) == sent
