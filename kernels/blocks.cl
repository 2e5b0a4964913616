// Placed before `gemv` and `gemm`: the content of sixteen rows of a block of 32 columns of a quantised matrix, in the
// layout of src/numeric/quant/format.rs, which also defines the result.
//
// W_BITS         bits of a stored integer: a block has as many vectors of sixteen words, one word per row
// W_WEIGHT_BITS  bits of the integers that are multiplied: unsigned bytes, W_ZERO above the weight
// W_LEVELS_0     if stored integers are codes: the sixteen bytes that they stand for, in four words, W_LEVELS_0 first
// W_SCALES       kind of scales, as below
// W_SUPERBLOCK   columns that share a run of W_SCALE_BYTES bytes of scales
// W_GROUP_BYTES  bytes of scales of a group of rows
// W_FACTOR       factor of all scales

#if !W_DENSE
#define W_PLAIN 0
#define W_MINIMUM 1
#define W_BLOCKS 2
#define W_HALVES 3
#define W_BLOCK_MINIMUMS 4
#define W_HALF_MINIMUMS 5
#define W_EXPONENTS 6
#define W_MINIFLOATS 7
// The halves of a block have scales of their own.
#define W_HALF_SCALES (W_SCALES == W_HALVES || W_SCALES == W_HALF_MINIMUMS || W_SCALES == W_MINIFLOATS)
// A minimum is added to the weights of a block.
#define W_MINIMUMS (W_SCALES == W_MINIMUM || W_SCALES == W_BLOCK_MINIMUMS || W_SCALES == W_HALF_MINIMUMS)
#if W_WEIGHT_BITS == 8 && defined(DOT_ARM)
// Signed bytes.
#undef W_ZERO
#define W_ZERO 0
#define W_FLIPPED 0x80808080u
#else
#define W_FLIPPED 0u
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

#ifdef W_LEVELS_0
__constant uint levels[4] = {W_LEVELS_0 ^ W_FLIPPED, W_LEVELS_1 ^ W_FLIPPED, W_LEVELS_2 ^ W_FLIPPED,
                             W_LEVELS_3 ^ W_FLIPPED};
// Bytes that four codes stand for.
uint look_up(uint codes) {
#ifdef DOT_PTX
    // Pairs of codes move together; then `prmt` looks up four bytes by three bits each, and the fourth bit selects.
    uint pairs = codes | codes >> 4, of_eight, of_others, others;
    asm("prmt.b32 %0, %0, 0, 0x4420;" : "+r"(pairs));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(of_eight) : "r"(levels[0]), "r"(levels[1]), "r"(pairs & 0x7777u));
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(of_others) : "r"(levels[2]), "r"(levels[3]), "r"(pairs & 0x7777u));
    others = (codes >> 3 & 0x01010101u) * 255u;
    return (of_eight & ~others) | (of_others & others);
#else
    const __constant uchar *bytes = (const __constant uchar *)levels;
    return bytes[codes & 15] | (uint)bytes[codes >> 8 & 15] << 8 | (uint)bytes[codes >> 16 & 15] << 16 |
           (uint)bytes[codes >> 24 & 15] << 24;
#endif
}
#define BYTES_OF_CODES(codes) look_up(codes)
#if ROWS_PER_ITEM == 1
#define TO_BYTES(codes) look_up(codes)
#else
uint4 look_up4(uint4 codes) {
    return (uint4)(look_up(codes.x), look_up(codes.y), look_up(codes.z), look_up(codes.w));
}
#define TO_BYTES(codes) look_up4(codes)
#endif
#else
#define BYTES_OF_CODES(codes) (codes)
#define TO_BYTES(codes) (codes)
#endif

// Columns 4v to 4v + 3 of the work-item's rows, and the columns sixteen later. Integers are the sum of a nibble, two
// bits and one bit, as W_BITS has them.
#if W_BITS == 8
// Signed bytes: flipping the sign bit adds 128.
#define LOW_BYTES(w, v) (QUANT_WORDS(w, v) ^ 0x80808080u ^ W_FLIPPED)
#define HIGH_BYTES(w, v) (QUANT_WORDS(w, (v) + 4) ^ 0x80808080u ^ W_FLIPPED)
#else
#if W_BITS & 4
#define LOW_NIBBLES(w, v) (QUANT_WORDS(w, v) & 0x0f0f0f0fu)
#define HIGH_NIBBLES(w, v) (QUANT_WORDS(w, v) >> 4 & 0x0f0f0f0fu)
#else
#define LOW_NIBBLES(w, v) 0u
#define HIGH_NIBBLES(w, v) 0u
#endif
#if W_BITS & 2
#define TWO_BITS(w, half_at, v) \
    ((QUANT_WORDS(w, (W_BITS & 4) + (half_at)) >> (uint)(2 * (v)) & 0x03030303u) << (W_BITS & 4))
