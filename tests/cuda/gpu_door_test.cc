// What a GPU is refused with, and what it refuses: a status and one line that names it.
#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "tests/cuda/gpu_util.h"

namespace sparge::testing {
namespace {

// Sets a variable of the driver of this folder while it lives.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

ContextDesc OnGpu(const char* device = "cuda:0") {
  ContextDesc desc;
  desc.device = device;
  return desc;
}

// Calls `body`, which must fail so.
template <class Body>
void Refused(sparge_status status, const std::string& part, const Body& body) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), status) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << " lacks " << part;
  }
}
void ContextRefused(sparge_status status, const std::string& part, const ContextDesc& desc) {
  Refused(status, part, [&] { Context context(desc); });
}

// By itself, where there is no driver to find.
TEST(NoDriver, IsNamed) {
  if (std::getenv("SPARGE_NO_DRIVER") == nullptr || dlopen("libcuda.so.1", RTLD_NOW) != nullptr) return;
  ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "no CUDA driver on this machine (libcuda.so.1", OnGpu());
  EXPECT_GT(Context(OnGpu("cpu")).threads(), 0);
}

// First: a driver that was opened stays open.
TEST(Door, DriversThatAreTooOldAreNamed) {
  const Setting version("SPARGE_FAKE_VERSION", "11040");
  ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "CUDA 11.4, and 12.0 is needed", OnGpu());
}
TEST(Door, MachinesWithoutAGpuAreNamed) {
  const Setting gpu("SPARGE_FAKE_GPU", "none");
  ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "the CUDA driver finds no GPU", OnGpu());
}
TEST(Door, GpusAreNamed) {
  setenv("SPARGE_FAKE_GPU", "8.0", 1);
  ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "device=cuda:3: this machine has 1 GPUs", OnGpu("cuda:3"));
  for (const char* device : {"cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:0x", "gpu", ""}) {
    ContextRefused(SPARGE_INVALID_ARGUMENT, "is neither \"cpu\" nor \"cuda:N\"", OnGpu(device));
  }
  EXPECT_STREQ(Context(OnGpu()).isa(), "cuda sm_80, PV in f16");
  EXPECT_EQ(Context(OnGpu()).threads(), 0);
  EXPECT_GT(Context(OnGpu("cpu")).threads(), 0);
  setenv("SPARGE_FAKE_GPU", "12.0", 1);
  EXPECT_STREQ(Context(OnGpu()).isa(), "cuda sm_120, PV in e4m3");
  setenv("SPARGE_FAKE_GPU", "9.0", 1);
  EXPECT_STREQ(Context(OnGpu()).isa(), "cuda sm_90, PV in f16");
  setenv("SPARGE_FAKE_GPU", "7.5", 1);
  ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "its compute capability is 7.5, and 8.0 is needed", OnGpu());
}
TEST(Door, AGpuHasNoThreads) {
  setenv("SPARGE_FAKE_GPU", "8.0", 1);
  ContextDesc desc = OnGpu();
  desc.threads = 2;
  ContextRefused(SPARGE_INVALID_ARGUMENT, "threads=2", desc);
  desc = OnGpu();
  desc.isa = "avx2";
  ContextRefused(SPARGE_INVALID_ARGUMENT, "isa=avx2", desc);
}
TEST(Door, FailuresOfTheDriverAreNamed) {
  setenv("SPARGE_FAKE_GPU", "8.0", 1);
  {
    const Setting fails("SPARGE_FAKE_FAILURE", "cuModuleLoadData=209");
    ContextRefused(SPARGE_UNSUPPORTED_HARDWARE, "loading the kernels for this GPU failed: CUDA_ERROR_NO_BINARY_FOR_GPU",
                   OnGpu());
  }
  {
    const Setting fails("SPARGE_FAKE_FAILURE", "cuDevicePrimaryCtxRetain=2");
    ContextRefused(SPARGE_OUT_OF_MEMORY, "making a context on the GPU failed: CUDA_ERROR_OUT_OF_MEMORY", OnGpu());
  }
  const Context gpu = GpuContext();
  const Problem problem(Case{});
  {
    const Setting fails("SPARGE_FAKE_FAILURE", "cuMemAlloc=2");
    Refused(SPARGE_OUT_OF_MEMORY, "allocating a plan's tables on the GPU", [&] { Plan plan(gpu, problem.desc); });
  }
  Plan plan(gpu, problem.desc);
  RunArgs args;
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.v = problem.v.view();
  TestTensor o(1, 1, 64, 64);
  args.o = o.view();
  const GpuMemory workspace(plan.workspace_size());
  args.workspace = workspace.data();
  args.workspace_size = plan.workspace_size();
  const Setting fails("SPARGE_FAKE_FAILURE", "cuLaunchKernel=719");
  Refused(SPARGE_DEVICE_ERROR, "sparge_survey failed: CUDA_ERROR_LAUNCH_FAILED", [&] { plan.Run(args); });
}

