// Embeddings that each layer has of a token. They follow the angles in the token's row of the state, where the host has
// put the row of the table.

#define EMBEDDINGS(state, t) (ROW(state, t) + DIM + 2 * ANGLES)

#ifdef EMBED
// Adds the normed projection of the usual embedding: one work-group per layer and token.
//
// projected: [token][layer][PER_LAYER_DIM]
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void embed_layers(
    __global float *state, const __global float *projected, const __global float *w) {
    __local float red[16];
    __local float x[PER_LAYER_DIM];
    int lid = get_local_id(0), from = get_group_id(0) * PER_LAYER_DIM, t = get_group_id(1);
    const __global float *of_layer = projected + (size_t)t * PER_LAYER_ROW + from;
    for (int i = lid; i < PER_LAYER_DIM; i += WG) x[i] = of_layer[i] * PROJECTION_SCALE;
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = norm_scale(x, PER_LAYER_DIM, red);
    __global float *to = EMBEDDINGS(state, t) + from;
    for (int i = lid; i < PER_LAYER_DIM; i += WG)
        to[i] = (x[i] * scale * w[i] + to[i] * TABLE_SCALE) * 0.70710678f;
}
#else
// Multiplies the embeddings of a layer with their gate: one work-group per token.
//
// gate: [token][PER_LAYER_DIM], replaced by the products
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gate_layer(
    const __global float *state, __global float *gate, int layer) {
    int t = get_group_id(0);
    const __global float *embedding = EMBEDDINGS(state, t) + layer * PER_LAYER_DIM;
    for (int i = get_local_id(0); i < PER_LAYER_DIM; i += WG) {
        size_t at = (size_t)t * PER_LAYER_DIM + i;
        gate[at] = gelu(gate[at]) * embedding[i];
    }
}
#endif
