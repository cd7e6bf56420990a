// What a kernel must not do is found and named, and what the interpreter does not know is refused.
#include "tests/ptxrun/ptx_util.h"

namespace ptxrun::testing {
namespace {

constexpr char kShared[] = ".shared .align 16 .b8 s[1024];\n";

// The fault of a block of 64 threads with 1024 bytes of shared memory at s; %p0: 1024 bytes that are written, %p1: 1024
// bytes that nothing wrote.
std::string Fault64(const std::string& body, uint32_t threads = 64) {
  Machine machine;
  machine.shape.block[0] = threads;
  machine.In(std::vector<uint32_t>(256, 7)).Room(1024);
  return FaultOf(
      machine,
      KernelText(
          2,
          "mov.u32 %r6, s; mov.u32 %r9, %r6; shl.b32 %r8, %lane, 2; add.u32 %r9, %r9, %r8; add.u64 %d9, %p0, %at4;\n" +
              body,
          80, kShared));
}

void ExpectFault(const std::string& fault, const std::string& what) {
  EXPECT_NE(fault.find(what), std::string::npos) << "\"" << fault << "\" says not: " << what;
}

TEST(Faults, GlobalBounds) {
  EXPECT_EQ(Fault64("ld.global.u32 %r0, [%d9+768];"), "");
  ExpectFault(Fault64("ld.global.u32 %r0, [%d9+772];"), "lane 31: 4 bytes of global memory");
  ExpectFault(Fault64("ld.global.u32 %r0, [%d9+-4];"), "are in no allocation");
  ExpectFault(Fault64("st.global.v4.u32 [%p0+1016], {%r8, %r8, %r8, %r8};"),
              "pass the end of an allocation of 1024 bytes");
  ExpectFault(Fault64("mov.u64 %d1, 0; st.global.u32 [%d1], %r8;"), "are in no allocation");
}

TEST(Faults, SharedBounds) {
  EXPECT_EQ(Fault64("st.shared.u32 [%r9+768], %r8;"), "");
  ExpectFault(Fault64("st.shared.u32 [%r9+772], %r8;"),
              "4 bytes of shared memory at offset 1024 are beyond the 1024 bytes");
  ExpectFault(Fault64("st.shared.u32 [%r9+-4], %r8;"), "are beyond");
}

TEST(Faults, Alignment) {
  ExpectFault(Fault64("ld.global.u32 %r0, [%p0+2];"), "not aligned");
  ExpectFault(Fault64("ld.global.v2.u32 {%r0, %r1}, [%p0+4];"), "not aligned");
  ExpectFault(Fault64("st.shared.v4.u32 [%r9], {%r8, %r8, %r8, %r8};"), "not aligned to 16");
  ExpectFault(Fault64("mov.u32 %r1, s; cp.async.cg.shared.global [%r1+4], [%p0], 16;"), "not aligned to 16");
}

TEST(Faults, NothingWroteIt) {
  ExpectFault(Fault64("ld.global.u32 %r0, [%p1];"), "nothing wrote them");
  ExpectFault(Fault64("ld.shared.u32 %r0, [%r9];"), "nothing wrote them");
  EXPECT_EQ(Fault64("st.global.u32 [%p1], 1; ld.global.u32 %r0, [%p1];"), "");
  // Half of it was written.
  ExpectFault(Fault64("st.shared.u16 [%r9], %h1; ld.shared.u32 %r0, [%r9];"), "nothing wrote them");
}

TEST(Faults, Races) {
  const std::string write = "st.shared.u32 [%r9], %r8; ";
  ExpectFault(Fault64(write + "ld.shared.u32 %r0, [s];"), "race: warp 1 reads");
  EXPECT_EQ(
      Fault64(write +
              "bar.sync 0; mov.u32 %r6, s; xor.b32 %r7, %r8, 128; add.u32 %r7, %r7, %r6; ld.shared.u32 %r0, [%r7];"),
      "");
  // Read, then written by another without a barrier between.
  ExpectFault(
      Fault64(write + "bar.sync 0; ld.shared.u32 %r0, [s]; setp.eq.u32 %q1, %lane, 32; @%q1 st.shared.u32 [s], 1;"),
      "race: warp 1 writes");
  EXPECT_EQ(
      Fault64(write +
              "bar.sync 0; ld.shared.u32 %r0, [s]; bar.sync 0; setp.eq.u32 %q1, %lane, 32; @%q1 st.shared.u32 [s], 1;"),
      "");
  // One warp alone needs no barrier.
  EXPECT_EQ(Fault64(write + "mov.u32 %r6, s; xor.b32 %r7, %r8, 64; add.u32 %r7, %r7, %r6; ld.shared.u32 %r0, [%r7];"),
            "");
  // Two write the same.
  ExpectFault(Fault64("st.shared.u32 [s], 1;"), "race: warp 1 writes");
  // Atomics among each other are fine, with plain reads not.
  EXPECT_EQ(Fault64("st.shared.u32 [%r9], 0; bar.sync 0; atom.shared.add.u32 %r0, [s], 1;"), "");
  ExpectFault(Fault64("st.shared.u32 [%r9], 0; bar.sync 0; atom.shared.add.u32 %r0, [s], 1; ld.shared.u32 %r0, [s];"),
              "changed atomically");
}

TEST(Faults, NeighbouringBytesAreNoRace) {
  EXPECT_EQ(Fault64("mov.u32 %r1, s; shr.u32 %r2, %lane, 5; and.b32 %r3, %lane, 31; shl.b32 %r3, %r3, 1; add.u32 %r3, "
                    "%r3, %r2; add.u32 %r1, %r1, %r3;\n"
                    "st.shared.u8 [%r1], %r2;"),
            "");
}

TEST(Faults, CopiesArriveWhenWaitedFor) {
  const std::string start =
      "mov.u32 %r6, s; shl.b32 %r7, %lane, 4; add.u32 %r7, %r7, %r6; and.b64 %d1, %at4, 0; cvt.u64.u32 %d2, %r8; "
      "shl.b64 %d1, %d2, 2; add.u64 %d1, %d1, %p0;\n"
      "cp.async.cg.shared.global [%r7], [%d1], 16; ";
  const std::string read = "ld.shared.u32 %r0, [%r7]; ";
  EXPECT_EQ(Fault64(start + "cp.async.commit_group; cp.async.wait_group 0; " + read), "");
  EXPECT_EQ(Fault64(start + "cp.async.wait_all; " + read), "");
  ExpectFault(Fault64(start + "cp.async.commit_group; " + read), "while a cp.async to them is under way");
  ExpectFault(Fault64(start + "cp.async.commit_group; cp.async.wait_group 1; " + read),
              "while a cp.async to them is under way");
  ExpectFault(Fault64(start + "cp.async.wait_group 0; " + read), "while a cp.async to them is under way");
  // One that others wrote arrives for them at a barrier only.
  const std::string other = "mov.u32 %r6, s; shl.b32 %r7, %lane, 4; xor.b32 %r7, %r7, 512; add.u32 %r7, %r7, %r6; ";
  ExpectFault(Fault64(start + "cp.async.wait_all; ld.shared.u32 %r0, [s];"), "race: warp 1 reads");
  EXPECT_EQ(Fault64(start + "cp.async.wait_all; bar.sync 0; " + other + read), "");
  // What is copied from memory that nothing wrote is still not written.
  ExpectFault(Fault64("mov.u32 %r6, s; setp.ne.u32 %q1, %lane, 0; @%q1 bra END; cp.async.cg.shared.global [%r6], "
                      "[%p1], 16; cp.async.wait_all; ld.shared.u32 %r0, [%r6]; END:",
                      1),
              "nothing wrote them");
  // The rest of a short copy is zero.
  EXPECT_EQ(
      Fault64("mov.u32 %r6, s; cp.async.ca.shared.global [%r6], [%p0+1008], 16, 8; cp.async.wait_all; ld.shared.u32 "
              "%r0, [%r6+12];\n"
              "setp.ne.u32 %q1, %r0, 0; @%q1 trap; ld.shared.u32 %r0, [%r6+4]; setp.ne.u32 %q1, %r0, 7; @%q1 trap;",
              1),
      "");
}

TEST(Faults, LanesThatDoNotMeet) {
  ExpectFault(Fault64("setp.lt.u32 %q1, %lane, 5; @%q1 shfl.sync.bfly.b32 %r0, %r8, 1, 31, -1;", 32),
              "stuck: lanes 0x0000001f wait");
  ExpectFault(Fault64("shfl.sync.bfly.b32 %r0, %r8, 1, 31, 255;", 32), "is not in the member mask");
  ExpectFault(Fault64("setp.lt.u32 %q1, %lane, 5; @%q1 ret; bar.warp.sync -1;", 32), "names lanes that have left");
  ExpectFault(Fault64("setp.eq.u32 %q1, %lane, 5; @%q1 bar.sync 0;", 32), "stuck");
  ExpectFault(Fault64("setp.lt.u32 %q1, %lane, 32; @%q1 bar.sync 0; @!%q1 bar.sync 1;"),
              "warps wait at different barriers");
}

TEST(Faults, EndlessLoopsAndTraps) {
  Machine machine;
  machine.options.max_steps = 1000;
  ExpectFault(FaultOf(machine, KernelText(0, "L: bra L;")), "endless");
  ExpectFault(Fault64("trap;"), "trap");
}

TEST(Faults, NameKernelLineBlockAndWarp) {
  const std::string fault = Fault64("setp.lt.u32 %q1, %lane, 32; @%q1 ret; trap;");
  ExpectFault(fault, "k, block (0, 0, 0), line 13, trap: warp 1");
}

TEST(Refusals, WhatIsNotKnownIsNamedWithItsLine) {
  const auto refusal = [](const std::string& body) {
    Machine machine;
    return FaultOf(machine, KernelText(0, body));
  };
  ExpectFault(refusal("mov.u32 %r1, 1;\nfrobnicate.b32 %r1, %r2;"), "line 10: unknown opcode: frobnicate.b32 %r1, %r2");
  ExpectFault(refusal("add.rz.f32 %f1, %f2, %f3;"), "unknown modifier .rz");
  ExpectFault(refusal("add.s32 %r1, %r2, %unknown;"), "unknown operand %unknown");
  ExpectFault(refusal("add.s32 %r1, %r2, %r40;"), "unknown operand %r40");
  ExpectFault(refusal("add.s64 %d1, %r2, %d3;"), "size of %r2");
  ExpectFault(refusal("bra NOWHERE;"), "no such label: NOWHERE");
  ExpectFault(refusal("bar.sync 1, 64;"), "a part of the block is not modelled");
  ExpectFault(refusal("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};"),
              "not modelled for this type");
  ExpectFault(refusal("wgmma.fence.sync.aligned;"), "unknown opcode");
}

TEST(Counts, InstructionsAndConflictsOfBanks) {
  Machine machine;
  machine.Room(4);
  // Column by column of rows of 32 words: all lanes in one bank, 31 passes too many.
  const Statistics counts = machine.Run(
      KernelText(1,
                 "mov.u32 %r1, s; shl.b32 %r2, %lane, 7; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], 1;\n"
                 "shl.b32 %r3, %lane, 2; add.u32 %r3, %r3, %r1; st.shared.u32 [%r3], 2; ld.shared.u32 %r4, [s];",
                 80, ".shared .align 4 .b8 s[4096];\n"));
  EXPECT_EQ(counts.bank_passes, 34u);
  EXPECT_EQ(counts.least_passes, 3u);
  EXPECT_EQ(counts.conflicts_per_line.size(), 1u);
  EXPECT_EQ(counts.per_opcode.at("st.shared.u32"), 2u);
  EXPECT_EQ(counts.instructions, 14u);
}

}  // namespace
}  // namespace ptxrun::testing