class Refusals : public ::testing::Test {
 protected:
  Context gpu_ = GpuContext();
  PlanDesc desc_ = Problem(Case{}).desc;
  void PlanRefused(const std::string& part) {
    Refused(SPARGE_INVALID_ARGUMENT, part, [&] { Plan plan(gpu_, desc_); });
  }
};

TEST_F(Refusals, OtherPrecisions) {
  desc_.precision = SPARGE_PRECISION_FP32;
  PlanRefused("precision=fp32: a GPU computes int8 only");
  desc_.precision = SPARGE_PRECISION_INT16;
  PlanRefused("precision=int16");
}
TEST_F(Refusals, Calibrations) {
  sparge_calibration_desc calibration;
  sparge_calibration_desc_init(&calibration);
  calibration.q_heads = 1;
  const Calibration made(calibration);
  desc_.q_tokens = desc_.kv_tokens = 512;
  desc_.select = SPARGE_SELECT_AUTO;
  desc_.calibration = made.get();
  // Not by one of the precisions that a calibration may choose.
  PlanRefused("select=AUTO (target_l2, target_l1): a GPU does not calibrate yet; name what to select");
}
TEST_F(Refusals, Masks) {
  desc_.mask = SPARGE_MASK_BOOL;
  PlanRefused("mask=1: a GPU takes no masks yet");
}
TEST_F(Refusals, Slopes) {
  const float slope = 0.5f;
  desc_.alibi_slopes = &slope;
  PlanRefused("alibi_slopes");
}
TEST_F(Refusals, LargeHeads) {
  desc_.qk_dim = 300;
  PlanRefused("qk_dim=300 v_dim=64: a GPU takes up to 256");
}
TEST_F(Refusals, KeysThatStayPacked) {
  desc_.cache_tokens = 64;
  PlanRefused("cache_tokens");
}
TEST_F(Refusals, Grids) {
  desc_.q_tokens = desc_.kv_tokens = 16 * 16;
  desc_.grid[0] = 1;
  desc_.grid[1] = desc_.grid[2] = 16;
  PlanRefused("grid");
}
TEST_F(Refusals, Parts) {
  desc_.all_keys = 128;
  PlanRefused("all_keys=128");
}
TEST_F(Refusals, WhatARunWouldHaveToWaitFor) {
  Plan plan(gpu_, desc_);
  Problem problem(Case{});
  RunArgs args;
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.v = problem.v.view();
  args.o = problem.q.view();
  const GpuMemory workspace(plan.workspace_size());
  args.workspace = workspace.data();
  args.workspace_size = plan.workspace_size();
  Stats stats;
  args.stats = &stats;
  Refused(SPARGE_INVALID_ARGUMENT, "stats: on a GPU", [&] { plan.Run(args); });
  args.stats = nullptr;
  Refused(SPARGE_INVALID_ARGUMENT, "reference runs on a CPU only", [&] { plan.Reference(args); });
}
TEST_F(Refusals, LayersAndManyParts) {
  sparge_layer_desc layer_desc;
  sparge_layer_desc_init(&layer_desc);
  sparge_layer* layer = nullptr;
  ASSERT_EQ(sparge_layer_create(&layer_desc, &layer), SPARGE_OK);
  RunArgs args;
  PlanDesc plain;
  EXPECT_EQ(sparge_layer_run(layer, gpu_.get(), &plain, &args, 0), SPARGE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sparge_last_error()).find("a layer runs on a CPU only"), std::string::npos);
  sparge_layer_destroy(layer);
  TestTensor o(1, 1, 1, 8);
  float lse = 0;
  const std::vector<sparge_partial> parts(33, {o.view(), {&lse, 1, 1}});
  EXPECT_EQ(sparge_merge_parts(gpu_.get(), 1, 1, 1, 8, parts.data(), 33, parts.data()), SPARGE_INVALID_ARGUMENT);
  EXPECT_STREQ(sparge_last_error(), "count=33: a GPU merges up to 32 parts at once");
}
TEST(Cpu, HasNoStreams) {
  const Context cpu(1);
  const Problem problem(Case{});
  Plan plan(cpu, problem.desc);
  RunArgs args;
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.v = problem.v.view();
  TestTensor o(1, 1, 64, 64);
  args.o = o.view();
  args.stream = &plan;
  Refused(SPARGE_INVALID_ARGUMENT, "stream is given, but the device is a CPU", [&] { plan.Run(args); });
}

}  // namespace
}  // namespace sparge::testing
