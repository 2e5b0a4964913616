// Prefill: many tokens times a matrix. Compiled once per step:
//
// STEP_QKV      out: [token][QKV]
// STEP_OUT      on the residual
// STEP_GATE_UP  out: [token][gate: FFN_PAD | up: FFN_PAD]
// STEP_DOWN     on the residual
// STEP_HEAD     out: [token][VOCAB]

#if !defined(ROWS) || !defined(COLS) || !defined(W_TYPE)
#error a shape of the matrix is not defined
#endif
#if WG != 256
#error the tile is shared by 256 items
#endif

#define BLOCKS (COLS / 32)

#ifdef STEP_GATE_UP
#define HALVES 2
#else
#define HALVES 1
#endif

#if W_TYPE == W_Q4
// A work-group of 16 x 16 items computes a tile of 64 rows and 64 tokens, four by four an item, from blocks of 32
// columns in local memory. An item adds its blocks up in ascending order, as the CPU does.
#define TILE 64

// chunk: first group of the output that this buffer holds, groups that it holds, tokens.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *quants, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, const __global float *extra, int4 chunk) {
    __local uint4 w[TILE / 16 * 16]; // [group][vector][quad of rows], as stored
    __local float w_scales[TILE];
    __local uint4 a[TILE * 2]; // [token][two halves of a block]
    __local float a_scales[TILE];
    int lid = get_local_id(0);
    // Sixteen neighbours share the tokens and have different rows.
    int quad = lid % 16, tokens = lid / 16 * 4;
    int first_row = get_group_id(0) * TILE, first_token = get_group_id(1) * TILE;
    int groups = chunk.y * HALVES;
    float4 acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // What this item brings into local memory: a word of quants, a quarter of a token's block, a scale.
    int w_group = min(first_row / 16 + lid / 64, groups - 1);
    int a_token = min(first_token + lid / 4, chunk.z - 1);
    int s_group = min(first_row / 16 + lid % 64 / 16, groups - 1);
    int s_token = min(first_token + lid % 64, chunk.z - 1);
    const __global uint *w_from = quants + (size_t)w_group * (BLOCKS * 64) + lid % 64;
    const __global uint2 *a_from = (const __global uint2 *)in + (size_t)a_token * (COLS / 8) + lid % 4;
    const __global half *ws_from = (const __global half *)scales + (size_t)s_group * (BLOCKS * 16) + lid % 16;
    const __global float *as_from = in_scales + (size_t)s_token * BLOCKS;
    for (int b = 0; b < BLOCKS; b++) {
        ((__local uint *)w)[lid] = w_from[b * 64];
        ((__local uint2 *)a)[lid] = a_from[b * 4];
        if (lid < TILE) w_scales[lid] = vload_half(b * 16, ws_from);
        else if (lid < 2 * TILE) a_scales[lid - TILE] = as_from[b];
        barrier(CLK_LOCAL_MEM_FENCE);
        int4 sum[4];
        for (int t = 0; t < 4; t++) sum[t] = 0;
        for (int v = 0; v < 4; v++) {
            uint4 q = w[quad / 4 * 16 + v * 4 + quad % 4];
            uint4 ql = q & 0x0f0f0f0fu, qh = (q >> 4) & 0x0f0f0f0fu;
            for (int t = 0; t < 4; t++) {
                const __local uint *words = (const __local uint *)(a + (tokens + t) * 2);
                uint low = words[v], high = words[4 + v];
                int offset = -dot4(0x08080808u, low, dot4(0x08080808u, high, 0));
                sum[t].x += dot4(ql.x, low, dot4(qh.x, high, offset));
                sum[t].y += dot4(ql.y, low, dot4(qh.y, high, offset));
                sum[t].z += dot4(ql.z, low, dot4(qh.z, high, offset));
                sum[t].w += dot4(ql.w, low, dot4(qh.w, high, offset));
            }
        }
        float4 d = vload4(quad, w_scales);
        for (int t = 0; t < 4; t++) acc[t] = fma(convert_float4(sum[t]), d * a_scales[tokens + t], acc[t]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int t = 0; t < 4; t++) {
        int token = first_token + tokens + t, row = first_row + quad * 4;
        if (token < chunk.z) {
            put(state, out, extra, chunk.xy, row, token, acc[t].x);
            put(state, out, extra, chunk.xy, row + 1, token, acc[t].y);
            put(state, out, extra, chunk.xy, row + 2, token, acc[t].z);
            put(state, out, extra, chunk.xy, row + 3, token, acc[t].w);
        }
    }
}
#else
#if W_TYPE == W_F32
#define LOAD(p, i) (((const __global float *)(p))[i])
#elif W_TYPE == W_F16
#define LOAD(p, i) vload_half(i, (const __global half *)(p))
#else
#define LOAD(p, i) as_float((uint)((const __global ushort *)(p))[i] << 16)
#endif
// Rows as stored: a work-group computes sixteen rows for TOKENS tokens; sixteen items share a row, each the columns of
// its lane, so that sums have the CPU's order.
#define TOKENS 8

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *rows, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, const __global float *extra, int4 chunk) {
    __local float lanes[TOKENS * WG];
    int lid = get_local_id(0);
    int first_row = get_group_id(0) * 16, first_token = get_group_id(1) * TOKENS;
    size_t from = (size_t)(first_row + lid / 16) * COLS;
    float acc[TOKENS];
    for (int t = 0; t < TOKENS; t++) acc[t] = 0.0f;
    for (int c = lid % 16; c < COLS; c += 16) {
        float w = LOAD(rows, from + c);
        for (int t = 0; t < TOKENS; t++) {
            acc[t] = fma(w, in[(size_t)min(first_token + t, chunk.z - 1) * COLS + c], acc[t]);
        }
    }
    for (int t = 0; t < TOKENS; t++) lanes[t * WG + lid] = acc[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < TOKENS * 16; i += WG) {
        int token = first_token + i / 16;
        float y = sum_lanes(lanes + 16 * i);
        if (token < chunk.z) put(state, out, extra, chunk.xy, first_row + i % 16, token, y);
    }
}
#endif
