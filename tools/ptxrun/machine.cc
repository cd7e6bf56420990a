// Blocks of a launch, one after the other, and the barriers between their warps.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "tools/ptxrun/decode.h"
#include "tools/ptxrun/ptxrun.h"
#include "tools/ptxrun/warp.h"

namespace ptxrun {
namespace {

constexpr uint32_t kMaxThreads = 1024;

// One host thread's block, used again for the next.
class Worker {
 public:
  Worker(const Program& program, const LaunchShape& shape, const std::vector<uint8_t>& params, Memory& memory,
         const Options& options)
      : shape_(shape),
        block_{.program = program,
               .options = options,
               .memory = memory,
               .params = params,
               .statistics = statistics_,
               .shared = Shared(program.static_shared + shape.shared_bytes, program.shared_granule)} {
    statistics_.per_instruction.resize(program.code.size());
    const uint32_t threads = shape.block[0] * shape.block[1] * shape.block[2];
    for (uint32_t i = 0; i * kLanes < threads; ++i) warps_.push_back(std::make_unique<Warp>(block_, i));
  }

  void RunBlock(uint32_t linear) {
    const uint32_t index[3] = {linear % shape_.grid[0], linear / shape_.grid[0] % shape_.grid[1],
                               linear / shape_.grid[0] / shape_.grid[1]};
    block_.shared.Clear();
    for (auto& warp : warps_) warp->Start(index, shape_);
    try {
      while (!Round()) {
      }
    } catch (const Fault& fault) {
      throw Fault(block_.program.name + ", block (" + std::to_string(index[0]) + ", " + std::to_string(index[1]) +
                  ", " + std::to_string(index[2]) + "), " + fault.what());
    }
  }

  const Statistics& statistics() const { return statistics_; }

 private:
  // Every warp up to its next barrier; true: all have left.
  bool Round() {
    for (auto& warp : warps_) {
      if (warp->stop != Stop::kDone) warp->Run();
    }
    const Warp* first = nullptr;
    for (const auto& warp : warps_) {
      if (warp->stop == Stop::kDone) continue;
      if (first == nullptr) first = warp.get();
      if (warp->barrier != first->barrier || warp->barrier_instr->run != first->barrier_instr->run) {
        throw Fault("warps wait at different barriers, in lines " + std::to_string(first->barrier_instr->line) +
                    " and " + std::to_string(warp->barrier_instr->line));
      }
    }
    if (first == nullptr) return true;
    if (first->barrier_instr->run != nullptr) Reduce(*first->barrier_instr);
    block_.shared.NextEpoch();
    return false;
  }

  // bar.red: popc, and, or over the predicate of all threads of the block.
  void Reduce(const Instr& instr) {
    uint32_t count = 0, threads = 0;
    for (const auto& warp : warps_) {
      if (warp->stop == Stop::kDone) continue;
      count += static_cast<uint32_t>(std::popcount(warp->barrier_value));
      threads += static_cast<uint32_t>(std::popcount(warp->live));
    }
    for (auto& warp : warps_) {
      if (warp->stop == Stop::kDone) continue;
      const Instr& own = *warp->barrier_instr;
      if (instr.imm[1] == 0) {
        ForLanes(warp->live, [&](uint32_t lane) { warp->Row<uint32_t>(own.op[0])[lane] = count; });
      } else {
        const bool result = instr.imm[1] == 1 ? count == threads : count != 0;
        uint32_t& predicate = warp->predicates[own.op[0]];
        predicate = result ? predicate | warp->live : predicate & ~warp->live;
      }
    }
  }

