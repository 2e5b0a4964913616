// Norm of all queries of a token together, and of all its keys: one work-group per token and part.

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void qk_norm(__global float *qkv, const __global float *w) {
    __local float red[16];
    __local float x[Q_DIM];
    int lid = get_local_id(0), is_k = get_group_id(1), n = is_k ? KV_DIM : Q_DIM;
    __global float *row = qkv + (size_t)get_group_id(0) * QKV + (is_k ? Q_PAD : 0);
    for (int i = lid; i < n; i += WG) x[i] = row[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = norm_scale(x, n, red);
    for (int i = lid; i < n; i += WG) row[i] = x[i] * scale * w[(is_k ? Q_DIM : 0) + i];
}
