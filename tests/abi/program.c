/* A program of 0.3, in every part of its interface: compiled with the header of 0.3 (kept beside this file) it must run
 * with the library of today, and today's header must compile it, too.
 *
 * All structs and results lie in rooms of their exact size. Outside of the address sanitizer, which watches over these
 * by itself, guard bytes around them show who wrote too far. */
#include SPARGE_HEADER

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, sparge_last_error()); \
      exit(1);                                                                         \
    }                                                                                  \
  } while (0)
#define CALL(call) CHECK((call) == SPARGE_OK && GuardsHold())

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif
#if defined(ASAN) || defined(__SANITIZE_ADDRESS__)
enum { GUARD = 0 };
#else
enum { GUARD = 256 };
#endif
enum { MAX_ROOMS = 64, FILL = 0xa5 };

static struct {
  unsigned char* bytes;
  size_t size;
} rooms[MAX_ROOMS];
static int room_count = 0;

/* Memory for `size` bytes, none of them set; kept until the end. */
static void* Room(size_t size) {
  unsigned char* bytes = malloc(size + 2 * GUARD);
  CHECK(bytes != NULL && room_count < MAX_ROOMS);
  memset(bytes, FILL, size + 2 * GUARD);
  rooms[room_count].bytes = bytes;
  rooms[room_count++].size = size;
  return bytes + GUARD;
}

static int GuardsHold(void) {
  for (int r = 0; r < room_count; ++r) {
    for (size_t i = 0; i < GUARD; ++i) {
      if (rooms[r].bytes[i] == FILL && rooms[r].bytes[GUARD + rooms[r].size + i] == FILL) continue;
      fprintf(stderr, "room %d of %zu bytes: byte %zu beside it was written\n", r, rooms[r].size, i);
      return 0;
    }
  }
  return 1;
}

static void FreeRooms(void) {
  CHECK(GuardsHold());
  while (room_count > 0) free(rooms[--room_count].bytes);
}

/* A struct in a room of its own, as its initialiser leaves it: one that wrote less than all would not know its size. */
#define NEW(type, name)                  \
  type* const name = Room(sizeof(type)); \
  type##_init(name);                     \
  CHECK(GuardsHold() && name->struct_size == sizeof(type))

enum { HEADS = 4, KV_HEADS = 2, QUERIES = 300, KEYS = 400, DIM = 32 };

typedef struct {
  float *q, *k, *v;
} Inputs;

static float* Waves(size_t count, double step, double phase, double mean) {
  float* values = Room(count * sizeof(float));
  for (size_t i = 0; i < count; ++i) values[i] = (float)(mean + sin(step * (double)i + phase));
  return values;
}

static Inputs MakeInputs(void) {
  /* Values with a mean: else the output would be little more than what rounding leaves. */
  const Inputs made = {Waves(HEADS * QUERIES * DIM, 0.7, 0.0, 0.0), Waves(KV_HEADS * KEYS * DIM, 1.3, 0.2, 0.0),
                       Waves(KV_HEADS * KEYS * DIM, 2.1, 0.5, 1.0)};
  return made;
}

static sparge_tensor View(float* data, int64_t heads, int64_t tokens) {
  const sparge_tensor view = {data, SPARGE_F32, heads * tokens * DIM, tokens * DIM, DIM};
  return view;
}

/* Keys [first, first + keys) of all; the output and its log-sum-exp in rooms of their own. */
static void SetTensors(const Inputs* in, int64_t first, sparge_run_args* args) {
  args->q = View(in->q, HEADS, QUERIES);
  args->k = View(in->k + first * DIM, KV_HEADS, KEYS);
  args->v = View(in->v + first * DIM, KV_HEADS, KEYS);
  args->o = View(Room(sizeof(float) * HEADS * QUERIES * DIM), HEADS, QUERIES);
  args->lse.data = Room(sizeof(float) * HEADS * QUERIES);
  args->lse.batch_stride = HEADS * QUERIES;
  args->lse.head_stride = QUERIES;
}

static void SetShapes(int64_t keys, sparge_plan_desc* desc) {
  desc->batch = 1;
  desc->q_heads = HEADS;
  desc->kv_heads = KV_HEADS;
  desc->q_tokens = QUERIES;
  desc->kv_tokens = keys;
  desc->qk_dim = desc->v_dim = DIM;
}

