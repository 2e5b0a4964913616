// rope and attend for a run of one token. One work-group per KV head and chunk of the context: all query heads of the
// group over the chunk's slots. The work-group of the last chunk first stores the new row. The chunks are merged by the
// output projection, or by `merge` if there are many.
//
// partials: [chunk][HEADS][HEAD_DIM], sums of e^(score - m) * v; ml: [chunk][HEADS][m, l]; only chunks that the token
// can see, and that of the sink
//
// SEVERAL  for up to so many runs, with the rows of each; their chunks follow each other
// TEAM     as a function for one chunk, run by a team of the work-group: see nvidia/subgroup_barrier.cl

// Work-items that share the elements of a value row, and the queries per work-item.
#define LANES (HEAD_DIM <= 16 ? 16 : HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 128 ? 128 : 256)
#define TEAMS_OF_LANES (WG / LANES)
#define QUERIES_PER_ITEM ((GROUP + TEAMS_OF_LANES - 1) / TEAMS_OF_LANES)
// Queries whose lanes are in registers at once; large work-groups have fewer registers.
#ifdef TEAM
#define QUERIES_AT_ONCE (GROUP < 2 ? GROUP : 2)
#else
#define QUERIES_AT_ONCE (GROUP < 4 ? GROUP : 4)
#endif
// Rows of values that a work-item loads at once.
#define VALUES_AHEAD 16

#ifdef SEVERAL
#if SEVERAL != 16
#error there are rows of sixteen runs
#endif
// Kernel arguments for all runs, and statements for all but the first.
#define FOR_ALL_RUNS(of) \
    of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15)
#define FOR_OTHER_RUNS(of) \
    of(1) of(2) of(3) of(4) of(5) of(6) of(7) of(8) of(9) of(10) of(11) of(12) of(13) of(14) of(15)
#define CACHE_OF_RUN(i) __global uchar *k_##i, __global uchar *v_##i
#define ALL_CACHES FOR_ALL_RUNS(CACHE_OF_RUN)
#define SELECT_IF_RUN(i) \
    if (of == i) k_cache = k_##i, v_cache = v_##i;
#define SELECT_CACHE FOR_OTHER_RUNS(SELECT_IF_RUN)
#endif

#ifdef TEAM
// Floats of local memory per team.
#define TEAM_FLOATS                                                                                      \
    ((GROUP + 2) * HEAD_DIM + GROUP * CHUNK + (GROUP + 2) * 16 + GROUP + GROUP % 2 + 4 * ROW_BLOCKS * CANDIDATES + \
     IS_IN_BLOCKS(V_TYPE) * CHUNK * ROW_BLOCKS)
