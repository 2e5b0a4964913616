// The end of attend for one token over more chunks than the output projection merges itself: one work-group a head.
// att: [HEADS][HEAD_DIM]

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void merge(
    const __global float *state, const __global float *partials, const __global float *ml, __global float *att) {
    __local float out[HEAD_DIM];
    int head = get_group_id(0), lid = get_local_id(0);
    int chunks = ((const __global int *)state)[H_SLOT] / CHUNK + 1;
    for (int d = lid; d < HEAD_DIM; d += WG) {
        float m = LEAST, l = 0.0f, o = 0.0f;
        for (int c = 0; c < chunks; c++) {
            const __global float *part = ml + (c * HEADS + head) * 2;
            float2 w = weigh_chunk(&m, part[0]);
            l = fma(part[1], w.y, l * w.x);
            o = fma(partials[(size_t)(c * HEADS + head) * HEAD_DIM + d], w.y, o * w.x);
        }
        out[d] = divide(o, l);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(out, 1, true);
#endif
    for (int d = lid; d < HEAD_DIM; d += WG) att[head * HEAD_DIM + d] = out[d];
}
