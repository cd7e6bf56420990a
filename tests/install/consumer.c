/* Uses the installed C header and library: a small causal attention, compared with the formula written out. */
#include <math.h>
#include <sparge/sparge.h>
#include <stdio.h>
#include <stdlib.h>

enum { kTokens = 37, kDim = 10 };

/* o_i = sum_{j <= i} exp(q_i . k_j / sqrt(D)) v_j / sum of the same weights */
static void Formula(const float* q, const float* k, const float* v, double* o) {
  for (int i = 0; i < kTokens; ++i) {
    double total = 0;
    for (int d = 0; d < kDim; ++d) o[i * kDim + d] = 0;
    for (int j = 0; j <= i; ++j) {
      double score = 0;
      for (int d = 0; d < kDim; ++d) score += q[i * kDim + d] * k[j * kDim + d];
      const double weight = exp(score / sqrt((double)kDim));
      total += weight;
      for (int d = 0; d < kDim; ++d) o[i * kDim + d] += weight * v[j * kDim + d];
    }
    for (int d = 0; d < kDim; ++d) o[i * kDim + d] /= total;
  }
}

static int Require(sparge_status status) {
  if (status != SPARGE_OK) fprintf(stderr, "%s: %s\n", sparge_status_text(status), sparge_last_error());
  return status == SPARGE_OK;
}

static sparge_tensor View(float* data) {
  const sparge_tensor view = {data, SPARGE_F32, kTokens * kDim, kTokens * kDim, kDim};
  return view;
}

int main(void) {
  static float q[kTokens * kDim], k[kTokens * kDim], v[kTokens * kDim], o[kTokens * kDim];
  static double expected[kTokens * kDim];
  for (int i = 0; i < kTokens * kDim; ++i) {
    q[i] = sinf(0.7f * (float)i);
    k[i] = cosf(1.3f * (float)i);
    v[i] = sinf(2.1f * (float)i + 0.5f);
  }
  Formula(q, k, v, expected);

  sparge_plan_desc desc;
  sparge_plan_desc_init(&desc);
  desc.batch = desc.q_heads = desc.kv_heads = 1;
  desc.q_tokens = desc.kv_tokens = kTokens;
  desc.qk_dim = desc.v_dim = kDim;
  desc.causal = 1;
  desc.precision = SPARGE_PRECISION_FP32;
  desc.select = SPARGE_SELECT_ALL;
  sparge_context* context = NULL;
  sparge_plan* plan = NULL;
  if (!Require(sparge_context_create(NULL, &context)) || !Require(sparge_plan_create(context, &desc, &plan))) return 1;

  sparge_run_args args;
  sparge_run_args_init(&args);
  args.q = View(q);
  args.k = View(k);
  args.v = View(v);
  args.o = View(o);
  args.workspace_size = sparge_plan_workspace_size(plan);
  args.workspace = malloc(args.workspace_size);
  const int ran = args.workspace != NULL && Require(sparge_run(plan, &args));
  free(args.workspace);
  sparge_plan_destroy(plan);
  sparge_context_destroy(context);
  if (!ran) return 1;

  double worst = 0;
  for (int i = 0; i < kTokens * kDim; ++i) worst = fmax(worst, fabs(o[i] - expected[i]));
  printf("sparge %s from C: largest difference to the formula %.2g\n", sparge_version(), worst);
  return worst < 1e-5 ? 0 : 1;
}
