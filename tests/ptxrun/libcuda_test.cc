// The stand-in for the driver, opened as a program opens the driver: by dlopen and cuGetProcAddress.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

template <typename Function>
Function* Find(const char* name) {
  static void* const library = dlopen(SPARGE_MOCK_CUDA "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  static const auto get = reinterpret_cast<decltype(&cuGetProcAddress_v2)>(dlsym(library, "cuGetProcAddress_v2"));
  void* found = nullptr;
  EXPECT_EQ(get(name, &found, 13000, 0, nullptr), CUDA_SUCCESS) << name;
  return reinterpret_cast<Function*>(found);
}
#define CALL(name) Find<decltype(::name)>(#name)

// Adds %n to each of 32 words.
constexpr char kPtx[] = R"(.version 9.0
.target sm_80
.address_size 64
.global .align 4 .u32 table[2] = {3, 4};
.visible .entry add_to(.param .u64 p, .param .u32 n)
{
  .reg .b64 %d<5>; .reg .b32 %r<5>;
  ld.param.u64 %d1, [p]; ld.param.u32 %r1, [n]; mov.u32 %r2, %tid.x; mul.wide.u32 %d2, %r2, 4;
  add.u64 %d1, %d1, %d2; ld.global.u32 %r3, [%d1]; add.u32 %r3, %r3, %r1; st.global.u32 [%d1], %r3; ret;
}
.visible .entry odd() { frobnicate.u32; ret; }
)";

// An environment variable while it lives.
struct Setting {
  Setting(const char* variable, const char* value) : name(variable) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name); }
  const char* name;
};

class Libcuda : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(CALL(cuInit)(0), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuDevicePrimaryCtxRetain)(&context_, 0), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuCtxPushCurrent)(context_), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuModuleLoadData)(&module_, kPtx), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuModuleGetFunction)(&function_, module_, "add_to"), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuMemAlloc)(&words_, 128), CUDA_SUCCESS);
    ASSERT_EQ(CALL(cuMemsetD32)(words_, 10, 32), CUDA_SUCCESS);
  }
  void TearDown() override {
    CALL(cuMemFree)(words_);
    CALL(cuModuleUnload)(module_);
    CALL(cuCtxPopCurrent)(&context_);
    CALL(cuDevicePrimaryCtxRelease)(0);
  }
  CUresult Launch(uint32_t n, CUstream stream = nullptr, unsigned int threads = 32, unsigned int shared_bytes = 0) {
    void* params[] = {&words_, &n};
    return CALL(cuLaunchKernel)(function_, 1, 1, 1, threads, 1, 1, shared_bytes, stream, params, nullptr);
  }
  std::vector<uint32_t> Words() {
    std::vector<uint32_t> words(32);
    EXPECT_EQ(CALL(cuMemcpyDtoH)(words.data(), words_, 128), CUDA_SUCCESS);
    return words;
  }
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction function_ = nullptr;
  CUdeviceptr words_ = 0;
};

TEST_F(Libcuda, LaunchesReadAndWriteDeviceMemory) {
  ASSERT_EQ(Launch(5), CUDA_SUCCESS);
  EXPECT_EQ(Words(), std::vector<uint32_t>(32, 15));
  struct {
    CUdeviceptr words;
    uint32_t n;
  } buffer{words_, 7};
  size_t bytes = 12;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  ASSERT_EQ(CALL(cuLaunchKernel)(function_, 1, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra), CUDA_SUCCESS);
  EXPECT_EQ(Words(), std::vector<uint32_t>(32, 22));
}

TEST_F(Libcuda, GlobalsHaveTheirInitialValues) {
  CUdeviceptr table = 0;
  size_t bytes = 0;
  ASSERT_EQ(CALL(cuModuleGetGlobal)(&table, &bytes, module_, "table"), CUDA_SUCCESS);
  uint32_t values[2] = {};
  ASSERT_EQ(bytes, sizeof(values));
  ASSERT_EQ(CALL(cuMemcpyDtoH)(values, table, bytes), CUDA_SUCCESS);
  EXPECT_EQ(values[0], 3u);
  EXPECT_EQ(values[1], 4u);
}