static sparge_plan* MakePlan(sparge_context* context, const sparge_plan_desc* desc, sparge_run_args* args) {
  sparge_plan* plan = NULL;
  CALL(sparge_plan_create(context, desc, &plan));
  args->workspace_size = sparge_plan_workspace_size(plan);
  args->workspace = Room(args->workspace_size);
  return plan;
}

/* sum |a - b| / sum |b| of two outputs. */
static double Distance(const sparge_tensor* a, const sparge_tensor* b) {
  double difference = 0, size = 0;
  for (int i = 0; i < HEADS * QUERIES * DIM; ++i) {
    difference += fabs((double)((float*)a->data)[i] - (double)((float*)b->data)[i]);
    size += fabs((double)((float*)b->data)[i]);
  }
  return difference / size;
}

/* Threads of the caller's own: one after the other. */
static void RunInTurn(void* self, int32_t workers, sparge_task task, void* arg) {
  ++*(int*)self;
  for (int32_t w = 0; w < workers; ++w) task(arg, w);
}

static sparge_context* MakeContext(int* runs) {
  NEW(sparge_context_desc, desc);
  desc->threads = 2;
  sparge_context* context = NULL;
  if (runs != NULL) {
    sparge_executor* executor = Room(sizeof(sparge_executor)); /* had no initialiser */
    executor->struct_size = sizeof(sparge_executor);
    executor->self = runs;
    executor->workers = 3;
    executor->run = RunInTurn;
    desc->executor = executor;
  }
  CALL(sparge_context_create(desc, &context));
  CHECK(sparge_context_threads(context) == (runs != NULL ? 3 : 2));
  CHECK(*sparge_context_isa(context) != '\0');
  return context;
}

static void AskInstructionSets(void) {
  CHECK(sparge_isa_count() > 0);
  for (int32_t i = 0; i < sparge_isa_count(); ++i) {
    NEW(sparge_isa, isa);
    CALL(sparge_isa_at(i, isa));
    CHECK(isa->struct_size == sizeof(*isa) && *isa->name != '\0' && isa->group_rows > 0 && *isa->int8_qk != '\0');
  }
}

/* By thresholds: result, log-sum-exp, map, figures; the same from the threads of the caller. */
static void RunCdf(sparge_context* context, const Inputs* in) {
  NEW(sparge_plan_desc, desc);
  CHECK(desc->precision == SPARGE_INT8 && desc->select == SPARGE_SELECT_CDF && desc->params.tau == 0.98);
  CHECK(desc->query_offset == SPARGE_OFFSET_BOTTOM_RIGHT && desc->cache_tokens == 0 && desc->least_effort == 0);
  SetShapes(KEYS, desc);
  desc->causal = 1;
  desc->dense_tail = 10;
  NEW(sparge_run_args, args);
  SetTensors(in, 0, args);
  sparge_plan* plan = MakePlan(context, desc, args);
  NEW(sparge_stats, stats);
  int64_t q_blocks = 0, k_blocks = 0;
  sparge_plan_map_shape(plan, &q_blocks, &k_blocks);
  CHECK(q_blocks == 3 && k_blocks == 7);
  args->stats = stats;
  args->head_stats = Room(HEADS * sizeof(sparge_head_stats));
  args->map_out = Room((size_t)(HEADS * q_blocks * k_blocks));
  CALL(sparge_predict(plan, args));
  const int64_t foreseen = stats->total.qk_computed;
  CALL(sparge_run(plan, args));
  CHECK(stats->struct_size == sizeof(*stats) && stats->threads == 2 && stats->total_ms > 0 &&
        stats->total_ms >= stats->measure_ms);
  CHECK(stats->total.qk_computed == foreseen && foreseen > 0 && foreseen <= stats->total.qk_eligible);
  CHECK(stats->key_blocks == KV_HEADS * k_blocks && stats->key_blocks_reused == 0);
  int64_t computed = 0;
  for (int h = 0; h < HEADS; ++h) computed += args->head_stats[h].qk_computed;
  for (int64_t t = 0; t < HEADS * q_blocks * k_blocks; ++t) computed -= args->map_out[t];
  CHECK(computed == 0);

  NEW(sparge_run_args, oracle);
  SetTensors(in, 0, oracle);
  CALL(sparge_reference(plan, oracle));
  CHECK(Distance(&args->o, &oracle->o) < 0.1);
  int runs = 0;
  sparge_context* in_turn = MakeContext(&runs);
  sparge_plan* again = NULL;
  CALL(sparge_plan_create(in_turn, desc, &again));
  oracle->workspace_size = sparge_plan_workspace_size(again);
  oracle->workspace = Room(oracle->workspace_size);
  CALL(sparge_run(again, oracle));
  CHECK(runs > 0 && Distance(&args->o, &oracle->o) == 0);
  sparge_plan_destroy(again);
  sparge_context_destroy(in_turn);
  sparge_plan_destroy(plan);
}

