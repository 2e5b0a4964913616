// Gates attention's output by the sigmoid of its gate, of each head or of each element: one work-group per token.

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gate(__global float *att, const __global float *qkv) {
    size_t t = get_group_id(0);
    for (int i = get_local_id(0); i < Q_DIM; i += WG)
        att[t * Q_DIM + i] *= sigmoid(qkv[t * QKV + GATE_AT + i / (Q_DIM / GATE_DIM)]);
}
