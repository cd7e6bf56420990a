#!/usr/bin/env python3
"""bench/cuda_model.py on machine code that was written for it: what it counts, what it makes of that, what it refuses."""

import sys
import unittest
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import cuda_model as model

# A step: a copy loop, an optional mask, products of 32 keys x 128 (16 IMMA per 16 rows, twice), a skip, and PV.
STEP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   FADD R2, R3, R4 ;
.L_copy:
        /*0020*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0030*/              @!P1 BRA `(.L_copy) ;
        /*0040*/                   LDSM.16.M88.4 R8, [R6] ;
{imma}
        /*0060*/              @P0  BRA `(.L_inside) ;
        /*0070*/                   FSEL R2, R3, -INF, P0 ;
        /*0080*/                   FSEL R2, R3, -INF, P0 ;
.L_inside:
        /*0090*/              @!P2 BRA `(.L_skip) ;
        /*00a0*/                   MUFU.EX2 R3, R3 ;
{hmma}
.L_skip:
        /*00c0*/                   FFMA R2, R3, R4, R5 ;
        /*00d0*/              @P3  BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
.L_end:
        /*00f0*/                   BRA `(.L_end) ;
"""
IMMA = "        /*0050*/                   IMMA.16832.S8.S8 R0, R1.ROW, R2.COL, R3 ;"
HMMA = "        /*00b0*/                   HMMA.16816.F32 R0, R1, R2, R3 ;"


def step(imma=32, hmma=64):
    return STEP.format(imma="\n".join([IMMA] * imma), hmma="\n".join([HMMA] * hmma))


A100 = next(gpu for gpu in model.GPUS if gpu.name == "A100")
KERNEL = "sparge_attend_128_f16"


class Counting(unittest.TestCase):
    def test_the_way_with_all_products_and_without_what_is_optional(self):
        counts = model.count_step(step())
        self.assertEqual(counts, Counter({
            "IMMA.16832.S8.S8": 32, "HMMA.16816.F32": 64, "FADD": 1, "LDGSTS.E.BYPASS.128": 1, "LDSM.16.M88.4": 1, "BRA": 4,
            "MUFU.EX2": 1, "FFMA": 1,
        }))  # fmt: skip

    def test_unknown_instructions_are_refused(self):
        odd = step().replace("FADD", "FNEW")
        with self.assertRaisesRegex(model.CannotModel, "opcode FNEW belongs to no pipe"):
            model.project(A100, KERNEL, model.count_step(odd))

    def test_code_without_products_is_refused(self):
        with self.assertRaisesRegex(model.CannotModel, "no loop with tensor-core instructions"):
            model.count_step(step(0, 0))
        with self.assertRaisesRegex(model.CannotModel, "7 IMMA are no whole step"):
            model.project(A100, KERNEL, model.count_step(step(7)))

    def test_a_gpu_without_the_instruction_is_refused(self):
        with self.assertRaisesRegex(model.CannotModel, "A100 has no QMMA"):
            model.project(A100, KERNEL, model.count_step(step().replace("HMMA.16816", "QMMA.16832")))


class Projecting(unittest.TestCase):
    def test_clocks(self):
        spent = model.clocks(model.count_step(step()), A100)
        # 624e12 / (108 * 4 * 1.41e9) = 1024.4 operations per clock and quarter: 8 clocks per IMMA of 8192, 8 per HMMA.
        self.assertAlmostEqual(spent["tensor"], (32 * 8192 + 64 * 4096 * 2) / 1024.4, delta=1)
        self.assertEqual(spent["fp32"], 2 * 2)  # FADD and FFMA: 16 lanes
        self.assertEqual(spent["mufu"], 8)
        self.assertEqual(spent["shared"], 512 / 32)
        self.assertEqual(spent["issue"], 32 + 64 + 9)

    def test_limits(self):
        """Tensor cores alone: the harmonic mean of the two peaks, which the data sheet gives by itself."""
        p = model.project(A100, KERNEL, model.count_step(step()))
        self.assertEqual(p.limit, "tensor")
        self.assertAlmostEqual(p.high, 2 / (1 / 624 + 1 / 312), delta=0.5)
        tensor, issue = p.clocks["tensor"], p.clocks["issue"]
        self.assertAlmostEqual(p.low, p.high * tensor / (tensor + issue), delta=0.5)

    def test_what_costs_more_ranks_lower(self):
        plain = model.count_step(step())
        slow = plain + Counter({"MUFU.EX2": 400})
        p = [model.project(A100, name, counts) for name, counts in (("slow_attend_128_f16", slow), (KERNEL, plain))]
        self.assertEqual([q.kernel for q in model.rank(p)], [KERNEL, "slow_attend_128_f16"])
        self.assertEqual(p[0].limit, "mufu")
        text = model.table(model.rank(p))
        self.assertTrue(text.startswith("PROJECTION") and "not a speed" in text)
        self.assertLess(text.index(KERNEL), text.index("slow_attend_128_f16"))
        for figure in (*model.PAPER, model.SAGE["A100"]):
            self.assertIn(str(figure), text)


if __name__ == "__main__":
    unittest.main()
