// attend of a run of many tokens, whose rows are in the cache and whose queries are ready. One work-group per KV head and tile
// of QUERIES queries (token-major, the heads of the group together), over chunks of the context; SHARE items share a
// query. A chunk is a softmax of its own, merged into what is there, in ascending order.
//
// softmax: [token of the run][HEADS][m, l], the largest score and the sum of e^(score - m) of the tokens that are
// observed, the last ones

#if !defined(QUERIES) || !defined(SLOTS)
#error the tile of attention is not defined
#endif
#define SHARE 4
// Rows in local memory begin in different banks.
#define WIDE (HEAD_DIM + 1)
#define DIMS ((HEAD_DIM + SHARE - 1) / SHARE)
#if SHARE * QUERIES != WG || SLOTS % SHARE != 0 || 128 % SLOTS != 0
#error the tile does not divide among the items
#endif

// Brings rows first.. into local memory as floats.
void widen_rows(int type, const __global uchar *rows, int row_bytes, int first, int count, __local float *to) {
    for (int i = get_local_id(0); i < count * HEAD_DIM; i += WG) {
        int j = i / HEAD_DIM, d = i % HEAD_DIM;
        to[j * WIDE + d] = element(type, rows + (size_t)(first + j) * row_bytes, d);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend(
    const __global float *qkv, const __global uchar *k_cache, const __global uchar *v_cache, __global float *att,
    __global float *softmax, Run run, int observed) {
    __local float q[QUERIES * WIDE];
    __local float kv[SLOTS * WIDE];
    __local float p[QUERIES * CHUNK];
    __local float red[QUERIES * 16];
    int lid = get_local_id(0), kv_head = get_group_id(1);
    int rows = TOKENS_OF(run) * GROUP, before = FIRST_SLOT(run), capacity = CAPACITY(run);
    qkv += (size_t)FIRST_TOKEN(run) * QKV;
    att += (size_t)FIRST_TOKEN(run) * Q_DIM;
    int first_row = get_group_id(0) * QUERIES;
    for (int i = lid; i < QUERIES * HEAD_DIM; i += WG) {
        int r = min(first_row + i / HEAD_DIM, rows - 1);
        int head = kv_head * GROUP + r % GROUP;
        q[i / HEAD_DIM * WIDE + i % HEAD_DIM] = qkv[(size_t)(r / GROUP) * QKV + head * HEAD_DIM + i % HEAD_DIM];
    }
    const __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    const __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
    int mine = lid / SHARE, share = lid % SHARE;
    // Slots that this item's query sees, and the most that one of the tile does.
    int seen = before + min(first_row + mine, rows - 1) / GROUP + 1;
    int all = before + min(first_row + QUERIES - 1, rows - 1) / GROUP + 1;
#if WINDOW
    // Slots before those that this item's query sees.
    int hidden = max(seen - WINDOW, 0);
#endif
    const __local float *my_q = q + mine * WIDE;
    __local float *my_p = p + mine * CHUNK, *my_red = red + mine * 16;
    float o[DIMS];
    for (int k = 0; k < DIMS; k++) o[k] = 0.0f;
    float m = LEAST, l = 0.0f;
    for (int chunk = SKIPPED(before + first_row / GROUP + 1) * CHUNK; chunk < all; chunk += CHUNK) {
        int row = AT_ROW(chunk, run), count = min(CHUNK, all - chunk), n = clamp(seen - chunk, 0, CHUNK);
#if WINDOW
        if (hidden >= chunk + n) n = 0;
#endif
        for (int tile = 0; tile < count; tile += SLOTS) {
            int slots = min(SLOTS, count - tile);
            widen_rows(K_TYPE, keys, K_ROW, row + tile, slots, kv);
            for (int j = share; j < slots; j += SHARE) {
                float16 acc = 0.0f;
                for (int i = 0; i < RUNS; i++) acc = fma(head16(kv + j * WIDE, i), head16(my_q, i), acc);
#if WINDOW
                my_p[tile + j] = chunk + tile + j < hidden ? LEAST : sum16(acc);
#else
                my_p[tile + j] = sum16(acc);
#endif
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        // The largest score, then numerators and their sums by lane: an item has four of a query's sixteen lanes.
        for (int lane = share; lane < 16; lane += SHARE) {
            float most = LEAST;
            for (int t = lane; t < n; t += 16) most = fmax(most, my_p[t]);
            my_red[lane] = most;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float most = LEAST;
        for (int i = 0; i < 16; i++) most = fmax(most, my_red[i]);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int lane = share; lane < 16; lane += SHARE) {
            float sum = 0.0f;
            for (int t = lane; t < n; t += 16) {
                float e = e_to(my_p[t] - most);
                my_p[t] = e;
                sum += e;
            }
            my_red[lane] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float part_l = sum_lanes(my_red);
        float part[DIMS];
        for (int k = 0; k < DIMS; k++) part[k] = 0.0f;
        for (int tile = 0; tile < count; tile += SLOTS) {
            int slots = min(SLOTS, count - tile), mine_of = min(slots, n - tile);
            widen_rows(V_TYPE, values, V_ROW, row + tile, slots, kv);
            for (int j = 0; j < mine_of; j++) {
                float e = my_p[tile + j];
                for (int k = 0; k < DIMS; k++) {
                    int d = share + k * SHARE;
                    if (d < HEAD_DIM) part[k] = fma(e, kv[j * WIDE + d], part[k]);
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        // A chunk of which nothing is seen has a largest score of LEAST and changes nothing: its sums are 0.
        float2 w = weigh_chunk(&m, most);
        l = fma(part_l, w.y, l * w.x);
        for (int k = 0; k < DIMS; k++) o[k] = fma(part[k], w.y, o[k] * w.x);
    }
    int query = first_row + mine;
    if (share == 0 && query < rows && query / GROUP >= TOKENS_OF(run) - observed) {
        vstore2((float2)(m, l), (size_t)(query / GROUP) * HEADS + kv_head * GROUP + query % GROUP, softmax);
    }
    // q is free: every item has read its last score. Rows lie close now, as rotate_heads expects them.
    for (int k = 0; k < DIMS; k++) {
        int d = share + k * SHARE;
        if (d < HEAD_DIM) q[mine * HEAD_DIM + d] = divide(o[k], l);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(q, QUERIES, true);
#endif
    for (int i = lid; i < QUERIES * HEAD_DIM; i += WG) {
        int r = first_row + i / HEAD_DIM;
        if (r < rows) {
            int head = kv_head * GROUP + r % GROUP;
            att[(size_t)(r / GROUP) * Q_DIM + head * HEAD_DIM + i % HEAD_DIM] = q[i];
        }
    }
}
