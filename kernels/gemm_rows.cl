// Prefill by whole rows: the results of gemm.cl without local memory. A work-item has ROWS_PER_ITEM rows and TOKENS
// tokens in registers, reads weights as stored, and adds its blocks in ascending order, like the CPU. A work-group
// processes TURNS times as many tokens, so that its rows are read from memory only once if there is a cache.
//
// in_sums: [token][BLOCKS], sums of the halves of a block

#if !defined(ROWS) || !defined(COLS) || !defined(TOKENS) || !defined(TURNS)
#error a shape of the matrix is not defined
#endif

// Words per block of a group.
#define WORDS (16 * W_BITS)

#ifdef BY_FLOATS
#define INPUT const __global float
#else
#define INPUT const __global uint
#endif
#if ROWS_PER_ITEM == 4
#define MATRIX QUANTS_OF(uint4)
#else
#define MATRIX QUANTS_OF(uint)
#endif

// The work-items of a line read adjacent words, which vectorising compilers can see.
__kernel __attribute__((reqd_work_group_size(16, WG / 16, 1))) void gemm(
    MATRIX quants, const __global uchar *scales, __global float *state, INPUT *in,
    const __global float *in_scales, __global float *out, const __global float *extra, const __global int2 *in_sums,
    Part part) {
    int line = get_local_id(1), at = get_local_id(0) % (16 / ROWS_PER_ITEM);
    int first_group = (ROW_TILE(part) * (WG / 16) + line) * ROWS_PER_ITEM;
#if ROWS_PER_ITEM > 1
    first_group += get_local_id(0) / (16 / ROWS_PER_ITEM);
#endif
    int group = min(first_group, part.y * MATRICES - 1), first_row = first_group * 16 + at * ROWS_PER_ITEM;
    const __global uchar *of_group = scales + (size_t)group * W_GROUP_BYTES;
#ifdef W_IMAGE
    int of_words = group * (BLOCKS * WORDS / ROWS_PER_ITEM) + at;
#else
    const __global Words *of_words = (const __global Words *)quants + (size_t)group * (BLOCKS * WORDS / ROWS_PER_ITEM);
#endif
    for (int turn = 0; turn < TURNS; turn++) {
        int first_token = (TOKEN_TILE(part) * TURNS + turn) * TOKENS;
        if (first_token >= part.z) return;
        Floats acc[TOKENS];
        int from[TOKENS]; // the blocks of the tokens
        UNROLL
        for (int t = 0; t < TOKENS; t++) {
            acc[t] = 0.0f;
            from[t] = min(first_token + t, part.z - 1) * BLOCKS;
        }
        for (int b = 0; b < BLOCKS; b++) {
#ifdef W_IMAGE
            int w = of_words + b * (WORDS / ROWS_PER_ITEM);
#else
            const __global Words *w = of_words + (b * (WORDS / ROWS_PER_ITEM) + at);
#endif
            Sums sum[1 + W_HALF_SCALES][TOKENS];
            UNROLL
            for (int t = 0; t < TOKENS; t++) sum[0][t] = sum[W_HALF_SCALES][t] = 0;
#ifdef SUBGROUPS
            uint of_lane[TOKENS];
            UNROLL
            for (int t = 0; t < TOKENS; t++) of_lane[t] = ACTS_OF_LANE(in + (from[t] + b) * 8);
#endif
            UNROLL
            for (int v = 0; v < 4; v++) {
                Words low = LOW_BYTES(w, v), high = HIGH_BYTES(w, v);
#ifdef BY_FLOATS
                UNROLL
                for (int k = 0; k < 4; k++) {
                    Floats weight_low = WEIGHT(low, k), weight_high = WEIGHT(high, k);
                    UNROLL
                    for (int t = 0; t < TOKENS; t++) {
                        const __global float *acts = in + ((from[t] + b) * 32 + 4 * v + k);
                        sum[0][t] = fma(weight_low, acts[0], sum[0][t]);
                        sum[W_HALF_SCALES][t] = fma(weight_high, acts[16], sum[W_HALF_SCALES][t]);
                    }
                }
#else
                UNROLL
                for (int t = 0; t < TOKENS; t++) {
                    const __global uint *acts = in + (from[t] + b) * 8;
                    sum[0][t] = dot4_rows(low, ACT(of_lane[t], acts, v), sum[0][t]);
                    sum[W_HALF_SCALES][t] = dot4_rows(high, ACT(of_lane[t], acts, 4 + v), sum[W_HALF_SCALES][t]);
                }
#endif
            }
            Floats block_scale = load_block_scale(of_group, b, at);
#if W_MINIMUMS
            Minimums minimums = load_minimum(of_group, b, at);
#endif
            UNROLL
            for (int t = 0; t < TOKENS; t++) {
                int2 of_acts = in_sums[from[t] + b];
                float d_a = in_scales[from[t] + b];
                Floats of_block = sum_of_block(sum[0][t], sum[W_HALF_SCALES][t], of_acts, of_group, b, at);
                acc[t] = fma(of_block, block_scale * d_a, acc[t]);
#if W_MINIMUMS
                acc[t] = ADD_MINIMUMS(acc[t], minimums, of_acts.x, of_acts.y, d_a);
#endif
            }
        }
        for (int t = 0; t < TOKENS; t++) {
            int token = first_token + t;
            if (token < part.z) {
#if ROWS_PER_ITEM == 4
                store_output(state, out, extra, part.xy, first_row, token, acc[t].x);
                store_output(state, out, extra, part.xy, first_row + 1, token, acc[t].y);
                store_output(state, out, extra, part.xy, first_row + 2, token, acc[t].z);
                store_output(state, out, extra, part.xy, first_row + 3, token, acc[t].w);
#else
                store_output(state, out, extra, part.xy, first_row, token, acc[t]);
#endif
            }
        }
    }
}
