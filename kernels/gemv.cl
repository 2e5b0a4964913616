// Decode: one token times a matrix. A launch covers a whole step: every work-group repeats the preceding work (norm,
// merging of attention, quantisation), which costs less than a launch; the following work (bias, residual, SiLU) is the
// epilogue. Compiled once per step:
//
// STEP_QKV      norm + qkv                 in: norm weights         out: [QKV]
// STEP_MIX      norm + mix                 in: norm weights         out: [MIX]
// STEP_OUT      out, added to residual     in: chunks or att        out: unused, or output to be normed first
// STEP_MIX_OUT  out of a recurrent layer   in: its output           out: like STEP_OUT
// STEP_GATE_UP  norm + gate_up             in: norm weights         out: input of `down`; in_scales: bias
// STEP_DOWN     down, added to residual    in: output of gate_up    out: like STEP_OUT
// STEP_PROJECT  a projection               in: unused               out: [ROWS]
// STEP_HEAD     norm + head                in: norm weights         out: [VOCAB]
//
// The input of a projection is the residual itself, and without PRE_NORMS that of qkv, mix and gate_up.
//
// A tile is TILE_GROUPS groups of sixteen rows, and for gate_up as many of `up`.
//
// PRODUCTS  for a mixture of experts: gate_up and down of each of so many experts of each token; in the launch's second
//           dimension. Input of `down` and results: [token][PRODUCTS]; in_scales of gate_up, extra of down: biases
// CHOSEN    with an expert's part of the matrix, which `choices` names: [token][PRODUCTS] of expert and weight. A buffer
//           has the parts of whole experts

#if !defined(ROWS) || !defined(COLS) || !defined(W_TYPE) || !defined(TILE_GROUPS)
#error a shape of the matrix is not defined
#endif

#ifdef STEP_GATE_UP
#define GROUPS (FFN_MATRICES * TILE_GROUPS)
#else
#define GROUPS TILE_GROUPS
#endif
#define BLOCKS (COLS / 32)
#if defined(STEP_HEAD) || PRE_NORMS && (defined(STEP_QKV) || defined(STEP_MIX) || defined(STEP_GATE_UP))
#define INPUT_NORM
#elif defined(STEP_QKV) || defined(STEP_MIX) || defined(STEP_GATE_UP) || defined(STEP_PROJECT)
#define INPUT_RESIDUAL
#endif

// ---------------------------------------------------------------- input of the product

