// Norm behind attention and behind the feed-forward layer: one work-group per token.
//
// post: [token][DIM], output that is normed and added to the residual
// w: with LAYER_SCALARS, a factor of the residual follows the weights

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void post_norm(
    __global float *state, const __global float *post, const __global float *w) {
    __local float red[16];
    __local float x[DIM];
    int lid = get_local_id(0), t = get_group_id(0);
    for (int i = lid; i < DIM; i += WG) x[i] = post[(size_t)t * DIM + i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = SCALE_OF_NORM(x, DIM, red);
    __global float *residual = ROW(state, t);
    for (int i = lid; i < DIM; i += WG) {
        residual[i] += NORMED(x[i], scale, w, i, DIM);
#if LAYER_SCALARS
        residual[i] *= w[DIM];
#endif
    }
}
