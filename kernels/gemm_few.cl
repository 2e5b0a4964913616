// Few tokens times a matrix of blocks: the steps and results of gemm.cl, for passes that read all weights for one token
// of each sequence or for a draft. Speed then depends on many work-items reading weights at the same time, and only
// once: a work-group has sixteen rows and up to TOKENS tokens, and computes the sums of SLICES blocks at a time. They
// are exact integers and stay in local memory until one work-item per row and token adds them in ascending order, which
// gives the CPU's result.
//
// in_sums: [token][BLOCKS], sums of the halves of a block
// TENSOR  computes block sums of 4-bit formats on NVIDIA's integer tensor cores: see nvidia/gemm.cl

#if !defined(ROWS) || !defined(COLS) || !defined(TOKENS) || !defined(SLICES)
#error a shape of the matrix is not defined
#endif
#if WG != 4 * SLICES || WG < 16 * TOKENS || TOKENS % 4 != 0
#error the items do not fit the rows and tokens
#endif

// Words per block of a group.
#define WORDS (16 * W_BITS)
// Distance between the sums of two tokens, chosen so that neither writers nor readers have bank conflicts.
#define PITCH (SLICES * 16 + 4)
#define ACTS_PITCH (SLICES + 1)

#if defined(TENSOR) && W_BITS == 4 && !W_HALF_SCALES && TOKENS == 8
#define USES_TENSOR_CORES 1
#define BLOCKS_PER_LANE 8
#else
#define USES_TENSOR_CORES 0
#endif

// Scale of a block of activations, and its sum or the sums of its halves.
#if W_SCALES == W_HALF_MINIMUMS
typedef float3 Acts;
#define ACTS_OF(scale, sums) (float3)(scale, (float)(sums).x, (float)(sums).y)
#else
typedef float2 Acts;
#define ACTS_OF(scale, sums) (float2)(scale, (float)((sums).x + (sums).y))
#endif

