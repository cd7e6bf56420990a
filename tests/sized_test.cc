// Structs of callers with another header: an older one's are shorter, a newer one's are longer. tests/abi/ has a whole
// program of an older version.
#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "tests/test_util.h"

namespace sparge::testing {
namespace {

constexpr size_t kMore = 24;  // bytes that a newer header has
constexpr unsigned char kFill = 0xa5;

// One struct in memory that is larger than it, to be read as that of a header of any size.
template <class T>
struct Room {
  alignas(T) unsigned char bytes[sizeof(T) + kMore + 64];

  Room() { std::memset(bytes, kFill, sizeof(bytes)); }
  T* get() { return reinterpret_cast<T*>(bytes); }
  bool UntouchedFrom(size_t size) const {
    return std::all_of(bytes + size, bytes + sizeof(bytes), [](unsigned char b) { return b == kFill; });
  }
};

template <class T>
using Init = void (*)(T*, size_t);
// Sets what the struct must have, and gives it to the library.
template <class T>
using Use = std::function<sparge_status(T*)>;

// Callers of a newer header: nothing set in what this library does not know is as good as its own struct; anything set
// is refused, by the name of the argument. And the library writes no byte behind a struct, whatever its size.
template <class T>
void ExpectSizes(const char* name, Init<T> init, const Use<T>& use) {
  SCOPED_TRACE(name);
  T own;
  std::memset(&own, kFill, sizeof(T));
  init(&own, sizeof(T));
  EXPECT_EQ(own.struct_size, sizeof(T));
  for (const size_t size : {sizeof(T) - 8, sizeof(T), sizeof(T) + kMore}) {
    SCOPED_TRACE(size);
    Room<T> room;
    init(room.get(), size);
    EXPECT_EQ(room.get()->struct_size, size);
    const size_t known = std::min(size, sizeof(T)) - sizeof(size_t);
    EXPECT_EQ(std::memcmp(room.bytes + sizeof(size_t), reinterpret_cast<unsigned char*>(&own) + sizeof(size_t), known),
              0);
    EXPECT_TRUE(room.UntouchedFrom(size));
    EXPECT_EQ(use(room.get()), SPARGE_OK) << sparge_last_error();
    EXPECT_EQ(room.get()->struct_size, size);
    EXPECT_TRUE(room.UntouchedFrom(size));
  }
  for (const size_t at : {sizeof(T), sizeof(T) + kMore - 1}) {
    Room<T> room;
    init(room.get(), sizeof(T) + kMore);
    room.bytes[at] = 1;
    EXPECT_EQ(use(room.get()), SPARGE_INVALID_ARGUMENT);
    const std::string text = std::string(name) + " has members that this library (" + sparge_version() +
                             ") does not know: byte " + std::to_string(at) + " of " +
                             std::to_string(sizeof(T) + kMore) + " is set";
    EXPECT_STREQ(sparge_last_error(), text.c_str());
  }
  for (const size_t size : {size_t{0}, size_t{7}, sizeof(T) - 1, sizeof(T) + 4, 17 * sizeof(T), ~size_t{0}}) {
    Room<T> room;
    init(room.get(), sizeof(T));
    room.get()->struct_size = size;
    EXPECT_EQ(use(room.get()), SPARGE_INVALID_ARGUMENT) << size;
    const std::string text = std::string(name) + ".struct_size=" + std::to_string(size) +
                             " is not that of a header of sparge; call its _init function";
    EXPECT_STREQ(sparge_last_error(), text.c_str());
  }
  EXPECT_NO_FATAL_FAILURE(init(nullptr, sizeof(T)));
}

sparge_status CreateContext(const sparge_context_desc* desc) {
  sparge_context* context = nullptr;
  const sparge_status status = sparge_context_create(desc, &context);
  EXPECT_EQ(context != nullptr, status == SPARGE_OK);
  sparge_context_destroy(context);
  return status;
}

TEST(Sized, Contexts) {
  ExpectSizes<sparge_context_desc>("desc", &sparge_context_desc_init_sized, [](sparge_context_desc* desc) {
    desc->threads = 1;
    return CreateContext(desc);
  });
  // The last member of an executor is its function, so an older one would be none.
  sparge_executor executor;
  sparge_executor_init(&executor);
  EXPECT_EQ(executor.struct_size, sizeof(executor));
  EXPECT_EQ(executor.run, nullptr);
  ContextDesc desc;
  desc.executor = &executor;
  EXPECT_EQ(CreateContext(&desc), SPARGE_INVALID_ARGUMENT);
  EXPECT_STREQ(sparge_last_error(), "executor.workers=0 is outside 1..4096");
  executor.struct_size = 3;
  EXPECT_EQ(CreateContext(&desc), SPARGE_INVALID_ARGUMENT);
  EXPECT_STREQ(sparge_last_error(),
               "executor.struct_size=3 is not that of a header of sparge; call its _init function");
  Room<sparge_executor> longer;
  sparge_executor_init_sized(longer.get(), sizeof(sparge_executor) + kMore);
  longer.get()->workers = 1;
  longer.get()->run = [](void*, int32_t workers, sparge_task task, void* arg) {
    for (int32_t w = 0; w < workers; ++w) task(arg, w);
  };
  desc.executor = longer.get();
  EXPECT_EQ(CreateContext(&desc), SPARGE_OK);
  longer.bytes[sizeof(sparge_executor)] = 1;
  EXPECT_EQ(CreateContext(&desc), SPARGE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sparge_last_error()).find("executor has members that"), std::string::npos);
}

TEST(Sized, InstructionSets) {
  ExpectSizes<sparge_isa>("out", &sparge_isa_init_sized, [](sparge_isa* isa) {
    const sparge_status status = sparge_isa_at(0, isa);
    if (status == SPARGE_OK) {
      EXPECT_NE(*isa->name, '\0');
    }
    return status;
  });
}

TEST(Sized, PlansRunsAndStatistics) {
  const Context context(1);
  const Problem p({.q_tokens = 70});
  ExpectSizes<sparge_plan_desc>("desc", &sparge_plan_desc_init_sized, [&](sparge_plan_desc* desc) {
    desc->batch = desc->q_heads = desc->kv_heads = 1;
    desc->q_tokens = desc->kv_tokens = 10;
    desc->qk_dim = desc->v_dim = 8;
    sparge_plan* plan = nullptr;
    const sparge_status status = sparge_plan_create(context.get(), desc, &plan);
    sparge_plan_destroy(plan);
    return status;
  });
  Plan plan(context, p.desc);
  std::vector<std::byte> workspace(plan.workspace_size());
  TestTensor o(1, 1, 70, 64);
  const auto set = [&](sparge_run_args* args) {
    args->q = p.q.view();
    args->k = p.k.view();
    args->v = p.v.view();
    args->o = o.view();
    args->workspace = workspace.data();
    args->workspace_size = workspace.size();
  };
  ExpectSizes<sparge_run_args>("args", &sparge_run_args_init_sized, [&](sparge_run_args* args) {
    set(args);
    return sparge_run(plan.get(), args);
  });
  ExpectSizes<sparge_stats>("stats", &sparge_stats_init_sized, [&](sparge_stats* stats) {
    RunArgs args;
    set(&args);
    args.stats = stats;
    const sparge_status status = sparge_run(plan.get(), &args);
    if (status == SPARGE_OK) {
      EXPECT_EQ(stats->total.qk_eligible, 2);
    }
    return status;
  });
}

TEST(Sized, Calibrations) {
  ExpectSizes<sparge_calibration_desc>("desc", &sparge_calibration_desc_init_sized, [](sparge_calibration_desc* desc) {
    desc->q_heads = 2;
    sparge_calibration* calibration = nullptr;
    const sparge_status status = sparge_calibration_create(desc, &calibration);
    sparge_calibration_destroy(calibration);
    return status;
  });
  ExpectSizes<sparge_calibration_desc>("desc", &sparge_calibration_desc_init_sized, [](sparge_calibration_desc* desc) {
    sparge_measure measure;
    double target = 0, pv = 0;
    const sparge_status status = sparge_calibration_desc_bounds(desc, &measure, &target, &pv);
    if (status == SPARGE_OK) {
      EXPECT_GT(target, 0.0);
      EXPECT_DOUBLE_EQ(pv, SPARGE_PV_ROOM * target);
    }
    return status;
  });
  CalibrationDesc desc;
  desc.q_heads = 2;
  const Calibration calibration(desc);
  ExpectSizes<sparge_head_estimate>("out", &sparge_head_estimate_init_sized, [&](sparge_head_estimate* out) {
    const sparge_status status = sparge_calibration_head(calibration.get(), 1, out);
    if (status == SPARGE_OK) {
      EXPECT_EQ(out->params.tau, 1.0);
    }
    return status;
  });
}

TEST(Sized, Tuners) {
  const Context context(1);
  const Problem p({.q_tokens = 70, .qk_dim = 8});
  PlanDesc asked;
  asked.batch = asked.q_heads = asked.kv_heads = 1;
  asked.q_tokens = asked.kv_tokens = 70;
  asked.qk_dim = asked.v_dim = 8;
  RunArgs args;
  args.q = p.q.view();
  args.k = p.k.view();
  args.v = p.v.view();
  const sparge_plan_desc* samples[] = {&asked};
  sparge_tuner* last = nullptr;  // of those that were created
  ExpectSizes<sparge_tuner_desc>("desc", &sparge_tuner_desc_init_sized, [&](sparge_tuner_desc* desc) {
    desc->sample_count = 1;
    desc->samples = samples;
    desc->self = &args;
    desc->open = [](void* self, int64_t, const sparge_run_args** out) {
      *out = static_cast<RunArgs*>(self);
      return SPARGE_OK;
    };
    sparge_tuner* tuner = nullptr;
    const sparge_status status = sparge_tuner_create(context.get(), desc, &tuner);
    if (tuner != nullptr) sparge_tuner_destroy(std::exchange(last, tuner));
    return status;
  });
  ASSERT_EQ(sparge_tuner_run(last), SPARGE_OK) << sparge_last_error();
  ExpectSizes<sparge_tuner_info>("out", &sparge_tuner_info_init_sized, [&](sparge_tuner_info* out) {
    const sparge_status status = sparge_tuner_get_info(last, out);
    if (status == SPARGE_OK) {
      EXPECT_GT(out->steps, 0);
    }
    return status;
  });
  ExpectSizes<sparge_tuned_head>("out", &sparge_tuned_head_init_sized, [&](sparge_tuned_head* out) {
    const sparge_status status = sparge_tuner_head(last, 0, out);
    if (status == SPARGE_OK) {
      EXPECT_EQ(out->work, 1);
    }
    return status;
  });
  ExpectSizes<sparge_layer_preset>("out", &sparge_layer_preset_init_sized, [&](sparge_layer_preset* out) {
    const sparge_status status = sparge_tuner_preset(last, out);
    if (status == SPARGE_OK) {
      EXPECT_EQ(out->qk_dim, 8);
    }
    return status;
  });
  sparge_tuner_destroy(last);
}

TEST(Sized, Layers) {
  ExpectSizes<sparge_layer_desc>("desc", &sparge_layer_desc_init_sized, [](sparge_layer_desc* desc) {
    sparge_layer* layer = nullptr;
    const sparge_status status = sparge_layer_create(desc, &layer);
    sparge_layer_destroy(layer);
    return status;
  });
  const Layer layer;
  ExpectSizes<sparge_layer_totals>("out", &sparge_layer_totals_init_sized,
                                   [&](sparge_layer_totals* out) { return sparge_layer_get_totals(layer.get(), out); });
  // The last member of a preset is one that it must have, so an older one would be none.
  sparge_head_params heads[] = {{-1, 0.5, 1, 10}};
  const sparge_precision precisions[] = {SPARGE_PRECISION_INT8};
  const auto create = [&](sparge_layer_preset* preset) {
    preset->q_heads = preset->kv_heads = 1;
    preset->qk_dim = preset->v_dim = 64;
    preset->select = SPARGE_SELECT_FLOOR;
    preset->heads = heads;
    preset->head_precision = precisions;
    LayerDesc desc;
    desc.preset = preset;
    sparge_layer* made = nullptr;
    const sparge_status status = sparge_layer_create(&desc, &made);
    sparge_layer_destroy(made);
    return status;
  };
  Room<sparge_layer_preset> longer;
  sparge_layer_preset_init_sized(longer.get(), sizeof(sparge_layer_preset) + kMore);
  EXPECT_EQ(create(longer.get()), SPARGE_OK) << sparge_last_error();
  longer.bytes[sizeof(sparge_layer_preset)] = 1;
  EXPECT_EQ(create(longer.get()), SPARGE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sparge_last_error()).find("preset has members that"), std::string::npos);
}

