// attend of many tokens, whose rows are in the cache and whose queries are ready: one work-group per KV head and
// tile of QUERIES queries (token-major, the heads of the group together), over tiles of SLOTS slots, by an online
// softmax. Two to four items share a query.

#if !defined(QUERIES) || !defined(SLOTS)
#error the tile of attention is not defined
#endif
#define SHARE (WG / QUERIES)
// Rows in local memory begin in different banks.
#define WIDE (HEAD_DIM + 1)
#define SCORES (SLOTS / SHARE)
#define DIMS ((HEAD_DIM + SHARE - 1) / SHARE)
#if SHARE * QUERIES != WG || SCORES * SHARE != SLOTS
#error the tile does not divide among the items
#endif

// Brings slots first.. into local memory as floats.
void widen_rows(int type, const __global uchar *rows, int row_bytes, int first, int count, __local float *to) {
    for (int i = get_local_id(0); i < SLOTS * HEAD_DIM; i += WG) {
        int j = i / HEAD_DIM, d = i % HEAD_DIM;
        to[j * WIDE + d] = j < count ? element(type, rows + (size_t)(first + j) * row_bytes, d) : 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend(
    const __global float *state, const __global float *qkv, const __global uchar *k_cache,
    const __global uchar *v_cache, __global float *att, int capacity) {
    __local float q[QUERIES * WIDE];
    __local float kv[SLOTS * WIDE];
    __local float p[QUERIES * SLOTS];
    __local float part[WG];
    const __global int *header = (const __global int *)state;
    int lid = get_local_id(0), kv_head = get_group_id(1);
    int rows = header[H_TOKENS] * GROUP, before = header[H_SLOT];
    int first_row = get_group_id(0) * QUERIES;
    for (int i = lid; i < QUERIES * HEAD_DIM; i += WG) {
        int r = min(first_row + i / HEAD_DIM, rows - 1);
        int head = kv_head * GROUP + r % GROUP;
        q[i / HEAD_DIM * WIDE + i % HEAD_DIM] = qkv[(size_t)(r / GROUP) * QKV + head * HEAD_DIM + i % HEAD_DIM];
    }
    const __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    const __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
    int mine = lid / SHARE, share = lid % SHARE;
    int seen = before + min(first_row + mine, rows - 1) / GROUP + 1;
    int all = before + min(first_row + QUERIES - 1, rows - 1) / GROUP + 1;
    float o[DIMS];
    for (int k = 0; k < DIMS; k++) o[k] = 0.0f;
    float m = LEAST, l = 0.0f;
    for (int first = 0; first < all; first += SLOTS) {
        int count = min(SLOTS, all - first);
        widen_rows(K_TYPE, keys, K_ROW, first, count, kv);
        float s[SCORES];
        float most = LEAST;
        for (int k = 0; k < SCORES; k++) s[k] = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) {
            float e = q[mine * WIDE + d];
            for (int k = 0; k < SCORES; k++) s[k] = mad(e, kv[(share + k * SHARE) * WIDE + d], s[k]);
        }
        for (int k = 0; k < SCORES; k++) {
            if (first + share + k * SHARE < seen) most = fmax(most, s[k]);
        }
        part[lid] = most;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int k = 0; k < SHARE; k++) most = fmax(most, part[mine * SHARE + k]);
        float m_new = fmax(m, most), alpha = exp(m - m_new), sum = 0.0f;
        m = m_new;
        for (int k = 0; k < SCORES; k++) {
            int j = share + k * SHARE;
            // What is masked is skipped: where all is, e^(score - m) would be 1.
            float e = first + j < seen ? exp(s[k] - m) : 0.0f;
            p[mine * SLOTS + j] = e;
            sum += e;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        part[lid] = sum;
        widen_rows(V_TYPE, values, V_ROW, first, count, kv);
        sum = 0.0f;
        for (int k = 0; k < SHARE; k++) sum += part[mine * SHARE + k];
        l = l * alpha + sum;
        for (int k = 0; k < DIMS; k++) o[k] *= alpha;
        for (int j = 0; j < count; j++) {
            float e = p[mine * SLOTS + j];
            for (int k = 0; k < DIMS; k++) {
                int d = share + k * SHARE;
                if (d < HEAD_DIM) o[k] = mad(e, kv[j * WIDE + d], o[k]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float scale = l > 0.0f ? 1.0f / l : 0.0f;
    // q is free: every item has read its last score. Rows lie close now, as rotate_heads expects them.
    for (int k = 0; k < DIMS; k++) {
        int d = share + k * SHARE;
        if (d < HEAD_DIM) q[mine * HEAD_DIM + d] = o[k] * scale;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(q, QUERIES, 1.0f);
#endif
    for (int i = lid; i < QUERIES * HEAD_DIM; i += WG) {
        int r = first_row + i / HEAD_DIM;
        if (r < rows) {
            int head = kv_head * GROUP + r % GROUP;
            att[(size_t)(r / GROUP) * Q_DIM + head * HEAD_DIM + i % HEAD_DIM] = q[i];
        }
    }
}
