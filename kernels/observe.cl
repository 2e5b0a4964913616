// observe: adds the attention of the observed tokens, the last ones of a run, to the mass of the slots they see. Tokens
// are added in ascending order; for each, the softmax weights are summed over the query heads of the group, also in
// ascending order. One work-group per KV head and WG slots, one slot per work-item. It follows attention and uses its
// largest scores and softmax sums: for many tokens [token of the run][HEADS][m, l]; for one token (ONE) those of its
// chunks, [chunk][HEADS][m, l], merged as in `merge`.
//
// mass: [kv_head][slot]; observed: number of observed tokens, number of slots with valid mass

// Queries in local memory at once, token-major, and queries whose lanes are in registers.
#ifdef ONE
#define QUERIES GROUP
#else
#define QUERIES (GROUP < 16 ? 16 / GROUP * GROUP : GROUP)
#endif
#define QUERIES_AT_ONCE 4

// Adds to `sum` the attention of `count` queries from row `first` on, all of whole tokens, to the slot with key `row`.
float add_attention(const __local float *q, const __local float2 *ml, int first, int count, const __global uchar *row,
               int slot, int before, float sum) {
    float of_token = 0.0f;
    for (int from = 0; from < count; from += QUERIES_AT_ONCE) {
        float16 acc[QUERIES_AT_ONCE];
        for (int k = 0; k < QUERIES_AT_ONCE; k++) acc[k] = 0.0f;
        for (int i = 0; i < RUNS; i++) {
            float16 e = row16(K_TYPE, row, i);
            for (int k = 0; k < QUERIES_AT_ONCE; k++) {
                acc[k] = fma(e, head16(q + min(from + k, count - 1) * HEAD_DIM, i), acc[k]);
            }
        }
        for (int k = 0; k < QUERIES_AT_ONCE; k++) {
            int r = first + from + k;
            if (from + k < count) {
                float2 of = ml[from + k];
                float p = divide(exp_approx(sum16(acc[k]) - of.x), of.y);
                of_token = r % GROUP == 0 ? p : of_token + p;
                if (r % GROUP == GROUP - 1 && slot <= before + r / GROUP) sum += of_token;
            }
        }
    }
    return sum;
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void observe(
    const __global float *state, const __global float *qkv, const __global float *qk_norm,
    const __global float *calibration, const __global uchar *k_cache, const __global float *softmax,
    __global float *mass, Run run, int2 observed) {
    __local float q[QUERIES * HEAD_DIM];
    __local float2 ml[QUERIES];
    int lid = get_local_id(0), slot = get_global_id(0), kv_head = get_group_id(1);
    int before = FIRST_SLOT(run), tokens = TOKENS_OF(run), slots = before + tokens;
    size_t at = (size_t)kv_head * CAPACITY(run) + min(slot, slots - 1);
    qkv += (size_t)FIRST_TOKEN(run) * QKV;
    const __global uchar *row = k_cache + at * K_ROW;
    float sum = slot < observed.y ? mass[at] : 0.0f;
#ifdef ONE
    // Not in a loop: PoCL 3.1 miscompiles barriers of work-group functions in loops.
    __local float red[GROUP * 16];
    load_heads(qkv + kv_head * (GROUP * HEAD_DIM), q, GROUP);
    const __global float *angles = ROW(state, FIRST_TOKEN(run)) + DIM + ANGLES_AT;
    prepare_queries(q, qk_norm, calibration + kv_head * CALIBRATION, angles, GROUP, red);
    for (int g = lid; g < GROUP; g += WG) {
        float m = LOWEST_SCORE, l = 0.0f;
        for (int c = 0; c < (slots + CHUNK - 1) / CHUNK + SINKS; c++) {
            const __global float *part = softmax + (c * HEADS + kv_head * GROUP + g) * 2;
            float2 w = rescale_chunk(&m, part[0]);
            l = fma(part[1], w.y, l * w.x);
        }
        ml[g] = (float2)(m, l);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = add_attention(q, ml, 0, GROUP, row, slot, before, sum);
#else
    int rows = tokens * GROUP;
    for (int first = (tokens - observed.x) * GROUP; first < rows; first += QUERIES) {
        int count = min(QUERIES, rows - first);
        for (int i = lid; i < count * HEAD_DIM; i += WG) {
            int r = first + i / HEAD_DIM, head = kv_head * GROUP + r % GROUP;
            q[i] = qkv[(size_t)(r / GROUP) * QKV + head * HEAD_DIM + i % HEAD_DIM];
        }
        for (int i = lid; i < count; i += WG) {
            int r = first + i;
            ml[i] = vload2((size_t)(r / GROUP) * HEADS + kv_head * GROUP + r % GROUP, softmax);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        sum = add_attention(q, ml, first, count, row, slot, before, sum);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#endif
    if (slot < slots) mass[at] = sum;
}
