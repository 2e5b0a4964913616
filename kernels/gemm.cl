// Prefill: many tokens times a matrix. Compiled once per step:
//
// STEP_QKV      out: [token][QKV]
// STEP_OUT      added to the residual, or out: [token][DIM] if it is normed first
// STEP_GATE_UP  out: [token][gate: FFN_PAD | up: FFN_PAD], without a gate only up
// STEP_DOWN     like STEP_OUT
// STEP_HEAD     out: [token][VOCAB]
//
// CHOSEN  for a mixture of experts: see gemm_epilogue.cl

#if !defined(ROWS) || !defined(COLS) || !defined(W_TYPE)
#error a shape of the matrix is not defined
#endif
#if WG != 256
#error the tile is shared by 256 items
#endif

#if !W_DENSE
// A work-group of 16 x 16 work-items computes a tile of 64 rows and 64 tokens, four by four per work-item, from blocks
// of 32 columns in local memory. A work-item adds its blocks in ascending order, like the CPU.
#define TILE 64
#define GROUPS (TILE / 16)
// Words per block of a group.
#define WORDS (16 * W_BITS)

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *quants, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, const __global float *extra, SORTED_CHOICES Part part) {
    SELECT_PART(TILE)
    __local uint4 w[GROUPS * WORDS / 4]; // [group][vector][quad of rows], as stored
    __local float4 w_block_scales[TILE / 4];
#if W_MINIMUMS
    __local Minimums w_minimums[TILE / 4];
#endif
#if W_HALF_SCALES
    __local float4 w_halves[2 * TILE / 4]; // [half][quad of rows]
#endif
    __local uint4 a[TILE * 2]; // [token][two halves of a block]
    __local float a_scales[TILE];
    __local int2 a_sums[TILE]; // sums of the halves
    int lid = get_local_id(0);
    // Sixteen adjacent work-items share the tokens and have different rows.
    int quad = lid % 16, tokens = lid / 16 * 4;
    int first_row = ROW_TILE(part) * TILE;
    float4 acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Data that this work-item copies to local memory: words of quants, a quarter of a token's block; and, depending on
    // the quarter of the work-group, the scales of four rows, a token's scale, or its sums.
    int w_group = SOURCE_GROUP(min(first_row / 16 + lid / 64, groups - 1), part);
    int a_token = INPUT_AT(min(first_token + lid / 4, end - 1));
    int s_group = SOURCE_GROUP(min(first_row / 16 + lid % 16 / 4, groups - 1), part);
    int s_token = INPUT_AT(min(first_token + lid % 64, end - 1));
    const __global uint *w_from = quants + (size_t)w_group * (BLOCKS * WORDS);
    const __global uint2 *a_from = (const __global uint2 *)in + (size_t)a_token * (COLS / 8) + lid % 4;
    const __global uchar *ws_from = scales + (size_t)s_group * W_GROUP_BYTES;
    const __global float *as_from = in_scales + (size_t)s_token * BLOCKS;
    const __global uint4 *a_sum_from = (const __global uint4 *)in + (size_t)s_token * (COLS / 16);
    for (int b = 0; b < (has_work ? BLOCKS : 0); b++) {
        // Same number of iterations for every work-item; see gemv.cl.
        for (int i = 0; i < WORDS; i += 64) {
            int at = i + lid % 64;
            if (at < WORDS) ((__local uint *)w)[lid / 64 * WORDS + at] = w_from[b * WORDS + at];
        }
        ((__local uint2 *)a)[lid] = a_from[b * 4];
        if (lid < TILE / 4) {
            w_block_scales[lid] = load_block_scale(ws_from, b, lid % 4);
#if W_MINIMUMS
            w_minimums[lid] = load_minimum(ws_from, b, lid % 4);
#endif
#if W_HALF_SCALES
            w_halves[lid] = load_half_scale(ws_from, b, lid % 4, 0);
            w_halves[TILE / 4 + lid] = load_half_scale(ws_from, b, lid % 4, 1);
#endif
        } else if (lid >= TILE && lid < 2 * TILE) {
            a_scales[lid - TILE] = as_from[b];
        } else if (lid >= 2 * TILE && lid < 3 * TILE) {
            a_sums[lid - 2 * TILE] = (int2)(sum_of_sixteen(a_sum_from[b * 2]), sum_of_sixteen(a_sum_from[b * 2 + 1]));
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // Sums of the halves are separate if they have scales of their own.
        int4 sum[1 + W_HALF_SCALES][4];
        for (int t = 0; t < 4; t++) sum[0][t] = sum[W_HALF_SCALES][t] = 0;
        const __local uint4 *block = w + quad / 4 * (WORDS / 4) + quad % 4;
        // Of the last tokens, many work-items have none.
        for (int v = 0; first_token + tokens < end && v < 4; v++) {
            uint4 low = LOW_BYTES(block, v), high = HIGH_BYTES(block, v);
            for (int t = 0; t < 4; t++) {
                const __local uint *words = (const __local uint *)(a + (tokens + t) * 2);
                sum[0][t] = dot4_rows(low, words[v], sum[0][t]);
                sum[W_HALF_SCALES][t] = dot4_rows(high, words[4 + v], sum[W_HALF_SCALES][t]);
            }
        }
        for (int t = 0; t < 4; t++) {
            int2 of_acts = a_sums[tokens + t];
            float d_a = a_scales[tokens + t];
#if W_HALF_SCALES
            float4 low = convert_float4(sum[0][t] - W_ZERO * of_acts.x);
            float4 high = convert_float4(sum[1][t] - W_ZERO * of_acts.y);
            float4 of_block = ADD_HALVES(low, high, w_halves[quad], w_halves[TILE / 4 + quad]);
#else
            float4 of_block = convert_float4(sum[0][t] - W_ZERO * (of_acts.x + of_acts.y));
#endif
            acc[t] = fma(of_block, w_block_scales[quad] * d_a, acc[t]);
#if W_MINIMUMS
            acc[t] = ADD_MINIMUMS(acc[t], w_minimums[quad], of_acts.x, of_acts.y, d_a);
#endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int t = 0; t < 4; t++) {
        int token = first_token + tokens + t, row = first_row + quad * 4;
        if (token < end) {
            int to = CHOICE_AT(token);
            store_output(state, out, extra, CHUNK_OF(part), row, to, acc[t].x);
            store_output(state, out, extra, CHUNK_OF(part), row + 1, to, acc[t].y);
            store_output(state, out, extra, CHUNK_OF(part), row + 2, to, acc[t].z);
            store_output(state, out, extra, CHUNK_OF(part), row + 3, to, acc[t].w);
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
// Rows as stored: a work-group computes sixteen rows for TOKENS tokens. Sixteen work-items share a row, each with the
// columns of its lane, so that sums have the CPU's order.
#define TOKENS 8

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *rows, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, const __global float *extra, SORTED_CHOICES Part part) {
    SELECT_PART(TOKENS)
    __local float lanes[TOKENS * WG];
    int lid = get_local_id(0);
    int first_row = ROW_TILE(part) * 16;
    size_t from = (size_t)(SOURCE_GROUP(min((int)ROW_TILE(part), groups - 1), part) * 16 + lid / 16) * COLS;
    float acc[TOKENS];
    size_t inputs[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        acc[t] = 0.0f;
        inputs[t] = (size_t)INPUT_AT(min(first_token + t, end - 1)) * COLS;
    }
    for (int c = lid % 16; c < (has_work ? COLS : 0); c += 16) {
        float w = LOAD(rows, from + c);
        for (int t = 0; t < TOKENS; t++) {
            acc[t] = fma(w, in[inputs[t] + c], acc[t]);
        }
    }
    for (int t = 0; t < TOKENS; t++) lanes[t * WG + lid] = acc[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < TOKENS * 16; i += WG) {
        int token = first_token + i / 16;
        float y = sum_lanes(lanes + 16 * i);
        if (token < end) store_output(state, out, extra, CHUNK_OF(part), first_row + i % 16, CHOICE_AT(token), y);
    }
}
#endif