// What the library hands on inside is in its own size, whatever the caller's was.
TEST(Sized, LayersAndTunersRunWhatCallersOfOtherHeadersGive) {
  const Context context(1);
  const Problem p({.q_tokens = 200, .correlated = true});
  Room<sparge_run_args> room;
  Room<sparge_plan_desc> plan;
  for (const size_t more : {size_t{0}, kMore}) {
    sparge_plan_desc_init_sized(plan.get(),
                                more == 0 ? offsetof(sparge_plan_desc, first_query) : sizeof(PlanDesc) + more);
    plan.get()->batch = plan.get()->q_heads = plan.get()->kv_heads = 1;
    plan.get()->q_tokens = plan.get()->kv_tokens = 200;
    plan.get()->qk_dim = plan.get()->v_dim = 64;
    sparge_run_args_init_sized(room.get(), more == 0 ? offsetof(sparge_run_args, mass_out) : sizeof(RunArgs) + more);
    room.get()->q = p.q.view();
    room.get()->k = p.k.view();
    room.get()->v = p.v.view();
    TunerDesc desc;
    const sparge_plan_desc* samples[] = {plan.get()};
    desc.sample_count = 1;
    desc.samples = samples;
    desc.self = room.get();
    desc.open = [](void* self, int64_t, const sparge_run_args** args) {
      *args = static_cast<const sparge_run_args*>(self);
      return SPARGE_OK;
    };
    sparge_tuner* tuner = nullptr;
    ASSERT_EQ(sparge_tuner_create(context.get(), &desc, &tuner), SPARGE_OK) << sparge_last_error();
    EXPECT_EQ(sparge_tuner_run(tuner), SPARGE_OK) << sparge_last_error();
    ExpectSizes<sparge_tuner_info>("out", &sparge_tuner_info_init_sized,
                                   [&](sparge_tuner_info* out) { return sparge_tuner_get_info(tuner, out); });
    ExpectSizes<sparge_tuned_head>("out", &sparge_tuned_head_init_sized,
                                   [&](sparge_tuned_head* out) { return sparge_tuner_head(tuner, 0, out); });
    sparge_tuner_destroy(tuner);

    TestTensor o(1, 1, 200, 64);
    room.get()->o = o.view();
    Layer layer;
    EXPECT_EQ(sparge_layer_run(layer.get(), context.get(), plan.get(), room.get(), 0), SPARGE_OK)
        << sparge_last_error();
    EXPECT_LE(RelativeL1(o, Reference(context, p).o), 0.03);
  }
  ExpectSizes<sparge_tuner_desc>("desc", &sparge_tuner_desc_init_sized, [&](sparge_tuner_desc* desc) {
    const sparge_plan_desc* samples[] = {plan.get()};
    desc->sample_count = 1;
    desc->samples = samples;
    desc->open = [](void*, int64_t, const sparge_run_args**) { return SPARGE_STOPPED; };
    sparge_tuner* tuner = nullptr;
    const sparge_status status = sparge_tuner_create(context.get(), desc, &tuner);
    sparge_tuner_destroy(tuner);
    return status;
  });
}

}  // namespace
}  // namespace sparge::testing
