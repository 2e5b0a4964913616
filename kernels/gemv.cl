// Decode: one token times a matrix. One launch is a whole step: what precedes the product (norm, merge of
// attention, quantisation) is computed again by every work-group, which costs less than a launch; what follows it
// (bias, residual, SiLU) is the epilogue. Compiled once per step:
//
// STEP_QKV      norm + qkv               in: norm weights        out: [QKV]
// STEP_OUT      out, on the residual     in: partials or att     out: -
// STEP_GATE_UP  norm + gate_up           in: norm weights        out: acts of `down` and their scales
// STEP_DOWN     down, on the residual    in: acts of `down`      out: -
// STEP_HEAD     norm + head              in: norm weights        out: [VOCAB]
//
// A tile is TILE_GROUPS groups of sixteen rows (and for gate_up as many of `up`); WG = NG * 16 * SLICES items share
// it, the columns split over SLICES, summed in a fixed order.

#if !defined(ROWS) || !defined(COLS) || !defined(W_TYPE) || !defined(SLICES) || !defined(TILE_GROUPS)
#error a shape of the matrix is not defined
#endif

#ifdef STEP_GATE_UP
#define NG (2 * TILE_GROUPS)
#else
#define NG TILE_GROUPS
#endif
#if WG != NG * 16 * SLICES
#error WG is not NG * 16 * SLICES
#endif

#define BLOCKS (COLS / 32)
// Octets of columns that one item prepares.
#define OCTETS ((COLS / 8 + WG - 1) / WG)
#if W_TYPE == W_Q4
#define QUANTISED 1
#else
#define QUANTISED 0
#endif
#if defined(STEP_QKV) || defined(STEP_GATE_UP) || defined(STEP_HEAD)
#define INPUT_NORM
#endif

// ---------------------------------------------------------------- what the matrix is multiplied with