#if USES_TENSOR_CORES
// Words of eight blocks that a work-item loads for its warp, starting at block `first`.
void load_words(const __global uint *of_group, int first, uint2 *held) {
    const int lane = get_local_id(0) % 32;
    UNROLL
    for (int k = 0; k < BLOCKS_PER_LANE; k++) {
        const __global uint *words = of_group + min(first + k, BLOCKS - 1) * WORDS + lane % 4 * 16 + lane / 4;
        held[k] = (uint2)(words[0], words[8]);
    }
}
#else
void load_words(const __global uint4 *of_group, int block, uint4 *held) {
    const __global uint4 *words = of_group + min(block, BLOCKS - 1) * (WORDS / 4) + get_local_id(0) % 4;
    UNROLL
    for (int v = 0; v < W_BITS; v++) held[v] = words[v * 4];
}
#endif

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void gemm(
    const __global uint *quants, const __global uchar *scales, __global float *state, const __global uint *in,
    const __global float *in_scales, __global float *out, const __global float *extra, const __global int2 *in_sums,
    Part part) {
    __local float4 pool[TOKENS * PITCH / 4]; // [token][block][row], sums
    __local float4 block_scales[SLICES * 4];       // [block][row]
#if W_MINIMUMS
    __local Minimums minimums[SLICES * 4];
#endif
    __local Acts acts[TOKENS * ACTS_PITCH]; // [token][block]
    __local float *sums = (__local float *)pool;
    const int lid = get_local_id(0), quad = lid % 4, slice = lid / 4;
    const int group = ROW_TILE(part), first_token = TOKEN_TILE(part) * TOKENS;
    const int count = min(TOKENS, part.z - first_token);
    const __global uchar *of_group = scales + (size_t)group * W_GROUP_BYTES;
#if USES_TENSOR_CORES
    const __global uint *words = quants + (size_t)group * (BLOCKS * WORDS);
    uint2 held[BLOCKS_PER_LANE];
    const int lane = lid % 32, first_slice = lid / 32 * BLOCKS_PER_LANE;
    load_words(words, first_slice, held);
#else
    const __global uint4 *words = (const __global uint4 *)(quants + (size_t)group * (BLOCKS * WORDS));
    uint4 held[W_BITS];
    load_words(words, slice, held);
#endif
    // Result that this work-item adds up: of adjacent readers, half have a token whose sums are four further.
    const int row = lid % 16, token = lid / 16 % 2 * (TOKENS / 2) + lid / 32 % (TOKENS / 2);
    float acc = 0.0f;
    for (int first = 0; first < BLOCKS; first += SLICES) {
        // Past the end the last block is repeated, but not added.
        const int b = min(first + slice, BLOCKS - 1);
        block_scales[lid] = load_block_scale(of_group, b, quad);
#if W_MINIMUMS
        minimums[lid] = load_minimum(of_group, b, quad);
#endif
        for (int i = lid; i < TOKENS * SLICES; i += WG) {
            int at = min(first_token + i / SLICES, part.z - 1) * BLOCKS + min(first + i % SLICES, BLOCKS - 1);
            int2 sum = in_sums[at];
            acts[i / SLICES * ACTS_PITCH + i % SLICES] = ACTS_OF(in_scales[at], sum);
        }
#if USES_TENSOR_CORES
        // Work-item (row % 8, vector) has the words of its rows, and the words of the token with the same number as its
        // row.
        const __global uint *of_token = in + (size_t)min(first_token + lane / 4, part.z - 1) * (BLOCKS * 8) + lane % 4;
        __local float *to = sums + lane % 4 * (2 * PITCH) + first_slice * 16 + lane / 4;
        UNROLL
        for (int k = 0; k < BLOCKS_PER_LANE; k++) {
            const __global uint *x = of_token + min(first + first_slice + k, BLOCKS - 1) * 8;
            uint x0 = x[0], x1 = x[4], w0 = BYTES_OF_CODES(held[k].x & 0x0f0f0f0fu), w1 = BYTES_OF_CODES(held[k].y & 0x0f0f0f0fu);
            uint w2 = BYTES_OF_CODES(held[k].x >> 4 & 0x0f0f0f0fu), w3 = BYTES_OF_CODES(held[k].y >> 4 & 0x0f0f0f0fu);
            int c0 = 0, c1 = 0, c2 = 0, c3 = 0;
            asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+r"(c0), "+r"(c1), "+r"(c2), "+r"(c3)
                : "r"(w0), "r"(w1), "r"(w2), "r"(w3), "r"(x0), "r"(x1));
            to[k * 16] = (float)c0;
            to[k * 16 + PITCH] = (float)c1;
            to[k * 16 + 8] = (float)c2;
            to[k * 16 + PITCH + 8] = (float)c3;
        }
        load_words(words, first + SLICES + first_slice, held);
#else
        uint4 low[4], high[4];
        UNROLL
        for (int v = 0; v < 4; v++) {
            low[v] = LOW_BYTES(held, v);
            high[v] = HIGH_BYTES(held, v);
        }
        // Loaded while sums are added.
        load_words(words, first + SLICES + slice, held);
        UNROLL
        for (int t = 0; t < TOKENS; t++) {
            if (t >= count) continue;
            const __global uint *x = in + ((size_t)(first_token + t) * BLOCKS + b) * 8;
            const uint4 x_low = vload4(0, x), x_high = vload4(1, x);
            // Sums of the halves are separate if they have scales of their own.
            int4 sum[1 + W_HALF_SCALES];
            sum[0] = sum[W_HALF_SCALES] = 0;
            sum[0] = dot4_rows(low[3], x_low.w, dot4_rows(low[2], x_low.z, dot4_rows(low[1], x_low.y, dot4_rows(low[0], x_low.x, sum[0]))));
            sum[W_HALF_SCALES] = dot4_rows(high[1], x_high.y, dot4_rows(high[0], x_high.x, sum[W_HALF_SCALES]));
            sum[W_HALF_SCALES] = dot4_rows(high[3], x_high.w, dot4_rows(high[2], x_high.z, sum[W_HALF_SCALES]));
#if W_HALF_SCALES
            int2 of_acts = in_sums[(first_token + t) * BLOCKS + b];
            float4 low_sum = convert_float4(sum[0] - W_ZERO * of_acts.x);
            float4 high_sum = convert_float4(sum[1] - W_ZERO * of_acts.y);
            pool[t * (PITCH / 4) + lid] =
                ADD_HALVES(low_sum, high_sum, load_half_scale(of_group, b, quad, 0), load_half_scale(of_group, b, quad, 1));
#else
            pool[t * (PITCH / 4) + lid] = convert_float4(sum[0]);
#endif
        }
#endif
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < 16 * TOKENS && token < count) {
            const __local float *of_row = sums + token * PITCH + row;
            const __local float *block_scale = (const __local float *)block_scales + row;
#if W_MINIMUMS
            const int in_quad = sizeof(Minimums) / sizeof(float);
            const __local float *of_minimum = (const __local float *)minimums + row / 4 * in_quad + row % 4;
#endif
            const __local Acts *of_token = acts + token * ACTS_PITCH;
            int blocks = min(SLICES, BLOCKS - first);
            for (int i = 0; i < blocks; i++) {
                Acts of_acts = of_token[i];
#if W_HALF_SCALES
                float sum = of_row[i * 16];
#else
                // Exact: both are integers below 2^24.
                float sum = of_row[i * 16] - (float)W_ZERO * of_acts.y;
#endif
                acc = fma(sum, block_scale[i * 16] * of_acts.x, acc);
#if W_MINIMUMS
                const __local float *m = of_minimum + i * 4 * in_quad;
#if W_HALF_SCALES
                acc = fma(m[4] * of_acts.y + m[8] * of_acts.z, m[0] * of_acts.x, acc);
#else
                acc = fma(m[0], of_acts.x * of_acts.y, acc);
#endif
#endif
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lid < 16 * TOKENS && token < count) {
        store_output(state, out, extra, part.xy, group * 16 + row, first_token + token, acc);
    }
}