#else
#define TWO_BITS(w, half_at, v) 0u
#endif
#if W_BITS & 1
#define ONE_BIT(w, v) ((QUANT_WORDS(w, W_BITS & 6) >> (uint)(v) & 0x01010101u) << (W_BITS & 6))
#else
#define ONE_BIT(w, v) 0u
#endif
#define LOW_BYTES(w, v) TO_BYTES(LOW_NIBBLES(w, v) | TWO_BITS(w, 0, v) | ONE_BIT(w, v))
#define HIGH_BYTES(w, v) TO_BYTES(HIGH_NIBBLES(w, v) | TWO_BITS(w, 1, v) | ONE_BIT(w, (v) + 4))
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
#define LOAD_U8(p, i) convert_uint4(vload4(i, p))
#define LOAD_I8(p, i) convert_float4(vload4(i, (const __global char *)(p)))
#define AS_FLOATS as_float4
#define FROM_HALVES(bits) \
    (float4)(from_half((bits).x), from_half((bits).y), from_half((bits).z), from_half((bits).w))
#else
#define LOAD_F16(run, i) vload_half(i, (const __global half *)(run))
#define LOAD_U8(p, i) convert_uint((p)[i])
#define LOAD_I8(p, i) convert_float(((const __global char *)(p))[i])
#define AS_FLOATS as_float
#define FROM_HALVES from_half
#endif

// Factor for the sums of block `b` of the work-item's rows, before the activations' scale. `at` counts the work-items
// of a group.
Floats load_block_scale(const __global uchar *group, int b, int at) {
    const __global uchar *run = SCALES_OF(group, b);
#if W_SCALES == W_MINIFLOATS
    return (Floats)(W_FACTOR);
#elif W_SCALES == W_EXPONENTS
    return AS_FLOATS(max(LOAD_U8(run, at) << 23, (Words)(1u << 22))) * W_FACTOR;
#elif W_SCALES == W_BLOCKS
    return LOAD_F16(run, at) * W_FACTOR * LOAD_I8(run + 32 + SCALE_OFFSET(b) / 2, at);
#elif W_SCALES == W_BLOCK_MINIMUMS
    return LOAD_F16(run, at) * TO_FLOATS(LOAD_U8(run + 64 + SCALE_OFFSET(b), at));
#else
    return LOAD_F16(run, at) * W_FACTOR;
#endif
}

#if W_HALF_SCALES
// Factor for the sum of a half of the block, before the halves are added.
Floats load_half_scale(const __global uchar *group, int b, int at, int half_at) {
    const __global uchar *run = SCALES_OF(group, b);
#if W_SCALES == W_MINIFLOATS
    return FROM_HALVES(LOAD_U8(run + 16 * half_at, at) << 7);
#elif W_SCALES == W_HALF_MINIMUMS
    return TO_FLOATS(LOAD_U8(run + 64 + SCALE_OFFSET(b) + 16 * half_at, at) & 15u);
#else
    return LOAD_I8(run + 32 + SCALE_OFFSET(b) + 16 * half_at, at);
#endif
}

// Sum of a block from the sums of its halves and their scales.
#define ADD_HALVES(low, high, low_scale, high_scale) fma(high, high_scale, (low) * (low_scale))
#endif

#if W_MINIMUMS
// Value added to all weights of the block, or the factor of the values of its halves.
typedef struct {
    Floats d;
#if W_SCALES == W_HALF_MINIMUMS
    Floats low, high;
#endif
} Minimums;

Minimums load_minimum(const __global uchar *group, int b, int at) {
    const __global uchar *run = SCALES_OF(group, b);
    Minimums m;
    m.d = LOAD_F16(run, at + 16 / ROWS_PER_ITEM);
#if W_SCALES == W_BLOCK_MINIMUMS
    m.d = -(m.d * TO_FLOATS(LOAD_U8(run + 80 + SCALE_OFFSET(b), at)));
#elif W_SCALES == W_HALF_MINIMUMS
    m.d = -m.d;
    m.low = TO_FLOATS(LOAD_U8(run + 64 + SCALE_OFFSET(b), at) >> 4);
    m.high = TO_FLOATS(LOAD_U8(run + 80 + SCALE_OFFSET(b), at) >> 4);
#endif
    return m;
}

// Adds the minimums of a block, whose activations have these sums in its halves and this scale.
#if W_SCALES == W_HALF_MINIMUMS
// Sums of the halves are integers: exact.
#define ADD_MINIMUMS(acc, m, low_acts, high_acts, d_a) \
    fma((m).low * (float)(low_acts) + (m).high * (float)(high_acts), (m).d * (d_a), acc)
#else
#define ADD_MINIMUMS(acc, m, low_acts, high_acts, d_a) fma((m).d, (d_a) * ((float)(low_acts) + (float)(high_acts)), acc)
#endif
#endif
#endif
