// What a device does. Problems, selection and calibration are the same everywhere; how they are computed is not: packed
// layouts differ by device, so that the seam is the whole run and not the tile. Devices: src/cpu, src/cuda.
#ifndef SPARGE_SRC_DEVICE_H_
#define SPARGE_SRC_DEVICE_H_

#include <sparge/sparge.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/problem/problem.h"

namespace sparge::impl {

// Shape of partial results: (batch, heads, tokens, dim).
struct MergeShape {
  int64_t batch, heads, tokens, dim;
};

// The problems of one descriptor (problem.h: MakeProblems), made ready for a device. May be used by several threads at
// once, each with its own memory. Arguments have been checked; all pointers are the device's memory.
class DevicePlan {
 public:
  virtual ~DevicePlan() = default;

  virtual const Problem& problem() const = 0;  // the first one
  virtual Needs needs() const = 0;             // bytes of the caller's memory
  virtual int64_t pools() const = 0;           // of queries, per sequence and head
  virtual void Run(const sparge_run_args& args) const = 0;
  virtual void Predict(const sparge_run_args& args) const = 0;                   // stage 1 only
  virtual void Calibrate(const sparge_run_args& args, double effort) const = 0;  // samples only; a share of a dense run
};

class Device {
 public:
  virtual ~Device() = default;

  virtual const char* isa() const = 0;
  virtual int32_t threads() const = 0;
  virtual bool on_host() const = 0;  // memory is the host's, and a call has done its work when it returns
  virtual std::unique_ptr<DevicePlan> Prepare(std::vector<Problem> problems) const = 0;
  // `out` may be one of the parts.
  virtual void Merge(const MergeShape& shape, std::span<const sparge_partial> parts,
                     const sparge_partial& out) const = 0;
};

}  // namespace sparge::impl
#endif  // SPARGE_SRC_DEVICE_H_
