// Heads and their rows in the cache: norm, RoPE, rotation, and the KV types of src/numeric/kv.rs. These are work-group
// functions: every work-item calls them with the same arguments, and rows are in local memory, HEAD_DIM apart. If `on`
// is false they change nothing but still execute their barriers, because PoCL 3.1 miscompiles conditional barriers.

#if !defined(K_TYPE) || !defined(V_TYPE) || !defined(K_ROW) || !defined(V_ROW) || !defined(KV_BLOCK)
#error a property of the cache is not defined
#endif
#define T_F32 0
#define T_F16 1
#define T_Q8 2
#define T_Q6 3
#define T_Q5 4
#define T_Q4 5
// True for types stored in blocks with a scale each.
#define IS_IN_BLOCKS(type) ((type) >= T_Q8)
#define K_ROTATED (K_TYPE > T_Q8)
#define V_ROTATED (V_TYPE > T_Q8)
// Bits of an integer that follow the low four bits of all integers of a block, and the bytes that they take.
#define HIGH_BITS(type) ((type) == T_Q6 ? 2 : (type) == T_Q5 ? 1 : 0)
#define HIGH_BYTES(type) ((HIGH_BITS(type) * KV_BLOCK + 7) / 8)
// Largest power of two that divides HEAD_DIM: the number of elements mixed by a rotation.
#define RUN (HEAD_DIM & -HEAD_DIM)

#define BLOCK_BYTES(type) \
    ((type) == T_F32 ? 4 * KV_BLOCK : (type) == T_F16 ? 2 * KV_BLOCK : (type) == T_Q8 ? 2 + KV_BLOCK \
                                                                     : 2 + KV_BLOCK / 2 + HIGH_BYTES(type))

#ifndef ROPE_WIDTH
#define ROPE_WIDTH ROPE_DIM
#endif

// First columns of the projected key and value of a head. In a layer whose values are its keys, several heads may repeat
// a projected one.
#ifdef PROJECTED_KV_HEADS
#define KEY_AT(kv_head) (Q_PAD + (kv_head) * PROJECTED_KV_HEADS / KV_HEADS * HEAD_DIM)
#define VALUE_AT(kv_head) KEY_AT(kv_head)
#else
#define KEY_AT(kv_head) (Q_PAD + (kv_head) * HEAD_DIM)
#define VALUE_AT(kv_head) (KEY_AT(kv_head) + KV_PAD)
#endif

// Copies `heads` heads to local memory; zeros follow the elements of narrower ones.
void load_heads(const __global float *from, __local float *x, int heads) {
    for (int i = get_local_id(0); i < heads * HEAD_DIM; i += WG)
        x[i] = HEAD_WIDTH == HEAD_DIM || i % HEAD_DIM < HEAD_WIDTH ? from[i] : 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
}