#ifdef INPUT_MERGE
// Merges the chunks of attention in this step; `merge` does it if there are more.
#ifndef FUSED_CHUNKS
#error FUSED_CHUNKS is not defined
#endif
void merge_chunks(const __global float *partials, const __global float *ml, int chunks, __local float2 *weights,
                  __local float *l, __local float *att) {
    int lid = get_local_id(0);
    for (int h = lid; h < HEADS; h += WG) {
        float m = LOWEST_SCORE, sum = 0.0f;
        for (int c = 0; c < chunks; c++) {
            const __global float *part = ml + (c * HEADS + h) * 2;
            float2 w = rescale_chunk(&m, part[0]);
            sum = fma(part[1], w.y, sum * w.x);
            weights[c * HEADS + h] = w;
        }
        l[h] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < COLS; i += WG) {
        float o = 0.0f;
        for (int c = 0; c < chunks; c++) {
            float2 w = weights[c * HEADS + i / HEAD_DIM];
            o = fma(partials[c * COLS + i], w.y, o * w.x);
        }
        att[i] = divide(o, l[i / HEAD_DIM]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(att, HEADS, true);
#endif
}
#endif

#ifndef STEP_DOWN
// Loads the input in f32 to local memory: [COLS]
void load_input(const __global float *from, const __global float *w, __local float *red, __local float *x) {
    int lid = get_local_id(0);
#ifdef STEP_OUT
    for (int i = lid; i < COLS; i += WG) x[i] = from[ATT_COLUMN(i)] * ATTENTION_OUT_SCALE;
#else
    for (int i = lid; i < COLS; i += WG) x[i] = from[i];
#endif
    barrier(CLK_LOCAL_MEM_FENCE);
#ifdef INPUT_NORM
    float scale = SCALE_OF_NORM(x, COLS, red);
    for (int i = lid; i < COLS; i += WG) x[i] = NORMED(x[i], scale, w, i, COLS);
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
}

#if !W_DENSE
// Quantises the input: `acts` [block][8 words], `scales` [block]. `most` has one element per octet.
void quantise_input(const __local float *x, __local float *most, __local uint *acts, __local float *scales) {
    int lid = get_local_id(0);
    for (int o = lid; o < COLS / 8; o += WG) most[o] = max_abs8(vload8(o, x));
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int o = lid; o < COLS / 8; o += WG) {
        float4 of_block = vload4(o / 4, most);
        float2 scale = activation_scale(fmax(fmax(of_block.x, of_block.y), fmax(of_block.z, of_block.w)));
        vstore2(quantise8(vload8(o, x), scale.y), o, acts);
        if (o % 4 == 0) scales[o / 4] = scale.x;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}
#endif
#endif

// ---------------------------------------------------------------- product

// Down reads its input from global memory, as stored by gate_up; the others prepare it in local memory.
#ifdef STEP_DOWN
#define ACT_SPACE __global
#else
#define ACT_SPACE __local
#endif

#if !W_DENSE && defined(BY_ROWS)
#if WG != 16 || ROWS_PER_ITEM != 1
#error an item has a row of each group
#endif
// Like the version below, but a work-item computes a whole row of each group, so that nothing is exchanged and a word
// of activations is used for GROUPS rows: for devices with few but vectorised work-items.
void product(QUANTS_OF(uint) quants, const __global uchar *scales, const ACT_SPACE uint *acts,
             const ACT_SPACE float *act_scales, const int *source, const __local int2 *act_sums, __local float *sums) {
    int lid = get_local_id(0);
    float acc[GROUPS];
    UNROLL
    for (int g = 0; g < GROUPS; g++) acc[g] = 0.0f;
    for (int b = 0; b < BLOCKS; b++) {
        uint of_lane = ACTS_OF_LANE(acts + b * 8);
        // Sums of the halves are separate if they have scales of their own.
        Sums sum[1 + W_HALF_SCALES][GROUPS];
        UNROLL
        for (int g = 0; g < GROUPS; g++) sum[0][g] = sum[W_HALF_SCALES][g] = 0;
        UNROLL
        for (int v = 0; v < 4; v++) {
            uint act_low = ACT(of_lane, acts + b * 8, v), act_high = ACT(of_lane, acts + b * 8, 4 + v);
            UNROLL
            for (int g = 0; g < GROUPS; g++) {
#ifdef W_IMAGE
                int w = (source[g] * BLOCKS + b) * (16 * W_BITS) + lid;
#else
                const __global uint *w = quants + (size_t)source[g] * (BLOCKS * 16 * W_BITS) + (b * (16 * W_BITS) + lid);
#endif
                Words low = LOW_BYTES(w, v), high = HIGH_BYTES(w, v);
                sum[0][g] = dot4_rows(low, act_low, sum[0][g]);
                sum[W_HALF_SCALES][g] = dot4_rows(high, act_high, sum[W_HALF_SCALES][g]);
            }
        }
        int2 of_acts = act_sums[b];
        float d_a = act_scales[b];
        UNROLL
        for (int g = 0; g < GROUPS; g++) {
            const __global uchar *of_group = scales + (size_t)source[g] * W_GROUP_BYTES;
            float of_block = sum_of_block(sum[0][g], sum[W_HALF_SCALES][g], of_acts, of_group, b, lid);
            acc[g] = fma(of_block, load_block_scale(of_group, b, lid) * d_a, acc[g]);
#if W_MINIMUMS
            Minimums minimums = load_minimum(of_group, b, lid);
            acc[g] = ADD_MINIMUMS(acc[g], minimums, of_acts.x, of_acts.y, d_a);
#endif
        }
    }
    UNROLL
    for (int g = 0; g < GROUPS; g++) sums[g * 16 + lid] = acc[g];
    barrier(CLK_LOCAL_MEM_FENCE);
}
#define PART_FLOATS 4
#elif !W_DENSE
#if !defined(SLICES) || !defined(PASS) || WG != GROUPS * 4 * SLICES || WG < GROUPS * 16
#error SLICES or PASS do not fit
#endif
// Sums of GROUPS groups of rows, listed in `source`, into `sums` [GROUPS * 16].
//
// A work-item has four rows of a block: four adjacent ones read 64 bytes of each of its vectors. Block sums are exact
// integers; PASS blocks at a time stay in `parts`, and then one work-item per row adds them in ascending order, which
// gives the CPU's result. That costs 64 dependent steps for 2048 columns, a few percent of the launch.
void product(const __global uint4 *quants, const __global uchar *scales, const ACT_SPACE uint *acts,
             const ACT_SPACE float *act_scales, const int *source, __local float4 *parts, __local float *sums) {
    int lid = get_local_id(0);
    int quad = lid % 4, slice = lid / 4 % SLICES, grp = lid / (4 * SLICES);
    const __global uint4 *w = quants + (size_t)source[grp] * (BLOCKS * 4 * W_BITS) + quad;
    const __global uchar *of_group = scales + (size_t)source[grp] * W_GROUP_BYTES;
    // [grp][block][quad]: sums, scales, minimums, and what those of halves add up to; then per block the sum of its
    // activations.
    __local float4 *part_scales = parts + GROUPS * PASS * 4;
#if W_MINIMUMS
    __local float4 *part_minimums = parts + GROUPS * PASS * 8;
#if W_HALF_SCALES
    __local float4 *part_halves = parts + GROUPS * PASS * 12;
#else
    __local float *part_acts = (__local float *)(parts + GROUPS * PASS * 12);
#endif
#endif
    float acc = 0.0f;
    for (int first = 0; first < BLOCKS; first += PASS) {
        int end = min(first + PASS, BLOCKS);
        // Same number of iterations for every work-item: if some have one more, as with 18 blocks in 16 slices, PoCL
        // 3.1 and 5.0 give wrong results.
        for (int from = first; from < end; from += SLICES) {
            int b = from + slice;
            if (b >= end) continue;
            const __global uint4 *block = w + b * (4 * W_BITS);
            // Sums of the halves are separate if they have scales of their own.
            int4 sum[1 + W_HALF_SCALES];
            sum[0] = sum[W_HALF_SCALES] = 0;
            int2 of_acts = 0;
            for (int v = 0; v < 4; v++) {
                uint low = acts[b * 8 + v], high = acts[b * 8 + 4 + v];
                of_acts.x = dot4(0x01010101u, low, of_acts.x);
                of_acts.y = dot4(0x01010101u, high, of_acts.y);
                sum[0] = dot4_rows(LOW_BYTES(block, v), low, sum[0]);
                sum[W_HALF_SCALES] = dot4_rows(HIGH_BYTES(block, v), high, sum[W_HALF_SCALES]);
            }
            int at = (grp * PASS + b - first) * 4 + quad;
#if W_HALF_SCALES
            float4 low = convert_float4(sum[0] - W_ZERO * of_acts.x), high = convert_float4(sum[1] - W_ZERO * of_acts.y);
            parts[at] = ADD_HALVES(low, high, load_half_scale(of_group, b, quad, 0), load_half_scale(of_group, b, quad, 1));
#else
            parts[at] = convert_float4(sum[0] - W_ZERO * (of_acts.x + of_acts.y));
#endif
            part_scales[at] = load_block_scale(of_group, b, quad) * act_scales[b];
#if W_MINIMUMS
            Minimums minimums = load_minimum(of_group, b, quad);
#if W_HALF_SCALES
            part_halves[at] = minimums.low * (float)of_acts.x + minimums.high * (float)of_acts.y;
            part_minimums[at] = minimums.d * act_scales[b];
#else
            part_minimums[at] = minimums.d;
            if (grp == 0 && quad == 0) part_acts[b - first] = act_scales[b] * (float)(of_acts.x + of_acts.y);
#endif
#endif
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < GROUPS * 16) {
            int from = lid / 16 * (PASS * 16) + lid % 16;
            const __local float *sum = (const __local float *)parts + from;
            const __local float *scale = (const __local float *)part_scales + from;
#if W_MINIMUMS
            const __local float *minimums = (const __local float *)part_minimums + from;
#if W_HALF_SCALES
            const __local float *halves = (const __local float *)part_halves + from;
#define OF_MINIMUM(b) halves[(b) * 16]
#else
#define OF_MINIMUM(b) part_acts[b]
#endif
#endif
            for (int b = 0; b < end - first; b++) {
                acc = fma(sum[b * 16], scale[b * 16], acc);
#if W_MINIMUMS
                acc = fma(minimums[b * 16], OF_MINIMUM(b), acc);
#endif
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lid < GROUPS * 16) sums[lid] = acc;
    barrier(CLK_LOCAL_MEM_FENCE);
}
#if W_MINIMUMS
#define PART_FLOATS (GROUPS * PASS * (48 + 16 * W_HALF_SCALES) + PASS)
#else
#define PART_FLOATS (GROUPS * PASS * 32)
#endif
#else
#if WG % 16 != 0
#error sixteen items share a row
#endif
#if W_TYPE == W_F32
#define W_SIZE 4
#define LOAD(p, i) (((const __global float *)(p))[i])
#elif W_TYPE == W_F16
#define W_SIZE 2
#define LOAD(p, i) vload_half(i, (const __global half *)(p))
#else
#define W_SIZE 2
#define LOAD(p, i) as_float((uint)((const __global ushort *)(p))[i] << 16)
#endif
// Like the versions above for rows as stored: sixteen work-items share a row, each with the columns of its lane.
void product(const __global uint4 *rows, const __global uchar *scales, const ACT_SPACE float *acts,
             const ACT_SPACE float *act_scales, const int *source, __local float4 *parts, __local float *sums) {
    int lid = get_local_id(0);
    __local float *lanes = (__local float *)parts;
    for (int first = 0; first < GROUPS * 16; first += WG / 16) {
        int row = first + lid / 16;
        float acc = 0.0f;
        if (row < GROUPS * 16) {
            const __global uchar *w =
                (const __global uchar *)rows + ((size_t)source[row / 16] * 16 + row % 16) * ((size_t)COLS * W_SIZE);
            for (int c = lid % 16; c < COLS; c += 16) acc = fma(LOAD(w, c), acts[c], acc);
        }
        lanes[lid] = acc;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < WG / 16 && first + lid < GROUPS * 16) sums[first + lid] = sum_lanes(lanes + 16 * lid);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
#define PART_FLOATS WG
#endif

// ---------------------------------------------------------------- step

// Input and parts of the product share memory: one is no longer needed when the other starts.
#if defined(STEP_DOWN) || (!W_DENSE && PART_FLOATS > COLS)
#define POOL_FLOATS PART_FLOATS
#elif !W_DENSE
#define POOL_FLOATS COLS
#else
#define POOL_FLOATS (COLS + PART_FLOATS)
#endif

#if W_DENSE
#define MATRIX const __global uint4 *
#elif ROWS_PER_ITEM == 4
#define MATRIX QUANTS_OF(uint4)
#else
#define MATRIX QUANTS_OF(uint)
#endif

// Product of the launch, its token, and first row of its result in `out`.
#ifdef PRODUCTS
#define PRODUCT ((size_t)get_group_id(1))
#define TOKEN (get_group_id(1) / PRODUCTS)
#else
#define PRODUCT 0
#define TOKEN 0
#endif
#define TILES_OF(groups) (((groups) + TILE_GROUPS - 1) / TILE_GROUPS)

// chunk: first output group in this buffer, number of groups in it; if chunks of attention are merged, also their
// number of slots.
#ifdef INPUT_MERGE
#define GEMV_CHUNK int4
#else
#define GEMV_CHUNK int2
#endif
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemv(
    MATRIX quants, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, __global float *extra,
#ifdef CHOSEN
    const __global int2 *choices,
#endif
    GEMV_CHUNK chunk) {
    __local float4 pool[(POOL_FLOATS + 3) / 4];
    __local float sums[GROUPS * 16];
    __local float *x = (__local float *)pool;
#ifdef STEP_HEAD
    __global float *residual = ROW(state, ((const __global int *)state)[H_ROW]);
#else
    __global float *residual = ROW(state, TOKEN);
#endif
#ifdef STEP_DOWN
#if !W_DENSE
    const __global uint *acts = (const __global uint *)in + PRODUCT * (COLS / 4);
#else
    const __global float *acts = in + PRODUCT * COLS;
#endif
    const __global float *act_scales = in_scales + PRODUCT * BLOCKS;
    __local float4 *parts = pool;
#else
#ifdef INPUT_MERGE
    __local float2 weights[FUSED_CHUNKS * HEADS];
    __local float l[HEADS];
    merge_chunks(in, in_scales, (chunk.z + CHUNK - 1) / CHUNK - SKIPPED_CHUNKS(chunk.z) + SINKS, weights, l, x);
#elif defined(INPUT_NORM) || defined(INPUT_RESIDUAL)
    load_input(residual, in, sums, x);
#else
    load_input(in, in, sums, x);
#endif
#if !W_DENSE
    __local float act_scales[BLOCKS];
    __local uint acts[BLOCKS * 8];
    __local float most[BLOCKS * 4];
    quantise_input(x, most, acts, act_scales);
    __local float4 *parts = pool;
#else
    __local float *acts = x, *act_scales = x;
    __local float4 *parts = pool + (COLS + 3) / 4;
#endif
#endif
    int lid = get_local_id(0);
#ifdef BY_ROWS
    __local int2 act_sums[BLOCKS];
    for (int b = lid; b < BLOCKS; b += WG) {
        act_sums[b] = (int2)(sum_of_sixteen(vload4(2 * b, acts)), sum_of_sixteen(vload4(2 * b + 1, acts)));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#else
    __local float4 *act_sums = parts;
#endif
#ifdef CHOSEN
    // Groups of the expert in this buffer, of which another may have them, and its row 0 among those of all experts.
    int first_group = choices[PRODUCT].x * (ROWS / 16), of_expert = first_group * 16;
    int groups = first_group >= chunk.x && first_group < chunk.x + chunk.y ? ROWS / 16 : 0, first_row = 0;
    first_group -= chunk.x;
#else
    const int first_group = 0, of_expert = 0;
    int groups = chunk.y, first_row = chunk.x * 16;
#endif
    for (int tile = get_group_id(0); tile < TILES_OF(groups); tile += get_num_groups(0)) {
        // The groups of `up` follow those of `gate`.
        int source[GROUPS];
        for (int g = 0; g < GROUPS; g++) {
            source[g] = first_group + min(tile * TILE_GROUPS + g % TILE_GROUPS, groups - 1) + g / TILE_GROUPS * chunk.y;
        }
        product(quants, scales, acts, act_scales, source, act_sums, sums);
        for (int i = lid; i < TILE_GROUPS * 16; i += WG) {
            int local_row = tile * (TILE_GROUPS * 16) + i, row = first_row + local_row;
            bool mine = local_row < groups * 16 && row < ROWS;
#if defined(STEP_GATE_UP)
            // Without a gate, the only matrix is `up`.
            float y = mine ? activate(sums[i], sums[(GROUPS - TILE_GROUPS) * 16 + i], in_scales, of_expert + row) : 0.0f;
#ifdef DOWN_QUANTISED
            sums[i] = y;
#else
            if (mine) out[PRODUCT * ROWS + row] = y;
#endif
#else
            if (mine) {
                float y = sums[i];
#if defined(STEP_QKV)
#if QKV_BIAS
                y += extra[row];
#endif
                out[QKV_COLUMN(row)] = y;
#elif defined(STEP_MIX) || defined(STEP_PROJECT)
                out[row] = y;
#elif defined(STEP_DOWN) && defined(PRODUCTS)
#if defined(CHOSEN) && EXPERT_BIAS
                y += extra[of_expert + row];
#endif
                out[PRODUCT * ROWS + row] = y;
#elif defined(STEP_OUT) || defined(STEP_MIX_OUT) || defined(STEP_DOWN)
#if (defined(STEP_OUT) && O_BIAS) || (defined(STEP_DOWN) && MLP_BIAS)
                y += extra[row];
#endif
#if POST_NORMS
                out[row] = y;
#else
                residual[row] += SCALED_RESIDUAL(y);
#endif
#else
                out[row] = SCALED_LOGIT(y);
#endif
            }
#endif
        }
#ifdef DOWN_QUANTISED
        // The tile is one block of 32, quantised as `down` reads it.
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < 4) {
            float most = 0.0f;
            for (int i = 0; i < 4; i++) most = fmax(most, max_abs8(vload8(i, sums)));
            float2 scale = activation_scale(most);
            size_t b = PRODUCT * (ROWS / 32) + first_row / 32 + tile;
            vstore2(quantise8(vload8(lid, sums), scale.y), b * 4 + lid, (__global uint *)out);
            if (lid == 0) extra[b] = scale.x;
        }
#endif
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}
