// The few kernels that a multilayer perceptron needs, computed on the host: found by their mangled names, with the parameters that those names tell.
#include "stand_ins.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ARG(type, i) (*(type *)a[i])
typedef float f32;
typedef _Float16 f16;

#define UNARY(name, from, to, value)                                                                                                       \
  static void name(void **a) {                                                                                                             \
    const from *in = ARG(from *, 0);                                                                                                       \
    to *out = ARG(to *, 1);                                                                                                                \
    for (long i = 0, n = ARG(long, 3); i < n; i++) out[i] = value;                                                                         \
  }                                                                                                                                        \
  static void name##_touch(void *stream, void **a) {                                                                                       \
    stand_ins_touch(stream, ARG(void *, 0), ARG(long, 3) * sizeof(from), 0);                                                               \
    stand_ins_touch(stream, ARG(void *, 1), ARG(long, 3) * sizeof(to), 1);                                                                 \
  }
// _UnaryElementWise<...>(in, out, functor, n)
UNARY(relu, f32, f32, in[i] > 0 ? in[i] : 0)
UNARY(relu_half, f16, f16, in[i] > 0 ? in[i] : 0)
UNARY(narrow, f32, f16, in[i])
UNARY(widen, f16, f32, in[i])

// _BinaryElementWiseSimple<step of the left, step of the right, ..., functor>(left, right, out, functor, n)
#define BINARY(name, right_step, op)                                                                                                       \
  static void name(void **a) {                                                                                                             \
    const f32 *left = ARG(f32 *, 0), *right = ARG(f32 *, 1);                                                                               \
    f32 *out = ARG(f32 *, 2);                                                                                                              \
    for (int i = 0, n = ARG(int, 4); i < n; i++) out[i] = left[i] op right[right_step * i];                                                \
  }                                                                                                                                        \
  static void name##_touch(void *stream, void **a) {                                                                                       \
    size_t len = ARG(int, 4) * sizeof(f32);                                                                                                \
    stand_ins_touch(stream, ARG(void *, 0), len, 0);                                                                                       \
    stand_ins_touch(stream, ARG(void *, 1), right_step ? len : sizeof(f32), 0);                                                            \
    stand_ins_touch(stream, ARG(void *, 2), len, 1);                                                                                       \
  }
BINARY(add, 1, +)
BINARY(add_one, 0, +)
BINARY(sub, 1, -)
BINARY(sub_one, 0, -)
BINARY(mul, 1, *)
BINARY(mul_one, 0, *)
BINARY(div_, 1, /)
BINARY(div_one, 0, /)

// BroadcastBiasKernel(bias, out, count, divmod by the columns, row step, column step, factor)
#define BIAS(name, type)                                                                                                                   \
  static void name(void **a) {                                                                                                             \
    const type *bias = ARG(type *, 0);                                                                                                     \
    type *out = ARG(type *, 1);                                                                                                            \
    int columns = ARG(int, 3), row_step = ARG(int, 4), column_step = ARG(int, 5);                                                          \
    for (long i = 0, n = ARG(long, 2); i < n; i++)                                                                                         \
      out[i] = ARG(type, 6) * bias[i / columns * row_step + i % columns * column_step];                                                    \
  }                                                                                                                                        \
  static void name##_touch(void *stream, void **a) {                                                                                       \
    stand_ins_touch(stream, ARG(void *, 0), sizeof(type), 0);                                                                              \
    stand_ins_touch(stream, ARG(void *, 1), ARG(long, 2) * sizeof(type), 1);                                                               \
  }
BIAS(bias, f32)
BIAS(bias_half, f16)

// softmax_warp_forward(out, in, rows, step between rows, columns)
static void softmax(void **a) {
  f32 *out = ARG(f32 *, 0);
  const f32 *in = ARG(f32 *, 1);
  int rows = ARG(int, 2), step = ARG(int, 3), columns = ARG(int, 4);
  for (int row = 0; row < rows; row++, in += step, out += step) {
    f32 most = -INFINITY, sum = 0;
    for (int i = 0; i < columns; i++) most = fmaxf(most, in[i]);
    for (int i = 0; i < columns; i++) sum += out[i] = expf(in[i] - most);
    for (int i = 0; i < columns; i++) out[i] /= sum;
  }
}
static void softmax_touch(void *stream, void **a) {
  size_t len = (size_t)ARG(int, 2) * ARG(int, 3) * sizeof(f32);
  stand_ins_touch(stream, ARG(void *, 1), len, 0);
  stand_ins_touch(stream, ARG(void *, 0), len, 1);
}

