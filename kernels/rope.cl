// rope: queries, keys and values of new tokens get their position; keys and values join the cache. One work-group
// per token and head of q, k or v. Queries stay where they are, ready for attention.

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void rope(
    const __global float *state, __global float *qkv, const __global float *qk_norm, __global uchar *k_cache,
    __global uchar *v_cache, int capacity) {
    __local float x[HEAD_DIM];
    __local float red[16];
    __local float2 scales[HEAD_DIM / KV_BLOCK];
    int t = get_group_id(1), h = get_group_id(0), lid = get_local_id(0);
    int slot = ((const __global int *)state)[H_SLOT] + t;
    const __global float *angles = ROW(state, t) + DIM;
    __global float *row = qkv + (size_t)t * QKV;
    if (h < HEADS) {
        row += h * HEAD_DIM;
        load_heads(row, x, 1);
        ready_queries(x, qk_norm, angles, 1, red);
        for (int i = lid; i < HEAD_DIM; i += WG) row[i] = x[i];
    } else if (h < HEADS + KV_HEADS) {
        int kv_head = h - HEADS;
        load_heads(row + Q_PAD + kv_head * HEAD_DIM, x, 1);
        ready_key(x, qk_norm + HEAD_DIM, angles, red);
        store_row(K_TYPE, x, k_cache + ((size_t)kv_head * capacity + slot) * K_ROW, scales, true);
    } else {
        int kv_head = h - HEADS - KV_HEADS;
        load_heads(row + Q_PAD + KV_PAD + kv_head * HEAD_DIM, x, 1);
        ready_value(x);
        store_row(V_TYPE, x, v_cache + ((size_t)kv_head * capacity + slot) * V_ROW, scales, true);
    }
}
