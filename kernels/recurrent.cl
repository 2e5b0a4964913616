// Layers with a recurrent state: gated short convolutions, gated delta nets (DELTA_NET) and Mamba2 (MAMBA), whose B, C, x
// and time steps are keys, queries, values and beta here. Tokens of a run are computed in ascending order; see
// src/model/cpu/recurrent.rs and mamba.rs.
//
// mix: [token][MIX], projected inputs; taps: [CONV_TAPS][CONV_CHANNELS], oldest first, then, of Mamba2, biases
// layer: the first float of a layer's state, consecutive value heads that share a key head, floats of all layers' states
// heads: [bias | decay][VALUE_HEADS], of Mamba2 [bias | decay | skip]
// state: of one layer, [CONV_TAPS - 1][CONV_CHANNELS], then [block of columns][KEY_WIDTH][16]; behind those of all layers,
// those after the first token of a run of several

#if DELTA_NET || MAMBA
#define KEYS (KEY_HEADS * KEY_WIDTH)
#define VALUES (VALUE_HEADS * VALUE_WIDTH)
#endif

#ifdef CONVOLVE
// One work-item per channel. out: [token][CONV_CHANNELS]; of a short convolution, gated.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void convolve(
    const __global float *mix, const __global float *taps, __global float *state, __global float *out, Run run,
    int4 layer) {
    int c = get_global_id(0);
    if (c >= CONV_CHANNELS) return;
    float held[CONV_TAPS];
    state += layer.x;
    for (int j = 0; j < CONV_TAPS - 1; j++) held[j] = state[j * CONV_CHANNELS + c];
    for (int t = FIRST_TOKEN(run); t < FIRST_TOKEN(run) + TOKENS_OF(run); t++) {
        const __global float *row = mix + (size_t)t * MIX;
        float u = row[CONV_AT + c], sum = 0.0f;
#if MAMBA
        u *= c < KEYS_AT ? SCALE_X : c < QUERIES_AT ? SCALE_B : SCALE_C;
        sum = taps[CONV_TAPS * CONV_CHANNELS + c];
#elif !DELTA_NET
        u *= row[2 * DIM + c];
#endif
        held[CONV_TAPS - 1] = u;
        for (int j = 0; j < CONV_TAPS; j++) sum = fma(held[j], taps[j * CONV_CHANNELS + c], sum);
        for (int j = 0; j < CONV_TAPS - 1; j++) held[j] = held[j + 1];
#if DELTA_NET || MAMBA
        out[(size_t)t * CONV_CHANNELS + c] = silu(sum);
#else
        out[(size_t)t * CONV_CHANNELS + c] = row[DIM + c] * sum;
#endif
        if (t == FIRST_TOKEN(run) && TOKENS_OF(run) > 1)
            for (int j = 0; j < CONV_TAPS - 1; j++) state[layer.z + j * CONV_CHANNELS + c] = held[j];
    }
    for (int j = 0; j < CONV_TAPS - 1; j++) state[j * CONV_CHANNELS + c] = held[j];
}
#endif

#ifdef PREPARE
// ln(1 + e^x), as in src/numeric/simd/recurrent.rs.
float softplus(float x) {
    float t = exp_approx(-fabs(x)), s = divide(t, 2.0f + t), square = s * s, p = 1.0f / 15.0f;
    p = fma(p, square, 1.0f / 13.0f);
    p = fma(p, square, 1.0f / 11.0f);
    p = fma(p, square, 1.0f / 9.0f);
    p = fma(p, square, 1.0f / 7.0f);
    p = fma(p, square, 0.2f);
    p = fma(p, square, 1.0f / 3.0f);
    p = fma(p, square, 1.0f);
    return fmax(x, 0.0f) + (s + s) * p;
}