  Statistics statistics_;
  LaunchShape shape_;
  Block block_;
  std::vector<std::unique_ptr<Warp>> warps_;
};

void CheckShape(const Program& program, const LaunchShape& shape, const std::vector<uint8_t>& params) {
  const auto threads = uint64_t{shape.block[0]} * shape.block[1] * shape.block[2];
  if (threads == 0 || threads > kMaxThreads)
    throw Fault(program.name + ": a block of " + std::to_string(threads) + " threads");
  if (uint64_t{shape.grid[0]} * shape.grid[1] * shape.grid[2] == 0 || shape.grid[1] > 65535 || shape.grid[2] > 65535) {
    throw Fault(program.name + ": a grid of " + std::to_string(shape.grid[0]) + " x " + std::to_string(shape.grid[1]) +
                " x " + std::to_string(shape.grid[2]));
  }
  if (params.size() < program.param_bytes) {
    throw Fault(program.name + ": " + std::to_string(params.size()) + " bytes of parameters, not " +
                std::to_string(program.param_bytes));
  }
}

// Opcodes and lines out of the counts of instructions.
Statistics Summed(const Program& program, Statistics statistics) {
  for (size_t i = 0; i < program.code.size(); ++i) {
    const uint64_t count = statistics.per_instruction[i];
    if (count == 0) continue;
    statistics.instructions += count;
    statistics.per_opcode[program.texts[program.code[i].text]] += count;
  }
  return statistics;
}

}  // namespace

void Statistics::Add(const Statistics& other) {
  instructions += other.instructions;
  bank_passes += other.bank_passes;
  least_passes += other.least_passes;
  for (const auto& [opcode, count] : other.per_opcode) per_opcode[opcode] += count;
  for (const auto& [line, count] : other.conflicts_per_line) conflicts_per_line[line] += count;
  per_instruction.resize(std::max(per_instruction.size(), other.per_instruction.size()));
  for (size_t i = 0; i < other.per_instruction.size(); ++i) per_instruction[i] += other.per_instruction[i];
}

const std::string& Kernel::name() const { return program_->name; }
uint32_t Kernel::static_shared() const { return program_->static_shared; }
uint32_t Kernel::local_bytes() const { return program_->local_bytes; }
size_t Kernel::param_count() const { return program_->params.size(); }
uint32_t Kernel::param_bytes(size_t index) const { return static_cast<uint32_t>(program_->params[index].bytes); }
uint32_t Kernel::param_offset(size_t index) const { return program_->param_offsets[index]; }
uint32_t Kernel::param_buffer_bytes() const { return program_->param_bytes; }

Statistics Kernel::Run(const LaunchShape& shape, const std::vector<uint8_t>& params, Memory& memory,
                       const Options& options) const {
  CheckShape(*program_, shape, params);
  const uint32_t blocks = shape.grid[0] * shape.grid[1] * shape.grid[2];
  std::vector<uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (options.seed != 0) std::shuffle(order.begin(), order.end(), std::mt19937(options.seed));

  std::atomic<uint32_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  Statistics total;
  const auto work = [&] {
    try {
      Worker worker(*program_, shape, params, memory, options);
      for (uint32_t i = next++; i < blocks; i = next++) worker.RunBlock(order[i]);
      const std::lock_guard lock(mutex);
      total.Add(worker.statistics());
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = blocks;
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < std::min<int>(options.threads, static_cast<int>(blocks)); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
  return Summed(*program_, std::move(total));
}

Module::Module(std::string_view text, Memory& memory) : memory_(memory), syntax_(ParseText(text)) {
  for (const Variable& variable : syntax_.variables) {
    if (variable.space == Space::kShared) continue;
    const auto bytes = static_cast<uint64_t>(variable.bytes);
    const uint64_t address = memory_.Allocate(bytes);
    // Variables without an initial value are zero, as in C.
    memory_.Fill(address, 0, 1, bytes);
    memory_.Write(address, variable.initial.data(), variable.initial.size());
    globals_[variable.name] = {address, bytes};
  }
}

Module::~Module() {
  for (const auto& [name, global] : globals_) memory_.Free(global.address);
}

Kernel Module::Find(const std::string& name) {
  const auto entry = syntax_.entries.find(name);
  if (entry == syntax_.entries.end()) throw Fault("no kernel " + name);
  auto& program = programs_[name];
  if (!program) {
    std::map<std::string, Place> places;
    for (const auto& [variable, global] : globals_) {
      places[variable] = {
          .space = Space::kGlobal, .address = global.address, .bytes = static_cast<int64_t>(global.bytes)};
    }
    program = Decode(syntax_, entry->second, places);
  }
  return Kernel(program);
}

std::vector<std::string> Module::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : syntax_.entries) names.push_back(name);
  return names;
}

const Module::Global* Module::FindGlobal(const std::string& name) const {
  const auto found = globals_.find(name);
  return found == globals_.end() ? nullptr : &found->second;
}

}  // namespace ptxrun
