/* The header is C11, and a C program can run attention with it. */
#include <math.h>
#include <sparge/sparge.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, sparge_last_error()); \
      return 1;                                                                        \
    }                                                                                  \
  } while (0)

int main(void) {
  enum { TOKENS = 100, DIM = 16 };
  static float q[TOKENS * DIM], v[TOKENS * DIM], o[TOKENS * DIM];
  for (int i = 0; i < TOKENS * DIM; ++i) {
    q[i] = 0.0f; /* equal scores: the result is the mean of the values */
    v[i] = (float)(i / DIM);
  }
  sparge_context* context = NULL;
  CHECK(sparge_context_create(NULL, &context) == SPARGE_OK);
  sparge_plan_desc desc;
  sparge_plan_desc_init(&desc);
  desc.batch = desc.q_heads = desc.kv_heads = 1;
  desc.q_tokens = desc.kv_tokens = TOKENS;
  desc.qk_dim = desc.v_dim = DIM;
  desc.precision = SPARGE_PRECISION_FP32;
  sparge_plan* plan = NULL;
  CHECK(sparge_plan_create(context, &desc, &plan) == SPARGE_OK);
  sparge_stats stats;
  sparge_stats_init(&stats);
  sparge_run_args args;
  sparge_run_args_init(&args);
  const sparge_tensor view = {q, SPARGE_F32, TOKENS * DIM, TOKENS * DIM, DIM};
  args.q = args.k = args.v = args.o = view;
  args.v.data = v;
  args.o.data = o;
  args.stats = &stats;
  args.workspace_size = sparge_plan_workspace_size(plan);
  args.workspace = malloc(args.workspace_size);
  CHECK(args.workspace != NULL);
  CHECK(sparge_run(plan, &args) == SPARGE_OK);
  for (int i = 0; i < TOKENS * DIM; ++i) CHECK(fabsf(o[i] - 0.5f * (TOKENS - 1)) < 1e-4f);
  CHECK(stats.total.qk_eligible == 2);
  args.workspace_size = 0;
  CHECK(sparge_run(plan, &args) == SPARGE_INVALID_ARGUMENT);
  free(args.workspace);
  const int64_t grid[3] = {1, 2, 2}; /* the smallest curve: down, over, and up */
  int64_t order[4];
  CHECK(sparge_token_order(SPARGE_ORDER_HILBERT, grid, 0, order) == SPARGE_OK);
  CHECK(order[0] == 0 && order[1] == 2 && order[2] == 3 && order[3] == 1);
  sparge_plan_destroy(plan);
  sparge_context_destroy(context);
  puts("ok");
  return 0;
}