// Gives each head of a delta net's queries and keys its length: one work-group per head and token. A last one computes
// strength and decay of each head's update.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void prepare_update(
    __global float *mix, __global float *conv, const __global float *heads) {
#if MAMBA
    __global float *factors = mix + get_group_id(1) * MIX;
    for (int h = get_local_id(0); h < VALUE_HEADS; h += WG) {
        float step = softplus(factors[MIX_BETA_AT + h] * SCALE_STEP + heads[h]);
        factors[MIX_BETA_AT + h] = step;
        factors[MIX_DECAY_AT + h] = exp_approx(step * heads[VALUE_HEADS + h]);
    }
#else
    __local float red[16];
    __local float x[KEY_WIDTH];
    int lid = get_local_id(0), part = get_group_id(0);
    size_t t = get_group_id(1);
    // All take the same path.
    bool is_head = part < 2 * KEY_HEADS;
    __global float *row = conv + t * CONV_CHANNELS + (is_head ? part : 0) * KEY_WIDTH;
    for (int i = lid; i < KEY_WIDTH; i += WG) x[i] = row[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = norm_scale_eps(x, KEY_WIDTH, red, LENGTH_EPS);
    if (is_head) {
        float factor = part < KEY_HEADS ? QUERY_LENGTH : KEY_LENGTH;
        for (int i = lid; i < KEY_WIDTH; i += WG) row[i] = x[i] * scale * factor;
    } else {
        __global float *factors = mix + t * MIX;
        for (int h = lid; h < VALUE_HEADS; h += WG) {
            factors[MIX_BETA_AT + h] = sigmoid(factors[MIX_BETA_AT + h]);
            float a = factors[MIX_DECAY_AT + h] + heads[h];
            factors[MIX_DECAY_AT + h] = exp_approx(softplus(a) * heads[VALUE_HEADS + h]);
        }
    }
#endif
}
#endif

#ifdef UPDATE
// Updates sixteen columns of a head's state: a work-item has every sixteenth row of a column, as in the CPU's lanes.
__kernel __attribute__((reqd_work_group_size(256, 1, 1))) void update_state(
    const __global float *mix, const __global float *conv, const __global float *heads, __global float *state,
    __global float *core, Run run, int4 layer) {
    // One of the second is read while the other is written for the next token.
    __local float kept[256], given[2][256];
    int lid = get_local_id(0), lane = lid / 16, column = lid % 16, block = get_group_id(0);
    int head = block / (VALUE_WIDTH / 16), of_key = head / layer.y % KEY_HEADS * KEY_WIDTH;
    __global float *own = state + layer.x + CONV_STATE + (size_t)block * (KEY_WIDTH * 16) + lid;
    float s[KEY_WIDTH / 16];
    for (int i = 0; i < KEY_WIDTH / 16; i++) s[i] = own[256 * i];
    for (int t = FIRST_TOKEN(run); t < FIRST_TOKEN(run) + TOKENS_OF(run); t++) {
        const __global float *factors = mix + (size_t)t * MIX, *row = conv + (size_t)t * CONV_CHANNELS;
        const __global float *query = row + QUERIES_AT + of_key + lane, *key = row + KEYS_AT + of_key + lane;
        float beta = factors[MIX_BETA_AT + head], decay = factors[MIX_DECAY_AT + head], sum = 0.0f;
        float value = row[VALUES_AT + block * 16 + column], change = value;
        for (int i = 0; i < KEY_WIDTH / 16; i++) s[i] *= decay;
#if DELTA_NET
        for (int i = 0; i < KEY_WIDTH / 16; i++) sum = fma(s[i], key[16 * i], sum);
        kept[column * 16 + lane] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        change -= sum_lanes(kept + column * 16);
        sum = 0.0f;
#endif
        change *= beta;
        for (int i = 0; i < KEY_WIDTH / 16; i++) {
            s[i] = fma(key[16 * i], change, s[i]);
            sum = fma(s[i], query[16 * i], sum);
        }
        if (t == FIRST_TOKEN(run) && TOKENS_OF(run) > 1)
            for (int i = 0; i < KEY_WIDTH / 16; i++) own[layer.z + 256 * i] = s[i];
        given[t % 2][column * 16 + lane] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane == 0) {
            float out = sum_lanes(given[t % 2] + column * 16);
#if MAMBA
            out = fma(value, heads[2 * VALUE_HEADS + head], out);
#endif
            core[(size_t)t * VALUES + block * 16 + column] = out;
        }
    }
    for (int i = 0; i < KEY_WIDTH / 16; i++) own[256 * i] = s[i];
}
#endif

#ifdef GATE
#define BEFORE_GATE 1
#define AFTER_GATE 2
// Gates each part of the output, of GATE_WIDTH columns, and norms it if GATE_NORM says so: one work-group per part and
// token.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gate_mixed(
    const __global float *mix, __global float *core, const __global float *w) {
    __local float red[16];
    __local float x[GATE_WIDTH];
    int lid = get_local_id(0);
    size_t t = get_group_id(1), at = get_group_id(0) * GATE_WIDTH;
    __global float *row = core + t * VALUES + at;
    const __global float *gate = mix + t * MIX + MIX_GATE_AT + at;
#if MAMBA
    w += at;
#endif
    for (int i = lid; i < GATE_WIDTH; i += WG) {
        x[i] = GATE_NORM == BEFORE_GATE ? row[i] : silu(gate[i] * SCALE_GATE) * row[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if GATE_NORM
    float scale = norm_scale(x, GATE_WIDTH, red);
#endif
    for (int i = lid; i < GATE_WIDTH; i += WG) {
        float y = x[i];
#if GATE_NORM
        y = y * scale * w[i];
#endif
        row[i] = (GATE_NORM == BEFORE_GATE ? silu(gate[i] * SCALE_GATE) * y : y) * SCALE_OUT;
    }
}
#endif