void attend_one(
    const __global float *state, const __global float *qkv, const __global float *qk_norm,
    const __global float *calibration, __global uchar *k_cache, __global uchar *v_cache, __global float *partials,
    __global float *ml, Run run, int kv_head, int chunk, __local float *local_floats) {
#elif defined(SEVERAL)
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend_one(
    const __global float *state, const __global float *qkv, const __global float *qk_norm,
    const __global float *calibration, __global float *partials, __global float *ml, ALL_CACHES, Runs runs) {
#else
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend_one(
    const __global float *state, const __global float *qkv, const __global float *qk_norm,
    const __global float *calibration, __global uchar *k_cache, __global uchar *v_cache, __global float *partials,
    __global float *ml, Run run) {
#endif
#ifdef TEAM
    __local float2 *scales = (__local float2 *)local_floats;
    __local float *x = local_floats + 4 * ROW_BLOCKS * CANDIDATES, *p = x + (GROUP + 2) * HEAD_DIM;
    __local float *red = p + GROUP * CHUNK, *m = red + (GROUP + 2) * 16, *value_scales = m + GROUP + GROUP % 2;
    const int lid = get_local_id(0);
#else
    __local float x[(GROUP + 2) * HEAD_DIM]; // the group's queries, then the new key and value
    __local float p[GROUP * CHUNK];          // scores, then e^(score - m)
    __local float red[(GROUP + 2) * 16];
    __local float m[GROUP];
    __local float2 scales[2 * ROW_BLOCKS * CANDIDATES];
#if IS_IN_BLOCKS(V_TYPE)
    __local float value_scales[CHUNK * ROW_BLOCKS];
#endif
    int lid = get_local_id(0), kv_head = get_group_id(0) % KV_HEADS, chunk = get_group_id(0) / KV_HEADS;
#endif
#if defined(SEVERAL) && !defined(TEAM)
    int of = 0;
    while (of + 1 < SEVERAL && chunk >= runs.first_chunk[of + 1]) of++;
    Run run = runs.of[of];
    __global uchar *k_cache = k_0, *v_cache = v_0;
    SELECT_CACHE
    partials += (size_t)runs.first_chunk[of] * (HEADS * HEAD_DIM);
    ml += (size_t)runs.first_chunk[of] * (HEADS * 2);
    chunk -= runs.first_chunk[of];
#endif
    int slots = FIRST_SLOT(run) + 1, capacity = CAPACITY(run);
    int first = (SKIPPED_CHUNKS(slots) + chunk) * CHUNK, count = min(CHUNK, slots - first);
    bool last = first + count == slots;
#if SINKS
    // Its chunk has no slots.
    bool is_sink = first >= slots;
    const __global float *of_layer = calibration;
    last = last && !is_sink;
#endif
#if WINDOW
    // Slots of the chunk before the first visible one; a chunk without visible slots contributes nothing.
    int hidden = max(slots - WINDOW - first, 0), shown = hidden < count ? count : 0;
#else
    int shown = count;
#endif
    const __global float *angles = ROW(state, FIRST_TOKEN(run)) + DIM + ANGLES_AT;
    qkv += (size_t)FIRST_TOKEN(run) * QKV;
    __local float *k = x + GROUP * HEAD_DIM, *v = k + HEAD_DIM;
    load_heads(qkv + kv_head * (GROUP * HEAD_DIM), x, GROUP);
    calibration += kv_head * CALIBRATION;
    prepare_queries(x, qk_norm, calibration, angles, GROUP, red);
#ifndef SHARES_KV
    // Every chunk prepares the new row, so that all work-items meet the same barriers; only the last chunk stores it.
    load_heads(qkv + KEY_AT(kv_head), k, 1);
    load_heads(qkv + VALUE_AT(kv_head), v, 1);
    prepare_key(k, qk_norm + HEAD_DIM, calibration, angles, red);
    prepare_value(v, red);
#endif
    __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
#ifndef SHARES_KV
    scale_rows(k, scales, last);
    store_row(K_TYPE, k, keys + (size_t)ROW_OF_SLOT(slots - 1, run) * K_ROW, scales, last);
    store_row(V_TYPE, v, values + (size_t)ROW_OF_SLOT(slots - 1, run) * V_ROW, scales + ROW_BLOCKS * CANDIDATES, last);
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#endif

    const __global uchar *rows = values + (size_t)ROW_OF_SLOT(first, run) * V_ROW;
#if IS_IN_BLOCKS(V_TYPE)
    // Computed once for all readers of a row.
    for (int i = lid; i < count * ROW_BLOCKS; i += WG)
        value_scales[i] = scale_of_block(V_TYPE, rows + i / ROW_BLOCKS * V_ROW, i % ROW_BLOCKS);
#define VALUE(t, d) (unscaled(V_TYPE, rows + (t) * V_ROW, d) * value_scales[(t) * ROW_BLOCKS + (d) / KV_BLOCK])
#else
#define VALUE(t, d) unscaled(V_TYPE, rows + (t) * V_ROW, d)
#endif
    // Scores: one slot per work-item.
    for (int t = lid; t < count; t += WG) {
        const __global uchar *row = keys + (size_t)(ROW_OF_SLOT(first, run) + t) * K_ROW;
        for (int from = 0; from < GROUP; from += QUERIES_AT_ONCE) {
            float16 acc[QUERIES_AT_ONCE];
            for (int g = 0; g < QUERIES_AT_ONCE; g++) acc[g] = 0.0f;
            for (int i = 0; i < RUNS; i++) {
                float16 e = row16(K_TYPE, row, i);
                for (int g = 0; g < QUERIES_AT_ONCE; g++) {
                    int query = min(from + g, GROUP - 1);
                    acc[g] = fma(e, head16(x + query * HEAD_DIM, i), acc[g]);
                }
            }
            for (int g = 0; g < QUERIES_AT_ONCE; g++) {
#if WINDOW
                if (from + g < GROUP) p[(from + g) * CHUNK + t] = t < hidden ? LOWEST_SCORE : sum16(acc[g]);
#else
                if (from + g < GROUP) p[(from + g) * CHUNK + t] = sum16(acc[g]);
#endif
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    // Largest score of each query: sixteen work-items each.
    for (int i = lid; i < GROUP * 16; i += WG) {
        float most = LOWEST_SCORE;
        for (int t = i % 16; t < shown; t += 16) most = fmax(most, p[i / 16 * CHUNK + t]);
        red[i] = most;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int g = lid; g < GROUP; g += WG) {
        float most = LOWEST_SCORE;
        for (int i = 0; i < 16; i++) most = fmax(most, red[g * 16 + i]);
#if SINKS
        if (is_sink) most = sink_score(of_layer, x + g * HEAD_DIM, 1, kv_head * GROUP + g);
#endif
        m[g] = most;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < GROUP * 16; i += WG) {
        float most = m[i / 16], sum = 0.0f;
        for (int t = i % 16; t < shown; t += 16) {
            float e = exp_approx(p[i / 16 * CHUNK + t] - most);
            p[i / 16 * CHUNK + t] = e;
            sum += e;
        }
        red[i] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    // Values: one element of some queries per work-item, more if heads are wide.
#if WG == LANES
    // Tells the compiler that all work-items read the same weights.
    const int lane = lid, team = 0;
#else
    const int lane = lid % LANES, team = lid / LANES;
#endif
    for (int d = lane; d < HEAD_DIM; d += LANES) {
        float acc[QUERIES_PER_ITEM];
        for (int g = 0; g < QUERIES_PER_ITEM; g++) acc[g] = 0.0f;
        const __local float *weights[QUERIES_PER_ITEM];
        for (int g = 0; g < QUERIES_PER_ITEM; g++) weights[g] = p + min(team + g * TEAMS_OF_LANES, GROUP - 1) * CHUNK;
        int t = 0;
        // Load several before using them.
        for (; t + VALUES_AHEAD <= shown; t += VALUES_AHEAD) {
            float e[VALUES_AHEAD];
            UNROLL
            for (int k = 0; k < VALUES_AHEAD; k++) e[k] = VALUE(t + k, d);
            UNROLL
            for (int k = 0; k < VALUES_AHEAD; k++) {
                for (int g = 0; g < QUERIES_PER_ITEM; g++) acc[g] = fma(weights[g][t + k], e[k], acc[g]);
            }
        }
        for (; t < shown; t++) {
            float e = VALUE(t, d);
            for (int g = 0; g < QUERIES_PER_ITEM; g++) acc[g] = fma(weights[g][t], e, acc[g]);
        }
        for (int g = 0; g < QUERIES_PER_ITEM; g++) {
            int head = team + g * TEAMS_OF_LANES;
            if (head < GROUP) partials[(chunk * HEADS + kv_head * GROUP + head) * HEAD_DIM + d] = acc[g];
        }
    }
    for (int g = lid; g < GROUP; g += WG) {
        __global float *to = ml + (chunk * HEADS + kv_head * GROUP + g) * 2;
        to[0] = m[g];
        to[1] = sum_lanes(red + 16 * g);
#if SINKS
        if (is_sink) to[1] = 1.0f;
#endif
    }
}
