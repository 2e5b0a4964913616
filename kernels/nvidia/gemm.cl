// Prefill, and few tokens times matrices of many rows, on NVIDIA's integer tensor cores (compute capability 8.0 and
// later): the steps and results of gemm.cl for packed Q4_0, with block sums by `mma.m16n8k32`. Compiled once per step,
// like gemm.cl.
//
// Sixteen rows of a packed block are one operand as stored: lane (row % 8, vector) of a warp loads the word of its
// vector and row, whose low nibbles are columns 4v.. and whose high nibbles are columns 16 + 4v.. . The nibbles are
// used unsigned; the accumulator starts at -8 times the sum of activations. It also includes the bits of 1.5 * 2^23 as
// a float, so that one subtraction converts the exact integer sum to a float: conversion instructions run at half the
// rate.
//
// Measured on an H200, 512 tokens of the Llama-3.2-1B shape, all matrices of 16 layers: 7.5 to 8.4 ms. Predicted were
// 2.4 ms for the scaling, twelve f32 operations per block, and less for the tensor cores.

#if !defined(ROWS) || !defined(COLS) || !defined(ROW_GROUPS) || !defined(WARPS) || !defined(TOKENS)
#error a shape of the matrix is not defined
#endif
#if WG != 32 * WARPS
#error WG is not 32 * WARPS
#endif

#define TOKEN_TILES (TOKENS / 8)
// Blocks in local memory at once.
#if BLOCKS % 8 == 0
#define DEPTH 8
#elif BLOCKS % 4 == 0
#define DEPTH 4
#else
#define DEPTH 1
#endif
#define MAGIC_FLOAT 0x4b400000

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *quants, const __global uchar *scales, __global float *state, const __global float *in,
    const __global float *in_scales, __global float *out, const __global float *extra, Part part) {
    __local uint a[DEPTH * TOKENS * 8]; // [block][token][word], words in the order 0 4 1 5 2 6 3 7
    __local float2 a_scales[DEPTH * TOKENS]; // [block][token], scale and start of the sum
    const int lid = get_local_id(0), lane = lid % 32, row = lane / 4, vector = lane % 4;
    const int first_group = (ROW_TILE(part) * WARPS + lid / 32) * ROW_GROUPS, first_token = TOKEN_TILE(part) * TOKENS;
    const int last_group = part.y * MATRICES - 1;
    float acc[ROW_GROUPS][TOKEN_TILES][4];
    for (int g = 0; g < ROW_GROUPS; g++)
        for (int n = 0; n < TOKEN_TILES; n++)
            for (int i = 0; i < 4; i++) acc[g][n][i] = 0.0f;

    for (int first = 0; first < BLOCKS; first += DEPTH) {
        // Load weights to registers while activations are copied to local memory.
        uint w[DEPTH][ROW_GROUPS][2];
        float d[DEPTH][ROW_GROUPS][2];
#pragma unroll
        for (int b = 0; b < DEPTH; b++) {
#pragma unroll
            for (int g = 0; g < ROW_GROUPS; g++) {
                size_t at = (size_t)min(first_group + g, last_group) * BLOCKS + first + b;
                const __global uint *words = quants + at * 64 + vector * 16 + row;
                w[b][g][0] = words[0];
                w[b][g][1] = words[8];
                d[b][g][0] = vload_half(at * 16 + row, (const __global half *)scales);
                d[b][g][1] = vload_half(at * 16 + row + 8, (const __global half *)scales);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lid; i < TOKENS * DEPTH; i += WG) {
            int t = i / DEPTH, b = i % DEPTH, token = min(first_token + t, part.z - 1);
            const __global uint *words = (const __global uint *)in + ((size_t)token * BLOCKS + first + b) * 8;
            uint4 low = vload4(0, words), high = vload4(1, words);
            int sum = 0;
            sum = dot4(0x01010101u, low.x, dot4(0x01010101u, low.y, sum));
            sum = dot4(0x01010101u, low.z, dot4(0x01010101u, low.w, sum));
            sum = dot4(0x01010101u, high.x, dot4(0x01010101u, high.y, sum));
            sum = dot4(0x01010101u, high.z, dot4(0x01010101u, high.w, sum));
            __local uint *to = a + (b * TOKENS + t) * 8;
            vstore4((uint4)(low.x, high.x, low.y, high.y), 0, to);
            vstore4((uint4)(low.z, high.z, low.w, high.w), 1, to);
            a_scales[b * TOKENS + t] = (float2)(in_scales[(size_t)token * BLOCKS + first + b],
                                                as_float(MAGIC_FLOAT - 8 * sum));
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (int b = 0; b < DEPTH; b++) {
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++) {
                uint2 x = vload2(0, a + (b * TOKENS + n * 8 + row) * 8 + vector * 2);
                float4 s = vload4(0, (__local float *)(a_scales + b * TOKENS + n * 8 + vector * 2));
#pragma unroll
                for (int g = 0; g < ROW_GROUPS; g++) {
                    uint w0 = w[b][g][0] & 0x0f0f0f0fu, w2 = (w[b][g][0] >> 4) & 0x0f0f0f0fu;
                    uint w1 = w[b][g][1] & 0x0f0f0f0fu, w3 = (w[b][g][1] >> 4) & 0x0f0f0f0fu;
                    int c0 = as_int(s.y), c1 = as_int(s.w), c2 = c0, c3 = c1;
                    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                        "{%0,%1,%2,%3};"
                        : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3)
                        : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x.x), "r"(x.y));
                    const float bias = as_float(MAGIC_FLOAT);
                    acc[g][n][0] = fma(as_float(c0) - bias, d[b][g][0] * s.x, acc[g][n][0]);
                    acc[g][n][1] = fma(as_float(c1) - bias, d[b][g][0] * s.z, acc[g][n][1]);
                    acc[g][n][2] = fma(as_float(c2) - bias, d[b][g][1] * s.x, acc[g][n][2]);
                    acc[g][n][3] = fma(as_float(c3) - bias, d[b][g][1] * s.z, acc[g][n][3]);
                }
            }
        }
    }
    // Lane (row, vector) holds rows `row` and `row + 8` of tokens 2 * vector and the next.
    for (int g = 0; g < ROW_GROUPS; g++) {
        for (int n = 0; n < TOKEN_TILES; n++) {
            for (int i = 0; i < 4; i++) {
                int token = first_token + n * 8 + vector * 2 + i % 2;
                int local_row = (first_group + g) * 16 + row + i / 2 * 8;
                if (token < part.z) store_output(state, out, extra, part.xy, local_row, token, acc[g][n][i]);
            }
        }
    }
}
