// Placed before every kernel: the model's dimensions under their Rust names, number formats, and functions shared by
// several steps. OpenCL C 1.2 unless a variant requires more; no half arithmetic.

#if !defined(LAYERS) || !defined(DIM) || !defined(HEADS) || !defined(KV_HEADS) || !defined(HEAD_DIM) || \
    !defined(FFN_DIM) || !defined(VOCAB) || !defined(Q_DIM) || !defined(KV_DIM) || !defined(GROUP) || \
    !defined(Q_PAD) || !defined(KV_PAD) || !defined(QKV) || !defined(NORM_EPS) || !defined(WG) || !defined(ROPE_DIM) || \
    !defined(ANGLES) || !defined(NORM_BIAS) || !defined(POST_NORMS) || !defined(GATED) || !defined(MLP_BIAS)
#error a dimension of the model or the work-group size WG is not defined
#endif

// Storage of a matrix: blocks in the layout of src/numeric/quant/format.rs, or row-major as in the checkpoint.
#define W_BLOCKS_OF_32 0
#define W_F32 1
#define W_F16 2
#define W_BF16 3
#define W_DENSE (W_TYPE != W_BLOCKS_OF_32)

// State of a forward pass: a header of integers, then one row per token.
// [HEADER] int, [token][x: DIM | cos: ANGLES | sin: ANGLES | embeddings of each layer: PER_LAYER_ROW] float
#define HEADER 16
#define H_SLOT 0 // cache slot of the only token of a pass
#define H_ROW 1 // token whose residual the head reads, if it reads only one
// Only for nvidia/decode.cl:
#define H_CAPACITY 2 // slots of the cache
#define H_CHUNKS 3 // chunks per head for which there is room
#define H_STEPS 4 // steps whose results were exchanged so far
#define H_K_STRIDE 5 // from one layer's keys to the next, in 64 bytes
#define H_V_STRIDE 6 // from one layer's values to the next, in 64 bytes
#ifndef PER_LAYER_ROW
#define PER_LAYER_ROW 0
#endif
#define X_ROW (DIM + 2 * ANGLES + PER_LAYER_ROW)
#define ROW(state, t) ((state) + HEADER + (size_t)(t) * X_ROW)

// Work of a gemm launch: first output group in its buffer, number of groups in it, tokens, and the first tile of tokens
// (upper half) and of rows (lower half). For few tokens, work-groups with the same rows are adjacent.
typedef int4 Part;
#ifdef FEW
#define ROW_TILE(part) (((part).w & 0xffff) + (int)get_group_id(1))
#define TOKEN_TILE(part) (((part).w >> 16) + (int)get_group_id(0))
#else
#define ROW_TILE(part) (((part).w & 0xffff) + (int)get_group_id(0))
#define TOKEN_TILE(part) (((part).w >> 16) + (int)get_group_id(1))
#endif

// A pass has tokens of several sequences. Kernels that work on one sequence get its run of tokens: first token in the
// pass, number of tokens, cache slot of the first one, slots of the cache. In a sliding-window layer (WINDOW) slots are
// positions, and the rows of a head are a ring: position p is in row p % CAPACITY, and the rows of a chunk of positions
// are adjacent.
typedef int4 Run;
#define FIRST_TOKEN(run) (run).x
#define TOKENS_OF(run) (run).y
#define FIRST_SLOT(run) (run).z
#define CAPACITY(run) (run).w
#ifdef SEVERAL
// Several runs of one token each, the first attention chunk of each run, and the end of all chunks.
typedef struct {
    Run of[SEVERAL];
    int first_chunk[SEVERAL + 4];
} Runs;
#endif
#if defined(WINDOW) && WINDOW
#define ROW_OF_SLOT(slot, run) ((slot) % CAPACITY(run))
// Number of leading chunks that a token with `slots` visible slots, its own included, cannot see.
#define SKIPPED_CHUNKS(slots) (max((slots) - WINDOW, 0) / CHUNK)
#else
#define ROW_OF_SLOT(slot, run) (slot)
#define SKIPPED_CHUNKS(slots) 0
#endif
// Slots that are summed together; the sums of chunks are merged in ascending order, as on the CPU.
#define CHUNK 128
// Each head has a sink: a logit whose share of the softmax is dropped. It is one more chunk, the last.
#ifndef SINKS
#define SINKS 0
#endif

// Below any score, so that masked values stay finite.
#define LOWEST_SCORE -1e30f

// Bit-exact with the CPU: every step rounds like src/numeric/simd. Products and sums are fused only by `fma`, and sums
// of floats have the CPU's order: element i goes to lane i % 16, and lanes are added by the tree in `sum16`.
#pragma OPENCL FP_CONTRACT OFF
#define UNROLL _Pragma("unroll")

float sum16(float16 lanes) {
    float8 a = lanes.lo + lanes.hi;
    float4 b = a.lo + a.hi;
    float2 c = b.lo + b.hi;
    return c.x + c.y;
}