#ifdef INPUT_MERGE
#ifndef SPLITS
#error SPLITS is not defined
#endif
// Weights that turn the parts of attention into the whole: e^(m - max) / sum. [HEADS][SPLITS]
void merge_weights(const __global float *ml, __local float *weights) {
    for (int h = get_local_id(0); h < HEADS; h += WG) {
        const __global float *part = ml + h * SPLITS * 2;
        float m = LEAST;
        for (int s = 0; s < SPLITS; s++) m = fmax(m, part[2 * s]);
        float l = 0.0f;
        for (int s = 0; s < SPLITS; s++) {
            float e = part[2 * s + 1] > 0.0f ? exp(part[2 * s] - m) : 0.0f;
            weights[h * SPLITS + s] = e;
            l += e * part[2 * s + 1];
        }
        float scale = l > 0.0f ? 1.0f / l : 0.0f;
        for (int s = 0; s < SPLITS; s++) weights[h * SPLITS + s] *= scale;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

float merged(const __global float *partials, const __local float *weights, int i) {
    int h = i / HEAD_DIM, d = i % HEAD_DIM;
    float sum = 0.0f;
    for (int s = 0; s < SPLITS; s++) {
        // Parts of no slots are not written.
        float w = weights[h * SPLITS + s];
        if (w > 0.0f) sum += w * partials[(h * SPLITS + s) * HEAD_DIM + d];
    }
    return sum;
}
#endif

#if QUANTISED && !defined(STEP_DOWN)
// Columns 8o.. of the input, before the norm's scale.
float8 octet(const __global float *x, const __global float *in, const __local float *weights, int o) {
#ifdef INPUT_MERGE
    float8 v;
    float *e = (float *)&v;
    for (int i = 0; i < 8; i++) e[i] = merged(in, weights, 8 * o + i);
    return v;
#elif defined(INPUT_NORM)
    return vload8(o, x);
#else
    return vload8(o, in);
#endif
}

// Fills `acts` [block][8 words] and `scales` [block] with the quantised input.
void prepare(const __global float *x, const __global float *in, const __local float *weights, __local float *red,
             __local float *most, __local uint *acts, __local float *scales) {
    int lid = get_local_id(0);
    float8 v[OCTETS];
    float squares = 0.0f;
    for (int k = 0; k < OCTETS; k++) {
        int o = lid + k * WG;
        v[k] = o < COLS / 8 ? octet(x, in, weights, o) : (float8)(0.0f);
#ifdef INPUT_NORM
        float8 s = v[k] * v[k];
        float4 s4 = s.lo + s.hi;
        squares += (s4.x + s4.y) + (s4.z + s4.w);
#endif
    }
#ifdef INPUT_NORM
    float inverse = 1.0f / sqrt(sum_all(squares, red) / COLS + RMS_EPS);
#endif
    for (int k = 0; k < OCTETS; k++) {
        int o = lid + k * WG;
        if (o < COLS / 8) {
#ifdef INPUT_NORM
            v[k] = v[k] * inverse * vload8(o, in);
#endif
            most[o] = most8(v[k]);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int k = 0; k < OCTETS; k++) {
        int o = lid + k * WG;
        if (o < COLS / 8) {
            const __local float *of_block = most + o / 4 * 4;
            float m = fmax(fmax(of_block[0], of_block[1]), fmax(of_block[2], of_block[3]));
            uint2 q = quantise8(v[k], m > 0.0f ? 127.0f / m : 0.0f);
            acts[2 * o] = q.x;
            acts[2 * o + 1] = q.y;
            if (o % 4 == 0) scales[o / 4] = m / 127.0f;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}
#endif

#if !QUANTISED && !defined(STEP_DOWN)
// Fills `acts` [COLS] with the input in f32.
void prepare(const __global float *x, const __global float *in, const __local float *weights, __local float *red,
             __local float *acts) {
    int lid = get_local_id(0);
#ifdef INPUT_NORM
    float squares = 0.0f;
    for (int i = lid; i < COLS; i += WG) squares += x[i] * x[i];
    float inverse = 1.0f / sqrt(sum_all(squares, red) / COLS + RMS_EPS);
    for (int i = lid; i < COLS; i += WG) acts[i] = x[i] * inverse * in[i];
#elif defined(INPUT_MERGE)
    for (int i = lid; i < COLS; i += WG) acts[i] = merged(in, weights, i);
#else
    for (int i = lid; i < COLS; i += WG) acts[i] = in[i];
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
}
#endif

// ---------------------------------------------------------------- the product

// Down reads its input from global memory, where gate_up left it; the others prepare it in local memory.
#ifdef STEP_DOWN
#define ACT_SPACE __global
#else
#define ACT_SPACE __local
#endif

#if QUANTISED
// An item takes four rows and one vector (eight columns) of every SLICES-th block: sixteen neighbours read a whole
// block of 256 bytes. Sums of a vector are exact integers.
#define RED_TYPE float4
float4 product(const __global uint4 *quants, const __global uchar *scales, const ACT_SPACE uint *acts,
               const ACT_SPACE float *act_scales, int group, int item) {
    int quad = item % 4, vector = item / 4 % 4;
    const __global uint4 *w = quants + (size_t)group * (BLOCKS * 16) + vector * 4 + quad;
    const __global half *d = (const __global half *)scales + (size_t)group * (BLOCKS * 16) + quad * 4;
    float4 acc = 0.0f;
    for (int b = item / 16; b < BLOCKS; b += SLICES) {
        uint4 q = w[b * 16];
        uint low = acts[b * 8 + vector], high = acts[b * 8 + 4 + vector];
        // The stored nibble is the weight + 8.
        int offset = -dot4(0x08080808u, low, dot4(0x08080808u, high, 0));
        uint4 ql = q & 0x0f0f0f0fu, qh = (q >> 4) & 0x0f0f0f0fu;
        int4 sum = (int4)(dot4(ql.x, low, dot4(qh.x, high, offset)), dot4(ql.y, low, dot4(qh.y, high, offset)),
                          dot4(ql.z, low, dot4(qh.z, high, offset)), dot4(ql.w, low, dot4(qh.w, high, offset)));
        acc += convert_float4(sum) * (vload_half4(b * 4, d) * act_scales[b]);
    }
    return acc;
}
#define PER_ROW(red, grp, row) (((const __local float *)((red) + (grp) * 16 * SLICES))[row])
#else
// An item takes a SLICES-th of one row, four columns at a time.
#define RED_TYPE float
#if W_TYPE == W_F32
#define W_SIZE 4
#define LOAD4(p, i) vload4(i, (const __global float *)(p))
#define LOAD1(p, i) (((const __global float *)(p))[i])
#elif W_TYPE == W_F16
#define W_SIZE 2
#define LOAD4(p, i) vload_half4(i, (const __global half *)(p))
#define LOAD1(p, i) vload_half(i, (const __global half *)(p))
#else
#define W_SIZE 2
#define LOAD4(p, i) as_float4(convert_uint4(vload4(i, (const __global ushort *)(p))) << 16)
#define LOAD1(p, i) as_float((uint)((const __global ushort *)(p))[i] << 16)
#endif
float product(const __global uint4 *quants, const __global uchar *scales, const ACT_SPACE float *acts,
              const ACT_SPACE float *act_scales, int group, int item) {
    int row = item / SLICES, slice = item % SLICES;
    const __global uchar *w = (const __global uchar *)quants + ((size_t)group * 16 + row) * ((size_t)COLS * W_SIZE);
    float4 acc = 0.0f;
    for (int c = slice; c < COLS / 4; c += SLICES) acc = mad(LOAD4(w, c), vload4(c, acts), acc);
    float sum = (acc.x + acc.y) + (acc.z + acc.w);
    for (int c = COLS / 4 * 4 + slice; c < COLS; c += SLICES) sum = mad(LOAD1(w, c), acts[c], sum);
    return sum;
}
#define PER_ROW(red, grp, row) ((red)[((grp) * 16 + (row)) * SLICES])
#endif

// Sums what the items of a row hold into its first.
void reduce(__local RED_TYPE *red, RED_TYPE acc) {
    int lid = get_local_id(0);
    red[lid] = acc;
    barrier(CLK_LOCAL_MEM_FENCE);
#if QUANTISED
    int item = lid % (16 * SLICES);
    for (int stride = 8 * SLICES; stride >= 4; stride /= 2) {
#else
    int item = lid % SLICES;
    for (int stride = SLICES / 2; stride >= 1; stride /= 2) {
#endif
        if (item < stride) red[lid] += red[lid + stride];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// ---------------------------------------------------------------- the step

// chunk: first group of the output that this buffer holds, groups that it holds.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemv(
    const __global uint4 *quants, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, __global float *extra, int2 chunk) {
    __local RED_TYPE red[WG];
#ifdef STEP_HEAD
    __global float *x = ROW(state, ((const __global int *)state)[H_ROW]);
#else
    __global float *x = ROW(state, 0);
#endif
#ifdef INPUT_MERGE
    __local float weights[HEADS * SPLITS];
    merge_weights(in_scales, weights);
#else
    __local float *weights = 0;
#endif
#ifdef STEP_DOWN
#if QUANTISED
    const __global uint *acts = (const __global uint *)in;
#else
    const __global float *acts = in;
#endif
    const __global float *act_scales = in_scales;
#elif QUANTISED
    __local float act_scales[BLOCKS];
    __local uint acts[BLOCKS * 8];
    __local float most[BLOCKS * 4];
    prepare(x, in, weights, (__local float *)red, most, acts, act_scales);
#else
    __local float acts[COLS];
    __local float *act_scales = acts;
    prepare(x, in, weights, (__local float *)red, acts);
#endif
    int lid = get_local_id(0);
    int grp = lid / (16 * SLICES), item = lid % (16 * SLICES);
    int tiles = (chunk.y + TILE_GROUPS - 1) / TILE_GROUPS;
    for (int tile = get_group_id(0); tile < tiles; tile += get_num_groups(0)) {
        int group = min(tile * TILE_GROUPS + grp % TILE_GROUPS, chunk.y - 1);
        // The groups of `up` follow those of `gate`.
        int source = group + grp / TILE_GROUPS * chunk.y;
        reduce(red, product(quants, scales, acts, act_scales, source, item));
        int local_row = tile * (TILE_GROUPS * 16) + lid, row = chunk.x * 16 + local_row;
        bool mine = lid < TILE_GROUPS * 16 && local_row < chunk.y * 16 && row < ROWS;
#if defined(STEP_GATE_UP)
        float y = 0.0f;
        if (mine) {
            float gate = PER_ROW(red, lid / 16, lid % 16), up = PER_ROW(red, TILE_GROUPS + lid / 16, lid % 16);
            y = gate / (1.0f + exp(-gate)) * up;
        }
#ifdef DOWN_Q4
        // The tile is one block of 32, quantised as `down` reads it.
        barrier(CLK_LOCAL_MEM_FENCE);
        __local float *block = (__local float *)red;
        if (lid < 32) block[lid] = y;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < 4) {
            float m = 0.0f;
            for (int i = 0; i < 4; i++) m = fmax(m, most8(vload8(i, block)));
            uint2 q = quantise8(vload8(lid, block), m > 0.0f ? 127.0f / m : 0.0f);
            int b = chunk.x / 2 + tile;
            vstore2(q, b * 4 + lid, (__global uint *)out);
            if (lid == 0) extra[b] = m / 127.0f;
        }
#else
        if (mine) out[row] = y;
#endif
#else
        if (mine) {
            float y = PER_ROW(red, lid / 16, lid % 16);
#if defined(STEP_QKV)
#if QKV_BIAS
            y += extra[row];
#endif
            out[row] = y;
#elif defined(STEP_OUT)
#if O_BIAS
            y += extra[row];
#endif
            x[row] += y;
#elif defined(STEP_DOWN)
            x[row] += y;
#else
            out[row] = y;
#endif
        }
#endif
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