TEST_F(Libcuda, UnknownKernelsAndOpcodes) {
  CUfunction function = nullptr;
  EXPECT_EQ(CALL(cuModuleGetFunction)(&function, module_, "missing"), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(CALL(cuModuleGetFunction)(&function, module_, "odd"), CUDA_ERROR_INVALID_PTX);
  CUmodule module = nullptr;
  EXPECT_EQ(CALL(cuModuleLoadData)(&module, ".version 9.0\n.nonsense\n"), CUDA_ERROR_INVALID_PTX);
  const Setting old("SPARGE_FAKE_GPU", "7.5");
  EXPECT_EQ(CALL(cuModuleLoadData)(&module, kPtx), CUDA_ERROR_NO_BINARY_FOR_GPU);
}

TEST_F(Libcuda, LaunchesAreChecked) {
  EXPECT_EQ(Launch(1, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Launch(1, nullptr, 1025), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Launch(1, nullptr, 32, 60000), CUDA_ERROR_INVALID_VALUE);  // more than 48 KB must be asked for
  EXPECT_EQ(CALL(cuFuncSetAttribute)(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000), CUDA_SUCCESS);
  EXPECT_EQ(Launch(1, nullptr, 32, 60000), CUDA_SUCCESS);
  EXPECT_EQ(CALL(cuFuncSetAttribute)(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 200000),
            CUDA_ERROR_INVALID_VALUE);
}

TEST_F(Libcuda, GraphsReplayWhatACaptureRecorded) {
  CUstream stream = nullptr;
  ASSERT_EQ(CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_EQ(CALL(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  CUdeviceptr words = words_;
  uint32_t n = 2;
  void* params[] = {&words, &n};
  ASSERT_EQ(CALL(cuMemsetD32Async)(words_, 1, 32, stream), CUDA_SUCCESS);
  ASSERT_EQ(CALL(cuLaunchKernel)(function_, 1, 1, 1, 32, 1, 1, 0, stream, params, nullptr), CUDA_SUCCESS);
  n = 99;  // parameters are taken when they are captured
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  ASSERT_EQ(CALL(cuStreamEndCapture)(stream, &graph), CUDA_SUCCESS);
  size_t nodes = 0;
  ASSERT_EQ(CALL(cuGraphGetNodes)(graph, nullptr, &nodes), CUDA_SUCCESS);
  EXPECT_EQ(nodes, 2u);
  EXPECT_EQ(Words(), std::vector<uint32_t>(32, 10));  // nothing ran
  ASSERT_EQ(CALL(cuGraphInstantiateWithFlags)(&exec, graph, 0), CUDA_SUCCESS);
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(CALL(cuGraphLaunch)(exec, stream), CUDA_SUCCESS);
    EXPECT_EQ(Words(), std::vector<uint32_t>(32, 3));
    ASSERT_EQ(CALL(cuMemsetD32)(words_, 50, 32), CUDA_SUCCESS);
  }
  CALL(cuGraphExecDestroy)(exec);
  CALL(cuGraphDestroy)(graph);
  CALL(cuStreamDestroy)(stream);
}

TEST_F(Libcuda, CapturesRefuseToAllocateAndToWait) {
  CUstream stream = nullptr;
  ASSERT_EQ(CALL(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  CUgraph graph = nullptr;
  const auto spoils = [&](const auto& act, CUresult expected) {
    ASSERT_EQ(CALL(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    EXPECT_EQ(act(), expected);
    EXPECT_EQ(CALL(cuStreamEndCapture)(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  };
  CUdeviceptr more = 0;
  uint32_t word = 0;
  spoils([&] { return CALL(cuMemAlloc)(&more, 16); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  spoils([&] { return CALL(cuMemFree)(words_); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  spoils([&] { return CALL(cuStreamSynchronize)(stream); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  spoils([&] { return CALL(cuCtxSynchronize)(); }, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  spoils([&] { return CALL(cuMemcpyDtoH)(&word, words_, 4); }, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  spoils([&] { return Launch(1); }, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CALL(cuStreamDestroy)(stream);
}

TEST_F(Libcuda, FailuresAreInjected) {
  CUdeviceptr more = 0;
  {
    const Setting fails("SPARGE_FAKE_FAILURE", "cuMemAlloc=2@2");
    EXPECT_EQ(CALL(cuMemAlloc)(&more, 16), CUDA_SUCCESS);
    CALL(cuMemFree)(more);
    EXPECT_EQ(CALL(cuMemAlloc)(&more, 16), CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_EQ(CALL(cuMemAlloc)(&more, 16), CUDA_SUCCESS);
    CALL(cuMemFree)(more);
  }
  {
    const Setting fails("SPARGE_FAKE_FAILURE", "cuLaunchKernel=701");
    EXPECT_EQ(Launch(1), CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  }
  {
    const Setting little("PTXRUN_MEMORY", "1000");
    EXPECT_EQ(CALL(cuMemAlloc)(&more, 2000), CUDA_ERROR_OUT_OF_MEMORY);
  }
  {
    const Setting none("SPARGE_FAKE_GPU", "none");
    EXPECT_EQ(CALL(cuInit)(0), CUDA_ERROR_NO_DEVICE);
  }
  const Setting old("SPARGE_FAKE_VERSION", "11040");
  int version = 0;
  EXPECT_EQ(CALL(cuDriverGetVersion)(&version), CUDA_SUCCESS);
  EXPECT_EQ(version, 11040);
  void* found = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  EXPECT_EQ(CALL(cuGetProcAddress)("cuLibraryLoadData", &found, 13000, 0, &status), CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(found, nullptr);
}

TEST_F(Libcuda, PointersAreKnown) {
  CUdeviceptr base = 0;
  size_t bytes = 0;
  EXPECT_EQ(CALL(cuMemGetAddressRange)(&base, &bytes, words_ + 5), CUDA_SUCCESS);
  EXPECT_EQ(base, words_);
  EXPECT_EQ(bytes, 128u);
  unsigned int type = 0;
  EXPECT_EQ(CALL(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, words_), CUDA_SUCCESS);
  EXPECT_EQ(type, static_cast<unsigned int>(CU_MEMORYTYPE_DEVICE));
  int on_host = 0;
  EXPECT_EQ(
      CALL(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, reinterpret_cast<CUdeviceptr>(&on_host)),
      CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(CALL(cuMemFree)(words_ + 4), CUDA_ERROR_INVALID_VALUE);
}

// The last one, for nothing works after it: what a kernel did wrong shows in the calls that follow.
TEST_F(Libcuda, ZFaultsAreFoundByTheNextCall) {
  EXPECT_EQ(Launch(1, nullptr, 64), CUDA_SUCCESS);  // 64 threads on 32 words
  EXPECT_EQ(CALL(cuCtxSynchronize)(), CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(CALL(cuMemsetD32)(words_, 0, 32), CUDA_ERROR_LAUNCH_FAILED);
}

}  // namespace
