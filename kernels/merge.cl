// End of attend for one token, if the output projection does not merge the chunks itself: one work-group per head.
//
// att: [token][HEADS][HEAD_DIM]; at: the token, its number of chunks
//
// SEVERAL  for the tokens of several runs

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void merge(
#ifdef SEVERAL
    const __global float *partials, const __global float *ml, __global float *att, Runs runs) {
    int of = get_group_id(1), first = runs.first_chunk[of];
    int2 at = (int2)(FIRST_TOKEN(runs.of[of]), runs.first_chunk[of + 1] - first);
    partials += (size_t)first * (HEADS * HEAD_DIM);
    ml += (size_t)first * (HEADS * 2);
#else
    const __global float *partials, const __global float *ml, __global float *att, int2 at) {
#endif
    __local float out[HEAD_DIM];
    int head = get_group_id(0), lid = get_local_id(0);
    for (int d = lid; d < HEAD_DIM; d += WG) out[d] = merge_element(partials, ml, at.y, head, d);
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(out, 1, true);
#endif
    for (int d = lid; d < HEAD_DIM; d += WG) att[(size_t)at.x * Q_DIM + head * HEAD_DIM + d] = out[d];
}
