#include "tools/ptxrun/libcuda/state.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace ptxrun {
namespace {

int64_t Setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const int64_t value = std::strtoll(text, &end, 0);
  if (*text == '\0' || *end != '\0') {
    Say(std::string(name) + "=" + text + " is not a number");
    std::exit(2);
  }
  return value;
}

std::string Text(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : text;
}

}  // namespace

bool Driver::has_device() const { return Text("SPARGE_FAKE_GPU", "8.0") != "none"; }

int Driver::sm() const {
  if (std::getenv("PTXRUN_SM") != nullptr) return static_cast<int>(Setting("PTXRUN_SM", 0));
  const std::string capability = Text("SPARGE_FAKE_GPU", "8.0");
  int major = 0, minor = 0;
  if (std::sscanf(capability.c_str(), "%d.%d", &major, &minor) != 2) {
    Say("SPARGE_FAKE_GPU=" + capability + " is no compute capability");
    std::exit(2);
  }
  return 10 * major + minor;
}

int Driver::version() const { return static_cast<int>(Setting("SPARGE_FAKE_VERSION", 13000)); }
uint64_t Driver::memory_bytes() const { return static_cast<uint64_t>(Setting("PTXRUN_MEMORY", int64_t{8} << 30)); }

std::string Driver::replacement() const { return Text("PTXRUN_PTX", ""); }

Options Driver::options() const {
  Options options;
  options.seed = static_cast<uint32_t>(Setting("PTXRUN_SEED", 1));
  options.may_be_undefined = Setting("PTXRUN_UNDEFINED", 0) != 0;
  options.fp8_fraction_bits = static_cast<int>(Setting("PTXRUN_FP8_BITS", 23));
  return options;
}

CUresult Driver::FailureOf(const char* function) {
  const std::string wanted = Text("SPARGE_FAKE_FAILURE", "");
  if (wanted != failure_) {
    failure_ = wanted;
    failing_calls_ = 0;
  }
  const size_t equals = wanted.find('=');
  if (equals == std::string::npos) return CUDA_SUCCESS;
  const std::string name = wanted.substr(0, equals);
  if (function != name && function != name + "_v2") return CUDA_SUCCESS;
  int result = 0, at = 0;
  const int fields = std::sscanf(wanted.c_str() + equals + 1, "%d@%d", &result, &at);
  return fields < 2 || ++failing_calls_ == at ? static_cast<CUresult>(result) : CUDA_SUCCESS;
}

Driver::~Driver() {
  const std::string report = Text("PTXRUN_REPORT", "");
  if (report.empty()) return;
  std::ofstream file(report);
  for (const auto& [kernel, counts] : statistics) {
    file << kernel << ": " << counts.instructions << " instructions of warps; banks of shared memory passed "
         << counts.bank_passes << " times, at least " << counts.least_passes << "\n";
    for (const auto& [line, count] : counts.conflicts_per_line)
      file << "  line " << line << ": " << count << " too many\n";
    for (const auto& [opcode, count] : counts.per_opcode) file << "  " << opcode << " " << count << "\n";
  }
}

Driver& TheDriver() {
  static Driver driver;
  return driver;
}

std::vector<CUctx_st*>& ContextStack() {
  thread_local std::vector<CUctx_st*> stack;
  return stack;
}

void Say(const std::string& line) { std::fprintf(stderr, "ptxrun: %s\n", line.c_str()); }

CUresult NeedContext() {
  const Driver& driver = TheDriver();
  if (!driver.is_started) return CUDA_ERROR_NOT_INITIALIZED;
  if (driver.lost != CUDA_SUCCESS) return driver.lost;
  return ContextStack().empty() || ContextStack().back() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult NeedContextOutsideCaptures(const char* function) {
  if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
  Driver& driver = TheDriver();
  if (driver.capturing == 0) return CUDA_SUCCESS;
  Say(std::string(function) + " while a stream captures");
  for (CUstream_st* stream : driver.streams) stream->spoilt |= stream->captures;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUstream_st* StreamOf(CUstream stream) {
  Driver& driver = TheDriver();
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD) return &driver.null_stream;
  const auto found = std::find(driver.streams.begin(), driver.streams.end(), stream);
  return found == driver.streams.end() ? nullptr : *found;
}

CUresult Enqueue(CUstream handle, Work work) {
  if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
  CUstream_st* stream = StreamOf(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->captures) {
    if (stream->spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->captured.push_back(std::move(work));
    return CUDA_SUCCESS;
  }
  if (stream == &TheDriver().null_stream && TheDriver().capturing > 0) {  // it would wait for the stream that captures
    Say("work in the null stream while another stream captures");
    for (CUstream_st* other : TheDriver().streams) other->spoilt |= other->captures;
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return work();
}

}  // namespace ptxrun
