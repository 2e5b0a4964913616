// rope and attend of one token. One work-group per KV head and split of the context: all query heads of the group
// over a run of slots, by an online softmax. The last split first stores the new row. The output projection merges
// the splits.
//
// partials: [HEADS][SPLITS][HEAD_DIM], sums of e^(score - m) * v; ml: [HEADS][SPLITS][m, l]

#if !defined(SPLITS) || !defined(LEAST_SLOTS)
#error the number of splits is not defined
#endif

// Items that share the elements of a value row, and rows that are read at once.
#define LANES (HEAD_DIM <= 16 ? 16 : HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 128 ? 128 : 256)
#if WG < 256 && HEAD_DIM > WG
#error WG is narrower than a head
#endif
#define TEAMS (WG / LANES)
#define ROWS (GROUP + 2)

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend_one(
    const __global float *state, const __global float *qkv, const __global float *qk_norm, __global uchar *k_cache,
    __global uchar *v_cache, __global float *partials, __global float *ml, int capacity) {
    __local float x[ROWS * HEAD_DIM]; // the group's queries, then the new key and value
    __local float p[GROUP * WG];      // scores, then e^(score - m)
    __local float red[GROUP * WG];
    __local float m[GROUP], l[GROUP], alpha[GROUP];
    __local float norms[ROWS];
    __local float2 scales[HEAD_DIM / KV_BLOCK];
    int lid = get_local_id(0), kv_head = get_group_id(0) % KV_HEADS, split = get_group_id(0) / KV_HEADS;
    int slots = ((const __global int *)state)[H_SLOT] + 1;
    int share = max(LEAST_SLOTS, (slots + SPLITS - 1) / SPLITS);
    int from = min(split * share, slots), to = min(slots, from + share);
    bool last = from < to && to == slots;
    const __global float *angles = ROW(state, 0) + DIM;
    __local float *k = x + GROUP * HEAD_DIM, *v = k + HEAD_DIM;
    load_heads(qkv + kv_head * (GROUP * HEAD_DIM), x, GROUP);
    ready_queries(x, qk_norm, angles, GROUP, norms);
    const __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    const __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
    // Every split prepares the new row, so that all items meet the same barriers; the last one stores it.
    load_heads(qkv + Q_PAD + kv_head * HEAD_DIM, k, 1);
    load_heads(qkv + Q_PAD + KV_PAD + kv_head * HEAD_DIM, v, 1);
    ready_key(k, qk_norm + HEAD_DIM, angles, norms);
    ready_value(v);
    store_row(K_TYPE, k, k_cache + ((size_t)kv_head * capacity + slots - 1) * K_ROW, scales, last);
    store_row(V_TYPE, v, v_cache + ((size_t)kv_head * capacity + slots - 1) * V_ROW, scales, last);
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    int lane = lid % LANES, team = lid / LANES;
    float acc[GROUP];
    for (int g = 0; g < GROUP; g++) acc[g] = 0.0f;
    if (lid < GROUP) {
        m[lid] = LEAST;
        l[lid] = 0.0f;
    }
    for (int first = from; first < to; first += WG) {
        int count = min(WG, to - first);
        // Scores: an item a slot.
        float score[GROUP];
        for (int g = 0; g < GROUP; g++) score[g] = lid < count ? 0.0f : LEAST;
        if (lid < count) {
            const __global uchar *row = keys + (size_t)(first + lid) * K_ROW;
            for (int d = 0; d < HEAD_DIM; d++) {
                float e = element(K_TYPE, row, d);
                for (int g = 0; g < GROUP; g++) score[g] = mad(e, x[g * HEAD_DIM + d], score[g]);
            }
        }
        for (int g = 0; g < GROUP; g++) p[g * WG + lid] = red[g * WG + lid] = score[g];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int stride = WG / 2; stride > 0; stride /= 2) {
            if (lid < stride) {
                for (int g = 0; g < GROUP; g++) {
                    red[g * WG + lid] = fmax(red[g * WG + lid], red[g * WG + lid + stride]);
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (lid < GROUP) {
            float most = fmax(m[lid], red[lid * WG]);
            alpha[lid] = exp(m[lid] - most);
            m[lid] = most;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int g = 0; g < GROUP; g++) {
            // 0 past the end, where the score is LEAST. PoCL 3.1 gets an exp wrong that is under a condition here.
            float e = exp(p[g * WG + lid] - m[g]);
            p[g * WG + lid] = e;
            red[g * WG + lid] = e;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int stride = WG / 2; stride > 0; stride /= 2) {
            if (lid < stride) {
                for (int g = 0; g < GROUP; g++) red[g * WG + lid] += red[g * WG + lid + stride];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (lid < GROUP) l[lid] = l[lid] * alpha[lid] + red[lid * WG];
        // Values: an item an element, teams take turns.
        for (int g = 0; g < GROUP; g++) acc[g] *= alpha[g];
        if (lane < HEAD_DIM && team < TEAMS) {
            for (int t = team; t < count; t += TEAMS) {
                float e = element(V_TYPE, values + (size_t)(first + t) * V_ROW, lane);
                for (int g = 0; g < GROUP; g++) acc[g] = mad(e, p[g * WG + t], acc[g]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    // Teams together; x is free now.
    for (int g = 0; g < GROUP; g++) red[g * WG + lid] = acc[g];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < GROUP * HEAD_DIM; i += WG) {
        float sum = 0.0f;
        for (int t = 0; t < TEAMS; t++) sum += red[i / HEAD_DIM * WG + t * LANES + i % HEAD_DIM];
        x[i] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(x, GROUP, 1.0f);
#endif
    for (int i = lid; i < GROUP * HEAD_DIM; i += WG) {
        int g = i / HEAD_DIM;
        partials[((kv_head * GROUP + g) * SPLITS + split) * HEAD_DIM + i % HEAD_DIM] = x[i];
    }
    // A split without slots has a sum of 0, which weighs nothing.
    if (lid < GROUP) {
        __global float *to_merge = ml + ((kv_head * GROUP + lid) * SPLITS + split) * 2;
        to_merge[0] = m[lid];
        to_merge[1] = l[lid];
    }
}