#define ELEMENTWISE(step, operation)                                                                                                       \
  "_ZN11onnxruntime4cuda24_BinaryElementWiseSimpleILb1ELb" step "EfffNS0_6OP_" operation "IfffEELi256ELi4EiEE"
static const struct {
  const char *begin;
  struct kernel kernel;
} known[] = {
    {"_ZN11onnxruntime4cuda17_UnaryElementWiseIffNS0_7OP_ReluIfEE", {relu, "8808", relu_touch}},
    {"_ZN11onnxruntime4cuda17_UnaryElementWiseI6__halfS2_NS0_7OP_ReluIS2_EE", {relu_half, "8808", relu_half_touch}},
    {"_ZN11onnxruntime4cuda17_UnaryElementWiseIf6__halfNS0_7OP_CastIfS2_EE", {narrow, "8808", narrow_touch}},
    {"_ZN11onnxruntime4cuda17_UnaryElementWiseI6__halffNS0_7OP_CastIS2_fEE", {widen, "8808", widen_touch}},
    {"_ZN11onnxruntime4cuda19BroadcastBiasKernelIfi", {bias, "8884444", bias_touch}},
    {"_ZN11onnxruntime4cuda19BroadcastBiasKernelI6__halfi", {bias_half, "8884442", bias_half_touch}},
    {"_ZN11onnxruntime4cuda20softmax_warp_forwardIfff", {softmax, "88444", softmax_touch}},
    {ELEMENTWISE("1", "Add"), {add, "88804", add_touch}},
    {ELEMENTWISE("0", "Add"), {add_one, "88804", add_one_touch}},
    {ELEMENTWISE("1", "Sub"), {sub, "88804", sub_touch}},
    {ELEMENTWISE("0", "Sub"), {sub_one, "88804", sub_one_touch}},
    {ELEMENTWISE("1", "Mul"), {mul, "88804", mul_touch}},
    {ELEMENTWISE("0", "Mul"), {mul_one, "88804", mul_one_touch}},
    {ELEMENTWISE("1", "Div"), {div_, "88804", div__touch}},
    {ELEMENTWISE("0", "Div"), {div_one, "88804", div_one_touch}},
};
const struct kernel *stand_ins_kernel(const char *name) {
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (!strncmp(name, known[i].begin, strlen(known[i].begin))) return &known[i].kernel;
  return NULL;
}

static f32 element(const void *at, long i, int half) { return half ? ((const f16 *)at)[i] : ((const f32 *)at)[i]; }
static void multiply(void *data) {
  struct product *p = data;
  for (int column = 0; column < p->n; column++)
    for (int row = 0; row < p->m; row++) {
      f32 sum = 0;
      for (int i = 0; i < p->k; i++) {
        long a = p->transposed_a ? i + (long)row * p->lda : row + (long)i * p->lda;
        long b = p->transposed_b ? column + (long)i * p->ldb : i + (long)column * p->ldb;
        sum += element(p->a, a, p->half) * element(p->b, b, p->half);
      }
      long c = row + (long)column * p->ldc;
      f32 value = p->alpha * sum + (p->beta ? p->beta * element(p->c, c, p->half) : 0);
      if (p->half)
        ((f16 *)p->c)[c] = value;
      else
        ((f32 *)p->c)[c] = value;
    }
  if (p->runs_once) free(p);
}
// Bytes that a product works in.
#define WORKSPACE 4096
int stand_ins_multiply(void *stream, struct product p) {
  size_t size = p.half ? sizeof(f16) : sizeof(f32);
  struct product *copy = malloc(sizeof *copy);
  *copy = p;
  copy->runs_once = stand_ins_runs_once(stream);
  // Where it is recorded cuBLAS takes its workspace in the graph, unless it was given one.
  void *workspace = NULL;
  if (!copy->runs_once) {
    int error = stand_ins_call("cublas workspace", "stream=%p", stream) ?: stand_ins_take(stream, &workspace, WORKSPACE);
    if (error) return free(copy), error;
    stand_ins_touch(stream, workspace, WORKSPACE, 1);
  }
  stand_ins_touch(stream, p.a, ((p.transposed_a ? p.m - 1 : p.k - 1) * (size_t)p.lda + (p.transposed_a ? p.k : p.m)) * size, 0);
  stand_ins_touch(stream, p.b, ((p.transposed_b ? p.k - 1 : p.n - 1) * (size_t)p.ldb + (p.transposed_b ? p.n : p.k)) * size, 0);
  stand_ins_touch(stream, p.c, ((p.n - 1) * (size_t)p.ldc + p.m) * size, 1);
  int error = stand_ins_enqueue(stream, multiply, copy);
  if (error) free(copy);
  return error ?: workspace ? stand_ins_give(stream, workspace) : 0;
}
