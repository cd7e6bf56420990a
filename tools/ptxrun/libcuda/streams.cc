// Streams, events, captures and graphs. Work is done when it is handed over, so that streams never wait for each other.
#include <algorithm>
#include <chrono>

#include "tools/ptxrun/libcuda/state.h"

namespace ptxrun {
namespace {

CUresult StopCapture(CUstream_st* stream, CUgraph* graph) {
  Driver& driver = TheDriver();
  if (!stream->captures) return CUDA_ERROR_ILLEGAL_STATE;
  stream->captures = false;
  --driver.capturing;
  if (stream->spoilt) {
    *graph = nullptr;
    stream->captured.clear();
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  *graph = new CUgraph_st{.work = std::move(stream->captured)};
  stream->captured.clear();
  return CUDA_SUCCESS;
}

double Milliseconds() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Waiting for a stream that captures, or for anything while one does.
CUresult Wait(CUstream handle, const char* function) {
  return Locked([&](Driver&) {
    if (StreamOf(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return NeedContextOutsideCaptures(function);
  });
}

}  // namespace
}  // namespace ptxrun

using namespace ptxrun;

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  return Locked([&](Driver& driver) {
    if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
    driver.streams.push_back(new CUstream_st);
    *stream = driver.streams.back();
    return CUDA_SUCCESS;
  });
}
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) { return cuStreamCreate(stream, flags); }

CUresult cuStreamDestroy_v2(CUstream stream) {
  return Locked([&](Driver& driver) {
    const auto found = std::find(driver.streams.begin(), driver.streams.end(), stream);
    if (found == driver.streams.end()) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->captures) --driver.capturing;
    driver.streams.erase(found);
    delete stream;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamSynchronize(CUstream stream) { return Wait(stream, "cuStreamSynchronize"); }
CUresult cuStreamQuery(CUstream stream) { return Wait(stream, "cuStreamQuery"); }
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  return Locked([&](Driver&) {
    if (StreamOf(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return cuCtxGetCurrent(context);
  });
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode) {
  return Locked([&](Driver& driver) {
    if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
    CUstream_st* stream = StreamOf(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (stream == &driver.null_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->captures) return CUDA_ERROR_ILLEGAL_STATE;
    stream->captures = true;
    stream->spoilt = false;
    ++driver.capturing;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return Locked([&](Driver&) {
    CUstream_st* stream = StreamOf(handle);
    return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : StopCapture(stream, graph);
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return Locked([&](Driver&) {
    const CUstream_st* stream = StreamOf(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    *status = !stream->captures ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->spoilt  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  return Locked([&](Driver&) {
    *exec = new CUgraphExec_st{.work = graph->work};
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  if (nodes != nullptr) return CUDA_ERROR_NOT_SUPPORTED;  // they have no handles here
  *count = graph->work.size();
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return Locked([&](Driver&) {
    for (const Work& work : exec->work) {
      if (const CUresult result = Enqueue(stream, work); result != CUDA_SUCCESS) return result;
    }
    return NeedContext();
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  delete graph;
  return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec exec) {
  delete exec;
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  return Locked([&](Driver&) {
    if (const CUresult result = NeedContext(); result != CUDA_SUCCESS) return result;
    *event = new CUevent_st{.recorded = false, .timed = (flags & CU_EVENT_DISABLE_TIMING) == 0, .milliseconds = 0};
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return Locked([&](Driver&) {
    return Enqueue(stream, [event] {
      event->recorded = true;
      event->milliseconds = Milliseconds();
      return CUDA_SUCCESS;
    });
  });
}

// Work is done in the order in which it is handed over, so there is nothing to wait for; a capture cannot spread to
// another stream here.
CUresult cuStreamWaitEvent(CUstream stream, CUevent, unsigned int) {
  return Locked([&](Driver& driver) {
    if (driver.capturing == 0) return NeedContext();
    Say("cuStreamWaitEvent while a stream captures is not modelled");
    return Enqueue(stream, [] { return CUDA_SUCCESS; }) == CUDA_SUCCESS ? CUDA_ERROR_NOT_SUPPORTED
                                                                        : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  });
}

CUresult cuEventSynchronize(CUevent) { return Wait(nullptr, "cuEventSynchronize"); }
CUresult cuEventQuery(CUevent) { return Wait(nullptr, "cuEventQuery"); }

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  if (!start->recorded || !end->recorded || !start->timed || !end->timed) return CUDA_ERROR_INVALID_HANDLE;
  *milliseconds = static_cast<float>(end->milliseconds - start->milliseconds);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  delete event;
  return CUDA_SUCCESS;
}

}  // extern "C"
