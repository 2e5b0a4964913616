// Prefill: converts the inputs of a matrix, one work-group per token; quantises them if the matrix is quantised.
//
// INPUT_NORM   norm of the residual
// INPUT_RESIDUAL the residual itself
// INPUT_ATT    attention's output
// INPUT_ROWS   rows as they are: a recurrent layer's output
// INPUT_FFN    silu(gate) * up, or the model's equivalent; with CHOSEN, of each choice of an expert
//
// out: acts [token][COLS / 32][8 words], scales [token][COLS / 32] and sums of the halves of blocks [token][COLS / 32],
// or floats [token][COLS]
// at: first token to read, first token to write

#if !defined(COLS) || !defined(QUANTISED)
#error a shape of the input is not defined
#endif

// Element i of the input.
#if defined(INPUT_NORM)
#define element(src, in, scale, i) NORMED((src)[i], scale, in, i, COLS)
#else
float element(const __global float *src, const __global float *in, float scale, int i) {
#if defined(CHOSEN)
    return activate(src[i], src[(FFN_MATRICES - 1) * COLS + i], in, i);
#elif defined(INPUT_FFN) && GATED
    return gated_up(src[i], src[FFN_PAD + i]);
#elif defined(INPUT_FFN) && MLP_BIAS
    return gated_up(src[i] + in[i], 0.0f);
#elif defined(INPUT_FFN)
    return gated_up(src[i], 0.0f);
#elif defined(INPUT_ATT)
    return src[ATT_COLUMN(i)] * ATTENTION_OUT_SCALE;
#else
    return src[i];
#endif
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void activations(
    const __global float *src, const __global float *in, __global float *out, __global float *scales,
    __global int2 *sums,
#ifdef CHOSEN
    const __global int2 *choices,
#endif
    int2 at) {
    __local float red[WG];
    int lid = get_local_id(0), from = at.x + get_group_id(0), to = at.y + get_group_id(0);
#if defined(INPUT_NORM)
    const __global float *row = ROW(src, from);
    __local float x[COLS];
    for (int i = lid; i < COLS; i += WG) x[i] = row[i];
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = SCALE_OF_NORM(x, COLS, red);
#define ELEMENTS x
#elif defined(INPUT_RESIDUAL)
    const __global float *row = ROW(src, from);
    float scale = 1.0f;
#elif defined(CHOSEN)
    const __global float *row = src + (size_t)from * (FFN_MATRICES * COLS);
    in += choices[from].x * COLS;
    float scale = 1.0f;
#elif defined(INPUT_FFN)
    const __global float *row = src + (size_t)from * (FFN_MATRICES * FFN_PAD);
    float scale = 1.0f;
#else
    // The row of narrower heads is as wide as that of others.
    const __global float *row = src + (size_t)from * (COLS / HEAD_WIDTH * HEAD_DIM + COLS % HEAD_WIDTH);
    float scale = 1.0f;
#endif
#ifndef ELEMENTS
#define ELEMENTS row
#endif
#if QUANTISED
    // Four adjacent work-items share a block; each holds eight of its columns.
#if QUANTISED == 2
    // As floats, for products that read floats.
    __global float *to_row = out + (size_t)to * COLS;
#define STORE_OCTET(q, o) vstore8(convert_float8(as_char8(q)), o, to_row)
#else
    __global uint *to_row = (__global uint *)out + (size_t)to * (COLS / 4);
#define STORE_OCTET(q, o) vstore2(q, o, to_row)
#endif
    for (int first_octet = 0; first_octet < COLS / 8; first_octet += WG) {
        int o = first_octet + lid;
        float8 v = 0.0f;
        if (o < COLS / 8) {
            float *e = (float *)&v;
            for (int i = 0; i < 8; i++) e[i] = element(ELEMENTS, in, scale, 8 * o + i);
        }
        red[lid] = max_abs8(v);
        barrier(CLK_LOCAL_MEM_FENCE);
        const __local float *of_block = red + lid / 4 * 4;
        float2 d = activation_scale(fmax(fmax(of_block[0], of_block[1]), fmax(of_block[2], of_block[3])));
        uint2 q = quantise8(v, d.y);
        barrier(CLK_LOCAL_MEM_FENCE);
        red[lid] = (float)sum_of_eight(q);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (o < COLS / 8) {
            size_t block = (size_t)to * (COLS / 32) + o / 4;
            STORE_OCTET(q, o);
            if (o % 4 == 0) {
                scales[block] = d.x;
#ifndef CHOSEN
                sums[block] = (int2)((int)(of_block[0] + of_block[1]), (int)(of_block[2] + of_block[3]));
#endif
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#else
    for (int i = lid; i < COLS; i += WG) out[(size_t)to * COLS + i] = element(ELEMENTS, in, scale, i);
#endif
}
