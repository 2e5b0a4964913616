// A mixture of experts between its products (gemv.cl, with PRODUCTS): the choice of a token's experts, and the sum of
// their outputs. Both have the order of src/model/cpu/experts.rs.
//
// scores: [token][SCORES]; that of the shared expert's gate, if it has one, is at SHARED_GATE_AT
// choices: [token][USED] of expert and bits of its weight, in ascending order of the experts
// sorted: [EXPERTS + 1], where the list of each expert begins; then these lists of the choices' indices

#ifdef CHOOSE
// Chooses the experts with the highest scores, of equal ones those of lower index, and weighs them: one work-group per
// token.
//
// bias: of the scores (EXPERT_BIAS), then of the choice (CHOICE_BIAS), then factors of weights (BRANCHES): [EXPERTS] each
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void choose_experts(
    const __global float *scores, const __global float *bias, __global int2 *choices) {
    __local float weights[EXPERTS], ranks[EXPERTS], used[USED];
    __local int is_chosen[EXPERTS], experts[USED];
    __local float lanes[16];
    int lid = get_local_id(0), t = get_group_id(0);
    for (int e = lid; e < EXPERTS; e += WG) {
        float score = scores[(size_t)t * SCORES + e];
#if EXPERT_BIAS
        score += bias[e];
#endif
        weights[e] = SOFTMAX ? score : sigmoid(score);
#if CHOICE_BIAS
        ranks[e] = weights[e] + bias[EXPERT_BIAS * EXPERTS + e];
#else
        ranks[e] = weights[e];
#endif
    }
    for (int k = lid; k < USED; k += WG) experts[k] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    // Those that fewer than USED others go before. If scores are NaN, there are more.
    float largest = LOWEST_SCORE;
    for (int e = lid; e < EXPERTS; e += WG) {
        int before = 0;
        for (int i = 0; i < EXPERTS; i++) before += ranks[i] > ranks[e] || (ranks[i] == ranks[e] && i < e);
        is_chosen[e] = before < USED;
    }
    for (int i = 0; i < EXPERTS; i++) largest = fmax(largest, ranks[i]);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int e = lid; e < EXPERTS; e += WG) {
        float weight = SOFTMAX ? exp_approx(weights[e] - largest) : weights[e];
        weights[e] = weight;
        int k = 0;
        for (int i = 0; i < e; i++) k += is_chosen[i];
        if (is_chosen[e] && k < USED) {
            experts[k] = e;
            used[k] = weight;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if SOFTMAX && !RENORMALISED
#define SUMMED weights
#define SUMMED_COUNT EXPERTS
#else
#define SUMMED used
#define SUMMED_COUNT USED
#endif
    for (int lane = lid; lane < 16; lane += WG) {
        float sum = 0.0f;
        for (int i = lane; i < SUMMED_COUNT; i += 16) sum += SUMMED[i];
        lanes[lane] = sum;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = sum_lanes(lanes);
    // The smallest divisor of sigmoids, as on the CPU.
    float divisor = SOFTMAX ? sum : RENORMALISED ? sum + 1e-6f : 1.0f;
    for (int k = lid; k < USED; k += WG) {
        float weight = divide(used[k], divisor) * EXPERT_SCALE;
#if BRANCHES
        weight *= bias[(EXPERT_BIAS + CHOICE_BIAS) * EXPERTS + experts[k]];
#endif
        choices[(size_t)t * USED + k] = (int2)(experts[k], as_int(weight));
    }
}
#elif defined(SORT)
// Lists the choices of each expert, in any order: one work-group.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void sort_choices(
    const __global int2 *choices, __global int *sorted, int count) {
    __local int next[EXPERTS];
    int lid = get_local_id(0);
    for (int e = lid; e < EXPERTS; e += WG) next[e] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < count; i += WG) atomic_inc(next + choices[i].x);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) {
        int first = 0;
        for (int e = 0; e < EXPERTS; e++) {
            int of_expert = next[e];
            sorted[e] = next[e] = first;
            first += of_expert;
        }
        sorted[EXPERTS] = first;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < count; i += WG) sorted[EXPERTS + 1 + atomic_inc(next + choices[i].x)] = i;
}
#else
// Sum of the weighted outputs of a token's experts in column i.
float sum_of_choices(const __global int2 *choices, const __global float *outputs, int t, int i) {
    float sum = 0.0f;
    for (int k = 0; k < USED; k++) {
        size_t choice = (size_t)t * USED + k;
        sum = fma(outputs[choice * DIM + i], as_float(choices[choice].y), sum);
    }
    return sum;
}

// Adds the weighted outputs of a token's experts, and then of the shared expert, to the residual: a work-item per
// column. With BRANCHES a work-group per token, which norms both first.
//
// outputs: [token][USED][DIM]; shared: [token][DIM]; post: [token][DIM], what is to be normed first; norms: [DIM] of
// the experts, then of the other branch
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void add_experts(
    __global float *state, const __global float *scores, const __global int2 *choices, const __global float *outputs,
    const __global float *shared, __global float *post, const __global float *norms) {
    int t = get_group_id(1);
#if BRANCHES
    int lid = get_local_id(0);
    __local float red[16], x[DIM];
    post += (size_t)t * DIM;
    for (int i = lid; i < DIM; i += WG) x[i] = sum_of_choices(choices, outputs, t, i);
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = SCALE_OF_NORM(x, DIM, red);
    for (int i = lid; i < DIM; i += WG) {
        post[i] = NORMED(x[i], scale, norms, i, DIM);
        x[i] = shared[(size_t)t * DIM + i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    scale = SCALE_OF_NORM(x, DIM, red);
    norms += DIM;
    for (int i = lid; i < DIM; i += WG) post[i] += NORMED(x[i], scale, norms, i, DIM);
#else
    int i = get_global_id(0);
    if (i >= DIM) return;
    float sum = sum_of_choices(choices, outputs, t, i);
#if SHARED_EXPERT
    float gate = SHARED_GATE ? sigmoid(scores[(size_t)t * SCORES + SHARED_GATE_AT]) : 1.0f;
    sum = fma(shared[(size_t)t * DIM + i], gate, sum);
#endif
#if POST_NORMS
    post[(size_t)t * DIM + i] = sum;
#else
    ROW(state, t)[i] += SCALED_RESIDUAL(sum);
#endif
#endif
}
#endif