// sum16 of sixteen floats in local memory, without a float16, whose elements oclgrind 21.10 reports as uninitialised.
float sum_lanes(const __local float *r) {
    float even = ((r[0] + r[8]) + (r[4] + r[12])) + ((r[2] + r[10]) + (r[6] + r[14]));
    float odd = ((r[1] + r[9]) + (r[5] + r[13])) + ((r[3] + r[11]) + (r[7] + r[15]));
    return even + odd;
}

// Correctly rounded division and square root: with the compiler option if the device has it, otherwise with one
// correction step.
float divide(float a, float b) {
#ifdef CORRECT_DIVIDE
    return a / b;
#else
    float q = a / b;
    float rest = fma(-q, b, a);
    return isfinite(q) ? q + rest / b : q;
#endif
}

float sqrt_rn(float x) {
#ifdef CORRECT_DIVIDE
    return sqrt(x);
#else
    float s = sqrt(x);
    return s > 0.0f ? s + fma(-s, s, x) / (2.0f * s) : s;
#endif
}

// e^x, computed as in src/numeric/simd/ops.rs.
float exp_approx(float x) {
    float clamped = fmin(fmax(x, -87.3f), 88.0f);
    float n = rint(clamped * 1.44269504f);
    float r = fma(n, -355.0f / 512.0f, clamped);
    r = fma(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fma(p, r, 1.0f / 720.0f);
    p = fma(p, r, 1.0f / 120.0f);
    p = fma(p, r, 1.0f / 24.0f);
    p = fma(p, r, 1.0f / 6.0f);
    p = fma(p, r, 0.5f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    p = p * as_float(((int)n + 127) << 23);
    return x >= -87.3f ? p : 0.0f;
}

float sigmoid(float x) { return divide(1.0f, 1.0f + exp_approx(-x)); }

float silu(float x) { return divide(x, 1.0f + exp_approx(-x)); }

// GELU by the tanh formula, computed as in src/numeric/simd/ops.rs.
float gelu(float x) {
    float slope = fma(x * x, -0.071354814f, -1.5957692f);
    return divide(x, 1.0f + exp_approx(x * slope));
}

float squared_relu(float x) { return x > 0.0f ? x * x : 0.0f; }

// Activation function of the feed-forward layer. Without a gate it is applied to `up`.
#if GELU
#define ACTIVATION(x) gelu(x)
#elif SQUARED_RELU
#define ACTIVATION(x) squared_relu(x)
#else
#define ACTIVATION(x) silu(x)
#endif
// Factors of its argument and of the result.
#ifndef MLP_GATE_SCALE
#define MLP_GATE_SCALE 1.0f
#endif
#ifndef MLP_OUT_SCALE
#define MLP_OUT_SCALE 1.0f
#endif
// Number of matrices side by side at the start of the feed-forward layer.
#define FFN_MATRICES (1 + GATED)

// Activation of a row of gate, times the same row of `up`; without a gate that of `up`, which comes first.
float gated_up(float gate, float up) {
    float y = ACTIVATION(gate * MLP_GATE_SCALE);
#if GATED
    y *= up;
#endif
    return y * MLP_OUT_SCALE;
}

#ifdef STEP_GATE_UP
// Result of a row of gate and of the same row of `up`, counted among those of all experts.
float activate(float gate, float up, const __global float *bias, int row) {
#if defined(CHOSEN) && EXPERT_BIAS
    gate += bias[row];
    up += bias[EXPERTS * ROWS + row];
    gate = gate > EXPERT_LIMIT ? EXPERT_LIMIT : gate;
    up = up > EXPERT_LIMIT ? EXPERT_LIMIT : up;
    return gate * sigmoid(1.702f * gate) * ((up < -EXPERT_LIMIT ? -EXPERT_LIMIT : up) + 1.0f);
#else
#if MLP_BIAS
    gate += bias[row];
#endif
    return gated_up(gate, up);
#endif
}
#endif

// Norm of queries and keys (QK_NORM): of each head before or after RoPE; of all heads together, in qk_norm.cl.
#define NORM_HEADS 1
#define NORM_AFTER_ROPE 2
// Factor of queries that grow with their position, from the first angle of a layer on: the last of the cosines.
#define QUERY_FACTOR(angles) ((angles)[ANGLES - 1 - ANGLES_AT])

// Factor of attention's output.
#ifndef ATTENTION_OUT_SCALE
#define ATTENTION_OUT_SCALE 1.0f
#endif

// Output that is added to the residual: scaled, and stored elsewhere if it is to be normed first.
#ifdef RESIDUAL_SCALE
#define SCALED_RESIDUAL(y) ((y) * RESIDUAL_SCALE)
#else
#define SCALED_RESIDUAL(y) (y)
#endif
#if defined(LOGIT_SCALE)
#define SCALED_LOGIT(y) ((y) * LOGIT_SCALE)
#elif defined(LOGIT_SOFTCAP)
// cap * tanh(y / cap), computed as in src/numeric/simd/ops.rs.
#define SCALED_LOGIT(y) \
    (LOGIT_SOFTCAP + divide(-2.0f * LOGIT_SOFTCAP, 1.0f + exp_approx((y) * (2.0f / LOGIT_SOFTCAP))))
#else
#define SCALED_LOGIT(y) (y)
#endif

// Width of a layer's heads: in the cache, and as queries and outputs of attention, zeros follow narrower ones.
#ifndef HEAD_WIDTH
#define HEAD_WIDTH HEAD_DIM
#define QKV_COLUMN(row) (row)
#define ATT_COLUMN(i) (i)
#else
#define ATT_COLUMN(i) ((i) / HEAD_WIDTH * HEAD_DIM + (i) % HEAD_WIDTH)
#define QKV_COLUMN(row)                                                                   \
    ((row) < LOCAL_Q_PAD                  ? ATT_COLUMN(row)                               \
     : (row) < LOCAL_Q_PAD + LOCAL_KV_PAD ? Q_PAD + ATT_COLUMN((row)-LOCAL_Q_PAD)          \
                                          : Q_PAD + KV_PAD + ATT_COLUMN((row)-LOCAL_Q_PAD - LOCAL_KV_PAD))
#endif

// Converts a stored half to a float, with any alignment.
float from_half(uint bits) {
    ushort h = (ushort)bits;
    return vload_half(0, (const __private half *)&h);
}

// Adds four products: unsigned bytes of `u`, signed bytes of `s`.
#ifdef DOT_ARM
#pragma OPENCL EXTENSION cl_arm_integer_dot_product_int8 : enable
#endif
#ifdef DOT_QCOM
#pragma OPENCL EXTENSION cl_qcom_dot_product8 : enable
#endif
int dot4(uint u, uint s, int acc) {
#ifdef DOT_PTX
    // NVIDIA: one instruction, since compute capability 6.1.
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(acc) : "r"(u), "r"(s));
    return acc;
#elif defined(DOT_KHR)
    return dot_acc_sat_4x8packed_us_int(u, s, acc);
#elif defined(DOT_ARM)
    // Signed bytes only: with this option those of `u` are below 128.
    return acc + arm_dot(as_char4(u), as_char4(s));
#elif defined(DOT_QCOM)
    return qcom_dot8_acc(s, u, acc);
#else
    uchar4 a = as_uchar4(u);
    char4 b = as_char4(s);
    return acc + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
#endif
}

// Sum of eight activations.
int sum_of_eight(uint2 acts) { return dot4(0x01010101u, acts.x, dot4(0x01010101u, acts.y, 0)); }

// Sum of sixteen activations.
int sum_of_sixteen(uint4 acts) { return sum_of_eight(acts.lo) + sum_of_eight(acts.hi); }

// Scale of an RMS norm: 1 / square root of the mean square of `n` floats. `red` has 16 elements.
float norm_scale_eps(const __local float *x, int n, __local float *red, float eps) {
    int lid = get_local_id(0);
    if (lid < 16) {
        float squares = 0.0f;
        for (int i = lid; i < n; i += 16) squares = fma(x[i], x[i], squares);
        red[lid] = squares;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = sum_lanes(red);
    barrier(CLK_LOCAL_MEM_FENCE);
    return divide(1.0f, sqrt_rn(divide(sum, (float)n) + eps));
}

float norm_scale(const __local float *x, int n, __local float *red) { return norm_scale_eps(x, n, red, NORM_EPS); }

// LayerNorm: subtracts the mean from the `n` floats of `x` and returns the scale. `red` has 16 elements.
float layer_norm_scale(__local float *x, int n, __local float *red) {
    int lid = get_local_id(0);
    if (lid < 16) {
        float sum = 0.0f;
        for (int i = lid; i < n; i += 16) sum += x[i];
        red[lid] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float mean = divide(sum_lanes(red), (float)n);
    for (int i = lid; i < n; i += WG) x[i] -= mean;
    barrier(CLK_LOCAL_MEM_FENCE);
    return norm_scale(x, n, red);
}

// Norm of `n` floats in local memory: SCALE_OF_NORM returns the scale, then NORMED gives element i.
#if NORM_BIAS
#define SCALE_OF_NORM(x, n, red) layer_norm_scale(x, n, red)
#define NORMED(x, scale, w, i, n) fma((x) * (scale), (w)[i], (w)[(n) + (i)])
#else
#define SCALE_OF_NORM(x, n, red) norm_scale(x, n, red)
#define NORMED(x, scale, w, i, n) ((x) * (scale) * (w)[i])
#endif

// Scale of a block of activations and its inverse, from the largest magnitude.
float2 activation_scale(float most) {
    return most > 0.0f ? (float2)(divide(most, 127.0f), divide(127.0f, most)) : (float2)(0.0f, 0.0f);
}

// Eight quantised activations as two words of signed bytes; `id` is the inverse scale of their block.
uint2 quantise8(float8 x, float id) {
    char8 q = convert_char8(rint(x * id));
    return (uint2)(as_uint(q.lo), as_uint(q.hi));
}

float max_abs8(float8 x) {
    float4 m = fmax(fabs(x.lo), fabs(x.hi));
    return fmax(fmax(m.x, m.y), fmax(m.z, m.w));
}
