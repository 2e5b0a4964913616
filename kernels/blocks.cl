// Put before `gemv` and `gemm`: what sixteen rows of a block of 32 columns of a quantised matrix hold, in the layout
// of src/numeric/quant/format.rs, which also says what is computed.
//
// A block's quants are W_BITS vectors of sixteen words, a word a row. Out of them come unsigned bytes, W_ZERO above the
// weight's integer. Blocks of W_SPAN columns share a run of W_RUN bytes of scales.

#if !W_DENSE

#if W_TYPE == W_Q4 || W_TYPE == W_Q4_1 || W_TYPE == W_Q4_K
#define W_BITS 4
#elif W_TYPE == W_Q5_0 || W_TYPE == W_Q5_1 || W_TYPE == W_Q5_K
#define W_BITS 5
#elif W_TYPE == W_Q6_K
#define W_BITS 6
#else
#define W_BITS 8
#endif

#if W_TYPE == W_Q4
#define W_ZERO 8
#elif W_TYPE == W_Q5_0
#define W_ZERO 16
#elif W_TYPE == W_Q6_K
#define W_ZERO 32
#elif W_TYPE == W_Q8_0
#define W_ZERO 128
#else
#define W_ZERO 0
#endif

// Blocks, or their halves, have integer scales of their own.
#define W_LEVELS (W_TYPE == W_Q4_K || W_TYPE == W_Q5_K)
#define W_HALVES (W_TYPE == W_Q6_K)
// A floor is added to the weights of a block.
#define W_FLOORS (W_LEVELS || W_TYPE == W_Q4_1 || W_TYPE == W_Q5_1)

#if W_LEVELS
#define W_SPAN 256
#define W_RUN 320
#elif W_HALVES
#define W_SPAN 256
#define W_RUN 288
#elif W_FLOORS
#define W_SPAN 32
#define W_RUN 64
#else
#define W_SPAN 32
#define W_RUN 32
#endif

// Columns 4v to 4v + 3 of four rows, and those sixteen later. `w` points to these rows' words of the first vector.
#if W_BITS == 8
// Signed bytes: with the sign flipped they are 128 more.
#define LOW_BYTES(w, v) ((w)[(v) * 4] ^ 0x80808080u)
#define HIGH_BYTES(w, v) ((w)[(v) * 4 + 16] ^ 0x80808080u)
#else
#define LOW_NIBBLES(w, v) ((w)[(v) * 4] & 0x0f0f0f0fu)
#define HIGH_NIBBLES(w, v) ((w)[(v) * 4] >> 4 & 0x0f0f0f0fu)
#if W_BITS == 4
#define LOW_BYTES(w, v) LOW_NIBBLES(w, v)
#define HIGH_BYTES(w, v) HIGH_NIBBLES(w, v)
#elif W_BITS == 5
#define LOW_BYTES(w, v) (LOW_NIBBLES(w, v) | ((w)[16] >> (uint)(v) & 0x01010101u) << 4)
#define HIGH_BYTES(w, v) (HIGH_NIBBLES(w, v) | ((w)[16] >> (uint)((v) + 4) & 0x01010101u) << 4)
#else
#define LOW_BYTES(w, v) (LOW_NIBBLES(w, v) | ((w)[16] >> (uint)(2 * (v)) & 0x03030303u) << 4)
#define HIGH_BYTES(w, v) (HIGH_NIBBLES(w, v) | ((w)[20] >> (uint)(2 * (v)) & 0x03030303u) << 4)
#endif
#endif

// The same word of activations times the bytes of four rows.
int4 dots(uint4 rows, uint acts, int4 acc) {
    return (int4)(dot4(rows.x, acts, acc.x), dot4(rows.y, acts, acc.y), dot4(rows.z, acts, acc.z),
                  dot4(rows.w, acts, acc.w));
}

// The run of scales of block `b`; `group` are those of a group of rows.
#define RUN_OF(group, b) ((group) + (b) * 32 / W_SPAN * W_RUN)
#define PART_OF(b) ((b) % (W_SPAN / 32) * 32)

// What the sums of block `b` of rows `4 * quad..` of a group are multiplied with, and then with the activations' scale.
float4 level_of(const __global uchar *group, int b, int quad) {
    const __global uchar *run = RUN_OF(group, b);
    float4 d = vload_half4(quad, (const __global half *)run);
#if W_LEVELS
    d *= convert_float4(vload4(quad, run + 64 + PART_OF(b)));
#endif
    return d;
}

#if W_FLOORS
// What is added to all weights of the block.
float4 floor_of(const __global uchar *group, int b, int quad) {
    const __global uchar *run = RUN_OF(group, b);
    float4 m = vload_half4(quad + 4, (const __global half *)run);
#if W_LEVELS
    m = -(m * convert_float4(vload4(quad, run + 80 + PART_OF(b))));
#endif
    return m;
}
#endif

#if W_HALVES
// What the sum of a half of the block is multiplied with before they are added up.
int4 scale_of_half(const __global uchar *group, int b, int quad, int half_at) {
    const __global char *run = (const __global char *)RUN_OF(group, b);
    return convert_int4(vload4(quad, run + 32 + PART_OF(b) + 16 * half_at));
}
#endif

// The sum of sixteen activations.
int sum_of(uint4 acts) {
    int sum = dot4(0x01010101u, acts.x, dot4(0x01010101u, acts.y, 0));
    return dot4(0x01010101u, acts.z, dot4(0x01010101u, acts.w, sum));
}
#endif
