// What is asked, and whether all ranks ask for the same.
#include "distributed/agree.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <sstream>

#include "distributed/parts.h"

namespace sparge::distributed {
namespace {

// What a rank says of its call, padded with zeros: 'r' and its refusal, or 'a' and its description.
constexpr size_t kHeaderBytes = 4096;

// A struct of the caller's header, which may be older and shorter, or newer and longer, than ours.
template <class Defaults, class T>
Defaults CopySized(const char* name, const T* given) {
  SPARGE_REQUIRE(given != nullptr, "%s is NULL", name);
  const size_t size = given->struct_size;
  SPARGE_REQUIRE(size >= sizeof(size_t) && size <= 16 * sizeof(T) && size % alignof(T) == 0,
                 "%s.struct_size=%zu is not that of a header of sparge; call its _init function", name, size);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  SPARGE_REQUIRE(std::all_of(bytes + std::min(size, sizeof(T)), bytes + size, [](unsigned char b) { return b == 0; }),
                 "%s has members that this library (%s) does not know", name, sparge_version());
  Defaults copy;
  std::memcpy(static_cast<void*>(static_cast<T*>(&copy)), given, std::min(size, sizeof(T)));
  copy.struct_size = sizeof(T);
  return copy;
}

void RefuseWhatIsOfOneRank(const sparge_plan_desc& desc, const sparge_run_args& args) {
  SPARGE_REQUIRE(desc.select == SPARGE_SELECT_ALL || desc.select == SPARGE_SELECT_FLOOR,
                 "select=%d is not for several ranks: take SPARGE_SELECT_ALL, or SPARGE_SELECT_FLOOR with thresholds",
                 static_cast<int>(desc.select));
  SPARGE_REQUIRE(desc.select == SPARGE_SELECT_ALL || desc.predictor != SPARGE_PREDICT_PAPER,
                 "predictor=%d is not for several ranks: parts are joined by the masses of the default one",
                 static_cast<int>(desc.predictor));
  SPARGE_REQUIRE(desc.select == SPARGE_SELECT_ALL || desc.q_tokens > SPARGE_FEW_QUERIES,
                 "q_tokens=%" PRId64
                 " with SPARGE_SELECT_FLOOR: up to %d queries have no pools; take SPARGE_SELECT_ALL",
                 desc.q_tokens, SPARGE_FEW_QUERIES);
  const struct {
    bool given;
    const char* name;
  } refused[] = {
      {desc.mask != SPARGE_MASK_NONE, "mask"},
      {desc.q_offsets != nullptr || desc.kv_offsets != nullptr, "q_offsets"},
      {desc.grid[0] != 0 || desc.grid[1] != 0 || desc.grid[2] != 0, "grid"},
      {desc.cache_tokens != 0 || args.cache != nullptr, "cache"},
      {desc.decode != 0, "decode"},
      {desc.first_query != 0 || desc.all_queries != 0, "first_query"},
      {desc.first_key != 0 || desc.all_keys != 0, "first_key"},
      {args.map != nullptr, "map"},
      {args.mass_out != nullptr, "mass_out"},
      {args.pv_out != nullptr, "pv_out"},
      {args.pool_lse != nullptr || args.pool_lse_out != nullptr, "pool_lse"},
      {args.pool_rows != nullptr || args.pool_rows_out != nullptr, "pool_rows"},
      {args.pool_counts != nullptr || args.pool_counts_out != nullptr, "pool_counts"},
      {args.key_survey != nullptr || args.key_survey_out != nullptr, "key_survey"},
      {args.stream != nullptr, "stream"},
      {args.workspace != nullptr, "workspace"},
  };
  for (const auto& [given, name] : refused) SPARGE_REQUIRE(!given, "%s is given, but is not for several ranks", name);
}

void CheckTensors(const Asked& asked, int64_t own_queries, int64_t own_keys) {
  const auto check = [&](const char* name, const sparge_tensor& tensor, int64_t tokens) {
    SPARGE_REQUIRE(tensor.data != nullptr || tokens == 0 || asked.desc.batch == 0, "%s.data is NULL", name);
  };
  check("q", asked.args.q, own_queries);
  check("k", asked.args.k, own_keys);
  check("v", asked.args.v, own_keys);
  check("o", asked.args.o, own_queries);
  const auto overlap = [&](int64_t count, int64_t stride) { return count > 1 && stride < asked.desc.v_dim; };
  const sparge_tensor& o = asked.args.o;
  if (own_queries == 0) return;
  SPARGE_REQUIRE(!overlap(asked.desc.batch, o.batch_stride) && !overlap(asked.desc.q_heads, o.head_stride) &&
                     !overlap(own_queries, o.token_stride),
                 "o has strides %" PRId64 ", %" PRId64 ", %" PRId64 ", which make rows of %" PRId64 " elements overlap",
                 o.batch_stride, o.head_stride, o.token_stride, asked.desc.v_dim);
}

// FNV-1a: arrays of all ranks are compared by that.
template <class T>
std::string Hash(const T* array, int64_t count) {
  if (array == nullptr) return "NULL";
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = reinterpret_cast<const unsigned char*>(array);
  for (size_t i = 0; i < sizeof(T) * static_cast<size_t>(count); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return Format("array %016" PRIx64, hash);
}

// Where two descriptions first differ, as "name is x on rank r and y on rank 0".
std::string FindDifference(const std::string& first, const std::string& other, int rank) {
  std::istringstream lines(first), others(other);
  for (std::string line, its; std::getline(lines, line) && std::getline(others, its);) {
    const size_t space = line.find(' ');
    if (line == its) continue;
    return line.substr(0, space) + " is " + its.substr(its.find(' ') + 1) + " on rank " + std::to_string(rank) +
           " and " + line.substr(space + 1) + " on rank 0";
  }
  return "rank " + std::to_string(rank) + " and rank 0 have different versions of this library";
}

}  // namespace

Asked CheckAsked(const Group& group, sparge_mpi_shard shard, sparge_context* context, const sparge_plan_desc* desc,
                 const sparge_run_args* args) {
  SPARGE_REQUIRE(context != nullptr, "context is NULL");
  SPARGE_REQUIRE(sparge_context_threads(context) > 0, "context is of a GPU (%s): several ranks compute on CPUs",
                 sparge_context_isa(context));
  Asked asked{CopySized<PlanDesc>("desc", desc), CopySized<RunArgs>("args", args)};
  RefuseWhatIsOfOneRank(asked.desc, asked.args);
  PartPlan(context, asked.desc);
  // What the library would refuse of the tensors it refuses of no tokens, too, but for these two.
  const auto tokens = [&](int64_t all) { return CountTokens(SegmentsOf(all, group.rank(), group.ranks(), shard)); };
  CheckTensors(asked, tokens(asked.desc.q_tokens), tokens(asked.desc.kv_tokens));
  PlanDesc none = asked.desc;
  none.q_tokens = none.kv_tokens = 0;
  none.query_offset = SPARGE_OFFSET_BOTTOM_RIGHT;
  RunArgs empty = asked.args;
  empty.map_out = nullptr;
  empty.head_stats = nullptr;
  PartPlan(context, none).Run(empty);
  return asked;
}

std::string Describe(const Asked& asked, sparge_mpi_shard shard) {
  const PlanDesc& d = asked.desc;
  std::ostringstream text;
  text.precision(17);
  text << "version " << sparge_version() << "\nshard " << shard << "\nbatch " << d.batch << "\nq_heads " << d.q_heads
       << "\nkv_heads " << d.kv_heads << "\nq_tokens " << d.q_tokens << "\nkv_tokens " << d.kv_tokens << "\nqk_dim "
       << d.qk_dim << "\nv_dim " << d.v_dim << "\nq.dtype " << asked.args.q.dtype << "\nk.dtype " << asked.args.k.dtype
       << "\nv.dtype " << asked.args.v.dtype << "\nscale " << d.scale << "\nsoftcap " << d.softcap << "\ncausal "
       << d.causal << "\nquery_offset " << d.query_offset << "\nwindow " << d.window << "\nalibi_slopes "
       << Hash(d.alibi_slopes, d.q_heads) << "\nsink_logits " << Hash(d.sink_logits, d.q_heads) << "\nprecision "
       << d.precision << "\nselect " << d.select << "\nkeep_sink " << d.keep_sink << "\nparams.theta " << d.params.theta
       << "\nparams.tau " << d.params.tau << "\nparams.pv_skip " << d.params.pv_skip << "\nheads "
       << Hash(d.heads, d.q_heads) << "\nhead_precision " << Hash(d.head_precision, d.q_heads) << "\ndense_tail "
       << d.dense_tail << "\n";
  return text.str();
}

void Agree(Group& group, const std::string& description, const std::string& refusal) {
  const Buffer own(kHeaderBytes);
  const std::string text = refusal.empty() ? "a" + description : "r" + refusal;
  std::copy_n(text.data(), std::min(text.size(), kHeaderBytes - 1), own.as<char>());
  const std::vector<Buffer> all = group.Gather(own, std::vector<size_t>(group.ranks(), kHeaderBytes));
  for (int r = 0; r < group.ranks(); ++r) {
    const std::string its = all[r].as<char>();
    SPARGE_REQUIRE(its[0] == 'a', "rank %d: %s", r, its.c_str() + 1);
  }
  const std::string first = all[0].as<char>() + 1;
  for (int r = 1; r < group.ranks(); ++r) {
    const std::string its = all[r].as<char>() + 1;
    SPARGE_REQUIRE(its == first, "%s", FindDifference(first, its, r).c_str());
  }
}

}  // namespace sparge::distributed