// RMS norm of each of `heads` heads, with weights unless `w` is null. `red` has 16 elements per head.
void norm_heads(__local float *x, const __global float *w, int heads, __local float *red, bool on) {
    int lid = get_local_id(0);
    for (int i = lid; i < heads * 16; i += WG) {
        const __local float *head = x + i / 16 * HEAD_DIM;
        float squares = 0.0f;
        for (int d = i % 16; d < HEAD_DIM; d += 16) squares = fma(head[d], head[d], squares);
        red[i] = squares;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = lid; i < heads * HEAD_DIM; i += WG) {
        float sum = sum_lanes(red + 16 * (i / HEAD_DIM));
        float scale = divide(1.0f, sqrt_rn(divide(sum, (float)HEAD_WIDTH) + NORM_EPS));
        if (on) x[i] = w ? x[i] * scale * w[i % HEAD_DIM] : x[i] * scale;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// RoPE: rotates element i with element i + ROPE_WIDTH / 2. `angles` is [cos: ANGLES | sin: ANGLES], starting with the
// first angle of this layer.
void rope_heads(__local float *x, const __global float *angles, int heads, bool on) {
    const int half_dim = ROPE_WIDTH / 2;
    for (int d = get_local_id(0); d < half_dim; d += WG) {
        float c = angles[d], s = angles[ANGLES + d];
        for (int h = 0; h < heads; h++) {
            __local float *head = x + h * HEAD_DIM;
            float a = head[d], b = head[d + half_dim];
            if (on) {
                head[d] = fma(a, c, -(b * s));
                head[d + half_dim] = fma(b, c, a * s);
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Walsh-Hadamard transform of runs of RUN elements, scaled to be its own inverse.
void rotate_heads(__local float *x, int heads, bool on) {
    int lid = get_local_id(0);
    for (int step = 1; step < RUN; step *= 2) {
        for (int i = lid; i < heads * HEAD_DIM / 2; i += WG) {
            int at = i / step * (2 * step) + i % step;
            float a = x[at], b = x[at + step];
            if (on) {
                x[at] = a + b;
                x[at + step] = a - b;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (int i = lid; i < heads * HEAD_DIM; i += WG) x[i] *= on ? ROTATION : 1.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Calibration of a KV head: [mean | scale | inverse][HEAD_DIM], explained in src/model/weights/calibration.rs.
#define CALIBRATION (3 * HEAD_DIM)

#if SINKS
// Behind the calibration of a layer: the sinks of its heads, then the mean key of each KV head as it is stored, by
// whose product with a query scores are less.
float sink_score(const __global float *of_layer, const __local float *q, int stride, int head) {
    const __global float *sinks = of_layer + KV_HEADS * CALIBRATION, *mean = sinks + HEADS + head / GROUP * HEAD_DIM;
    float less = 0.0f;
#if K_ROTATED
    for (int i = 0; i < HEAD_DIM; i++) less += mean[i] * q[i * stride];
#endif
    return sinks[head] - less;
}
#endif

// Prepares the queries of a KV head's group to match the stored keys: norm, RoPE, scale, rotation. `calibration` is
// that of the KV head.
void prepare_queries(__local float *q, const __global float *w, const __global float *calibration,
                   const __global float *angles, int heads, __local float *red) {
#if QK_NORM == NORM_HEADS
    norm_heads(q, w, heads, red, true);
#endif
    rope_heads(q, angles, heads, true);
#if QK_NORM == NORM_AFTER_ROPE
    norm_heads(q, w, heads, red, true);
#endif
    for (int i = get_local_id(0); i < heads * HEAD_DIM; i += WG) {
        q[i] *= Q_SCALE;
#if QUERY_GROWTH && defined(ANGLES_AT)
        q[i] *= QUERY_FACTOR(angles);
#endif
#if K_ROTATED
        q[i] *= calibration[2 * HEAD_DIM + i % HEAD_DIM];
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if K_ROTATED
    rotate_heads(q, heads, true);
#endif
}

// Prepares a key for storing.
void prepare_key(__local float *k, const __global float *w, const __global float *calibration,
               const __global float *angles, __local float *red) {
#if QK_NORM == NORM_HEADS
    norm_heads(k, w, 1, red, true);
#endif
    rope_heads(k, angles, 1, true);
#if QK_NORM == NORM_AFTER_ROPE
    norm_heads(k, w, 1, red, true);
#endif
#if K_ROTATED
    for (int i = get_local_id(0); i < HEAD_DIM; i += WG) k[i] = (k[i] - calibration[i]) * calibration[HEAD_DIM + i];
    barrier(CLK_LOCAL_MEM_FENCE);
    rotate_heads(k, 1, true);
#endif
}

// Prepares a value for storing.
void prepare_value(__local float *v, __local float *red) {
#if VALUE_NORM
    norm_heads(v, 0, 1, red, true);
#endif
#if V_ROTATED
    rotate_heads(v, 1, true);
#endif
}

void put_half(float x, __global uchar *to) {
    ushort bits;
    vstore_half_rte(clamp(x, -65504.0f, 65504.0f), 0, (__private half *)&bits);
    to[0] = bits & 255;
    to[1] = bits >> 8;
}

float round_to_half(float x) {
    ushort bits;
    vstore_half_rte(clamp(x, -65504.0f, 65504.0f), 0, (__private half *)&bits);
    return from_half(bits);
}

// Elements 16 * i.. of a head in local memory; zeros past its end.
float16 head16(const __local float *head, int i) {
    const __local float *e = head + 16 * i;
#if HEAD_DIM % 16 == 0
#define E(k) e[k]
#else
#define E(k) (16 * i + k < HEAD_DIM ? e[k] : 0.0f)
#endif
    return (float16)(E(0), E(1), E(2), E(3), E(4), E(5), E(6), E(7), E(8), E(9), E(10), E(11), E(12), E(13), E(14),
                     E(15));
#undef E
}

float max16(float16 x) {
    float8 a = fmax(x.lo, x.hi);
    float4 b = fmax(a.lo, a.hi);
    float2 c = fmax(b.lo, b.hi);
    return fmax(c.x, c.y);
}

// Candidate divisors: the largest value of a four-bit block divided by one of them is its scale. The candidate with the
// smallest squared error is chosen, the first of equal ones, and then refined by a fit to the rounded values; explained
// in src/numeric/simd/kv_row.rs.
#define CANDIDATES 9
__constant float divisors[CANDIDATES] = {8.0f, -8.0f, 7.5f, -8.5f, 8.5f, -9.0f, 9.0f, -9.5f, 9.5f};
// Runs of sixteen elements of a block. Zeros past its end change no sum.
#define BLOCK_RUNS ((KV_BLOCK + 15) / 16)
#define ROW_BLOCKS (HEAD_DIM / KV_BLOCK)

float inverse_q4(float scale) { return fabs(scale) >= 1.17549435e-38f ? divide(1.0f, scale) : 0.0f; }

// A candidate scale and its error.
float2 q4_error(const __local float *x, int candidate) {
    float16 up = 0.0f, down = 0.0f, errors = 0.0f;
    for (int i = 0; i < BLOCK_RUNS; i++) {
        up = fmax(up, head16(x, i));
        down = fmax(down, -head16(x, i));
    }
    // Of two values with equal magnitude, the negative one: -8 reaches further than 7.
    float most = max16(up), least = max16(down), value = least >= most ? -least : most;
    float d = round_to_half(divide(-value, divisors[candidate])), id = inverse_q4(d);
    for (int i = 0; i < BLOCK_RUNS; i++) {
        float16 e = head16(x, i), miss = clamp(rint(e * id), -8.0f, 7.0f) * d - e;
        errors = fma(miss, miss, errors);
    }
    return (float2)(d, sum16(errors));
}

// Scale of a block for which all candidates were tried, and the factor applied to its values before rounding, which is
// the inverse of the best candidate.
float2 scale_q4(const __local float *x, const __local float2 *tried) {
    float best = 0.0f, least = MAXFLOAT;
    for (int c = 0; c < CANDIDATES; c++) {
        if (tried[c].y < least) {
            best = tried[c].x;
            least = tried[c].y;
        }
    }
    float id = inverse_q4(best);
    float16 products = 0.0f, squares = 0.0f;
    for (int i = 0; i < BLOCK_RUNS; i++) {
        float16 e = head16(x, i), q = clamp(rint(e * id), -8.0f, 7.0f);
        products = fma(e, q, products);
        squares = fma(q, q, squares);
    }
    float all = sum16(squares);
    return (float2)(all > 0.0f ? round_to_half(divide(sum16(products), all)) : best, id);
}

// Largest integer of a type whose integers are symmetric.
#define LIMIT(type) ((type) == T_Q8 ? 127.0f : (type) == T_Q6 ? 31.0f : 15.0f)

// Scale of a block of eight, six or five bits, and its inverse.
float2 scale_symmetric(int type, const __local float *x) {
    float most = 0.0f;
    for (int i = 0; i < KV_BLOCK; i++) most = fmax(most, fabs(x[i]));
    float d = round_to_half(divide(most, LIMIT(type)));
    return (float2)(d, d > 0.0f ? divide(1.0f, d) : 0.0f);
}

// Factors of the sums so far (x) and of the sums of another chunk of slots (y), whose largest score is `most`; `m`
// becomes the largest score of all.
float2 rescale_chunk(float *m, float most) {
    float larger = fmax(*m, most);
    float2 weights = (float2)(exp_approx(*m - larger), exp_approx(most - larger));
    *m = larger;
    return weights;
}

// Element d of a head's attention, whose `chunks` chunks are merged in ascending order.
float merge_element(const __global float *partials, const __global float *ml, int chunks, int head, int d) {
    float m = LOWEST_SCORE, l = 0.0f, o = 0.0f;
    for (int c = 0; c < chunks; c++) {
        const __global float *part = ml + (c * HEADS + head) * 2;
        float2 w = rescale_chunk(&m, part[0]);
        l = fma(part[1], w.y, l * w.x);
        o = fma(partials[(size_t)(c * HEADS + head) * HEAD_DIM + d], w.y, o * w.x);
    }
    return divide(o, l);
}

// Scales of `blocks` blocks and their inverses, if `needed`: those of block b at scales[b * CANDIDATES].
void scale_blocks(int type, const __local float *x, int blocks, __local float2 *scales, bool needed) {
    int lid = get_local_id(0);
    if (type == T_Q4) {
        for (int i = lid; i < blocks * CANDIDATES; i += WG) {
            if (needed) scales[i] = q4_error(x + i / CANDIDATES * KV_BLOCK, i % CANDIDATES);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (IS_IN_BLOCKS(type)) {
        for (int b = lid; b < blocks; b += WG) {
            const __local float *block = x + b * KV_BLOCK;
            __local float2 *of_block = scales + b * CANDIDATES;
            if (needed) *of_block = type == T_Q4 ? scale_q4(block, of_block) : scale_symmetric(type, block);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

// Scales of a key and of the value after it, computed together if they have the same type.
void scale_rows(const __local float *key, __local float2 *scales, bool needed) {
    if (K_TYPE == V_TYPE) {
        scale_blocks(K_TYPE, key, 2 * ROW_BLOCKS, scales, needed);
    } else {
        scale_blocks(K_TYPE, key, ROW_BLOCKS, scales, needed);
        scale_blocks(V_TYPE, key + HEAD_DIM, ROW_BLOCKS, scales + ROW_BLOCKS * CANDIDATES, needed);
    }
}

// An element times the inverse of its block's scale as an integer of six, five or four bits, without sign.
int quantise(int type, float x, float id) {
    if (type == T_Q4) return (int)clamp(rint(x * id), -8.0f, 7.0f) + 8;
    return (int)clamp(rint(x * id), -LIMIT(type), LIMIT(type)) + (8 << HIGH_BITS(type));
}

// Stores one row of HEAD_DIM floats, whose scales are known, if `write`.
void store_row(int type, const __local float *x, __global uchar *row, const __local float2 *scales, bool write) {
    int lid = get_local_id(0);
    if (!write) return;
    if (IS_IN_BLOCKS(type)) {
        for (int b = lid; b < ROW_BLOCKS; b += WG) put_half(scales[b * CANDIDATES].x, row + b * BLOCK_BYTES(type));
    }
    if (type > T_Q8) {
        const int half_block = KV_BLOCK / 2;
        for (int i = lid; i < HEAD_DIM / 2; i += WG) {
            int b = i / half_block, z = i % half_block;
            const __local float *block = x + b * KV_BLOCK;
            float id = scales[b * CANDIDATES].y;
            int low = quantise(type, block[z], id) & 15, high = quantise(type, block[z + half_block], id) & 15;
            row[b * BLOCK_BYTES(type) + 2 + z] = (uchar)(low | high << 4);
        }
        for (int i = lid; i < ROW_BLOCKS * HIGH_BYTES(type); i += WG) {
            int b = i / max(HIGH_BYTES(type), 1), z = i % max(HIGH_BYTES(type), 1), bits = 0;
            for (int e = z, at = 0; e < KV_BLOCK; e += HIGH_BYTES(type), at += HIGH_BITS(type))
                bits |= quantise(type, x[b * KV_BLOCK + e], scales[b * CANDIDATES].y) >> 4 << at;
            row[b * BLOCK_BYTES(type) + 2 + half_block + z] = (uchar)bits;
        }
    } else {
        for (int i = lid; i < HEAD_DIM; i += WG) {
            if (type == T_F32) {
                ((__global float *)row)[i] = x[i];
            } else if (type == T_F16) {
                vstore_half_rte(x[i], i, (__global half *)row);
            } else {
                int b = i / KV_BLOCK;
                float q = clamp(rint(x[i] * scales[b * CANDIDATES].y), -127.0f, 127.0f);
                row[b * BLOCK_BYTES(T_Q8) + 2 + i % KV_BLOCK] = as_uchar((char)q);
            }
        }
    }
}

// Scale of block b of a stored row.
float scale_of_block(int type, const __global uchar *row, int b) {
    const __global uchar *from = row + b * BLOCK_BYTES(type);
#if KV_BLOCK == 32
    // Rows in such blocks are aligned to two bytes.
    return from_half(*(const __global ushort *)from);
#else
    return from_half(from[0] | (uint)from[1] << 8);
#endif
}

// Element d of a stored row, without the scale of its block.
float unscaled(int type, const __global uchar *row, int d) {
    if (type == T_F32) return ((const __global float *)row)[d];
    if (type == T_F16) return vload_half(d, (const __global half *)row);
    const __global uchar *block = row + d / KV_BLOCK * BLOCK_BYTES(type) + 2;
    int i = d % KV_BLOCK;
    if (type == T_Q8) return as_char(block[i]);
    const int half_block = KV_BLOCK / 2;
    uint pair = block[i < half_block ? i : i - half_block];
    int low = i < half_block ? pair & 15 : pair >> 4;
    if (type == T_Q4) return low - 8;
    const int bytes = max(HIGH_BYTES(type), 1), bits = HIGH_BITS(type);
    int high = block[half_block + i % bytes] >> bits * (i / bytes) & ((1 << bits) - 1);
    return (low | high << 4) - (8 << bits);
}

// Element d of a stored row.
float element(int type, const __global uchar *row, int d) {
    float e = unscaled(type, row, d);
    return IS_IN_BLOCKS(type) ? e * scale_of_block(type, row, d / KV_BLOCK) : e;
}

#if KV_BLOCK == 32
// Sixteen bytes of a stored row, with the widest loads that its alignment allows.
uint4 bytes16(const __global uchar *row, int at) {
#if HEAD_DIM % 64 == 0
    // So many blocks fill whole words, so an unaligned load never reads past the row.
    const __global uint *words = (const __global uint *)row + at / 4;
    uint4 first = vload4(0, words);
    return at % 4 == 0 ? first : first >> 16 | (uint4)(first.yzw, words[4]) << 16;
#else
    return as_uint4(vload8(0, (const __global ushort *)(row + at)));
#endif
}
#endif

// Elements 16 * i.. of a row as stored, so that they can be loaded before they are needed.
typedef struct {
#if KV_BLOCK == 32
    uint4 words[4];
    float scale;
#else
    float16 all;
#endif
} Stored16;

Stored16 stored16(int type, const __global uchar *row, int i) {
    Stored16 s;
#if KV_BLOCK == 32
    // Types without blocks are aligned to sixteen bytes.
    const __global uint4 *from = (const __global uint4 *)row;
    if (type == T_F32) {
        for (int k = 0; k < 4; k++) s.words[k] = from[4 * i + k];
    } else if (type == T_F16) {
        for (int k = 0; k < 2; k++) s.words[k] = from[2 * i + k];
    } else {
        s.scale = scale_of_block(type, row, i / 2);
        s.words[0] = bytes16(row, i / 2 * BLOCK_BYTES(type) + 2 + (type == T_Q8 ? i % 2 * 16 : 0));
        if (HIGH_BITS(type)) {
            const __global ushort *high = (const __global ushort *)(row + i / 2 * BLOCK_BYTES(type) + 18);
            s.words[1].x = high[0] | (uint)high[1] << 16;
            if (type == T_Q6) s.words[1].y = high[2] | (uint)high[3] << 16;
        }
    }
#else
    float lanes[16];
    for (int k = 0; k < 16; k++) lanes[k] = 16 * i + k < HEAD_DIM ? element(type, row, 16 * i + k) : 0.0f;
    s.all = vload16(0, lanes);
#endif
    return s;
}

// Converts them to floats; zeros past the end of the row.
float16 widened16(int type, Stored16 s, int i) {
#if KV_BLOCK == 32
    const uint4 *w = s.words;
    if (type == T_F32) return (float16)(as_float4(w[0]), as_float4(w[1]), as_float4(w[2]), as_float4(w[3]));
    if (type == T_F16) {
        uint8 halves = (uint8)(w[0], w[1]);
        return vload_half16(0, (const __private half *)&halves);
    }
    if (type == T_Q8) return convert_float16(as_char16(w[0])) * s.scale;
    uchar16 pairs = as_uchar16(w[0]);
    uchar16 low = i % 2 ? pairs >> (uchar)4 : pairs & (uchar)15;
    if (type == T_Q4) return (convert_float16(low) - 8.0f) * s.scale;
    uchar16 high;
    if (type == T_Q6) {
        uchar8 h = as_uchar8(w[1].xy) >> (uchar)(i % 2 * 4);
        high = (uchar16)(h, h >> (uchar)2) & (uchar)3;
    } else {
        uchar4 h = as_uchar4(w[1].x) >> (uchar)(i % 2 * 4);
        high = (uchar16)(h, h >> (uchar)1, h >> (uchar)2, h >> (uchar)3) & (uchar)1;
    }
    return (convert_float16(low | high << (uchar)4) - (float)(8 << HIGH_BITS(type))) * s.scale;
#else
    return s.all;
#endif
}

float16 row16(int type, const __global uchar *row, int i) { return widened16(type, stored16(type, row, i), i); }

#define RUNS ((HEAD_DIM + 15) / 16)