/* By error bounds: a calibration that learns, is asked, saved and loaded. */
static void RunAuto(sparge_context* context, const Inputs* in) {
  NEW(sparge_calibration_desc, bounds);
#ifdef SPARGE_NOT_NAMED /* compiled with a header that has L2: its default is in that measure */
  CHECK(bounds->target_l1 == SPARGE_NOT_NAMED && bounds->target_l2 > 0 && bounds->round_l1 > 0);
#else
  CHECK(bounds->target_l1 > 0 && bounds->pv_l1 > bounds->target_l1 && bounds->round_l1 > 0);
#endif
  bounds->q_heads = HEADS;
  bounds->seed = 7;
  sparge_calibration* calibration = NULL;
  CALL(sparge_calibration_create(bounds, &calibration));
  NEW(sparge_plan_desc, desc);
  SetShapes(KEYS, desc);
  desc->select = SPARGE_SELECT_AUTO;
  desc->calibration = calibration;
  NEW(sparge_run_args, args);
  SetTensors(in, 0, args);
  sparge_plan* plan = MakePlan(context, desc, args);
  CALL(sparge_calibration_set_bounds(calibration, 1, 0.01, 0.02));
  CALL(sparge_calibrate(plan, args, 1.0));
  CALL(sparge_run(plan, args));
  NEW(sparge_run_args, oracle);
  SetTensors(in, 0, oracle);
  CALL(sparge_reference(plan, oracle));
  CHECK(Distance(&args->o, &oracle->o) < 0.1);

  size_t size = 0, room = 0;
  CALL(sparge_calibration_save(calibration, NULL, &size));
  void* saved = Room(size);
  room = size;
  CALL(sparge_calibration_save(calibration, saved, &room));
  sparge_calibration* loaded = NULL;
  CALL(sparge_calibration_load(saved, size, &loaded));
  for (int h = 0; h < HEADS; ++h) {
    NEW(sparge_head_estimate, before);
    NEW(sparge_head_estimate, after);
    CALL(sparge_calibration_head(calibration, h, before));
    CALL(sparge_calibration_head(loaded, h, after));
    CHECK(before->struct_size == sizeof(*before) && before->samples > 0 && before->work > 0);
    CHECK(after->samples == before->samples && after->l1 == before->l1 && after->work == before->work);
  }
  sparge_plan_destroy(plan);
  sparge_calibration_destroy(loaded);
  sparge_calibration_destroy(calibration);
}

/* Two halves of the keys, joined: as the whole. */
static void Merge(sparge_context* context, const Inputs* in) {
  enum { CUT = 150 };
  const int64_t first[3] = {0, 0, CUT}, keys[3] = {KEYS, CUT, KEYS - CUT};
  sparge_partial parts[3];
  for (int i = 0; i < 3; ++i) {
    NEW(sparge_plan_desc, desc);
    SetShapes(keys[i], desc);
    desc->precision = SPARGE_FP32;
    desc->select = SPARGE_SELECT_ALL;
    desc->params.pv_skip = SPARGE_PV_SKIP_OFF;
    NEW(sparge_run_args, args);
    SetTensors(in, first[i], args);
    sparge_plan* plan = MakePlan(context, desc, args);
    CALL(sparge_run(plan, args));
    sparge_plan_destroy(plan);
    parts[i].o = args->o;
    parts[i].lse = args->lse;
  }
  CALL(sparge_merge(1, HEADS, QUERIES, DIM, &parts[1], &parts[2], &parts[1]));
  CHECK(Distance(&parts[1].o, &parts[0].o) < 1e-5);
  CHECK(fabsf(parts[1].lse.data[17] - parts[0].lse.data[17]) < 1e-5f);
}

int main(void) {
  sparge_context* context = MakeContext(NULL);
  const Inputs in = MakeInputs();
  AskInstructionSets();
  RunCdf(context, &in);
  RunAuto(context, &in);
  Merge(context, &in);
  sparge_context_destroy(context);
  FreeRooms();
  printf("a program of %d.%d with library %s\n", SPARGE_VERSION_MAJOR, SPARGE_VERSION_MINOR, sparge_version());
  return 0;
}
