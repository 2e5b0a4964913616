// rope: applies RoPE to the queries and keys of a run; keys and values are added to the cache. One work-group per token
// and head of q, k or v; of q alone in a layer that reads another's cache. Queries stay in place, ready for attention.

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void rope(
    const __global float *state, __global float *qkv, const __global float *qk_norm, const __global float *calibration,
    __global uchar *k_cache, __global uchar *v_cache, Run run) {
    __local float x[HEAD_DIM];
    __local float red[16];
    __local float2 scales[ROW_BLOCKS * CANDIDATES];
    int t = FIRST_TOKEN(run) + get_group_id(1), h = get_group_id(0), lid = get_local_id(0);
    const __global float *angles = ROW(state, t) + DIM + ANGLES_AT;
    // All three kinds take the same path; each applies only what it needs.
    bool is_q = h < HEADS, is_v = h >= HEADS + KV_HEADS;
    int kv_head = is_q ? h / GROUP : is_v ? h - HEADS - KV_HEADS : h - HEADS;
    int start = is_q ? h * HEAD_DIM : is_v ? VALUE_AT(kv_head) : KEY_AT(kv_head);
    __global float *row = qkv + (size_t)t * QKV + start;
    load_heads(row, x, 1);
#if QK_NORM == NORM_HEADS
    norm_heads(x, qk_norm + (is_q ? 0 : HEAD_DIM), 1, red, !is_v);
#endif
#if VALUE_NORM
    norm_heads(x, 0, 1, red, is_v);
#endif
    rope_heads(x, angles, 1, !is_v);
#if QK_NORM == NORM_AFTER_ROPE
    norm_heads(x, qk_norm + (is_q ? 0 : HEAD_DIM), 1, red, !is_v);
#endif
    for (int i = lid; i < HEAD_DIM; i += WG) {
        if (is_q) x[i] *= Q_SCALE;
#if QUERY_GROWTH
        if (is_q) x[i] *= QUERY_FACTOR(angles);
#endif
#if K_ROTATED
        const __global float *of_head = calibration + kv_head * CALIBRATION;
        if (is_q) {
            x[i] *= of_head[2 * HEAD_DIM + i];
        } else if (!is_v) {
            x[i] = (x[i] - of_head[i]) * of_head[HEAD_DIM + i];
        }
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if K_ROTATED || V_ROTATED
    rotate_heads(x, 1, is_v ? V_ROTATED : K_ROTATED);
#endif
    size_t at = (size_t)kv_head * CAPACITY(run) + ROW_OF_SLOT(FIRST_SLOT(run) + (int)get_group_id(1), run);
    scale_blocks(K_TYPE, x, ROW_BLOCKS, scales, !is_q && (K_TYPE == V_TYPE || !is_v));
#if K_TYPE != V_TYPE
    scale_blocks(V_TYPE, x, ROW_BLOCKS, scales, is_v);
#endif
    store_row(K_TYPE, x, k_cache + at * K_ROW, scales, !is_q && !is_v);
    store_row(V_TYPE, x, v_cache + at * V_ROW, scales, is_v);
    for (int i = lid; i < HEAD_DIM; i += WG) {
        if (is_q) row[i] = x[i];
    }
}
