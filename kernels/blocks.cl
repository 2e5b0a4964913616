// Placed before `gemv` and `gemm`: the content of sixteen rows of a block of 32 columns of a quantised matrix, in the
// layout of src/numeric/quant/format.rs, which also defines the result.
//
// The quants of a block are W_BITS vectors of sixteen words, one word per row. They are unpacked to unsigned bytes,
// which are W_ZERO above the integer weight. The blocks of W_SUPERBLOCK columns share a run of scales, of W_SCALE_BYTES
// bytes.

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
#elif W_TYPE == W_Q8_0 && !defined(DOT_ARM)
#define W_ZERO 128
#else
#define W_ZERO 0
#endif

// Blocks, or their halves, have integer scales of their own.
#define W_BLOCK_SCALES (W_TYPE == W_Q4_K || W_TYPE == W_Q5_K)
#define W_HALF_SCALES (W_TYPE == W_Q6_K)
// A minimum is added to the weights of a block.
#define W_MINIMUMS (W_BLOCK_SCALES || W_TYPE == W_Q4_1 || W_TYPE == W_Q5_1)

#if W_BLOCK_SCALES
#define W_SUPERBLOCK 256
#define W_SCALE_BYTES 320
#elif W_HALF_SCALES
#define W_SUPERBLOCK 256
#define W_SCALE_BYTES 288
#elif W_MINIMUMS
#define W_SUPERBLOCK 32
#define W_SCALE_BYTES 64
#else
#define W_SUPERBLOCK 32
#define W_SCALE_BYTES 32
#endif

// Rows of a work-item: four of a vector's sixteen words, or one.
#ifndef ROWS_PER_ITEM
#define ROWS_PER_ITEM 4
#endif
#if ROWS_PER_ITEM == 4
typedef uint4 Words;
typedef int4 Ints;
typedef float4 Floats;
#define TO_FLOATS convert_float4
#else
typedef uint Words;
typedef int Ints;
typedef float Floats;
#define TO_FLOATS convert_float
#endif
// Vector v of a block, limited to the work-item's rows. `w` points to the words of the first vector, or is their index
// if the matrix is read as an image.
#ifdef W_IMAGE
#define QUANTS_OF(words) __read_only image1d_buffer_t
#if ROWS_PER_ITEM == 4
#define QUANT_WORDS(w, v) read_imageui(quants, (w) + (v) * 4)
#else
#define QUANT_WORDS(w, v) read_imageui(quants, (w) + (v) * 16).x
#endif
#else
#define QUANTS_OF(words) const __global words *
#ifdef W_HELD
// `w` holds the vectors of the work-item's rows, in registers.
#define QUANT_WORDS(w, v) (w)[v]
#else
#define QUANT_WORDS(w, v) (w)[(v) * (16 / ROWS_PER_ITEM)]
#endif
#endif

// Columns 4v to 4v + 3 of the work-item's rows, and the columns sixteen later.
#if W_BITS == 8 && !W_ZERO
#define LOW_BYTES(w, v) QUANT_WORDS(w, v)
#define HIGH_BYTES(w, v) QUANT_WORDS(w, (v) + 4)
#elif W_BITS == 8
// Signed bytes: flipping the sign bit adds 128.
#define LOW_BYTES(w, v) (QUANT_WORDS(w, v) ^ 0x80808080u)
#define HIGH_BYTES(w, v) (QUANT_WORDS(w, (v) + 4) ^ 0x80808080u)
#else
#define LOW_NIBBLES(w, v) (QUANT_WORDS(w, v) & 0x0f0f0f0fu)
#define HIGH_NIBBLES(w, v) (QUANT_WORDS(w, v) >> 4 & 0x0f0f0f0fu)
#if W_BITS == 4
#define LOW_BYTES(w, v) LOW_NIBBLES(w, v)
#define HIGH_BYTES(w, v) HIGH_NIBBLES(w, v)
#elif W_BITS == 5
#define LOW_BYTES(w, v) (LOW_NIBBLES(w, v) | (QUANT_WORDS(w, 4) >> (uint)(v) & 0x01010101u) << 4)
#define HIGH_BYTES(w, v) (HIGH_NIBBLES(w, v) | (QUANT_WORDS(w, 4) >> (uint)((v) + 4) & 0x01010101u) << 4)
#else
#define LOW_BYTES(w, v) (LOW_NIBBLES(w, v) | (QUANT_WORDS(w, 4) >> (uint)(2 * (v)) & 0x03030303u) << 4)
#define HIGH_BYTES(w, v) (HIGH_NIBBLES(w, v) | (QUANT_WORDS(w, 5) >> (uint)(2 * (v)) & 0x03030303u) << 4)
#endif
#endif

// Product of one word of activations and the bytes of the rows.
#if ROWS_PER_ITEM == 1
#define dot4_rows dot4
#else
int4 dot4_rows(uint4 rows, uint acts, int4 acc) {
    return (int4)(dot4(rows.x, acts, acc.x), dot4(rows.y, acts, acc.y), dot4(rows.z, acts, acc.z),
                  dot4(rows.w, acts, acc.w));
}
#endif

// Run of scales of block `b`; `group` points to the scales of a group of rows.
#define SCALES_OF(group, b) ((group) + (b) * 32 / W_SUPERBLOCK * W_SCALE_BYTES)
#define SCALE_OFFSET(b) ((b) % (W_SUPERBLOCK / 32) * 32)

#if ROWS_PER_ITEM == 4
#define LOAD_F16(run, i) vload_half4(i, (const __global half *)(run))
#define LOAD_U8(p, i) convert_float4(vload4(i, p))
#define LOAD_I8(p, i) convert_int4(vload4(i, p))
#else
#define LOAD_F16(run, i) vload_half(i, (const __global half *)(run))
#define LOAD_U8(p, i) convert_float((p)[i])
#define LOAD_I8(p, i) convert_int((p)[i])
#endif

// Factor for the sums of block `b` of the work-item's rows, before the activations' scale. `at` counts the work-items
// of a group.
Floats load_block_scale(const __global uchar *group, int b, int at) {
    const __global uchar *run = SCALES_OF(group, b);
    Floats d = LOAD_F16(run, at);
#if W_BLOCK_SCALES
    d *= LOAD_U8(run + 64 + SCALE_OFFSET(b), at);
#endif
    return d;
}

#if W_MINIMUMS
// Value added to all weights of the block.
Floats load_minimum(const __global uchar *group, int b, int at) {
    const __global uchar *run = SCALES_OF(group, b);
    Floats m = LOAD_F16(run, at + 16 / ROWS_PER_ITEM);
#if W_BLOCK_SCALES
    m = -(m * LOAD_U8(run + 80 + SCALE_OFFSET(b), at));
#endif
    return m;
}
#endif

#if W_HALF_SCALES
// Factor for the sum of a half of the block, before the halves are added.
Ints load_half_scale(const __global uchar *group, int b, int at, int half_at) {
    const __global char *run = (const __global char *)SCALES_OF(group, b);
    return LOAD_I8(run + 32 + SCALE_OFFSET(b) + 16 * half_at, at);
}
#endif
#endif
